//! The router's brain: its entry points, its timers, and the end of every flight.
//!
//! - *Facts*: [`RouterBrain::handle`] takes one, with the time.
//! - *Commands*: [`RouterBrain::poll`] gives one at a time; drain it before the next fact.
//! - *Wake-ups*: [`RouterBrain::deadline`] says when to hand in [`RouterInput::Woke`] at the
//!   latest.
//! - *Checks*: [`RouterBrain::check`] asserts every invariant; affordable in tests and simulation.
//!   [`RouterBrain::fingerprint`] distinguishes states for a model checker.
//!
//! The way of a flight is spread over files: `admit` (admission), `place` (waiting, the first
//! order), `walk` (the effect of each report of a worker), `resume` (an attempt that ended too
//! early), `losses` (failures that count), `moves` (a running sequence goes to another worker),
//! `fail_over_stuck` (a stuck worker), `legs` (release of legs) and `verdict` (outcome and times).
//!
//! Owns: the flights, the queue, the timers. Never: sees a generated token while it is drawn;
//! tokens bypass it, and it asks for them when another worker is to draw the next.
//! Invariant: every flight submitted ends in exactly one [`RouterOutput::End`].

use crate::event::{
    CancelReason, RouterInput, RouterLimits, RouterNote, RouterOutput, RouterReadiness,
};
use crate::fleet::RouterFleet;
use crate::flight::{FlightAttempt, FlightPhase, FlightRecord, SequenceEnd};
use crate::leases::LeaseRenewal;
use crate::ledger::LegClaim;
use crate::losses::RecentLosses;
use crate::outputs::RouterOutputs;
use crate::queue::FlightQueue;
use crate::queue_passes::QueuePasses;
use crate::readiness::ReadinessReports;
use crate::releases::LegReleases;
use crate::scale::{Autoscaling, workers_expected};
use crate::stuck::StuckDeadlines;
use crate::tally::ServiceTally;
use crate::timers::{FlightTimer, FlightTimers};
use cleave_domain::{Ending, Failure, FlightId, Order, SloPolicy, Time, WorkerId, WorkerRef};
use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;

/// Decides for a fleet; the module's first lines explain how to drive it.
#[derive(Clone, Debug)]
pub struct RouterBrain {
    pub(crate) limits: RouterLimits,
    pub(crate) now: Time,
    pub(crate) fleet: RouterFleet,
    pub(crate) flights: BTreeMap<FlightId, FlightRecord>,
    pub(crate) queue: FlightQueue,
    pub(crate) passes: QueuePasses,
    pub(crate) timers: FlightTimers,
    pub(crate) leases: LeaseRenewal,
    pub(crate) releases: LegReleases,
    pub(crate) losses: RecentLosses,
    /// Number of flights that are fenced and whose tokens are being counted.
    pub(crate) counting_flights: u32,
    /// Flights that failed over from a stuck worker and do not run elsewhere yet.
    pub(crate) failing_over: BTreeMap<FlightId, WorkerId>,
    pub(crate) stuck_deadlines: StuckDeadlines,
    /// Flights with a move under way, an index that saves a walk over all flights.
    pub(crate) moving: BTreeSet<FlightId>,
    pub(crate) outputs: RouterOutputs,
    pub(crate) arrivals: u64,
    ended: u64,
    /// Service per class and tenant, and the accuracy of predictions.
    pub(crate) tally: ServiceTally,
    pub(crate) readiness: ReadinessReports,
    pub(crate) scaling: Autoscaling,
}

impl RouterBrain {
    /// A router that knows no worker yet.
    pub fn new(limits: RouterLimits) -> Self {
        Self {
            queue: FlightQueue::new(limits.queue_max),
            scaling: Autoscaling::new(&limits),
            limits,
            now: Time::ZERO,
            fleet: RouterFleet::default(),
            flights: BTreeMap::new(),
            passes: QueuePasses::default(),
            timers: FlightTimers::default(),
            leases: LeaseRenewal::default(),
            releases: LegReleases::default(),
            losses: RecentLosses::default(),
            counting_flights: 0,
            failing_over: BTreeMap::new(),
            stuck_deadlines: StuckDeadlines::default(),
            moving: BTreeSet::new(),
            outputs: RouterOutputs::default(),
            arrivals: 0,
            ended: 0,
            tally: ServiceTally::default(),
            readiness: ReadinessReports::default(),
        }
    }

    /// Handles a fact. A time before an earlier one counts as that one.
    pub fn handle(&mut self, now: Time, input: RouterInput) {
        self.now = self.now.max(now);
        // Timers first: a fact that comes at the same moment finds their effects.
        self.fleet.now = self.now;
        self.fire_timers();
        match input {
            RouterInput::WorkerJoined {
                worker,
                description,
            } => self.joined(worker, description),
            RouterInput::WorkerLost { worker } => self.lost(worker),
            RouterInput::WorkerReported { worker, report } => self.reported(worker, report),
            RouterInput::Submitted { flight, request } => self.submitted(flight, request),
            RouterInput::Cancelled { flight, why } => self.cancelled(flight, why),
            RouterInput::Counted { handoff, generated } => self.counted(handoff, generated),
            RouterInput::ReaderStalled { flight } => self.stalled(flight),
            RouterInput::ReaderResumed { flight } => {
                self.timers.set(flight, FlightTimer::ReaderTimeout, None)
            }
            RouterInput::Commanded { worker, command } => self.commanded(worker, command),
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
            self.timers.first(),
            self.passes.deadline(),
            self.stuck_deadlines.first(),
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
        self.fleet.answers(self.now, self.terms())
    }

    /// Legs that were ordered and have not released their hand-off, those of ended flights
    /// included.
    pub fn legs_open(&self) -> u32 {
        self.fleet.legs_open_in_all()
    }

    pub fn check(&self) {
        self.fleet.check();
        self.timers.check();
        self.queue.check();
        self.tally.check(self.flights.len());
        self.scaling.check();
        self.passes.check();
        self.readiness.check();
        self.leases.check(&self.fleet);
        self.stuck_deadlines.check(&self.fleet);
        self.releases.check(&self.fleet);
        assert_eq!(
            self.arrivals,
            self.ended + self.flights.len() as u64,
            "flights submitted, ended and under way do not add up"
        );
        let (mut waiting, mut counting) = (0, 0);
        for (id, flight) in &self.flights {
            let queued = self.queue.contains(&flight.place);
            match &flight.stage {
                FlightPhase::Waiting => {
                    assert!(queued, "{id} waits but is not in the queue");
                    let timer = self.timers.get(*id, FlightTimer::StepTimeout);
                    assert!(timer.is_some(), "{id} waits without a time limit");
                    waiting += 1;
                }
                FlightPhase::CountingTokens(broken) => {
                    assert!(!queued, "{id} is being counted and is in the queue");
                    let last = flight.attempts - 1;
                    assert_eq!(
                        broken.fence.attempt, last,
                        "{id} is fenced below its last attempt"
                    );
                    counting += 1;
                }
                FlightPhase::Flying(attempt) => {
                    assert!(!queued, "{id} has an attempt and is in the queue");
                    self.check_attempt(flight, attempt);
                }
            }
            let pauses = flight.pauses(self.now);
            let timer = self.timers.get(*id, FlightTimer::RetryDelay);
            assert!(!pauses || queued, "{id} pauses but is not in the queue");
            assert!(!pauses || timer.is_some(), "{id} pauses without a timer");
            let has_attempt = flight.attempt().is_some();
            assert!(
                has_attempt || flight.moving.is_none(),
                "{id} moves without a current attempt"
            );
            let listed = self.moving.contains(id);
            assert_eq!(
                listed,
                flight.moving.is_some(),
                "the list of moving flights is wrong about {id}"
            );
        }
        assert_eq!(
            waiting,
            self.queue.len(),
            "the queue holds a flight that does not wait"
        );
        assert_eq!(
            counting, self.counting_flights,
            "the number of flights being counted is wrong"
        );
        for flight in self.timers.flights() {
            let in_flight = self.flights.contains_key(&flight);
            assert!(in_flight, "a timer outlived {flight}");
        }
        for flight in self.failing_over.keys() {
            assert!(
                self.flights.contains_key(flight),
                "{flight} ended but is listed as failing over"
            );
        }
        for flight in &self.moving {
            assert!(
                self.flights.contains_key(flight),
                "{flight} ended but is listed as moving"
            );
        }
        self.check_claims();
    }

    fn check_attempt(&self, flight: &FlightRecord, attempt: &FlightAttempt) {
        let handoff = attempt.handoff;
        let timer = self.timers.get(handoff.flight, FlightTimer::StepTimeout);
        let decode = self.fleet.claim(attempt.decode, handoff);
        let sender = self.fleet.claim(attempt.prefill, attempt.sending());
        assert!(
            attempt.reserved || timer.is_some(),
            "{handoff} waits for a reservation without an alarm"
        );
        let in_doubt = attempt.leg_failure.is_some() && timer.is_some();
        assert!(
            attempt.finished.is_some() || decode.is_some() || in_doubt,
            "{handoff} has no claim on its decode worker"
        );
        assert!(
            attempt.prefilled || sender.is_some(),
            "{handoff}: its sender has no claim and has not finished"
        );
        let Some(leg) = flight.leg() else {
            return;
        };
        let to = leg.handoff;
        assert!(
            attempt.landed && attempt.prefilled,
            "{to} moves before its source runs"
        );
        assert_eq!(leg.of, Some(handoff), "{to} moves from elsewhere");
        assert_eq!(leg.prefill, attempt.decode, "{to} moves from elsewhere");
        assert_ne!(
            leg.decode, attempt.decode,
            "{to} moves to the worker that it leaves"
        );
        assert!(!leg.landed, "{to} landed and is not the flight's attempt");
        assert!(
            leg.reserved || timer.is_some(),
            "{to} waits for a reservation without an alarm"
        );
        let held = self.fleet.claim(leg.decode, to).is_some();
        assert!(
            held || leg.leg_failure.is_some(),
            "{to} has no claim on its target"
        );
    }

    /// Asserts that every renewed claim belongs to the attempt that generates, or to the one to
    /// which it moves.
    fn check_claims(&self) {
        for worker in self.fleet.workers() {
            let live = |claim: &LegClaim| claim.renewed;
            for (handoff, _) in worker.ledger.handoffs().filter(|(_, p)| live(p)) {
                let user = self.current(handoff).or(self.leg(handoff));
                let me = worker.me;
                assert!(
                    user.is_some_and(|a| a.decode == me || a.prefill == me),
                    "{me} renews {handoff}, which no flight needs"
                );
            }
        }
    }

    pub(crate) fn emit_output(&mut self, output: RouterOutput) {
        self.outputs.emit(output);
    }

    pub(crate) fn send_order(&mut self, worker: WorkerRef, order: Order) {
        let last = match &order {
            Order::Reserve(order) if order.sender != worker => Some(order.handoff),
            Order::Prefill(order) => Some(order.handoff),
            _ => None,
        };
        self.fleet.count_order(worker, last);
        self.emit_output(RouterOutput::Order { worker, order });
    }

    pub(crate) fn note(&mut self, note: RouterNote) {
        self.emit_output(RouterOutput::Note(note));
    }

    // === timers ===

    fn fire_timers(&mut self) {
        while let Some((id, timer)) = self.timers.due(self.now) {
            match timer {
                FlightTimer::StepTimeout => self.timed_out(id),
                FlightTimer::ReaderTimeout => self.reader_timed_out(id),
                FlightTimer::MoveBackoff => self.rested(id),
                FlightTimer::RetryDelay => self.pause_over(id),
            }
        }
        if self.passes.take_retries(self.now) {
            self.retry_all_waiting();
        }
        while let Some(worker) = self.stuck_deadlines.take_due(self.now) {
            self.abandon(worker);
        }
        if self.leases.is_due(self.now) {
            for (worker, order) in self.leases.renew(self.now, &self.limits, &self.fleet) {
                self.send_order(worker, order);
            }
        }
        if self.passes.is_due(self.now) {
            self.serve_queue_soon();
        }
    }

    /// Applies a new policy: new targets for new requests, and a new order of the queue.
    fn policy_changed(&mut self, policy: Arc<SloPolicy>) {
        self.tally.retain_classes(&policy);
        self.limits.policy = policy;
        self.rescale();
        self.serve_queue();
    }

    /// Tries all flights that wait for room anywhere: running streams before new requests.
    fn retry_all_waiting(&mut self) {
        self.fail_over_stuck();
        self.evacuate(None);
        self.serve_queue();
        self.grant_migration_requests(None);
    }

    /// Starts the limit on a client that does not read, at its first stall.
    fn stalled(&mut self, id: FlightId) {
        let until = self.now + self.limits.reader_wait_max;
        if self.flights.contains_key(&id)
            && self.timers.get(id, FlightTimer::ReaderTimeout).is_none()
        {
            self.timers.set(id, FlightTimer::ReaderTimeout, Some(until));
        }
    }

    // === ending ===

    /// Ends the flight. The caller has dropped its legs before.
    pub(crate) fn end(&mut self, id: FlightId, ending: Ending) {
        self.end_with(id, ending, None, CancelReason::Left);
    }

    /// Ends a flight of which every token was produced.
    pub(crate) fn finish_flight(&mut self, id: FlightId, finish: SequenceEnd) {
        self.drop_legs(id, Failure::Rejected);
        let SequenceEnd {
            reason,
            output_tokens,
        } = finish;
        let ending = Ending::Done { reason };
        self.end_with(id, ending, Some(output_tokens), CancelReason::Left);
    }

    pub(crate) fn end_with(
        &mut self,
        id: FlightId,
        ending: Ending,
        output_tokens: Option<u32>,
        why: CancelReason,
    ) {
        self.timers.remove_flight(id);
        let Some(flight) = self.flights.remove(&id) else {
            return;
        };
        self.counting_flights -= u32::from(matches!(flight.stage, FlightPhase::CountingTokens(_)));
        self.failing_over.remove(&id);
        self.moving.remove(&id);
        self.queue.leave(&flight.place);
        self.ended += 1;
        let outcome = flight.verdict(&ending, why, output_tokens, self.now);
        let timing = outcome.timing;
        self.tally
            .learn_answer(&flight, &outcome, &self.limits.policy, self.now);
        self.scaling.judged(self.now, &flight, &outcome);
        self.outputs.note(RouterNote::Judged {
            flight: id,
            class: flight.request.slo.class.clone(),
            tenant: flight.request.slo.tenant.clone(),
            verdict: outcome.verdict,
            timing,
            output_tokens: outcome.output_tokens,
            forecast: flight.forecast.map(|forecast| Box::new(forecast.request)),
        });
        self.settle_account(&flight, &ending, output_tokens);
        self.emit_output(RouterOutput::End {
            flight: id,
            ending,
            output_tokens,
            timing,
        });
    }

    fn apply_consequences(&mut self) {
        // A changed fleet may give a place to any waiting flight.
        let turned = self.passes.fleet_changed(self.fleet.version());
        if turned {
            self.retry_all_waiting();
        }
        self.scale(turned);
        while let Some((worker, flight)) = self.releases.take_room() {
            // A flight that was passed over and is first in the queue is not sent straight back.
            if self.head().is_none_or(|head| Some(head) != flight) {
                self.room_appeared(worker);
            }
        }
        let (fleet, limits, now) = (&self.fleet, &self.limits, self.now);
        // A request that can wait for the first worker is accepted.
        let evaluate = || match workers_expected(&limits.policy) {
            Some(_) => RouterReadiness::Ready,
            None => fleet.readiness(now, limits.terms()),
        };
        let outputs = &mut self.outputs;
        self.readiness.report(turned, evaluate, outputs);
        let (flights, waiting) = (self.flights.len(), self.queue.len());
        self.readiness
            .note_fleet(fleet.census(), flights as u32, waiting, outputs);
        self.readiness.end_drain(flights, outputs);
    }
}
