//! Chat messages.
//!
//! Owns: from OpenAI's message objects to those that templates read. Never: renders.
//! Content becomes one string (text parts are joined with newlines, as vLLM does for templates
//! that expect strings); `developer` becomes `system`, which templates know; a tool call's
//! arguments, JSON within a string, become an object.

use crate::error::ApiError;
use crate::field::{Fields, wrong};
use serde_json::{Map, Value};

const ROLES: [&str; 5] = ["system", "developer", "user", "assistant", "tool"];

/// The messages of a request; at least one.
pub(super) fn messages(fields: &Fields) -> Result<Vec<Value>, ApiError> {
    let missing = || ApiError::invalid("messages", "`messages` is missing.");
    let items = fields.array("messages")?.ok_or_else(missing)?;
    if items.is_empty() {
        return Err(ApiError::invalid(
            "messages",
            "`messages` must have at least one message.",
        ));
    }
    let message = |(index, item)| message(&Fields::at(format!("messages[{index}]"), item)?);
    items.iter().enumerate().map(message).collect()
}

fn message(fields: &Fields) -> Result<Value, ApiError> {
    let role = fields
        .text("role")?
        .ok_or_else(|| missing(fields, "role"))?;
    if !ROLES.contains(&role) {
        let message = format!(
            "`{}` must be one of {}, not {role:?}.",
            fields.path("role"),
            ROLES.join(", ")
        );
        return Err(ApiError::invalid(fields.path("role"), message));
    }
    super::refuse(fields, &["audio", "function_call"])?;
    let mut out = Map::new();
    let role_known = if role == "developer" { "system" } else { role };
    out.insert("role".into(), role_known.into());
    out.insert("content".into(), content(fields, role)?.into());
    for name in ["name", "tool_call_id", "reasoning_content"] {
        if let Some(text) = fields.text(name)? {
            out.insert(name.into(), text.into());
        }
    }
    let calls = fields.array("tool_calls")?.unwrap_or_default();
    if !calls.is_empty() {
        let call = |(index, call)| {
            tool_call(&Fields::at(
                fields.path(&format!("tool_calls[{index}]")),
                call,
            )?)
        };
        let calls = calls
            .iter()
            .enumerate()
            .map(call)
            .collect::<Result<Vec<_>, _>>()?;
        out.insert("tool_calls".into(), calls.into());
    }
    Ok(Value::Object(out))
}

fn missing(fields: &Fields, name: &str) -> ApiError {
    ApiError::invalid(
        fields.path(name),
        format!("`{}` is missing.", fields.path(name)),
    )
}

fn content(fields: &Fields, role: &str) -> Result<String, ApiError> {
    match fields.any("content") {
        Some(Value::String(text)) => Ok(text.clone()),
        Some(Value::Array(parts)) => {
            let part = |(index, value)| {
                part(&Fields::at(
                    fields.path(&format!("content[{index}]")),
                    value,
                )?)
            };
            let parts = parts
                .iter()
                .enumerate()
                .map(part)
                .collect::<Result<Vec<_>, _>>()?;
            Ok(parts.join("\n"))
        }
        None if role == "assistant" => Ok(String::new()),
        None => Err(missing(fields, "content")),
        Some(other) => Err(wrong(
            &fields.path("content"),
            "a string or an array of parts",
            other,
        )),
    }
}

fn part(fields: &Fields) -> Result<String, ApiError> {
    let kind = fields
        .text("type")?
        .ok_or_else(|| missing(fields, "type"))?;
    let name = match kind {
        "text" | "input_text" | "output_text" => "text",
        "refusal" => "refusal",
        other => {
            return Err(ApiError::unsupported(
                fields.path("type"),
                format!(
                    "`{}`: parts of type {other:?} are not supported; only \"text\" is.",
                    fields.path("type")
                ),
            ));
        }
    };
    fields
        .text(name)?
        .map(str::to_owned)
        .ok_or_else(|| missing(fields, name))
}

fn tool_call(fields: &Fields) -> Result<Value, ApiError> {
    let function = fields
        .object("function")?
        .ok_or_else(|| missing(fields, "function"))?;
    function
        .text("name")?
        .ok_or_else(|| missing(&function, "name"))?;
    let arguments = match function.any("arguments") {
        None => Value::Object(Map::new()),
        Some(Value::String(text)) if text.trim().is_empty() => Value::Object(Map::new()),
        Some(Value::String(text)) => serde_json::from_str(text).map_err(|error| {
            let path = function.path("arguments");
            ApiError::invalid(&*path, format!("`{path}` is not JSON: {error}."))
        })?,
        Some(object @ Value::Object(_)) => object.clone(),
        Some(other) => {
            return Err(wrong(
                &function.path("arguments"),
                "a string of JSON",
                other,
            ));
        }
    };
    let mut call = fields.map().clone();
    let mut known = function.map().clone();
    known.insert("arguments".into(), arguments);
    call.insert("function".into(), known.into());
    Ok(Value::Object(call))
}
