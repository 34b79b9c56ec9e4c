//! Sampling and stop parameters, which the APIs share.

use super::{
    LOGPROBS_MAX, OutputFormat, OutputLimit, STOP_BYTES_MAX, STOPS_MAX, StopText, TOKEN_LIST_MAX,
};
use crate::error::ApiError;
use crate::field::{JsonFields, integer, number, wrong_type};
use cleave_domain::{SamplingParams, StopRules, TokenId};
use cleave_text::json::{Json, JsonItems, JsonShape};
use cleave_text::{ModelText, REPETITION_PENALTY, SpecialTokens};
use std::borrow::Cow;
use std::ops::Bound;
use std::sync::Arc;

/// Reads all sampling parameters but log-probabilities, whose fields differ between the APIs.
pub(crate) fn sampling(fields: &JsonFields, model: &ModelText) -> Result<SamplingParams, ApiError> {
    let defaults = model.defaults();
    let top_k = fields.integer("top_k", -1..=i64::from(u32::MAX))?;
    let seed = fields.integer("seed", i64::MIN..=i64::MAX)?;
    Ok(SamplingParams {
        temperature: fields
            .number("temperature", 0.0..=2.0)?
            .unwrap_or(defaults.temperature),
        // In vLLM -1 and 0 both disable top-k.
        top_k: top_k.map_or(defaults.top_k, |top_k| top_k.max(0) as u32),
        // A share too small for f32 still keeps the most likely token; as 0 it would keep none.
        top_p: fields
            .number("top_p", (Bound::Excluded(0.0), Bound::Included(1.0)))?
            .map_or(defaults.top_p, |top_p| top_p.max(f32::MIN_POSITIVE)),
        min_p: fields.number("min_p", 0.0..=1.0)?.unwrap_or(defaults.min_p),
        repetition_penalty: fields
            .number("repetition_penalty", REPETITION_PENALTY)?
            .unwrap_or(defaults.repetition_penalty),
        presence_penalty: fields
            .number("presence_penalty", -2.0..=2.0)?
            .unwrap_or(0.0),
        frequency_penalty: fields
            .number("frequency_penalty", -2.0..=2.0)?
            .unwrap_or(0.0),
        logit_bias: logit_bias(fields, model)?,
        seed: seed.map_or_else(rand::random, |seed| seed as u64),
        logprobs: None,
        prompt_logprobs: None,
    })
}

fn logit_bias(fields: &JsonFields, model: &ModelText) -> Result<Vec<(TokenId, f32)>, ApiError> {
    let Some(entries) = fields.object("logit_bias")? else {
        return Ok(Vec::new());
    };
    limit_list("logit_bias", entries.members().count(), TOKEN_LIST_MAX)?;
    let entry = |key: &str, value: Json<'_>| {
        let path = entries.path(key);
        let token = key
            .parse()
            .ok()
            .filter(|&token: &TokenId| token < model.vocabulary_count());
        let token = token.ok_or_else(|| ApiError::invalid(&*path, not_a_token(&path, model)))?;
        Ok((token, number(&path, value, -100.0..=100.0)?))
    };
    let mut named: Vec<(Cow<'_, str>, Json<'_>)> = Vec::new();
    for (key, value) in entries.members() {
        let key = key.get();
        match named.iter_mut().find(|(earlier, _)| *earlier == key) {
            Some((_, earlier)) => *earlier = value,
            None => named.push((key, value)),
        }
    }
    let bias = named.iter().map(|(key, value)| entry(key, *value));
    let mut bias = bias.collect::<Result<Vec<(TokenId, f32)>, ApiError>>()?;
    bias.sort_by_key(|&(token, _)| token);
    Ok(bias)
}

fn not_a_token(path: &str, model: &ModelText) -> String {
    format!(
        "`{path}`: token ids are integers from 0 to {}.",
        model.vocabulary_count().saturating_sub(1)
    )
}

pub(crate) fn limit_list(path: &str, count: usize, count_max: usize) -> Result<(), ApiError> {
    if count <= count_max {
        return Ok(());
    }
    Err(ApiError::invalid(
        path,
        format!("`{path}` has {count} entries; at most {count_max} are allowed."),
    ))
}

/// Reads a list of token ids of the model.
pub(crate) fn token_ids(
    path: &str,
    items: JsonItems<'_>,
    model: &ModelText,
) -> Result<Vec<TokenId>, ApiError> {
    let last = i64::from(model.vocabulary_count()) - 1;
    // The items are counted first: a growing list would take twice the memory.
    let mut tokens = Vec::with_capacity(items.clone().count());
    for (index, item) in items.enumerate() {
        tokens.push(match item.text().parse::<TokenId>() {
            Ok(id) if i64::from(id) <= last => id,
            // Prompts are long and almost always valid, so the path for an error is built only
            // here.
            _ => integer(&format!("{path}[{index}]"), item, 0..=last)? as TokenId,
        });
    }
    Ok(tokens)
}

/// Reads the parameters that turn output into text; `logprobs` is read by the API.
pub(crate) fn output(fields: &JsonFields, logprobs: Option<u32>) -> Result<OutputFormat, ApiError> {
    let stop_text = match fields.flag("include_stop_str_in_output")? {
        Some(true) => StopText::Included,
        Some(false) | None => StopText::Cut,
    };
    let special = match fields.flag("skip_special_tokens")? {
        Some(false) => SpecialTokens::Kept,
        Some(true) | None => SpecialTokens::Skipped,
    };
    Ok(OutputFormat {
        stops: stop_strings(fields)?.into(),
        stop_text,
        special,
        logprobs,
    })
}

fn stop_strings(fields: &JsonFields) -> Result<Vec<String>, ApiError> {
    let Some(given) = fields.any("stop") else {
        return Ok(Vec::new());
    };
    match given.shape() {
        JsonShape::String(_) => Ok(vec![stop_string("stop", given)?]),
        JsonShape::Array(items) => {
            limit_list("stop", items.clone().count(), STOPS_MAX)?;
            let items = items.enumerate();
            let stop = items.map(|(index, item)| stop_string(&format!("stop[{index}]"), item));
            stop.collect()
        }
        _ => Err(wrong_type("stop", "a string or an array of strings", given)),
    }
}

fn stop_string(path: &str, given: Json<'_>) -> Result<String, ApiError> {
    let JsonShape::String(text) = given.shape() else {
        return Err(wrong_type(path, "a string", given));
    };
    let text = text.get();
    match text.len() {
        0 => Err(ApiError::invalid(
            path,
            format!("`{path}` must not be empty."),
        )),
        1..=STOP_BYTES_MAX => Ok(text.into_owned()),
        bytes => Err(ApiError::invalid(
            path,
            format!("`{path}` has {bytes} bytes; at most {STOP_BYTES_MAX} are allowed."),
        )),
    }
}

/// Reads a count of tokens such as `top_logprobs`.
pub(crate) fn logprobs_count(fields: &JsonFields, name: &str) -> Result<Option<u32>, ApiError> {
    Ok(fields
        .integer(name, 0..=LOGPROBS_MAX)?
        .map(|count| count as u32))
}

/// Stop conditions of a sequence before its prompt is known.
pub(crate) struct StopFields {
    min_tokens: u32,
    stop_tokens: Arc<[TokenId]>,
    max_tokens: Option<(&'static str, u32)>,
}

impl StopFields {
    /// Reads the fields. `tokens_min` is the least that `max_tokens` may be.
    pub(crate) fn read(
        fields: &JsonFields,
        model: &ModelText,
        tokens_min: i64,
    ) -> Result<Self, ApiError> {
        let listed = fields.array("stop_token_ids")?;
        let count = listed.clone().map_or(0, JsonItems::count);
        limit_list("stop_token_ids", count, TOKEN_LIST_MAX)?;
        let listed = listed.map(|listed| token_ids("stop_token_ids", listed, model));
        let mut stop_tokens = listed.transpose()?.unwrap_or_default();
        if !fields.flag("ignore_eos")?.unwrap_or(false) {
            stop_tokens.extend(model.eos().iter());
        }
        stop_tokens.sort_unstable();
        stop_tokens.dedup();
        let counted = i64::from(u32::MAX);
        let min_tokens = fields.integer("min_tokens", 0..=counted)?.unwrap_or(0) as u32;
        // `max_completion_tokens` is the newer field and takes precedence (lesson 21).
        let mut max_tokens = None;
        for name in ["max_tokens", "max_completion_tokens"] {
            let tokens = fields.integer(name, tokens_min..=counted)?;
            max_tokens = tokens.map(|tokens| (name, tokens as u32)).or(max_tokens);
        }
        Ok(Self {
            min_tokens,
            stop_tokens: stop_tokens.into(),
            max_tokens,
        })
    }

    /// Returns the field that limits the output, and the limit.
    pub(crate) fn max_tokens(&self) -> Option<(&'static str, u32)> {
        self.max_tokens
    }

    pub(crate) fn output_limit(&self) -> OutputLimit {
        match self.max_tokens {
            Some(_) => OutputLimit::Requested,
            None => OutputLimit::Default,
        }
    }

    /// Builds the rules for a prompt of `prompt_count` tokens.
    pub(crate) fn stop_rules(
        &self,
        prompt_count: usize,
        output_room: OutputRoom,
    ) -> Result<StopRules, ApiError> {
        let OutputRoom {
            param,
            context,
            default,
        } = output_room;
        let tokens_left = u64::from(context).saturating_sub(prompt_count as u64);
        if tokens_left == 0 {
            let reason = match self.max_tokens {
                Some((_, 0)) => "and must leave room for one more, which is computed and dropped",
                _ => "and leaves no room for output",
            };
            return Err(ApiError::context_exceeded(
                param,
                format!(
                    "The model's context length is {context} tokens; the prompt has {prompt_count} \
                     {reason}. Shorten the prompt."
                ),
            ));
        }
        if let Some((name, tokens)) = self.max_tokens
            && u64::from(tokens) > tokens_left
        {
            return Err(ApiError::context_exceeded(
                name,
                format!(
                    "The model's context length is {context} tokens; the prompt has {prompt_count} \
                     and `{name}` asks for {tokens}, {} in all. Shorten the prompt or lower `{name}`.",
                    prompt_count as u64 + u64::from(tokens)
                ),
            ));
        }
        let requested_tokens = self
            .max_tokens
            .map(|(_, tokens)| tokens)
            .or(default)
            .unwrap_or(u32::MAX);
        let max_tokens = u64::from(requested_tokens).min(tokens_left) as u32;
        if self.min_tokens > max_tokens {
            return Err(ApiError::invalid(
                "min_tokens",
                format!(
                    "`min_tokens` is {}, more than the {max_tokens} tokens that the output may have.",
                    self.min_tokens
                ),
            ));
        }
        Ok(StopRules {
            max_tokens,
            min_tokens: self.min_tokens,
            stop_tokens: self.stop_tokens.clone(),
        })
    }
}

/// The space that a context leaves for output; see [`StopFields::stop_rules`].
#[derive(Clone, Copy, Debug)]
pub(crate) struct OutputRoom {
    pub(crate) param: &'static str,
    pub(crate) context: u32,
    /// Limit of output tokens if the client sets none; `None` means the rest of the context.
    pub(crate) default: Option<u32>,
}
