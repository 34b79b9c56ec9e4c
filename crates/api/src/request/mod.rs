//! Requests to generate, checked, and the fields that several APIs share.
//!
//! Owns: the declarations and readers of shared fields, and the headers. Never: starts anything, or
//! knows one API (see `surface`). Invariant: a [`GenerateRequest`] can be served; for every other
//! request the client got an error that names the field.
//!
//! Fields that OpenAI's clients send and that change nothing here (`user`, `store`, `metadata`,
//! `service_tier` …) are ignored; unsupported fields that would change the
//! answer are refused.

pub(crate) mod constraint;
mod headers;
pub(crate) mod pooled;
pub(crate) mod sampling;
pub(crate) mod text;

pub(crate) use headers::{
    ANTHROPIC_HEADERS, ANTHROPIC_VERSION, EVERY_HEADER, GENERATE_DOC, MODEL_HEADERS, REQUEST_ID,
    apply_tenant_limits, identity_headers, read_origin, request_id, resolve_slos, timing,
};

use crate::error::ApiError;
use crate::field::{
    FlagValue, IntegerRange, JsonFields, ObjectSpec, RefusedField, RequestField, TextShape,
    clipped, flag, integer, object, request_fields, request_object, text as text_field,
};
use crate::response_store::{ItemList, ResponseRecorder};
use cleave_domain::{Pooling, Request, RequestSlo, SamplingParams, StopRules, TokenId};
use cleave_text::{ModelText, OutputReading, SpecialTokens, TextStart};
use constraint::FieldConstraint;
use pooled::PooledAnswer;
use serde::Serialize;
use std::ops::RangeInclusive;
use std::sync::Arc;
use tokio::sync::OwnedSemaphorePermit;

/// Limit of sequences of one HTTP request, over all prompts.
const SEQUENCES_MAX: usize = 1024;
/// Numbers of choices per prompt.
pub(crate) const CHOICES: RangeInclusive<i64> = 1..=128;
/// Numbers of log-probabilities per token.
pub(crate) const LOGPROBS: RangeInclusive<i64> = 0..=20;

request_fields! {
    pub(crate) MODEL_FIELDS {
        MODEL: TextShape = text_field(
            "model",
            TextShape::ANY,
            "The served model's name; another name is a 404.",
        ).default("the served name");
    }
}

request_fields! {
    /// Fields of every API that generates, beside sampling and stop.
    pub(crate) DELIVERY_FIELDS {
        N: IntegerRange = integer(
            "n",
            CHOICES,
            "Choices for each prompt; at most 1,024 sequences in all, and no more than the tenant's `streams_max`.",
        ).default("1");
        STREAM: FlagValue = flag("stream", "The answer is sent as server-sent events.");
        STREAM_OPTIONS: &'static ObjectSpec =
            object("stream_options", &STREAM_OPTIONS_OBJECT, "Only with `stream: true`.");
    }
}

request_fields! {
    /// Fields of every API: when its sequences run, and with whom they share prefixes.
    pub(crate) SCHEDULING_FIELDS {
        PRIORITY: IntegerRange = integer(
            "priority",
            i32::MIN as i64..=i32::MAX as i64,
            "Smaller is more urgent, as in vLLM (SGLang's sign is the opposite).",
        ).default("0");
        CACHE_SALT: TextShape = text_field(
            "cache_salt",
            TextShape::NOT_EMPTY,
            "Prefixes are shared only between requests of the same salt.",
        );
    }
}

request_fields! {
    STREAM_OPTIONS_FIELDS {
        INCLUDE_USAGE: FlagValue =
            flag("include_usage", "The last event of the stream has the counts of tokens.");
        CONTINUOUS_USAGE_STATS: FlagValue = flag(
            "continuous_usage_stats",
            "Every event has the counts so far; has no effect without `include_usage`.",
        );
    }
}

const STREAM_OPTIONS_OBJECT: ObjectSpec =
    request_object!("StreamOptions", &[&[STREAM_OPTIONS_FIELDS]]);

/// A checked request of `prompts` × `choices` sequences.
#[derive(Clone, Debug)]
pub(crate) struct GenerateRequest {
    pub(crate) prompts: Vec<TokenizedPrompt>,
    pub(crate) choices: u32,
    /// Sampling of the first choice; the seeds of the others are derived from its seed.
    pub(crate) sampling: SamplingParams,
    /// The field of the sampling's constraint, if it has one.
    pub(crate) constraint: Option<FieldConstraint>,
    pub(crate) output: OutputFormat,
    /// How reasoning and calls are read, if the output may have any.
    pub(crate) reading: Option<OutputReading>,
    pub(crate) delivery: ResponseMode,
    pub(crate) facts: AnswerFacts,
    pub(crate) priority: i32,
    pub(crate) cache_salt: u64,
    pub(crate) warnings: Vec<RequestWarning>,
    pub(crate) output_limit: OutputLimit,
    /// The vector that each sequence asks for instead of tokens.
    pub(crate) pooling: Option<Pooling>,
}

/// Facts of a request that its answer shows, in APIs whose answers do.
#[derive(Clone, Debug, Default)]
pub(crate) struct AnswerFacts {
    /// Fields that the answer repeats, the text of a JSON object.
    pub(crate) repeated: Option<Arc<str>>,
    /// The items of the request, if its response is to be stored.
    pub(crate) input: Option<ItemList>,
    /// Functions of namespaces, by their names in the prompt.
    pub(crate) namespaced: Arc<[NamespacedTool]>,
    /// Id of the response, if it has one of its own.
    pub(crate) response_id: Option<Arc<str>>,
    /// Whether the answer is made without a connection.
    pub(crate) is_background: bool,
    /// Stores the response, if it is to be stored.
    pub(crate) recorder: Option<ResponseRecorder>,
    /// Memory of request bodies that is reserved for these facts.
    pub(crate) memory: Option<Arc<OwnedSemaphorePermit>>,
    /// Limit of output tokens that the client set.
    pub(crate) tokens_max: Option<u32>,
    /// Values that are made of the vectors.
    pub(crate) pooled: Option<Arc<PooledAnswer>>,
}

/// Origin of the limit of a request's output tokens.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum OutputLimit {
    /// The client set it.
    Requested,
    /// The API's default; it is lowered to what a worker can hold.
    Default,
}

/// A request's feature that is served only in part.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
pub(crate) struct RequestWarning {
    pub(crate) param: &'static str,
    pub(crate) message: &'static str,
}

#[derive(Clone, Debug)]
pub(crate) struct TokenizedPrompt {
    pub(crate) tokens: Arc<[TokenId]>,
    pub(crate) stop: StopRules,
    /// Whether the first output token continues visible text.
    pub(crate) start: TextStart,
    /// Text of the prompt, if the answer repeats it before the output.
    pub(crate) echo: Option<String>,
    pub(crate) output_wanted: OutputWanted,
}

/// Whether the client wants output tokens.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum OutputWanted {
    Output,
    /// `max_tokens: 0` with `echo`: only the scores of the prompt.
    PromptOnly,
    /// A vector instead of tokens.
    Vector,
}

/// The conversion of output tokens into text.
#[derive(Clone, Debug)]
pub(crate) struct OutputFormat {
    pub(crate) stops: Arc<[String]>,
    pub(crate) stop_text: StopText,
    pub(crate) special: SpecialTokens,
    /// Number of log-probabilities, as in [`SamplingParams::logprobs`].
    pub(crate) logprobs: Option<u32>,
    /// Number of log-probabilities of each token of the prompt, apart from an echoed prompt's.
    pub(crate) prompt_logprobs: Option<u32>,
    pub(crate) scored: ScoredTokens,
    pub(crate) reasoning: ReasoningShown,
    pub(crate) call_reason: CallReason,
    /// Names of tools that are called with a text, the member `input` of their arguments.
    pub(crate) custom_tools: Arc<[String]>,
}

/// The tokens whose log-probabilities the answer has.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum ScoredTokens {
    All,
    /// Log-probabilities of the answer's text, without reasoning.
    Answer,
}

/// Whether the answer has the model's reasoning.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum ReasoningShown {
    Shown,
    LeftOut,
}

/// The reason for which an answer with calls ended.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum CallReason {
    /// The model chose to call.
    Calls,
    /// The request names the call, so that the end is as any other.
    Stop,
}

/// Whether the text includes the stop string or token that ended it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum StopText {
    Cut,
    Included,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum ResponseMode {
    Whole,
    Stream(UsageShown),
    /// At once, before it is made.
    Background,
}

/// The chunks of a stream that show token counts.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum UsageShown {
    Never,
    AtEnd,
    Always,
}

/// A function of a namespace.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct NamespacedTool {
    /// The name by which the model knows it.
    pub(crate) shown_name: String,
    pub(crate) namespace: String,
    pub(crate) name: String,
}

impl AnswerFacts {
    /// Length of the texts of the request that are kept until its answer ends, in bytes.
    pub(crate) fn kept_bytes(&self) -> usize {
        let repeated = self.repeated.as_ref().map_or(0, |text| text.len());
        // A response that runs in the background is shown, too.
        let copies = 1 + usize::from(self.is_background);
        repeated * copies + self.input.as_ref().map_or(0, ItemList::bytes)
    }
}

impl GenerateRequest {
    /// Builds the requests of all sequences, in the order of their indices in the answer: `prompt *
    /// choices + choice`. `slos` has an SLO for each prompt.
    pub(crate) fn requests(&self, slos: &[RequestSlo]) -> Vec<Request> {
        let choices = 0..u64::from(self.choices);
        let prompts = self.prompts.iter().zip(slos);
        let sequences = prompts.flat_map(|prompt| choices.clone().map(move |c| (prompt, c)));
        let request = |((prompt, slo), choice): ((&TokenizedPrompt, &RequestSlo), u64)| Request {
            prompt: prompt.tokens.clone(),
            generated: Arc::from([]),
            sampling: SamplingParams {
                seed: seed_of(self.sampling.seed, choice),
                ..self.sampling.clone()
            },
            stop: prompt.stop.clone(),
            priority: self.priority,
            cache_salt: self.cache_salt,
            adapter: None,
            pooling: self.pooling.clone(),
            slo: slo.clone(),
        };
        sequences.map(request).collect()
    }

    /// Lowers a default limit of output tokens to the rest of a sequence of `tokens_max` tokens.
    /// One token, and `min_tokens`, are always left: a worker refuses what it cannot hold.
    pub(crate) fn fit_default_output(&mut self, tokens_max: u32) {
        if self.output_limit == OutputLimit::Requested {
            return;
        }
        for prompt in &mut self.prompts {
            let prompt_tokens = u32::try_from(prompt.tokens.len()).unwrap_or(u32::MAX);
            let room = tokens_max.saturating_sub(prompt_tokens).max(1);
            let stop = &mut prompt.stop;
            stop.max_tokens = stop.max_tokens.min(room.max(stop.min_tokens));
        }
    }

    /// Number of sequences: prompts times choices.
    pub(crate) fn sequences_count(&self) -> usize {
        self.prompts.len() * self.choices as usize
    }

    pub(crate) fn prompt_tokens(&self) -> u64 {
        self.prompts
            .iter()
            .map(|prompt| prompt.tokens.len() as u64)
            .sum()
    }
}

/// The first choice draws with the seed itself, so that it does not depend on `n`. The other seeds
/// are spread by an odd multiplier (the 64 bits of the golden ratio).
fn seed_of(seed: u64, choice: u64) -> u64 {
    seed.wrapping_add(choice.wrapping_mul(0x9E37_79B9_7F4A_7C15))
}

/// Checks `model`, which may be left out, as in vLLM.
pub(crate) fn check_model(fields: &JsonFields, model: &ModelText) -> Result<(), ApiError> {
    match fields.text(&MODEL)? {
        Some(requested) if requested != model.name() => Err(ApiError::model_not_found(
            &clipped(&requested),
            &format!("`{}`", model.name()),
        )),
        _ => Ok(()),
    }
}

/// Fields of vLLM, SGLang and OpenAI that would change the answer.
pub(crate) const UNSUPPORTED: &[RefusedField] = {
    const TOKENS_LISTED: &str = "`logit_bias` has single tokens, `structured_outputs` texts";
    const CALLS: &str = "`tools` and `tool_choice` are the newer fields";
    &[
        RefusedField::new(
            "guided_whitespace_pattern",
            "JSON has at most 64 characters of whitespace at a place",
        ),
        RefusedField::new("use_beam_search", "tokens are drawn, not searched for"),
        RefusedField::new("logits_processors", "no code of a client is run"),
        RefusedField::new("allowed_token_ids", TOKENS_LISTED),
        RefusedField::new("bad_words", TOKENS_LISTED),
        RefusedField::new("truncate_prompt_tokens", "no prompt is shortened"),
        RefusedField::new("prompt_embeds", "prompts are texts or tokens"),
        RefusedField::new("chat_template", "the model's own template is used"),
        RefusedField::new("audio", "answers are texts"),
        RefusedField::new("functions", CALLS),
        RefusedField::new("function_call", CALLS),
        RefusedField::new("web_search_options", "nothing is searched"),
        RefusedField::new("ebnf", "`structured_outputs.grammar` takes Lark's syntax"),
    ]
};

pub(crate) fn response_mode(fields: &JsonFields) -> Result<ResponseMode, ApiError> {
    let options = fields.object(&STREAM_OPTIONS)?;
    let flag = |field: &RequestField<FlagValue>| match &options {
        Some(options) => options.flag(field).map(Option::unwrap_or_default),
        None => Ok(false),
    };
    let (at_end, always) = (flag(&INCLUDE_USAGE)?, flag(&CONTINUOUS_USAGE_STATS)?);
    if !fields.flag(&STREAM)?.unwrap_or(false) {
        return match options {
            None => Ok(ResponseMode::Whole),
            Some(_) => Err(fields.invalid(
                &STREAM_OPTIONS,
                "`stream_options` is only allowed when `stream` is true.",
            )),
        };
    }
    Ok(ResponseMode::Stream(match (at_end, always) {
        (false, _) => UsageShown::Never,
        (true, false) => UsageShown::AtEnd,
        (true, true) => UsageShown::Always,
    }))
}

pub(crate) fn choices(fields: &JsonFields, prompts: usize) -> Result<u32, ApiError> {
    let choices = fields.integer(&N)?.unwrap_or(1);
    if prompts * choices as usize > SEQUENCES_MAX {
        let message = format!(
            "{prompts} prompts with `n` {choices} are more than {SEQUENCES_MAX} sequences."
        );
        return Err(fields.invalid(&N, message));
    }
    Ok(choices as u32)
}

/// Hashes `cache_salt` to a number; 0 stands for no salt.
pub(crate) fn cache_salt(fields: &JsonFields) -> Result<u64, ApiError> {
    let Some(salt) = fields.text(&CACHE_SALT)? else {
        return Ok(0);
    };
    let mut bytes = [0; 8];
    bytes.copy_from_slice(&blake3::hash(salt.as_bytes()).as_bytes()[..8]);
    Ok(u64::from_le_bytes(bytes).max(1))
}

/// Reads `priority`: smaller is more urgent, as in vLLM.
pub(crate) fn priority(fields: &JsonFields) -> Result<i32, ApiError> {
    Ok(fields.integer(&PRIORITY)?.unwrap_or(0) as i32)
}

/// The answer begins a text of its own only if the prompt has no visible token.
pub(crate) fn text_start(
    model: &ModelText,
    prompt: &[TokenId],
    special: SpecialTokens,
) -> TextStart {
    let is_visible = |token: &TokenId| model.tokenizer().piece(*token, special).is_some();
    if prompt.iter().any(is_visible) {
        TextStart::Continued
    } else {
        TextStart::Fresh
    }
}
