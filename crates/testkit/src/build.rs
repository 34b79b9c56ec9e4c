//! Plain values for worlds and tests, of which a caller changes what its world is about.
//!
//! Owns: the fields that almost no world cares about. Never: draws. A unit test of `sched` or
//! `router` may call the functions here that give types of `domain`.

use cleave_domain::{
    Capacity, Fingerprint, FlightId, HandoffId, Incarnation, Prices, Request, RequestSlo, Role,
    SampledToken, SamplingParams, SlotIndex, StepPlan, StepResult, StopRules, TokenId,
    WorkerDescription, WorkerId, WorkerRef,
};
use cleave_sched::{PoolWriter, WorkerLimits};
use std::sync::Arc;
use std::time::Duration;

/// A greedy request without stop tokens, targets or output so far.
pub fn request(prompt: impl IntoIterator<Item = TokenId>, max_tokens: u32) -> Request {
    Request {
        prompt: prompt.into_iter().collect(),
        generated: [].into(),
        sampling: SamplingParams::greedy(),
        stop: StopRules {
            max_tokens,
            min_tokens: 0,
            stop_tokens: [].into(),
        },
        priority: 0,
        cache_salt: 0,
        adapter: None,
        pooling: None,
        slo: RequestSlo::default(),
    }
}

/// A worker in its first life.
pub const fn worker(number: u64) -> WorkerRef {
    WorkerRef {
        worker: WorkerId(number),
        incarnation: Incarnation(1),
    }
}

/// The first attempt of a flight.
pub const fn handoff(flight: FlightId) -> HandoffId {
    HandoffId { flight, attempt: 0 }
}

/// A worker whose model and weights are those of all workers that are described here.
pub fn description(role: Role, capacity: Capacity) -> WorkerDescription {
    WorkerDescription {
        role,
        home: role,
        model: String::new(),
        fingerprint: Fingerprint::default(),
        capacity,
        queue_max: 8,
        device: None,
    }
}

/// A worker for both legs, without prefix cache, host memory, tiers, prices and speculation, whose
/// time limits are long.
pub fn limits(me: WorkerRef, capacity: Capacity) -> WorkerLimits {
    WorkerLimits {
        me,
        role: Role::Both,
        capacity,
        vocab_size: u32::MAX,
        queue_max: 8,
        lease: Duration::from_secs(100_000),
        stall_max: Duration::from_secs(10),
        step_max: Duration::from_secs(60),
        prefix_cache: false,
        swap_blocks: 0,
        host_blocks: 0,
        disk_blocks: 0,
        writer: PoolWriter::Receiver,
        prices: Prices::default(),
        steps_in_flight: 1,
        speculation: None,
    }
}

/// The result of a step in which each sequence that draws gets its token from `draw`, which is
/// given the segment's index.
pub fn step_result(plan: &StepPlan, draw: impl Fn(usize) -> TokenId) -> StepResult {
    let drawn = plan
        .segments
        .iter()
        .enumerate()
        .filter_map(|(at, segment)| {
            let sampled = || SampledToken {
                token: draw(at),
                scores: None,
            };
            segment.logits.samples().then(|| (segment.slot, sampled()))
        });
    StepResult {
        step: plan.step,
        sampled: drawn.collect(),
        pooled: pooled_zeros(plan),
        ..StepResult::default()
    }
}

/// The answer of an engine whose hidden states are zeros to everything that a plan pools.
pub fn pooled_zeros(plan: &StepPlan) -> Vec<(SlotIndex, Arc<[f64]>)> {
    let poolings = plan.poolings.iter();
    poolings.map(|at| (at.slot, Arc::from([0.0]))).collect()
}
