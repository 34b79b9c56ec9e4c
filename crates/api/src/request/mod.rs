//! Requests to generate, checked, and the fields that several APIs share.
//!
//! Owns: the ranges and defaults of shared fields, and the headers. Never: starts anything, or
//! knows one API (see `surface`). Invariant: a [`GenerateRequest`] can be served; for every other
//! request the client got an error that names the field.
//!
//! Fields that OpenAI's clients send and that change nothing here (`user`, `store`, `metadata`,
//! `service_tier`, `parallel_tool_calls` …) are ignored; unsupported fields that would change the
//! answer are refused.

mod headers;
pub(crate) mod sampling;
pub(crate) mod text;

pub(crate) use headers::{apply_tenant_limits, read_origin, request_id, resolve_slos, timing};

use crate::error::ApiError;
use crate::field::{JsonFields, clipped};
use cleave_domain::{Request, RequestSlo, SamplingParams, StopRules, TokenId};
use cleave_text::json::{Json, JsonShape};
use cleave_text::{ModelText, SpecialTokens, TextStart};
use serde::Serialize;
use std::sync::Arc;

/// Limit of choices per prompt.
pub(crate) const CHOICES_MAX: i64 = 128;
/// Limit of sequences of one HTTP request, over all prompts.
const SEQUENCES_MAX: usize = 1024;
/// Limit of stop strings; OpenAI's is 4.
const STOPS_MAX: usize = 16;
/// Limit of one stop string, in bytes: each token's text is compared with all of them.
const STOP_BYTES_MAX: usize = 1024;
/// Limit of log-probabilities per token.
pub(crate) const LOGPROBS_MAX: i64 = 20;
/// Limit of token ids in `stop_token_ids` and of entries in `logit_bias`: the sampler walks them in
/// each step.
const TOKEN_LIST_MAX: usize = 1024;

/// A checked request of `prompts` × `choices` sequences.
#[derive(Clone, Debug)]
pub(crate) struct GenerateRequest {
    pub(crate) prompts: Vec<TokenizedPrompt>,
    pub(crate) choices: u32,
    /// Sampling of the first choice; the seeds of the others are derived from its seed.
    pub(crate) sampling: SamplingParams,
    pub(crate) output: OutputFormat,
    pub(crate) delivery: ResponseMode,
    pub(crate) priority: i32,
    pub(crate) cache_salt: u64,
    pub(crate) warnings: Vec<RequestWarning>,
    pub(crate) output_limit: OutputLimit,
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
}

/// The conversion of output tokens into text.
#[derive(Clone, Debug)]
pub(crate) struct OutputFormat {
    pub(crate) stops: Arc<[String]>,
    pub(crate) stop_text: StopText,
    pub(crate) special: SpecialTokens,
    /// Number of log-probabilities, as in [`SamplingParams::logprobs`].
    pub(crate) logprobs: Option<u32>,
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
}

/// The chunks of a stream that show token counts.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum UsageShown {
    Never,
    AtEnd,
    Always,
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
    match fields.text("model")? {
        Some(requested) if requested != model.name() => Err(ApiError::model_not_found(
            &clipped(&requested),
            model.name(),
        )),
        _ => Ok(()),
    }
}

/// Refuses fields that would change the answer.
pub(crate) fn refuse_fields(fields: &JsonFields, names: &[&str]) -> Result<(), ApiError> {
    let asks = |value: Json<'_>| match value.shape() {
        JsonShape::Bool(flag) => flag,
        JsonShape::Array(mut items) => items.next().is_some(),
        JsonShape::Object(mut members) => members.next().is_some(),
        JsonShape::String(text) => !text.is_empty(),
        JsonShape::Null | JsonShape::Number(_) => true,
    };
    match names.iter().find(|name| fields.any(name).is_some_and(asks)) {
        None => Ok(()),
        Some(name) => Err(ApiError::unsupported(
            fields.path(name),
            format!("`{name}` is not supported; leave it out."),
        )),
    }
}

/// Fields of vLLM, SGLang and OpenAI that constrain or reshape the output.
pub(crate) const UNSUPPORTED: &[&str] = &[
    "guided_json",
    "guided_regex",
    "guided_choice",
    "guided_grammar",
    "structured_outputs",
    "use_beam_search",
    "logits_processors",
    "allowed_token_ids",
    "bad_words",
    "truncate_prompt_tokens",
    "prompt_logprobs",
    "prompt_embeds",
    "chat_template",
    "audio",
    "functions",
    "function_call",
    "web_search_options",
    "regex",
    "ebnf",
    "json_schema",
];

/// Checks `response_format`: only text is supported.
pub(crate) fn check_format(fields: &JsonFields) -> Result<(), ApiError> {
    let Some(format) = fields.object("response_format")? else {
        return Ok(());
    };
    match format.text("type")?.as_deref() {
        Some("text") => Ok(()),
        Some(kind) => Err(ApiError::unsupported(
            "response_format",
            format!(
                "`response_format` of type {:?} is not supported; only \"text\" is.",
                clipped(kind)
            ),
        )),
        None => Err(ApiError::invalid(
            "response_format.type",
            "`response_format.type` is missing.",
        )),
    }
}

pub(crate) fn response_mode(fields: &JsonFields) -> Result<ResponseMode, ApiError> {
    let options = fields.object("stream_options")?;
    let flag = |name| match &options {
        Some(options) => options.flag(name).map(Option::unwrap_or_default),
        None => Ok(false),
    };
    let (at_end, always) = (flag("include_usage")?, flag("continuous_usage_stats")?);
    if !fields.flag("stream")?.unwrap_or(false) {
        return match options {
            None => Ok(ResponseMode::Whole),
            Some(_) => Err(ApiError::invalid(
                "stream_options",
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
    let choices = fields.integer("n", 1..=CHOICES_MAX)?.unwrap_or(1);
    if prompts * choices as usize > SEQUENCES_MAX {
        return Err(ApiError::invalid(
            "n",
            format!(
                "{prompts} prompts with `n` {choices} are more than {SEQUENCES_MAX} sequences."
            ),
        ));
    }
    Ok(choices as u32)
}

/// Hashes `cache_salt` to a number; 0 stands for no salt.
pub(crate) fn cache_salt(fields: &JsonFields) -> Result<u64, ApiError> {
    match fields.text("cache_salt")?.as_deref() {
        None => Ok(0),
        Some("") => Err(ApiError::invalid(
            "cache_salt",
            "`cache_salt` must not be empty.",
        )),
        Some(salt) => {
            let mut bytes = [0; 8];
            bytes.copy_from_slice(&blake3::hash(salt.as_bytes()).as_bytes()[..8]);
            Ok(u64::from_le_bytes(bytes).max(1))
        }
    }
}

/// Reads `priority`: smaller is more urgent, as in vLLM.
pub(crate) fn priority(fields: &JsonFields) -> Result<i32, ApiError> {
    let range = i64::from(i32::MIN)..=i64::from(i32::MAX);
    Ok(fields.integer("priority", range)?.unwrap_or(0) as i32)
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
