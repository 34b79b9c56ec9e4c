//! Faults of the chaos test.
//!
//! Owns: each kind of fault, from its beginning until the fleet is complete again. Never: waits for
//! a time where it can wait for an event; where no event may come, it waits for an event or a
//! limit.

use crate::chaos::fleet::ChaosFleet;
use crate::chaos::load::LoadCounters;
use crate::chaos::proxy::{FLIPPED_BYTES_MIN, FaultProxy, LinkCondition};
use crate::chaos::rng::FaultRng;
use crate::harness::wait_for;
use serde_json::json;
use std::sync::atomic::Ordering;
use std::time::{Duration, Instant};

/// One kind of fault.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) enum FaultKind {
    /// SIGKILL, and a new start.
    Killed,
    /// SIGSTOP until the router gave the worker up, then SIGCONT.
    Stopped,
    /// SIGSTOP and SIGCONT before the router notices.
    Paused,
    /// SIGTERM, and a new start when it has left.
    DrainedBySignal,
    /// POST /admin/drain, and a new start when it has left.
    DrainedByCommand,
    /// Changed to another role, and back.
    RoleChanged,
    DataCut,
    DataHalfClosed,
    DataThrottled,
    DataDelayed,
    DataFrozen,
    /// A bit of a piece of KV is flipped.
    DataFlipped,
    StreamCut,
    StreamHalfClosed,
    StreamDelayed,
    /// The stream freezes: the router gives the worker up though it lives.
    StreamFrozen,
    /// A bit of a message or of its framing is flipped.
    StreamFlipped,
}

pub(crate) const KINDS: [(FaultKind, &str); 17] = [
    (FaultKind::Killed, "kill -9, restart"),
    (FaultKind::Stopped, "SIGSTOP until given up, SIGCONT"),
    (FaultKind::Paused, "short SIGSTOP, SIGCONT"),
    (FaultKind::DrainedBySignal, "SIGTERM drain, restart"),
    (FaultKind::DrainedByCommand, "POST /admin/drain, restart"),
    (FaultKind::RoleChanged, "POST /admin/role and back"),
    (FaultKind::DataCut, "worker to worker: cut"),
    (FaultKind::DataHalfClosed, "worker to worker: half-closed"),
    (FaultKind::DataThrottled, "worker to worker: throttled"),
    (FaultKind::DataDelayed, "worker to worker: delayed"),
    (FaultKind::DataFrozen, "worker to worker: frozen"),
    (FaultKind::DataFlipped, "worker to worker: a flipped bit"),
    (FaultKind::StreamCut, "worker to router: cut"),
    (FaultKind::StreamHalfClosed, "worker to router: half-closed"),
    (FaultKind::StreamDelayed, "worker to router: delayed"),
    (FaultKind::StreamFrozen, "worker to router: frozen"),
    (FaultKind::StreamFlipped, "worker to router: a flipped bit"),
];

/// All kinds in turn, in a random order and on random workers.
pub(crate) fn schedule(rng: &mut FaultRng, count: usize) -> Vec<(FaultKind, usize)> {
    let mut drawn = Vec::new();
    while drawn.len() < count {
        let mut round = KINDS.map(|(kind, _)| kind);
        rng.shuffle(&mut round);
        for kind in round {
            // Decode workers hold the streams, so they are hit more often.
            let worker_index = *rng.pick(&[0, 1, 2, 2, 3, 3, 4, 4]);
            let behind_proxy = match kind {
                FaultKind::DataCut
                | FaultKind::DataHalfClosed
                | FaultKind::DataThrottled
                | FaultKind::DataDelayed
                | FaultKind::DataFrozen => worker_index.min(3),
                // Only decode workers receive KV.
                FaultKind::DataFlipped => 2 + worker_index % 2,
                _ => worker_index,
            };
            drawn.push((kind, behind_proxy));
        }
    }
    drawn.truncate(count);
    drawn
}

/// Injects a fault, and returns when the fleet is complete again.
pub(crate) fn inject(
    fleet: &mut ChaosFleet,
    kind: FaultKind,
    worker_index: usize,
    counters: &LoadCounters,
) {
    match kind {
        FaultKind::Killed => {
            fleet.workers[worker_index].process().signal("KILL");
            fleet.workers[worker_index].process().wait();
            fleet.workers[worker_index].start();
        }
        FaultKind::Stopped => {
            fleet.workers[worker_index].process().signal("STOP");
            fleet.wait_lost(worker_index);
            fleet.workers[worker_index].process().signal("CONT");
        }
        FaultKind::Paused => {
            fleet.workers[worker_index].process().signal("STOP");
            wait_for_events_or_time(counters, 600, Duration::from_millis(300));
            fleet.workers[worker_index].process().signal("CONT");
        }
        FaultKind::DrainedBySignal => {
            fleet.workers[worker_index].process().signal("TERM");
            leave_and_return(fleet, worker_index);
        }
        FaultKind::DrainedByCommand => {
            let command = json!({"worker": fleet.workers[worker_index].name});
            let (status, answer) = fleet.client.post("/admin/drain", &command);
            assert_eq!(status, 202, "{answer}");
            leave_and_return(fleet, worker_index);
        }
        FaultKind::RoleChanged => change_role(fleet, worker_index, counters),
        FaultKind::DataCut => data_proxy(fleet, worker_index).cut(),
        FaultKind::DataHalfClosed => data_proxy(fleet, worker_index).half_close(),
        FaultKind::DataThrottled => hold_condition(
            data_proxy(fleet, worker_index),
            LinkCondition::Throttled(200_000),
            counters,
        ),
        FaultKind::DataDelayed => {
            hold_condition(data_proxy(fleet, worker_index), DELAYED_LINK, counters)
        }
        FaultKind::DataFrozen => hold_condition(
            data_proxy(fleet, worker_index),
            LinkCondition::Frozen,
            counters,
        ),
        FaultKind::DataFlipped => flip_a_bit(data_proxy(fleet, worker_index), counters),
        FaultKind::StreamCut => end_stream_and_wait(fleet, worker_index, FaultProxy::cut),
        FaultKind::StreamHalfClosed => {
            end_stream_and_wait(fleet, worker_index, FaultProxy::half_close)
        }
        FaultKind::StreamDelayed => hold_condition(
            &fleet.workers[worker_index].router_proxy,
            DELAYED_LINK,
            counters,
        ),
        FaultKind::StreamFrozen => {
            fleet.workers[worker_index]
                .router_proxy
                .set_condition(LinkCondition::Frozen);
            fleet.wait_lost(worker_index);
            fleet.workers[worker_index]
                .router_proxy
                .set_condition(LinkCondition::Normal);
        }
        FaultKind::StreamFlipped => flip_a_bit(&fleet.workers[worker_index].router_proxy, counters),
    }
    fleet.wait_whole();
}

const DELAYED_LINK: LinkCondition = LinkCondition::Delayed(Duration::from_millis(30));

fn data_proxy(fleet: &ChaosFleet, worker_index: usize) -> &FaultProxy {
    let proxy = fleet.workers[worker_index].data_proxy.as_ref();
    proxy.expect("the schedule chooses workers behind a proxy")
}

/// A draining process ends by itself; its status says that nothing was cut off.
fn leave_and_return(fleet: &mut ChaosFleet, worker_index: usize) {
    let worker = &mut fleet.workers[worker_index];
    let status = worker.process().wait();
    assert!(
        status.success(),
        "{} left with {status}: {}",
        worker.name,
        worker.logs()
    );
    worker.start();
}

fn change_role(fleet: &mut ChaosFleet, worker_index: usize, counters: &LoadCounters) {
    let (name, leg) = (
        fleet.workers[worker_index].name,
        fleet.workers[worker_index].leg,
    );
    let other = match leg {
        "decode" => "prefill",
        _ => "both",
    };
    for role in [other, leg] {
        let command = json!({"worker": name, "role": role});
        let (status, answer) = fleet.client.post("/admin/role", &command);
        assert_eq!(status, 202, "{answer}");
        wait_for_events_or_time(counters, 600, Duration::from_secs(2));
    }
}

/// Ends the stream to the router, and waits until the worker has connected again.
fn end_stream_and_wait(fleet: &ChaosFleet, worker_index: usize, end: fn(&FaultProxy)) {
    let joins = || fleet.router.logs().matches("worker joined").count();
    let before = joins();
    end(&fleet.workers[worker_index].router_proxy);
    wait_for("the worker's return", || (joins() > before).then_some(()));
}

/// Holds a link condition for a while.
fn hold_condition(proxy: &FaultProxy, condition: LinkCondition, counters: &LoadCounters) {
    proxy.set_condition(condition);
    wait_for_events_or_time(counters, 2000, Duration::from_millis(1500));
    proxy.set_condition(LinkCondition::Normal);
}

/// Flips a bit somewhere near the end of the next long piece, and waits for its consequences: the
/// end of the connection, or none.
fn flip_a_bit(proxy: &FaultProxy, counters: &LoadCounters) {
    let from_end = counters.events.load(Ordering::Relaxed) as usize % FLIPPED_BYTES_MIN;
    proxy.flip(from_end);
    wait_for("a flipped bit", || proxy.flipped().then_some(()));
    wait_for_events_or_time(counters, 2000, Duration::from_millis(1500));
}

/// Waits until clients have received this many more events, or for this long if none may come.
pub(crate) fn wait_for_events_or_time(counters: &LoadCounters, events: u64, limit: Duration) {
    let received = || counters.events.load(Ordering::Relaxed);
    let (from, began) = (received(), Instant::now());
    while received() < from.saturating_add(events) && began.elapsed() < limit {
        std::thread::park_timeout(Duration::from_millis(10));
    }
}
