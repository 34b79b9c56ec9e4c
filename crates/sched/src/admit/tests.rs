//! Tests of every reason for which an order is refused.

use super::*;
use crate::WorkerLimits;
use crate::test_worker::{ME, PEER, ROUTER, TestWorker, Want, handoff, limits};
use cleave_domain::{BlockRef, Capacity, HandoffTarget, Order, Role};

fn refusal(worker: &TestWorker) -> Option<Refusal> {
    match worker.reports.last() {
        Some((_, Report::Refused { refusal, .. })) => Some(refusal.clone()),
        _ => None,
    }
}

fn target(worker: cleave_domain::WorkerRef, present: u32, blocks: usize) -> HandoffTarget {
    HandoffTarget {
        worker,
        present,
        blocks: vec![BlockRef::default(); blocks],
        state: None,
    }
}

/// A prompt of 32 tokens that is handed on; why it is refused.
fn refusal_of(limits: WorkerLimits, target: HandoffTarget) -> Option<Refusal> {
    let mut worker = TestWorker::new(limits);
    worker.prefill(1, Want::tokens(32), target);
    refusal(&worker)
}

#[test]
fn a_prefill_needs_a_peer_with_room_for_the_prompt() {
    let of = |target| refusal_of(limits(), target);
    assert_eq!(of(target(PEER, 0, 2)), None);
    assert_eq!(of(target(PEER, 1, 1)), None);
    assert_eq!(of(target(PEER, 2, 0)), None);
    let wrong = Some(Refusal::WrongWorker);
    assert_eq!(of(target(PEER, 0, 1)), wrong, "one block is missing");
    assert_eq!(of(target(PEER, 3, 0)), wrong, "more than the prompt has");
    assert_eq!(of(target(ME, 0, 2)), wrong, "nothing is reserved here");
    let decodes = WorkerLimits {
        role: Role::Decode,
        ..limits()
    };
    assert_eq!(refusal_of(decodes, target(PEER, 0, 2)), wrong);
}

#[test]
fn a_prompt_runs_where_its_blocks_were_reserved() {
    let of = |change: fn(&mut HandoffTarget), router| {
        let mut worker = TestWorker::new(limits());
        let want = Want::tokens(32);
        let Report::Reserved { blocks, .. } = worker.reserve(1, want, ME) else {
            panic!("there is room");
        };
        let mut target = HandoffTarget {
            worker: ME,
            present: 0,
            blocks,
            state: None,
        };
        change(&mut target);
        let order = Order::Prefill(PrefillOrder {
            handoff: handoff(1),
            request: worker
                .brain
                .machines
                .sequences
                .get(handoff(1))
                .expect("it is reserved")
                .request
                .clone(),
            target,
            waited: Duration::ZERO,
            due: None,
        });
        worker.order(router, order);
        assert_eq!(
            worker.brain.load().sequences_running,
            worker.steps.len() as u32
        );
        refusal(&worker)
    };
    let wrong = Some(Refusal::WrongWorker);
    assert_eq!(of(|_| (), ROUTER), None);
    assert_eq!(of(|target| target.worker = PEER, ROUTER), wrong);
    assert_eq!(of(|_| (), RouterId(7)), wrong);
    assert_eq!(of(|target| target.present = 1, ROUTER), wrong);
    assert_eq!(of(|target| target.blocks.reverse(), ROUTER), wrong);
}

#[test]
fn a_prompt_of_another_worker_is_not_computed_here() {
    let mut worker = TestWorker::new(limits());
    let want = Want::tokens(32);
    let Report::Reserved { blocks, .. } = worker.reserve(1, want, PEER) else {
        panic!("there is room");
    };
    let target = HandoffTarget {
        worker: ME,
        present: 0,
        blocks,
        state: None,
    };
    worker.prefill(1, want, target);
    assert_eq!(refusal(&worker), Some(Refusal::WrongWorker));
    assert!(
        worker.brain.machines.sequences.contains(handoff(1)),
        "it is kept"
    );
}

#[test]
fn a_reservation_is_for_another_worker_that_may_write() {
    let of = |role, sender| {
        let mut worker = TestWorker::new(WorkerLimits { role, ..limits() });
        worker.reserve(1, Want::tokens(32), sender);
        refusal(&worker)
    };
    let wrong = Some(Refusal::WrongWorker);
    assert_eq!(of(Role::Decode, PEER), None);
    assert_eq!(of(Role::Prefill, PEER), wrong);
    assert_eq!(of(Role::Prefill, ME), None, "both halves are its own");
    let mut earlier = ME;
    earlier.incarnation = cleave_domain::Incarnation(0);
    assert_eq!(of(Role::Both, earlier), wrong);
    let mut worker = TestWorker::new(limits());
    worker.handle(crate::WorkerInput::Fenced { peer: PEER });
    worker.reserve(1, Want::tokens(32), PEER);
    assert_eq!(refusal(&worker), wrong, "it can reach nothing here");
}

#[test]
fn a_request_fits_the_vocabulary_and_the_context() {
    let of = |capacity: Capacity, want: Want| {
        let mut worker = TestWorker::new(WorkerLimits {
            capacity,
            ..limits()
        });
        worker.reserve(1, want, ME);
        refusal(&worker)
    };
    let capacity = limits().capacity;
    let too_long = |tokens_max| Some(Refusal::TooLong { tokens_max });
    assert_eq!(of(capacity, Want::tokens(999)), None);
    assert_eq!(of(capacity, Want::tokens(1000)), too_long(1000));
    assert_eq!(of(capacity, Want::tokens(0)), too_long(1000));
    let small = Capacity {
        blocks_count: 4,
        ..capacity
    };
    assert_eq!(of(small, Want::tokens(63)), None);
    assert_eq!(of(small, Want::tokens(64)), too_long(64));
    let done = Want {
        output: 0,
        ..Want::tokens(10)
    };
    assert_eq!(of(capacity, done), too_long(1000));
    let mut worker = TestWorker::new(WorkerLimits {
        vocab_size: 9,
        ..limits()
    });
    worker.reserve(1, Want::tokens(10), ME);
    let vocabulary = Some(Refusal::OutOfVocabulary { vocab_size: 9 });
    assert_eq!(refusal(&worker), vocabulary);
    worker.handle(crate::WorkerInput::Draining);
    worker.reserve(2, Want::tokens(9), ME);
    assert_eq!(refusal(&worker), Some(Refusal::Draining));
}

#[test]
fn a_full_queue_takes_no_further_order() {
    let mut limits = limits();
    (limits.queue_max, limits.capacity.slots_count) = (2, 1);
    let mut worker = TestWorker::new(limits.clone());
    for number in 0..3 {
        worker.reserve(number, Want::tokens(16), PEER);
        assert_eq!(refusal(&worker), None, "a slot, and two that wait");
    }
    let full = |millis| {
        let retry_after = Duration::from_millis(millis);
        Some(Refusal::QueueFull { retry_after })
    };
    worker.reserve(3, Want::tokens(16), PEER);
    assert_eq!(refusal(&worker), full(10));
    let mut worker = TestWorker::new(limits);
    for number in 0..3 {
        worker.prefill(number, Want::tokens(160), target(PEER, 0, 10));
        assert_eq!(refusal(&worker), None, "one runs, and two wait");
    }
    let took = Duration::from_millis(20);
    worker
        .brain
        .machines
        .steps
        .measure(cleave_domain::StepId(1), took);
    worker.prefill(3, Want::tokens(160), target(PEER, 0, 10));
    // 480 tokens are seven steps of 64, for two that wait.
    assert_eq!(refusal(&worker), full(60));
}

#[test]
fn blocks_are_reserved_for_the_expected_answer() {
    let free = |prompt, output| {
        let mut worker = TestWorker::new(limits());
        let want = Want {
            output,
            ..Want::tokens(prompt)
        };
        worker.reserve(1, want, ME);
        100 - worker.brain.load().blocks_free
    };
    // The last token drawn needs no room.
    assert_eq!([free(16, 1), free(16, 2), free(17, 1)], [1, 2, 2]);
    assert_eq!([free(16, 17), free(16, 18)], [2, 3]);
    assert_eq!(free(16, 100_000), 63, "no more than the context");
}

#[test]
fn a_repeated_order_is_noted_and_not_answered() {
    let mut worker = TestWorker::new(limits());
    let want = Want::tokens(32);
    worker.submit(1, want).expect("there is room");
    let reports_count = worker.reports.len();
    let repeated = |worker: &TestWorker| {
        let notes = worker.outputs.iter();
        let repeated = |output: &&crate::WorkerOutput| {
            matches!(
                output,
                crate::WorkerOutput::Note(WorkerNote::Repeated { .. })
            )
        };
        notes.filter(repeated).count()
    };
    worker.prefill(1, want, target(ME, 0, 2));
    assert_eq!(
        (worker.reports.len(), repeated(&worker)),
        (reports_count, 1)
    );
    worker.finish();
    let reports_count = worker.reports.len();
    worker.prefill(1, want, target(PEER, 0, 2));
    assert_eq!(
        (worker.reports.len(), repeated(&worker)),
        (reports_count, 2)
    );
}
