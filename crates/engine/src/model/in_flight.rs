//! Steps that were begun and not collected.
//!
//! Owns: the order in which steps end, and the slots to which their tokens belong.
//! Never: lays out a plan.
//! Invariant: a token is appended only to the history that it was drawn for, even if another
//! sequence has the slot by then; a step that depended on a failed draw reports an error, never
//! tokens.

use super::ModelEngine;
use crate::EngineError;
use crate::engine::{Overlap, STEPS_IN_FLIGHT_MAX};
use crate::ops::Ops;
use crate::sampling::PendingToken;
use cleave_domain::{LogitsWanted, SampledToken, SlotIndex, StepId, StepPlan, StepResult};
use std::time::Duration;

/// A step that was begun and not collected.
#[derive(Debug)]
pub(super) struct UncollectedStep {
    step: StepId,
    /// Serial number among all steps begun.
    begin_serial: u64,
    /// Slots that the step draws for, in row order, each with the number of times that it had been
    /// opened.
    draws: Vec<(SlotIndex, u64)>,
    /// Whether the step takes tokens that the step before draws.
    takes_pending_tokens: bool,
    state: UncollectedStepState,
}

#[derive(Debug)]
enum UncollectedStepState {
    /// Queued or running on the device.
    Queued,
    /// On the device, but useless: the step before, whose tokens it takes, failed.
    InputFailed(EngineError),
    /// Finished, with its result.
    Finished(Result<StepResult, EngineError>),
}

impl<O: Ops> ModelEngine<O> {
    /// Whether the device can draw every token that a plan asks for, and the plan has work. The
    /// plan was checked and its slots are open.
    fn is_drawn_by_device(&self, plan: &StepPlan) -> bool {
        let has_work = !plan.segments.is_empty();
        has_work
            && plan.segments.iter().all(|segment| match segment.logits {
                LogitsWanted::No => true,
                LogitsWanted::Sample => self.slot(segment.slot).device_can_draw(),
                LogitsWanted::Score | LogitsWanted::ScoreAndSample | LogitsWanted::Pool => false,
            })
    }

    /// Queues a step on the device and returns without waiting.
    fn queue(&mut self, plan: &StepPlan) -> Result<(), EngineError> {
        self.queue_pass(plan)?;
        let draws = self.draws_on_device();
        self.in_flight.push_back(UncollectedStep {
            step: plan.step,
            begin_serial: self.begun_count,
            draws,
            takes_pending_tokens: !self.batch.fed_rows.is_empty(),
            state: UncollectedStepState::Queued,
        });
        Ok(())
    }

    /// Slots for which the device draws in the step that was just laid out, each with the number of
    /// times that it was opened.
    pub(super) fn draws_on_device(&mut self) -> Vec<(SlotIndex, u64)> {
        let mut draws = self.spare_draws.pop().unwrap_or_default();
        draws.clear();
        for purpose in &self.logit_rows.purposes[..self.device_rows_count] {
            let slot = purpose.slot();
            draws.push((slot, self.opens_counts[slot.0 as usize]));
        }
        draws
    }

    /// Runs a step to its end, after the steps that are already on the device.
    fn run_whole(&mut self, plan: &StepPlan) -> Result<(), EngineError> {
        if !plan.segments.is_empty() {
            // The host draws from logits, so it needs every token before: settle the steps in
            // flight.
            (0..self.in_flight.len()).for_each(|index| self.settle(index));
        }
        let is_short = plan.segments.iter().find(|segment| {
            let end = segment.position as usize + segment.len as usize;
            end > self.slot(segment.slot).history.len()
        });
        if let Some(segment) = is_short {
            return Err(EngineError::Device(format!(
                "the step before failed, which was to draw a token of {}",
                segment.slot
            )));
        }
        let result = self.run(plan)?;
        let opened =
            |(slot, _): &(SlotIndex, SampledToken)| (*slot, self.opens_counts[slot.0 as usize]);
        self.in_flight.push_back(UncollectedStep {
            step: plan.step,
            begin_serial: self.begun_count,
            draws: result.sampled.iter().map(opened).collect(),
            takes_pending_tokens: false,
            state: UncollectedStepState::Finished(Ok(result)),
        });
        Ok(())
    }

    /// Waits for a step that is on the device, and appends its tokens to the histories.
    pub(super) fn settle(&mut self, index: usize) {
        let step = &mut self.in_flight[index];
        let input_error = match &step.state {
            UncollectedStepState::Finished(_) => return,
            UncollectedStepState::Queued => None,
            UncollectedStepState::InputFailed(error) => Some(error.clone()),
        };
        let draws = std::mem::take(&mut step.draws);
        let (step, begun) = (step.step, step.begin_serial);
        let fetched = self.fetch(&draws);
        let result = match input_error {
            Some(error) => Err(error),
            None => fetched.map(|()| {
                let mut result = StepResult {
                    step,
                    ..StepResult::default()
                };
                self.report_drawn(&draws, &mut result);
                result
            }),
        };
        // From here on the tokens are in the histories, but the caller has not collected them;
        // after a failure nothing is pending.
        let pending = result.is_ok().then_some(PendingToken {
            begin_serial: begun,
            row: None,
        });
        for &(slot, opens_count) in &draws {
            self.mark(slot, opens_count, begun, pending);
        }
        if let (Err(error), Some(next)) = (&result, self.in_flight.get_mut(index + 1))
            && next.takes_pending_tokens
        {
            // The next step took tokens of this one: its results are garbage, and it fails with the
            // same error.
            next.state = UncollectedStepState::InputFailed(error.clone());
        }
        let step = &mut self.in_flight[index];
        step.draws = draws;
        step.state = UncollectedStepState::Finished(result);
    }

    /// Waits for the oldest queued draw; an error if any of its rows had logits that are not
    /// finite.
    pub(super) fn fetch(&mut self, draws: &[(SlotIndex, u64)]) -> Result<(), EngineError> {
        self.drawn.clear();
        self.ops.fetch_drawn(&mut self.drawn)?;
        let drawn = draws.iter().zip(&self.drawn);
        let broken = drawn.filter(|(_, token)| token.is_none());
        let broken: Vec<SlotIndex> = broken.map(|((slot, _), _)| *slot).collect();
        if broken.is_empty() {
            return Ok(());
        }
        Err(EngineError::NotFinite(broken))
    }

    /// Adds the fetched tokens to a result, and to the histories that they were drawn for.
    pub(super) fn report_drawn(&mut self, draws: &[(SlotIndex, u64)], result: &mut StepResult) {
        result.sampled.reserve_exact(draws.len());
        for ((slot, opens_count), token) in draws.iter().zip(&self.drawn) {
            let token = token.expect("it was fetched");
            let scores = None;
            result.sampled.push((*slot, SampledToken { token, scores }));
            if self.opens_counts[slot.0 as usize] == *opens_count {
                let state = self.slots[slot.0 as usize].as_mut();
                state.expect("it was opened").push(token);
            }
        }
    }

    /// Sets a slot's pending token, unless another sequence has the slot by now or a later step
    /// draws for it too.
    fn mark(
        &mut self,
        slot: SlotIndex,
        opens_count: u64,
        begin_serial: u64,
        pending: Option<PendingToken>,
    ) {
        if self.opens_counts[slot.0 as usize] != opens_count {
            return;
        }
        if let Some(state) = &mut self.slots[slot.0 as usize]
            && state
                .pending_token
                .is_none_or(|before| before.begin_serial <= begin_serial)
        {
            state.pending_token = pending;
        }
    }

    /// Sets the pending tokens of the step that was just begun.
    fn mark_newest(&mut self) {
        let Some(newest) = self.in_flight.back_mut() else {
            return;
        };
        let is_queued = matches!(newest.state, UncollectedStepState::Queued);
        let (begun, draws) = (newest.begin_serial, std::mem::take(&mut newest.draws));
        for (row, &(slot, opens_count)) in draws.iter().enumerate() {
            let row = is_queued.then_some(row as u32);
            self.mark(
                slot,
                opens_count,
                begun,
                Some(PendingToken {
                    begin_serial: begun,
                    row,
                }),
            );
        }
        if let Some(newest) = self.in_flight.back_mut() {
            newest.draws = draws;
        }
    }
}

impl<O: Ops> Overlap for ModelEngine<O> {
    fn begin(&mut self, plan: &StepPlan) -> Result<(), EngineError> {
        if self.in_flight.len() == STEPS_IN_FLIGHT_MAX {
            return Err(EngineError::Plan(format!(
                "{STEPS_IN_FLIGHT_MAX} steps are under way: collect one first"
            )));
        }
        self.open_slots(plan)?;
        self.begun_count += 1;
        if self.is_drawn_by_device(plan) {
            self.queue(plan)?
        } else {
            self.run_whole(plan)?
        }
        self.mark_newest();
        Ok(())
    }

    fn is_done(&mut self) -> bool {
        match self.in_flight.front() {
            Some(UncollectedStep {
                state: UncollectedStepState::Queued | UncollectedStepState::InputFailed(_),
                ..
            }) => self.ops.is_draw_ready(),
            _ => true,
        }
    }

    fn collect(&mut self) -> Result<StepResult, EngineError> {
        assert!(!self.in_flight.is_empty(), "no step is under way");
        self.settle(0);
        let oldest = self.in_flight.pop_front().expect("it is under way");
        for &(slot, opens_count) in &oldest.draws {
            self.mark(slot, opens_count, oldest.begin_serial, None);
        }
        self.spare_draws.push(oldest.draws);
        match oldest.state {
            UncollectedStepState::Finished(result) => result,
            UncollectedStepState::Queued | UncollectedStepState::InputFailed(_) => {
                unreachable!("it was settled")
            }
        }
    }

    fn idle_before_step(&self) -> Option<Duration> {
        self.ops.idle_before_step()
    }
}
