//! `POST /v1/chat/completions`.
//!
//! Tools: the chat template shows their descriptions to the model, and its answer is divided into
//! text, reasoning and calls where the model's formats are known. With `tool_choice` `none` tools
//! are not shown. A call that must have a form, and content that must, make one grammar with the
//! reasoning before them.

mod message;
mod tools;

use super::openai::{
    ChoiceDelta, ChoiceParts, OpenAiSurface, PromptScoresPlace, token_text, write_json,
};
use crate::body_work::BodyWork;
use crate::constraint_check::refused;
use crate::error::ApiError;
use crate::field::{
    FieldGroup, FlagValue, IntegerRange, JsonFields, ListShape, MapKeys, MapShape, ObjectSpec,
    RefusedField, TextShape, ValueShape, clipped, flag, integer, list, map, request_fields,
    request_object, text as text_field,
};
use crate::openapi::{JSON_OR_EVENTS, RouteDoc};
use crate::output_piece::{TokenScore, ToolCallHead, ToolCallPiece, ToolKind};
use crate::request::constraint::{CONSTRAINT_FIELDS, FieldConstraint, constraint};
use crate::request::sampling::{
    OutputRoom, PROMPT_SCORE_FIELDS, SAMPLING_FIELDS, SPECIAL_TOKENS_FIELDS, STOP_FIELDS,
    StopFields, TOKENS, logprobs_count, output, prompt_logprobs, sampling, special_tokens,
};
use crate::request::{
    self, AnswerFacts, CallReason, DELIVERY_FIELDS, GenerateRequest, LOGPROBS, MODEL_FIELDS,
    OutputWanted, ReasoningShown, RequestWarning, SCHEDULING_FIELDS, TokenizedPrompt, UNSUPPORTED,
    text,
};
use cleave_domain::{GRAMMAR_BYTES_MAX, TokenId};
use cleave_text::json::{Document, Json, JsonShape};
use cleave_text::{
    CallRules, ModelText, OutputReading, OutputRules, RenderEnd, RenderError, SpecialTokens,
    TemplateInput, TemplateValue,
};
use serde_json::{Map, Value, json};
use std::ops::RangeInclusive;
pub(super) use tools::TOOL_REQUEST_FIELDS;
use tools::{CallDuty, RequestTools, TOOLS, long_grammar, request_tools};

/// Warning of a request whose tools are shown to a model without a known format of calls.
const TOOLS_WARNING: RequestWarning = RequestWarning {
    param: "tools",
    message: "Tools are shown to the model through its chat template, but the format of its calls is not known: \
              they stay in `content`, and `tool_calls` is never set. `--tool-call-parser` names a format; \
              `tool_choice: \"none\"` leaves the tools out.",
};

request_fields! {
    /// Fields of a conversation, from which a chat template makes the prompt.
    pub(super) CONVERSATION_FIELDS {
        MESSAGES: ListShape = list(
            "messages",
            ListShape::of(&ValueShape::Object(&message::MESSAGE)).at_least(1),
            "The conversation.",
        ).required();
        DOCUMENTS: ListShape =
            list("documents", ListShape::of(&ValueShape::Any), "Passed to the chat template.");
        CHAT_TEMPLATE_KWARGS: MapShape = map(
            "chat_template_kwargs",
            MapShape { keys: MapKeys::Any, values: &ValueShape::Any, count_max: None },
            "Variables of the chat template, but none that another field sets.",
        );
        REASONING_EFFORT: TextShape = text_field(
            "reasoning_effort",
            TextShape::one_of(&["none", "minimal", "low", "medium", "high", "xhigh", "max"]),
            "Passed to the chat template as `reasoning_effort`. `none` passes `enable_thinking` and `thinking` as false instead, any other as true. `chat_template_kwargs` take precedence.",
        );
        ADD_GENERATION_PROMPT: FlagValue =
            flag("add_generation_prompt", "The prompt ends with the beginning of an answer.")
                .default("true");
        CONTINUE_FINAL_MESSAGE: FlagValue = flag(
            "continue_final_message",
            "The answer continues the last message; excludes `add_generation_prompt: true`.",
        );
    }
}

request_fields! {
    CHAT_FIELDS {
        MAX_TOKENS: IntegerRange = integer("max_tokens", TOKENS_OUT, "Limit of output tokens.")
            .default("the rest of `max_model_len`");
        MAX_COMPLETION_TOKENS: IntegerRange = integer(
            "max_completion_tokens",
            TOKENS_OUT,
            "The newer field of the same meaning; takes precedence over `max_tokens`.",
        );
        LOGPROBS_WANTED: FlagValue =
            flag("logprobs", "The answer has log-probabilities of its tokens.");
        TOP_LOGPROBS: IntegerRange = integer(
            "top_logprobs",
            LOGPROBS,
            "Number of likeliest tokens beside each token; needs `logprobs: true`.",
        ).default("0");
        THINKING_TOKEN_BUDGET: IntegerRange = integer(
            "thinking_token_budget",
            TOKENS,
            "Limit of the tokens of reasoning, which is then ended, as in vLLM; without effect where the model does not reason.",
        ).default("no limit");
        INCLUDE_REASONING: FlagValue = flag(
            "include_reasoning",
            "Whether the answer has the model's reasoning, as in vLLM.",
        ).default("true");
        MODALITIES: ListShape = list(
            "modalities",
            ListShape::of(&ValueShape::Text(TextShape::one_of(&["text"]))),
            "Answers are texts.",
        ).default("`[\"text\"]`");
    }
}

/// Numbers of output tokens; an answer has at least one.
const TOKENS_OUT: RangeInclusive<i64> = 1..=*TOKENS.end();
/// Groups of the fields of a chat request.
const CHAT_GROUPS: &[FieldGroup] = &[
    CONVERSATION_FIELDS,
    TOOL_REQUEST_FIELDS,
    MODEL_FIELDS,
    SAMPLING_FIELDS,
    PROMPT_SCORE_FIELDS,
    STOP_FIELDS,
    SPECIAL_TOKENS_FIELDS,
    CONSTRAINT_FIELDS,
    DELIVERY_FIELDS,
    SCHEDULING_FIELDS,
    CHAT_FIELDS,
];

const CHAT_REQUEST: ObjectSpec = request_object!(
    "ChatRequest",
    &[CHAT_GROUPS],
    &[UNSUPPORTED, OF_COMPLETIONS]
);

/// Fields of the other API.
const OF_COMPLETIONS: &[RefusedField] = &[
    RefusedField::new("echo", "chat has no text that could be repeated"),
    RefusedField::new("best_of", "`n` gives more choices"),
];

/// Chat completions, a conversation with roles.
pub(super) static CHAT: OpenAiSurface = OpenAiSurface {
    route: "/v1/chat/completions",
    operation: "chat",
    doc: RouteDoc {
        operation: "chat",
        summary: "Continue a conversation.",
        request: Some(&CHAT_REQUEST),
        contents: JSON_OR_EVENTS,
        schema: "ChatAnswer",
        ..request::GENERATE_DOC
    },
    body_work: BodyWork::RenderTemplate,
    parse: chat,
    id_prefix: "chatcmpl",
    whole_object: "chat.completion",
    chunk_object: "chat.completion.chunk",
    first_choice: Some(role_choice),
    insert_content: insert_message,
    write_delta,
    prompt_scores_place: PromptScoresPlace::Answer,
    scores,
};

/// The choice of the first chunk, which names the role.
fn role_choice(index: usize) -> Value {
    let delta = json!({"role": "assistant", "content": ""});
    json!({"index": index, "delta": delta, "logprobs": null, "finish_reason": null})
}

fn insert_message(choice: &mut Map<String, Value>, parts: &ChoiceParts<'_>, model: &ModelText) {
    let has_others = !parts.calls.is_empty() || !parts.reasoning.is_empty();
    let content = Some(&*parts.text).filter(|text| !text.is_empty() || !has_others);
    let mut message = json!({"role": "assistant", "content": content, "refusal": null});
    if !parts.reasoning.is_empty() {
        let field = model.output_formats().reasoning_field();
        message[field.name()] = (&*parts.reasoning).into();
    }
    if !parts.calls.is_empty() {
        let call = |call: &&ToolCallPiece| {
            let (id, name) = match &call.head {
                Some(ToolCallHead { id, name }) => (&**id, &**name),
                None => ("", ""),
            };
            match call.kind {
                ToolKind::Function => {
                    let function = json!({"name": name, "arguments": call.arguments});
                    json!({"id": id, "type": "function", "function": function})
                }
                ToolKind::Custom => {
                    let custom = json!({"name": name, "input": call.arguments});
                    json!({"id": id, "type": "custom", "custom": custom})
                }
            }
        };
        message["tool_calls"] = parts.calls.iter().map(call).collect();
    }
    choice.insert("message".into(), message);
}

fn write_delta(out: &mut Vec<u8>, delta: ChoiceDelta<'_>, model: &ModelText) {
    let text = |out: &mut Vec<u8>, name: &str, text: &str| {
        out.extend(b",\"delta\":{");
        write_json(out, name);
        out.push(b':');
        write_json(out, text);
        out.push(b'}');
    };
    let call = |out: &mut Vec<u8>, call: Value| {
        out.extend(b",\"delta\":{\"tool_calls\":[");
        write_json(out, &call);
        out.extend(b"]}");
    };
    match delta {
        ChoiceDelta::Nothing => out.extend(b",\"delta\":{}"),
        ChoiceDelta::Text(content) => text(out, "content", content),
        ChoiceDelta::Reasoning(reasoning) => {
            let field = model.output_formats().reasoning_field();
            text(out, field.name(), reasoning);
        }
        ChoiceDelta::CallHead { index, kind, head } => {
            let ToolCallHead { id, name } = head;
            call(
                out,
                match kind {
                    ToolKind::Function => {
                        let function = json!({"name": name, "arguments": ""});
                        json!({"index": index, "id": id, "type": "function", "function": function})
                    }
                    ToolKind::Custom => {
                        let custom = json!({"name": name, "input": ""});
                        json!({"index": index, "id": id, "type": "custom", "custom": custom})
                    }
                },
            );
        }
        ChoiceDelta::CallArguments {
            index,
            kind,
            arguments,
        } => {
            call(
                out,
                match kind {
                    ToolKind::Function => {
                        json!({"index": index, "function": {"arguments": arguments}})
                    }
                    ToolKind::Custom => json!({"index": index, "custom": {"input": arguments}}),
                },
            );
        }
    }
}

/// Builds `choices[].logprobs` of a chat.
fn scores(scores: &[TokenScore], model: &ModelText) -> Value {
    json!({"content": token_scores(scores, model), "refusal": null})
}

/// The log-probability of each token, and those of the likeliest ones in its place.
pub(super) fn token_scores(scores: &[TokenScore], model: &ModelText) -> Vec<Value> {
    let one = |token: TokenId, logprob: Option<f32>| json!({"token": token_text(token, model), "logprob": logprob, "bytes": model.tokenizer().bytes(token)});
    let content = scores.iter().map(|score| {
        let mut entry = one(score.token, score.logprob);
        let top = score
            .top
            .iter()
            .map(|&(token, logprob)| one(token, Some(logprob)));
        entry["top_logprobs"] = top.collect();
        entry
    });
    content.collect()
}

/// Checks a body, renders its messages and tokenizes them.
fn chat(body: &Document, model: &ModelText) -> Result<GenerateRequest, ApiError> {
    let fields = JsonFields::of_body(body, &CHAT_REQUEST)?;
    request::check_model(&fields, model)?;
    fields.check_refused()?;
    let content = constraint(&fields)?;
    check_modalities(&fields)?;
    let delivery = request::response_mode(&fields)?;
    let choices = request::choices(&fields, 1)?;
    let logprobs = logprobs(&fields)?;
    let mut output = output(&fields, logprobs)?;
    if !fields.flag(&INCLUDE_REASONING)?.unwrap_or(true) {
        output.reasoning = ReasoningShown::LeftOut;
    }
    let (priority, cache_salt) = (request::priority(&fields)?, request::cache_salt(&fields)?);

    let tools = request_tools(&fields)?;
    if tools.duty == CallDuty::Named {
        output.call_reason = CallReason::Stop;
    }
    let formats = model.output_formats();
    let warnings = if tools.callable.is_empty() || formats.reads_calls() {
        Vec::new()
    } else {
        vec![TOOLS_WARNING]
    };
    output.prompt_logprobs = prompt_logprobs(&fields, delivery)?;
    output.custom_tools = tools.custom_names();
    let (tokens, reading) = prompt(&fields, model, &tools)?;
    let constraint = output_constraint(&fields, model, &tools, content, reading.as_ref())?;
    let mut sampling = sampling(&fields, model, constraint.as_ref())?;
    sampling.logprobs = logprobs;
    sampling.prompt_logprobs = output.prompt_logprobs;
    // `max_completion_tokens` is the newer field and takes precedence (lesson 21).
    let stop = StopFields::read(
        &fields,
        model,
        &sampling,
        &[MAX_TOKENS, MAX_COMPLETION_TOKENS],
    )?;
    let output_room = OutputRoom {
        param: MESSAGES.name(),
        context: model.context_tokens_max(),
        default: None,
    };
    let output_limit = stop.output_limit();
    let stop = stop.stop_rules(tokens.len(), output_room)?;
    let start = request::text_start(model, &tokens, output.special);
    let output_wanted = OutputWanted::Output;
    let prompt = TokenizedPrompt {
        tokens: tokens.into(),
        stop,
        start,
        echo: None,
        output_wanted,
    };
    Ok(GenerateRequest {
        prompts: vec![prompt],
        choices,
        sampling,
        constraint,
        output,
        reading,
        delivery,
        facts: AnswerFacts::default(),
        priority,
        cache_salt,
        warnings,
        output_limit,
        pooling: None,
    })
}

/// The constraint on the whole output, of which the content's is a part.
fn output_constraint(
    fields: &JsonFields,
    model: &ModelText,
    tools: &RequestTools<'_>,
    content: Option<FieldConstraint>,
    reading: Option<&OutputReading>,
) -> Result<Option<FieldConstraint>, ApiError> {
    let budget = fields.integer(&THINKING_TOKEN_BUDGET)?;
    let bound_by = tools.bound_by();
    let path = match &content {
        _ if bound_by.is_some() => TOOLS.name().to_owned(),
        Some(content) => content.path.clone(),
        None => THINKING_TOKEN_BUDGET.name().to_owned(),
    };
    let Some(reading) = reading else {
        if let Some(field) = bound_by {
            let message = "Calls cannot be constrained: the format of this model's calls is not known. \
                           `--tool-call-parser` names one.";
            return Err(ApiError::unsupported(field, message));
        }
        return Ok(content);
    };
    let callable = if bound_by.is_some() || content.is_some() || budget.is_some() {
        tools.grammar_tools(fields)?
    } else {
        Vec::new()
    };
    let rules = OutputRules {
        content: content.as_ref().map(|content| &content.constraint.grammar),
        calls: CallRules {
            tools: &callable,
            are_required: tools.duty != CallDuty::Free,
            is_single: tools.is_single,
        },
        reasoning_tokens_max: budget.map(|tokens| tokens as u32),
    };
    let grammar = reading.grammar(&rules, model);
    let Some(grammar) = grammar.map_err(|error| refused(&path, &error))? else {
        return Ok(None);
    };
    if grammar.bytes() > GRAMMAR_BYTES_MAX {
        let message = long_grammar(&path, grammar.bytes());
        return Err(ApiError::invalid(path, message));
    }
    let mut whole = FieldConstraint::of(fields, path, grammar)?;
    whole.content = content
        .filter(|content| content.constraint != whole.constraint)
        .map(Box::new);
    Ok(Some(whole))
}

fn check_modalities(fields: &JsonFields) -> Result<(), ApiError> {
    let is_text = |modality: Json<'_>| match modality.shape() {
        JsonShape::String(text) => text.get() == "text",
        _ => false,
    };
    let mut modalities = fields.list(&MODALITIES)?.into_iter().flatten();
    if modalities.all(is_text) {
        return Ok(());
    }
    Err(fields.unsupported(&MODALITIES, "`modalities`: only \"text\" is supported."))
}

fn logprobs(fields: &JsonFields) -> Result<Option<u32>, ApiError> {
    let top = logprobs_count(fields, &TOP_LOGPROBS)?;
    match (fields.flag(&LOGPROBS_WANTED)?.unwrap_or(false), top) {
        (true, top) => Ok(Some(top.unwrap_or(0))),
        (false, None | Some(0)) => Ok(None),
        (false, Some(_)) => {
            Err(fields.invalid(&TOP_LOGPROBS, "`top_logprobs` needs `logprobs` to be true."))
        }
    }
}

/// Reads the input of the chat template.
fn template_input<'a>(
    fields: &JsonFields<'a>,
    tools: &RequestTools<'a>,
) -> Result<TemplateInput, ApiError> {
    let messages = message::messages(fields)?;
    let end = render_end(fields)?;
    let documents = fields.list(&DOCUMENTS)?.and(fields.any(&DOCUMENTS));
    let value = |json: Json<'_>| TemplateValue::of_json(&fields.part(json), json);
    Ok(TemplateInput {
        last_content: (end == RenderEnd::LastMessage)
            .then(|| message::last_content(&messages))
            .flatten(),
        body_bytes: messages.document().len(),
        tools: tools
            .shown
            .as_ref()
            .map(|list| TemplateValue::of_json(list, list.json())),
        documents: documents.map(value),
        variables: variables(fields)?,
        messages: message::list(messages),
        end,
    })
}

/// Renders and tokenizes the conversation, and chooses how the answer is read.
fn prompt<'a>(
    fields: &JsonFields<'a>,
    model: &ModelText,
    tools: &RequestTools<'a>,
) -> Result<(Vec<TokenId>, Option<OutputReading>), ApiError> {
    let (text, special) = rendered(fields, model, tools)?;
    let tokens = text::encode(&text, special, model, MESSAGES.name())?;
    if tokens.is_empty() {
        return Err(fields.invalid(&MESSAGES, "The messages render to an empty prompt."));
    }
    let reading = OutputReading::new(&model.output_formats(), &text, tools.specs());
    Ok((tokens, reading))
}

/// Renders the conversation with its tools, and says whether special tokens are added to it.
pub(super) fn rendered_with_tools(
    fields: &JsonFields,
    model: &ModelText,
) -> Result<(String, SpecialTokens), ApiError> {
    rendered(fields, model, &request_tools(fields)?)
}

fn rendered<'a>(
    fields: &JsonFields<'a>,
    model: &ModelText,
    tools: &RequestTools<'a>,
) -> Result<(String, SpecialTokens), ApiError> {
    let conversation = template_input(fields, tools)?;
    if !model.has_chat_template() {
        return Err(ApiError::bad_request(
            "no_chat_template",
            "This model has no chat template; use /v1/completions with the text as you want it.",
        ));
    }
    let text = model.render(&conversation).map_err(|error| match error {
        RenderError::Refused(reason) => fields.invalid(
            &MESSAGES,
            format!("The model's chat template refused these messages: {reason}"),
        ),
        other => fields.invalid(&MESSAGES, format!("{other}.")),
    })?;
    // Templates write the special tokens themselves, so none are added by default.
    Ok((text, special_tokens(fields, SpecialTokens::Skipped)?))
}

/// Reads `chat_template_kwargs`, which cannot override the server's own variables, and the effort
/// of reasoning.
fn variables(fields: &JsonFields<'_>) -> Result<Option<TemplateValue>, ApiError> {
    let own = [
        MESSAGES.name(),
        TOOLS.name(),
        DOCUMENTS.name(),
        ADD_GENERATION_PROMPT.name(),
    ];
    if let Some(variables) = fields.map(&CHAT_TEMPLATE_KWARGS)? {
        let named = |name: &str| variables.members().any(|(key, _)| key.get() == name);
        if let Some(name) = own.iter().find(|name| named(name)) {
            let path = variables.path(name);
            return Err(ApiError::invalid(
                &*path,
                format!("`{path}`: use the field `{name}` instead."),
            ));
        }
    }
    let given = fields.any(&CHAT_TEMPLATE_KWARGS);
    let Some(effort) = fields.text(&REASONING_EFFORT)? else {
        return Ok(given.map(|given| TemplateValue::of_json(&fields.part(given), given)));
    };
    if !REASONING_EFFORT.choices().contains(&&*effort) {
        let message = format!("`reasoning_effort` {:?} is not known.", clipped(&effort));
        return Err(fields.invalid(&REASONING_EFFORT, message));
    }
    let given = given.map(|given| serde_json::from_str(given.text()));
    let given: Option<Map<String, Value>> = given.transpose().expect("the body was checked");
    let mut merged = given.unwrap_or_default();
    let does_reason = effort != "none";
    for name in ["enable_thinking", "thinking"] {
        merged.entry(name).or_insert_with(|| does_reason.into());
    }
    if does_reason {
        let effort = || Value::from(&*effort);
        merged.entry(REASONING_EFFORT.name()).or_insert_with(effort);
    }
    let merged = Document::check(Value::Object(merged).to_string());
    let merged = merged.expect("it was written here");
    let root = merged.root();
    Ok(Some(TemplateValue::of_json(&merged.part(root), root)))
}

fn render_end(fields: &JsonFields) -> Result<RenderEnd, ApiError> {
    let continued = fields.flag(&CONTINUE_FINAL_MESSAGE)?.unwrap_or(false);
    match (continued, fields.flag(&ADD_GENERATION_PROMPT)?) {
        (true, Some(true)) => Err(fields.invalid(
            &CONTINUE_FINAL_MESSAGE,
            "`continue_final_message` and `add_generation_prompt` exclude each other.",
        )),
        (true, _) => Ok(RenderEnd::LastMessage),
        (false, Some(false)) => Ok(RenderEnd::Closed),
        (false, Some(true) | None) => Ok(RenderEnd::AnswerOpening),
    }
}

#[cfg(test)]
mod reference;
