//! The router's brain: its four kinds of methods, its timers and its line.
//!
//! - *Facts*: [`Brain::handle`] takes one, with the time.
//! - *Commands*: [`Brain::poll`] gives one at a time; drain it before the next fact.
//! - *Wake-ups*: [`Brain::deadline`] says when to hand in [`Input::Woke`] at the latest.
//! - *Checks*: [`Brain::check`] asserts every invariant; affordable in tests and simulation.
//!
//! Owns: the flights, the line, the timers. Never: sees a generated token; those go past it.
//! Invariant: every flight submitted ends in exactly one [`Output::End`].

use crate::event::{Census, Input, Limits, Note, Output, Readiness};
use crate::fleet::{Fleet, Query};
use crate::flight::{Attempt, Flight, Stage};
use crate::line::{Line, Place};
use crate::policy::{Ask, Choice, NoPlace};
use crate::prefix::Content;
use cleave_domain::{
    Ending, Failure, FlightId, HandoffId, Order, Refusal, Request, Reserve, Time, WorkerId,
    WorkerRef,
};
use std::collections::{BTreeMap, BTreeSet, VecDeque};
use std::sync::Arc;
use std::time::Duration;

/// The least and the most a client is told to wait before it tries again.
const RETRY_AFTER: (Duration, Duration) = (Duration::from_millis(100), Duration::from_secs(30));

/// Decides for a fleet; see the module's first lines for how to drive it.
#[derive(Debug)]
pub struct Brain {
    pub(crate) limits: Limits,
    pub(crate) now: Time,
    pub(crate) fleet: Fleet,
    pub(crate) flights: BTreeMap<FlightId, Flight>,
    pub(crate) line: Line,
    /// One per flight at most.
    pub(crate) timers: BTreeSet<(Time, FlightId)>,
    /// When a worker that refused may be asked again.
    doors: BTreeSet<(Time, WorkerId)>,
    /// Runs while anything is leased.
    renew_at: Option<Time>,
    /// Cancelled flights whose legs are not all released, since when.
    pub(crate) leaving: BTreeMap<FlightId, Time>,
    outputs: VecDeque<Output>,
    arrivals: u64,
    ended: u64,
    /// Between placements, on average, while there is a line.
    pace: Pace,
    draining: Draining,
    noted: (Census, u32, u32),
    /// What was said last, of which turn of the fleet.
    readiness: (u64, Readiness),
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Draining {
    No,
    Asked,
    Said,
}

/// How fast flights find a place: what `retry_after` is computed from.
#[derive(Clone, Copy, Debug, Default)]
struct Pace {
    last: Option<Time>,
    gap: Duration,
}

impl Brain {
    /// A router that knows no worker yet.
    pub fn new(limits: Limits) -> Self {
        Self {
            line: Line::new(limits.queue_max),
            limits,
            now: Time::ZERO,
            fleet: Fleet::default(),
            flights: BTreeMap::new(),
            timers: BTreeSet::new(),
            doors: BTreeSet::new(),
            renew_at: None,
            leaving: BTreeMap::new(),
            outputs: VecDeque::new(),
            arrivals: 0,
            ended: 0,
            pace: Pace::default(),
            draining: Draining::No,
            noted: (Census::default(), 0, 0),
            readiness: (0, Readiness::NONE),
        }
    }

    /// Takes a fact. Time that runs backwards is taken as standing still.
    pub fn handle(&mut self, now: Time, input: Input) {
        self.now = self.now.max(now);
        self.fire();
        match input {
            Input::WorkerJoined {
                worker,
                description,
            } => self.joined(worker, description),
            Input::WorkerLost { worker } => self.lost(worker),
            Input::Told { worker, report } => self.told(worker, report),
            Input::Submitted { flight, request } => self.submitted(flight, request),
            Input::Cancelled { flight } => self.cancelled(flight),
            Input::Counted { .. }
            | Input::Stalled { .. }
            | Input::Flowing { .. }
            | Input::Commanded { .. } => {}
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
        let timer = self.timers.first().map(|(at, _)| *at);
        let door = self.doors.first().map(|(at, _)| *at);
        [timer, door, self.renew_at].into_iter().flatten().min()
    }

    /// Legs that were told of a hand-off and have not released it, ended flights' included.
    pub fn legs_open(&self) -> u32 {
        self.fleet.legs_open_in_all()
    }

    /// Asserts every invariant.
    pub fn check(&self) {
        self.fleet.check();
        assert_eq!(
            self.arrivals,
            self.ended + self.flights.len() as u64,
            "flights submitted, ended and under way do not add up"
        );
        let mut waiting = 0;
        for (id, flight) in &self.flights {
            let in_line = self.line.contains(&flight.place);
            if let Some(at) = flight.timer {
                assert!(self.timers.contains(&(at, *id)), "{id} lost its timer");
            }
            match &flight.stage {
                Stage::Waiting => {
                    assert!(in_line, "{id} waits outside the line");
                    assert!(flight.timer.is_some(), "{id} would wait for ever");
                    waiting += 1;
                }
                Stage::Flying(attempt) => {
                    assert!(!in_line, "{id} flies and waits");
                    self.check_attempt(flight, attempt);
                }
            }
        }
        assert_eq!(waiting, self.line.len(), "the line holds a stranger");
        let timers = self.flights.values().filter(|f| f.timer.is_some()).count();
        assert_eq!(timers, self.timers.len(), "a timer outlived its flight");
        for flight in self.leaving.keys() {
            assert!(self.fleet.legs_open(*flight) > 0, "{flight} has left");
        }
    }

    fn check_attempt(&self, flight: &Flight, attempt: &Attempt) {
        let handoff = attempt.handoff;
        let decode = self.fleet.promised(attempt.decode, handoff);
        let prefill = self.fleet.promised(attempt.prefill, handoff);
        assert!(
            attempt.reserved || flight.timer.is_some(),
            "{handoff} waits for a reservation without a timer"
        );
        let in_doubt = attempt.trouble.is_some() && flight.timer.is_some();
        assert!(
            attempt.finished.is_some() || decode.is_some() || in_doubt,
            "{handoff} generates nowhere"
        );
        assert!(
            attempt.prefilled || prefill.is_some(),
            "{handoff} runs its prompt nowhere"
        );
    }

    pub(crate) fn say(&mut self, output: Output) {
        self.outputs.push_back(output);
    }

    pub(crate) fn tell(&mut self, worker: WorkerRef, order: Order) {
        self.say(Output::Tell { worker, order });
    }

    pub(crate) fn note(&mut self, note: Note) {
        self.say(Output::Note(note));
    }

    // === timers ===

    pub(crate) fn set_timer(&mut self, id: FlightId, at: Option<Time>) {
        let Some(flight) = self.flights.get_mut(&id) else {
            return;
        };
        if let Some(old) = flight.timer.take() {
            self.timers.remove(&(old, id));
        }
        flight.timer = at;
        if let Some(at) = at {
            self.timers.insert((at, id));
        }
    }

    fn fire(&mut self) {
        while let Some((at, id)) = self.timers.first().copied() {
            if at > self.now {
                break;
            }
            self.set_timer(id, None);
            self.timed_out(id);
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
            self.serve_line();
        }
        if self.renew_at.is_some_and(|at| at <= self.now) {
            self.renew();
        }
    }

    /// Renews every lease that is still wanted, and stops when there is none.
    fn renew(&mut self) {
        let mut orders = Vec::new();
        for worker in self.fleet.workers() {
            let live = |(id, promise): (HandoffId, &crate::ledger::Promise)| {
                (promise.live && promise.told).then_some(id)
            };
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

    /// Does not ask a worker again before `wait` has passed, and looks at the line then.
    pub(crate) fn shut(&mut self, worker: WorkerRef, wait: Duration) {
        let (least, _) = RETRY_AFTER;
        // A worker's own estimate may be long; a second look each second costs nothing.
        let until = self.now + wait.clamp(least / 10, Duration::from_secs(1));
        self.fleet.shut(worker, until);
        self.doors.insert((until, worker.worker));
    }

    // === submitting and placing ===

    fn submitted(&mut self, id: FlightId, request: Arc<Request>) {
        assert!(!self.flights.contains_key(&id), "{id} was submitted twice");
        self.arrivals += 1;
        let refusal = if self.draining != Draining::No {
            Some(Refusal::Draining)
        } else if self.flights.len() >= self.limits.flights_max as usize {
            let retry_after = self.retry_after();
            Some(Refusal::QueueFull { retry_after })
        } else {
            None
        };
        if let Some(refusal) = refusal {
            self.ended += 1;
            let ending = Ending::Refused(refusal);
            self.say(Output::End {
                flight: id,
                ending,
                output_tokens: None,
            });
            return;
        }
        let place = Place {
            priority: request.priority,
            arrival: self.arrivals,
            flight: id,
        };
        let flight = Flight {
            content: Content::of(&request, self.fleet.block_sizes()),
            request,
            place,
            submitted: self.now,
            stage: Stage::Waiting,
            attempts: 0,
            failures: 0,
            failure: None,
            refusals: 0,
            excluded: BTreeSet::new(),
            wait_until: None,
            emitted: false,
            timer: None,
        };
        self.flights.insert(id, flight);
        match self.find(id) {
            Err(NoPlace::NoWorker) => self.end(id, Ending::Refused(Refusal::NoWorker)),
            Err(NoPlace::TooLong { tokens_max }) => {
                self.end(id, Ending::Refused(Refusal::TooLong { tokens_max }));
            }
            Ok(choice) if !self.line.is_ahead_of(&place) => self.start(id, &choice),
            Ok(_) | Err(NoPlace::Busy) => self.wait(id),
        }
    }

    /// Where the flight could go now.
    pub(crate) fn find(&self, id: FlightId) -> Result<Choice, NoPlace> {
        let flight = self.flights.get(&id).ok_or(NoPlace::NoWorker)?;
        self.fleet.choose(&self.query(flight))
    }

    fn query<'a>(&self, flight: &'a Flight) -> Query<'a> {
        Query {
            ask: self.ask(flight),
            content: &flight.content,
            excluded: &flight.excluded,
            now: self.now,
        }
    }

    fn ask(&self, flight: &Flight) -> Ask {
        Ask::of(&flight.request, self.limits.expected_output_tokens)
    }

    /// Begins an attempt: both legs are promised, the decode leg is asked first.
    pub(crate) fn start(&mut self, id: FlightId, choice: &Choice) {
        let Some(flight) = self.flights.get_mut(&id) else {
            return;
        };
        let handoff = HandoffId {
            flight: id,
            attempt: flight.attempts,
        };
        flight.attempts += 1;
        flight.stage = Stage::Flying(Attempt {
            handoff,
            prefill: choice.prefill,
            decode: choice.decode,
            reserved: false,
            prefilled: false,
            trouble: None,
            landed: false,
            finished: None,
        });
        self.line.leave(&flight.place);
        let request = Arc::clone(&flight.request);
        let waited = self.now.since(flight.submitted);
        let ask = Ask::of(&request, self.limits.expected_output_tokens);
        self.fleet.promise(handoff, choice, &ask);
        self.pace.placed(self.now);
        self.set_timer(id, Some(self.now + self.limits.reserve_timeout));
        self.renew_at
            .get_or_insert(self.now + self.limits.renew_every);
        self.note(Note::Placed {
            handoff,
            prefill: choice.prefill,
            decode: choice.decode,
            cached_tokens: choice.cached_tokens,
            waited,
        });
        let reserve = Reserve {
            handoff,
            request,
            sender: choice.prefill,
            expected_output_tokens: self.limits.expected_output_tokens,
            ahead_tokens: 0,
            waited,
        };
        self.tell(choice.decode, Order::Reserve(reserve));
    }

    /// Joins the line, or ends where it is full.
    pub(crate) fn wait(&mut self, id: FlightId) {
        if self.line.is_full() {
            self.give_up(id);
            return;
        }
        let limit = self.now + self.limits.queue_wait_max;
        let Some(flight) = self.flights.get_mut(&id) else {
            return;
        };
        flight.stage = Stage::Waiting;
        flight.excluded.clear();
        flight.refusals = 0;
        let until = *flight.wait_until.get_or_insert(limit);
        self.line.join(flight.place);
        self.set_timer(id, Some(until));
    }

    /// There is no room for the flight: refused if it is untouched, failed if it was tried.
    pub(crate) fn give_up(&mut self, id: FlightId) {
        let retry_after = self.retry_after();
        let exists = !matches!(self.find(id), Err(NoPlace::NoWorker));
        let Some(flight) = self.flights.get(&id) else {
            return;
        };
        let ending = match &flight.failure {
            Some(last) => Ending::Failed(Failure::RetriesSpent(Box::new(last.clone()))),
            None if flight.emitted => Ending::Failed(Failure::Rejected),
            None if exists => Ending::Refused(Refusal::QueueFull { retry_after }),
            None => Ending::Refused(Refusal::NoWorker),
        };
        self.end(id, ending);
    }

    /// News of a worker: looks at the line if it could help whoever is first.
    pub(crate) fn news_of(&mut self, worker: WorkerRef) {
        let head = self.line.head().and_then(|p| self.flights.get(&p.flight));
        if head.is_some_and(|flight| self.fleet.could_help(worker, &self.query(flight))) {
            self.serve_line();
        }
    }

    /// Places from the head on, and stops at the first that finds no room: overtaking would
    /// starve the long ones.
    pub(crate) fn serve_line(&mut self) {
        while let Some(place) = self.line.head() {
            match self.find(place.flight) {
                Ok(choice) => self.start(place.flight, &choice),
                Err(_) => break,
            }
        }
    }

    fn retry_after(&self) -> Duration {
        let (least, most) = RETRY_AFTER;
        (self.pace.gap * (self.line.len() + 1)).clamp(least, most)
    }

    // === ending ===

    /// The flight's one end. Its legs are taken back before.
    pub(crate) fn end(&mut self, id: FlightId, ending: Ending) {
        self.set_timer(id, None);
        let Some(flight) = self.flights.remove(&id) else {
            return;
        };
        self.line.leave(&flight.place);
        self.ended += 1;
        self.say(Output::End {
            flight: id,
            ending,
            output_tokens: None,
        });
    }

    fn settle_readiness(&mut self) {
        let (turn, said) = self.readiness;
        let draining = self.draining != Draining::No;
        if said == Readiness::Draining || (turn == self.fleet.turns() && !draining) {
            return;
        }
        let readiness = match draining {
            true => Readiness::Draining,
            false => self.fleet.readiness(self.now),
        };
        self.readiness = (self.fleet.turns(), readiness);
        if readiness != said {
            self.say(Output::Readiness(readiness));
        }
    }

    fn settle(&mut self) {
        self.settle_readiness();
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

impl Pace {
    /// An average over about eight placements.
    fn placed(&mut self, now: Time) {
        if let Some(last) = self.last {
            self.gap = (self.gap * 7 + now.since(last)) / 8;
        }
        self.last = Some(now);
    }
}
