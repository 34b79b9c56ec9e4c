//! `POST /v1/messages` and `/v1/messages/count_tokens`, Anthropic's Messages API.
//!
//! A request becomes the body of a chat request, so that both APIs serve the same prompts and obey
//! the same rules. Fields that are unknown here are ignored: clients of this API send many that
//! change nothing for a server without Anthropic's features.

mod answer;
mod content;
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
use crate::request::sampling::{SAMPLING_FIELDS, STOP_TEXT, STOPS_MAX, TOKENS};
use crate::request::{
    self, ANTHROPIC_HEADERS, ANTHROPIC_VERSION, AnswerFacts, GenerateRequest, MODEL_FIELDS,
    ReasoningShown, ResponseMode, UsageShown,
};
use answer::MessageEvents;
use axum::http::{HeaderMap, HeaderName, StatusCode};
use cleave_text::ModelText;
use cleave_text::json::Document;
use content::{LastRole, write_conversation};
use serde_json::{Value, json};
use tools::{TOOL_FIELDS, request_tools};

request_fields! {
    CONVERSATION_FIELDS {
        MESSAGES: ListShape = list(
            "messages",
            ListShape::of(&ValueShape::Object(&content::MESSAGE)).at_least(1),
            "The conversation. An assistant's text at its end is continued.",
        ).required();
        SYSTEM: AnyValue = any(
            "system",
            ValueShape::OneOf(&[
                ValueShape::Text(TextShape::ANY),
                ValueShape::List(ListShape::of(&ValueShape::Object(&content::SYSTEM_BLOCK))),
            ]),
            "Instructions before the conversation. A block that begins with `x-anthropic-billing-header` loses its first line, which differs in each request and would keep the prefix cache from finding the rest.",
        );
        THINKING: &'static ObjectSpec = object(
            "thinking",
            &THINKING_OBJECT,
            "Whether the model is to reason, and the answer has the reasoning.",
        ).default("disabled");
        OUTPUT_CONFIG: &'static ObjectSpec =
            object("output_config", &OUTPUT_CONFIG_OBJECT, "Form of the output, and effort.");
    }
}

request_fields! {
    OUTPUT_FIELDS {
        MAX_TOKENS: IntegerRange = integer(
            "max_tokens",
            1..=*TOKENS.end(),
            "Limit of output tokens. The rest of the context is a limit, too.",
        ).required();
        STOP_SEQUENCES: ListShape = list(
            "stop_sequences",
            ListShape::of(&ValueShape::Text(STOP_TEXT)).at_most(STOPS_MAX),
            "Texts that end the output.",
        );
        STREAM: FlagValue = flag("stream", "The answer is sent as server-sent events.");
    }
}

/// Fields that are named so that nobody looks for an effect.
const IGNORED_FIELDS: FieldGroup = &[
    FieldSpec::ignored("metadata", "Ignored; tenants are told apart by their keys."),
    FieldSpec::ignored(
        "service_tier",
        "Ignored; SLO classes are chosen by a header.",
    ),
    FieldSpec::ignored("context_management", "Ignored; no message is removed."),
];

request_fields! {
    THINKING_FIELDS {
        THINKING_TYPE: TextShape = text_field(
            "type",
            TextShape::one_of(&["enabled", "adaptive", "between_tools", "disabled"]),
            "`disabled` tells a template that knows `enable_thinking` or `thinking` that the model is not to reason; where it does all the same, the answer leaves its reasoning out.",
        ).required();
        BUDGET_TOKENS: IntegerRange = integer(
            "budget_tokens",
            1..=*TOKENS.end(),
            "Limit of the tokens of reasoning; below `max_tokens`.",
        );
    }
}

request_fields! {
    OUTPUT_CONFIG_FIELDS {
        EFFORT: TextShape = text_field(
            "effort",
            TextShape::one_of(&["low", "medium", "high", "xhigh", "max"]),
            "`reasoning_effort` of chat; `xhigh` and `max` count as `high`.",
        );
        FORMAT: &'static ObjectSpec = object("format", &FORMAT_OBJECT, "Form of the output.");
    }
}

request_fields! {
    FORMAT_FIELDS {
        FORMAT_TYPE: TextShape =
            text_field("type", TextShape::one_of(&["json_schema"]), "JSON by a schema.").required();
        FORMAT_SCHEMA: MapShape = map(
            "schema",
            MapShape { keys: MapKeys::Any, values: &ValueShape::Any, count_max: None },
            "The JSON Schema, which is enforced.",
        ).required();
    }
}

const THINKING_OBJECT: ObjectSpec = request_object!("", &[&[THINKING_FIELDS]]);
const OUTPUT_CONFIG_OBJECT: ObjectSpec = request_object!("", &[&[OUTPUT_CONFIG_FIELDS]]);
const FORMAT_OBJECT: ObjectSpec = request_object!("", &[&[FORMAT_FIELDS]]);

/// Fields that would change the answer.
const REFUSED_FIELDS: &[RefusedField] = &[
    RefusedField::new("mcp_servers", "no server is asked for tools"),
    RefusedField::new("container", "no code is run"),
    RefusedField::new("output_format", "`output_config.format` is the newer field"),
];

const MESSAGES_REQUEST: ObjectSpec = request_object!(
    "MessagesRequest",
    &[&[
        MODEL_FIELDS,
        CONVERSATION_FIELDS,
        TOOL_FIELDS,
        OUTPUT_FIELDS,
        SAMPLING_FIELDS,
        content::CACHE_FIELDS,
        IGNORED_FIELDS,
    ]],
    &[REFUSED_FIELDS]
);

/// The body of `/v1/messages/count_tokens`: a request without the fields of its output.
pub(crate) const COUNT_REQUEST: ObjectSpec = request_object!(
    "CountTokensRequest",
    &[&[
        MODEL_FIELDS,
        CONVERSATION_FIELDS,
        TOOL_FIELDS,
        content::CACHE_FIELDS,
        IGNORED_FIELDS
    ]],
    &[REFUSED_FIELDS]
);

/// Fields of chat by their names here.
const NAMES: FieldNames = &[
    ("response_format.json_schema", "output_config.format"),
    ("response_format", "output_config.format"),
    ("reasoning_effort", "output_config.effort"),
    ("thinking_token_budget", "thinking.budget_tokens"),
    (
        "parallel_tool_calls",
        "tool_choice.disable_parallel_tool_use",
    ),
    ("stop", "stop_sequences"),
];

const DOC: RouteDoc = RouteDoc {
    operation: "messages",
    summary: "Continue a conversation (Anthropic Messages).",
    request: Some(&MESSAGES_REQUEST),
    headers: ANTHROPIC_HEADERS,
    contents: JSON_OR_EVENTS,
    schema: "MessageAnswer",
    description: "The answer; with `stream: true` as server-sent events, the last of which is `message_stop` if the whole answer was sent, otherwise `error`.",
    errors: &[400, 401, 404, 413, 415, 429, 500, 503, 529],
    error_schema: "MessagesError",
    ..request::GENERATE_DOC
};

/// HTTP status of an overloaded server in this API.
const OVERLOADED: u16 = 529;

/// Returns whether a request is one of Anthropic's clients, by its header.
pub(crate) fn is_of_anthropic(headers: &HeaderMap) -> bool {
    headers.contains_key(ANTHROPIC_VERSION)
}

/// A model as Anthropic's API describes it. The time at which it was made is not known here.
pub(crate) fn model_info(name: &str) -> Value {
    json!({
        "type": "model",
        "id": name,
        "display_name": name,
        "created_at": "1970-01-01T00:00:00Z",
    })
}

/// The list of these models, all of them on one page.
pub(crate) fn model_list(models: &[Value]) -> Value {
    let id = |model: Option<&Value>| model.map_or(Value::Null, |model| model["id"].clone());
    json!({
        "data": models,
        "has_more": false,
        "first_id": id(models.first()),
        "last_id": id(models.last()),
    })
}

pub(crate) struct MessagesSurface;

/// Anthropic Messages, a conversation of blocks.
pub(crate) static MESSAGES_API: MessagesSurface = MessagesSurface;

impl Surface for MessagesSurface {
    fn route(&self) -> &'static str {
        "/v1/messages"
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
        messages(body, model)
    }

    fn whole_body(
        &'static self,
        head: AnswerHead,
        choices: &[OutputPieces],
        end: AnswerEnd,
    ) -> Vec<u8> {
        json_body(&answer::whole(&head, choices, end))
    }

    fn events(&'static self, head: AnswerHead) -> Option<Box<dyn EventRenderer>> {
        Some(Box::new(MessageEvents::new(head)))
    }

    fn request_id_header(&self) -> Option<HeaderName> {
        Some(HeaderName::from_static("request-id"))
    }

    /// A server without room is overloaded; 429 is left to limits of the key.
    fn error_status(&self, error: &ApiError) -> StatusCode {
        if error.is_saturation() {
            StatusCode::from_u16(OVERLOADED).expect("a status of three digits")
        } else {
            error.status()
        }
    }

    fn error(&self, error: &ApiError, request_id: &str) -> Value {
        error_object(error, request_id)
    }
}

/// Anthropic's error object, with the field and the code that OpenAI's has.
fn error_object(error: &ApiError, request_id: &str) -> Value {
    let kind = match MESSAGES_API.error_status(error).as_u16() {
        401 => "authentication_error",
        403 => "permission_error",
        404 => "not_found_error",
        413 => "request_too_large",
        429 => "rate_limit_error",
        OVERLOADED => "overloaded_error",
        400..500 => "invalid_request_error",
        _ => "api_error",
    };
    json!({
        "type": "error",
        "error": {
            "type": kind,
            "message": error.message(),
            "param": error.param(),
            "code": error.code(),
        },
        "request_id": request_id,
    })
}

/// Checks a body, renders its conversation and tokenizes it.
fn messages(body: &Document, model: &ModelText) -> Result<GenerateRequest, ApiError> {
    let fields = JsonFields::of_body(body, &MESSAGES_REQUEST)?;
    request::check_model(&fields, model)?;
    fields.check_refused()?;
    let tokens_max = fields
        .integer(&MAX_TOKENS)?
        .ok_or_else(|| fields.missing(&MAX_TOKENS))?;
    let thinking = thinking(&fields, tokens_max)?;
    let tools = request_tools(&fields)?;
    let mut chat = conversation(&fields, &tools, &thinking)?;
    if let Some(stops) = fields
        .list(&STOP_SEQUENCES)?
        .and(fields.any(&STOP_SEQUENCES))
    {
        chat.member("stop", stops.text());
    }
    for (name, value) in fields.given(SAMPLING_FIELDS) {
        chat.member(name, value.text());
    }
    chat.end('}');
    let mut ask = generate_request(chat, model, NAMES)?;
    let tokens_max = tokens_max as u32;
    // The rest of the context is the default limit, which the client's may lower.
    for prompt in &mut ask.prompts {
        prompt.stop.max_tokens = prompt.stop.max_tokens.min(tokens_max);
    }
    ask.output.reasoning = thinking.shown;
    ask.warnings.extend(tools.warning);
    ask.delivery = match fields.flag(&STREAM)? {
        Some(true) => ResponseMode::Stream(UsageShown::Always),
        Some(false) | None => ResponseMode::Whole,
    };
    ask.facts = AnswerFacts {
        tokens_max: Some(tokens_max),
        ..AnswerFacts::default()
    };
    Ok(ask)
}

/// Counts the tokens of a conversation; returns the JSON of the answer.
pub(crate) fn count_tokens(body: &Document, model: &ModelText) -> Result<Vec<u8>, ApiError> {
    let fields = JsonFields::of_body(body, &COUNT_REQUEST)?;
    request::check_model(&fields, model)?;
    fields.check_refused()?;
    let thinking = thinking(&fields, *TOKENS.end())?;
    let mut chat = conversation(&fields, &request_tools(&fields)?, &thinking)?;
    chat.end('}');
    let count = input_tokens_count(chat, model, NAMES, MESSAGES.name())?;
    let answer = json!({"input_tokens": count});
    Ok(answer.to_string().into_bytes())
}

/// Begins the chat request of a conversation; further members may follow.
fn conversation(
    fields: &JsonFields,
    tools: &ConvertedTools<'_>,
    thinking: &Thinking,
) -> Result<JsonText, ApiError> {
    let mut chat = JsonText::default();
    chat.begin('{');
    let (mut chat, last) = write_conversation(fields, chat)?;
    if last == LastRole::AssistantText {
        chat.member("continue_final_message", "true");
    }
    tools.write(&mut chat);
    thinking.write(&mut chat);
    write_output_config(fields, &mut chat)?;
    Ok(chat)
}

/// The reasoning that a request asks for.
struct Thinking {
    shown: ReasoningShown,
    budget_tokens: Option<i64>,
}

impl Thinking {
    fn write(&self, chat: &mut JsonText) {
        let flag = match self.shown {
            ReasoningShown::Shown => "true",
            ReasoningShown::LeftOut => "false",
        };
        chat.name("chat_template_kwargs");
        chat.begin('{');
        // Names in the templates of Qwen and GLM, and of DeepSeek and Granite.
        chat.member("enable_thinking", flag);
        chat.member("thinking", flag);
        chat.end('}');
        if let Some(budget_tokens) = self.budget_tokens {
            chat.member("thinking_token_budget", &budget_tokens.to_string());
        }
    }
}

fn thinking(fields: &JsonFields, tokens_max: i64) -> Result<Thinking, ApiError> {
    let hidden = Thinking {
        shown: ReasoningShown::LeftOut,
        budget_tokens: None,
    };
    let Some(thinking) = fields.object(&THINKING)? else {
        return Ok(hidden);
    };
    let kind = thinking.required_text(&THINKING_TYPE)?;
    if !THINKING_TYPE.choices().contains(&&*kind) {
        let message = format!("`thinking.type` {:?} is not known.", clipped(&kind));
        return Err(thinking.invalid(&THINKING_TYPE, message));
    }
    let budget_tokens = thinking.integer(&BUDGET_TOKENS)?;
    if kind == "disabled" {
        return Ok(hidden);
    }
    if budget_tokens.is_some_and(|tokens| tokens >= tokens_max) {
        let message = "`thinking.budget_tokens` must be below `max_tokens`.";
        return Err(thinking.invalid(&BUDGET_TOKENS, message));
    }
    Ok(Thinking {
        shown: ReasoningShown::Shown,
        budget_tokens,
    })
}

fn write_output_config(fields: &JsonFields, chat: &mut JsonText) -> Result<(), ApiError> {
    let Some(config) = fields.object(&OUTPUT_CONFIG)? else {
        return Ok(());
    };
    if let Some(effort) = config.text(&EFFORT)? {
        if !EFFORT.choices().contains(&&*effort) {
            let message = format!(
                "`output_config.effort` {:?} is not known.",
                clipped(&effort)
            );
            return Err(config.invalid(&EFFORT, message));
        }
        let effort = match &*effort {
            "xhigh" | "max" => "high",
            other => other,
        };
        chat.name("reasoning_effort");
        chat.text(effort);
    }
    let Some(format) = config.object(&FORMAT)? else {
        return Ok(());
    };
    let kind = format.required_text(&FORMAT_TYPE)?;
    if !FORMAT_TYPE.choices().contains(&&*kind) {
        let message = format!(
            "`output_config.format.type` {:?} is not known.",
            clipped(&kind)
        );
        return Err(format.invalid(&FORMAT_TYPE, message));
    }
    format.map(&FORMAT_SCHEMA)?;
    let schema = format.any(&FORMAT_SCHEMA);
    let schema = schema.ok_or_else(|| format.missing(&FORMAT_SCHEMA))?;
    chat.name("response_format");
    chat.begin('{');
    chat.member("type", r#""json_schema""#);
    chat.name("json_schema");
    chat.begin('{');
    chat.member("schema", schema.text());
    chat.end('}');
    chat.end('}');
    Ok(())
}
