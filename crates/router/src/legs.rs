//! Legs: their cancellation, and the release of the last one.
//!
//! Owns: `Cancel`, and the way of a client's leaving. Never: decides that an attempt is over.
//! Invariant: a leg that was ordered is cancelled, or has reported its end, before the router
//! forgets it; a leg's claims count until it reports `Released`.

use crate::brain::RouterBrain;
use crate::event::{CancelReason, RouterNote};
use crate::flight::FlightAttempt;
use crate::outputs::RouterContext;
use cleave_domain::{Ending, Failure, FlightId, HandoffId, Order, WorkerRef};

/// How a leg ends.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum LegRelease {
    /// The worker must be ordered to cancel.
    Cancel,
    /// The worker knows: it reported the end itself, and will report `Released`.
    AlreadyEnded,
}

impl RouterBrain {
    /// Handles the cancel of a client.
    pub(crate) fn cancelled(&mut self, id: FlightId, why: CancelReason) {
        let Some(flight) = self.flights.get(&id) else {
            // It ended while the client was leaving.
            return;
        };
        let stage = flight.cancel_stage();
        self.drop_legs(id, Failure::Rejected);
        let mut cx = RouterContext {
            now: self.now,
            outputs: &mut self.outputs,
        };
        self.releases.cancel(id, stage, &self.fleet, &mut cx);
        self.end_with(id, Ending::Cancelled, None, why);
    }

    /// Ends a flight whose client is connected but has not read for too long.
    pub(crate) fn reader_timed_out(&mut self, id: FlightId) {
        self.drop_legs(id, Failure::SlowReader);
        self.end(id, Ending::Failed(Failure::SlowReader));
    }

    pub(crate) fn current(&self, handoff: HandoffId) -> Option<&FlightAttempt> {
        let attempt = self.flights.get(&handoff.flight)?.attempt()?;
        (attempt.handoff == handoff).then_some(attempt)
    }

    /// The attempt to which a flight moves.
    pub(crate) fn leg(&self, handoff: HandoffId) -> Option<&FlightAttempt> {
        let leg = self.flights.get(&handoff.flight)?.leg()?;
        (leg.handoff == handoff).then_some(leg)
    }

    /// The attempt that moved here from `handoff` and whose sender has not reported its last token
    /// yet.
    pub(crate) fn successor(&self, worker: WorkerRef, handoff: HandoffId) -> Option<HandoffId> {
        let attempt = self.flights.get(&handoff.flight)?.attempt()?;
        let waits = attempt.of == Some(handoff) && !attempt.prefilled;
        (waits && attempt.prefill.worker == worker.worker).then_some(attempt.handoff)
    }

    /// Ends every leg of the attempts under way; `why` is the failure that is noted for a move
    /// among them.
    pub(crate) fn drop_legs(&mut self, id: FlightId, why: Failure) {
        let leg = self.take_move(id).and_then(|moving| moving.leg);
        let Some(flight) = self.flights.get(&id) else {
            return;
        };
        if let Some(attempt) = flight.attempt() {
            let (handoff, sending) = (attempt.handoff, attempt.sending());
            let (decode, prefill) = (attempt.decode, attempt.prefill);
            self.release_leg(decode, handoff, LegRelease::Cancel);
            self.release_leg(prefill, sending, LegRelease::Cancel);
        }
        if let Some(leg) = leg {
            self.release_leg(leg.decode, leg.handoff, LegRelease::Cancel);
            self.note(RouterNote::MigrationAborted {
                handoff: leg.handoff,
                failure: why,
            });
        }
    }

    pub(crate) fn release_leg(
        &mut self,
        worker: WorkerRef,
        handoff: HandoffId,
        release: LegRelease,
    ) {
        let Some(claim) = self.fleet.claim(worker, handoff).copied() else {
            return;
        };
        if !claim.ordered {
            self.drop_claim(worker, handoff);
            return;
        }
        if claim.renewed {
            self.fleet.change(worker, handoff, |p| p.renewed = false);
            if release == LegRelease::Cancel {
                self.send_order(worker, Order::Cancel { handoff });
            }
        }
    }

    /// Drops a claim without the worker's `Released`: the room is offered to waiting flights at the
    /// end of this fact.
    pub(crate) fn drop_claim(&mut self, worker: WorkerRef, handoff: HandoffId) {
        if self.fleet.release(worker, handoff).is_some() {
            self.leg_closed(handoff.flight);
            let own = self.current(handoff).map(|a| a.handoff.flight);
            self.releases.offer_room(worker, own);
        }
    }

    pub(crate) fn leg_closed(&mut self, flight: FlightId) {
        let mut cx = RouterContext {
            now: self.now,
            outputs: &mut self.outputs,
        };
        self.releases.leg_closed(flight, &self.fleet, &mut cx);
    }
}
