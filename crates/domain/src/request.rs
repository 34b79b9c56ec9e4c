//! A validated request of a client: tokens and numbers, no text.

use crate::{
    AdapterId, CacheScope, Constraint, FinishReason, GRAMMAR_BYTES_MAX, POOLED_LOGITS_MAX, Pooling,
    RequestSlo, TokenId,
};
use serde::{Deserialize, Serialize};
use std::error::Error;
use std::fmt;
use std::ops::RangeInclusive;
use std::sync::Arc;

/// One sequence to generate. `n` choices of one HTTP request are `n` of these.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Request {
    /// The prompt; never empty, and shorter than the model's context.
    pub prompt: Arc<[TokenId]>,
    /// Tokens that this request has already generated, on another worker or before a preemption.
    /// They are part of the sequence but not of the prompt: penalties count them as output.
    pub generated: Arc<[TokenId]>,
    /// The sampling parameters of the sequence.
    pub sampling: SamplingParams,
    /// The conditions for the end of the sequence.
    pub stop: StopRules,
    /// Smaller is more urgent, as in vLLM; 0 is the default. (SGLang's sign is the opposite.)
    pub priority: i32,
    /// Sequences share prefix blocks only with others of the same salt; 0 is the public salt.
    pub cache_salt: u64,
    /// The LoRA adapter whose deltas are added to the model's weights; `None` for the model alone.
    #[serde(default)]
    pub adapter: Option<AdapterId>,
    /// The targets that apply to it.
    pub slo: RequestSlo,
    /// The vector that it asks for instead of tokens: one worker runs the prompt, and nothing is
    /// decoded. Its limit is then one token, which stands for the vector.
    #[serde(default)]
    pub pooling: Option<Pooling>,
}

impl Request {
    /// The sequences with which it may share KV blocks.
    pub fn cache_scope(&self) -> CacheScope {
        CacheScope {
            salt: self.cache_salt,
            adapter: self.adapter,
        }
    }

    /// The reason for the end of the request, if it ends with this `output` and a context of
    /// `context_tokens_max` tokens. A request without output never ends. Schedulers and routers
    /// both call this, so that a stream that is resumed after its last token ends the same way.
    pub fn finish_reason(
        &self,
        output: &[TokenId],
        context_tokens_max: u32,
    ) -> Option<FinishReason> {
        let last = output.last()?;
        let StopRules {
            max_tokens: _,
            min_tokens,
            stop_tokens,
        } = &self.stop;
        // Under a constraint a stop token is drawn early only if nothing else is allowed.
        let may_stop = output.len() >= *min_tokens as usize || self.sampling.constraint.is_some();
        if may_stop && stop_tokens.contains(last) {
            return Some(FinishReason::Stop);
        }
        let full = self.is_at_limit(output.len(), context_tokens_max);
        full.then_some(FinishReason::Length)
    }

    /// Whether an engine with a vocabulary of `vocab_size` can run it: every token is in the
    /// vocabulary, the sampling is in range, and a pooled request asks for its vector alone.
    pub fn is_runnable(&self, vocab_size: u32) -> bool {
        let in_vocabulary = |tokens: &[TokenId]| tokens.iter().all(|token| *token < vocab_size);
        let pools = match &self.pooling {
            None => true,
            Some(pooling) => {
                let named = match pooling {
                    Pooling::Logits(tokens) => {
                        (1..=POOLED_LOGITS_MAX).contains(&tokens.len()) && in_vocabulary(tokens)
                    }
                    Pooling::LastToken | Pooling::Mean | Pooling::FirstToken => true,
                };
                let scores = self.sampling.prompt_logprobs.is_some();
                named && self.stop.max_tokens == 1 && !scores && self.generated.is_empty()
            }
        };
        let known = in_vocabulary(&self.prompt) && in_vocabulary(&self.generated);
        known && pools && self.sampling.check(vocab_size).is_ok()
    }

    /// Whether this many output tokens reach the limit of the request or the context, whatever the
    /// tokens are.
    pub fn is_at_limit(&self, output_count: usize, context_tokens_max: u32) -> bool {
        let tokens = self.prompt.len() + output_count;
        output_count >= self.stop.max_tokens as usize || tokens >= context_tokens_max as usize
    }
}

/// The sampling parameters, applied to the logits in this order: constraint, bias, penalties,
/// top-n-sigma, temperature, top-k, top-p, min-p, then one draw keyed by (`seed`, position).
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct SamplingParams {
    /// 0 means greedy; otherwise the logits are divided by it.
    pub temperature: f32,
    /// Keep the `top_k` most likely tokens; 0 keeps all.
    pub top_k: u32,
    /// Keep the smallest set of tokens whose probability reaches this. In (0, 1]; 1 keeps all.
    pub top_p: f32,
    /// Drop tokens less likely than this share of the most likely one. In [0, 1]; 0 keeps all.
    pub min_p: f32,
    /// Drop tokens whose logits are more than this many standard deviations below the largest
    /// (Top-nσ, arXiv:2411.07641); 0 keeps all. As in llama.cpp, the deviation is that of all
    /// logits after bias and penalties, whatever top-k leaves, and logits of −∞ do not count.
    #[serde(default)]
    pub top_n_sigma: f32,
    /// Divides positive and multiplies negative logits of tokens seen in prompt or output
    /// (CTRL, arXiv:1909.05858). 1 does nothing.
    pub repetition_penalty: f32,
    /// Subtracted once from the logit of each token in the output.
    pub presence_penalty: f32,
    /// Subtracted from a token's logit for each time it is in the output.
    pub frequency_penalty: f32,
    /// Added to the logits of these tokens.
    pub logit_bias: Vec<(TokenId, f32)>,
    /// Keys the draw together with the token's position: same seed and position, same token.
    pub seed: u64,
    /// Report log-probabilities: of the drawn token, and of this many most likely ones.
    pub logprobs: Option<u32>,
    /// As `logprobs`, for each prompt position (the first has none).
    pub prompt_logprobs: Option<u32>,
    /// The texts that the output may be: tokens that lead out of them are not drawn, whatever the
    /// other parameters are.
    pub constraint: Option<Arc<Constraint>>,
}

impl SamplingParams {
    /// Temperatures that engines compute with.
    pub const TEMPERATURE: RangeInclusive<f64> = 0.0..=1e4;
    /// Shares of `top_p`; 0 would keep no token.
    pub const TOP_P: RangeInclusive<f64> = f32::MIN_POSITIVE as f64..=1.0;
    /// Shares of `min_p`; above 1 no token is that likely.
    pub const MIN_P: RangeInclusive<f64> = 0.0..=1.0;
    /// Standard deviations of `top_n_sigma`.
    pub const TOP_N_SIGMA: RangeInclusive<f64> = 0.0..=1e4;
    /// Repetition penalties; nearer to 0 a division by the penalty overflows.
    pub const REPETITION_PENALTY: RangeInclusive<f64> = 1e-4..=1e4;
    /// Presence and frequency penalties, in logits.
    pub const OUTPUT_PENALTY: RangeInclusive<f64> = -1e4..=1e4;
    /// Biases of single tokens, in logits.
    pub const LOGIT_BIAS: RangeInclusive<f64> = -1e6..=1e6;

    /// Greedy sampling without log-probabilities.
    pub fn greedy() -> Self {
        Self {
            temperature: 0.0,
            top_k: 0,
            top_p: 1.0,
            min_p: 0.0,
            top_n_sigma: 0.0,
            repetition_penalty: 1.0,
            presence_penalty: 0.0,
            frequency_penalty: 0.0,
            logit_bias: Vec::new(),
            seed: 0,
            logprobs: None,
            prompt_logprobs: None,
            constraint: None,
        }
    }

    /// Whether a token can be drawn before the host knows the tokens before it: no penalty and no
    /// constraint reads them, and no log-probabilities are requested.
    pub fn can_draw_ahead(&self) -> bool {
        let penalties = [self.presence_penalty, self.frequency_penalty];
        let reads_tokens = self.repetition_penalty != 1.0 || penalties != [0.0; 2];
        self.logprobs.is_none() && self.constraint.is_none() && !reads_tokens
    }

    /// Checks that every parameter is in its range and every biased token is in a vocabulary of
    /// `vocab_size`. Engines and schedulers both call this: a request that a scheduler accepts, its
    /// engine can run.
    ///
    /// # Errors
    /// The parameter that is out of its range.
    pub fn check(&self, vocab_size: u32) -> Result<(), SamplingError> {
        let Self {
            temperature,
            top_k: _,
            top_p,
            min_p,
            top_n_sigma,
            repetition_penalty,
            presence_penalty,
            frequency_penalty,
            logit_bias,
            seed: _,
            logprobs: _,
            prompt_logprobs: _,
            constraint,
        } = self;
        in_range("temperature", *temperature, &Self::TEMPERATURE)?;
        in_range("top_p", *top_p, &Self::TOP_P)?;
        in_range("min_p", *min_p, &Self::MIN_P)?;
        in_range("top_n_sigma", *top_n_sigma, &Self::TOP_N_SIGMA)?;
        let (repeated, output) = (&Self::REPETITION_PENALTY, &Self::OUTPUT_PENALTY);
        in_range("repetition_penalty", *repetition_penalty, repeated)?;
        in_range("presence_penalty", *presence_penalty, output)?;
        in_range("frequency_penalty", *frequency_penalty, output)?;
        for (token, bias) in logit_bias {
            if *token >= vocab_size {
                let token = *token;
                return Err(SamplingError::UnknownToken { token, vocab_size });
            }
            in_range("logit_bias", *bias, &Self::LOGIT_BIAS)?;
        }
        match constraint
            .as_ref()
            .map(|constraint| constraint.grammar.bytes())
        {
            Some(bytes) if bytes > GRAMMAR_BYTES_MAX => Err(SamplingError::LongGrammar { bytes }),
            Some(_) | None => Ok(()),
        }
    }
}

/// A sampling parameter is invalid.
#[derive(Clone, Debug, PartialEq)]
pub enum SamplingError {
    /// A number is out of its range; NaN is out of every range.
    OutOfRange {
        /// The name of its field.
        name: &'static str,
        /// The value that the request gave.
        value: f32,
        /// The range of allowed values.
        range: RangeInclusive<f32>,
    },
    /// A bias for a token outside the vocabulary.
    UnknownToken {
        /// The token that has the bias.
        token: TokenId,
        /// The size of the vocabulary.
        vocab_size: u32,
    },
    /// A constraint whose grammar is longer than [`GRAMMAR_BYTES_MAX`].
    LongGrammar {
        /// Length of the description.
        bytes: usize,
    },
}

/// Compares in the parameter's own 32 bits: rounded to them, an end of the range is in it.
fn in_range(
    name: &'static str,
    value: f32,
    range: &RangeInclusive<f64>,
) -> Result<(), SamplingError> {
    let range = *range.start() as f32..=*range.end() as f32;
    if range.contains(&value) {
        Ok(())
    } else {
        Err(SamplingError::OutOfRange { name, value, range })
    }
}

impl fmt::Display for SamplingError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::OutOfRange { name, value, range } => {
                write!(f, "{name} {value} is not in {range:?}")
            }
            Self::UnknownToken { token, vocab_size } => {
                write!(f, "logit_bias of token {token} in {vocab_size}")
            }
            Self::LongGrammar { bytes } => {
                write!(f, "a grammar of {bytes} bytes, at most {GRAMMAR_BYTES_MAX}")
            }
        }
    }
}

impl Error for SamplingError {}

/// The conditions for the end of a sequence. The API checks stop strings, and cancels a request
/// that matched one.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct StopRules {
    /// Limit of output tokens ([`Request::generated`] included); at least 1.
    pub max_tokens: u32,
    /// None of [`Self::stop_tokens`] may be drawn before this many output tokens, unless a
    /// constraint allows nothing else.
    pub min_tokens: u32,
    /// Drawing one of these ends the sequence; the token itself is reported.
    /// Empty when the client asked to ignore the end token.
    pub stop_tokens: Arc<[TokenId]>,
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::{ConstraintEnd, Grammar};

    fn request(stop: StopRules) -> Request {
        Request {
            prompt: Arc::new([1, 2, 3]),
            generated: Arc::new([]),
            sampling: SamplingParams::greedy(),
            stop,
            priority: 0,
            cache_salt: 0,
            adapter: None,
            slo: RequestSlo::default(),
            pooling: None,
        }
    }

    #[test]
    fn a_request_ends_at_stop_token_limit_or_context_end() {
        let request = request(StopRules {
            max_tokens: 4,
            min_tokens: 2,
            stop_tokens: Arc::new([9]),
        });
        let over = |output: &[TokenId], context| request.finish_reason(output, context);
        assert_eq!(over(&[], 3), None, "nothing was produced");
        assert_eq!(over(&[9], 100), None, "too early to stop");
        assert_eq!(over(&[5, 9], 100), Some(FinishReason::Stop));
        assert_eq!(over(&[5, 9], 5), Some(FinishReason::Stop));
        assert_eq!(over(&[5, 6], 6), None);
        assert_eq!(over(&[5, 6], 5), Some(FinishReason::Length));
        assert_eq!(over(&[5, 6, 7, 8], 100), Some(FinishReason::Length));
    }

    #[test]
    fn a_constrained_request_ends_at_an_early_stop_token() {
        let mut request = request(StopRules {
            max_tokens: 4,
            min_tokens: 2,
            stop_tokens: Arc::new([9]),
        });
        request.sampling.constraint = Some(Arc::new(constraint("[0-9]+")));
        assert_eq!(request.finish_reason(&[9], 100), Some(FinishReason::Stop));
        assert_eq!(request.finish_reason(&[5], 100), None);
    }

    #[test]
    fn a_constrained_draw_waits_for_the_token_before_it() {
        let mut sampling = SamplingParams::greedy();
        assert!(sampling.can_draw_ahead());
        sampling.constraint = Some(Arc::new(constraint("[0-9]+")));
        assert!(!sampling.can_draw_ahead());
    }

    fn constraint(regex: &str) -> Constraint {
        Constraint {
            grammar: Grammar::Regex(regex.into()),
            end: ConstraintEnd::Allowed,
        }
    }

    #[test]
    fn sampling_values_out_of_range_are_refused() {
        type InvalidateSampling = fn(&mut SamplingParams);
        let spoils: [(&str, InvalidateSampling); 10] = [
            ("temperature -1 is not in 0.0..=10000.0", |s| {
                s.temperature = -1.0;
            }),
            ("temperature NaN", |s| s.temperature = f32::NAN),
            ("top_p 0 ", |s| s.top_p = 0.0),
            ("min_p 2 ", |s| s.min_p = 2.0),
            ("top_n_sigma -1 ", |s| s.top_n_sigma = -1.0),
            ("repetition_penalty 0 ", |s| s.repetition_penalty = 0.0),
            ("presence_penalty inf", |s| {
                s.presence_penalty = f32::INFINITY
            }),
            ("frequency_penalty 20000 ", |s| s.frequency_penalty = 2e4),
            ("logit_bias of token 10 in 10", |s| {
                s.logit_bias.push((10, 0.0));
            }),
            ("a grammar of 131073 bytes", |s| {
                let long = "a".repeat(GRAMMAR_BYTES_MAX + 1);
                s.constraint = Some(Arc::new(constraint(&long)));
            }),
        ];
        assert_eq!(SamplingParams::greedy().check(10), Ok(()));
        for (message, spoil) in spoils {
            let mut sampling = SamplingParams::greedy();
            spoil(&mut sampling);
            let error = sampling.check(10).unwrap_err().to_string();
            assert!(error.starts_with(message), "{error}");
        }
    }
}
