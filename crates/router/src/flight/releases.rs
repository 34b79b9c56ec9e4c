//! Legs that are given up: room that is offered to others, and cancelled flights that still leave.
//!
//! Owns: rooms dropped while the present input is handled, and the cancelled flights whose legs are
//! not all released. Never: cancels a leg, or places a flight.
//! Invariant: room is offered within the input that freed it; a cancelled flight is listed exactly
//! as long as a leg of it is open, and the release of the last one is noted once.

use crate::event::{CancelStage, RouterNote};
use crate::fleet::RouterFleet;
use crate::outputs::RouterContext;
use cleave_domain::{FlightId, Time, WorkerRef};
use std::collections::{BTreeMap, BTreeSet};
use std::time::Duration;

#[derive(Clone, Debug, Default)]
pub(crate) struct LegReleases {
    /// Rooms, and the flights that gave them up.
    rooms: BTreeSet<(WorkerRef, Option<FlightId>)>,
    leaving: BTreeMap<FlightId, CancelledFlight>,
}

/// A cancelled flight whose legs are not all released.
#[derive(Clone, Copy, Debug)]
struct CancelledFlight {
    since: Time,
    stage: CancelStage,
}

impl LegReleases {
    /// Remembers the room of a claim that was dropped, and the flight that gave it up.
    pub(crate) fn offer_room(&mut self, worker: WorkerRef, flight: Option<FlightId>) {
        self.rooms.insert((worker, flight));
    }

    pub(crate) fn take_room(&mut self) -> Option<(WorkerRef, Option<FlightId>)> {
        self.rooms.pop_first()
    }

    /// Records the cancel of a flight, after its legs were ordered to end.
    pub(crate) fn cancel(
        &mut self,
        flight: FlightId,
        stage: CancelStage,
        fleet: &RouterFleet,
        context: &mut RouterContext,
    ) {
        if fleet.legs_open(flight) > 0 {
            let since = context.now;
            self.leaving
                .insert(flight, CancelledFlight { since, stage });
        } else {
            context.note(RouterNote::CancelFreed {
                flight,
                took: Duration::ZERO,
                stage,
            });
        }
    }

    /// Counts a released leg; the last one of a cancelled flight ends its leaving.
    pub(crate) fn leg_closed(
        &mut self,
        flight: FlightId,
        fleet: &RouterFleet,
        context: &mut RouterContext,
    ) {
        if fleet.legs_open(flight) > 0 {
            return;
        }
        if let Some(CancelledFlight { since, stage }) = self.leaving.remove(&flight) {
            let took = context.now.since(since);
            context.note(RouterNote::CancelFreed {
                flight,
                took,
                stage,
            });
        }
    }

    /// Each leaving flight, and how far it had come.
    pub(crate) fn stages(&self) -> impl ExactSizeIterator<Item = (&FlightId, CancelStage)> {
        let leaving = self.leaving.iter();
        leaving.map(|(flight, cancelled)| (flight, cancelled.stage))
    }

    pub(crate) fn check(&self, fleet: &RouterFleet) {
        assert!(
            self.rooms.is_empty(),
            "released room was not offered to waiting flights"
        );
        for flight in self.leaving.keys() {
            assert!(
                fleet.legs_open(*flight) > 0,
                "{flight} is listed as cancelling without open legs"
            );
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::event::RouterOutput;
    use crate::fixtures::{FLIGHT, LegsFixture, at, handoff, worker};

    fn cancel(placed: &mut LegsFixture) {
        let mut legs = placed.legs();
        legs.releases.cancel(
            FLIGHT,
            CancelStage::Reserving,
            legs.fleet,
            &mut legs.context,
        );
    }

    /// Releases a leg, and returns the outputs.
    fn close(placed: &mut LegsFixture, on: WorkerRef) -> Vec<RouterOutput> {
        placed.fleet.release(on, handoff(0));
        placed.legs().leg_closed(FLIGHT);
        placed.outputs()
    }

    fn freed(millis: u64) -> RouterOutput {
        RouterOutput::Note(RouterNote::CancelFreed {
            flight: FLIGHT,
            took: Duration::from_millis(millis),
            stage: CancelStage::Reserving,
        })
    }

    #[test]
    fn a_cancelled_flight_leaves_with_its_last_leg() {
        let mut placed = LegsFixture::placed();
        placed.now = at(5);
        cancel(&mut placed);
        placed.releases.check(&placed.fleet);
        placed.now = at(7);
        assert_eq!(close(&mut placed, worker(1)), []);
        assert_eq!(placed.releases.stages().len(), 1);
        assert_eq!(close(&mut placed, worker(2)), [freed(2)]);
        assert_eq!(close(&mut placed, worker(2)), [], "noted once");
        placed.releases.check(&placed.fleet);
    }

    #[test]
    fn a_flight_without_legs_leaves_at_once() {
        let mut placed = LegsFixture::placed();
        for number in [1, 2] {
            assert_eq!(close(&mut placed, worker(number)), [], "not cancelled");
        }
        cancel(&mut placed);
        assert_eq!(placed.outputs(), [freed(0)]);
        assert_eq!(placed.releases.stages().len(), 0);
    }

    #[test]
    #[should_panic(expected = "was not offered")]
    fn room_is_offered_within_its_input() {
        let mut placed = LegsFixture::placed();
        placed.releases.offer_room(worker(1), Some(FLIGHT));
        assert_eq!(placed.releases.take_room(), Some((worker(1), Some(FLIGHT))));
        placed.releases.check(&placed.fleet);
        placed.releases.offer_room(worker(1), None);
        placed.releases.check(&placed.fleet);
    }
}
