//! Submitting, placing, waiting.
//!
//! Owns: the first two orders' worth of an attempt, and who waits for what. Never: knows what becomes
//! of an attempt. Invariant: a flight waits with a time limit, and whoever waits first is placed
//! first; only one for which every worker is too small holds nobody up.

use crate::alarm::Alarm;
use crate::brain::{Brain, Draining};
use crate::candidates::Query;
use crate::event::Note;
use crate::flight::{Attempt, Flight, Stage};
use crate::line::Place;
use crate::policy::{Ask, Choice, NoPlace};
use crate::prefix::Content;
use cleave_domain::{Ending, FlightId, Order, Refusal, Request, Reserve, Time, WorkerRef};
use std::collections::BTreeSet;
use std::sync::Arc;
use std::time::Duration;

/// The least and the most a client is told to wait before it tries again.
const RETRY_AFTER: (Duration, Duration) = (Duration::from_millis(100), Duration::from_secs(30));

/// How fast flights find a place: what `retry_after` is computed from.
#[derive(Clone, Copy, Debug, Default)]
pub(crate) struct Pace {
    last: Option<Time>,
    gap: Duration,
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

impl Brain {
    pub(crate) fn submitted(&mut self, id: FlightId, request: Arc<Request>) {
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
            drawn_by: None,
            attempts: 0,
            failures: 0,
            failure: None,
            refusals: 0,
            excluded: BTreeSet::new(),
            wait_until: None,
            homeless: None,
            moving: None,
            stays: 0,
            avoided: BTreeSet::new(),
            yielded_at: None,
        };
        self.flights.insert(id, flight);
        if let Some(refusal) = refusal {
            return self.end(id, Ending::Refused(refusal));
        }
        let is_ahead = self.head().is_some_and(|head| head < place);
        match self.find(id) {
            Err(NoPlace::NoWorker) => self.end(id, Ending::Refused(Refusal::NoWorker)),
            Err(NoPlace::TooLong { tokens_max }) => {
                self.end(id, Ending::Refused(Refusal::TooLong { tokens_max }));
            }
            Ok(choice) if !is_ahead => self.start(id, &choice),
            Ok(_) | Err(NoPlace::Busy) => self.wait(id),
        }
    }

    /// Where the flight could go now.
    pub(crate) fn find(&self, id: FlightId) -> Result<Choice, NoPlace> {
        let flight = self.flights.get(&id).ok_or(NoPlace::NoWorker)?;
        self.fleet.choose(&self.query(flight))
    }

    /// The same, and remembers when nobody could ever take it.
    pub(crate) fn seek(&mut self, id: FlightId) -> Result<Choice, NoPlace> {
        let found = self.find(id);
        let hopeless = matches!(found, Err(NoPlace::TooLong { .. } | NoPlace::NoWorker));
        if let Some(flight) = self.flights.get_mut(&id).filter(|_| hopeless) {
            flight.homeless = Some(self.fleet.turns());
        }
        found
    }

    pub(crate) fn query<'a>(&self, flight: &'a Flight) -> Query<'a> {
        Query {
            ask: Ask::of(&flight.request, self.limits.expected_output_tokens),
            content: &flight.content,
            excluded: &flight.excluded,
            drawn_by: flight.drawn_by.as_ref().filter(|_| flight.given()),
            now: self.now,
        }
    }

    /// Begins an attempt: both legs are promised, the decode leg is asked first.
    pub(crate) fn start(&mut self, id: FlightId, choice: &Choice) {
        let context_tokens_max = self.fleet.context_tokens_max(choice.decode);
        let fingerprint = self.fleet.fingerprint(choice.decode).cloned();
        let Some(flight) = self.flights.get_mut(&id) else {
            return;
        };
        flight.drawn_by = fingerprint;
        let handoff = flight.name_attempt();
        flight.stage = Stage::Flying(Attempt {
            handoff,
            prefill: choice.prefill,
            decode: choice.decode,
            of: None,
            context_tokens_max,
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
        let until = self.now + self.limits.reserve_timeout;
        self.alarms.set(id, Alarm::Step, Some(until));
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

    /// Joins the line; a new flight ends where it is full.
    pub(crate) fn wait(&mut self, id: FlightId) {
        let limit = self.now + self.limits.queue_wait_max;
        let Some(flight) = self.flights.get_mut(&id) else {
            return;
        };
        if self.line.is_full() && flight.failure.is_none() {
            return self.give_up(id);
        }
        flight.stage = Stage::Waiting;
        flight.excluded.clear();
        flight.refusals = 0;
        let until = *flight.wait_until.get_or_insert(limit);
        self.line.join(flight.place);
        self.alarms.set(id, Alarm::Step, Some(until));
    }

    /// Who is to be placed next.
    pub(crate) fn head(&self) -> Option<Place> {
        let turn = Some(self.fleet.turns());
        let fits = |place: &&Place| {
            let flight = self.flights.get(&place.flight);
            flight.is_some_and(|flight| flight.homeless != turn)
        };
        self.line.places().find(fits).copied()
    }

    /// Something was let go, or reported anew: whoever waits for it is looked at. Streams that are to
    /// leave a worker go before newcomers, those that make room for others after them.
    pub(crate) fn room_at(&mut self, worker: WorkerRef) {
        self.rescue();
        self.evacuate(Some(worker));
        self.news_of(worker);
        self.grant_wishes(Some(worker));
    }

    /// News of a worker: looks at the line if it could help whoever is first.
    pub(crate) fn news_of(&mut self, worker: WorkerRef) {
        let head = self.head().and_then(|p| self.flights.get(&p.flight));
        if head.is_some_and(|flight| self.fleet.could_help(worker, &self.query(flight))) {
            self.serve_line();
        }
    }

    /// Places from the head on, and stops at the first that finds no room: overtaking would
    /// starve the long ones.
    pub(crate) fn serve_line(&mut self) {
        while let Some(place) = self.head() {
            match self.seek(place.flight) {
                Ok(choice) => self.start(place.flight, &choice),
                // It holds nobody up.
                Err(NoPlace::TooLong { .. } | NoPlace::NoWorker) => {}
                Err(NoPlace::Busy) => break,
            }
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

    pub(crate) fn retry_after(&self) -> Duration {
        let (least, most) = RETRY_AFTER;
        (self.pace.gap * (self.line.len() + 1)).clamp(least, most)
    }
}
