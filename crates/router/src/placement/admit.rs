//! Admission of requests.
//!
//! Owns: admission, and the answer to a target that cannot be met. Never: predicts, or knows the
//! further way of an attempt; `forecast` and `steps` do.
//! Invariant: a request with a target is placed only where that is predicted to be met, and
//! answered as soon as it cannot be. A request that has failed once, or has a token with its
//! client, is never refused for its target.

use crate::event::{DecisionOutcome, RequestForecast};
use crate::fleet::leases::LeaseRenewal;
use crate::flight::end::FlightEndings;
use crate::flight::legs::LegRules;
use crate::flight::state::FlightRecord;
use crate::flight::timers::FlightTimer;
use crate::placement::candidates::ChosenPlacement;
use crate::placement::forecast::TargetMiss;
use crate::placement::policy::NoPlacement;
use crate::placement::rules::{PlacementRules, UnmetAction};
use crate::queue::passes::QueuePasses;
use crate::scaling::workers_expected;
use cleave_domain::{FlightId, Refusal, Request, SloClass};
use std::sync::Arc;

/// The rules of admission, over all that a placement changes.
#[derive(Debug)]
pub(crate) struct FlightAdmission<'a> {
    pub(crate) ends: FlightEndings<'a>,
    pub(crate) leases: &'a mut LeaseRenewal,
    pub(crate) passes: &'a mut QueuePasses,
}

impl ChosenPlacement {
    pub(crate) fn miss(&self) -> Option<TargetMiss> {
        self.forecast.and_then(|forecast| forecast.miss)
    }
}

impl<'a> FlightAdmission<'a> {
    pub(crate) fn legs(&mut self) -> &mut LegRules<'a> {
        &mut self.ends.legs
    }

    pub(crate) fn flight(&self, id: FlightId) -> Option<&FlightRecord> {
        self.ends.flight(id)
    }

    pub(crate) fn flight_mut(&mut self, id: FlightId) -> Option<&mut FlightRecord> {
        self.ends.legs.flights.get_mut(id)
    }

    /// Admits a new request, unless it is refused at once.
    pub(crate) fn submitted(
        &mut self,
        id: FlightId,
        request: Arc<Request>,
        refusal: Option<Refusal>,
    ) {
        let FlightEndings {
            legs,
            tally,
            scaling,
            queue,
        } = &mut self.ends;
        assert!(!legs.flights.contains(id), "{id} was submitted twice");
        let (now, limits) = (legs.context.now, legs.context.limits);
        let is_full = legs.flights.len() >= limits.flights_max as usize;
        let arrival = legs.flights.next_arrival();
        let sizes = legs.fleet.block_sizes();
        let rules = PlacementRules {
            now,
            limits,
            fleet: legs.fleet,
            tally,
        };
        let refusal = refusal.or_else(|| is_full.then(|| rules.full(queue)));
        let place = rules.queue_place(id, &request, arrival, now);
        let mut flight = FlightRecord::new(place, request, sizes, now);
        flight.on_miss = limits.policy.class(&flight.request.slo.class).unmet.clone();
        tally.open(flight.payer());
        scaling.arrived(now, &flight.request, legs.fleet);
        legs.flights.enter(id, flight);
        match refusal {
            Some(refusal) => self.ends.refuse(id, refusal, Vec::new()),
            None => self.admit(id),
        }
    }

    /// Places a flight that is not in the queue, or lets it wait, or ends it.
    fn admit(&mut self, id: FlightId) {
        match self.find(id) {
            Err(NoPlacement::NoWorker) => {
                match workers_expected(&self.ends.legs.context.limits.policy) {
                    Some(start_max) => self.wait_for_workers(id, start_max),
                    None => self.ends.refuse(id, self.unserved(id), Vec::new()),
                }
            }
            Err(NoPlacement::TooLong { tokens_max }) => {
                let refusal = Refusal::TooLong { tokens_max };
                self.ends.refuse(id, refusal, Vec::new());
            }
            Ok(placement) => match placement.miss() {
                Some(miss) => self.unmet(id, miss, placement.considered),
                None if self.is_next(id) => self.start(id, &placement),
                None => {
                    self.wait(id);
                    if self.ends.rules().overtakes() {
                        self.serve_queue_soon();
                    }
                }
            },
            Err(NoPlacement::Busy) => {
                let flight = self.flight(id);
                let rules = self.ends.rules();
                match flight.and_then(|flight| rules.miss_by_waiting(flight, self.ends.queue)) {
                    Some(late) => self.unmet(id, late, Vec::new()),
                    None => self.wait(id),
                }
            }
        }
    }

    /// The best placement of the flight now.
    pub(crate) fn find(&self, id: FlightId) -> Result<ChosenPlacement, NoPlacement> {
        let flight = self.flight(id).ok_or(NoPlacement::NoWorker)?;
        self.ends.rules().find(flight)
    }

    /// The same, and marks the flight if no worker could ever take it.
    pub(crate) fn seek(&mut self, id: FlightId) -> Result<ChosenPlacement, NoPlacement> {
        let found = self.find(id);
        let hopeless = matches!(
            found,
            Err(NoPlacement::TooLong { .. } | NoPlacement::NoWorker)
        );
        let version = self.ends.legs.fleet.version();
        if let Some(flight) = self.flight_mut(id).filter(|_| hopeless) {
            flight.unplaceable_at = Some(version);
        }
        found
    }

    /// Whether the flight would be first if it stood in the queue.
    fn is_next(&mut self, id: FlightId) -> bool {
        if self.ends.queue.len() == 0 {
            return true;
        }
        let Some(place) = self.flight(id).map(|flight| flight.place.clone()) else {
            return false;
        };
        // The flight joins for the moment of the question only.
        self.ends.queue.join(&place);
        let next = self.head();
        self.ends.queue.leave(&place);
        next == Some(id)
    }

    /// Handles a target that cannot be met, by the rule of the flight's class.
    pub(crate) fn unmet(
        &mut self,
        id: FlightId,
        late: TargetMiss,
        considered: Vec<RequestForecast>,
    ) {
        let Some(flight) = self.flight(id) else {
            return;
        };
        match self.ends.rules().unmet_action(flight, &late) {
            UnmetAction::Wait => {
                if !self.ends.queue.contains(&flight.place) {
                    self.wait(id);
                }
            }
            UnmetAction::Downgrade(to) => self.downgrade(id, &to, considered),
            UnmetAction::Refuse(refusal) => self.ends.refuse(id, refusal, considered),
        }
    }

    fn downgrade(&mut self, id: FlightId, to: &SloClass, considered: Vec<RequestForecast>) {
        let class = to.name.clone();
        let decided = DecisionOutcome::Downgraded {
            class: class.clone(),
        };
        self.ends.decide(id, decided, considered);
        let policy = Arc::clone(&self.ends.legs.context.limits.policy);
        let Some(flight) = self.flight(id) else {
            return;
        };
        let mut request = Request::clone(&flight.request);
        request.slo.class = class;
        request.slo.priority = policy.priority_for(&request.slo.tenant, to.priority);
        (request.slo.ttft, request.slo.tpot, request.slo.e2e) = (to.ttft, to.tpot, to.e2e);
        let rules = self.ends.rules();
        let place = rules.queue_place(id, &request, flight.place.arrival, flight.submitted);
        let FlightEndings {
            legs, queue, tally, ..
        } = &mut self.ends;
        legs.flights.set_timer(id, FlightTimer::StepTimeout, None);
        if let Some(flight) = legs.flights.get_mut(id) {
            queue.leave(&flight.place);
            // The charge is refunded to the class that it leaves.
            tally.charge(flight.payer(), -flight.charged, &policy);
            tally.close(flight.payer());
            flight.place = place;
            flight.request = Arc::new(request);
            flight.on_miss = to.unmet.clone();
            flight.downgrades += 1;
            flight.charged = 0;
            flight.wait_until = None;
            tally.open(flight.payer());
        }
        self.admit(id);
    }
}
