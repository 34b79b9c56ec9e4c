//! The messages of a request and their blocks, as chat has them.
//!
//! Owns: the blocks of each kind. Never: renders. Invariant: every text of a conversation that a
//! template can show is in the chat request, in order; images and documents are refused.

use super::{MESSAGES, SYSTEM};
use crate::error::ApiError;
use crate::field::{
    AnyValue, FieldSpec, FlagValue, JsonFields, ListShape, MapKeys, MapShape, ObjectSpec,
    RequestField, TextShape, ValueShape, any, clipped, flag, map, request_fields, request_object,
    text as text_field, wrong_type,
};
use crate::surface::chat_body::{ChatMessages, JsonText, LINE_BREAK};
use cleave_text::json::{Json, JsonItems, JsonShape};

request_fields! {
    MESSAGE_FIELDS {
        ROLE: TextShape = text_field(
            "role",
            TextShape::one_of(&["user", "assistant", "system"]),
            "Author of the message.",
        ).required();
        CONTENT: AnyValue = any(
            "content",
            ValueShape::OneOf(&[
                ValueShape::Text(TextShape::ANY),
                ValueShape::List(ListShape::of(&ValueShape::Object(&BLOCK))),
            ]),
            "Text, or blocks, of the message; texts are joined by line breaks.",
        ).required();
    }
}

request_fields! {
    TEXT_FIELDS {
        TEXT_TYPE: TextShape =
            text_field("type", TextShape::one_of(&["text"]), "Kind of the block.").required();
        TEXT: TextShape = text_field("text", TextShape::ANY, "The text.").required();
    }
}

request_fields! {
    USE_FIELDS {
        USE_TYPE: TextShape =
            text_field("type", TextShape::one_of(&["tool_use"]), "Kind of the block.").required();
        USE_ID: TextShape = text_field("id", TextShape::ANY, "Id of the call.").required();
        USE_NAME: TextShape = text_field("name", TextShape::ANY, "Name of the tool.").required();
        USE_INPUT: MapShape = map(
            "input",
            MapShape { keys: MapKeys::Any, values: &ValueShape::Any, count_max: None },
            "Arguments of the call.",
        ).required();
    }
}

request_fields! {
    RESULT_FIELDS {
        RESULT_TYPE: TextShape =
            text_field("type", TextShape::one_of(&["tool_result"]), "Kind of the block.").required();
        RESULT_ID: TextShape =
            text_field("tool_use_id", TextShape::ANY, "Id of the call.").required();
        RESULT_CONTENT: AnyValue = any(
            "content",
            ValueShape::OneOf(&[
                ValueShape::Text(TextShape::ANY),
                ValueShape::List(ListShape::of(&ValueShape::Object(&TEXT_BLOCK))),
            ]),
            "Text, or blocks of text.",
        );
        IS_ERROR: FlagValue =
            flag("is_error", "Changes nothing: templates know no failed results, so the text has to say it.");
    }
}

request_fields! {
    THINKING_FIELDS {
        THINKING_TYPE: TextShape =
            text_field("type", TextShape::one_of(&["thinking"]), "Kind of the block.").required();
        THINKING: TextShape =
            text_field("thinking", TextShape::ANY, "Earlier reasoning, passed to the template.")
                .required();
        SIGNATURE: TextShape =
            text_field("signature", TextShape::ANY, "Not checked: any client may write reasoning.");
    }
}

request_fields! {
    REDACTED_FIELDS {
        REDACTED_TYPE: TextShape = text_field(
            "type",
            TextShape::one_of(&["redacted_thinking"]),
            "Kind of the block.",
        ).required();
        DATA: TextShape = text_field("data", TextShape::ANY, "Left out: only Anthropic can read it.");
    }
}

/// `cache_control` of a block or a tool.
pub(super) const CACHE_FIELDS: &[FieldSpec] = &[FieldSpec::ignored(
    "cache_control",
    "Ignored: every prefix is kept for reuse, and `usage.cache_read_input_tokens` says how much was found.",
)];

const BLOCK: ObjectSpec = request_object!(
    "MessageBlock",
    &[
        &[TEXT_FIELDS, CACHE_FIELDS],
        &[USE_FIELDS, CACHE_FIELDS],
        &[RESULT_FIELDS, CACHE_FIELDS],
        &[THINKING_FIELDS],
        &[REDACTED_FIELDS],
    ]
);
const TEXT_BLOCK: ObjectSpec = request_object!("", &[&[TEXT_FIELDS, CACHE_FIELDS]]);

/// A block of the system's text.
pub(super) const SYSTEM_BLOCK: ObjectSpec =
    request_object!("SystemBlock", &[&[TEXT_FIELDS, CACHE_FIELDS]]);

/// A message of a conversation.
pub(super) const MESSAGE: ObjectSpec = request_object!("InputMessage", &[&[MESSAGE_FIELDS]]);

/// Beginning of the system block that Anthropic's command-line client writes anew for each request.
const BILLING: &str = "x-anthropic-billing-header";

/// The end of a conversation.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum LastRole {
    /// An assistant's text, which the answer continues.
    AssistantText,
    Other,
}

/// Writes the messages of a chat request, those of the system first, and returns the body.
pub(super) fn write_conversation(
    fields: &JsonFields,
    chat: JsonText,
) -> Result<(JsonText, LastRole), ApiError> {
    let mut messages = ChatMessages::new(chat);
    if let Some(system) = system(fields)? {
        let document = system.check()?;
        messages.message("system", &[document.root()], "");
    }
    let listed = fields.list(&MESSAGES)?;
    let listed = listed.ok_or_else(|| fields.missing(&MESSAGES))?;
    let mut last = None;
    for (index, item) in listed.enumerate() {
        let path = format!("{}[{index}]", MESSAGES.name());
        let message = fields.object_at(path, item, &MESSAGE)?;
        last = Some(write_message(&message, &mut messages)?);
    }
    let last = last
        .ok_or_else(|| fields.invalid(&MESSAGES, "`messages` must have at least one message."))?;
    Ok((messages.finish(), last))
}

/// Returns the system's text as a string of JSON.
fn system(fields: &JsonFields) -> Result<Option<JsonText>, ApiError> {
    let mut out = JsonText::default();
    let blocks = match fields.any(&SYSTEM).map(|system| (system, system.shape())) {
        None => return Ok(None),
        Some((system, JsonShape::String(_))) => {
            out.json(system.text());
            return Ok(Some(out));
        }
        Some((_, JsonShape::Array(blocks))) => blocks,
        Some((other, _)) => {
            let path = fields.path_of(&SYSTEM);
            return Err(wrong_type(&path, "a string or an array of blocks", other));
        }
    };
    let path = fields.path_of(&SYSTEM);
    let texts = block_texts(fields, &path, blocks)?;
    let is_billing = |text: &Json<'_>| text.text()[1..].starts_with(BILLING);
    if !texts.iter().any(is_billing) {
        if texts.is_empty() {
            return Ok(None);
        }
        out.joined(&texts, LINE_BREAK);
        return Ok(Some(out));
    }
    let mut lines = Vec::new();
    for text in &texts {
        let JsonShape::String(text) = text.shape() else {
            unreachable!("the reader has checked it");
        };
        let text = text.get();
        match text.split_once('\n') {
            _ if !text.starts_with(BILLING) => lines.push(text.into_owned()),
            Some((_, rest)) => lines.push(rest.to_owned()),
            None => {}
        }
    }
    out.text(&lines.join("\n"));
    Ok((!lines.is_empty()).then_some(out))
}

/// Reads blocks of text; returns their strings.
fn block_texts<'a>(
    fields: &JsonFields<'a>,
    path: &str,
    blocks: JsonItems<'a>,
) -> Result<Vec<Json<'a>>, ApiError> {
    let mut texts = Vec::new();
    for (index, block) in blocks.enumerate() {
        let block = fields.object_at(format!("{path}[{index}]"), block, &TEXT_BLOCK)?;
        let kind = block.required_text(&TEXT_TYPE)?;
        if !is_kind(&kind, &TEXT_TYPE) {
            return Err(not_served(&block, &kind));
        }
        texts.push(string(&block, &TEXT)?);
    }
    Ok(texts)
}

fn is_kind(kind: &str, field: &RequestField<TextShape>) -> bool {
    field.choices().contains(&kind)
}

/// Returns a required text as it is written, with its quotes.
fn string<'a>(
    block: &JsonFields<'a>,
    field: &RequestField<TextShape>,
) -> Result<Json<'a>, ApiError> {
    block.required_text(field)?;
    block.any(field).ok_or_else(|| block.missing(field))
}

fn not_served(block: &JsonFields, kind: &str) -> ApiError {
    let message = format!(
        "`{}`: blocks of type {:?} are not supported here; the model reads text only.",
        block.path_of(&TEXT_TYPE),
        clipped(kind)
    );
    block.unsupported(&TEXT_TYPE, message)
}

fn write_message<'a>(
    message: &JsonFields<'a>,
    out: &mut ChatMessages<'a>,
) -> Result<LastRole, ApiError> {
    let role = message.required_text(&ROLE)?;
    if !is_kind(&role, &ROLE) {
        let path = message.path_of(&ROLE);
        let roles = ROLE.choices().join(", ");
        let role = clipped(&role);
        return Err(message.invalid(
            &ROLE,
            format!("`{path}` must be one of {roles}, not {role:?}."),
        ));
    }
    let is_answer = role == "assistant";
    if is_answer {
        out.begin_answer();
    }
    let content = message.any(&CONTENT);
    let content = content.ok_or_else(|| message.missing(&CONTENT))?;
    let path = message.path_of(&CONTENT);
    let blocks = match content.shape() {
        JsonShape::String(_) if is_answer => {
            out.answer_text(content);
            out.end_answer();
            return Ok(LastRole::AssistantText);
        }
        JsonShape::String(_) => {
            out.message(&role, &[content], "");
            return Ok(LastRole::Other);
        }
        JsonShape::Array(blocks) => blocks,
        _ => return Err(wrong_type(&path, "a string or an array of blocks", content)),
    };
    let mut texts = Vec::new();
    let (mut has_results, mut last) = (false, LastRole::Other);
    for (index, block) in blocks.enumerate() {
        let block = message.object_at(format!("{path}[{index}]"), block, &BLOCK)?;
        let kind = block.required_text(&TEXT_TYPE)?;
        last = LastRole::Other;
        if is_kind(&kind, &TEXT_TYPE) {
            let text = string(&block, &TEXT)?;
            if is_answer {
                out.answer_text(text);
                last = LastRole::AssistantText;
            } else {
                texts.push(text);
            }
        } else if is_kind(&kind, &USE_TYPE) && is_answer {
            let input = block.map(&USE_INPUT)?.and(block.any(&USE_INPUT));
            let input = input.ok_or_else(|| block.missing(&USE_INPUT))?;
            let (id, name) = (string(&block, &USE_ID)?, string(&block, &USE_NAME)?);
            out.call(id, name.text(), input.text());
        } else if is_kind(&kind, &RESULT_TYPE) && !is_answer {
            if !texts.is_empty() {
                out.message(&role, &texts, LINE_BREAK);
                texts.clear();
            }
            write_result(&block, out)?;
            has_results = true;
        } else if is_kind(&kind, &THINKING_TYPE) && is_answer {
            block.text(&SIGNATURE)?;
            out.reasoning(string(&block, &THINKING)?);
        } else if is_kind(&kind, &REDACTED_TYPE) && is_answer {
            block.text(&DATA)?;
        } else {
            return Err(not_served(&block, &kind));
        }
    }
    if is_answer {
        out.end_answer();
    } else if !texts.is_empty() || !has_results {
        out.message(&role, &texts, LINE_BREAK);
    }
    Ok(last)
}

fn write_result(block: &JsonFields, out: &mut ChatMessages<'_>) -> Result<(), ApiError> {
    block.flag(&IS_ERROR)?;
    let id = string(block, &RESULT_ID)?;
    let content = block.any(&RESULT_CONTENT);
    let texts = match content.map(|content| (content, content.shape())) {
        None => Vec::new(),
        Some((text, JsonShape::String(_))) => vec![text],
        Some((_, JsonShape::Array(blocks))) => {
            block_texts(block, &block.path_of(&RESULT_CONTENT), blocks)?
        }
        Some((other, _)) => {
            let path = block.path_of(&RESULT_CONTENT);
            return Err(wrong_type(&path, "a string or an array of blocks", other));
        }
    };
    out.result(id, &texts);
    Ok(())
}
