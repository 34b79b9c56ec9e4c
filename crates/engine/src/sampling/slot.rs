//! A sequence's slot: what the sampler must know of it.
//!
//! Owns: the history, and how often each token is in it.
//! Never: draws.
//! Invariant: a slot that grew token by token equals one opened with the whole history.

use cleave_domain::{OpenSlot, Sampling, TokenId};
use std::collections::BTreeMap;
use std::sync::Arc;

/// A temperature below this is greedy: dividing by it would leave the range of f32.
const TEMPERATURE_MIN: f32 = 1e-5;

/// One sequence's sampling state.
#[derive(Clone, Debug)]
pub(crate) struct Slot {
    pub(crate) sampling: Arc<Sampling>,
    /// Prompt and output.
    pub(crate) history: Vec<TokenId>,
    prompt_count: usize,
    stop_tokens: Arc<[TokenId]>,
    min_tokens: usize,
    /// How often each token of the history is in the output; kept only where a penalty needs it.
    counts: Option<BTreeMap<TokenId, u32>>,
}

impl Slot {
    pub(crate) fn open(open: &OpenSlot) -> Self {
        let sampling = Arc::clone(&open.sampling);
        let has_penalty = sampling.repetition_penalty != 1.0
            || sampling.presence_penalty != 0.0
            || sampling.frequency_penalty != 0.0;
        let counts = has_penalty.then(|| {
            let mut counts: BTreeMap<_, _> = open.prompt.iter().map(|t| (*t, 0)).collect();
            for token in &open.output {
                *counts.entry(*token).or_insert(0) += 1;
            }
            counts
        });
        Self {
            sampling,
            history: [&open.prompt, open.output.as_slice()].concat(),
            prompt_count: open.prompt.len(),
            stop_tokens: Arc::clone(&open.stop_tokens),
            min_tokens: open.min_tokens as usize,
            counts,
        }
    }

    /// A token was drawn.
    pub(crate) fn push(&mut self, token: TokenId) {
        self.history.push(token);
        if let Some(counts) = &mut self.counts {
            *counts.entry(token).or_insert(0) += 1;
        }
    }

    pub(super) fn is_greedy(&self) -> bool {
        self.sampling.temperature < TEMPERATURE_MIN
    }

    /// Applies bias, ban and penalties to the logits; `undo` gets `(token, logit before)` for each
    /// change, first change first.
    pub(super) fn adjust(&self, logits: &mut [f32], undo: &mut Vec<(TokenId, f32)>) {
        undo.clear();
        let mut change = |token: TokenId, to: &dyn Fn(f32) -> f32| {
            if let Some(logit) = logits.get_mut(token as usize) {
                undo.push((token, *logit));
                *logit = to(*logit);
            }
        };
        for (token, bias) in &self.sampling.logit_bias {
            change(*token, &|logit| logit + bias);
        }
        if self.history.len() - self.prompt_count < self.min_tokens {
            for token in self.stop_tokens.iter() {
                change(*token, &|_| f32::NEG_INFINITY);
            }
        }
        let repetition = self.sampling.repetition_penalty;
        for (token, count) in self.counts.iter().flatten() {
            let presence = match count {
                0 => 0.0,
                _ => self.sampling.presence_penalty,
            };
            let frequency = self.sampling.frequency_penalty * *count as f32;
            change(*token, &|logit| {
                let logit = match logit > 0.0 {
                    true => logit / repetition,
                    false => logit * repetition,
                };
                logit - frequency - presence
            });
        }
    }
}

/// Whether a slot can be opened: numbers in range, tokens in the vocabulary.
pub(crate) fn check(open: &OpenSlot, vocab_size: usize) -> Result<(), String> {
    let is_token = |token: &TokenId| (*token as usize) < vocab_size;
    let mut history = open.prompt.iter().chain(&open.output);
    if let Some(token) = history.find(|token| !is_token(token)) {
        return Err(format!("token {token} in a vocabulary of {vocab_size}"));
    }
    let vocab_size = u32::try_from(vocab_size).unwrap_or(u32::MAX);
    let checked = open.sampling.check(vocab_size);
    checked.map_err(|error| error.to_string())
}
