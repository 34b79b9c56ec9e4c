//! `POST /v1/responses`, OpenAI's Responses API, without stored state.
//!
//! A request becomes the body of a chat request, so that both APIs serve the same prompts and obey
//! the same rules. Fields that are unknown here are ignored: agents send many that mean something
//! to OpenAI's servers only. An answer repeats the fields of its request, as OpenAI's do.

mod answer;
mod input;
mod tools;

use super::chat_body::{JsonText, generate_request};
use super::{AnswerEnd, AnswerHead, EventRenderer, Surface};
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
    self, AnswerFacts, GenerateRequest, LOGPROBS, MODEL_FIELDS, ResponseMode, UsageShown,
};
use answer::ResponseEvents;
use cleave_text::ModelText;
use cleave_text::json::{Document, Json, JsonShape};
use input::write_conversation;
use serde_json::Value;
use tools::{TOOL_FIELDS, response_tools};

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
    }
}

request_fields! {
    OUTPUT_FIELDS {
        MAX_OUTPUT_TOKENS: IntegerRange =
            integer("max_output_tokens", 1..=*TOKENS.end(), "Limit of output tokens.")
                .default("the rest of `max_model_len`");
        TEXT: &'static ObjectSpec = object("text", &TEXT_OBJECT, "Form of the output.");
        REASONING: &'static ObjectSpec =
            object("reasoning", &REASONING_OBJECT, "Effort of the reasoning.");
        THINKING_TOKEN_BUDGET: IntegerRange = integer(
            "thinking_token_budget",
            TOKENS,
            "Limit of the tokens of reasoning, as in chat.",
        ).default("no limit");
        STREAM: FlagValue = flag("stream", "The answer is sent as server-sent events.");
        STORE: FlagValue = flag(
            "store",
            "Changes nothing: no answer is stored, and each says `store: false`.",
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
            "Only 0: answers of this API have no log-probabilities; chat has them.",
        ).default("0");
        INCLUDE: ListShape = list(
            "include",
            ListShape::of(&ValueShape::Text(TextShape::ANY)),
            "Ignored, except that `message.output_text.logprobs` is refused.",
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
    FieldSpec::ignored("user", "Repeated in the answer."),
];

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
        "previous_response_id",
        "no answer is stored; send the whole conversation as `input`",
    ),
    RefusedField::new(
        "conversation",
        "no conversation is stored; send it as `input`",
    ),
    RefusedField::new("prompt", "no prompts are stored; send the text as `input`"),
    RefusedField::new(
        "background",
        "an answer is sent on the connection of its request",
    ),
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
    ]],
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

pub(super) struct ResponsesSurface;

/// OpenAI Responses, a conversation of items.
pub(super) static RESPONSES: ResponsesSurface = ResponsesSurface;

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
        response(body, model)
    }

    fn whole(&'static self, head: AnswerHead, choices: &[OutputPieces], end: AnswerEnd) -> Value {
        ResponseEvents::new(head).whole(choices, end)
    }

    fn events(&'static self, head: AnswerHead) -> Box<dyn EventRenderer> {
        Box::new(ResponseEvents::new(head))
    }

    fn error(&self, error: &ApiError, _: &str) -> Value {
        error.object()
    }
}

/// Checks a body, renders its conversation and tokenizes it.
fn response(body: &Document, model: &ModelText) -> Result<GenerateRequest, ApiError> {
    let fields = JsonFields::of_body(body, &RESPONSES_REQUEST)?;
    request::check_model(&fields, model)?;
    fields.check_refused()?;
    check_output_fields(&fields)?;
    let tools = response_tools(&fields)?;
    let mut chat = JsonText::default();
    chat.begin('{');
    let mut chat = write_conversation(&fields, chat)?;
    tools.write(&mut chat);
    write_format(&fields, &mut chat)?;
    if let Some(tokens) = fields.integer(&MAX_OUTPUT_TOKENS)? {
        chat.member("max_completion_tokens", &tokens.to_string());
    }
    if let Some(tokens) = fields.integer(&THINKING_TOKEN_BUDGET)? {
        chat.member(THINKING_TOKEN_BUDGET.name(), &tokens.to_string());
    }
    if let Some(reasoning) = fields.object(&REASONING)? {
        reasoning.text(&SUMMARY)?;
        if let Some(effort) = reasoning.text(&EFFORT)? {
            chat.name("reasoning_effort");
            chat.text(&effort);
        }
    }
    for (name, value) in fields.given(SAMPLING_FIELDS) {
        chat.member(name, value.text());
    }
    chat.end('}');
    let mut ask = generate_request(chat, model, NAMES)?;
    ask.warnings.extend(tools.warning);
    ask.delivery = match fields.flag(&STREAM)? {
        Some(true) => ResponseMode::Stream(UsageShown::AtEnd),
        Some(false) | None => ResponseMode::Whole,
    };
    ask.facts = AnswerFacts {
        repeated: Some(repeated(&fields, &ask)?.into()),
        ..AnswerFacts::default()
    };
    Ok(ask)
}

/// Checks fields that change nothing, or of which one value is served.
fn check_output_fields(fields: &JsonFields) -> Result<(), ApiError> {
    fields.flag(&STORE)?;
    fields.map(&METADATA)?;
    if let Some(truncation) = fields.text(&TRUNCATION)?
        && !TRUNCATION.choices().contains(&&*truncation)
    {
        let message = "`truncation`: no item of a conversation is removed; leave it out.";
        return Err(fields.unsupported(&TRUNCATION, message));
    }
    if fields
        .integer(&TOP_LOGPROBS)?
        .is_some_and(|count| count > 0)
    {
        let message =
            "`top_logprobs`: answers of this API have no log-probabilities; chat has them.";
        return Err(fields.unsupported(&TOP_LOGPROBS, message));
    }
    let mut included = fields.list(&INCLUDE)?.into_iter().flatten();
    let wants_logprobs = included.any(|item| match item.shape() {
        JsonShape::String(text) => text.get() == "message.output_text.logprobs",
        _ => false,
    });
    if wants_logprobs {
        let message = "`include`: answers of this API have no log-probabilities; chat has them.";
        return Err(fields.unsupported(&INCLUDE, message));
    }
    Ok(())
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

/// Returns the fields that the answer repeats, the text of a JSON object.
fn repeated(fields: &JsonFields, ask: &GenerateRequest) -> Result<String, ApiError> {
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
    ] {
        out.member(name, value.map_or(default, Json::text));
    }
    tools::write_repeated(fields, &mut out);
    let reasoning = fields.object(&REASONING)?;
    let effort = reasoning
        .as_ref()
        .and_then(|reasoning| reasoning.any(&EFFORT));
    out.name("reasoning");
    out.begin('{');
    out.member("effort", effort.map_or("null", Json::text));
    out.member("summary", "null");
    out.end('}');
    let text = fields.object(&TEXT)?;
    let format = text.as_ref().and_then(|text| text.any(&FORMAT));
    out.name("text");
    out.begin('{');
    out.member("format", format.map_or(r#"{"type":"text"}"#, Json::text));
    out.end('}');
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
        ("background", "false"),
        ("max_tool_calls", "null"),
        ("previous_response_id", "null"),
        ("service_tier", r#""default""#),
        ("store", "false"),
        ("top_logprobs", "0"),
        ("truncation", r#""disabled""#),
    ] {
        out.member(name, value);
    }
    out.end('}');
    Ok(out.into_string())
}
