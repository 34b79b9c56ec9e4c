//! Draws and scores that the host makes of logits, shared by its threads.
//!
//! Owns: the rows of each sequence, which one thread takes in their order.
//! Never: runs a pass.
//! Invariant: a draw depends on its own sequence alone, so the number of threads changes no token.

use super::draws::LogitPurpose;
use crate::constraint::ConstraintError;
use crate::ops::Ops;
use crate::sampling::{DrawError, SamplingSlot, TokenSampler};
use cleave_domain::{SampledToken, SlotIndex, StepResult, TokenId};
use std::sync::{Mutex, MutexGuard, PoisonError};

/// Lists and scratch of the draws, reused so that a step allocates nothing.
#[derive(Debug)]
pub(super) struct HostDraws {
    sequences: Vec<SequenceDraws>,
    /// One for each thread.
    samplers: Mutex<Vec<TokenSampler>>,
}

/// The rows of one sequence among those whose logits are on the host.
#[derive(Debug, Default)]
struct SequenceDraws {
    slot: SlotIndex,
    rows_count: usize,
    /// The slot's state, until the draws end.
    state: Option<SamplingSlot>,
    drawn: Vec<SampledToken>,
    scored: Vec<SampledToken>,
    forced: Vec<TokenId>,
    error: Option<DrawError>,
}

/// Slots whose draws failed. All are named, each once: if only the first were reported, the step
/// would fail again for the next.
#[derive(Debug, Default)]
pub(super) struct FailedDraws {
    pub(super) not_finite: Vec<SlotIndex>,
    pub(super) unconstrained: Vec<(SlotIndex, ConstraintError)>,
}

/// Logits of rows `(rows, vocab)` and the purpose of each row.
pub(super) struct HostRows<'a> {
    pub(super) purposes: &'a [LogitPurpose],
    pub(super) logits: &'a mut [f32],
    /// Whether the tokens that constraints force are wanted.
    pub(super) wants_forced: bool,
}

impl HostDraws {
    pub(super) fn new(threads: usize, vocab_size: usize) -> Self {
        let sampler = |_| TokenSampler::for_vocabulary(vocab_size);
        Self {
            sequences: Vec::new(),
            samplers: Mutex::new((0..threads.max(1)).map(sampler).collect()),
        }
    }

    /// Draws or scores the rows. The rows of a slot are neighbours.
    pub(super) fn run(
        &mut self,
        ops: &mut impl Ops,
        slots: &mut [Option<SamplingSlot>],
        rows: HostRows<'_>,
        result: &mut StepResult,
        failed: &mut FailedDraws,
    ) {
        let HostRows {
            purposes,
            logits,
            wants_forced,
        } = rows;
        let count = self.begin(slots, purposes, failed);
        if count == 0 {
            return;
        }
        let vocab = logits.len() / purposes.len();
        let sequences = &mut self.sequences[..count];
        let left = Mutex::new(RowsLeft {
            sequences: sequences.iter_mut(),
            purposes,
            logits,
            vocab,
        });
        let samplers = &self.samplers;
        ops.share_on_host(count, &|| {
            let next = locked(&left).next();
            let sampler = locked(samplers).pop();
            let (Some((sequence, purposes, logits)), Some(mut sampler)) = (next, sampler) else {
                unreachable!("there is a sequence for each call, and a sampler for each thread");
            };
            sequence.draw(&mut sampler, purposes, logits);
            if wants_forced {
                sequence.find_forced();
            }
            locked(samplers).push(sampler);
        });
        for sequence in &mut self.sequences[..count] {
            slots[sequence.slot.0 as usize] = sequence.state.take();
            sequence.report(result, failed);
        }
    }

    /// Takes the states of all slots that have rows; returns their number.
    fn begin(
        &mut self,
        slots: &mut [Option<SamplingSlot>],
        purposes: &[LogitPurpose],
        failed: &FailedDraws,
    ) -> usize {
        let mut count = 0;
        for of_slot in purposes.chunk_by(|before, after| before.slot() == after.slot()) {
            if self.sequences.len() == count {
                self.sequences.push(SequenceDraws::default());
            }
            let sequence = &mut self.sequences[count];
            sequence.slot = of_slot[0].slot();
            sequence.rows_count = of_slot.len();
            sequence.state = slots[sequence.slot.0 as usize].take();
            sequence.error = failed.error_of(sequence.slot);
            count += 1;
        }
        count
    }
}

/// Sequences that no thread has taken, and their rows.
struct RowsLeft<'a> {
    sequences: std::slice::IterMut<'a, SequenceDraws>,
    purposes: &'a [LogitPurpose],
    logits: &'a mut [f32],
    vocab: usize,
}

impl<'a> Iterator for RowsLeft<'a> {
    type Item = (&'a mut SequenceDraws, &'a [LogitPurpose], &'a mut [f32]);

    fn next(&mut self) -> Option<Self::Item> {
        let sequence = self.sequences.next()?;
        let (purposes, others) = self.purposes.split_at(sequence.rows_count);
        let logits = std::mem::take(&mut self.logits);
        let (logits, left) = logits.split_at_mut(sequence.rows_count * self.vocab);
        (self.purposes, self.logits) = (others, left);
        Some((sequence, purposes, logits))
    }
}

impl SequenceDraws {
    /// Draws or scores rows `(rows, vocab)` in their order, up to the first error.
    fn draw(&mut self, sampler: &mut TokenSampler, purposes: &[LogitPurpose], logits: &mut [f32]) {
        let rows = logits.chunks_mut(logits.len() / purposes.len());
        for (purpose, logits) in purposes.iter().zip(rows) {
            if self.error.is_some() {
                return;
            }
            self.error = self.draw_or_score(sampler, *purpose, logits).err();
        }
    }

    fn draw_or_score(
        &mut self,
        sampler: &mut TokenSampler,
        purpose: LogitPurpose,
        logits: &mut [f32],
    ) -> Result<(), DrawError> {
        let state = self.state.as_mut();
        let state = state.expect("the plan was checked: every slot is open");
        match purpose {
            // The row ran a draft that was not drawn: its logits follow from a wrong token, so it
            // is skipped.
            LogitPurpose::Verify(_, tokens_count, draft)
                if state.history.len() != tokens_count || state.history.last() != Some(&draft) => {}
            LogitPurpose::Sample(..) | LogitPurpose::Verify(..) => {
                let (token, scores) = sampler.draw(state, logits)?;
                self.drawn.push(SampledToken { token, scores });
            }
            LogitPurpose::Score(_, at) => {
                let token = state.history[at];
                let count = state.sampling.prompt_logprobs.unwrap_or(0);
                let scores = Some(sampler.score(logits, token, count)?);
                self.scored.push(SampledToken { token, scores });
            }
        }
        Ok(())
    }

    /// Finds the tokens that the constraint forces after the drawn ones, for an engine that can
    /// verify them as drafts.
    fn find_forced(&mut self) {
        let state = self.state.as_mut().filter(|_| !self.drawn.is_empty());
        if let Some(constraint) = state.and_then(|state| state.constraint.as_mut()) {
            self.forced = constraint.forced();
        }
    }

    /// Moves the sequence's draws into the result.
    fn report(&mut self, result: &mut StepResult, failed: &mut FailedDraws) {
        let slot = self.slot;
        if !self.drawn.is_empty() {
            // Forced after a token that is not the last one.
            result.forced.pop_if(|(last, _)| *last == slot);
            if !self.forced.is_empty() {
                result.forced.push((slot, std::mem::take(&mut self.forced)));
            }
        }
        let drawn = self.drawn.drain(..).map(|sampled| (slot, sampled));
        result.sampled.extend(drawn);
        if !self.scored.is_empty() {
            match result.prompt_scores.last_mut() {
                Some((last, list)) if *last == slot => list.append(&mut self.scored),
                _ => result
                    .prompt_scores
                    .push((slot, std::mem::take(&mut self.scored))),
            }
        }
        if let Some(error) = self.error.take() {
            failed.add(slot, error);
        }
    }
}

impl FailedDraws {
    fn error_of(&self, slot: SlotIndex) -> Option<DrawError> {
        if self.not_finite.contains(&slot) {
            return Some(DrawError::NotFinite);
        }
        let found = self.unconstrained.iter().find(|(named, _)| *named == slot);
        found.map(|(_, error)| DrawError::Constraint(error.clone()))
    }

    fn add(&mut self, slot: SlotIndex, error: DrawError) {
        if self.error_of(slot).is_some() {
            return;
        }
        match error {
            DrawError::NotFinite => self.not_finite.push(slot),
            DrawError::Constraint(error) => self.unconstrained.push((slot, error)),
        }
    }
}

/// The value, also after a panic of another thread, which ends the step.
pub(crate) fn locked<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}
