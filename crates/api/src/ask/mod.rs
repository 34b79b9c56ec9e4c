//! What a client asks for, checked.
//!
//! Owns: which fields there are, their ranges and defaults. Never: starts anything.
//! Invariant: what leaves here can be served; everything else was answered with the field's name.
//!
//! Fields that OpenAI's clients send and that change nothing here (`user`, `store`, `metadata`,
//! `service_tier`, `parallel_tool_calls` …) are ignored; fields that would change the answer and
//! are not supported are refused.

mod chat;
mod completion;
mod headers;
mod message;
mod sampling;
mod text;

pub(crate) use chat::chat;
pub(crate) use completion::completion;
pub(crate) use headers::{confine, origin, promises, request_id, timing};
pub(crate) use text::{detokenize, tokenize};

use crate::error::ApiError;
use crate::field::{Fields, clipped};
use crate::json::{Json, Shape};
use crate::model::{ModelText, Special};
use crate::text::Start;
use cleave_domain::{Request, Sampling, Slo, StopRules, TokenId};
use serde::Serialize;
use std::sync::Arc;

/// Choices per prompt.
pub(crate) const CHOICES_MAX: i64 = 128;
/// Choices over all prompts of one HTTP request.
const SEQUENCES_MAX: usize = 1024;
/// Stop strings; OpenAI's limit is 4.
const STOPS_MAX: usize = 16;
/// Bytes of one stop string: each token's text is compared with all of them.
const STOP_BYTES_MAX: usize = 1024;
/// Log-probabilities per token.
pub(crate) const LOGPROBS_MAX: i64 = 20;
/// Token ids in `stop_token_ids`, and entries in `logit_bias`: the sampler walks them each step.
const TOKEN_LIST_MAX: usize = 1024;

/// A checked request: `prompts` × `choices` sequences.
#[derive(Clone, Debug)]
pub(crate) struct Ask {
    pub(crate) prompts: Vec<Prompt>,
    /// Choices for each prompt.
    pub(crate) choices: u32,
    /// The seed is that of the first choice.
    pub(crate) sampling: Sampling,
    pub(crate) output: Output,
    pub(crate) delivery: Delivery,
    pub(crate) priority: i32,
    pub(crate) cache_salt: u64,
    pub(crate) warnings: Vec<Warning>,
}

/// Something that was asked for and is not done in full.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
pub(crate) struct Warning {
    /// The field.
    pub(crate) param: &'static str,
    pub(crate) message: &'static str,
}

/// One prompt of a request.
#[derive(Clone, Debug)]
pub(crate) struct Prompt {
    pub(crate) tokens: Arc<[TokenId]>,
    pub(crate) stop: StopRules,
    /// Whether the output's first token continues visible text.
    pub(crate) start: Start,
    /// The prompt's text, if it is to be repeated before the output.
    pub(crate) echo: Option<String>,
    pub(crate) wanted: Wanted,
}

/// Whether there is an output at all.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Wanted {
    Output,
    /// `max_tokens: 0` with `echo`: only the prompt's scores.
    PromptOnly,
}

/// How output tokens become text.
#[derive(Clone, Debug)]
pub(crate) struct Output {
    pub(crate) stops: Arc<[String]>,
    pub(crate) stop_text: StopText,
    pub(crate) special: Special,
    /// As in [`Sampling::logprobs`].
    pub(crate) logprobs: Option<u32>,
}

/// Whether what stopped the text is part of it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum StopText {
    Cut,
    Included,
}

/// How the answer is sent.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Delivery {
    Whole,
    Stream(UsageShown),
}

/// Where in a stream token counts are shown.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum UsageShown {
    Never,
    AtEnd,
    Always,
}

impl Ask {
    /// The sequences in the order of their indices in the answer: `prompt * choices + choice`. There
    /// is a promise for each prompt.
    pub(crate) fn requests(&self, promises: &[Slo]) -> Vec<Request> {
        let choices = 0..u64::from(self.choices);
        let prompts = self.prompts.iter().zip(promises);
        let sequences = prompts.flat_map(|prompt| choices.clone().map(move |c| (prompt, c)));
        let request = |((prompt, slo), choice): ((&Prompt, &Slo), u64)| Request {
            prompt: prompt.tokens.clone(),
            generated: Arc::from([]),
            sampling: Sampling {
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

    /// Prompts, each as often as it has choices.
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

/// The first choice draws with the seed itself, so that it does not depend on `n`; the others with
/// seeds spread by an odd multiplier (the golden ratio's 64 bits).
fn seed_of(seed: u64, choice: u64) -> u64 {
    seed.wrapping_add(choice.wrapping_mul(0x9E37_79B9_7F4A_7C15))
}

/// `model`: may be left out, as in vLLM.
fn check_model(fields: &Fields, model: &ModelText) -> Result<(), ApiError> {
    match fields.text("model")? {
        Some(asked) if asked != model.name() => {
            Err(ApiError::model_not_found(&clipped(&asked), model.name()))
        }
        _ => Ok(()),
    }
}

/// Refuses fields that would change the answer.
fn refuse(fields: &Fields, names: &[&str]) -> Result<(), ApiError> {
    let asks = |value: Json<'_>| match value.shape() {
        Shape::Bool(flag) => flag,
        Shape::Array(mut items) => items.next().is_some(),
        Shape::Object(mut members) => members.next().is_some(),
        Shape::String(text) => !text.is_empty(),
        Shape::Null | Shape::Number(_) => true,
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
const UNSUPPORTED: &[&str] = &[
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

/// `response_format`: only text.
fn check_format(fields: &Fields) -> Result<(), ApiError> {
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

/// `stream` and `stream_options`.
fn delivery(fields: &Fields) -> Result<Delivery, ApiError> {
    let options = fields.object("stream_options")?;
    let flag = |name| match &options {
        Some(options) => options.flag(name).map(Option::unwrap_or_default),
        None => Ok(false),
    };
    let (at_end, always) = (flag("include_usage")?, flag("continuous_usage_stats")?);
    if !fields.flag("stream")?.unwrap_or(false) {
        return match options {
            None => Ok(Delivery::Whole),
            Some(_) => Err(ApiError::invalid(
                "stream_options",
                "`stream_options` is only allowed when `stream` is true.",
            )),
        };
    }
    Ok(Delivery::Stream(match (at_end, always) {
        (false, _) => UsageShown::Never,
        (true, false) => UsageShown::AtEnd,
        (true, true) => UsageShown::Always,
    }))
}

/// `n`.
fn choices(fields: &Fields, prompts: usize) -> Result<u32, ApiError> {
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

/// `cache_salt` as a number; 0 is for those without one.
fn cache_salt(fields: &Fields) -> Result<u64, ApiError> {
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

/// `priority`: smaller is more urgent, as in vLLM.
fn priority(fields: &Fields) -> Result<i32, ApiError> {
    let range = i64::from(i32::MIN)..=i64::from(i32::MAX);
    Ok(fields.integer("priority", range)?.unwrap_or(0) as i32)
}

/// An answer is a text of its own only if nothing but marks came before it.
fn start(model: &ModelText, prompt: &[TokenId], special: Special) -> Start {
    let is_visible = |token: &TokenId| model.piece(*token, special).is_some();
    if prompt.iter().any(is_visible) {
        Start::Continued
    } else {
        Start::Fresh
    }
}

#[cfg(test)]
pub(crate) use chat::conversation;
