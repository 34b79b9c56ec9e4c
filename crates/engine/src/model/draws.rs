//! The rows of a step whose logits are needed, and what the host does with them.
//!
//! Owns: the purpose of each row, and the masks of constraints for draws of a device.
//! Never: runs a pass.
//! Invariant: a row that ran a draft draws only if the token before it equals the draft.

use super::ModelEngine;
use super::host_draws::{FailedDraws, HostRows, locked};
use crate::forward::ForwardPass;
use crate::ops::{MaskedDraw, Ops};
use crate::sampling::SamplingSlot;
use crate::{Engine, EngineError};
use cleave_domain::{LogitsWanted, Segment, SlotIndex, StepResult, TokenId};
use std::sync::Mutex;

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
    /// Finds the tokens that constraints allow, while a device runs the pass. A host that computes
    /// the pass itself finds them with the draws.
    pub(super) fn prepare_masks(&mut self) {
        if !self.ops.can_draw() {
            return;
        }
        let vocab_size = self.weights.spec().vocab_size;
        let drawn = &self.logit_rows.purposes;
        let is_drawn = |slot: usize| {
            let is_sample = |purpose: &LogitPurpose| matches!(purpose, LogitPurpose::Sample(..));
            drawn
                .iter()
                .any(|purpose| is_sample(purpose) && purpose.slot().0 as usize == slot)
        };
        let is_constrained = |slot: &SamplingSlot| slot.constraint.is_some();
        let open = self.slots.iter().flatten();
        let count = open.filter(|slot| is_constrained(slot)).count();
        let slots = self.slots.iter_mut().enumerate();
        let constrained = slots.filter_map(|(index, slot)| {
            slot.as_mut()
                .filter(|slot| is_constrained(slot) && is_drawn(index))
        });
        let left = Mutex::new(constrained);
        self.ops.share_on_host(count, &|| {
            let next = locked(&left).next();
            if let Some(slot) = next {
                slot.prepare_mask(vocab_size);
            }
        });
    }

    /// Queues the draws that the device makes under masks.
    ///
    /// # Errors
    /// `Constraint` if a constraint fails, with all slots that have the same reason.
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
                Err(error) => failed.push((slot, error)),
            }
        }
        if let Some(failure) = EngineError::of_constraints(failed) {
            return Err(failure);
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

    /// Draws or scores every row that the device does not draw. Adds the tokens that constraints
    /// force after drawn ones, for an engine that can verify them as drafts.
    ///
    /// # Errors
    /// `NotFinite` or `Constraint` with all slots for which a draw failed for this reason.
    pub(super) fn draw_on_host(&mut self, result: &mut StepResult) -> Result<(), EngineError> {
        let vocab = self.weights.spec().vocab_size;
        let wants_forced = self.drafts_max() > 0;
        let mut failed = FailedDraws::default();
        let mut first = self.device_rows_count;
        let end = self.logit_rows.purposes.len();
        while first < end {
            let rows = (end - first).min(self.logits.len() / vocab);
            let logits = &mut self.logits[..rows * vocab];
            let mut pass = ForwardPass {
                ops: &mut self.ops,
                weights: &self.weights,
                pool: &mut self.pool,
                buffers: &mut self.buffers,
                adapters: &mut self.step_adapters,
            };
            pass.logits(first, logits)?;
            let rows = HostRows {
                purposes: &self.logit_rows.purposes[first..first + rows],
                logits,
                wants_forced,
            };
            first += rows.purposes.len();
            self.host_draws
                .run(&mut self.ops, &mut self.slots, rows, result, &mut failed);
        }
        let FailedDraws {
            not_finite,
            unconstrained,
        } = failed;
        // The constraints among them fail when the step runs again.
        if !not_finite.is_empty() {
            return Err(EngineError::NotFinite(not_finite));
        }
        EngineError::of_constraints(unconstrained).map_or(Ok(()), Err)
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
