//! Failover from workers that answer and make no progress.
//!
//! Owns: the failover. Never: decides that a worker is stuck; the worker reports it itself.
//! Invariant: nothing is placed on a stuck worker. A flight leaves one only for a place that is
//! free at once, at most `moves_max` at a time, so that one long step does not disturb the whole
//! fleet; after `stuck_max` every flight leaves, and waits in the queue if necessary.

use crate::brain::RouterBrain;
use crate::event::RouterNote;
use crate::flight::FlightAttempt;
use crate::legs::LegRelease;
use cleave_domain::{Failure, HandoffId, StepProgress, WorkerId, WorkerRef};

impl RouterBrain {
    /// Handles a worker's report that its step takes too long.
    pub(crate) fn stuck(&mut self, worker: WorkerRef) {
        if !self.fleet.set_progress(worker, StepProgress::Stuck) {
            return;
        }
        self.note(RouterNote::WorkerStuck { worker });
        let until = self.now + self.limits.stuck_max;
        self.stuck_deadlines.begin(worker.worker, until);
        for handoff in self.fleet.sequences(worker) {
            // A sealed move may have landed and cannot be taken back.
            let arrives = |leg: &FlightAttempt| leg.decode == worker && !leg.prefilled;
            if self.leg(handoff).is_some_and(arrives) {
                self.release_leg(worker, handoff, LegRelease::Cancel);
                self.move_broken(handoff, Failure::WorkerStuck);
            }
        }
        self.fail_over_stuck();
    }

    /// Handles the report that the step has ended after all.
    pub(crate) fn moves_again(&mut self, worker: WorkerRef) {
        if self.fleet.set_progress(worker, StepProgress::Moving) {
            self.stop_waiting_for(worker);
        }
    }

    pub(crate) fn stop_waiting_for(&mut self, worker: WorkerRef) {
        self.stuck_deadlines.end(worker.worker);
    }

    /// Fails flights over from stuck workers while there is another place for them. One at a time,
    /// since a flight whose tokens are being counted has no place yet.
    pub(crate) fn fail_over_stuck(&mut self) {
        for worker in self.fleet.stuck() {
            for handoff in self.fleet.handoffs(worker) {
                if self.counting_flights > 0 {
                    return;
                }
                let failing_over = self
                    .failing_over
                    .values()
                    .filter(|from| **from == worker.worker);
                if failing_over.count() >= self.limits.moves_max as usize {
                    break;
                }
                // A flight without failures left does better to wait for the worker.
                let flight = self.flights.get(&handoff.flight);
                let budget =
                    flight.is_some_and(|f| f.failures_counted() < self.limits.failures_max);
                if budget && self.hangs(worker, handoff) && self.find(handoff.flight).is_ok() {
                    self.fail(handoff, Failure::WorkerStuck, worker);
                    self.failing_over.insert(handoff.flight, worker.worker);
                }
            }
        }
    }

    /// Fails over every flight of a worker that has been stuck for too long.
    pub(crate) fn abandon(&mut self, worker: WorkerId) {
        let Some(worker) = self.fleet.incarnation_of(worker) else {
            return;
        };
        for handoff in self.fleet.handoffs(worker) {
            if self.hangs(worker, handoff) {
                self.fail(handoff, Failure::WorkerStuck, worker);
            }
        }
    }

    /// Whether the flight depends on the worker's progress.
    fn hangs(&self, worker: WorkerRef, handoff: HandoffId) -> bool {
        let waits_for = |a: &FlightAttempt| {
            let sends = a.prefill == worker && !a.landed;
            a.finished.is_none() && (a.decode == worker || sends)
        };
        self.current(handoff).is_some_and(waits_for) && !self.is_sealed(handoff.flight)
    }
}
