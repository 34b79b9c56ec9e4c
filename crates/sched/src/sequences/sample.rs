//! Sequences for the tests of machines, which need no brain.
//!
//! Owns: requests and ranks. Never: makes a sequence that holds anything.

use super::WorkerSequence;
use crate::policy::ServiceRank;
use crate::test_worker::{ROUTER, handoff};
use cleave_domain::{Request, RequestSlo, SamplingParams, StopRules, Time};
use std::sync::Arc;

/// A sequence of `prompt` tokens that may draw ten; earlier numbers are more important.
pub(crate) fn sequence(number: u64, prompt: u32) -> WorkerSequence {
    let request = Request {
        prompt: (0..prompt).collect(),
        generated: Arc::from([]),
        sampling: SamplingParams::greedy(),
        stop: StopRules {
            max_tokens: 10,
            min_tokens: 0,
            stop_tokens: Arc::from([]),
        },
        priority: 0,
        cache_salt: 0,
        slo: RequestSlo::default(),
    };
    let rank = ServiceRank {
        priority: (0, 0),
        due: Time::ZERO,
        since: Time::ZERO,
        arrival: number,
        handoff: handoff(number),
    };
    WorkerSequence::new(rank, ROUTER, Arc::new(request), Time::ZERO)
}
