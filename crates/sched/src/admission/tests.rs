//! Tests of every reason for which an order is refused.

use super::*;
use crate::WorkerLimits;
use crate::test_worker::{ME, PEER, TestWorker, Want, handoff, limits};
use cleave_domain::{BlockRef, Capacity, HandoffTarget, Role, SloMetric};

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
        window: None,
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
        window: None,
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
    assert_eq!(of(Role::Both, ME), wrong, "it is ordered to run instead");
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
        worker.run(1, want);
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
    worker.reserve(1, Want::tokens(10), PEER);
    let vocabulary = Some(Refusal::OutOfVocabulary { vocab_size: 9 });
    assert_eq!(refusal(&worker), vocabulary);
    worker.handle(crate::WorkerInput::Draining);
    worker.reserve(2, Want::tokens(9), PEER);
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
    let steps = &mut worker.brain.machines.steps;
    steps.measure(cleave_domain::StepId(1), took);
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
        worker.submit(1, want).expect("there is room");
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
    let load = worker.brain.load();
    worker.repeat_run(1, want);
    worker.prefill(1, want, target(PEER, 0, 2));
    assert_eq!(
        (worker.reports.len(), repeated(&worker)),
        (reports_count, 2)
    );
    assert_eq!((worker.brain.load(), worker.steps.len()), (load, 1));
    worker.finish();
    let reports_count = worker.reports.len();
    worker.repeat_run(1, want);
    worker.prefill(1, want, target(PEER, 0, 2));
    assert_eq!(
        (worker.reports.len(), repeated(&worker)),
        (reports_count, 4)
    );
    assert!(worker.brain.idle());
}

/// A worker of one role runs a request whole, whatever the role is.
#[test]
fn a_worker_of_any_role_runs_both_legs() {
    for role in [Role::Prefill, Role::Decode, Role::Both] {
        let mut worker = TestWorker::new(WorkerLimits { role, ..limits() });
        let want = Want::tokens(32);
        let running = Report::Running {
            handoff: handoff(1),
            present: 0,
        };
        assert_eq!(worker.run(1, want), running);
        assert_eq!(worker.steps.len(), 1, "its prompt runs at once");
        worker.finish();
        let released = Report::Released {
            handoff: handoff(1),
        };
        let ends = worker
            .reports
            .iter()
            .filter(|(_, report)| *report == released);
        assert_eq!(ends.count(), 1, "once for both legs");
    }
}

/// A worker that holds a request, and why it refuses to run a second one.
fn refused_run(limits: WorkerLimits, first: Want, second: Want) -> Option<Refusal> {
    let mut worker = TestWorker::new(limits);
    worker.submit(1, first).expect("there is room");
    let (load, deadline) = (worker.brain.load(), worker.brain.deadline());
    worker.run(2, second);
    let refusal = refusal(&worker)?;
    // It is unknown here as before: nothing is held, leased, run or remembered.
    assert_eq!(
        (worker.brain.load(), worker.brain.deadline()),
        (load, deadline)
    );
    assert!(!worker.brain.machines.sequences.contains(handoff(2)));
    assert!(!worker.brain.machines.admission().was_here(handoff(2)));
    assert_eq!(worker.steps.len(), 1);
    worker.finish();
    let about_second = |(_, report): &&(RouterId, Report)| {
        let handoff = handoff(2);
        *report == Report::Released { handoff }
    };
    assert_eq!(worker.reports.iter().filter(about_second).count(), 0);
    assert!(worker.brain.idle());
    Some(refusal)
}

#[test]
fn a_refused_order_to_run_leaves_nothing() {
    let of = |change: fn(&mut WorkerLimits), second: Want| {
        let mut limits = limits();
        change(&mut limits);
        refused_run(limits, Want::tokens(160), second)
    };
    let same = |_: &mut WorkerLimits| ();
    let retry_after = Duration::from_millis(10);
    assert_eq!(of(same, Want::tokens(32)), None, "it runs");
    assert_eq!(
        of(same, Want::tokens(1000)),
        Some(Refusal::TooLong { tokens_max: 1000 })
    );
    assert_eq!(
        of(|limits| limits.vocab_size = 500, Want::tokens(600)),
        Some(Refusal::OutOfVocabulary { vocab_size: 500 })
    );
    let full = |limits: &mut WorkerLimits| {
        (limits.queue_max, limits.capacity.slots_count) = (0, 1);
    };
    assert_eq!(
        of(full, Want::tokens(32)),
        Some(Refusal::QueueFull { retry_after })
    );
    let small = |limits: &mut WorkerLimits| limits.capacity.blocks_count = 11;
    assert_eq!(
        of(small, Want::tokens(32)),
        Some(Refusal::NoBlocks { retry_after })
    );
    let late = Want {
        due: Some(Duration::from_micros(100)),
        ..Want::tokens(32)
    };
    let aim = |refusal: Option<Refusal>| match refusal {
        Some(Refusal::Late { aim, .. }) => Some(aim),
        _ => None,
    };
    assert_eq!(aim(of(same, late)), Some(SloMetric::Ttft));
    let slow = Want {
        tpot: Some(Duration::from_micros(100)),
        due: Some(Duration::from_secs(60)),
        output: 9,
        ..Want::tokens(32)
    };
    assert_eq!(aim(of(same, slow)), Some(SloMetric::Tpot));
    // The conditions are asked in this order: queue, gap, first token, blocks.
    let both = Want {
        due: late.due,
        ..slow
    };
    assert_eq!(aim(of(same, both)), Some(SloMetric::Tpot));
    assert_eq!(of(full, both), Some(Refusal::QueueFull { retry_after }));
    assert_eq!(aim(of(small, late)), Some(SloMetric::Ttft));
}

/// A hand-off that was promised never to be written, and a worker that drains.
#[test]
fn an_order_to_run_of_an_abandoned_hand_off_is_refused() {
    let mut worker = TestWorker::new(limits());
    let stopped = EndedHandoff::StoppedBeforeStart;
    worker.brain.machines.peers.remember(handoff(1), stopped);
    worker.run(1, Want::tokens(32));
    assert_eq!(refusal(&worker), Some(Refusal::WrongWorker));
    worker.handle(crate::WorkerInput::Draining);
    worker.run(2, Want::tokens(32));
    assert_eq!(refusal(&worker), Some(Refusal::Draining));
    assert!(worker.brain.idle() && worker.steps.is_empty());
}

/// The order before there was one for both legs.
#[test]
fn orders_that_name_their_own_worker_are_refused() {
    let mut worker = TestWorker::new(limits());
    let want = Want::tokens(32);
    worker.reserve(1, want, ME);
    assert_eq!(refusal(&worker), Some(Refusal::WrongWorker));
    worker.prefill(1, want, target(ME, 0, 2));
    assert_eq!(refusal(&worker), Some(Refusal::WrongWorker));
    assert!(worker.brain.idle() && worker.steps.is_empty());
    assert_eq!(worker.brain.load().blocks_free, 100);
}

#[test]
fn an_order_to_run_reuses_all_but_the_last_token() {
    let mut worker = TestWorker::new(WorkerLimits {
        prefix_cache: true,
        ..limits()
    });
    worker.submit(1, Want::tokens(32)).expect("there is room");
    worker.finish();
    let running = Report::Running {
        handoff: handoff(2),
        present: 1,
    };
    assert_eq!(worker.run(2, Want::tokens(32)), running);
    let tokens: Vec<u32> = worker.steps[0].segments.iter().map(|s| s.len).collect();
    assert_eq!(tokens, [16], "the second block gives the first token");
}
