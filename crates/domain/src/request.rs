//! What a client asked for, after validation: tokens and numbers, no text.

use crate::{FinishReason, TokenId};
use serde::{Deserialize, Serialize};
use std::sync::Arc;
use std::time::Duration;

/// One sequence to generate. `n` choices of one HTTP request are `n` of these.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Request {
    /// The prompt; never empty, and shorter than the model's context.
    pub prompt: Arc<[TokenId]>,
    /// Tokens that this request has already produced, on another worker or before a preemption.
    /// They are part of the sequence but not of the prompt: penalties count them as output.
    pub generated: Arc<[TokenId]>,
    /// How the next token is drawn.
    pub sampling: Sampling,
    /// When the sequence ends.
    pub stop: StopRules,
    /// Smaller is more urgent, as in vLLM; 0 is the default. (SGLang's sign is the opposite.)
    pub priority: i32,
    /// Sequences share prefix blocks only with others of the same salt; 0 is the public salt.
    pub cache_salt: u64,
    /// What the client was promised.
    pub slo: Slo,
}

/// How the next token is drawn from the logits. Applied in this order: bias, penalties,
/// temperature, top-k, top-p, min-p, then one draw keyed by (`seed`, position).
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Sampling {
    /// 0 means greedy; otherwise the logits are divided by it. Limit: 0..=2 at the API.
    pub temperature: f32,
    /// Keep the `top_k` most likely tokens; 0 keeps all.
    pub top_k: u32,
    /// Keep the smallest set of tokens whose probability reaches this. In (0, 1]; 1 keeps all.
    pub top_p: f32,
    /// Drop tokens less likely than this share of the most likely one. In [0, 1]; 0 keeps all.
    pub min_p: f32,
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
    /// Report log-probabilities: of the token drawn, and of this many most likely ones.
    pub logprobs: Option<u32>,
    /// The same for each prompt position (the first has none).
    pub prompt_logprobs: Option<u32>,
}

impl Sampling {
    /// Greedy, nothing reported.
    pub fn greedy() -> Self {
        Self {
            temperature: 0.0,
            top_k: 0,
            top_p: 1.0,
            min_p: 0.0,
            repetition_penalty: 1.0,
            presence_penalty: 0.0,
            frequency_penalty: 0.0,
            logit_bias: Vec::new(),
            seed: 0,
            logprobs: None,
            prompt_logprobs: None,
        }
    }
}

/// When a sequence ends. Stop strings are the API's: it cancels what it has heard enough of.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct StopRules {
    /// At most this many output tokens ([`Request::generated`] included); at least 1.
    pub max_tokens: u32,
    /// None of [`Self::stop_tokens`] may be drawn before this many output tokens.
    pub min_tokens: u32,
    /// Drawing one of these ends the sequence; the token itself is reported.
    /// Empty when the client asked to ignore the end token.
    pub stop_tokens: Arc<[TokenId]>,
}

impl StopRules {
    /// Why a request that has produced `output` so far is over, if it is. Schedulers and routers ask
    /// here, so that a stream that is resumed after its last token ends as it would have.
    pub fn reached(&self, output: &[TokenId]) -> Option<FinishReason> {
        let last = output.last()?;
        if output.len() >= self.min_tokens as usize && self.stop_tokens.contains(last) {
            return Some(FinishReason::Stop);
        }
        let full = output.len() >= self.max_tokens as usize;
        full.then_some(FinishReason::Length)
    }
}

/// What the client was promised. `None` is no promise.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct Slo {
    /// The class the request belongs to; empty is the default class.
    pub class: String,
    /// From arrival to the first token.
    pub ttft: Option<Duration>,
    /// Mean gap between output tokens after the first.
    pub tpot: Option<Duration>,
}
