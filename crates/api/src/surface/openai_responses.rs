//! `POST /v1/responses`, OpenAI's Responses API.
//!
//! A request becomes the body of a chat request, so that both APIs serve the same prompts and obey
//! the same rules. Fields that are unknown here are ignored: agents send many that mean something
//! to OpenAI's servers only. An answer repeats the fields of its request, as OpenAI's do.

mod answer;
mod input;
mod tools;

use super::chat_body::{ConvertedTools, JsonText, generate_request, input_tokens_count};
use super::{AnswerEnd, AnswerHead, EventRenderer, Surface, json_body};
use crate::body_work::BodyWork;
use crate::error::{ApiError, FieldNames};
use crate::field::{
    AnyValue, FieldGroup, FieldSpec, FlagValue, IntegerRange, JsonFields, ListShape, MapKeys,
    MapShape, ObjectSpec, RefusedField, TextShape, ValueShape, any, clipped, flag, integer, list,
    map, object, request_fields, request_object, text as text_field,
};
use crate::openapi::{JSON_OR_EVENTS, RouteDoc};
use crate::output_piece::OutputPieces;
use crate::request::sampling::{SAMPLING_FIELDS, TOKENS};
use crate::request::{
    self, AnswerFacts, GenerateRequest, LOGPROBS, MODEL_FIELDS, ResponseMode, ScoredTokens,
    UsageShown,
};
use crate::response_store::{EarlierConversation, ItemList, StoredNames};
use answer::ResponseEvents;
use cleave_text::ModelText;
use cleave_text::json::{Document, Json, JsonShape};
use input::{NamedDocuments, input_items, write_conversation};
use serde_json::{Value, json};
use std::sync::Arc;
use tools::{ResponseTools, TOOL_FIELDS, response_tools};

request_fields! {
    CONVERSATION_FIELDS {
        INPUT: AnyValue = any(
            "input",
            ValueShape::OneOf(&[
                ValueShape::Text(TextShape::ANY),
                ValueShape::List(ListShape::of(&ValueShape::Object(&input::ITEM)).at_least(1)),
            ]),
            "A text of the user, or the items of the whole conversation.",
        ).required();
        INSTRUCTIONS: TextShape = text_field(
            "instructions",
            TextShape::ANY,
            "Instructions before the conversation; messages of `system` and `developer` at its beginning are joined to them.",
        );
        PREVIOUS_RESPONSE_ID: TextShape = text_field(
            "previous_response_id",
            TextShape::ANY,
            "Id of a stored response: the items of its conversation, inputs and outputs, come before `input`. Its instructions do not.",
        );
        REASONING: &'static ObjectSpec =
            object("reasoning", &REASONING_OBJECT, "Effort of the reasoning.");
    }
}

request_fields! {
    OUTPUT_FIELDS {
        MAX_OUTPUT_TOKENS: IntegerRange =
            integer("max_output_tokens", 1..=*TOKENS.end(), "Limit of output tokens.")
                .default("the rest of `max_model_len`");
        TEXT: &'static ObjectSpec = object("text", &TEXT_OBJECT, "Form of the output.");
        THINKING_TOKEN_BUDGET: IntegerRange = integer(
            "thinking_token_budget",
            TOKENS,
            "Limit of the tokens of reasoning, as in chat.",
        ).default("no limit");
        STREAM: FlagValue = flag("stream", "The answer is sent as server-sent events.");
        STORE: FlagValue = flag(
            "store",
            "Whether the response is stored, so that a request may name it; see [stored responses](#stored-responses). The answer says whether it is.",
        ).default("true");
        BACKGROUND: FlagValue = flag(
            "background",
            "The request is answered at once, and the response is made without a connection; see [stored responses](#stored-responses). Not with `stream`, nor with `store: false`.",
        );
        METADATA: MapShape = map(
            "metadata",
            MapShape { keys: MapKeys::Any, values: &ValueShape::Any, count_max: None },
            "Repeated in the answer.",
        );
        TRUNCATION: TextShape = text_field(
            "truncation",
            TextShape::one_of(&["disabled"]),
            "No item is removed: a conversation that is too long is a 400.",
        ).default("`disabled`");
        TOP_LOGPROBS: IntegerRange = integer(
            "top_logprobs",
            LOGPROBS,
            "Number of likeliest tokens beside each token of a message; above 0 it asks for log-probabilities, too.",
        ).default("0");
        INCLUDE: ListShape = list(
            "include",
            ListShape::of(&ValueShape::Text(TextShape::ANY)),
            "`message.output_text.logprobs`: messages have the log-probabilities of their tokens; not with `tools`. Others are ignored.",
        );
    }
}

/// Fields that are named so that nobody looks for an effect. Answers repeat them.
const REPEATED_FIELDS: FieldGroup = &[
    FieldSpec::ignored(
        "prompt_cache_key",
        "Repeated in the answer; every prefix is kept for reuse.",
    ),
    FieldSpec::ignored("safety_identifier", "Repeated in the answer."),
    FieldSpec::ignored(
        "max_tool_calls",
        "Repeated in the answer; it limits calls of tools that the server runs, of which there are none.",
    ),
    FieldSpec::ignored("user", "Repeated in the answer."),
];

/// Fields that are named so that nobody looks for an effect.
const IGNORED_FIELDS: FieldGroup = &[FieldSpec::ignored(
    "service_tier",
    "Ignored: SLO classes are chosen by a header, and the answer says `default`.",
)];

request_fields! {
    TEXT_FIELDS {
        FORMAT: &'static ObjectSpec = object(
            "format",
            &FORMAT_OBJECT,
            "Form of the output, as `response_format` of chat.",
        );
        VERBOSITY: TextShape = text_field("verbosity", TextShape::ANY, "Ignored.");
    }
}

request_fields! {
    FORMAT_FIELDS {
        FORMAT_TYPE: TextShape = text_field(
            "type",
            TextShape::one_of(&["text", "json_object", "json_schema"]),
            "Any text, any JSON object, or JSON by a schema.",
        ).required();
        FORMAT_NAME: TextShape =
            text_field("name", TextShape::ANY, "A name for people; it changes nothing.");
        FORMAT_SCHEMA: MapShape = map(
            "schema",
            MapShape { keys: MapKeys::Any, values: &ValueShape::Any, count_max: None },
            "The JSON Schema; only, and always, with the type `json_schema`.",
        );
        FORMAT_STRICT: FlagValue = flag("strict", "Changes nothing: every schema is enforced.");
    }
}

request_fields! {
    REASONING_FIELDS {
        EFFORT: TextShape =
            text_field("effort", TextShape::ANY, "`reasoning_effort` of chat.");
        SUMMARY: TextShape = text_field(
            "summary",
            TextShape::ANY,
            "Ignored: no summary is made, and items of reasoning have the reasoning itself.",
        );
    }
}

const TEXT_OBJECT: ObjectSpec = request_object!("", &[&[TEXT_FIELDS]]);
const FORMAT_OBJECT: ObjectSpec = request_object!("", &[&[FORMAT_FIELDS]]);
const REASONING_OBJECT: ObjectSpec = request_object!("", &[&[REASONING_FIELDS]]);

/// Fields that would change the answer.
const REFUSED_FIELDS: &[RefusedField] = &[
    RefusedField::new(
        "conversation",
        "conversations have no object of their own; `previous_response_id` goes on with one",
    ),
    RefusedField::new("prompt", "no prompts are stored; send the text as `input`"),
];

const RESPONSES_REQUEST: ObjectSpec = request_object!(
    "ResponsesRequest",
    &[&[
        MODEL_FIELDS,
        CONVERSATION_FIELDS,
        TOOL_FIELDS,
        OUTPUT_FIELDS,
        SAMPLING_FIELDS,
        REPEATED_FIELDS,
        IGNORED_FIELDS,
    ]],
    &[REFUSED_FIELDS]
);

/// The body of `/v1/responses/input_tokens`: a request without the fields of its output.
pub(crate) const COUNT_REQUEST: ObjectSpec = request_object!(
    "ResponseTokensRequest",
    &[&[MODEL_FIELDS, CONVERSATION_FIELDS, TOOL_FIELDS]],
    &[REFUSED_FIELDS]
);

/// Fields of chat by their names here.
const NAMES: FieldNames = &[
    ("response_format.json_schema", "text.format"),
    ("response_format", "text.format"),
    ("reasoning_effort", "reasoning.effort"),
    ("max_completion_tokens", "max_output_tokens"),
    ("messages", INPUT.name()),
];

const DOC: RouteDoc = RouteDoc {
    operation: "responses",
    summary: "Continue a conversation (OpenAI Responses).",
    request: Some(&RESPONSES_REQUEST),
    contents: JSON_OR_EVENTS,
    schema: "ResponseAnswer",
    description: "The answer; with `stream: true` as server-sent events, the last of which is `response.completed` or `response.incomplete` if the whole answer was sent, otherwise `response.failed`.",
    ..request::GENERATE_DOC
};

pub(crate) struct ResponsesSurface;

/// OpenAI Responses, a conversation of items.
pub(crate) static RESPONSES: ResponsesSurface = ResponsesSurface;

impl Surface for ResponsesSurface {
    fn route(&self) -> &'static str {
        "/v1/responses"
    }

    fn operation(&self) -> &'static str {
        "chat"
    }

    fn doc(&'static self) -> &'static RouteDoc {
        &DOC
    }

    fn body_work(&self) -> BodyWork {
        BodyWork::RenderConverted
    }

    fn parse(&self, body: &Document, model: &ModelText) -> Result<GenerateRequest, ApiError> {
        response(body, model, &EarlierConversation::default())
    }

    fn stored_names(&self, body: &[u8]) -> StoredNames {
        input::stored_names(body)
    }

    fn parse_after(
        &self,
        body: &Document,
        model: &ModelText,
        earlier: &EarlierConversation,
    ) -> Result<GenerateRequest, ApiError> {
        response(body, model, earlier)
    }

    fn whole_body(
        &'static self,
        head: AnswerHead,
        choices: &[OutputPieces],
        end: AnswerEnd,
    ) -> Vec<u8> {
        json_body(&ResponseEvents::new(head).whole(choices, end))
    }

    fn events(&'static self, head: AnswerHead) -> Option<Box<dyn EventRenderer>> {
        Some(Box::new(ResponseEvents::new(head)))
    }

    fn error(&self, error: &ApiError, _: &str) -> Value {
        error.object()
    }
}

/// Checks a body, renders its conversation and tokenizes it.
fn response(
    body: &Document,
    model: &ModelText,
    earlier: &EarlierConversation,
) -> Result<GenerateRequest, ApiError> {
    let fields = JsonFields::of_body(body, &RESPONSES_REQUEST)?;
    request::check_model(&fields, model)?;
    fields.check_refused()?;
    check_output_fields(&fields)?;
    let tools = response_tools(&fields)?;
    let logprobs = logprobs(&fields, &tools)?;
    let named = named_documents(earlier);
    let mut chat = conversation(&fields, &tools.chat, earlier, &named)?;
    write_format(&fields, &mut chat)?;
    if let Some(tokens) = fields.integer(&MAX_OUTPUT_TOKENS)? {
        chat.member("max_completion_tokens", &tokens.to_string());
    }
    if let Some(tokens) = fields.integer(&THINKING_TOKEN_BUDGET)? {
        chat.member(THINKING_TOKEN_BUDGET.name(), &tokens.to_string());
    }
    if let Some(top) = logprobs {
        chat.member("logprobs", "true");
        chat.member(TOP_LOGPROBS.name(), &top.to_string());
    }
    for (name, value) in fields.given(SAMPLING_FIELDS) {
        chat.member(name, value.text());
    }
    chat.end('}');
    let mut ask = generate_request(chat, model, NAMES)?;
    ask.warnings.extend(tools.chat.warning);
    ask.output.scored = ScoredTokens::Answer;
    ask.output.custom_tools = tools.custom.as_slice().into();
    ask.delivery = delivery(&fields)?;
    ask.facts = AnswerFacts {
        namespaced: tools.namespaced.as_slice().into(),
        repeated: Some(repeated(&fields, &tools, &ask)?.into()),
        input: fields
            .flag(&STORE)?
            .unwrap_or(true)
            .then(|| input_items(&fields, &named)),
        is_background: ask.delivery == ResponseMode::Background,
        ..AnswerFacts::default()
    };
    Ok(ask)
}

/// Reads how the answer is given.
fn delivery(fields: &JsonFields) -> Result<ResponseMode, ApiError> {
    let is_streamed = fields.flag(&STREAM)?.unwrap_or(false);
    if !fields.flag(&BACKGROUND)?.unwrap_or(false) {
        return Ok(if is_streamed {
            ResponseMode::Stream(UsageShown::AtEnd)
        } else {
            ResponseMode::Whole
        });
    }
    if is_streamed {
        let message = "`background`: events are sent on the connection of their request, so not together with `stream`.";
        return Err(fields.unsupported(&BACKGROUND, message));
    }
    if fields.flag(&STORE)? == Some(false) {
        let message = "`background` needs `store`: the response is found by its id only.";
        return Err(fields.invalid(&BACKGROUND, message));
    }
    Ok(ResponseMode::Background)
}

/// Counts the tokens of a request's conversation; returns the JSON of the answer.
pub(crate) fn count_tokens(
    body: &Document,
    model: &ModelText,
    earlier: &EarlierConversation,
) -> Result<Vec<u8>, ApiError> {
    let fields = JsonFields::of_body(body, &COUNT_REQUEST)?;
    request::check_model(&fields, model)?;
    fields.check_refused()?;
    let (tools, named) = (response_tools(&fields)?, named_documents(earlier));
    let mut chat = conversation(&fields, &tools.chat, earlier, &named)?;
    chat.end('}');
    let count = input_tokens_count(chat, model, NAMES, INPUT.name())?;
    let answer = json!({"object": "response.input_tokens", "input_tokens": count});
    Ok(answer.to_string().into_bytes())
}

/// Begins the chat request of a conversation; further members may follow.
fn conversation(
    fields: &JsonFields,
    tools: &ConvertedTools<'_>,
    earlier: &EarlierConversation,
    named: &NamedDocuments,
) -> Result<JsonText, ApiError> {
    let earlier = earlier_items(fields, earlier)?;
    let mut chat = JsonText::default();
    chat.begin('{');
    let mut chat = write_conversation(fields, &earlier, named, chat)?;
    tools.write(&mut chat);
    if let Some(reasoning) = fields.object(&REASONING)? {
        reasoning.text(&SUMMARY)?;
        if let Some(effort) = reasoning.text(&EFFORT)? {
            chat.name("reasoning_effort");
            chat.text(&effort);
        }
    }
    Ok(chat)
}

/// The stored items that a request has by reference.
fn named_documents(earlier: &EarlierConversation) -> NamedDocuments {
    let texts = earlier.items.texts().iter();
    let document = |text: &Arc<str>| Document::check(text.to_string());
    texts
        .map(|(id, text)| (id.clone(), document(text).expect("it was checked before")))
        .collect()
}

/// The items of a stored conversation, each turn's input and output.
fn earlier_items(
    fields: &JsonFields,
    earlier: &EarlierConversation,
) -> Result<Vec<Document>, ApiError> {
    let last = earlier.turns.last().map(|turn| &*turn.id);
    if fields.text(&PREVIOUS_RESPONSE_ID)?.as_deref() != last {
        let message = "`previous_response_id` must be given once.".to_owned();
        return Err(ApiError::previous_not_found(message));
    }
    let items = earlier
        .turns
        .iter()
        .flat_map(|turn| [&turn.input, &turn.output]);
    let document = |items: &ItemList| Document::check(items.text().to_owned());
    let items: Result<Vec<Document>, _> = items.map(document).collect();
    Ok(items.expect("items were checked before they were stored"))
}

/// Checks fields that change nothing, or of which one value is served.
fn check_output_fields(fields: &JsonFields) -> Result<(), ApiError> {
    fields.map(&METADATA)?;
    if let Some(truncation) = fields.text(&TRUNCATION)?
        && !TRUNCATION.choices().contains(&&*truncation)
    {
        let message = "`truncation`: no item of a conversation is removed; leave it out.";
        return Err(fields.unsupported(&TRUNCATION, message));
    }
    Ok(())
}

/// Number of likeliest tokens beside each token of a message; `None` if messages have no
/// log-probabilities. Tokens of calls would be among them.
fn logprobs(fields: &JsonFields, tools: &ResponseTools<'_>) -> Result<Option<i64>, ApiError> {
    let top = fields.integer(&TOP_LOGPROBS)?.unwrap_or(0);
    let mut included = fields.list(&INCLUDE)?.into_iter().flatten();
    let is_included = included.any(|item| match item.shape() {
        JsonShape::String(text) => text.get() == "message.output_text.logprobs",
        _ => false,
    });
    if !is_included && top == 0 {
        return Ok(None);
    }
    if !tools.chat.tools.is_empty() {
        let message = "Log-probabilities of messages cannot be had together with `tools`.";
        return Err(if is_included {
            fields.unsupported(&INCLUDE, message)
        } else {
            fields.unsupported(&TOP_LOGPROBS, message)
        });
    }
    Ok(Some(top))
}

fn write_format(fields: &JsonFields, chat: &mut JsonText) -> Result<(), ApiError> {
    let Some(text) = fields.object(&TEXT)? else {
        return Ok(());
    };
    text.text(&VERBOSITY)?;
    let Some(format) = text.object(&FORMAT)? else {
        return Ok(());
    };
    let kind = format.required_text(&FORMAT_TYPE)?;
    if !FORMAT_TYPE.choices().contains(&&*kind) {
        let message = format!("`text.format.type` {:?} is not known.", clipped(&kind));
        return Err(format.invalid(&FORMAT_TYPE, message));
    }
    format.text(&FORMAT_NAME)?;
    format.flag(&FORMAT_STRICT)?;
    let schema = format.map(&FORMAT_SCHEMA)?.and(format.any(&FORMAT_SCHEMA));
    chat.name("response_format");
    chat.begin('{');
    chat.name("type");
    chat.text(&kind);
    match (&*kind, schema) {
        ("json_schema", None) => return Err(format.missing(&FORMAT_SCHEMA)),
        ("json_schema", Some(schema)) => {
            chat.name("json_schema");
            chat.begin('{');
            chat.member("schema", schema.text());
            chat.end('}');
        }
        (_, Some(_)) => {
            let message = "`text.format.schema` needs the type `json_schema`.";
            return Err(format.invalid(&FORMAT_SCHEMA, message));
        }
        (_, None) => {}
    }
    chat.end('}');
    Ok(())
}

/// Writes the form of the output as the answer repeats it, in full.
fn write_repeated_format(fields: &JsonFields, out: &mut JsonText) -> Result<(), ApiError> {
    let text = fields.object(&TEXT)?;
    let format = text.map(|text| text.object(&FORMAT)).transpose()?.flatten();
    let kind = format.as_ref().and_then(|format| format.any(&FORMAT_TYPE));
    out.name(TEXT.name());
    out.begin('{');
    out.name(FORMAT.name());
    out.begin('{');
    out.member(FORMAT_TYPE.name(), kind.map_or(r#""text""#, Json::text));
    if let Some(format) = format
        && let Some(schema) = format.any(&FORMAT_SCHEMA)
    {
        let name = format.any(&FORMAT_NAME);
        out.member(FORMAT_NAME.name(), name.map_or(r#""output""#, Json::text));
        out.member("description", "null");
        out.member(FORMAT_SCHEMA.name(), schema.text());
        out.member(FORMAT_STRICT.name(), "true");
    }
    out.end('}');
    out.end('}');
    Ok(())
}

/// Returns the fields that the answer repeats, the text of a JSON object.
fn repeated(
    fields: &JsonFields,
    tools: &ResponseTools<'_>,
    ask: &GenerateRequest,
) -> Result<String, ApiError> {
    let mut out = JsonText::default();
    out.begin('{');
    for (name, value, default) in [
        (INSTRUCTIONS.name(), fields.any(&INSTRUCTIONS), "null"),
        (
            MAX_OUTPUT_TOKENS.name(),
            fields.any(&MAX_OUTPUT_TOKENS),
            "null",
        ),
        (METADATA.name(), fields.any(&METADATA), "{}"),
        (TOP_LOGPROBS.name(), fields.any(&TOP_LOGPROBS), "0"),
        (
            PREVIOUS_RESPONSE_ID.name(),
            fields.any(&PREVIOUS_RESPONSE_ID),
            "null",
        ),
    ] {
        out.member(name, value.map_or(default, Json::text));
    }
    let background = fields.any(&BACKGROUND).map_or("false", Json::text);
    out.member(BACKGROUND.name(), background);
    tools::write_repeated(fields, tools, &mut out);
    let reasoning = fields.object(&REASONING)?;
    let effort = reasoning
        .as_ref()
        .and_then(|reasoning| reasoning.any(&EFFORT));
    out.name("reasoning");
    out.begin('{');
    out.member("effort", effort.map_or("null", Json::text));
    out.member("summary", "null");
    out.end('}');
    write_repeated_format(fields, &mut out)?;
    for (name, value) in [
        ("temperature", ask.sampling.temperature),
        ("top_p", ask.sampling.top_p),
        ("presence_penalty", ask.sampling.presence_penalty),
        ("frequency_penalty", ask.sampling.frequency_penalty),
    ] {
        out.member(name, &value.to_string());
    }
    for field in REPEATED_FIELDS {
        let given = fields.given(REPEATED_FIELDS);
        let mut given = given.filter(|(name, _)| *name == field.name);
        let value = given.next().map_or("null", |(_, value)| value.text());
        out.member(field.name, value);
    }
    for (name, value) in [
        ("service_tier", r#""default""#),
        ("truncation", r#""disabled""#),
    ] {
        out.member(name, value);
    }
    out.end('}');
    Ok(out.into_string())
}
