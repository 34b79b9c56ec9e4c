//! Workers that answer and make no progress.
//!
//! Owns: the failing over from them. Never: decides that a worker is stuck; it says so itself.
//! Invariant: nothing is placed on a stuck worker. A flight leaves one only for a place that it can have
//! at once, at most `moves_max` at a time, so that one long step does not become everybody's; after
//! `stuck_max` every flight leaves, and waits in the line if it must.

use crate::brain::Brain;
use crate::event::Note;
use crate::flight::Attempt;
use crate::legs::Parting;
use cleave_domain::{Failure, HandoffId, Progress, WorkerId, WorkerRef};

impl Brain {
    /// The worker says that its step takes too long.
    pub(crate) fn stuck(&mut self, worker: WorkerRef) {
        if !self.fleet.progresses(worker, Progress::Stuck) {
            return;
        }
        self.note(Note::WorkerStuck { worker });
        let until = self.now + self.limits.stuck_max;
        self.patience.insert((until, worker.worker));
        for handoff in self.fleet.sequences(worker) {
            // What was sealed may have landed: that is not taken back.
            let comes = |leg: &Attempt| leg.decode == worker && !leg.prefilled;
            if self.leg(handoff).is_some_and(comes) {
                self.part(worker, handoff, Parting::Cancel);
                self.move_broken(handoff, Failure::WorkerStuck);
            }
        }
        self.rescue();
    }

    /// It takes that back.
    pub(crate) fn moves_again(&mut self, worker: WorkerRef) {
        if self.fleet.progresses(worker, Progress::Moving) {
            self.stop_waiting_for(worker);
        }
    }

    pub(crate) fn stop_waiting_for(&mut self, worker: WorkerRef) {
        self.patience.retain(|(_, who)| *who != worker.worker);
    }

    /// Fails flights over from stuck workers while there is another place for them. One at a time, for
    /// a flight whose tokens are being counted has no place yet.
    pub(crate) fn rescue(&mut self) {
        for worker in self.fleet.stuck() {
            for handoff in self.fleet.handoffs(worker) {
                if self.counting > 0 {
                    return;
                }
                let under_way = self.rescued.values().filter(|from| **from == worker.worker);
                if under_way.count() >= self.limits.moves_max as usize {
                    break;
                }
                // A flight on its last failure is better off waiting for the worker.
                let flight = self.flights.get(&handoff.flight);
                let budget =
                    flight.is_some_and(|f| f.failures_counted() < self.limits.failures_max);
                if budget && self.hangs(worker, handoff) && self.find(handoff.flight).is_ok() {
                    self.fail(handoff, Failure::WorkerStuck, worker);
                    self.rescued.insert(handoff.flight, worker.worker);
                }
            }
        }
    }

    /// The worker has been stuck for too long.
    pub(crate) fn abandon(&mut self, worker: WorkerId) {
        let Some(worker) = self.fleet.life_of(worker) else {
            return;
        };
        for handoff in self.fleet.handoffs(worker) {
            if self.hangs(worker, handoff) {
                self.fail(handoff, Failure::WorkerStuck, worker);
            }
        }
    }

    /// Whether the flight gets nowhere while the worker does not.
    fn hangs(&self, worker: WorkerRef, handoff: HandoffId) -> bool {
        let waits_for = |a: &Attempt| {
            let sends = a.prefill == worker && !a.landed;
            a.finished.is_none() && (a.decode == worker || sends)
        };
        self.current(handoff).is_some_and(waits_for) && !self.is_sealed(handoff.flight)
    }
}
