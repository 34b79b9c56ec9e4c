//! Sampling state of a sequence's slot.
//!
//! Owns: the history, the count of each token in it, and the pending token.
//! Never: draws.
//! Invariant: a slot that grew token by token equals one opened with the whole history.

use super::draw::top_p_threshold;
use super::philox::draw_bits;
use crate::constraint::{ConstraintError, SlotConstraint, TokenMask};
use crate::ops::{DrawRule, LogitChange, LogitEdit};
use cleave_domain::{AdapterId, OpenSlot, SamplingParams, TokenId};
use std::collections::BTreeMap;
use std::sync::Arc;

/// A temperature below this is greedy: dividing by it would overflow f32.
const TEMPERATURE_MIN: f32 = 1e-5;

/// One sequence's sampling state.
#[derive(Debug)]
pub(crate) struct SamplingSlot {
    pub(crate) sampling: Arc<SamplingParams>,
    /// Tokens of prompt and output, in order.
    pub(crate) history: Vec<TokenId>,
    prompt_count: usize,
    stop_tokens: Arc<[TokenId]>,
    min_tokens: usize,
    /// Count in the output of each token of the history; only if a penalty needs it.
    counts: Option<BTreeMap<TokenId, u32>>,
    /// State of the output in its constraint, if the sampling has one.
    pub(crate) constraint: Option<SlotConstraint>,
    /// Adapter of the sequence, if it has one.
    pub(crate) adapter: Option<AdapterId>,
    /// Last token of a step that the caller has not collected.
    pub(crate) pending_token: Option<PendingToken>,
}

/// A token that the engine has drawn or is drawing, and has not reported to its caller.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct PendingToken {
    /// Serial number of the step that draws it.
    pub(crate) begin_serial: u64,
    /// Row of the step's draw on the device; `None` if the token is already in the history.
    pub(crate) row: Option<u32>,
}

/// Whether stop tokens are banned before `min_tokens`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum StopBan {
    InForce,
    /// A constraint allows stop tokens alone.
    Lifted,
}

impl SamplingSlot {
    /// A slot with the matcher of its sampling's constraint, which has the output so far.
    pub(crate) fn open(open: &OpenSlot, constraint: Option<SlotConstraint>) -> Self {
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
            constraint,
            adapter: open.adapter,
            pending_token: None,
        }
    }

    /// Number of the sequence's tokens, including one that is being drawn.
    pub(crate) fn tokens_count(&self) -> usize {
        let is_being_drawn = self
            .pending_token
            .is_some_and(|pending| pending.row.is_some());
        self.history.len() + usize::from(is_being_drawn)
    }

    /// Number of tokens that were reported to the caller.
    pub(crate) fn reported_count(&self) -> usize {
        self.tokens_count() - usize::from(self.pending_token.is_some())
    }

    /// Appends a drawn token.
    pub(crate) fn push(&mut self, token: TokenId) {
        self.history.push(token);
        if let Some(counts) = &mut self.counts {
            *counts.entry(token).or_insert(0) += 1;
        }
        if let Some(constraint) = &mut self.constraint {
            constraint.push(token);
        }
    }

    pub(super) fn is_greedy(&self) -> bool {
        self.sampling.temperature < TEMPERATURE_MIN
    }

    /// Applies bias, ban and penalties to the logits; `undo` gets `(token, logit before)` for each
    /// change, first change first.
    pub(super) fn apply_edits(
        &self,
        logits: &mut [f32],
        undo: &mut Vec<(TokenId, f32)>,
        stop_ban: StopBan,
    ) {
        undo.clear();
        for LogitEdit { token, change } in self.edits(self.history.len(), stop_ban) {
            if let Some(logit) = logits.get_mut(token as usize) {
                undo.push((token, *logit));
                *logit = change.apply(*logit);
            }
        }
    }

    /// Changes of logits for a draw after `tokens_count` tokens: biases, then bans, then penalties.
    fn edits(&self, tokens_count: usize, stop_ban: StopBan) -> impl Iterator<Item = LogitEdit> {
        let sampling = &*self.sampling;
        let biases = sampling.logit_bias.iter().map(|(token, bias)| LogitEdit {
            token: *token,
            change: LogitChange::Add(*bias),
        });
        let is_short = tokens_count - self.prompt_count < self.min_tokens;
        let is_banned = is_short && stop_ban == StopBan::InForce;
        let banned = self.stop_tokens.iter().filter(move |_| is_banned);
        let bans = banned.map(|token| LogitEdit {
            token: *token,
            change: LogitChange::Ban,
        });
        let counts = self.counts.iter().flatten();
        let penalties = counts.map(|(token, count)| LogitEdit {
            token: *token,
            change: LogitChange::Penalize {
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

    /// Whether a device can draw the next token: only the host can report scores.
    pub(crate) fn device_can_draw(&self) -> bool {
        self.sampling.logprobs.is_none()
    }

    /// Finds the tokens that the constraint allows next. Errors are those of the draw, later.
    pub(crate) fn prepare_mask(&mut self, vocab_size: usize) {
        if let Some(constraint) = &mut self.constraint {
            let _ = constraint.mask(vocab_size);
        }
    }

    /// Sets the logits of the tokens that the constraint does not allow to −∞.
    pub(super) fn apply_constraint(
        &mut self,
        logits: &mut [f32],
    ) -> Result<StopBan, ConstraintError> {
        let stop_ban = self.find_mask(logits.len())?;
        if let Some(mask) = self.known_mask() {
            mask.apply(logits);
        }
        Ok(stop_ban)
    }

    /// Finds the tokens that the constraint allows next, if there is one, and whether stop tokens
    /// are banned under it.
    fn find_mask(&mut self, vocab_size: usize) -> Result<StopBan, ConstraintError> {
        let Some(constraint) = &mut self.constraint else {
            return Ok(StopBan::InForce);
        };
        let mask = constraint.mask(vocab_size)?;
        let vocab_size = u32::try_from(vocab_size).unwrap_or(u32::MAX);
        if mask.is_empty(vocab_size) {
            let reason = "it allows no token of the model here";
            return Err(ConstraintError::Unenforceable(reason.to_owned()));
        }
        Ok(if mask.is_within(&self.stop_tokens, vocab_size) {
            StopBan::Lifted
        } else {
            StopBan::InForce
        })
    }

    /// The tokens that the constraint allows next, if they were found.
    pub(crate) fn known_mask(&self) -> Option<&TokenMask> {
        self.constraint.as_ref()?.known_mask()
    }

    /// Rule by which a device draws the token after `tokens_count` ones, of a slot without a
    /// constraint. The last of them may still be pending if no rule depends on it.
    pub(crate) fn draw_rule(&self, tokens_count: usize) -> DrawRule {
        self.rule(tokens_count, StopBan::InForce)
    }

    /// Rule by which a device draws the next token under the mask of the constraint, which
    /// [`SamplingSlot::known_mask`] has afterwards.
    pub(crate) fn masked_rule(&mut self, vocab_size: usize) -> Result<DrawRule, ConstraintError> {
        let stop_ban = self.find_mask(vocab_size)?;
        Ok(self.rule(self.history.len(), stop_ban))
    }

    fn rule(&self, tokens_count: usize, stop_ban: StopBan) -> DrawRule {
        let sampling = &*self.sampling;
        let mut edits: Vec<LogitEdit> = self.edits(tokens_count, stop_ban).collect();
        edits.sort_by_key(|edit| edit.token);
        DrawRule {
            random_bits: draw_bits(sampling.seed, tokens_count as u64),
            inverse_temperature: if self.is_greedy() {
                0.0
            } else {
                1.0 / sampling.temperature
            },
            top_k: sampling.top_k,
            top_p: top_p_threshold(sampling.top_p).unwrap_or(1 << 53),
            min_p: sampling.min_p,
            top_n_sigma: sampling.top_n_sigma,
            edits,
        }
    }
}

/// Checks that a slot can be opened: numbers in range, tokens in the vocabulary.
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
