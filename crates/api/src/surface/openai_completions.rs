//! `POST /v1/completions`.

use super::openai::{
    ChoiceDelta, ChoiceParts, OpenAiSurface, PromptScoresPlace, token_text, write_json,
};
use crate::body_work::BodyWork;
use crate::error::ApiError;
use crate::field::{
    AnyValue, FieldGroup, FlagValue, IntegerRange, JsonFields, ListShape, ObjectSpec, RefusedField,
    TextShape, ValueShape, any, flag, integer, limit_list, request_fields, request_object,
    wrong_type,
};
use crate::openapi::{JSON_OR_EVENTS, RouteDoc};
use crate::output_piece::TokenScore;
use crate::request::constraint::{CONSTRAINT_FIELDS, constraint};
use crate::request::sampling::{
    OutputRoom, PROMPT_SCORE_FIELDS, SAMPLING_FIELDS, SPECIAL_TOKENS_FIELDS, STOP_FIELDS,
    StopFields, TOKENS, logprobs_count, output, prompt_logprobs, sampling, special_tokens,
    token_ids,
};
use crate::request::{
    self, AnswerFacts, CHOICES, DELIVERY_FIELDS, GenerateRequest, LOGPROBS, MODEL_FIELDS,
    OutputWanted, SCHEDULING_FIELDS, TokenizedPrompt, UNSUPPORTED, text,
};
use cleave_domain::TokenId;
use cleave_text::json::{Document, Json, JsonItems, JsonShape};
use cleave_text::{ModelText, SpecialTokens};
use serde_json::{Map, Value, json};
use std::borrow::Cow;

/// Limit of output tokens if the client sets none, as in OpenAI's API.
const TOKENS_DEFAULT: u32 = 16;
/// Limit of prompts in one body.
const PROMPTS_MAX: usize = 1024;

request_fields! {
    COMPLETION_FIELDS {
        PROMPT: AnyValue = any(
            "prompt",
            ValueShape::OneOf(&[
                ValueShape::Text(TextShape::ANY),
                ValueShape::List(
                    ListShape::of(&ValueShape::Text(TextShape::ANY)).at_least(1).at_most(PROMPTS_MAX),
                ),
                ValueShape::List(TOKEN_LIST.at_least(1)),
                ValueShape::List(
                    ListShape::of(&ValueShape::List(TOKEN_LIST)).at_least(1).at_most(PROMPTS_MAX),
                ),
            ]),
            "Texts, or their tokens, to continue.",
        ).required();
        ECHO: FlagValue = flag(
            "echo",
            "Repeats the prompt before the output; with `max_tokens: 0` the answer has only the prompt's log-probabilities.",
        );
        MAX_TOKENS: IntegerRange = integer(
            "max_tokens",
            TOKENS,
            "Limit of output tokens; 0 with `echo` only, and the prompt must leave room for one token then too.",
        ).default("16, or the rest of `max_model_len` if that is less");
        MAX_COMPLETION_TOKENS: IntegerRange = integer(
            "max_completion_tokens",
            TOKENS,
            "The newer field of the same meaning; takes precedence over `max_tokens`.",
        );
        LOGPROBS_COUNT: IntegerRange = integer(
            "logprobs",
            LOGPROBS,
            "The answer has log-probabilities of its tokens, and of this many likeliest ones beside each.",
        );
        BEST_OF: IntegerRange =
            integer("best_of", CHOICES, "Equal to `n`, or left out.").default("`n`");
    }
}

const TOKEN_LIST: ListShape = ListShape::of(&ValueShape::TokenId);

/// Groups of the fields of a completion request.
const COMPLETION_GROUPS: &[FieldGroup] = &[
    MODEL_FIELDS,
    SAMPLING_FIELDS,
    PROMPT_SCORE_FIELDS,
    STOP_FIELDS,
    SPECIAL_TOKENS_FIELDS,
    CONSTRAINT_FIELDS,
    DELIVERY_FIELDS,
    SCHEDULING_FIELDS,
    COMPLETION_FIELDS,
];

const COMPLETION_REQUEST: ObjectSpec = request_object!(
    "CompletionRequest",
    &[COMPLETION_GROUPS],
    &[UNSUPPORTED, OF_CHAT]
);

/// Fields that would change the answer, of this API and of the other one.
const OF_CHAT: &[RefusedField] = &[
    RefusedField::new("suffix", "no text is inserted between two others"),
    RefusedField::new("messages", "chat has conversations"),
    RefusedField::new("tools", "chat has tools"),
];

/// Text completions, which continue a prompt.
pub(super) static COMPLETIONS: OpenAiSurface = OpenAiSurface {
    route: "/v1/completions",
    operation: "text_completion",
    doc: RouteDoc {
        operation: "completions",
        summary: "Continue texts.",
        request: Some(&COMPLETION_REQUEST),
        contents: JSON_OR_EVENTS,
        schema: "CompletionAnswer",
        ..request::GENERATE_DOC
    },
    body_work: BodyWork::ParseOnly,
    parse: completion,
    id_prefix: "cmpl",
    whole_object: "text_completion",
    chunk_object: "text_completion",
    first_choice: None,
    insert_content: insert_text,
    write_delta: write_text,
    prompt_scores_place: PromptScoresPlace::Choice,
    scores,
};

fn insert_text(choice: &mut Map<String, Value>, parts: &ChoiceParts<'_>, _: &ModelText) {
    choice.insert("text".into(), (&*parts.text).into());
}

fn write_text(out: &mut Vec<u8>, delta: ChoiceDelta<'_>, _: &ModelText) {
    let text = match delta {
        ChoiceDelta::Text(text) => text,
        // Completions have no such parts.
        ChoiceDelta::Nothing
        | ChoiceDelta::Reasoning(_)
        | ChoiceDelta::CallHead { .. }
        | ChoiceDelta::CallArguments { .. } => "",
    };
    out.extend(b",\"text\":");
    write_json(out, text);
}

/// Builds `choices[].logprobs` of completions: parallel lists. The chosen token is among the top
/// ones even if it is less likely.
fn scores(scores: &[TokenScore], model: &ModelText) -> Value {
    let top = |score: &TokenScore| {
        let Some(chosen) = score.logprob else {
            return Value::Null;
        };
        let mut map = Map::new();
        for &(token, logprob) in score.top.iter().chain([&(score.token, chosen)]) {
            // Tokens that are parts of characters share a text; the likeliest one is kept.
            map.entry(token_text(token, model))
                .or_insert_with(|| logprob.into());
        }
        Value::Object(map)
    };
    json!({
        "tokens": scores.iter().map(|score| token_text(score.token, model)).collect::<Value>(),
        "token_logprobs": scores.iter().map(|score| score.logprob).collect::<Vec<_>>(),
        "top_logprobs": scores.iter().map(top).collect::<Value>(),
        "text_offset": scores.iter().map(|score| score.offset).collect::<Value>(),
    })
}

/// A prompt as the client sent it.
enum GivenPrompt<'a> {
    Text(Cow<'a, str>),
    Tokens(JsonItems<'a>),
}

/// Checks a body and tokenizes its prompts.
fn completion(body: &Document, model: &ModelText) -> Result<GenerateRequest, ApiError> {
    let fields = JsonFields::of_body(body, &COMPLETION_REQUEST)?;
    request::check_model(&fields, model)?;
    fields.check_refused()?;
    let constraint = constraint(&fields)?;
    let delivery = request::response_mode(&fields)?;
    let given = prompts(&fields)?;
    let choices = request::choices(&fields, given.len())?;
    check_best_of(&fields, choices)?;
    let logprobs = logprobs_count(&fields, &LOGPROBS_COUNT)?;
    let mut output = output(&fields, logprobs)?;
    output.prompt_logprobs = prompt_logprobs(&fields, delivery)?;
    let echo = fields.flag(&ECHO)?.unwrap_or(false);
    let mut sampling = sampling(&fields, model, constraint.as_ref())?;
    sampling.logprobs = logprobs;
    sampling.prompt_logprobs = output.prompt_logprobs.max(logprobs.filter(|_| echo));
    // A request without output makes sense only for the scores of an echoed prompt. The newer field
    // takes precedence (lesson 21).
    let tokens_min = i64::from(!echo);
    let limits = [MAX_TOKENS, MAX_COMPLETION_TOKENS].map(|limit| limit.at_least(tokens_min));
    let stop = StopFields::read(&fields, model, &sampling, &limits)?;
    let output_wanted = match stop.max_tokens() {
        Some((_, 0)) => OutputWanted::PromptOnly,
        _ => OutputWanted::Output,
    };
    let special = special_tokens(&fields, SpecialTokens::Kept)?;
    let context = model.context_tokens_max();
    let output_room = OutputRoom {
        param: PROMPT.name(),
        context,
        default: Some(TOKENS_DEFAULT),
    };
    let prompt = |(path, given): (String, GivenPrompt)| {
        let (tokens, text) = tokens(&path, &given, model, special)?;
        let text = text.filter(|_| echo);
        let mut stop = stop.stop_rules(tokens.len(), output_room)?;
        // The engine draws a token in every step, so one is drawn and dropped.
        stop.max_tokens = stop.max_tokens.max(1);
        let start = request::text_start(model, &tokens, output.special);
        let text = || match text {
            Some(text) => text.to_owned(),
            None => model.tokenizer().decode(&tokens, output.special),
        };
        let echo = echo.then(text);
        Ok(TokenizedPrompt {
            tokens: tokens.into(),
            stop,
            start,
            echo,
            output_wanted,
        })
    };
    let prompts = given
        .into_iter()
        .map(prompt)
        .collect::<Result<Vec<_>, ApiError>>()?;
    let (priority, cache_salt) = (request::priority(&fields)?, request::cache_salt(&fields)?);
    Ok(GenerateRequest {
        prompts,
        choices,
        sampling,
        constraint,
        output,
        reading: None,
        delivery,
        facts: AnswerFacts::default(),
        priority,
        cache_salt,
        warnings: Vec::new(),
        output_limit: stop.output_limit(),
        pooling: None,
    })
}

/// `best_of` is accepted only if it equals `n`, where it changes nothing; otherwise it would need
/// the scores of whole answers.
fn check_best_of(fields: &JsonFields, choices: u32) -> Result<(), ApiError> {
    match fields.integer(&BEST_OF)? {
        Some(best_of) if best_of != i64::from(choices) => Err(fields.unsupported(
            &BEST_OF,
            format!(
                "`best_of` is not supported unless it equals `n` ({choices}); ask for more choices with `n`."
            ),
        )),
        _ => Ok(()),
    }
}

/// Reads the prompts with their paths.
fn prompts<'a>(fields: &JsonFields<'a>) -> Result<Vec<(String, GivenPrompt<'a>)>, ApiError> {
    let expected =
        "a string, an array of strings, an array of token ids, or an array of arrays of token ids";
    let name = PROMPT.name();
    let path = || name.to_owned();
    let prompt = fields.any(&PROMPT).ok_or_else(|| fields.missing(&PROMPT))?;
    let items = match prompt.shape() {
        JsonShape::String(text) => return Ok(vec![(path(), GivenPrompt::Text(text.get()))]),
        JsonShape::Array(items) => items,
        _ => return Err(wrong_type(name, expected, prompt)),
    };
    match items.clone().next().map(Json::shape) {
        None => {
            return Err(fields.invalid(&PROMPT, "`prompt` must not be an empty array."));
        }
        Some(JsonShape::Number(_)) => return Ok(vec![(path(), GivenPrompt::Tokens(items))]),
        Some(_) => limit_list(name, items.clone().count(), PROMPTS_MAX)?,
    }
    let given = |(index, item): (usize, Json<'a>)| {
        let path = format!("{name}[{index}]");
        match item.shape() {
            JsonShape::String(text) => Ok((path, GivenPrompt::Text(text.get()))),
            JsonShape::Array(tokens) => Ok((path, GivenPrompt::Tokens(tokens))),
            _ => Err(wrong_type(&path, "a string or an array of token ids", item)),
        }
    };
    items.enumerate().map(given).collect()
}

/// Returns the tokens of a prompt, and its text if it was one. An empty prompt becomes the model's
/// begin token.
fn tokens<'a>(
    path: &str,
    given: &'a GivenPrompt<'_>,
    model: &ModelText,
    special: SpecialTokens,
) -> Result<(Vec<TokenId>, Option<&'a str>), ApiError> {
    let (tokens, text) = match given {
        GivenPrompt::Text(text) => (
            text::encode(text, special, model, PROMPT.name())?,
            Some(&**text),
        ),
        GivenPrompt::Tokens(ids) => {
            let context = model.context_tokens_max();
            let count = ids.clone().count();
            if count > context as usize {
                return Err(text::too_long(PROMPT.name(), count, context, ""));
            }
            (token_ids(path, ids.clone(), model)?, None)
        }
    };
    match (tokens.is_empty(), model.bos()) {
        (false, _) => Ok((tokens, text)),
        (true, Some(bos)) => Ok((vec![bos], Some(""))),
        (true, None) => Err(ApiError::invalid(
            path,
            format!("`{path}` is empty, and the model has no token to begin a text with."),
        )),
    }
}
