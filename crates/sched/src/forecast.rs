//! Predictions of the time that work takes here.
//!
//! Owns: the prices of this worker's work, which every step corrects, and the limit of prompt
//! tokens in one step that follows from them. Never: decides what runs, or changes a sequence.
//! Invariant: the limit is always that of the current prices.

use crate::WorkerLimits;
use crate::sequences::WorkerSequence;
use cleave_domain::{LinkPrice, Prices, StepWork, Time, WorkerId};
use cleave_planner::{Predict, PriceLearner};
use std::time::Duration;

/// Prices of this worker's work, learned from its steps, and the predictions that follow.
#[derive(Clone, Debug)]
pub(crate) struct WorkForecast {
    learner: PriceLearner,
    /// Prompt tokens that one step runs at most, derived from prices.
    quantum: u32,
    step_tokens_max: u32,
    block_tokens: u32,
}

impl WorkForecast {
    /// Starts from the prices measured before the worker joined.
    pub(crate) fn new(limits: &WorkerLimits) -> Self {
        let capacity = &limits.capacity;
        let (most, block) = (capacity.step_tokens_max, capacity.block_tokens);
        Self {
            learner: PriceLearner::new(limits.prices.clone()),
            quantum: cleave_planner::quantum(&limits.prices, most, block),
            step_tokens_max: most,
            block_tokens: block,
        }
    }

    // === learning ===

    /// Corrects the prices by the time that a step took.
    pub(crate) fn observe_step(&mut self, work: &StepWork, took: Duration) {
        self.learner.observe(work, took);
        let (most, block) = (self.step_tokens_max, self.block_tokens);
        self.quantum = cleave_planner::quantum(self.learner.prices(), most, block);
    }

    /// Corrects the price of a link by the time that a transfer took.
    pub(crate) fn observe_transfer(&mut self, to: WorkerId, bytes: u64, took: Duration) {
        self.learner.observe_transfer(to, bytes, took);
    }

    /// Starts from a link's measured price, where anything is predicted.
    pub(crate) fn link_measured(&mut self, to: WorkerId, price: LinkPrice) {
        if self.learner.has_prices() {
            self.learner.link_measured(to, price);
        }
    }

    pub(crate) fn link_lost(&mut self, to: WorkerId) {
        self.learner.link_lost(to);
    }

    // === predicting ===

    /// Whether anything is predicted.
    pub(crate) fn has_prices(&self) -> bool {
        self.learner.has_prices()
    }

    pub(crate) fn prices(&self) -> &Prices {
        self.learner.prices()
    }

    /// Prompt tokens that one step runs at most.
    pub(crate) fn quantum(&self) -> u32 {
        self.quantum
    }

    /// Time to compute `rest` tokens after the first `done`, alone.
    pub(crate) fn prefill(&self, done: u32, rest: u32) -> Duration {
        self.prices().prefill(done, rest, self.quantum)
    }

    /// Time that they add to sequences that share their steps.
    pub(crate) fn prefill_added(&self, done: u32, rest: u32) -> Duration {
        self.prices().prefill_added(done, rest, self.quantum)
    }

    /// Time that the rest of a prompt takes, alone.
    pub(crate) fn prompt_takes(&self, sequence: &WorkerSequence) -> Duration {
        let done = sequence.computed_or_fetching(self.block_tokens);
        self.prefill(done, sequence.len() - done)
    }

    /// Time that the rest of a prompt adds to sequences that share its steps.
    pub(crate) fn prompt_adds(&self, sequence: &WorkerSequence) -> Duration {
        let done = sequence.computed_or_fetching(self.block_tokens);
        self.prefill_added(done, sequence.len() - done)
    }

    /// How long a prompt with a deadline can still wait; `None` for one without, or one that is
    /// late anyway.
    pub(crate) fn prompt_slack(&self, sequence: &WorkerSequence, now: Time) -> Option<Duration> {
        sequence.on_miss?;
        let left = sequence.rank().due.since(now);
        left.checked_sub(self.prompt_takes(sequence))
    }

    /// The mean gap with which a stream keeps its target, if it still can.
    pub(crate) fn keepable_gap(&self, sequence: &WorkerSequence, now: Time) -> Option<Duration> {
        let gap = sequence.gap_left(now)?;
        let context = u64::from(sequence.len());
        (gap >= self.prices().decode(1, context)).then_some(gap)
    }

    /// The part of it that decides the future, beside the prices.
    pub(crate) fn fingerprint(&self) -> Vec<u64> {
        self.learner.fingerprint()
    }

    /// Asserts that the limit of prompt tokens follows from the prices.
    pub(crate) fn check(&self) {
        let (most, block) = (self.step_tokens_max, self.block_tokens);
        let quantum = cleave_planner::quantum(self.prices(), most, block);
        assert_eq!(self.quantum, quantum, "the quantum is of other prices");
    }
}

#[cfg(test)]
mod tests {
    use super::WorkForecast;
    use crate::WorkerLimits;
    use crate::test_worker::{MS, PEER, limits};
    use cleave_domain::{LinkPrice, Prices, StepWork};
    use std::time::Duration;

    #[test]
    fn the_quantum_follows_the_prices() {
        let mut forecast = WorkForecast::new(&limits());
        forecast.check();
        let before = forecast.prefill(0, 64);
        for _ in 0..50 {
            forecast.observe_step(&StepWork::prefill(0, 64), MS * 40);
            forecast.check();
        }
        assert!(forecast.prefill(0, 64) > before * 2, "it learns");
    }

    #[test]
    fn a_worker_without_prices_predicts_nothing() {
        let mut forecast = WorkForecast::new(&WorkerLimits {
            prices: Prices::default(),
            ..limits()
        });
        forecast.link_measured(PEER.worker, LinkPrice::default());
        assert!(!forecast.has_prices() && forecast.prices().links.is_empty());
        assert_eq!(forecast.prefill(0, 64), Duration::ZERO);
    }
}
