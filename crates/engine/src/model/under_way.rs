//! Steps that were begun and not collected.
//!
//! Owns: in which order they end, and to which slots what they drew belongs.
//! Never: lays out a plan.
//! Invariant: a token reaches the history that it was drawn for and no other, whoever has the slot by then, and
//! nothing is told of a step that stood on a token that was none.

use super::{ModelEngine, not_finite};
use crate::EngineError;
use crate::ops::Ops;
use crate::sampling::Untold;
use crate::waist::{Overlap, STEPS_IN_FLIGHT_MAX};
use cleave_domain::{LogitsWanted, Sampled, SlotIndex, StepId, StepPlan, StepResult};
use std::time::Duration;

/// A step that was begun and not collected.
#[derive(Debug)]
pub(super) struct UnderWay {
    step: StepId,
    /// Its number among all that were begun.
    begun: u64,
    /// Slots that it draws for, in the order of the rows, each with how often it had been opened.
    draws: Vec<(SlotIndex, u64)>,
    /// It takes tokens that the step before draws.
    is_fed: bool,
    state: State,
}

#[derive(Debug)]
enum State {
    /// On the device.
    Queued,
    /// On the device, and to no use: the step before, which it stands on, failed.
    InVain(EngineError),
    /// What came of it.
    Over(Result<StepResult, EngineError>),
}

impl<O: Ops> ModelEngine<O> {
    /// Whether a plan has work, and all that it wants to know is drawn by the device. It was checked, its slots are
    /// open.
    fn is_drawn_by_device(&self, plan: &StepPlan) -> bool {
        let has_work = !plan.segments.is_empty();
        has_work
            && plan.segments.iter().all(|segment| match segment.logits {
                LogitsWanted::No => true,
                LogitsWanted::Sample => self.slot(segment.slot).is_drawn_by_device(),
                LogitsWanted::Score | LogitsWanted::ScoreAndSample => false,
            })
    }

    /// Queues a step.
    fn queue(&mut self, plan: &StepPlan) -> Result<(), EngineError> {
        self.queue_pass(plan)?;
        let draws = self.draws_on_device();
        self.under_way.push_back(UnderWay {
            step: plan.step,
            begun: self.begun_count,
            draws,
            is_fed: !self.batch.fed.is_empty(),
            state: State::Queued,
        });
        Ok(())
    }

    /// For which slots the step that was just laid out draws on the device, each with how often it was opened.
    pub(super) fn draws_on_device(&mut self) -> Vec<(SlotIndex, u64)> {
        let mut draws = self.spare_draws.pop().unwrap_or_default();
        draws.clear();
        for purpose in &self.wanted.purposes[..self.on_device_count] {
            let slot = purpose.slot();
            draws.push((slot, self.opens_counts[slot.0 as usize]));
        }
        draws
    }

    /// Runs a step to its end, after what is on the device already.
    fn run_whole(&mut self, plan: &StepPlan) -> Result<(), EngineError> {
        if !plan.segments.is_empty() {
            (0..self.under_way.len()).for_each(|index| self.settle(index));
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
        let opened = |(slot, _): &(SlotIndex, Sampled)| (*slot, self.opens_counts[slot.0 as usize]);
        self.under_way.push_back(UnderWay {
            step: plan.step,
            begun: self.begun_count,
            draws: result.sampled.iter().map(opened).collect(),
            is_fed: false,
            state: State::Over(Ok(result)),
        });
        Ok(())
    }

    /// Waits for a step if it is on the device; its tokens join the histories.
    fn settle(&mut self, index: usize) {
        let step = &mut self.under_way[index];
        let vain = match &step.state {
            State::Over(_) => return,
            State::Queued => None,
            State::InVain(error) => Some(error.clone()),
        };
        let draws = std::mem::take(&mut step.draws);
        let (step, begun) = (step.step, step.begun);
        let fetched = self.fetch(&draws);
        let result = match vain {
            Some(error) => Err(error),
            None => fetched.map(|()| {
                let mut result = StepResult {
                    step,
                    ..StepResult::default()
                };
                self.tell(&draws, &mut result);
                result
            }),
        };
        let untold = result.is_ok().then_some(Untold { begun, row: None });
        for draw in &draws {
            self.mark(*draw, begun, untold);
        }
        if let (Err(error), Some(next)) = (&result, self.under_way.get_mut(index + 1))
            && next.is_fed
        {
            next.state = State::InVain(error.clone());
        }
        let step = &mut self.under_way[index];
        step.draws = draws;
        step.state = State::Over(result);
    }

    /// Waits for the oldest tokens that were queued; every one is a token then.
    pub(super) fn fetch(&mut self, draws: &[(SlotIndex, u64)]) -> Result<(), EngineError> {
        self.drawn.clear();
        self.ops.drawn(&mut self.drawn)?;
        let broken = self.drawn.iter().position(Option::is_none);
        broken.map_or(Ok(()), |row| Err(not_finite(draws[row].0)))
    }

    /// Adds what was fetched to a result, and to the histories that it was drawn for.
    pub(super) fn tell(&mut self, draws: &[(SlotIndex, u64)], result: &mut StepResult) {
        result.sampled.reserve_exact(draws.len());
        for ((slot, opens_count), token) in draws.iter().zip(&self.drawn) {
            let token = token.expect("it was fetched");
            let scores = None;
            result.sampled.push((*slot, Sampled { token, scores }));
            if self.opens_counts[slot.0 as usize] == *opens_count {
                let state = self.slots[slot.0 as usize].as_mut();
                state.expect("it was opened").push(token);
            }
        }
    }

    /// Notes what a slot's caller has not heard of a step, unless the slot is another's or a later step draws
    /// for it too.
    fn mark(&mut self, (slot, opens_count): (SlotIndex, u64), begun: u64, untold: Option<Untold>) {
        if self.opens_counts[slot.0 as usize] != opens_count {
            return;
        }
        if let Some(state) = &mut self.slots[slot.0 as usize]
            && state.untold.is_none_or(|before| before.begun <= begun)
        {
            state.untold = untold;
        }
    }

    /// Marks what a step that was just begun draws.
    fn mark_newest(&mut self) {
        let Some(newest) = self.under_way.back_mut() else {
            return;
        };
        let is_queued = matches!(newest.state, State::Queued);
        let (begun, draws) = (newest.begun, std::mem::take(&mut newest.draws));
        for (row, draw) in draws.iter().enumerate() {
            let row = is_queued.then_some(row as u32);
            self.mark(*draw, begun, Some(Untold { begun, row }));
        }
        if let Some(newest) = self.under_way.back_mut() {
            newest.draws = draws;
        }
    }
}

impl<O: Ops> Overlap for ModelEngine<O> {
    fn begin(&mut self, plan: &StepPlan) -> Result<(), EngineError> {
        if self.under_way.len() == STEPS_IN_FLIGHT_MAX {
            return Err(EngineError::Plan(format!(
                "{STEPS_IN_FLIGHT_MAX} steps are under way: collect one first"
            )));
        }
        self.admit(plan)?;
        self.begun_count += 1;
        match self.is_drawn_by_device(plan) {
            true => self.queue(plan)?,
            false => self.run_whole(plan)?,
        }
        self.mark_newest();
        Ok(())
    }

    fn is_done(&mut self) -> bool {
        match self.under_way.front() {
            Some(UnderWay {
                state: State::Queued | State::InVain(_),
                ..
            }) => self.ops.is_drawn(),
            _ => true,
        }
    }

    fn collect(&mut self) -> Result<StepResult, EngineError> {
        assert!(!self.under_way.is_empty(), "no step is under way");
        self.settle(0);
        let oldest = self.under_way.pop_front().expect("it is under way");
        for draw in &oldest.draws {
            self.mark(*draw, oldest.begun, None);
        }
        self.spare_draws.push(oldest.draws);
        match oldest.state {
            State::Over(result) => result,
            State::Queued | State::InVain(_) => unreachable!("it was settled"),
        }
    }

    fn idle(&self) -> Option<Duration> {
        self.ops.idle()
    }
}
