//! Sampling and stop parameters, which the APIs share.

use super::constraint::FieldConstraint;
use super::{
    CallReason, LOGPROBS, OutputFormat, OutputLimit, ReasoningShown, ResponseMode, ScoredTokens,
    StopText,
};
use crate::error::ApiError;
use crate::field::{
    AnyValue, FlagValue, IntegerRange, JsonFields, ListShape, MapKeys, MapShape, RequestField,
    TextShape, ValueShape, any, flag, integer, integer_value, limit_list, list, map, number,
    number_value, request_fields, text_value, wrong_type,
};
use cleave_domain::{SamplingParams, StopRules, TokenId};
use cleave_text::json::{Json, JsonItems, JsonShape};
use cleave_text::{ModelText, NumberBounds, SamplingDefaults, SpecialTokens, bounds_from_to};
use std::borrow::Cow;
use std::ops::RangeInclusive;
use std::sync::Arc;

/// Limit of token ids in `stop_token_ids` and of entries in `logit_bias`: the sampler walks them in
/// each step.
const TOKEN_LIST_MAX: usize = 1024;
/// Limit of stop strings; OpenAI's is 4.
pub(crate) const STOPS_MAX: usize = 16;
/// A stop string: each token's text is compared with all of them.
pub(crate) const STOP_TEXT: TextShape = TextShape {
    bytes_max: Some(1024),
    ..TextShape::NOT_EMPTY
};
/// As engines accept it. (llama.cpp takes negative numbers for 0.)
const TOP_N_SIGMA_RANGE: NumberBounds = bounds_from_to(
    *SamplingParams::TOP_N_SIGMA.start(),
    *SamplingParams::TOP_N_SIGMA.end(),
);
/// Narrower than engines accept: the range of OpenAI's API.
const OUTPUT_PENALTY: NumberBounds = bounds_from_to(-2.0, 2.0);
/// Narrower than engines accept: the range of OpenAI's API.
const LOGIT_BIAS_VALUE: NumberBounds = bounds_from_to(-100.0, 100.0);
/// Range of a number of tokens.
pub(crate) const TOKENS: RangeInclusive<i64> = 0..=u32::MAX as i64;

request_fields! {
    pub(crate) SAMPLING_FIELDS {
        TEMPERATURE: NumberBounds = number(
            "temperature",
            SamplingDefaults::TEMPERATURE,
            "Divides the logits; 0 always takes the most likely token.",
        ).default("the checkpoint's, or 1");
        TOP_P: NumberBounds = number(
            "top_p",
            SamplingDefaults::TOP_P,
            "Draws from the fewest most likely tokens whose probabilities reach this sum; 1 keeps all.",
        ).default("the checkpoint's, or 1");
        TOP_K: IntegerRange = integer(
            "top_k",
            SamplingDefaults::TOP_K,
            "Draws from this many most likely tokens; -1 and 0 keep all.",
        ).default("the checkpoint's, or 0");
        MIN_P: NumberBounds = number(
            "min_p",
            SamplingDefaults::MIN_P,
            "Drops tokens less likely than this share of the most likely one; 0 keeps all.",
        ).default("the checkpoint's, or 0");
        TOP_N_SIGMA: NumberBounds = number(
            "top_n_sigma",
            TOP_N_SIGMA_RANGE,
            "Drops tokens whose logits are more than this many standard deviations of all logits below the largest, as in llama.cpp; 0 keeps all.",
        ).default("0");
        REPETITION_PENALTY: NumberBounds = number(
            "repetition_penalty",
            SamplingDefaults::REPETITION_PENALTY,
            "Divides positive and multiplies negative logits of tokens in prompt or output; 1 does nothing.",
        ).default("the checkpoint's, or 1");
        PRESENCE_PENALTY: NumberBounds = number(
            "presence_penalty",
            OUTPUT_PENALTY,
            "Subtracted once from the logit of each token in the output.",
        ).default("0");
        FREQUENCY_PENALTY: NumberBounds = number(
            "frequency_penalty",
            OUTPUT_PENALTY,
            "Subtracted from a token's logit for each time it is in the output.",
        ).default("0");
        LOGIT_BIAS: MapShape = map(
            "logit_bias",
            MapShape {
                keys: MapKeys::TokenIds,
                values: &ValueShape::Number(LOGIT_BIAS_VALUE),
                count_max: Some(TOKEN_LIST_MAX),
            },
            "Added to the logits of these tokens.",
        );
        SEED: IntegerRange = integer(
            "seed",
            i64::MIN..=i64::MAX,
            "The same seed draws the same tokens, whichever workers serve the request.",
        ).default("drawn anew, and not returned");
    }
}

request_fields! {
    pub(crate) STOP_FIELDS {
        MIN_TOKENS: IntegerRange = integer(
            "min_tokens",
            TOKENS,
            "No token that ends the output is drawn before it has this many tokens.",
        ).default("0");
        STOP: AnyValue = any(
            "stop",
            ValueShape::OneOf(&[
                ValueShape::Text(STOP_TEXT),
                ValueShape::List(ListShape::of(&ValueShape::Text(STOP_TEXT)).at_most(STOPS_MAX)),
            ]),
            "Texts that end the output.",
        );
        STOP_TOKEN_IDS: ListShape = list(
            "stop_token_ids",
            ListShape::of(&ValueShape::TokenId).at_most(TOKEN_LIST_MAX),
            "Tokens that end the output; the model's end tokens do too, unless `ignore_eos`.",
        );
        IGNORE_EOS: FlagValue = flag(
            "ignore_eos",
            "The model's end tokens do not end the output, as in vLLM; under a constraint they do where nothing else is allowed.",
        );
        INCLUDE_STOP_STR_IN_OUTPUT: FlagValue = flag(
            "include_stop_str_in_output",
            "The text has the stop string or token that ended it, as in vLLM.",
        );
        SKIP_SPECIAL_TOKENS: FlagValue = flag(
            "skip_special_tokens",
            "The text has no special tokens, as in vLLM.",
        ).default("true");
    }
}

request_fields! {
    pub(crate) PROMPT_SCORE_FIELDS {
        PROMPT_LOGPROBS: IntegerRange = integer(
            "prompt_logprobs",
            LOGPROBS,
            "The answer has the log-probability of each token of the prompt, and of this many likeliest ones in its place, as in vLLM; not with `stream`.",
        );
    }
}

request_fields! {
    pub(crate) SPECIAL_TOKENS_FIELDS {
        ADD_SPECIAL_TOKENS: FlagValue = flag(
            "add_special_tokens",
            "Adds the tokenizer's special tokens; chat templates write them themselves.",
        ).default("true for a text, false for messages");
    }
}

/// Reads all sampling parameters but log-probabilities, whose fields differ between the APIs.
pub(crate) fn sampling(
    fields: &JsonFields,
    model: &ModelText,
    asked: Option<&FieldConstraint>,
) -> Result<SamplingParams, ApiError> {
    let defaults = model.defaults();
    let top_k = fields.integer(&TOP_K)?;
    let seed = fields.integer(&SEED)?;
    Ok(SamplingParams {
        temperature: fields.number(&TEMPERATURE)?.unwrap_or(defaults.temperature),
        // In vLLM -1 and 0 both disable top-k.
        top_k: top_k.map_or(defaults.top_k, |top_k| top_k.max(0) as u32),
        // A share too small for f32 still keeps the most likely token; as 0 it would keep none.
        top_p: fields
            .number(&TOP_P)?
            .map_or(defaults.top_p, |top_p| top_p.max(f32::MIN_POSITIVE)),
        min_p: fields.number(&MIN_P)?.unwrap_or(defaults.min_p),
        top_n_sigma: fields.number(&TOP_N_SIGMA)?.unwrap_or(0.0),
        repetition_penalty: fields
            .number(&REPETITION_PENALTY)?
            .unwrap_or(defaults.repetition_penalty),
        presence_penalty: fields.number(&PRESENCE_PENALTY)?.unwrap_or(0.0),
        frequency_penalty: fields.number(&FREQUENCY_PENALTY)?.unwrap_or(0.0),
        logit_bias: logit_bias(fields, model)?,
        seed: seed.map_or_else(rand::random, |seed| seed as u64),
        logprobs: None,
        prompt_logprobs: None,
        constraint: asked.map(|asked| Arc::clone(&asked.constraint)),
    })
}

fn logit_bias(fields: &JsonFields, model: &ModelText) -> Result<Vec<(TokenId, f32)>, ApiError> {
    let Some(entries) = fields.map(&LOGIT_BIAS)? else {
        return Ok(Vec::new());
    };
    let entry = |key: &str, value: Json<'_>| {
        let path = entries.path(key);
        let token = key
            .parse()
            .ok()
            .filter(|&token: &TokenId| token < model.vocabulary_count());
        let token = token.ok_or_else(|| ApiError::invalid(&*path, not_a_token(&path, model)))?;
        Ok((token, number_value(&path, value, LOGIT_BIAS_VALUE)?))
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
            _ => integer_value(&format!("{path}[{index}]"), item, 0..=last)? as TokenId,
        });
    }
    Ok(tokens)
}

/// Reads the number of log-probabilities of each token of the prompt.
pub(crate) fn prompt_logprobs(
    fields: &JsonFields,
    delivery: ResponseMode,
) -> Result<Option<u32>, ApiError> {
    let count = fields.integer(&PROMPT_LOGPROBS)?;
    if count.is_some() && matches!(delivery, ResponseMode::Stream(_)) {
        let message = "`prompt_logprobs` are in whole answers only: leave out `stream`.";
        return Err(fields.invalid(&PROMPT_LOGPROBS, message));
    }
    Ok(count.map(|count| count as u32))
}

/// Reads the parameters that turn output into text; `logprobs` is read by the API.
pub(crate) fn output(fields: &JsonFields, logprobs: Option<u32>) -> Result<OutputFormat, ApiError> {
    let stop_text = match fields.flag(&INCLUDE_STOP_STR_IN_OUTPUT)? {
        Some(true) => StopText::Included,
        Some(false) | None => StopText::Cut,
    };
    let special = match fields.flag(&SKIP_SPECIAL_TOKENS)? {
        Some(false) => SpecialTokens::Kept,
        Some(true) | None => SpecialTokens::Skipped,
    };
    Ok(OutputFormat {
        stops: stop_strings(fields)?.into(),
        stop_text,
        special,
        logprobs,
        prompt_logprobs: None,
        reasoning: ReasoningShown::Shown,
        scored: ScoredTokens::All,
        call_reason: CallReason::Calls,
        custom_tools: Arc::from([]),
    })
}

fn stop_strings(fields: &JsonFields) -> Result<Vec<String>, ApiError> {
    let Some(given) = fields.any(&STOP) else {
        return Ok(Vec::new());
    };
    let path = fields.path_of(&STOP);
    let read =
        |path: String, given: Json<'_>| text_value(|| path, given, STOP_TEXT).map(Cow::into_owned);
    match given.shape() {
        JsonShape::String(_) => Ok(vec![read(path, given)?]),
        JsonShape::Array(items) => {
            limit_list(&path, items.clone().count(), STOPS_MAX)?;
            let items = items.enumerate();
            let stop = items.map(|(index, item)| read(format!("{path}[{index}]"), item));
            stop.collect()
        }
        _ => Err(wrong_type(&path, "a string or an array of strings", given)),
    }
}

/// Reads `add_special_tokens`; without it `default` counts.
pub(crate) fn special_tokens(
    fields: &JsonFields,
    default: SpecialTokens,
) -> Result<SpecialTokens, ApiError> {
    Ok(match fields.flag(&ADD_SPECIAL_TOKENS)? {
        Some(true) => SpecialTokens::Kept,
        Some(false) => SpecialTokens::Skipped,
        None => default,
    })
}

/// Reads a count of tokens such as `top_logprobs`.
pub(crate) fn logprobs_count(
    fields: &JsonFields,
    field: &RequestField<IntegerRange>,
) -> Result<Option<u32>, ApiError> {
    Ok(fields.integer(field)?.map(|count| count as u32))
}

/// Stop conditions of a sequence before its prompt is known.
pub(crate) struct StopFields {
    min_tokens: u32,
    stop_tokens: Arc<[TokenId]>,
    max_tokens: Option<(&'static str, u32)>,
}

impl StopFields {
    /// Reads the fields. Where the sampling has a constraint, the model's end tokens end the output
    /// whatever `ignore_eos` is: the constraint says where they are allowed. `limits` are the API's
    /// fields for the limit of output tokens; a later one takes precedence.
    pub(crate) fn read(
        fields: &JsonFields,
        model: &ModelText,
        sampling: &SamplingParams,
        limits: &[RequestField<IntegerRange>],
    ) -> Result<Self, ApiError> {
        let listed = fields.list(&STOP_TOKEN_IDS)?;
        let listed = listed.map(|listed| token_ids(STOP_TOKEN_IDS.name(), listed, model));
        let mut stop_tokens = listed.transpose()?.unwrap_or_default();
        let is_ignoring = fields.flag(&IGNORE_EOS)?.unwrap_or(false);
        if !is_ignoring || sampling.constraint.is_some() {
            stop_tokens.extend(model.eos().iter());
        }
        stop_tokens.sort_unstable();
        stop_tokens.dedup();
        let min_tokens = fields.integer(&MIN_TOKENS)?.unwrap_or(0) as u32;
        let mut max_tokens = None;
        for limit in limits {
            let tokens = fields.integer(limit)?;
            let named = tokens.map(|tokens| (limit.name(), tokens as u32));
            max_tokens = named.or(max_tokens);
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
                    "This model's maximum context length is {context} tokens; the prompt has {prompt_count} \
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
                    "This model's maximum context length is {context} tokens; the prompt has {prompt_count} \
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
                MIN_TOKENS.name(),
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
