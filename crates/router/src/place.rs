//! Placing and waiting.
//!
//! Owns: the start of an attempt with its first order, and the waiting flights. Never: knows the
//! further way of an attempt, or whether a request is admitted; `admit` does. Invariant: a flight
//! waits with a time limit.

use crate::brain::RouterBrain;
use crate::candidates::{ChosenPlacement, PlacementQuery};
use crate::event::{DecisionOutcome, RouterNote, RoutingMode};
use crate::flight::{FlightAttempt, FlightPhase, FlightRecord};
use crate::forecast::{PlacementForecast, RequestNeed};
use crate::policy::{AttemptSize, NoPlacement, RoutingTerms};
use crate::queue::QueueKind;
use crate::timers::FlightTimer;
use cleave_domain::{
    Deadline, Ending, FlightId, OnDeadlineMiss, OnSloMiss, Order, ReserveOrder, RunOrder, Time,
    WorkerRef,
};
use std::sync::Arc;
use std::time::Duration;

/// Smallest and largest value of `retry_after`.
const RETRY_AFTER: (Duration, Duration) = (Duration::from_millis(100), Duration::from_secs(30));

/// Mean interval between placements, the basis of `retry_after`.
#[derive(Clone, Copy, Debug, Default)]
pub(crate) struct PlacementRate {
    last: Option<Time>,
    gap: Duration,
}

impl PlacementRate {
    /// Running mean over about eight placements.
    fn placed(&mut self, now: Time) {
        if let Some(last) = self.last {
            self.gap = (self.gap * 7 + now.since(last)) / 8;
        }
        self.last = Some(now);
    }
}

impl RouterBrain {
    /// The best placement of the flight now.
    pub(crate) fn find(&self, id: FlightId) -> Result<ChosenPlacement, NoPlacement> {
        let flight = self.flights.get(&id).ok_or(NoPlacement::NoWorker)?;
        let need = self.need(flight);
        let placement = self.fleet.choose(&self.query(flight, need.as_ref()))?;
        // A request for one token has no gap.
        let gaps = flight.request.stop.max_tokens > 1;
        let tpot = flight.request.slo.tpot.filter(|_| gaps);
        Ok(ChosenPlacement {
            tpot: tpot.filter(|_| self.limits.mode == RoutingMode::Slo),
            ..placement
        })
    }

    /// The same, and marks the flight if no worker could ever take it.
    pub(crate) fn seek(&mut self, id: FlightId) -> Result<ChosenPlacement, NoPlacement> {
        let found = self.find(id);
        let hopeless = matches!(
            found,
            Err(NoPlacement::TooLong { .. } | NoPlacement::NoWorker)
        );
        if let Some(flight) = self.flights.get_mut(&id).filter(|_| hopeless) {
            flight.unplaceable_at = Some(self.fleet.version());
        }
        found
    }

    pub(crate) fn query<'a>(
        &self,
        flight: &'a FlightRecord,
        need: Option<&'a RequestNeed>,
    ) -> PlacementQuery<'a> {
        PlacementQuery {
            ask: AttemptSize::of(&flight.request, self.limits.expected_output_tokens),
            content: &flight.content,
            excluded: &flight.excluded,
            failures: flight.failures,
            drawn_by: flight.drawn_by.as_ref().filter(|_| flight.has_output()),
            now: self.now,
            terms: self.terms(),
            need,
        }
    }

    pub(crate) fn terms(&self) -> RoutingTerms {
        RoutingTerms {
            mode: self.limits.mode,
            placement: self.limits.placement,
        }
    }

    /// Begins an attempt: both legs are claimed, and either one worker is ordered to run them, or
    /// the decode leg is ordered first.
    pub(crate) fn start(&mut self, id: FlightId, placement: &ChosenPlacement) {
        let choice = &placement.choice;
        self.decide(
            id,
            DecisionOutcome::Placed(choice.reason),
            placement.considered.clone(),
        );
        self.charge(id);
        let context_tokens_max = self.fleet.context_tokens_max(choice.decode);
        let fingerprint = self.fleet.fingerprint(choice.decode).cloned();
        let due = self.due_at(id, placement.forecast.as_ref());
        let Some(flight) = self.flights.get_mut(&id) else {
            return;
        };
        flight.drawn_by = fingerprint;
        let handoff = flight.name_attempt();
        flight.stage = FlightPhase::Flying(FlightAttempt {
            handoff,
            prefill: choice.prefill,
            decode: choice.decode,
            of: None,
            context_tokens_max,
            reserved: false,
            prefilled: false,
            leg_failure: None,
            landed: false,
            finished: None,
        });
        flight.forecast = placement.forecast;
        flight.due = due;
        flight.timestamps.began = Some(self.now);
        flight.pause_until = None;
        self.queue.leave(&flight.place);
        self.timers.set(id, FlightTimer::RetryDelay, None);
        let request = Arc::clone(&flight.request);
        let waited = self.now.since(flight.submitted);
        let due = self.due(id);
        let ask = AttemptSize::of(&request, self.limits.expected_output_tokens);
        self.fleet.claim_legs(handoff, placement, &ask);
        self.placement_rate.placed(self.now);
        let until = self.now + self.limits.reserve_timeout;
        self.timers.set(id, FlightTimer::StepTimeout, Some(until));
        self.renew_at
            .get_or_insert(self.now + self.limits.renew_every);
        self.was_placed(handoff, choice.cached_tokens);
        self.note(RouterNote::Placed {
            handoff,
            prefill: choice.prefill,
            decode: choice.decode,
            cached_tokens: choice.cached_tokens,
            waited,
        });
        let expected_output_tokens = self.limits.expected_output_tokens;
        let order = if choice.prefill == choice.decode {
            self.clock_ordered(id);
            Order::Run(RunOrder {
                handoff,
                request,
                expected_output_tokens,
                waited,
                due,
            })
        } else {
            Order::Reserve(ReserveOrder {
                handoff,
                request,
                sender: choice.prefill,
                expected_output_tokens,
                ahead_tokens: 0,
                waited,
                due,
            })
        };
        self.send_order(choice.decode, order);
    }

    /// Deadline of the next token of an attempt that begins now.
    fn due_at(&self, id: FlightId, forecast: Option<&PlacementForecast>) -> Option<Time> {
        let flight = self.flights.get(&id)?;
        let slo = &flight.request.slo;
        let after_first_token = forecast.map_or(Duration::ZERO, |forecast| {
            forecast.request.e2e.saturating_sub(forecast.request.ttft)
        });
        let by_end = slo.e2e.map(|e2e| e2e.saturating_sub(after_first_token));
        let left = slo.ttft.into_iter().chain(by_end).min()?;
        let queues = matches!(flight.on_miss, OnSloMiss::Queue(_));
        // A request that may wait, or goes on, has its deadline counted from now.
        let since = if queues || flight.has_output() {
            self.now
        } else {
            flight.submitted
        };
        Some(since + left)
    }

    /// The deadline as its workers receive it. Only a first attempt may be refused for being late.
    pub(crate) fn due(&self, id: FlightId) -> Option<Deadline> {
        let flight = self.flights.get(&id)?;
        let queues = matches!(flight.on_miss, OnSloMiss::Queue(_));
        let firm = self.limits.mode == RoutingMode::Slo && flight.is_new() && !queues;
        Some(Deadline {
            left: flight.due?.since(self.now),
            unmet: if firm {
                OnDeadlineMiss::Refuse
            } else {
                OnDeadlineMiss::Serve
            },
        })
    }

    /// Charges the expected service to the flight's accounts, once.
    fn charge(&mut self, id: FlightId) {
        let Some(flight) = self.flights.get(&id).filter(|f| f.charged == 0) else {
            return;
        };
        let ask = AttemptSize::of(&flight.request, self.limits.expected_output_tokens);
        let tokens = i64::from(ask.tokens_expected);
        let policy = Arc::clone(&self.limits.policy);
        self.tally.charge(flight.payer(), tokens, &policy);
        if let Some(flight) = self.flights.get_mut(&id) {
            flight.charged = tokens;
        }
    }

    /// Corrects the charge to the actual service.
    pub(crate) fn settle_account(
        &mut self,
        flight: &FlightRecord,
        ending: &Ending,
        output_tokens: Option<u32>,
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

    /// Joins the queue; a new flight ends where the queue, or its class's part of it, is full.
    pub(crate) fn wait(&mut self, id: FlightId) {
        let Some(flight) = self.flights.get(&id) else {
            return;
        };
        let class = self.class_of(flight);
        let full = class
            .queue_max
            .is_some_and(|max| self.queue.len_of(&flight.place.queue.class) >= max);
        let fresh = flight.failure.is_none();
        if fresh && full {
            return self.end_without_place(id);
        }
        if fresh && self.queue.is_full() {
            match self.queue.last_behind(&flight.place) {
                Some(last) => self.end_without_place(last),
                None => return self.end_without_place(id),
            }
        }
        let Some(flight) = self.flights.get(&id) else {
            return;
        };
        let timed = self.limits.mode == RoutingMode::Slo || flight.awaits_start;
        let limit = match flight.on_miss {
            // A class limits the wait before the first attempt; a stream that lost its worker is
            // older than that.
            OnSloMiss::Queue(limit) if timed && flight.is_new() => flight.submitted + limit,
            _ => {
                let from = flight.pause_until.unwrap_or(self.now).max(self.now);
                from + self.limits.queue_wait_max.max(self.start_awaited())
            }
        };
        let pauses = flight.pauses(self.now);
        let by_time = fresh && self.limits.mode == RoutingMode::Slo;
        self.decide(id, DecisionOutcome::Waits, Vec::new());
        let Some(flight) = self.flights.get_mut(&id) else {
            return;
        };
        flight.stage = FlightPhase::Waiting;
        if !pauses {
            flight.excluded.clear();
        }
        flight.late_workers.clear();
        flight.refusals = 0;
        let until = *flight.wait_until.get_or_insert(limit);
        let latest = Some(flight.place.latest_start).filter(|_| by_time);
        if !fresh {
            flight.place.queue.kind = QueueKind::Resumed;
        }
        self.queue.join(&flight.place);
        let until = until.min(latest.unwrap_or(until));
        self.timers.set(id, FlightTimer::StepTimeout, Some(until));
    }

    /// Offers released or newly reported room to waiting flights. Streams that are to leave a
    /// worker go before new flights, and those that make room for others after them.
    pub(crate) fn room_appeared(&mut self, worker: WorkerRef) {
        self.fail_over_stuck();
        self.evacuate(Some(worker));
        self.news_of(worker);
        self.grant_migration_requests(Some(worker));
    }

    /// Makes a pass over the queue after news of a worker, if that could help the first flight.
    pub(crate) fn news_of(&mut self, worker: WorkerRef) {
        if self.queue.len() == 0 {
            return;
        }
        if self.overtakes() {
            return self.serve_queue_soon();
        }
        let head = self.head().and_then(|id| self.flights.get(&id));
        if head.is_some_and(|flight| self.fleet.could_help(worker, &self.query(flight, None))) {
            self.serve_queue();
        }
    }

    /// Closes a worker for `wait`, and makes a pass over the queue then.
    pub(crate) fn close_worker(&mut self, worker: WorkerRef, wait: Duration) {
        let (least, _) = RETRY_AFTER;
        // A worker's own estimate may be long; another try each second costs nothing.
        let until = self.now + wait.clamp(least / 10, Duration::from_secs(1));
        self.fleet.close_until(worker, until);
        self.retry_at.insert((until, worker.worker));
    }

    pub(crate) fn retry_after(&self) -> Duration {
        let (least, most) = RETRY_AFTER;
        (self.placement_rate.gap * (self.queue.len() + 1)).clamp(least, most)
    }
}
