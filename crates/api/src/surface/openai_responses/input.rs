//! The items of a request, as messages of chat.
//!
//! Owns: the items of each kind, and the places of those that a request has by reference. Never:
//! renders, or looks for a stored item. Invariant: items of one answer (reasoning, text, calls) are
//! one message of the assistant, as templates expect; what no template can show is refused.

use super::tools::shown_name;
use super::{INPUT, INSTRUCTIONS, PREVIOUS_RESPONSE_ID};
use crate::error::ApiError;
use crate::field::{
    AnyValue, FieldSpec, JsonFields, ListShape, ObjectSpec, RequestField, TextShape, ValueShape,
    any, clipped, list, request_fields, request_object, text as text_field, wrong_type,
};
use crate::response_store::{ItemList, StoredNames, member};
use crate::surface::chat_body::{BROKEN_ARGUMENTS, ChatMessages, JsonText, LINE_BREAK};
use crate::surface::custom_tool::custom_arguments;
use cleave_text::json::{Document, Json, JsonItems, JsonShape};
use serde_json::Value;
use std::collections::BTreeMap;

request_fields! {
    MESSAGE_FIELDS {
        MESSAGE_TYPE: TextShape =
            text_field("type", TextShape::one_of(&[MESSAGE]), "Kind of the item.")
                .default("`message`");
        ROLE: TextShape = text_field(
            "role",
            TextShape::one_of(&["user", ASSISTANT, "system", "developer"]),
            "Author of the message.",
        ).required();
        CONTENT: AnyValue = any("content", CONTENT_SHAPE, "Text, or parts, of the message; parts are joined by line breaks.")
            .required();
    }
}

request_fields! {
    CALL_FIELDS {
        CALL_TYPE: TextShape =
            text_field("type", TextShape::one_of(&["function_call"]), "Kind of the item.").required();
        CALL_ID: TextShape = text_field("call_id", TextShape::ANY, "Id of the call.").required();
        CALL_NAME: TextShape = text_field("name", TextShape::ANY, "Name of the function.").required();
        CALL_NAMESPACE: TextShape =
            text_field("namespace", TextShape::ANY, "Namespace of the function.");
        CALL_ARGUMENTS: TextShape = text_field(
            "arguments",
            TextShape::ANY,
            "Arguments of the call, as the model wrote them; what is no object of JSON is shown as text.",
        ).required();
    }
}

request_fields! {
    OUTPUT_FIELDS {
        OUTPUT_TYPE: TextShape =
            text_field(
                "type",
                TextShape::one_of(&["function_call_output", "custom_tool_call_output"]),
                "Kind of the item.",
            ).required();
        OUTPUT_ID: TextShape = text_field("call_id", TextShape::ANY, "Id of the call.").required();
        OUTPUT: AnyValue = any("output", CONTENT_SHAPE, "Text, or parts, of the result.").required();
    }
}

request_fields! {
    CUSTOM_FIELDS {
        CUSTOM_TYPE: TextShape =
            text_field("type", TextShape::one_of(&["custom_tool_call"]), "Kind of the item.")
                .required();
        CUSTOM_ID: TextShape = text_field("call_id", TextShape::ANY, "Id of the call.").required();
        CUSTOM_NAME: TextShape = text_field("name", TextShape::ANY, "Name of the tool.").required();
        CUSTOM_INPUT: TextShape =
            text_field("input", TextShape::ANY, "The text of the call.").required();
    }
}

request_fields! {
    REASONING_FIELDS {
        REASONING_TYPE: TextShape =
            text_field("type", TextShape::one_of(&["reasoning"]), "Kind of the item.").required();
        REASONING_CONTENT: ListShape = list(
            "content",
            ListShape::of(&ValueShape::Object(&REASONING_PART)),
            "Earlier reasoning, passed to the template.",
        );
        REASONING_SUMMARY: ListShape = list(
            "summary",
            ListShape::of(&ValueShape::Object(&REASONING_PART)),
            "Counts where there is no content.",
        );
    }
}

request_fields! {
    TEXT_FIELDS {
        TEXT_TYPE: TextShape = text_field(
            "type",
            TextShape::one_of(&["input_text", "output_text", "text"]),
            "Kind of the part.",
        ).required();
        TEXT: TextShape = text_field("text", TextShape::ANY, "The text.").required();
    }
}

request_fields! {
    REFUSAL_FIELDS {
        REFUSAL_TYPE: TextShape =
            text_field("type", TextShape::one_of(&["refusal"]), "Kind of the part.").required();
        REFUSAL: TextShape =
            text_field("refusal", TextShape::ANY, "Text of an earlier refusal.").required();
    }
}

request_fields! {
    REASONING_PART_FIELDS {
        REASONING_PART_TYPE: TextShape = text_field(
            "type",
            TextShape::one_of(&["reasoning_text", "summary_text"]),
            "Kind of the part.",
        ).required();
        REASONING_TEXT: TextShape = text_field("text", TextShape::ANY, "The text.").required();
    }
}

request_fields! {
    REFERENCE_FIELDS {
        REFERENCE_TYPE: TextShape =
            text_field("type", TextShape::one_of(&[REFERENCE]), "Kind of the item.")
                .default("`item_reference`");
        REFERENCE_ID: TextShape =
            text_field("id", TextShape::NOT_EMPTY, "Id of a stored item.").required();
    }
}

/// Fields of items that answers have.
const STATE_FIELDS: &[FieldSpec] = &[
    FieldSpec::ignored(
        "id",
        "Once the response is stored, a request may have the item by this id: `{\"type\": \"item_reference\", \"id\"}` stands for it.",
    ),
    FieldSpec::ignored("status", "Ignored."),
];
/// Fields that no reference has: without a type, these tell it from a message.
const MESSAGE_ONLY: &[FieldSpec] = &[FieldSpec::absent("role"), FieldSpec::absent("content")];
const ENCRYPTED_FIELDS: &[FieldSpec] = &[FieldSpec::ignored(
    "encrypted_content",
    "Ignored: only OpenAI can read it.",
)];

const CONTENT_SHAPE: ValueShape = ValueShape::OneOf(&[
    ValueShape::Text(TextShape::ANY),
    ValueShape::List(ListShape::of(&ValueShape::Object(&PART))),
]);
const PART: ObjectSpec = request_object!("InputPart", &[&[TEXT_FIELDS], &[REFUSAL_FIELDS]]);
const REASONING_PART: ObjectSpec = request_object!("", &[&[REASONING_PART_FIELDS]]);

/// An item of a conversation.
pub(super) const ITEM: ObjectSpec = request_object!(
    "InputItem",
    &[
        &[MESSAGE_FIELDS, STATE_FIELDS],
        &[CALL_FIELDS, STATE_FIELDS],
        &[OUTPUT_FIELDS, STATE_FIELDS],
        &[CUSTOM_FIELDS, STATE_FIELDS],
        &[REASONING_FIELDS, ENCRYPTED_FIELDS, STATE_FIELDS],
        &[REFERENCE_FIELDS, MESSAGE_ONLY],
    ]
);

const MESSAGE: &str = "message";
const REFERENCE: &str = "item_reference";
const ASSISTANT: &str = "assistant";
/// Between texts of the system, escaped.
const PARAGRAPH: &str = r"\n\n";

/// Reads the ids of stored responses and items in a body. A body that is not as it should be is
/// refused when it is read.
pub(super) fn stored_names(body: &[u8]) -> StoredNames {
    let has = |name: &str| body.windows(name.len()).any(|part| part == name.as_bytes());
    if !has(PREVIOUS_RESPONSE_ID.name()) && !has("\"id\"") {
        return StoredNames::default();
    }
    let text = std::str::from_utf8(body).ok();
    let root = text.and_then(|text| Json::check(text).ok());
    let Some(JsonShape::Object(members)) = root.map(Json::shape) else {
        return StoredNames::default();
    };
    let mut previous = Vec::new();
    let mut names = StoredNames::default();
    for (name, value) in members {
        match value.shape() {
            JsonShape::String(id) if name.get() == PREVIOUS_RESPONSE_ID.name() => {
                previous.push(id.get().into_owned());
            }
            JsonShape::Array(items) if name.get() == INPUT.name() => {
                names.items = items.filter_map(reference_id).collect();
            }
            _ => {}
        }
    }
    // A body that names several goes on from none.
    if let [_] = &previous[..] {
        names.previous = previous.pop();
    }
    names
}

/// The id of the stored item for which an item stands.
fn reference_id(item: Json<'_>) -> Option<String> {
    let given = |name| member(item, name).filter(|value| !value.is_null());
    let text = |name| match given(name)?.shape() {
        JsonShape::String(text) => Some(text.get()),
        _ => None,
    };
    let is_reference = match given(REFERENCE_TYPE.name()) {
        Some(_) => text(REFERENCE_TYPE.name())? == REFERENCE,
        None => given(ROLE.name()).is_none() && given(CONTENT.name()).is_none(),
    };
    is_reference
        .then(|| text(REFERENCE_ID.name()))?
        .map(Into::into)
}

/// Stored items by their ids.
pub(super) type NamedDocuments = BTreeMap<String, Document>;

/// Returns the items of a request, those that it has by reference too; a text is a message of the
/// user.
pub(super) fn input_items(fields: &JsonFields, named: &NamedDocuments) -> ItemList {
    let input = fields.any(&INPUT);
    let mut list = JsonText::default();
    list.begin('[');
    match input.map(Json::shape) {
        Some(JsonShape::Array(_)) if named.is_empty() => {
            return ItemList::of(input.expect("it has a shape"));
        }
        Some(JsonShape::Array(items)) => {
            for item in items {
                let stored = reference_id(item).and_then(|id| named.get(&id));
                list.json(stored.map_or(item, Document::root).text());
            }
        }
        _ => {
            let text = input.map_or("\"\"", Json::text);
            let part = format!(r#"{{"type":"input_text","text":{text}}}"#);
            list.json(&format!(
                r#"{{"type":"{MESSAGE}","role":"user","content":[{part}]}}"#
            ));
        }
    }
    list.end(']');
    ItemList::of(Json::check(list.as_str()).expect("it was written here"))
}

/// Writes the messages of a chat request, and returns the body. `earlier` are lists of items that
/// come before the request's own, and `named` those that it has by reference.
pub(super) fn write_conversation(
    fields: &JsonFields,
    earlier: &[Document],
    named: &NamedDocuments,
    chat: JsonText,
) -> Result<JsonText, ApiError> {
    let mut conversation = Conversation {
        system: Vec::new(),
        messages: ChatMessages::new(chat),
        has_begun: false,
    };
    fields.text(&INSTRUCTIONS)?;
    conversation.system.extend(fields.any(&INSTRUCTIONS));
    for document in earlier {
        let JsonShape::Array(items) = document.root().shape() else {
            unreachable!("stored items are a list");
        };
        for item in items {
            let path = PREVIOUS_RESPONSE_ID.name().to_owned();
            conversation.item(&JsonFields::of_value(document, path, item, &ITEM)?)?;
        }
    }
    let input = fields.any(&INPUT).ok_or_else(|| fields.missing(&INPUT))?;
    match input.shape() {
        JsonShape::String(_) => conversation.message("user", &[input]),
        JsonShape::Array(items) => {
            for (index, item) in items.enumerate() {
                let path = format!("{}[{index}]", INPUT.name());
                let item = match reference_id(item) {
                    None => fields.object_at(path, item, &ITEM)?,
                    Some(id) => {
                        let document = named.get(&id);
                        let document = document.ok_or_else(|| ApiError::item_not_found(&id))?;
                        JsonFields::of_value(document, path, document.root(), &ITEM)?
                    }
                };
                conversation.item(&item)?;
            }
        }
        _ => {
            let path = fields.path_of(&INPUT);
            return Err(wrong_type(&path, "a string or an array of items", input));
        }
    }
    if !conversation.has_begun && conversation.system.is_empty() {
        return Err(fields.invalid(&INPUT, "`input` must have at least one item."));
    }
    conversation.begin();
    Ok(conversation.messages.finish())
}

/// A conversation that is being written. Some templates allow one message of the system, at the
/// beginning, so those before any other are one.
struct Conversation<'a> {
    system: Vec<Json<'a>>,
    messages: ChatMessages<'a>,
    /// Whether a message beside the system's has come.
    has_begun: bool,
}

impl<'a> Conversation<'a> {
    /// Writes the system's message, if there is one, before the first other message.
    fn begin(&mut self) {
        if !std::mem::replace(&mut self.has_begun, true) && !self.system.is_empty() {
            self.messages.message("system", &self.system, PARAGRAPH);
        }
    }

    fn message(&mut self, role: &str, texts: &[Json<'a>]) {
        let is_of_system = matches!(role, "system" | "developer");
        if is_of_system && !self.has_begun {
            self.system.extend(texts);
            return;
        }
        self.begin();
        if role != ASSISTANT {
            return self.messages.message(role, texts, LINE_BREAK);
        }
        if self.messages.has_answered() {
            self.messages.end_answer();
        }
        for text in texts {
            self.messages.answer_text(*text);
        }
    }

    fn item(&mut self, item: &JsonFields<'a>) -> Result<(), ApiError> {
        let kind = item.text(&MESSAGE_TYPE)?;
        let kind = kind.as_deref().unwrap_or(MESSAGE);
        if is_kind(kind, &MESSAGE_TYPE) {
            let role = item.required_text(&ROLE)?;
            if !is_kind(&role, &ROLE) {
                let (path, roles) = (item.path_of(&ROLE), ROLE.choices().join(", "));
                let role = clipped(&role);
                let message = format!("`{path}` must be one of {roles}, not {role:?}.");
                return Err(item.invalid(&ROLE, message));
            }
            let texts = content(item, &CONTENT)?;
            self.message(&role, &texts);
        } else if is_kind(kind, &CALL_TYPE) {
            self.begin();
            let (id, name) = (string(item, &CALL_ID)?, string(item, &CALL_NAME)?);
            let arguments = object_of(string(item, &CALL_ARGUMENTS)?);
            match item.text(&CALL_NAMESPACE)? {
                None => self.messages.call(id, name.text(), &arguments),
                Some(namespace) => {
                    let name = shown_name(&namespace, &item.required_text(&CALL_NAME)?);
                    self.messages
                        .call(id, &Value::from(name).to_string(), &arguments);
                }
            }
        } else if is_kind(kind, &CUSTOM_TYPE) {
            self.begin();
            let (id, name) = (string(item, &CUSTOM_ID)?, string(item, &CUSTOM_NAME)?);
            let input = string(item, &CUSTOM_INPUT)?.text();
            self.messages
                .call(id, name.text(), &custom_arguments(input));
        } else if is_kind(kind, &OUTPUT_TYPE) {
            self.begin();
            let id = string(item, &OUTPUT_ID)?;
            self.messages.result(id, &content(item, &OUTPUT)?);
        } else if is_kind(kind, &REASONING_TYPE) {
            self.begin();
            if self.messages.has_answered() {
                self.messages.end_answer();
            }
            let mut texts = reasoning(item, &REASONING_CONTENT)?;
            if texts.is_empty() {
                texts = reasoning(item, &REASONING_SUMMARY)?;
            }
            for text in texts {
                self.messages.reasoning(text);
            }
        } else {
            let path = item.path_of(&MESSAGE_TYPE);
            let kind = clipped(kind);
            let message = format!("`{path}`: items of type {kind:?} are not supported.");
            return Err(item.unsupported(&MESSAGE_TYPE, message));
        }
        Ok(())
    }
}

fn is_kind(kind: &str, field: &RequestField<TextShape>) -> bool {
    field.choices().contains(&kind)
}

/// Returns a required text as it is written, with its quotes.
fn string<'a>(
    item: &JsonFields<'a>,
    field: &RequestField<TextShape>,
) -> Result<Json<'a>, ApiError> {
    item.required_text(field)?;
    item.any(field).ok_or_else(|| item.missing(field))
}

/// Returns the arguments of a call as JSON. An agent sends back what the model wrote, mistakes
/// included, and the model is to see them.
fn object_of(arguments: Json<'_>) -> String {
    let JsonShape::String(text) = arguments.shape() else {
        unreachable!("the reader has checked it");
    };
    let text = text.get().into_owned();
    let is_object = |document: Document| matches!(document.root().shape(), JsonShape::Object(_));
    if text.trim().is_empty() || Document::check(text).is_ok_and(is_object) {
        return arguments.text().to_owned();
    }
    format!("{{\"{BROKEN_ARGUMENTS}\":{}}}", arguments.text())
}

/// Returns the texts of a content, a string or parts.
fn content<'a>(
    item: &JsonFields<'a>,
    field: &RequestField<AnyValue>,
) -> Result<Vec<Json<'a>>, ApiError> {
    let content = item.any(field).ok_or_else(|| item.missing(field))?;
    let path = item.path_of(field);
    match content.shape() {
        JsonShape::String(_) => Ok(vec![content]),
        JsonShape::Array(parts) => part_texts(item, &path, parts),
        _ => Err(wrong_type(&path, "a string or an array of parts", content)),
    }
}

fn part_texts<'a>(
    item: &JsonFields<'a>,
    path: &str,
    parts: JsonItems<'a>,
) -> Result<Vec<Json<'a>>, ApiError> {
    let mut texts = Vec::new();
    for (index, part) in parts.enumerate() {
        let part = item.object_at(format!("{path}[{index}]"), part, &PART)?;
        let kind = part.required_text(&TEXT_TYPE)?;
        if is_kind(&kind, &TEXT_TYPE) {
            texts.push(string(&part, &TEXT)?);
        } else if is_kind(&kind, &REFUSAL_TYPE) {
            texts.push(string(&part, &REFUSAL)?);
        } else {
            let path = part.path_of(&TEXT_TYPE);
            let kind = clipped(&kind);
            let message = format!(
                "`{path}`: parts of type {kind:?} are not supported; the model reads text only."
            );
            return Err(part.unsupported(&TEXT_TYPE, message));
        }
    }
    Ok(texts)
}

fn reasoning<'a>(
    item: &JsonFields<'a>,
    field: &RequestField<ListShape>,
) -> Result<Vec<Json<'a>>, ApiError> {
    let mut texts = Vec::new();
    for (index, part) in item.list(field)?.into_iter().flatten().enumerate() {
        let path = format!("{}[{index}]", item.path_of(field));
        let part = item.object_at(path, part, &REASONING_PART)?;
        let kind = part.required_text(&REASONING_PART_TYPE)?;
        if !is_kind(&kind, &REASONING_PART_TYPE) {
            let path = part.path_of(&REASONING_PART_TYPE);
            let message = format!("`{path}` {:?} is not known.", clipped(&kind));
            return Err(part.invalid(&REASONING_PART_TYPE, message));
        }
        texts.push(string(&part, &REASONING_TEXT)?);
    }
    Ok(texts)
}
