//! Placing and waiting.
//!
//! Owns: the first two orders' worth of an attempt, and who waits for what. Never: knows what becomes
//! of an attempt, or whether a request is taken on; `admit` does. Invariant: a flight waits with a time
//! limit.

use crate::alarm::Alarm;
use crate::brain::Brain;
use crate::candidates::{Placing, Query};
use crate::event::{Decided, Mode, Note};
use crate::flight::{Attempt, Flight, Stage};
use crate::forecast::{Need, Outlook};
use crate::line::Kind;
use crate::policy::{Ask, NoPlace, Terms};
use cleave_domain::{Due, DueUnmet, Ending, FlightId, Order, Reserve, Time, Unmet, WorkerRef};
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
    /// Where the flight could go now.
    pub(crate) fn find(&self, id: FlightId) -> Result<Placing, NoPlace> {
        let flight = self.flights.get(&id).ok_or(NoPlace::NoWorker)?;
        let need = self.need(flight);
        let placing = self.fleet.choose(&self.query(flight, need.as_ref()))?;
        // Whoever gets one token is promised no gap.
        let gaps = flight.request.stop.max_tokens > 1;
        let tpot = flight.request.slo.tpot.filter(|_| gaps);
        Ok(Placing {
            tpot: tpot.filter(|_| self.limits.mode == Mode::Slo),
            ..placing
        })
    }

    /// The same, and remembers when nobody could ever take it.
    pub(crate) fn seek(&mut self, id: FlightId) -> Result<Placing, NoPlace> {
        let found = self.find(id);
        let hopeless = matches!(found, Err(NoPlace::TooLong { .. } | NoPlace::NoWorker));
        if let Some(flight) = self.flights.get_mut(&id).filter(|_| hopeless) {
            flight.homeless = Some(self.fleet.turns());
        }
        found
    }

    pub(crate) fn query<'a>(&self, flight: &'a Flight, need: Option<&'a Need>) -> Query<'a> {
        Query {
            ask: Ask::of(&flight.request, self.limits.expected_output_tokens),
            content: &flight.content,
            excluded: &flight.excluded,
            failures: flight.failures,
            drawn_by: flight.drawn_by.as_ref().filter(|_| flight.given()),
            now: self.now,
            terms: self.terms(),
            need,
        }
    }

    pub(crate) fn terms(&self) -> Terms {
        Terms {
            mode: self.limits.mode,
            placement: self.limits.placement,
        }
    }

    /// Begins an attempt: both legs are promised, the decode leg is asked first.
    pub(crate) fn start(&mut self, id: FlightId, placing: &Placing) {
        let choice = &placing.choice;
        self.decide(
            id,
            Decided::Placed(choice.reason),
            placing.considered.clone(),
        );
        self.charge(id);
        let context_tokens_max = self.fleet.context_tokens_max(choice.decode);
        let fingerprint = self.fleet.fingerprint(choice.decode).cloned();
        let due = self.due_at(id, placing.outlook.as_ref());
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
        flight.outlook = placing.outlook;
        flight.due = due;
        flight.clock.began = Some(self.now);
        flight.pause_until = None;
        self.line.leave(&flight.place);
        self.alarms.set(id, Alarm::Retry, None);
        let request = Arc::clone(&flight.request);
        let waited = self.now.since(flight.submitted);
        let due = self.due(id);
        let ask = Ask::of(&request, self.limits.expected_output_tokens);
        self.fleet.promise(handoff, placing, &ask);
        self.pace.placed(self.now);
        let until = self.now + self.limits.reserve_timeout;
        self.alarms.set(id, Alarm::Step, Some(until));
        self.renew_at
            .get_or_insert(self.now + self.limits.renew_every);
        self.was_placed(handoff, choice.cached_tokens);
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
            due,
        };
        self.tell(choice.decode, Order::Reserve(reserve));
    }

    /// When the next token of an attempt that begins now is due.
    fn due_at(&self, id: FlightId, outlook: Option<&Outlook>) -> Option<Time> {
        let flight = self.flights.get(&id)?;
        let slo = &flight.request.slo;
        let tail = outlook.map_or(Duration::ZERO, |outlook| {
            outlook.forecast.e2e.saturating_sub(outlook.forecast.ttft)
        });
        let by_end = slo.e2e.map(|e2e| e2e.saturating_sub(tail));
        let left = slo.ttft.into_iter().chain(by_end).min()?;
        let queues = matches!(flight.unmet, Unmet::Queue(_));
        // What was let wait, and what goes on, is due as if it came now.
        let since = match queues || flight.given() {
            true => self.now,
            false => flight.submitted,
        };
        Some(since + left)
    }

    /// The same as its workers are told. Only a first attempt may be refused for being late.
    pub(crate) fn due(&self, id: FlightId) -> Option<Due> {
        let flight = self.flights.get(&id)?;
        let queues = matches!(flight.unmet, Unmet::Queue(_));
        let firm = self.limits.mode == Mode::Slo && flight.is_new() && !queues;
        Some(Due {
            left: flight.due?.since(self.now),
            unmet: match firm {
                true => DueUnmet::Refuse,
                false => DueUnmet::Serve,
            },
        })
    }

    /// Counts what the flight is expected to be served on its accounts, once.
    fn charge(&mut self, id: FlightId) {
        let Some(flight) = self.flights.get(&id).filter(|f| f.charged == 0) else {
            return;
        };
        let ask = Ask::of(&flight.request, self.limits.expected_output_tokens);
        let tokens = i64::from(ask.tokens_expected);
        let policy = Arc::clone(&self.limits.policy);
        self.tally.charge(flight.payer(), tokens, &policy);
        if let Some(flight) = self.flights.get_mut(&id) {
            flight.charged = tokens;
        }
    }

    /// What it was served in truth.
    pub(crate) fn settle_account(
        &mut self,
        flight: &Flight,
        (ending, output_tokens): (&Ending, Option<u32>),
    ) {
        let output = output_tokens.unwrap_or(flight.request.generated.len() as u32);
        let served = match ending {
            Ending::Refused(_) => 0,
            _ => flight.request.prompt.len() as i64 + i64::from(output),
        };
        if flight.charged > 0 {
            let policy = Arc::clone(&self.limits.policy);
            self.tally
                .charge(flight.payer(), served - flight.charged, &policy);
        }
        self.tally.close(flight.payer());
    }

    /// Joins the line; a new flight ends where it, or the part of its class, is full.
    pub(crate) fn wait(&mut self, id: FlightId) {
        let Some(flight) = self.flights.get(&id) else {
            return;
        };
        let class = self.class_of(flight);
        let full = class
            .queue_max
            .is_some_and(|max| self.line.len_of(&flight.place.queue.class) >= max);
        let fresh = flight.failure.is_none();
        if fresh && full {
            return self.give_up(id);
        }
        if fresh && self.line.is_full() {
            match self.line.displaced_by(&flight.place) {
                Some(last) => self.give_up(last),
                None => return self.give_up(id),
            }
        }
        let Some(flight) = self.flights.get(&id) else {
            return;
        };
        let timed = self.limits.mode == Mode::Slo || flight.hopes;
        let limit = match flight.unmet {
            // A class bounds the wait before the first attempt; a stream that lost its worker is older.
            Unmet::Queue(limit) if timed && flight.is_new() => flight.submitted + limit,
            _ => {
                let from = flight.pause_until.unwrap_or(self.now).max(self.now);
                from + self.limits.queue_wait_max.max(self.start_awaited())
            }
        };
        let pauses = flight.pauses(self.now);
        let by_time = fresh && self.limits.mode == Mode::Slo;
        self.decide(id, Decided::Waits, Vec::new());
        let Some(flight) = self.flights.get_mut(&id) else {
            return;
        };
        flight.stage = Stage::Waiting;
        if !pauses {
            flight.excluded.clear();
        }
        flight.late.clear();
        flight.refusals = 0;
        let until = *flight.wait_until.get_or_insert(limit);
        let latest = Some(flight.place.latest).filter(|_| by_time);
        if !fresh {
            flight.place.queue.kind = Kind::Resumed;
        }
        self.line.join(&flight.place);
        let until = until.min(latest.unwrap_or(until));
        self.alarms.set(id, Alarm::Step, Some(until));
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
        if self.line.len() == 0 {
            return;
        }
        if self.overtakes() {
            return self.look_soon();
        }
        let head = self.head().and_then(|id| self.flights.get(&id));
        if head.is_some_and(|flight| self.fleet.could_help(worker, &self.query(flight, None))) {
            self.serve_line();
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
