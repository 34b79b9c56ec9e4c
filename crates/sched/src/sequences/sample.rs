//! Sequences for the tests of machines, which need no brain.
//!
//! Owns: requests and ranks. Never: makes a sequence that holds anything.

use super::WorkerSequence;
use crate::policy::ServiceRank;
use crate::test_worker::{ROUTER, handoff};
use cleave_domain::Time;
use cleave_testkit::build;
use std::sync::Arc;

/// A sequence of `prompt` tokens that may draw ten; earlier numbers are more important.
pub(crate) fn sequence(number: u64, prompt: u32) -> WorkerSequence {
    let request = build::request(0..prompt, 10);
    let rank = ServiceRank {
        priority: (0, 0),
        due: Time::ZERO,
        since: Time::ZERO,
        arrival: number,
        handoff: handoff(number),
    };
    WorkerSequence::new(rank, ROUTER, Arc::new(request), Time::ZERO)
}
