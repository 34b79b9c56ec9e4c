//! Tests of when the blocks of a hand-off that is over go.

use crate::test_worker::{PEER, ROUTER, TestWorker, Want, handoff, limits};
use crate::{PoolWriter, WorkerInput, WorkerLimits};
use cleave_domain::{HandoffId, Order, Report, RouterId, WorkerId};

fn released(worker: &TestWorker) -> Vec<HandoffId> {
    let reports = worker.reports.iter();
    let released = reports.filter_map(|(_, report)| match report {
        Report::Released { handoff } => Some(*handoff),
        _ => None,
    });
    released.collect()
}

fn cancel(worker: &mut TestWorker, router: RouterId, number: u64) {
    let handoff = handoff(number);
    worker.order(router, Order::Cancel { handoff });
}

// Invariant: I3, I5.
#[test]
fn blocks_in_a_step_are_freed_after_the_step() {
    let mut worker = TestWorker::new(limits());
    worker.submit(1, Want::tokens(160)).expect("there is room");
    cancel(&mut worker, RouterId(9), 1);
    assert_eq!(worker.brain.load().sequences_running, 1, "not its own");
    cancel(&mut worker, ROUTER, 1);
    assert_eq!(
        (released(&worker), worker.brain.load().blocks_free),
        (vec![], 90)
    );
    worker.end_step();
    assert_eq!(released(&worker), [handoff(1)]);
    assert_eq!(worker.brain.load().blocks_free, 100);
    cancel(&mut worker, ROUTER, 1);
    assert_eq!(released(&worker).len(), 1, "once");
}

// Invariant: I5.
#[test]
fn a_cancel_right_after_an_order_to_run_frees_everything() {
    let mut one_slot = limits();
    one_slot.capacity.slots_count = 1;
    let mut worker = TestWorker::new(one_slot);
    worker.submit(1, Want::tokens(32)).expect("there is room");
    worker.submit(2, Want::tokens(32)).expect("it waits");
    for number in [1, 2, 1] {
        cancel(&mut worker, ROUTER, number);
    }
    assert_eq!(released(&worker), [handoff(2)], "it is in no step");
    worker.end_step();
    assert_eq!(released(&worker), [handoff(2), handoff(1)], "once each");
    assert_eq!(worker.brain.load().blocks_free, 100);
    assert!(worker.brain.idle() && worker.brain.deadline().is_none());
}

// Invariant: I21.
#[test]
fn a_fenced_sender_frees_its_own_blocks_alone() {
    let mut worker = TestWorker::new(WorkerLimits {
        writer: PoolWriter::Sender,
        ..limits()
    });
    let mut other = PEER;
    other.worker = WorkerId(3);
    for (number, sender) in [(1, PEER), (2, other)] {
        worker.reserve(number, Want::tokens(160), sender);
    }
    worker.submit(3, Want::tokens(160)).expect("there is room");
    for number in 1..=3 {
        cancel(&mut worker, ROUTER, number);
    }
    worker.end_step();
    // Both senders may still write to theirs.
    assert_eq!(released(&worker), [handoff(3)]);
    assert_eq!(worker.brain.load().blocks_free, 80);
    worker.handle(WorkerInput::Fenced { peer: PEER });
    assert_eq!(released(&worker), [handoff(3), handoff(1)]);
    assert_eq!(worker.brain.load().blocks_free, 90);
    worker.handle(WorkerInput::Fenced { peer: other });
    assert_eq!(worker.brain.load().blocks_free, 100);
}

// Invariant: I8.
#[test]
fn a_lost_router_takes_only_its_own_sequences() {
    let mut worker = TestWorker::new(limits());
    worker.reserve(1, Want::tokens(32), PEER);
    worker.handle(WorkerInput::RouterLost {
        router: RouterId(9),
    });
    assert_eq!(worker.brain.load().blocks_free, 98);
    worker.handle(WorkerInput::RouterLost { router: ROUTER });
    assert_eq!(worker.brain.load().blocks_free, 100);
}

// Invariant: I5, I8.
#[test]
fn an_expired_lease_ends_a_hand_off() {
    let mut worker = TestWorker::new(limits());
    worker.reserve(1, Want::tokens(32), PEER);
    let lease = worker.brain.limits().lease;
    let renew = |worker: &mut TestWorker, router| {
        let handoffs = vec![handoff(1)];
        worker.order(router, Order::Renew { handoffs });
    };
    let begun = worker.now;
    worker.now = begun + lease / 2;
    renew(&mut worker, ROUTER);
    worker.now = begun + lease;
    renew(&mut worker, RouterId(9));
    assert_eq!(released(&worker), []);
    worker.now = begun + lease / 2 + lease;
    worker.handle(WorkerInput::Woke);
    assert_eq!(released(&worker), [handoff(1)]);
}
