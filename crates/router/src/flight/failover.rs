//! Failover from workers that answer and make no progress.
//!
//! Owns: the failover. Never: decides that a worker is stuck; the worker reports it itself.
//! Invariant: nothing is placed on a stuck worker. A flight leaves one only for a place that is
//! free at once, at most `moves_max` at a time, so that one long step does not disturb the whole
//! fleet; after `stuck_max` every flight leaves, and waits in the queue if necessary.

use crate::flight::resume::FlightRecovery;
use crate::flight::state::{FlightAttempt, RouterFlights};
use cleave_domain::{Failure, HandoffId, WorkerId, WorkerRef};

impl FlightRecovery<'_> {
    /// Fails flights over from stuck workers while there is another place for them. One at a time,
    /// since a flight whose tokens are being counted has no place yet.
    pub(crate) fn fail_over_stuck(&mut self) {
        let moves_max = self.legs().context.limits.moves_max as usize;
        for worker in self.legs().fleet.stuck() {
            for handoff in self.legs().fleet.handoffs(worker) {
                let flights = &self.legs().flights;
                if flights.counting() > 0 {
                    return;
                }
                if flights.failing_over_from(worker.worker) >= moves_max {
                    break;
                }
                if self.may_fail_over(worker, handoff) {
                    self.fail(handoff, Failure::WorkerStuck, worker);
                    self.legs().flights.fail_over(handoff.flight, worker.worker);
                }
            }
        }
    }

    /// Whether the flight depends on the stuck worker, and another has room for it.
    fn may_fail_over(&mut self, worker: WorkerRef, handoff: HandoffId) -> bool {
        let legs = self.legs();
        let flight = legs.flights.get(handoff.flight);
        let failures_max = legs.context.limits.failures_max;
        // A flight without failures left does better to wait for the worker.
        let has_budget = flight.is_some_and(|f| f.failures.counted() < failures_max);
        has_budget
            && hangs(legs.flights, worker, handoff)
            && self.admission.find(handoff.flight).is_ok()
    }

    /// Fails over every flight of a worker that has been stuck for too long.
    pub(crate) fn abandon(&mut self, worker: WorkerId) {
        let Some(worker) = self.legs().fleet.incarnation_of(worker) else {
            return;
        };
        for handoff in self.legs().fleet.handoffs(worker) {
            if hangs(self.legs().flights, worker, handoff) {
                self.fail(handoff, Failure::WorkerStuck, worker);
            }
        }
    }
}

/// Whether the flight depends on the worker's progress.
fn hangs(flights: &RouterFlights, worker: WorkerRef, handoff: HandoffId) -> bool {
    let waits_for = |a: &FlightAttempt| {
        let sends = a.prefill == worker && !a.landed;
        a.finished.is_none() && (a.decode == worker || sends)
    };
    flights.current(handoff).is_some_and(waits_for) && !flights.is_sealed(handoff.flight)
}
