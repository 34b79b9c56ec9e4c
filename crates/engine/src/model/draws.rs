//! The rows of a step whose logits are needed, and what the host does with them.
//!
//! Owns: the purpose of each row, draws and scores on the host, and the masks of constraints for
//! draws on either side.
//! Never: runs a pass.
//! Invariant: a row that ran a draft draws only if the token before it equals the draft.

use super::ModelEngine;
use crate::forward::ForwardPass;
use crate::ops::{MaskedDraw, Ops};
use crate::sampling::{self, DrawError, SamplingSlot};
use crate::{Engine, EngineError};
use cleave_domain::{LogitsWanted, SampledToken, Segment, SlotIndex, StepResult, TokenId};

/// Rows of the batch whose logits are needed, and the purpose of each.
#[derive(Debug, Default)]
pub(super) struct LogitRows {
    /// Rows of pooled sequences follow those that have a purpose.
    pub(super) rows: Vec<u32>,
    pub(super) purposes: Vec<LogitPurpose>,
}

impl LogitRows {
    pub(super) fn push(&mut self, row: usize, purpose: LogitPurpose) {
        self.rows.push(row as u32);
        self.purposes.push(purpose);
    }

    pub(super) fn clear(&mut self) {
        self.rows.clear();
        self.purposes.clear();
    }

    /// Moves the other's rows behind these.
    pub(super) fn append(&mut self, other: &mut Self) {
        self.rows.append(&mut other.rows);
        self.purposes.append(&mut other.purposes);
    }
}

/// Purpose of a row's logits.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum LogitPurpose {
    /// Score the token at this index of the slot's history.
    Score(SlotIndex, usize),
    /// Draw the slot's token after its first so many tokens.
    Sample(SlotIndex, usize),
    /// The same for a row that ran a draft: draw only if the last of those tokens equals the draft.
    Verify(SlotIndex, usize, TokenId),
}

impl LogitPurpose {
    pub(super) fn slot(self) -> SlotIndex {
        let (Self::Score(slot, _) | Self::Sample(slot, _) | Self::Verify(slot, ..)) = self;
        slot
    }
}

impl<O: Ops> ModelEngine<O> {
    /// Finds the tokens that constraints allow: while a device runs the pass, or on cores that are
    /// idle after it.
    pub(super) fn prepare_masks(&mut self) {
        let vocab_size = self.weights.spec().vocab_size;
        let drawn = &self.logit_rows.purposes;
        let is_drawn = |slot: usize| {
            let is_sample = |purpose: &LogitPurpose| matches!(purpose, LogitPurpose::Sample(..));
            drawn
                .iter()
                .any(|purpose| is_sample(purpose) && purpose.slot().0 as usize == slot)
        };
        let slots = self.slots.iter_mut().enumerate();
        let constrained = slots.filter_map(|(index, slot)| {
            slot.as_mut()
                .filter(|slot| slot.constraint.is_some() && is_drawn(index))
        });
        sampling::prepare_masks(constrained, vocab_size);
    }

    /// Queues the draws that the device makes under masks.
    ///
    /// # Errors
    /// `Constraint` if a constraint fails, with all slots for which one did.
    pub(super) fn queue_masked_draws(&mut self) -> Result<(), EngineError> {
        let vocab_size = self.weights.spec().vocab_size;
        let device_rows = &self.logit_rows.purposes[..self.device_rows_count];
        let (mut rules, mut failed) = (Vec::new(), Vec::new());
        for (row, purpose) in (0..).zip(device_rows) {
            let slot = purpose.slot();
            let state = slot_of(&mut self.slots, slot);
            if state.constraint.is_none() {
                continue;
            }
            match state.masked_rule(vocab_size) {
                Ok(rule) => rules.push((row, slot, rule)),
                Err(_) => failed.push(slot),
            }
        }
        if !failed.is_empty() {
            return Err(EngineError::Constraint(failed));
        }
        if rules.is_empty() {
            return Ok(());
        }
        let slots = &self.slots;
        let draws: Vec<MaskedDraw<'_>> = rules
            .into_iter()
            .map(|(row, slot, rule)| {
                let state = slots[slot.0 as usize].as_ref();
                let mask = state.and_then(|state| state.known_mask());
                let mask = mask.expect("its rule was made with it");
                MaskedDraw { row, rule, mask }
            })
            .collect();
        self.ops.queue_masked_draw(&draws)
    }

    pub(super) fn draw_on_host(&mut self, result: &mut StepResult) -> Result<(), EngineError> {
        let vocab = self.weights.spec().vocab_size;
        // All slots at once, each listed once: if only the first were reported, the step would fail
        // again for the next.
        let (mut not_finite, mut unconstrained) = (Vec::new(), Vec::new());
        let mut first = self.device_rows_count;
        let end = self.logit_rows.purposes.len();
        while first < end {
            let rows = end - first;
            let rows = rows.min(self.logits.len() / vocab);
            let mut pass = ForwardPass {
                ops: &mut self.ops,
                weights: &self.weights,
                pool: &mut self.pool,
                buffers: &mut self.buffers,
            };
            pass.logits(first, &mut self.logits[..rows * vocab])?;
            for row in 0..rows {
                let purpose = self.logit_rows.purposes[first + row];
                let slot = purpose.slot();
                if [&not_finite, &unconstrained]
                    .map(|failed| failed.last())
                    .contains(&Some(&slot))
                {
                    continue;
                }
                match self.draw_or_score_row(purpose, row, result) {
                    Ok(()) => {}
                    Err(DrawError::NotFinite) => not_finite.push(slot),
                    Err(DrawError::Constraint) => unconstrained.push(slot),
                }
            }
            first += rows;
        }
        match (not_finite.is_empty(), unconstrained.is_empty()) {
            (true, true) => Ok(()),
            (true, false) => Err(EngineError::Constraint(unconstrained)),
            // The others fail when the step runs again.
            (false, _) => Err(EngineError::NotFinite(not_finite)),
        }
    }

    /// Adds the tokens that constraints force after the tokens that a step drew, for an engine that
    /// can verify them as drafts.
    pub(super) fn propose_forced(&mut self, result: &mut StepResult) {
        if self.drafts_max() == 0 {
            return;
        }
        let StepResult {
            sampled, forced, ..
        } = result;
        for (index, (slot, _)) in sampled.iter().enumerate() {
            let is_last = sampled.get(index + 1).is_none_or(|(next, _)| next != slot);
            let state = slot_of(&mut self.slots, *slot);
            let Some(constraint) = state.constraint.as_mut().filter(|_| is_last) else {
                continue;
            };
            let tokens = constraint.forced();
            if !tokens.is_empty() {
                forced.push((*slot, tokens));
            }
        }
    }

    fn draw_or_score_row(
        &mut self,
        purpose: LogitPurpose,
        row: usize,
        result: &mut StepResult,
    ) -> Result<(), DrawError> {
        let vocab = self.weights.spec().vocab_size;
        let logits = &mut self.logits[row * vocab..(row + 1) * vocab];
        let slot = purpose.slot();
        let state = slot_of(&mut self.slots, slot);
        match purpose {
            // The row ran a draft that was not drawn: its logits follow from a wrong token, so it
            // is skipped.
            LogitPurpose::Verify(_, tokens_count, draft)
                if state.history.len() != tokens_count || state.history.last() != Some(&draft) => {}
            LogitPurpose::Sample(..) | LogitPurpose::Verify(..) => {
                let (token, scores) = self.sampler.draw(state, logits)?;
                result.sampled.push((slot, SampledToken { token, scores }));
            }
            LogitPurpose::Score(_, at) => {
                let token = state.history[at];
                let count = state.sampling.prompt_logprobs.unwrap_or(0);
                let scores = self.sampler.score(logits, token, count);
                let scored = SampledToken {
                    token,
                    scores: Some(scores?),
                };
                match result.prompt_scores.last_mut() {
                    Some((last, list)) if *last == slot => list.push(scored),
                    _ => result.prompt_scores.push((slot, vec![scored])),
                }
            }
        }
        Ok(())
    }
}

/// Slot of a plan that was checked.
pub(super) fn slot_of(slots: &mut [Option<SamplingSlot>], slot: SlotIndex) -> &mut SamplingSlot {
    let state = slots[slot.0 as usize].as_mut();
    state.expect("the plan was checked: every slot is open")
}

/// Rows of a segment with these of its drafts whose logits are needed, in order, with their
/// purposes.
pub(super) fn logit_purposes<'a>(
    segment: &'a Segment,
    drafts: &'a [TokenId],
    tokens_count: usize,
) -> impl Iterator<Item = (usize, LogitPurpose)> + 'a {
    let slot = segment.slot;
    let len = segment.history_len() as usize + drafts.len();
    let position = segment.position as usize;
    let (scored, samples) = match segment.logits {
        LogitsWanted::No | LogitsWanted::Pool => (0, false),
        LogitsWanted::Sample => (0, true),
        // A row scores the token after it, if that token is known.
        LogitsWanted::Score => (len.min(tokens_count - position - 1), false),
        LogitsWanted::ScoreAndSample => (len - 1, true),
    };
    let scores = (0..scored).map(move |row| (row, LogitPurpose::Score(slot, position + row + 1)));
    let drafted = len - drafts.len();
    let sample = samples.then_some((drafted - 1, LogitPurpose::Sample(slot, position + drafted)));
    let drafts = (drafted..).zip(drafts);
    let verified = drafts.map(move |(row, draft)| {
        let purpose = LogitPurpose::Verify(slot, position + row + 1, *draft);
        (row, purpose)
    });
    scores.chain(sample).chain(verified)
}
