//! A worker: a production brain over an engine that has only prices.
//!
//! Owns: the time and the drawn tokens of a step. Never: holds a cell; the links of this world
//! deliver every block whole. Invariant: a token is a function of its request and its position, so
//! any worker continues any stream.

use super::adapters::WorkerAdapters;
use super::links::whole_grains;
use super::scenario::VOCAB_SIZE;
use super::{Scenario, WorkerDevice};
use cleave_domain::{
    HandoffId, SampledToken, SplitMix64, StepPlan, StepResult, StepWork, Time, TokenId,
};
use cleave_planner::Predict;
use cleave_sched::{BlockExport, WorkerBrain, WorkerInput};
use cleave_testkit::WakeTimer;
use std::collections::{BTreeSet, VecDeque};
use std::time::Duration;

/// How far steps are off their price.
#[derive(Clone, Copy, Debug)]
pub(crate) struct StepImprecision {
    pub(crate) noise_permille: u32,
    pub(crate) grain: Duration,
}

#[derive(Debug)]
pub(crate) struct GoodputWorker {
    pub(crate) brain: WorkerBrain,
    pub(crate) phase: WorkerPhase,
    /// The brain reported that it has drained.
    pub(crate) has_drained: bool,
    /// The time of its next wake-up.
    pub(crate) wake: WakeTimer,
    /// Answers that the brain gets before any other input.
    pub(crate) answers_due: VecDeque<WorkerInput>,
    /// Blocks exported since the last input.
    pub(crate) exports_pending: Vec<BlockExport>,
    /// Swap copies whose content the brain dropped.
    pub(crate) dropped_swaps: BTreeSet<HandoffId>,
    /// The time at which all steps in flight end.
    pub(crate) free_at: Time,
    /// Its adapters, if the fleet serves any.
    pub(crate) adapters: Option<WorkerAdapters>,
    /// Sampling seeds of the slots' sequences.
    seeds: Vec<u64>,
    rng: SplitMix64,
}

/// The phase of a worker's life.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum WorkerPhase {
    /// The worker loads its weights.
    Starting,
    /// The worker is up and serves.
    Up,
    /// The worker drains and still holds sequences.
    Leaving,
    /// The worker has left or died.
    Gone,
}

impl WorkerPhase {
    /// Whether the orchestrator counts it as part of its pool.
    pub(crate) fn is_counted(self) -> bool {
        matches!(self, Self::Starting | Self::Up)
    }

    /// Whether it handles inputs.
    pub(crate) fn is_running(self) -> bool {
        matches!(self, Self::Up | Self::Leaving)
    }
}

impl GoodputWorker {
    pub(crate) fn new(device: &WorkerDevice, scenario: &Scenario) -> Self {
        Self {
            brain: WorkerBrain::new(device.limits.clone()),
            phase: WorkerPhase::Up,
            has_drained: false,
            wake: WakeTimer::default(),
            answers_due: VecDeque::new(),
            exports_pending: Vec::new(),
            dropped_swaps: BTreeSet::new(),
            free_at: Time::ZERO,
            adapters: scenario.adapters.map(WorkerAdapters::new),
            seeds: vec![0; device.limits.capacity.slots_count as usize],
            rng: SplitMix64::new(SplitMix64::finalize(
                scenario.seed ^ device.worker_ref().worker.0,
            )),
        }
    }

    /// The result of a step, and its duration.
    pub(crate) fn step(
        &mut self,
        plan: &StepPlan,
        device: &WorkerDevice,
        flaws: StepImprecision,
    ) -> (StepResult, Duration) {
        for open in &plan.opens {
            self.seeds[open.slot.0 as usize] = open.sampling.seed;
        }
        let samples = plan.segments.iter().filter(|s| s.logits.samples());
        let sampled = samples.map(|segment| {
            let position = segment.position + segment.len;
            let token = draw_token(self.seeds[segment.slot.0 as usize], position);
            let scores = None;
            (segment.slot, SampledToken { token, scores })
        });
        let result = StepResult {
            step: plan.step,
            sampled: sampled.collect(),
            ..StepResult::default()
        };
        let adapters = self.adapters.as_mut().map(|adapters| adapters.step(plan));
        let takes =
            device.real_prices.step(&StepWork::of_plan(plan)) + adapters.unwrap_or_default();
        let noise = flaws.noise_permille.min(999);
        let share = match noise {
            0 => 1000,
            noise => self.rng.count(1000 - noise, 1000 + noise),
        };
        (result, whole_grains(takes * share / 1000, flaws.grain))
    }
}

/// The token that a request draws at a position.
pub(crate) fn draw_token(seed: u64, position: u32) -> TokenId {
    (SplitMix64::finalize(SplitMix64::finalize(seed) ^ u64::from(position)) % u64::from(VOCAB_SIZE))
        as TokenId
}
