//! A router that stands still under load.
//!
//! Owns: the one fault of the router itself that no worker and no client may notice but by a pause.

use crate::chaos::StopLoadOnDrop;
use crate::chaos::answered;
use crate::chaos::faults::wait_for_events_or_time;
use crate::chaos::fleet::{ChaosFleet, SilenceLimits};
use crate::chaos::load::{self, LoadLedger};
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
    let asks = answered(bodies.into_iter().step_by(4).collect());
    let runtime = tokio::runtime::Runtime::new().expect("a runtime");
    let fleet = ChaosFleet::start_with(runtime.handle(), SILENCE);
    let ledger = LoadLedger::default();
    std::thread::scope(|scope| {
        for seed in 0..CLIENTS {
            let dice = FaultRng::new(seed as u64);
            let (base, asks, ledger) = (&fleet.base, &asks, &ledger);
            scope.spawn(move || load::run_client(base, asks, ledger, dice));
        }
        // Dropped last, also by a panic, so that the clients end.
        let _over = StopLoadOnDrop(&ledger);
        for _ in 0..2 {
            crate::chaos::wait_for_events(&ledger, 400);
            fleet.router.signal("STOP");
            // No event comes from a router that stands still.
            wait_for_events_or_time(&ledger, u64::MAX, STOPPED);
            fleet.router.signal("CONT");
            crate::chaos::wait_for_events(&ledger, 400);
        }
    });
    let logs = fleet.router.logs();
    assert!(!logs.contains("worker lost"), "{logs}");
    let joined = logs.matches("worker joined").count();
    assert_eq!(joined, fleet.workers.len(), "{logs}");
    let failures = ledger.failures.lock().expect("no panic holds it");
    assert!(failures.is_empty(), "{failures:?}");
}
