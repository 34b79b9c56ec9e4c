//! Legs: letting go of them, and knowing when the last is gone.
//!
//! Owns: `Cancel`, and the way of a client's leaving. Never: decides that an attempt is over.
//! Invariant: a leg that was told of a hand-off is told to cancel it, or has said that it is over,
//! before the router forgets it; what a leg holds is counted until it says `Released`.

use crate::brain::Brain;
use crate::event::{CancelReason, CancelStage, Note};
use crate::flight::Attempt;
use cleave_domain::{Ending, Failure, FlightId, HandoffId, Order, Time, WorkerRef};
use std::time::Duration;

/// How a leg is let go.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Parting {
    /// It must be told.
    Cancel,
    /// It knows: it said so itself, and will say `Released`.
    Known,
}

/// A cancelled flight whose legs are not all released.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Leaving {
    pub(crate) since: Time,
    pub(crate) stage: CancelStage,
}

impl Brain {
    /// The client is gone.
    pub(crate) fn cancelled(&mut self, id: FlightId, why: CancelReason) {
        let Some(flight) = self.flights.get(&id) else {
            // It ended while the client was leaving.
            return;
        };
        let stage = flight.cancel_stage();
        self.drop_legs(id, Failure::Rejected);
        if self.fleet.legs_open(id) > 0 {
            let since = self.now;
            self.leaving.insert(id, Leaving { since, stage });
        } else {
            self.note(Note::CancelFreed {
                flight: id,
                took: Duration::ZERO,
                stage,
            });
        }
        self.end_with(id, Ending::Cancelled, (None, why));
    }

    /// The client is there, and takes nothing.
    pub(crate) fn reader_stayed_away(&mut self, id: FlightId) {
        self.drop_legs(id, Failure::SlowReader);
        self.end(id, Ending::Failed(Failure::SlowReader));
    }

    pub(crate) fn current(&self, handoff: HandoffId) -> Option<&Attempt> {
        let attempt = self.flights.get(&handoff.flight)?.attempt()?;
        (attempt.handoff == handoff).then_some(attempt)
    }

    /// The attempt to which a flight moves.
    pub(crate) fn leg(&self, handoff: HandoffId) -> Option<&Attempt> {
        let leg = self.flights.get(&handoff.flight)?.leg()?;
        (leg.handoff == handoff).then_some(leg)
    }

    /// The attempt that moved here from `handoff` and whose sender has not said its last word.
    pub(crate) fn heir(&self, worker: WorkerRef, handoff: HandoffId) -> Option<HandoffId> {
        let attempt = self.flights.get(&handoff.flight)?.attempt()?;
        let waits = attempt.of == Some(handoff) && !attempt.prefilled;
        (waits && attempt.prefill.worker == worker.worker).then_some(attempt.handoff)
    }

    /// Lets go of every leg of the attempts under way; `why` is what a move among them is cut short by.
    pub(crate) fn drop_legs(&mut self, id: FlightId, why: Failure) {
        let leg = self.take_move(id).and_then(|moving| moving.leg);
        let Some(flight) = self.flights.get(&id) else {
            return;
        };
        if let Some(attempt) = flight.attempt() {
            let (handoff, sending) = (attempt.handoff, attempt.sending());
            let (decode, prefill) = (attempt.decode, attempt.prefill);
            self.part(decode, handoff, Parting::Cancel);
            self.part(prefill, sending, Parting::Cancel);
        }
        if let Some(leg) = leg {
            self.part(leg.decode, leg.handoff, Parting::Cancel);
            self.note(Note::Stayed {
                handoff: leg.handoff,
                failure: why,
            });
        }
    }

    pub(crate) fn part(&mut self, worker: WorkerRef, handoff: HandoffId, parting: Parting) {
        let Some(promise) = self.fleet.promised(worker, handoff).copied() else {
            return;
        };
        if !promise.told {
            self.let_go(worker, handoff);
            return;
        }
        if promise.live {
            self.fleet.change(worker, handoff, |p| p.live = false);
            if parting == Parting::Cancel {
                self.tell(worker, Order::Cancel { handoff });
            }
        }
    }

    /// A promise ends without the worker's `Released`: what it held there is free for others, who are
    /// looked at when this fact is done with.
    pub(crate) fn let_go(&mut self, worker: WorkerRef, handoff: HandoffId) {
        if self.fleet.release(worker, handoff).is_some() {
            self.leg_closed(handoff.flight);
            let own = self.current(handoff).map(|a| a.handoff.flight);
            self.freed.insert((worker, own));
        }
    }

    /// One leg less; the last one of a cancelled flight ends its leaving.
    pub(crate) fn leg_closed(&mut self, flight: FlightId) {
        if self.fleet.legs_open(flight) > 0 {
            return;
        }
        if let Some(Leaving { since, stage }) = self.leaving.remove(&flight) {
            let took = self.now.since(since);
            self.note(Note::CancelFreed {
                flight,
                took,
                stage,
            });
        }
    }
}
