//! The router's brain for one model: its entry points, its machines, and the order in which they
//! are called. [`RouterPools`] holds one for each model.
//!
//! - *Facts*: [`RouterBrain::handle`] takes one, with the time.
//! - *Commands*: [`RouterBrain::poll`] gives one at a time; drain it before the next fact.
//! - *Wake-ups*: [`RouterBrain::deadline`] says when to hand in [`RouterInput::Woke`] at the
//!   latest.
//! - *Checks*: [`RouterBrain::check`] asserts every invariant; affordable in tests and simulation.
//!   [`RouterBrain::fingerprint`] distinguishes states for a model checker.
//!
//! The brain is made of machines, each of which owns its data and keeps its invariant, and of rules
//! that borrow them, in layers: legs ([`LegRules`]), the end of a flight ([`FlightEndings`]),
//! admission ([`FlightAdmission`]), a failed attempt ([`FlightRecovery`]) and the steps of a flight
//! ([`FlightSteps`]). A layer calls those below it, and none above.
//!
//! Owns: the machines. Never: sees a generated token while it is drawn; tokens bypass it, and it
//! asks for them when another worker is to draw the next.
//! Invariant: every flight submitted ends in exactly one [`RouterOutput::End`].
//!
//! [`RouterPools`]: crate::RouterPools

use crate::accounting::tally::ServiceTally;
use crate::event::{RouterInput, RouterLimits, RouterOutput};
use crate::fingerprint::FingerprintClock;
use crate::fleet::{FleetWorker, RouterFleet, leases::LeaseRenewal, stuck::StuckDeadlines};
use crate::flight::{
    end::FlightEndings, legs::LegRules, losses::RecentLosses, releases::LegReleases,
    resume::FlightRecovery, state::RouterFlights, steps::FlightSteps, timers::FlightTimer,
};
use crate::invariants;
use crate::outputs::{RouterContext, RouterOutputs};
use crate::placement::admit::FlightAdmission;
use crate::queue::{FlightQueue, passes::QueuePasses};
use crate::readiness::{self, ReadinessReports};
use crate::scaling::Autoscaling;
use cleave_domain::{FlightId, Refusal, SloPolicy, Time, WorkerId, WorkerRef};
use std::hash::{Hash, Hasher};
use std::sync::Arc;

/// Decides for the workers of one model; the module's first lines explain how to drive it.
#[derive(Clone, Debug)]
pub struct RouterBrain {
    limits: RouterLimits,
    now: Time,
    outputs: RouterOutputs,
    fleet: RouterFleet,
    flights: RouterFlights,
    releases: LegReleases,
    queue: FlightQueue,
    passes: QueuePasses,
    leases: LeaseRenewal,
    losses: RecentLosses,
    stuck: StuckDeadlines,
    /// Service per class and tenant, and the accuracy of predictions.
    tally: ServiceTally,
    scaling: Autoscaling,
    readiness: ReadinessReports,
}

impl RouterBrain {
    /// A router that knows no worker yet.
    pub fn new(limits: RouterLimits) -> Self {
        Self {
            queue: FlightQueue::new(limits.queue_max),
            scaling: Autoscaling::new(&limits),
            limits,
            now: Time::ZERO,
            outputs: RouterOutputs::default(),
            fleet: RouterFleet::default(),
            flights: RouterFlights::default(),
            releases: LegReleases::default(),
            passes: QueuePasses::default(),
            leases: LeaseRenewal::default(),
            losses: RecentLosses::default(),
            stuck: StuckDeadlines::default(),
            tally: ServiceTally::default(),
            readiness: ReadinessReports::default(),
        }
    }

    /// The rules of the highest layer, which borrow every machine of flights.
    fn steps(&mut self) -> FlightSteps<'_> {
        let context = RouterContext {
            now: self.now,
            limits: &self.limits,
            outputs: &mut self.outputs,
        };
        let legs = LegRules {
            context,
            flights: &mut self.flights,
            fleet: &mut self.fleet,
            releases: &mut self.releases,
        };
        let ends = FlightEndings {
            legs,
            queue: &mut self.queue,
            tally: &mut self.tally,
            scaling: &mut self.scaling,
        };
        let admission = FlightAdmission {
            ends,
            leases: &mut self.leases,
            passes: &mut self.passes,
        };
        let recovery = FlightRecovery {
            admission,
            losses: &mut self.losses,
        };
        FlightSteps {
            recovery,
            stuck: &mut self.stuck,
        }
    }

    /// Handles a fact. A time before an earlier one counts as that one.
    pub fn handle(&mut self, now: Time, input: RouterInput) {
        self.now = self.now.max(now);
        // Timers first: a fact that comes at the same moment finds their effects.
        self.fleet.set_now(self.now);
        self.fire_timers();
        match input {
            RouterInput::WorkerJoined {
                worker,
                description,
            } => self.steps().joined(worker, description),
            RouterInput::WorkerLost { worker } => self.steps().lost(worker),
            RouterInput::WorkerReported { worker, report } => {
                self.steps().reported(worker, report);
            }
            RouterInput::Submitted { flight, request } => {
                let drains = self.readiness.is_draining();
                let refusal = drains.then_some(Refusal::Draining);
                let admission = &mut self.steps().recovery.admission;
                admission.submitted(flight, request, refusal);
            }
            RouterInput::Cancelled { flight, why } => {
                self.steps().recovery.admission.ends.cancelled(flight, why);
            }
            RouterInput::Counted { handoff, generated } => {
                self.steps().counted(handoff, generated);
            }
            RouterInput::ReaderStalled { flight } => self.steps().stalled(flight),
            RouterInput::ReaderResumed { flight } => {
                self.flights
                    .set_timer(flight, FlightTimer::ReaderTimeout, None);
            }
            RouterInput::Commanded { worker, command } => self.steps().commanded(worker, command),
            RouterInput::PolicyChanged { policy } => self.policy_changed(policy),
            RouterInput::Waiting { place, count } => {
                if self.scaling.wait_outside(place, count, &self.fleet) {
                    self.scale(true);
                }
            }
            RouterInput::Woke => {}
            RouterInput::Draining => self.readiness.drain(),
        }
        self.apply_consequences();
    }

    /// Returns the next thing to do, in order.
    pub fn poll(&mut self) -> Option<RouterOutput> {
        self.outputs.poll()
    }

    /// When to wake the brain at the latest, if nothing happens before.
    pub fn deadline(&self) -> Option<Time> {
        [
            self.flights.first_timer(),
            self.passes.deadline(),
            self.stuck.first(),
            self.leases.deadline(),
            self.scaling.deadline(),
        ]
        .into_iter()
        .flatten()
        .min()
    }

    /// Returns whether the responsive workers alone can serve a request. Readiness counts
    /// unresponsive workers too, because most of them respond again soon.
    pub fn answers(&self) -> bool {
        self.fleet.answers(self.now, self.limits.terms())
    }

    /// The worker as it is connected, if it is.
    pub(crate) fn incarnation_of(&self, worker: WorkerId) -> Option<WorkerRef> {
        self.fleet.incarnation_of(worker)
    }

    pub(crate) fn workers(&self) -> impl Iterator<Item = &FleetWorker> {
        self.fleet.workers()
    }

    pub(crate) fn flight_ids(&self) -> impl Iterator<Item = FlightId> {
        self.flights.iter().map(|(id, _)| id)
    }

    /// Whether this flight is open.
    pub(crate) fn has_flight(&self, flight: FlightId) -> bool {
        self.flights.contains(flight)
    }

    /// Legs that were ordered and have not released their hand-off, those of ended flights
    /// included.
    pub fn legs_open(&self) -> u32 {
        self.fleet.legs_open_in_all()
    }

    /// Asserts the invariants of every machine, and those between machines.
    pub fn check(&self) {
        self.fleet.check();
        self.flights.check(self.now);
        self.queue.check();
        self.passes.check();
        self.tally.check(self.flights.len());
        self.scaling.check();
        self.readiness.check();
        self.leases.check(&self.fleet);
        self.stuck.check(&self.fleet);
        self.releases.check(&self.fleet);
        invariants::check_queued(&self.flights, &self.queue, self.now);
        invariants::check_attempts(&self.flights, &self.fleet);
        invariants::check_claims(&self.flights, &self.fleet);
    }

    /// Hashes the state that decides this brain's future, and nothing else, so that a model checker
    /// may merge two states with equal fingerprints. The limits are not hashed: they belong to a
    /// world, not to a state. The caller has drained the outputs.
    ///
    /// Equal inputs from then on, at equal distances in time, give equal outputs, except for
    /// reported spans of time (`waited`, `took`, `retry_after`) and numbers that define an order:
    /// by how many flights one arrived before another makes no difference.
    pub fn fingerprint(&self, hasher: &mut impl Hasher) {
        assert!(self.outputs.is_empty(), "outputs are drained first");
        let clock = FingerprintClock {
            now: self.now,
            losses_together: self.limits.losses_together,
        };
        clock.hash_fleet(&self.fleet, hasher);
        clock.hash_flights(&self.flights, self.fleet.version(), hasher);
        clock.hash_deadlines(&self.passes, &self.stuck, &self.leases, hasher);
        self.flights.failing_over().hash(hasher);
        clock.hash_releases(&self.releases, hasher);
        clock.hash_losses(&self.losses, hasher);
        self.readiness.decisive().hash(hasher);
        clock.hash_service(&self.tally, &self.passes, hasher);
    }

    fn fire_timers(&mut self) {
        let now = self.now;
        while let Some((id, timer)) = self.flights.due_timer(now) {
            let mut steps = self.steps();
            match timer {
                FlightTimer::StepTimeout => steps.timed_out(id),
                FlightTimer::ReaderTimeout => steps.recovery.admission.ends.reader_timed_out(id),
                FlightTimer::MoveBackoff => steps.moves().rested(id),
                FlightTimer::RetryDelay => steps.recovery.pause_over(id),
            }
        }
        if self.passes.take_retries(now) {
            self.steps().retry_all_waiting();
        }
        while let Some(worker) = self.stuck.take_due(now) {
            self.steps().recovery.abandon(worker);
        }
        if self.leases.is_due(now) {
            for (worker, order) in self.leases.renew(now, &self.limits, &self.fleet) {
                self.steps().legs().send_order(worker, order);
            }
        }
        if self.passes.is_due(now) {
            self.steps().recovery.admission.serve_queue_soon();
        }
    }

    /// Applies a new policy: new targets for new requests, and a new order of the queue.
    fn policy_changed(&mut self, policy: Arc<SloPolicy>) {
        self.tally.retain_classes(&policy);
        self.limits.policy = policy;
        self.readiness.set_outdated();
        self.scaling.configure(self.now, &self.limits);
        self.steps().recovery.admission.serve_queue();
    }

    /// Lets the autoscaler evaluate the fleet, and performs its outputs.
    fn scale(&mut self, fleet_changed: bool) {
        let (now, queued) = (self.now, self.queue.len());
        let outputs = self
            .scaling
            .evaluate(now, fleet_changed, &self.fleet, &self.flights, queued);
        for output in outputs {
            self.steps().perform_scaling(output);
        }
    }

    fn apply_consequences(&mut self) {
        // A changed fleet may give a place to any waiting flight.
        let turned = self.passes.fleet_changed(self.fleet.version());
        if turned {
            self.steps().retry_all_waiting();
        }
        self.scale(turned);
        while let Some((worker, flight)) = self.releases.take_room() {
            let mut steps = self.steps();
            let head = steps.recovery.admission.head();
            // A flight that was passed over and is first in the queue is not sent straight back.
            if head.is_none_or(|head| Some(head) != flight) {
                steps.room_appeared(worker);
            }
        }
        let (fleet, limits, now) = (&self.fleet, &self.limits, self.now);
        let evaluate = || readiness::evaluate(fleet, limits, now);
        let outputs = &mut self.outputs;
        self.readiness.report(turned, evaluate, outputs);
        let (flights, waiting) = (self.flights.len(), self.queue.len());
        self.readiness
            .note_fleet(fleet.census(), flights as u32, waiting, outputs);
        self.readiness.end_drain(flights, outputs);
    }
}
