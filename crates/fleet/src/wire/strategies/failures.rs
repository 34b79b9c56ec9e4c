//! Strategies for the reasons of refusals and failures.
//!
//! Owns: these reasons. Never: draws the message that has one.

use super::span;
use cleave_domain::{Failure, Refusal, SloMetric};
use proptest::prelude::*;

pub(super) fn failure() -> impl Strategy<Value = Failure> {
    let plain = prop_oneof![
        Just(Failure::WorkerLost),
        Just(Failure::WorkerStuck),
        Just(Failure::SlowReader),
        Just(Failure::LinkLost),
        Just(Failure::LeaseExpired),
        Just(Failure::Corrupt),
        Just(Failure::Rejected),
        Just(Failure::OutOfBlocks),
        Just(Failure::Draining),
        ".{0,20}".prop_map(Failure::Engine),
        ".{0,20}".prop_map(Failure::Constraint),
    ];
    plain.prop_recursive(3, 4, 1, |last| {
        last.prop_map(|last| Failure::RetriesSpent(Box::new(last)))
    })
}

pub(super) fn refusal() -> impl Strategy<Value = Refusal> {
    prop_oneof![
        span().prop_map(|retry_after| Refusal::QueueFull { retry_after }),
        span().prop_map(|retry_after| Refusal::NoBlocks { retry_after }),
        any::<u32>().prop_map(|tokens_max| Refusal::TooLong { tokens_max }),
        any::<u32>().prop_map(|vocab_size| Refusal::OutOfVocabulary { vocab_size }),
        Just(Refusal::NoWorker),
        Just(Refusal::Draining),
        Just(Refusal::WrongWorker),
        ".{0,20}".prop_map(|reason| Refusal::NoAdapter { reason }),
        (aim(), span(), span()).prop_map(|(aim, predicted, retry_after)| Refusal::Late {
            aim,
            predicted,
            retry_after
        }),
    ]
}

fn aim() -> impl Strategy<Value = SloMetric> {
    prop_oneof![
        Just(SloMetric::Ttft),
        Just(SloMetric::Tpot),
        Just(SloMetric::EndToEnd)
    ]
}
