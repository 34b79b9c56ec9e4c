//! Legs: their orders, their cancellation, and the release of the last one.
//!
//! Owns: `Cancel`. Never: decides that an attempt is over.
//! Invariant: a leg that was ordered is cancelled, or has reported its end, before the router
//! forgets it; a leg's claims count until it reports `Released`.

use crate::event::RouterNote;
use crate::fleet::RouterFleet;
use crate::flight::releases::LegReleases;
use crate::flight::state::RouterFlights;
use crate::outputs::RouterContext;
use cleave_domain::{Failure, FlightId, HandoffId, Order, WorkerRef};

/// How a leg ends.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum LegRelease {
    /// The worker must be ordered to cancel.
    Cancel,
    /// The worker knows: it reported the end itself, and will report `Released`.
    AlreadyEnded,
}

/// The rules of legs, over the flights that have them and the workers that serve them.
#[derive(Debug)]
pub(crate) struct LegRules<'a> {
    pub(crate) context: RouterContext<'a>,
    pub(crate) flights: &'a mut RouterFlights,
    pub(crate) fleet: &'a mut RouterFleet,
    pub(crate) releases: &'a mut LegReleases,
}

impl LegRules<'_> {
    pub(crate) fn note(&mut self, note: RouterNote) {
        self.context.note(note);
    }

    pub(crate) fn send_order(&mut self, worker: WorkerRef, order: Order) {
        self.fleet.send_order(worker, order, &mut self.context);
    }

    /// The same rules, borrowed for others above them.
    pub(crate) fn reborrow(&mut self) -> LegRules<'_> {
        LegRules {
            context: self.context.reborrow(),
            flights: self.flights,
            fleet: self.fleet,
            releases: self.releases,
        }
    }

    /// Records that the attempt under way failed.
    pub(crate) fn clock_lost(&mut self, id: FlightId) {
        if let Some(flight) = self.flights.get_mut(id) {
            flight.timestamps.attempt_lost(self.context.now);
        }
    }

    /// Ends every leg of the attempts under way; `why` is the failure that is noted for a move
    /// among them.
    pub(crate) fn drop_legs(&mut self, id: FlightId, why: Failure) {
        let leg = self.flights.take_move(id).and_then(|moving| moving.leg);
        let Some(flight) = self.flights.get(id) else {
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
            self.fleet.end_lease(worker, handoff);
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
            let own = self.flights.current(handoff).map(|a| a.handoff.flight);
            self.releases.offer_room(worker, own);
        }
    }

    /// Counts a released leg; the last one of a cancelled flight ends its leaving.
    pub(crate) fn leg_closed(&mut self, flight: FlightId) {
        self.releases
            .leg_closed(flight, self.fleet, &mut self.context);
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::fixtures::{FLIGHT, LegsFixture, handoff, worker};

    #[test]
    fn dropped_legs_are_cancelled_or_give_up_their_room() {
        let mut placed = LegsFixture::placed();
        placed.legs().drop_legs(FLIGHT, Failure::Rejected);
        let cancel = Order::Cancel {
            handoff: handoff(0),
        };
        assert_eq!(placed.orders(), [(worker(2), cancel)]);
        // The decode worker holds its claim until it reports; the other one had no order.
        let claimed =
            |placed: &LegsFixture, number| placed.fleet.claim(worker(number), handoff(0)).is_some();
        assert!(!claimed(&placed, 1) && claimed(&placed, 2));
        let room = placed.releases.take_room();
        assert_eq!(room, Some((worker(1), Some(FLIGHT))));
        placed.legs().drop_legs(FLIGHT, Failure::Rejected);
        assert_eq!(placed.orders(), [], "a leg is cancelled once");
    }

    #[test]
    fn a_worker_that_ended_its_leg_gets_no_cancel() {
        let mut placed = LegsFixture::placed();
        let ended = LegRelease::AlreadyEnded;
        placed.legs().release_leg(worker(2), handoff(0), ended);
        assert_eq!(placed.orders(), []);
        let claim = placed.fleet.claim(worker(2), handoff(0)).unwrap();
        assert!(!claim.renewed, "its lease is renewed no more");
    }

    #[test]
    fn orders_are_counted_at_their_worker() {
        let mut placed = LegsFixture::placed();
        let orders = |placed: &LegsFixture| placed.fleet.get(worker(2)).unwrap().orders;
        assert_eq!(orders(&placed), 0);
        placed.legs().send_order(worker(2), Order::Drain);
        placed.legs().send_order(worker(2), Order::Drain);
        assert_eq!((orders(&placed), placed.orders().len()), (2, 2));
    }
}
