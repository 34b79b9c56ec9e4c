//! The messages of a chat request.
//!
//! Owns: the conversion of OpenAI's message objects into those that templates read. Never: renders,
//! or copies more of a message than its position in the body.
//!
//! Content becomes one string: text parts are joined with newlines, as vLLM does for templates that
//! expect strings. `developer` becomes `system`, which templates know. The arguments of a tool
//! call, a string of JSON, become an object.

use super::MESSAGES;
use super::tools::{CUSTOM_KIND, FUNCTION_FIELDS, FUNCTION_NAME};
use crate::error::ApiError;
use crate::field::{
    AnyValue, FieldSpec, JsonFields, ListShape, ObjectSpec, RefusedField, RequestField, TextShape,
    ValueShape, any, clipped, list as list_field, object, request_fields, request_object,
    text as text_field, wrong_type,
};
use crate::surface::chat_body::JsonText;
use crate::surface::custom_tool::custom_arguments;
use cleave_text::TemplateValue;
use cleave_text::json::{Document, Json, JsonPart, JsonShape};
use std::borrow::Cow;

request_fields! {
    MESSAGE_FIELDS {
        ROLE: TextShape = text_field(
            "role",
            TextShape::one_of(&["system", "developer", "user", "assistant", "tool"]),
            "Author of the message; templates know `developer` as `system`.",
        ).required();
        CONTENT: AnyValue = any(
            "content",
            ValueShape::OneOf(&[
                ValueShape::Text(TextShape::ANY),
                ValueShape::List(ListShape::of(&ValueShape::Object(&PART))),
            ]),
            "Text of the message; parts are joined by line breaks. An assistant may leave it out.",
        ).default("required but for `assistant`");
        NAME: TextShape = text_field("name", TextShape::ANY, "Passed to the template.");
        TOOL_CALL_ID: TextShape =
            text_field("tool_call_id", TextShape::ANY, "Passed to the template.");
        REASONING_CONTENT: TextShape = text_field(
            "reasoning_content",
            TextShape::ANY,
            "Reasoning of an assistant, passed to the template.",
        );
        REASONING: TextShape =
            text_field("reasoning", TextShape::ANY, "Another name of `reasoning_content`.");
        TOOL_CALLS: ListShape = list_field(
            "tool_calls",
            ListShape::of(&ValueShape::Object(&TOOL_CALL)),
            "Calls of an assistant, passed to the template.",
        );
    }
}

request_fields! {
    PART_TEXT_FIELDS {
        TEXT_TYPE: TextShape = text_field(
            "type",
            TextShape::one_of(&["text", "input_text", "output_text"]),
            "Type of the part.",
        ).required();
        TEXT: TextShape = text_field("text", TextShape::ANY, "Text of the part.").required();
    }
}

request_fields! {
    PART_REFUSAL_FIELDS {
        REFUSAL_TYPE: TextShape =
            text_field("type", TextShape::one_of(&["refusal"]), "Type of the part.").required();
        REFUSAL: TextShape =
            text_field("refusal", TextShape::ANY, "Text of an earlier refusal.").required();
    }
}

request_fields! {
    CALL_ID_FIELDS {
        CALL_ID: TextShape = text_field("id", TextShape::ANY, "Passed to the template.");
    }
}

request_fields! {
    TOOL_CALL_FIELDS {
        CALLED_FUNCTION: &'static ObjectSpec =
            object("function", &CALLED_OBJECT, "The function that was called.").required();
    }
}

request_fields! {
    CUSTOM_CALL_FIELDS {
        CUSTOM_CALL_TYPE: TextShape =
            text_field("type", TextShape::one_of(&[CUSTOM_KIND]), "Kind of the call.").required();
        CALLED_CUSTOM: &'static ObjectSpec =
            object("custom", &CALLED_CUSTOM_OBJECT, "The custom tool that was called.").required();
    }
}

request_fields! {
    CALLED_CUSTOM_FIELDS {
        CUSTOM_INPUT: TextShape =
            text_field("input", TextShape::ANY, "The text of the call.").required();
    }
}

request_fields! {
    CALLED_FIELDS {
        ARGUMENTS: AnyValue = any(
            "arguments",
            ValueShape::OneOf(&[ValueShape::Text(TextShape::JSON), ValueShape::Object(&FREE)]),
            "Arguments of the call; the template gets an object.",
        );
    }
}

/// An object of a client's own names.
const FREE: ObjectSpec = request_object!("", &[]);
const CALLED_OBJECT: ObjectSpec = request_object!("", &[&[FUNCTION_FIELDS, CALLED_FIELDS]]);
const CALLED_CUSTOM_OBJECT: ObjectSpec =
    request_object!("", &[&[FUNCTION_FIELDS, CALLED_CUSTOM_FIELDS]]);
const TOOL_CALL: ObjectSpec = request_object!(
    "ToolCall",
    &[
        &[
            CALL_ID_FIELDS,
            &[
                FieldSpec::shown_by_template("type"),
                FieldSpec::absent("custom")
            ],
            TOOL_CALL_FIELDS
        ],
        &[
            CALL_ID_FIELDS,
            CUSTOM_CALL_FIELDS,
            &[FieldSpec::absent("function")]
        ],
    ]
);
const PART: ObjectSpec = request_object!("Part", &[&[PART_TEXT_FIELDS], &[PART_REFUSAL_FIELDS]]);

/// A message of a conversation.
pub(super) const MESSAGE: ObjectSpec = request_object!("Message", &[&[MESSAGE_FIELDS]], &[OLD])
    .rule(
        r#"{"anyOf": [
            {"properties": {"role": {"const": "assistant"}}},
            {"required": ["content"], "properties": {"content": {"not": {"type": "null"}}}}
        ]}"#,
    );

/// Fields of messages that would change the prompt.
const OLD: &[RefusedField] = &[
    RefusedField::new("audio", "messages are texts"),
    RefusedField::new("function_call", "`tool_calls` is the newer field"),
];

/// Optional texts of a message beside its content.
const TEXTS: [RequestField<TextShape>; 4] = [NAME, TOOL_CALL_ID, REASONING_CONTENT, REASONING];

/// Reads and checks the messages of a request; there is at least one.
pub(super) fn messages(fields: &JsonFields) -> Result<JsonPart, ApiError> {
    let array = fields
        .any(&MESSAGES)
        .ok_or_else(|| fields.missing(&MESSAGES))?;
    let mut count = 0;
    for (index, item) in fields.list(&MESSAGES)?.into_iter().flatten().enumerate() {
        let path = format!("{}[{index}]", MESSAGES.name());
        check_message(&fields.object_at(path, item, &MESSAGE)?)?;
        count += 1;
    }
    match count {
        0 => Err(fields.invalid(&MESSAGES, "`messages` must have at least one message.")),
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
    let fields = JsonFields::of_part(&message, &MESSAGE).ok()?;
    content(&fields, &fields.text(&ROLE).ok()??).ok()
}

fn message_value(body: &JsonPart, message: Json<'_>) -> TemplateValue {
    TemplateValue::record(body.part(message), &SHOWN, message_member)
}

fn check_message(fields: &JsonFields) -> Result<(), ApiError> {
    let role = fields.required_text(&ROLE)?;
    if !ROLE.choices().contains(&&*role) {
        let message = format!(
            "`{}` must be one of {}, not {:?}.",
            fields.path_of(&ROLE),
            ROLE.choices().join(", "),
            clipped(&role)
        );
        return Err(fields.invalid(&ROLE, message));
    }
    fields.check_refused()?;
    check_content(fields, &role)?;
    for field in &TEXTS {
        fields.text(field)?;
    }
    let calls = fields.list(&TOOL_CALLS)?.into_iter().flatten();
    for (index, call) in calls.enumerate() {
        let path = format!("{}[{index}]", fields.path_of(&TOOL_CALLS));
        check_call(&fields.object_at(path, call, &TOOL_CALL)?)?;
    }
    Ok(())
}

fn check_content(fields: &JsonFields, role: &str) -> Result<(), ApiError> {
    let content = fields.any(&CONTENT);
    match content.map(|content| (content, content.shape())) {
        Some((_, JsonShape::String(_))) => Ok(()),
        Some((_, JsonShape::Array(parts))) => {
            for (index, part) in parts.enumerate() {
                let path = format!("{}[{index}]", fields.path_of(&CONTENT));
                part_text(&fields.object_at(path, part, &PART)?)?;
            }
            Ok(())
        }
        None if role == "assistant" => Ok(()),
        None => Err(fields.missing(&CONTENT)),
        Some((other, _)) => Err(wrong_type(
            &fields.path_of(&CONTENT),
            "a string or an array of parts",
            other,
        )),
    }
}

/// Returns the text of a checked message.
fn content(fields: &JsonFields, role: &str) -> Result<String, ApiError> {
    let mut text = String::new();
    match fields.any(&CONTENT).map(Json::shape) {
        Some(JsonShape::String(content)) => return Ok(content.get().into_owned()),
        Some(JsonShape::Array(parts)) => {
            for (index, part) in parts.enumerate() {
                if index > 0 {
                    text.push('\n');
                }
                text.push_str(&part_text(&fields.object_at(
                    String::new(),
                    part,
                    &PART,
                )?)?);
            }
        }
        _ => check_content(fields, role)?,
    }
    Ok(text)
}

fn part_text<'a>(fields: &JsonFields<'a>) -> Result<Cow<'a, str>, ApiError> {
    let kind = fields.required_text(&TEXT_TYPE)?;
    if TEXT_TYPE.choices().contains(&&*kind) {
        fields.required_text(&TEXT)
    } else if REFUSAL_TYPE.choices().contains(&&*kind) {
        fields.required_text(&REFUSAL)
    } else {
        let message = format!(
            "`{}`: parts of type {:?} are not supported; only \"text\" is.",
            fields.path_of(&TEXT_TYPE),
            clipped(&kind)
        );
        Err(fields.unsupported(&TEXT_TYPE, message))
    }
}

fn check_call(fields: &JsonFields) -> Result<(), ApiError> {
    if let Some(custom) = fields.object(&CALLED_CUSTOM)? {
        fields.text(&CALL_ID)?;
        if fields.required_text(&CUSTOM_CALL_TYPE)? != CUSTOM_KIND {
            let path = fields.path_of(&CUSTOM_CALL_TYPE);
            let message =
                format!("`{path}` must be \"{CUSTOM_KIND}\" where the call has `custom`.");
            return Err(fields.invalid(&CUSTOM_CALL_TYPE, message));
        }
        if fields.any(&CALLED_FUNCTION).is_some() {
            let message = "A call is one of a function or of a custom tool, not both.";
            return Err(fields.invalid(&CALLED_FUNCTION, message));
        }
        custom.required_text(&FUNCTION_NAME)?;
        custom.required_text(&CUSTOM_INPUT)?;
        return Ok(());
    }
    let function = fields
        .object(&CALLED_FUNCTION)?
        .ok_or_else(|| fields.missing(&CALLED_FUNCTION))?;
    function.required_text(&FUNCTION_NAME)?;
    let arguments = function.any(&ARGUMENTS);
    match arguments.map(|arguments| (arguments, arguments.shape())) {
        None | Some((_, JsonShape::Object(_))) => Ok(()),
        Some((_, JsonShape::String(text))) if text.get().trim().is_empty() => Ok(()),
        Some((_, JsonShape::String(text))) => {
            let checked = Document::check(text.get().into_owned());
            checked.map(drop).map_err(|error| {
                let path = function.path_of(&ARGUMENTS);
                ApiError::invalid(&*path, format!("`{path}` is not JSON: {error}."))
            })
        }
        Some((other, _)) => Err(wrong_type(
            &function.path_of(&ARGUMENTS),
            "a string of JSON",
            other,
        )),
    }
}

/// Value of a checked tool call: as it was sent, but with its arguments as an object, and a
/// function in the place of a custom tool.
fn call_value(body: &JsonPart, call: Json<'_>) -> TemplateValue {
    let part = body.part(call);
    if let Some(custom) = custom_value(&part) {
        return custom;
    }
    let read = || {
        let call = JsonFields::of_part(&part, &TOOL_CALL).ok()?;
        let function = call.any(&CALLED_FUNCTION)?;
        let arguments = arguments_value(&call.object(&CALLED_FUNCTION).ok()??)?;
        Some((call.part(function), arguments))
    };
    let (function, arguments) = read().expect("a call that was checked");
    let function = TemplateValue::with_member(function, ARGUMENTS.name(), arguments);
    TemplateValue::with_member(part, CALLED_FUNCTION.name(), function)
}

/// Value of a checked call of a custom tool.
fn custom_value(part: &JsonPart) -> Option<TemplateValue> {
    let call = JsonFields::of_part(part, &TOOL_CALL).ok()?;
    let custom = call.object(&CALLED_CUSTOM).ok()??;
    let (name, input) = (custom.any(&FUNCTION_NAME)?, custom.any(&CUSTOM_INPUT)?);
    let mut value = JsonText::default();
    value.begin('{');
    if let Some(id) = call.any(&CALL_ID) {
        value.member(CALL_ID.name(), id.text());
    }
    value.member("type", r#""function""#);
    value.name(CALLED_FUNCTION.name());
    value.begin('{');
    value.member(FUNCTION_NAME.name(), name.text());
    value.member(ARGUMENTS.name(), &custom_arguments(input.text()));
    value.end('}');
    value.end('}');
    let value = value.check().ok()?;
    let part = value.part(value.root());
    Some(TemplateValue::of_json(&part, part.json()))
}

fn arguments_value(function: &JsonFields) -> Option<TemplateValue> {
    let empty = || Document::check("{}".to_owned()).ok();
    let document = match function.any(&ARGUMENTS).map(|json| (json, json.shape())) {
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
const SHOWN: [&str; 6] = [
    ROLE.name(),
    CONTENT.name(),
    NAME.name(),
    TOOL_CALL_ID.name(),
    REASONING_CONTENT.name(),
    TOOL_CALLS.name(),
];

fn message_member(part: &JsonPart, name: &str) -> Option<TemplateValue> {
    let fields = JsonFields::of_part(part, &MESSAGE).expect("a message that was checked");
    if name == ROLE.name() {
        let role = fields.text(&ROLE).ok()??;
        let role_name = if role == "developer" {
            "system"
        } else {
            &*role
        };
        return Some(TemplateValue::of_text(role_name));
    }
    if name == CONTENT.name() {
        if let Some(JsonShape::String(text)) = fields.any(&CONTENT).map(Json::shape) {
            return Some(TemplateValue::of_json(part, text.json()));
        }
        let role = fields.text(&ROLE).ok()??;
        return Some(TemplateValue::of_text(&content(&fields, &role).ok()?));
    }
    if name == TOOL_CALLS.name() {
        let calls = fields.any(&TOOL_CALLS)?;
        let mut given = fields.list(&TOOL_CALLS).ok()??;
        given.next()?;
        return Some(TemplateValue::list(part.part(calls), call_value));
    }
    let field = TEXTS.iter().find(|text| text.name() == name)?;
    let mut given = fields.any(field);
    if name == REASONING_CONTENT.name() {
        given = given.or_else(|| fields.any(&REASONING));
    }
    Some(TemplateValue::of_json(part, given?))
}
