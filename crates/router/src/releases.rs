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
        cx: &mut RouterContext,
    ) {
        if fleet.legs_open(flight) > 0 {
            let since = cx.now;
            self.leaving
                .insert(flight, CancelledFlight { since, stage });
        } else {
            cx.note(RouterNote::CancelFreed {
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
        cx: &mut RouterContext,
    ) {
        if fleet.legs_open(flight) > 0 {
            return;
        }
        if let Some(CancelledFlight { since, stage }) = self.leaving.remove(&flight) {
            let took = cx.now.since(since);
            cx.note(RouterNote::CancelFreed {
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
