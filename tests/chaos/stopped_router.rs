//! A router that stands still under load.
//!
//! Owns: the one fault of the router itself that no worker and no client may notice but by a pause.

use crate::chaos::StopLoadOnDrop;
use crate::chaos::answered;
use crate::chaos::faults::wait_for_events_or_time;
use crate::chaos::fleet::{ChaosFleet, SilenceLimits};
use crate::chaos::load::{self, LoadCounters};
use crate::chaos::rng::FaultRng;
use std::time::Duration;

/// The router counts a worker as lost after less than it stands still; the workers wait longer.
const SILENCE: SilenceLimits = SilenceLimits {
    router: "2",
    workers: "30",
};
const STOPPED: Duration = Duration::from_millis(3500);
const CLIENTS: usize = 8;

/// A process that was stopped itself cannot tell whose silence it was.
#[test]
fn a_busy_router_that_was_stopped_loses_no_worker() {
    // Few questions are enough, because each is asked many times.
    let bodies = load::bodies(&mut FaultRng::new(3));
    let asks = answered(bodies.into_iter().step_by(4).collect(), &[]);
    let runtime = tokio::runtime::Runtime::new().expect("a runtime");
    let fleet = ChaosFleet::start_with(runtime.handle(), SILENCE);
    let counters = LoadCounters::default();
    std::thread::scope(|scope| {
        for seed in 0..CLIENTS {
            let rng = FaultRng::new(seed as u64);
            let (base, asks, counters) = (&fleet.base, &asks, &counters);
            scope.spawn(move || load::run_client(base, asks, counters, rng));
        }
        // Dropped last, also by a panic, so that the clients end.
        let _over = StopLoadOnDrop(&counters);
        for _ in 0..2 {
            crate::chaos::wait_for_events(&counters, 400);
            fleet.router.signal("STOP");
            // No event comes from a router that stands still.
            wait_for_events_or_time(&counters, u64::MAX, STOPPED);
            fleet.router.signal("CONT");
            crate::chaos::wait_for_events(&counters, 400);
        }
    });
    let logs = fleet.router.logs();
    assert!(!logs.contains("worker lost"), "{logs}");
    let joined = logs.matches("worker joined").count();
    assert_eq!(joined, fleet.workers.len(), "{logs}");
    let failures = counters.failures.lock().expect("no panic holds it");
    assert!(failures.is_empty(), "{failures:?}");
}
