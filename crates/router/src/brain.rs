//! The router's brain: its kinds of methods, its wake-ups and its end of everything.
//!
//! - *Facts*: [`Brain::handle`] takes one, with the time.
//! - *Commands*: [`Brain::poll`] gives one at a time; drain it before the next fact.
//! - *Wake-ups*: [`Brain::deadline`] says when to hand in [`Input::Woke`] at the latest.
//! - *Checks*: [`Brain::check`] asserts every invariant; affordable in tests and simulation.
//!   [`Brain::fingerprint`] says which states are one.
//!
//! A flight's way is told in `admit` (is it taken on), `place` (waiting, the first order), `walk` (what each word of a
//! worker means), `resume` (an attempt is over too early), `losses` (which failures count), `moves` (a running sequence goes to another
//! worker), `rescue` (a worker is stuck), `legs` (letting go) and `verdict` (what came of it).
//!
//! Owns: the flights, the line, the alarms. Never: sees a generated token while it is drawn; those go
//! past it, and it asks for them when another worker is to draw the next.
//! Invariant: every flight submitted ends in exactly one [`Output::End`].

use crate::alarm::{Alarm, Alarms};
use crate::event::{CancelReason, Census, Input, Limits, Note, Output, Readiness};
use crate::fleet::Fleet;
use crate::flight::{Attempt, Finish, Flight, Stage};
use crate::ledger::Promise;
use crate::legs::Leaving;
use crate::line::Line;
use crate::losses::Losses;
use crate::place::Pace;
use crate::scale::Queues;
use crate::tally::Tally;
use cleave_domain::{
    Ending, Failure, FlightId, HandoffId, Order, SloPolicy, Time, WorkerId, WorkerRef,
};
use cleave_planner::scaling::Scaler;
use std::collections::{BTreeMap, BTreeSet, VecDeque};
use std::sync::Arc;

/// Decides for a fleet; see the module's first lines for how to drive it.
#[derive(Clone, Debug)]
pub struct Brain {
    pub(crate) limits: Limits,
    pub(crate) now: Time,
    pub(crate) fleet: Fleet,
    pub(crate) flights: BTreeMap<FlightId, Flight>,
    pub(crate) line: Line,
    pub(crate) alarms: Alarms,
    /// When a worker that refused may be asked again.
    pub(crate) doors: BTreeSet<(Time, WorkerId)>,
    /// Runs while anything is leased.
    pub(crate) renew_at: Option<Time>,
    /// Cancelled flights whose legs are not all released.
    pub(crate) leaving: BTreeMap<FlightId, Leaving>,
    /// Where promises ended in silence, and which flights gave them up, until the end of the fact.
    pub(crate) freed: BTreeSet<(WorkerRef, Option<FlightId>)>,
    /// Workers lost lately.
    pub(crate) losses: Losses,
    /// Flights that are fenced and not counted.
    pub(crate) counting: u32,
    /// Flights that failed over from a stuck worker and do not run elsewhere yet.
    pub(crate) rescued: BTreeMap<FlightId, WorkerId>,
    /// When flights on a stuck worker have waited long enough for it.
    pub(crate) patience: BTreeSet<(Time, WorkerId)>,
    /// Flights with a move under way, so that nobody has to look at all for them.
    pub(crate) moving: BTreeSet<FlightId>,
    pub(crate) outputs: VecDeque<Output>,
    pub(crate) arrivals: u64,
    ended: u64,
    /// Between placements, on average, while there is a line.
    pub(crate) pace: Pace,
    /// What was served to whom, and how predictions came true.
    pub(crate) tally: Tally,
    /// When the line was last looked at for news, and will be again.
    pub(crate) looked_at: Time,
    pub(crate) look_at: Option<Time>,
    pub(crate) draining: Draining,
    noted: (Census, u32, u32),
    /// What was said last.
    pub(crate) readiness: Readiness,
    /// The fleet's turn that was looked at last.
    turn: u64,
    /// Says how large the fleet is to be, if the policy wants one that changes.
    pub(crate) scaler: Option<Box<Scaler>>,
    /// Requests that wait for a tokenizer.
    pub(crate) outside: Queues,
    /// Readiness may be another one, since the fleet may grow now, or may not any more.
    pub(crate) rescaled: bool,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(crate) enum Draining {
    No,
    Asked,
    Said,
}

impl Brain {
    /// A router that knows no worker yet.
    pub fn new(limits: Limits) -> Self {
        let scaling = limits.policy.scaling.clone();
        let scaler = scaling.map(|scaling| {
            let policy = Arc::clone(&limits.policy);
            Box::new(Scaler::new(limits.me, Time::ZERO, scaling, policy))
        });
        Self {
            line: Line::new(limits.queue_max),
            limits,
            now: Time::ZERO,
            fleet: Fleet::default(),
            flights: BTreeMap::new(),
            alarms: Alarms::default(),
            doors: BTreeSet::new(),
            renew_at: None,
            leaving: BTreeMap::new(),
            freed: BTreeSet::new(),
            losses: Losses::default(),
            counting: 0,
            rescued: BTreeMap::new(),
            patience: BTreeSet::new(),
            moving: BTreeSet::new(),
            outputs: VecDeque::new(),
            arrivals: 0,
            ended: 0,
            pace: Pace::default(),
            tally: Tally::default(),
            looked_at: Time::ZERO,
            look_at: None,
            draining: Draining::No,
            noted: (Census::default(), 0, 0),
            readiness: Readiness::NONE,
            turn: 0,
            scaler,
            outside: Queues::default(),
            rescaled: true,
        }
    }

    /// Takes a fact. Time that runs backwards is taken as standing still.
    pub fn handle(&mut self, now: Time, input: Input) {
        self.now = self.now.max(now);
        self.fleet.now = self.now;
        self.fire();
        match input {
            Input::WorkerJoined {
                worker,
                description,
            } => self.joined(worker, description),
            Input::WorkerLost { worker } => self.lost(worker),
            Input::Told { worker, report } => self.told(worker, report),
            Input::Submitted { flight, request } => self.submitted(flight, request),
            Input::Cancelled { flight, why } => self.cancelled(flight, why),
            Input::Counted { handoff, generated } => self.counted(handoff, generated),
            Input::Stalled { flight } => self.stalled(flight),
            Input::Flowing { flight } => self.alarms.set(flight, Alarm::Reader, None),
            Input::Commanded { worker, command } => self.commanded(worker, command),
            Input::PolicyChanged { policy } => self.policy_changed(policy),
            Input::Waiting { place, count } => self.wait_outside(place, count),
            Input::Woke => {}
            Input::Draining => {
                if self.draining == Draining::No {
                    self.draining = Draining::Asked;
                }
            }
        }
        self.settle();
    }

    /// The next thing to do, in order.
    pub fn poll(&mut self) -> Option<Output> {
        self.outputs.pop_front()
    }

    /// When to wake the brain at the latest, if nothing happens before.
    pub fn deadline(&self) -> Option<Time> {
        let door = self.doors.first().map(|(at, _)| *at);
        let patience = self.patience.first().map(|(at, _)| *at);
        [
            self.alarms.first(),
            door,
            patience,
            self.renew_at,
            self.look_at,
            self.scaler.as_ref().map(|scaler| scaler.deadline()),
        ]
        .into_iter()
        .flatten()
        .min()
    }

    /// Legs that were told of a hand-off and have not released it, ended flights' included.
    pub fn legs_open(&self) -> u32 {
        self.fleet.legs_open_in_all()
    }

    /// Asserts every invariant.
    pub fn check(&self) {
        self.fleet.check();
        self.alarms.check();
        self.line.check();
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
            let in_line = self.line.contains(&flight.place);
            match &flight.stage {
                Stage::Waiting => {
                    assert!(in_line, "{id} waits outside the line");
                    let alarm = self.alarms.get(*id, Alarm::Step);
                    assert!(alarm.is_some(), "{id} would wait for ever");
                    waiting += 1;
                }
                Stage::Counting(broken) => {
                    assert!(!in_line, "{id} is counted and waits");
                    let last = flight.attempts - 1;
                    assert_eq!(broken.fence.attempt, last, "{id} is fenced too low");
                    counting += 1;
                }
                Stage::Flying(attempt) => {
                    assert!(!in_line, "{id} flies and waits");
                    self.check_attempt(flight, attempt);
                }
            }
            let pauses = flight.pauses(self.now);
            let alarm = self.alarms.get(*id, Alarm::Retry);
            assert!(!pauses || in_line, "{id} pauses outside the line");
            assert!(!pauses || alarm.is_some(), "{id} would pause for ever");
            let flies = flight.attempt().is_some();
            assert!(flies || flight.moving.is_none(), "{id} moves from nowhere");
            let listed = self.moving.contains(id);
            assert_eq!(
                listed,
                flight.moving.is_some(),
                "{id} is not where it is listed"
            );
        }
        assert_eq!(waiting, self.line.len(), "the line holds a stranger");
        assert_eq!(counting, self.counting, "counts under way are miscounted");
        for flight in self.alarms.flights() {
            let known = self.flights.contains_key(&flight);
            assert!(known, "an alarm outlived {flight}");
        }
        for flight in self.rescued.keys() {
            assert!(
                self.flights.contains_key(flight),
                "{flight} needs no rescue"
            );
        }
        for flight in &self.moving {
            assert!(self.flights.contains_key(flight), "{flight} moves no more");
        }
        for (_, worker) in &self.patience {
            let stuck = self
                .fleet
                .life_of(*worker)
                .is_some_and(|w| self.fleet.is_stuck(w));
            assert!(stuck, "{worker} is waited for and not stuck");
        }
        for flight in self.leaving.keys() {
            assert!(self.fleet.legs_open(*flight) > 0, "{flight} has left");
        }
        self.check_promises();
    }

    fn check_attempt(&self, flight: &Flight, attempt: &Attempt) {
        let handoff = attempt.handoff;
        let alarm = self.alarms.get(handoff.flight, Alarm::Step);
        let decode = self.fleet.promised(attempt.decode, handoff);
        let sender = self.fleet.promised(attempt.prefill, attempt.sending());
        assert!(
            attempt.reserved || alarm.is_some(),
            "{handoff} waits for a reservation without an alarm"
        );
        let in_doubt = attempt.trouble.is_some() && alarm.is_some();
        assert!(
            attempt.finished.is_some() || decode.is_some() || in_doubt,
            "{handoff} generates nowhere"
        );
        assert!(
            attempt.prefilled || sender.is_some(),
            "{handoff}: nobody draws what comes before"
        );
        let Some(leg) = flight.leg() else {
            return;
        };
        let to = leg.handoff;
        assert!(attempt.landed && attempt.prefilled, "{to} moves too early");
        assert_eq!(leg.of, Some(handoff), "{to} moves from elsewhere");
        assert_eq!(leg.prefill, attempt.decode, "{to} moves from elsewhere");
        assert_ne!(leg.decode, attempt.decode, "{to} moves in place");
        assert!(!leg.landed, "{to} landed and is not the flight's attempt");
        assert!(
            leg.reserved || alarm.is_some(),
            "{to} waits for a reservation without an alarm"
        );
        let held = self.fleet.promised(leg.decode, to).is_some();
        assert!(held || leg.trouble.is_some(), "{to} moves to nowhere");
    }

    /// What is renewed is wanted: by the attempt that generates, or the one to which it moves.
    fn check_promises(&self) {
        for worker in self.fleet.workers() {
            let live = |promise: &Promise| promise.live;
            for (handoff, _) in worker.ledger.handoffs().filter(|(_, p)| live(p)) {
                let wanted = self.current(handoff).or(self.leg(handoff));
                let me = worker.me;
                assert!(
                    wanted.is_some_and(|a| a.decode == me || a.prefill == me),
                    "{me} is kept at {handoff}, which nobody wants"
                );
            }
        }
    }

    pub(crate) fn say(&mut self, output: Output) {
        self.outputs.push_back(output);
    }

    pub(crate) fn tell(&mut self, worker: WorkerRef, order: Order) {
        let last = match &order {
            Order::Reserve(order) if order.sender != worker => Some(order.handoff),
            Order::Prefill(order) => Some(order.handoff),
            _ => None,
        };
        self.fleet.ordered(worker, last);
        self.say(Output::Tell { worker, order });
    }

    pub(crate) fn note(&mut self, note: Note) {
        self.say(Output::Note(note));
    }

    // === timers ===

    fn fire(&mut self) {
        while let Some((id, alarm)) = self.alarms.due(self.now) {
            match alarm {
                Alarm::Step => self.timed_out(id),
                Alarm::Reader => self.reader_stayed_away(id),
                Alarm::Pause => self.rested(id),
                Alarm::Retry => self.pause_over(id),
            }
        }
        let mut opened = false;
        while let Some((at, worker)) = self.doors.first().copied() {
            if at > self.now {
                break;
            }
            self.doors.remove(&(at, worker));
            opened = true;
        }
        if opened {
            self.look_around();
        }
        while let Some((at, worker)) = self.patience.first().copied() {
            if at > self.now {
                break;
            }
            self.patience.remove(&(at, worker));
            self.abandon(worker);
        }
        if self.renew_at.is_some_and(|at| at <= self.now) {
            self.renew();
        }
        if self.look_at.is_some_and(|at| at <= self.now) {
            self.look_soon();
        }
    }

    /// Other promises hold for those who come, and another order in the line.
    fn policy_changed(&mut self, policy: Arc<SloPolicy>) {
        self.tally.keep(&policy);
        self.limits.policy = policy;
        self.rescale();
        self.serve_line();
    }

    /// Everybody who waits for room anywhere is looked at: streams before newcomers.
    fn look_around(&mut self) {
        self.rescue();
        self.evacuate(None);
        self.serve_line();
        self.grant_wishes(None);
    }

    /// The client's time to read runs from its first stall on.
    fn stalled(&mut self, id: FlightId) {
        let until = self.now + self.limits.reader_wait_max;
        if self.flights.contains_key(&id) && self.alarms.get(id, Alarm::Reader).is_none() {
            self.alarms.set(id, Alarm::Reader, Some(until));
        }
    }

    /// Renews every lease that is still wanted, and stops when there is none.
    fn renew(&mut self) {
        let mut orders = Vec::new();
        for worker in self.fleet.workers() {
            let live =
                |(id, promise): (HandoffId, &Promise)| (promise.live && promise.told).then_some(id);
            let handoffs: Vec<HandoffId> = worker.ledger.handoffs().filter_map(live).collect();
            if !handoffs.is_empty() {
                orders.push((worker.me, Order::Renew { handoffs }));
            }
        }
        self.renew_at = (!orders.is_empty()).then_some(self.now + self.limits.renew_every);
        for (worker, order) in orders {
            self.tell(worker, order);
        }
    }

    // === ending ===

    /// The flight's one end. Its legs are taken back before.
    pub(crate) fn end(&mut self, id: FlightId, ending: Ending) {
        self.end_with(id, ending, (None, CancelReason::Left));
    }

    /// Every token was produced.
    pub(crate) fn done(&mut self, id: FlightId, finish: Finish) {
        self.drop_legs(id, Failure::Rejected);
        let Finish {
            reason,
            output_tokens,
        } = finish;
        let told = (Some(output_tokens), CancelReason::Left);
        self.end_with(id, Ending::Done { reason }, told);
    }

    pub(crate) fn end_with(
        &mut self,
        id: FlightId,
        ending: Ending,
        (output_tokens, why): (Option<u32>, CancelReason),
    ) {
        self.alarms.forget(id);
        let Some(flight) = self.flights.remove(&id) else {
            return;
        };
        self.counting -= u32::from(matches!(flight.stage, Stage::Counting(_)));
        self.rescued.remove(&id);
        self.moving.remove(&id);
        self.line.leave(&flight.place);
        self.ended += 1;
        let timing = self.judged(&flight, (&ending, why), output_tokens);
        self.settle_account(&flight, (&ending, output_tokens));
        self.say(Output::End {
            flight: id,
            ending,
            output_tokens,
            timing,
        });
    }

    fn settle_readiness(&mut self) {
        let readiness = match self.draining {
            // Who waits for the first worker is taken in.
            Draining::No if self.hope().is_some() => Readiness::Ready,
            Draining::No => self.fleet.readiness(self.now, self.terms()),
            Draining::Asked | Draining::Said => Readiness::Draining,
        };
        if readiness != self.readiness {
            self.readiness = readiness;
            self.say(Output::Readiness(readiness));
        }
    }

    fn settle(&mut self) {
        let turned = self.turn != self.fleet.turns();
        if turned {
            self.turn = self.fleet.turns();
            self.look_around();
        }
        self.scale(turned);
        while let Some((worker, flight)) = self.freed.pop_first() {
            // Who was passed over and comes first is not to be sent back in the same breath.
            if self.head().is_none_or(|head| Some(head) != flight) {
                self.room_at(worker);
            }
        }
        if turned || self.rescaled || self.draining == Draining::Asked {
            self.rescaled = false;
            self.settle_readiness();
        }
        let stands = (
            self.fleet.census(),
            self.flights.len() as u32,
            self.line.len(),
        );
        if stands != self.noted {
            self.noted = stands;
            let (workers, flights, flights_waiting) = stands;
            self.note(Note::Fleet {
                workers,
                flights,
                flights_waiting,
            });
        }
        if self.draining == Draining::Asked && self.flights.is_empty() {
            self.draining = Draining::Said;
            self.say(Output::Drained);
        }
    }
}
