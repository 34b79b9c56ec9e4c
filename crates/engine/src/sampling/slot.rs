//! A sequence's slot: what the sampler must know of it.
//!
//! Owns: the history, how often each token is in it, and whether its next token is on its way.
//! Never: draws.
//! Invariant: a slot that grew token by token equals one opened with the whole history.

use super::draw::share_of;
use super::philox::draw_bits;
use crate::ops::{Change, DrawRule, Edit};
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
    /// The last token of a step that was not collected.
    pub(crate) untold: Option<Untold>,
}

/// A token that the engine has, or will have, and its caller has not heard of.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Untold {
    /// Which step draws it, by when it was begun.
    pub(crate) begun: u64,
    /// Its row among those that the step draws on the device; `None` if it is in the history already.
    pub(crate) row: Option<u32>,
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
            untold: None,
        }
    }

    /// How many tokens the sequence has, with one that is being drawn.
    pub(crate) fn known(&self) -> usize {
        let is_coming = self.untold.is_some_and(|untold| untold.row.is_some());
        self.history.len() + usize::from(is_coming)
    }

    /// How many of them the caller has heard of.
    pub(crate) fn told(&self) -> usize {
        self.known() - usize::from(self.untold.is_some())
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
        for Edit { token, change } in self.edits(self.history.len()) {
            if let Some(logit) = logits.get_mut(token as usize) {
                undo.push((token, *logit));
                *logit = change.of(*logit);
            }
        }
    }

    /// Bias, then bans, then penalties, of a draw after so many tokens.
    fn edits(&self, known: usize) -> impl Iterator<Item = Edit> {
        let sampling = &*self.sampling;
        let biases = sampling.logit_bias.iter().map(|(token, bias)| Edit {
            token: *token,
            change: Change::Add(*bias),
        });
        let is_short = known - self.prompt_count < self.min_tokens;
        let banned = self.stop_tokens.iter().filter(move |_| is_short);
        let bans = banned.map(|token| Edit {
            token: *token,
            change: Change::Ban,
        });
        let counts = self.counts.iter().flatten();
        let penalties = counts.map(|(token, count)| Edit {
            token: *token,
            change: Change::Penalize {
                repetition: sampling.repetition_penalty,
                frequency: sampling.frequency_penalty * *count as f32,
                presence: match count {
                    0 => 0.0,
                    _ => sampling.presence_penalty,
                },
            },
        });
        biases.chain(bans).chain(penalties)
    }

    /// Whether a device can draw the next token: nobody asked what the model thinks of others.
    pub(crate) fn is_drawn_by_device(&self) -> bool {
        self.sampling.logprobs.is_none()
    }

    /// How a device draws the token after `known` ones, of which the last may be unknown still where no
    /// rule looks at it.
    pub(crate) fn rule(&self, known: usize) -> DrawRule {
        let sampling = &*self.sampling;
        let mut edits: Vec<Edit> = self.edits(known).collect();
        edits.sort_by_key(|edit| edit.token);
        DrawRule {
            bits: draw_bits(sampling.seed, known as u64),
            heat: match self.is_greedy() {
                true => 0.0,
                false => 1.0 / sampling.temperature,
            },
            top_k: sampling.top_k,
            top_p: share_of(sampling.top_p).unwrap_or(1 << 53),
            min_p: sampling.min_p,
            edits,
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
