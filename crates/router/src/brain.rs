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
//! order), `reports` (the effect of each report of a worker), `pass_over` (a worker that does not
//! take its leg), `resume` (an attempt that ended too early), `losses` (failures that count),
//! `moves` (a running sequence goes to another worker), `fail_over_stuck` (a stuck worker), `legs`
//! (release of legs) and `verdict` (outcome and times).
//!
//! Owns: the flights, the queue, the timers. Never: sees a generated token while it is drawn;
//! tokens bypass it, and it asks for them when another worker is to draw the next.
//! Invariant: every flight submitted ends in exactly one [`RouterOutput::End`].

use crate::event::{
    CancelReason, RoleCounts, RouterInput, RouterLimits, RouterNote, RouterOutput, RouterReadiness,
};
use crate::fleet::RouterFleet;
use crate::flight::{FlightAttempt, FlightPhase, FlightRecord, SequenceEnd};
use crate::ledger::LegClaim;
use crate::legs::CancelledFlight;
use crate::losses::RecentLosses;
use crate::place::PlacementRate;
use crate::queue::FlightQueue;
use crate::scale::OutsideQueues;
use crate::tally::ServiceTally;
use crate::timers::{FlightTimer, FlightTimers};
use cleave_domain::{
    Ending, Failure, FlightId, HandoffId, Order, PrefillOrder, ReserveOrder, RunOrder, SloPolicy,
    Time, WorkerId, WorkerRef,
};
use cleave_planner::scaling::Scaler;
use std::collections::{BTreeMap, BTreeSet, VecDeque};
use std::sync::Arc;

/// Decides for a fleet; the module's first lines explain how to drive it.
#[derive(Clone, Debug)]
pub struct RouterBrain {
    pub(crate) limits: RouterLimits,
    pub(crate) now: Time,
    pub(crate) fleet: RouterFleet,
    pub(crate) flights: BTreeMap<FlightId, FlightRecord>,
    pub(crate) queue: FlightQueue,
    pub(crate) timers: FlightTimers,
    /// Times at which workers that refused may be asked again.
    pub(crate) retry_at: BTreeSet<(Time, WorkerId)>,
    /// Next renewal of leases; set while anything is leased.
    pub(crate) renew_at: Option<Time>,
    /// Cancelled flights whose legs are not all released.
    pub(crate) cancelling: BTreeMap<FlightId, CancelledFlight>,
    /// Claims released while handling this input, and the flights that gave them up; the room is
    /// given to waiting flights at its end.
    pub(crate) released: BTreeSet<(WorkerRef, Option<FlightId>)>,
    pub(crate) losses: RecentLosses,
    /// Number of flights that are fenced and whose tokens are being counted.
    pub(crate) counting_flights: u32,
    /// Flights that failed over from a stuck worker and do not run elsewhere yet.
    pub(crate) failing_over: BTreeMap<FlightId, WorkerId>,
    /// Deadlines after which flights leave a stuck worker in any case.
    pub(crate) stuck_deadlines: BTreeSet<(Time, WorkerId)>,
    /// Flights with a move under way, an index that saves a walk over all flights.
    pub(crate) moving: BTreeSet<FlightId>,
    pub(crate) outputs: VecDeque<RouterOutput>,
    pub(crate) arrivals: u64,
    ended: u64,
    /// Mean interval between placements, while flights wait.
    pub(crate) placement_rate: PlacementRate,
    /// Service per class and tenant, and the accuracy of predictions.
    pub(crate) tally: ServiceTally,
    /// When waiting flights were last tried, and when they will be again.
    pub(crate) queue_served_at: Time,
    pub(crate) queue_due_at: Option<Time>,
    pub(crate) draining: RouterDrainState,
    fleet_noted: (RoleCounts, u32, u32),
    /// The readiness last reported.
    pub(crate) readiness: RouterReadiness,
    /// Version of the fleet after which waiting flights were last tried.
    fleet_version: u64,
    /// The autoscaler's brain, if the policy has one.
    pub(crate) scaler: Option<Box<Scaler>>,
    /// Requests that wait for a tokenizer.
    pub(crate) outside_queues: OutsideQueues,
    /// Readiness must be evaluated again, since the autoscaler was switched on or off.
    pub(crate) readiness_dirty: bool,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(crate) enum RouterDrainState {
    No,
    Requested,
    Reported,
}

impl RouterBrain {
    /// A router that knows no worker yet.
    pub fn new(limits: RouterLimits) -> Self {
        let scaling = limits.policy.scaling.clone();
        let scaler = scaling.map(|scaling| {
            let policy = Arc::clone(&limits.policy);
            Box::new(Scaler::new(limits.me, Time::ZERO, scaling, policy))
        });
        Self {
            queue: FlightQueue::new(limits.queue_max),
            limits,
            now: Time::ZERO,
            fleet: RouterFleet::default(),
            flights: BTreeMap::new(),
            timers: FlightTimers::default(),
            retry_at: BTreeSet::new(),
            renew_at: None,
            cancelling: BTreeMap::new(),
            released: BTreeSet::new(),
            losses: RecentLosses::default(),
            counting_flights: 0,
            failing_over: BTreeMap::new(),
            stuck_deadlines: BTreeSet::new(),
            moving: BTreeSet::new(),
            outputs: VecDeque::new(),
            arrivals: 0,
            ended: 0,
            placement_rate: PlacementRate::default(),
            tally: ServiceTally::default(),
            queue_served_at: Time::ZERO,
            queue_due_at: None,
            draining: RouterDrainState::No,
            fleet_noted: (RoleCounts::default(), 0, 0),
            readiness: RouterReadiness::NONE,
            fleet_version: 0,
            scaler,
            outside_queues: OutsideQueues::default(),
            readiness_dirty: true,
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
            RouterInput::Waiting { place, count } => self.wait_outside(place, count),
            RouterInput::Woke => {}
            RouterInput::Draining => {
                if self.draining == RouterDrainState::No {
                    self.draining = RouterDrainState::Requested;
                }
            }
        }
        self.apply_consequences();
    }

    /// Returns the next thing to do, in order.
    pub fn poll(&mut self) -> Option<RouterOutput> {
        self.outputs.pop_front()
    }

    /// When to wake the brain at the latest, if nothing happens before.
    pub fn deadline(&self) -> Option<Time> {
        let retry_at = self.retry_at.first().map(|(at, _)| *at);
        let stuck_at = self.stuck_deadlines.first().map(|(at, _)| *at);
        [
            self.timers.first(),
            retry_at,
            stuck_at,
            self.renew_at,
            self.queue_due_at,
            self.scaler.as_ref().map(|scaler| scaler.deadline()),
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
        if let Some(scaler) = &self.scaler {
            scaler.check();
        }
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
        for (_, worker) in &self.stuck_deadlines {
            let stuck = self
                .fleet
                .incarnation_of(*worker)
                .is_some_and(|w| self.fleet.is_stuck(w));
            assert!(stuck, "{worker} has a stuck deadline and is not stuck");
        }
        for flight in self.cancelling.keys() {
            assert!(
                self.fleet.legs_open(*flight) > 0,
                "{flight} is listed as cancelling without open legs"
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
            "{handoff} waits for an answer without an alarm"
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
        self.outputs.push_back(output);
    }

    pub(crate) fn send_order(&mut self, worker: WorkerRef, order: Order) {
        let last = match &order {
            Order::Reserve(ReserveOrder { handoff, .. })
            | Order::Prefill(PrefillOrder { handoff, .. })
            | Order::Run(RunOrder { handoff, .. }) => Some(*handoff),
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
        let mut opened = false;
        while let Some((at, worker)) = self.retry_at.first().copied() {
            if at > self.now {
                break;
            }
            self.retry_at.remove(&(at, worker));
            opened = true;
        }
        if opened {
            self.retry_all_waiting();
        }
        while let Some((at, worker)) = self.stuck_deadlines.first().copied() {
            if at > self.now {
                break;
            }
            self.stuck_deadlines.remove(&(at, worker));
            self.abandon(worker);
        }
        if self.renew_at.is_some_and(|at| at <= self.now) {
            self.renew();
        }
        if self.queue_due_at.is_some_and(|at| at <= self.now) {
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

    /// Renews every lease that is still wanted, and stops when there is none.
    fn renew(&mut self) {
        let mut orders = Vec::new();
        for worker in self.fleet.workers() {
            let live = |(id, claim): (HandoffId, &LegClaim)| {
                (claim.renewed && claim.ordered).then_some(id)
            };
            let handoffs: Vec<HandoffId> = worker.ledger.handoffs().filter_map(live).collect();
            if !handoffs.is_empty() {
                orders.push((worker.me, Order::Renew { handoffs }));
            }
        }
        self.renew_at = (!orders.is_empty()).then_some(self.now + self.limits.renew_every);
        for (worker, order) in orders {
            self.send_order(worker, order);
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
        let timing = self.judged(&flight, &ending, why, output_tokens);
        self.settle_account(&flight, &ending, output_tokens);
        self.emit_output(RouterOutput::End {
            flight: id,
            ending,
            output_tokens,
            timing,
        });
    }

    fn report_readiness(&mut self) {
        let readiness = match self.draining {
            // A request that can wait for the first worker is accepted.
            RouterDrainState::No if self.workers_expected().is_some() => RouterReadiness::Ready,
            RouterDrainState::No => self.fleet.readiness(self.now, self.terms()),
            RouterDrainState::Requested | RouterDrainState::Reported => RouterReadiness::Draining,
        };
        if readiness != self.readiness {
            self.readiness = readiness;
            self.emit_output(RouterOutput::Readiness(readiness));
        }
    }

    fn apply_consequences(&mut self) {
        let turned = self.fleet_version != self.fleet.version();
        // A changed fleet may give a place to any waiting flight.
        if turned {
            self.fleet_version = self.fleet.version();
            self.retry_all_waiting();
        }
        self.scale(turned);
        while let Some((worker, flight)) = self.released.pop_first() {
            // A flight that was passed over and is first in the queue is not sent straight back.
            if self.head().is_none_or(|head| Some(head) != flight) {
                self.room_appeared(worker);
            }
        }
        if turned || self.readiness_dirty || self.draining == RouterDrainState::Requested {
            self.readiness_dirty = false;
            self.report_readiness();
        }
        let stands = (
            self.fleet.census(),
            self.flights.len() as u32,
            self.queue.len(),
        );
        if stands != self.fleet_noted {
            self.fleet_noted = stands;
            let (workers, flights, flights_waiting) = stands;
            self.note(RouterNote::Fleet {
                workers,
                flights,
                flights_waiting,
            });
        }
        if self.draining == RouterDrainState::Requested && self.flights.is_empty() {
            self.draining = RouterDrainState::Reported;
            self.emit_output(RouterOutput::Drained);
        }
    }
}
