//! A fleet of three workers and one flight, for tests of single machines and rules.

use crate::event::{PlacementReason, RouterLimits, RouterOutput};
use crate::fleet::RouterFleet;
use crate::flight::legs::LegRules;
use crate::flight::releases::LegReleases;
use crate::flight::state::{FlightAttempt, FlightRecord, RouterFlights};
use crate::outputs::{RouterContext, RouterOutputs};
use crate::placement::candidates::ChosenPlacement;
use crate::placement::policy::{AttemptSize, LegChoice};
use crate::queue::{QueueId, QueueKind, QueuePlace};
pub(crate) use cleave_testkit::build::worker;

use cleave_domain::{
    Capacity, FlightId, HandoffId, Order, Role, Time, WorkerDescription, WorkerRef,
};
use cleave_testkit::build;
use std::sync::Arc;
use std::time::Duration;

pub(crate) const FLIGHT: FlightId = FlightId(3);

pub(crate) fn at(millis: u64) -> Time {
    Time::ZERO + Duration::from_millis(millis)
}

pub(crate) fn handoff(attempt: u32) -> HandoffId {
    HandoffId {
        flight: FLIGHT,
        attempt,
    }
}

/// A request for nine tokens that arrived as the first one.
pub(crate) fn flight(id: FlightId, arrival: u64) -> FlightRecord {
    let request = build::request([1, 2, 3], 9);
    let place = QueuePlace {
        queue: QueueId {
            kind: QueueKind::New,
            priority: 0,
            class: Arc::from("default"),
            tenant: Arc::from(""),
        },
        request_priority: 0,
        latest_start: Time::END,
        arrival,
        flight: id,
    };
    FlightRecord::new(place, Arc::new(request), std::iter::empty(), Time::ZERO)
}

/// Worker 1 runs prompts, 2 and 3 generate.
pub(crate) fn fleet() -> RouterFleet {
    let mut fleet = RouterFleet::default();
    let capacity = Capacity {
        block_tokens: 4,
        block_bytes: 64,
        blocks_count: 40,
        slots_count: 4,
        step_tokens_max: 16,
        context_tokens_max: 100,
        states: None,
        windows: None,
    };
    for (number, role) in (1..).zip([Role::Prefill, Role::Decode, Role::Decode]) {
        let description = WorkerDescription {
            queue_max: 3,
            ..build::description(role, capacity)
        };
        fleet.join(worker(number), description);
    }
    fleet
}

/// The machines under the rules of legs.
pub(crate) struct LegsFixture {
    pub(crate) now: Time,
    pub(crate) limits: RouterLimits,
    pub(crate) flights: RouterFlights,
    pub(crate) fleet: RouterFleet,
    pub(crate) releases: LegReleases,
    outputs: RouterOutputs,
}

impl LegsFixture {
    /// One flight that was placed on workers 1 and 2: its blocks are to be reserved.
    pub(crate) fn placed() -> Self {
        let mut placed = Self {
            now: Time::ZERO,
            limits: RouterLimits::default(),
            flights: RouterFlights::default(),
            fleet: fleet(),
            releases: LegReleases::default(),
            outputs: RouterOutputs::default(),
        };
        placed.flights.enter(FLIGHT, flight(FLIGHT, 1));
        let name = placed.flights.get_mut(FLIGHT).unwrap().name_attempt();
        let placement = ChosenPlacement {
            choice: LegChoice {
                prefill: worker(1),
                decode: worker(2),
                cached_tokens: 0,
                cost: 0,
                reason: PlacementReason::Split,
            },
            forecast: None,
            considered: Vec::new(),
            tpot: None,
        };
        let size = AttemptSize {
            prompt_tokens: 3,
            tokens_max: 12,
            tokens_expected: 12,
            prefill_only: false,
        };
        placed.fleet.claim_legs(name, &placement, &size);
        let attempt = FlightAttempt::new(name, worker(1), worker(2), 100);
        placed.flights.begin(attempt);
        placed
    }

    /// The same, and its sequence generates on worker 2; worker 1 has released its part.
    pub(crate) fn running() -> Self {
        let mut running = Self::placed();
        running.fleet.release(worker(1), handoff(0));
        let flight = running.flights.get_mut(FLIGHT).unwrap();
        let attempt = flight.attempt_mut(handoff(0)).unwrap();
        (attempt.reserved, attempt.prefilled, attempt.landed) = (true, true, true);
        running
    }

    pub(crate) fn legs(&mut self) -> LegRules<'_> {
        LegRules {
            context: RouterContext {
                now: self.now,
                limits: &self.limits,
                outputs: &mut self.outputs,
            },
            flights: &mut self.flights,
            fleet: &mut self.fleet,
            releases: &mut self.releases,
        }
    }

    pub(crate) fn outputs(&mut self) -> Vec<RouterOutput> {
        std::iter::from_fn(|| self.outputs.poll()).collect()
    }

    /// The orders among the outputs.
    pub(crate) fn orders(&mut self) -> Vec<(WorkerRef, Order)> {
        let order = |output| match output {
            RouterOutput::Order { worker, order } => Some((worker, order)),
            _ => None,
        };
        self.outputs().into_iter().filter_map(order).collect()
    }
}
