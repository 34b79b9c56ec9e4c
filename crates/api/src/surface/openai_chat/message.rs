//! The messages of a chat request.
//!
//! Owns: the conversion of OpenAI's message objects into those that templates read. Never: renders,
//! or copies more of a message than its position in the body.
//!
//! Content becomes one string: text parts are joined with newlines, as vLLM does for templates that
//! expect strings. `developer` becomes `system`, which templates know. The arguments of a tool
//! call, a string of JSON, become an object.

use crate::error::ApiError;
use crate::field::{JsonFields, clipped, wrong_type};
use crate::request::refuse_fields;
use cleave_text::TemplateValue;
use cleave_text::json::{Document, Json, JsonPart, JsonShape};
use std::borrow::Cow;

const ROLES: [&str; 5] = ["system", "developer", "user", "assistant", "tool"];
/// Optional texts of a message beside its content.
const TEXTS: [&str; 3] = ["name", "tool_call_id", "reasoning_content"];

/// Reads and checks the messages of a request; there is at least one.
pub(super) fn messages(fields: &JsonFields) -> Result<JsonPart, ApiError> {
    let missing = || ApiError::invalid("messages", "`messages` is missing.");
    let array = fields.any("messages").ok_or_else(missing)?;
    let mut count = 0;
    for (index, item) in fields.array("messages")?.into_iter().flatten().enumerate() {
        check_message(&fields.object_at(format!("messages[{index}]"), item)?)?;
        count += 1;
    }
    match count {
        0 => Err(ApiError::invalid(
            "messages",
            "`messages` must have at least one message.",
        )),
        _ => Ok(fields.part(array)),
    }
}

/// Returns the list that templates read.
pub(super) fn list(messages: JsonPart) -> TemplateValue {
    TemplateValue::list(messages, message_value)
}

pub(super) fn last_content(messages: &JsonPart) -> Option<String> {
    let JsonShape::Array(items) = messages.json().shape() else {
        return None;
    };
    let message = messages.part(items.last()?);
    let fields = JsonFields::of_part(&message).ok()?;
    content(&fields, &fields.text("role").ok()??).ok()
}

fn message_value(body: &JsonPart, message: Json<'_>) -> TemplateValue {
    TemplateValue::record(body.part(message), &NAMES, message_member)
}

fn check_message(fields: &JsonFields) -> Result<(), ApiError> {
    let role = fields
        .text("role")?
        .ok_or_else(|| missing(fields, "role"))?;
    if !ROLES.contains(&&*role) {
        let message = format!(
            "`{}` must be one of {}, not {:?}.",
            fields.path("role"),
            ROLES.join(", "),
            clipped(&role)
        );
        return Err(ApiError::invalid(fields.path("role"), message));
    }
    refuse_fields(fields, &["audio", "function_call"])?;
    check_content(fields, &role)?;
    for name in TEXTS {
        fields.text(name)?;
    }
    let calls = fields.array("tool_calls")?.into_iter().flatten();
    for (index, call) in calls.enumerate() {
        let path = fields.path(&format!("tool_calls[{index}]"));
        check_call(&fields.object_at(path, call)?)?;
    }
    Ok(())
}

fn missing(fields: &JsonFields, name: &str) -> ApiError {
    ApiError::invalid(
        fields.path(name),
        format!("`{}` is missing.", fields.path(name)),
    )
}

fn check_content(fields: &JsonFields, role: &str) -> Result<(), ApiError> {
    let content = fields.any("content");
    match content.map(|content| (content, content.shape())) {
        Some((_, JsonShape::String(_))) => Ok(()),
        Some((_, JsonShape::Array(parts))) => {
            for (index, part) in parts.enumerate() {
                let path = fields.path(&format!("content[{index}]"));
                part_text(&fields.object_at(path, part)?)?;
            }
            Ok(())
        }
        None if role == "assistant" => Ok(()),
        None => Err(missing(fields, "content")),
        Some((other, _)) => Err(wrong_type(
            &fields.path("content"),
            "a string or an array of parts",
            other,
        )),
    }
}

/// Returns the text of a checked message.
fn content(fields: &JsonFields, role: &str) -> Result<String, ApiError> {
    let mut text = String::new();
    match fields.any("content").map(Json::shape) {
        Some(JsonShape::String(content)) => return Ok(content.get().into_owned()),
        Some(JsonShape::Array(parts)) => {
            for (index, part) in parts.enumerate() {
                if index > 0 {
                    text.push('\n');
                }
                text.push_str(&part_text(&fields.object_at(String::new(), part)?)?);
            }
        }
        _ => check_content(fields, role)?,
    }
    Ok(text)
}

fn part_text<'a>(fields: &JsonFields<'a>) -> Result<Cow<'a, str>, ApiError> {
    let kind = fields
        .text("type")?
        .ok_or_else(|| missing(fields, "type"))?;
    let text = match &*kind {
        "text" | "input_text" | "output_text" => fields.text("text")?.ok_or("text"),
        "refusal" => fields.text("refusal")?.ok_or("refusal"),
        other => {
            return Err(ApiError::unsupported(
                fields.path("type"),
                format!(
                    "`{}`: parts of type {:?} are not supported; only \"text\" is.",
                    fields.path("type"),
                    clipped(other)
                ),
            ));
        }
    };
    text.map_err(|name| missing(fields, name))
}

fn check_call(fields: &JsonFields) -> Result<(), ApiError> {
    let function = fields
        .object("function")?
        .ok_or_else(|| missing(fields, "function"))?;
    function
        .text("name")?
        .ok_or_else(|| missing(&function, "name"))?;
    let arguments = function.any("arguments");
    match arguments.map(|arguments| (arguments, arguments.shape())) {
        None | Some((_, JsonShape::Object(_))) => Ok(()),
        Some((_, JsonShape::String(text))) if text.get().trim().is_empty() => Ok(()),
        Some((_, JsonShape::String(text))) => {
            let checked = Document::check(text.get().into_owned());
            checked.map(drop).map_err(|error| {
                let path = function.path("arguments");
                ApiError::invalid(&*path, format!("`{path}` is not JSON: {error}."))
            })
        }
        Some((other, _)) => Err(wrong_type(
            &function.path("arguments"),
            "a string of JSON",
            other,
        )),
    }
}

/// Value of a checked tool call: as it was sent, but with its arguments as an object.
fn call_value(body: &JsonPart, call: Json<'_>) -> TemplateValue {
    let part = body.part(call);
    let read = || {
        let call = JsonFields::of_part(&part).ok()?;
        let function = call.any("function")?;
        let arguments = arguments_value(&call.object("function").ok()??)?;
        Some((call.part(function), arguments))
    };
    let (function, arguments) = read().expect("a call that was checked");
    let function = TemplateValue::with_member(function, "arguments", arguments);
    TemplateValue::with_member(part, "function", function)
}

fn arguments_value(function: &JsonFields) -> Option<TemplateValue> {
    let empty = || Document::check("{}".to_owned()).ok();
    let document = match function.any("arguments").map(|json| (json, json.shape())) {
        None => empty()?,
        Some((_, JsonShape::String(text))) if text.get().trim().is_empty() => empty()?,
        Some((_, JsonShape::String(text))) => Document::check(text.get().into_owned()).ok()?,
        Some((object, _)) => return Some(TemplateValue::of_json(&function.part(object), object)),
    };
    Some(TemplateValue::of_json(
        &document.part(document.root()),
        document.root(),
    ))
}

/// Members of a message that templates read.
const NAMES: [&str; 6] = [
    "role",
    "content",
    "name",
    "tool_call_id",
    "reasoning_content",
    "tool_calls",
];

fn message_member(part: &JsonPart, name: &str) -> Option<TemplateValue> {
    let fields = JsonFields::of_part(part).expect("a message that was checked");
    match name {
        "role" => {
            let role = fields.text("role").ok()??;
            let role_name = if role == "developer" {
                "system"
            } else {
                &*role
            };
            Some(TemplateValue::of_text(role_name))
        }
        "content" => {
            if let Some(JsonShape::String(text)) = fields.any("content").map(Json::shape) {
                return Some(TemplateValue::of_json(part, text.json()));
            }
            let role = fields.text("role").ok()??;
            Some(TemplateValue::of_text(&content(&fields, &role).ok()?))
        }
        "tool_calls" => {
            let calls = fields.any("tool_calls")?;
            let mut given = fields.array("tool_calls").ok()??;
            given.next()?;
            Some(TemplateValue::list(part.part(calls), call_value))
        }
        name => {
            let name = TEXTS.iter().find(|text| **text == name)?;
            Some(TemplateValue::of_json(part, fields.any(name)?))
        }
    }
}
