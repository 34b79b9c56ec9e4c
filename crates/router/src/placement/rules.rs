//! The needs of a flight, and the placements that meet them.
//!
//! Owns: the reading of a request, a class and recent service into a query, the deadlines of an
//! attempt, and the action for a target that cannot be met. Never: changes anything, or predicts;
//! `forecast` does. Invariant: a request that has failed once, or has a token with its client, has
//! no target for which it could be refused.

#[cfg(test)]
mod tests;

use crate::accounting::tally::ServiceTally;
use crate::event::{LegPlacement, RouterLimits, RouterReadiness, RoutingMode};
use crate::fleet::RouterFleet;
use crate::flight::state::FlightRecord;
use crate::placement::candidates::{ChosenPlacement, PlacementQuery};
use crate::placement::forecast::{PlacementForecast, PlacementPriority, RequestNeed, TargetMiss};
use crate::placement::policy::{AttemptSize, NoPlacement};
use crate::queue::{FlightQueue, QueueId, QueueKind, QueuePlace};
use crate::scaling::workers_expected;
use cleave_domain::{
    Deadline, FlightId, OnDeadlineMiss, OnSloMiss, Refusal, Request, SloClass, SloMetric,
    SloPolicy, Time,
};
use std::sync::Arc;
use std::time::Duration;

/// How often a flight that finds no room may be overtaken.
pub(crate) const OVERTAKEN_MAX: u32 = 16;
/// Quantile of recent answers that is expected as a request's length, in thousandths.
const ANSWER_PERMILLE: usize = 750;
/// The same for other sequences that a placement competes with.
const LONG_PERMILLE: usize = 950;
/// A request that yields leaves this part of the tightest gap that any class promises.
const SPARED_PARTS: u32 = 8;
/// `retry_after` of a request that could not be served on an idle fleet either.
const RETRY_AFTER_NEVER: Duration = Duration::from_secs(30);

/// The facts from which a placement follows.
#[derive(Clone, Copy, Debug)]
pub(crate) struct PlacementRules<'a> {
    pub(crate) now: Time,
    pub(crate) limits: &'a RouterLimits,
    pub(crate) fleet: &'a RouterFleet,
    pub(crate) tally: &'a ServiceTally,
}

/// The answer to a target that cannot be met, by the rule of the flight's class.
#[derive(Clone, Debug, PartialEq)]
pub(crate) enum UnmetAction {
    Wait,
    Downgrade(SloClass),
    Refuse(Refusal),
}

/// How overtaking affects a flight that finds no room.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum OvertakeRule {
    /// It may be overtaken, without a count.
    Uncounted,
    /// It may be overtaken a limited number of times, which are counted.
    Counted,
    /// It may not be overtaken.
    Forbidden,
}

impl FlightRecord {
    pub(crate) fn class<'a>(&self, policy: &'a SloPolicy) -> &'a SloClass {
        policy.class(&self.place.queue.class)
    }

    /// Whether it may still be refused.
    pub(crate) fn is_new(&self) -> bool {
        self.failures.last().is_none() && !self.has_output()
    }

    /// Deadline of its prompt, measured from its arrival.
    pub(crate) fn prompt_deadline(&self) -> Option<Duration> {
        prompt_deadline(&self.request)
    }

    /// The query for a place of this flight.
    pub(crate) fn query<'a>(
        &'a self,
        need: Option<&'a RequestNeed>,
        limits: &RouterLimits,
        now: Time,
    ) -> PlacementQuery<'a> {
        let mut terms = limits.terms();
        if self.request.pooling.is_some() {
            // One worker runs its prompt, and nothing is decoded.
            terms.placement = LegPlacement::Whole;
        }
        PlacementQuery {
            ask: AttemptSize::of(&self.request, limits.expected_output_tokens),
            content: &self.content,
            adapter: self.request.adapter,
            excluded: self.refusals.excluded(),
            failures: self.failures.failures(),
            drawn_by: self.drawn_by.as_ref().filter(|_| self.has_output()),
            now,
            terms,
            need,
        }
    }

    /// The deadline as its workers receive it. Only a first attempt may be refused for being late.
    pub(crate) fn deadline(&self, limits: &RouterLimits, now: Time) -> Option<Deadline> {
        let queues = matches!(self.on_miss, OnSloMiss::Queue(_));
        let firm = limits.mode == RoutingMode::Slo && self.is_new() && !queues;
        Some(Deadline {
            left: self.due?.since(now),
            unmet: if firm {
                OnDeadlineMiss::Refuse
            } else {
                OnDeadlineMiss::Serve
            },
        })
    }

    /// Deadline of the next token of an attempt that begins now.
    pub(crate) fn due_at(&self, forecast: Option<&PlacementForecast>, now: Time) -> Option<Time> {
        let slo = &self.request.slo;
        let after_first_token = forecast.map_or(Duration::ZERO, |forecast| {
            forecast.request.e2e.saturating_sub(forecast.request.ttft)
        });
        let by_end = slo.e2e.map(|e2e| e2e.saturating_sub(after_first_token));
        let left = slo.ttft.into_iter().chain(by_end).min()?;
        let queues = matches!(self.on_miss, OnSloMiss::Queue(_));
        // A request that may wait, or goes on, has its deadline counted from now.
        let since = if queues || self.has_output() {
            now
        } else {
            self.submitted
        };
        Some(since + left)
    }
}

impl<'a> PlacementRules<'a> {
    /// Whether a flight that finds no place may be overtaken.
    pub(crate) fn overtakes(&self) -> bool {
        self.limits.mode == RoutingMode::Slo && self.fleet.priced()
    }

    /// How overtaking affects this flight, if it finds no room.
    pub(crate) fn overtake_rule(&self, flight: &FlightRecord) -> OvertakeRule {
        if !self.overtakes() {
            OvertakeRule::Forbidden
        } else if self.yields(flight) {
            OvertakeRule::Uncounted
        } else if flight.overtaken < OVERTAKEN_MAX {
            OvertakeRule::Counted
        } else {
            OvertakeRule::Forbidden
        }
    }

    /// Whether it takes only what flights with targets leave.
    fn yields(&self, flight: &FlightRecord) -> bool {
        let slo = &flight.request.slo;
        let none = slo.ttft.is_none() && slo.tpot.is_none() && slo.e2e.is_none();
        none && flight.is_new() && self.limits.policy.classes.iter().any(has_targets)
    }

    /// None where times do not decide, or prices are unknown.
    pub(crate) fn need(&self, flight: &FlightRecord) -> Option<RequestNeed> {
        if !self.overtakes() {
            return None;
        }
        let request = &flight.request;
        let generated = request.generated.len() as u32;
        let left = request.stop.max_tokens.saturating_sub(generated).max(1);
        let class = flight.class(&self.limits.policy);
        let usual = self.tally.answer_tokens(&class.name, ANSWER_PERMILLE);
        let usual = usual.unwrap_or(self.limits.expected_output_tokens);
        let long = self.tally.answer_tokens(&class.name, LONG_PERMILLE);
        let long = long.unwrap_or(self.limits.expected_output_tokens.saturating_mul(2));
        let slo = Some(&request.slo).filter(|_| flight.is_new());
        let gaps = self
            .limits
            .policy
            .classes
            .iter()
            .filter_map(|class| class.tpot);
        Some(RequestNeed {
            ask: AttemptSize::of(request, self.limits.expected_output_tokens),
            now: self.now,
            priority: request.slo.priority,
            output_long: long.saturating_sub(generated).clamp(1, left),
            output: usual.saturating_sub(generated).clamp(1, left),
            waited: self.now.since(flight.submitted),
            counted_wait: match flight.on_miss {
                OnSloMiss::Queue(_) => Duration::ZERO,
                OnSloMiss::Reject | OnSloMiss::Downgrade(_) => self.now.since(flight.submitted),
            },
            ttft: slo.and_then(|slo| slo.ttft),
            tpot: slo
                .and_then(|slo| slo.tpot)
                .filter(|_| request.pooling.is_none()),
            e2e: slo.and_then(|slo| slo.e2e),
            ttft_by: self.tally.ttft(&class.name, self.now),
            tpot_by: self.tally.tpot(&class.name, self.now),
            tpot_by_worst: self.tally.tpot_worst(self.now),
            gap_left_to_others: gaps.min().map(|gap| gap - gap / SPARED_PARTS),
            priority_over_others: if !flight.is_new() {
                PlacementPriority::Resumed
            } else if self.yields(flight) {
                PlacementPriority::Yielding
            } else {
                PlacementPriority::New
            },
        })
    }

    /// The best placement of the flight now.
    pub(crate) fn find(&self, flight: &FlightRecord) -> Result<ChosenPlacement, NoPlacement> {
        let need = self.need(flight);
        let query = flight.query(need.as_ref(), self.limits, self.now);
        let placement = self.fleet.choose(&query)?;
        // A request for one token has no gap.
        let gaps = flight.request.stop.max_tokens > 1;
        let tpot = flight.request.slo.tpot.filter(|_| gaps);
        Ok(ChosenPlacement {
            tpot: tpot.filter(|_| self.limits.mode == RoutingMode::Slo),
            ..placement
        })
    }

    /// The queue place of a request with this arrival.
    pub(crate) fn queue_place(
        &self,
        id: FlightId,
        request: &Request,
        arrival: u64,
        since: Time,
    ) -> QueuePlace {
        let policy = &self.limits.policy;
        let class = policy.class(&request.slo.class);
        let tokens = (request.prompt.len() + request.generated.len()) as u32;
        let alone = self.fleet.prompt_alone(tokens);
        QueuePlace {
            queue: QueueId {
                kind: QueueKind::New,
                priority: request.slo.priority,
                class: Arc::from(class.name.as_str()),
                tenant: Arc::from(account_name(policy, &request.slo.tenant)),
            },
            request_priority: request.priority,
            latest_start: match (&class.unmet, prompt_deadline(request)) {
                (_, None) => Time::END,
                (OnSloMiss::Queue(limit), Some(_)) => since + *limit,
                (_, Some(due)) => since + due.saturating_sub(alone),
            },
            arrival,
            flight: id,
        }
    }

    /// Where no worker has room: the target that it would miss behind those who wait, if any.
    pub(crate) fn miss_by_waiting(
        &self,
        flight: &FlightRecord,
        queue: &FlightQueue,
    ) -> Option<TargetMiss> {
        let need = self.need(flight)?;
        let (aim, target) = match need.ttft {
            Some(ttft) => (SloMetric::Ttft, ttft),
            None => (SloMetric::EndToEnd, need.prompt_left()? + need.counted_wait),
        };
        let query = flight.query(Some(&need), self.limits, self.now);
        let relief = self.fleet.relief(&query)?;
        let census = self.fleet.census();
        let decodes = if query.ask.prefill_only {
            census.prefill + census.both
        } else {
            census.decode + census.both
        };
        // Waiting flights are served as slots become free; each worker of a device of its own frees
        // some.
        let workers = decodes.min(census.devices).max(1);
        let queue_wait = relief * (queue.len() / workers + 1);
        let alone = self.fleet.alone_least(&query);
        let predicted = need.counted_wait + need.ttft_by.stretch(queue_wait + alone);
        let clears = (alone <= target).then(|| predicted.saturating_sub(target));
        (predicted > target).then_some(TargetMiss {
            aim,
            predicted,
            met_after: clears,
        })
    }

    /// The least time of the flight's prompt over all workers, if all were idle, and the time until
    /// one has room again, if that is predicted.
    pub(crate) fn prompt_times(&self, flight: &FlightRecord) -> (Duration, Option<Duration>) {
        let need = self.need(flight);
        let query = flight.query(need.as_ref(), self.limits, self.now);
        (self.fleet.alone_least(&query), self.fleet.relief(&query))
    }

    /// The action for a target that cannot be met.
    pub(crate) fn unmet_action(&self, flight: &FlightRecord, late: &TargetMiss) -> UnmetAction {
        let policy = &self.limits.policy;
        // A checked policy has no cycle of downgrades; one on a tape may have.
        let downgrades_max = policy.classes.len() as u32;
        let class = flight.class(policy);
        match &flight.on_miss {
            // A target that would be missed on an idle fleet too is not waited for.
            OnSloMiss::Queue(limit)
                if self.now < flight.submitted + *limit && late.met_after.is_some() =>
            {
                UnmetAction::Wait
            }
            OnSloMiss::Downgrade(to) if to != &class.name && flight.downgrades < downgrades_max => {
                UnmetAction::Downgrade(policy.class(to).clone())
            }
            OnSloMiss::Reject | OnSloMiss::Queue(_) | OnSloMiss::Downgrade(_) => {
                UnmetAction::Refuse(Refusal::Late {
                    aim: late.aim,
                    predicted: late.predicted,
                    retry_after: bounded_retry_after(late.met_after.unwrap_or(RETRY_AFTER_NEVER)),
                })
            }
        }
    }

    /// How long a started worker may take to join, where no pair is there now; zero otherwise.
    fn start_awaited(&self) -> Duration {
        let expected = workers_expected(&self.limits.policy).unwrap_or_default();
        let ready = || self.fleet.readiness(self.now, self.limits.terms());
        if expected.is_zero() || ready() == RouterReadiness::Ready {
            Duration::ZERO
        } else {
            expected
        }
    }

    /// Until when the flight may wait, if it begins to wait now.
    pub(crate) fn wait_limit(&self, flight: &FlightRecord) -> Time {
        let timed = self.limits.mode == RoutingMode::Slo || flight.awaits_start;
        match flight.on_miss {
            // A class limits the wait before the first attempt; a stream that lost its worker is
            // older than that.
            OnSloMiss::Queue(limit) if timed && flight.is_new() => flight.submitted + limit,
            _ => {
                let from = flight.pause_until.unwrap_or(self.now).max(self.now);
                from + self.limits.queue_wait_max.max(self.start_awaited())
            }
        }
    }

    /// The refusal where nothing has room. Connected workers that answer nothing are not a full
    /// queue: a client that sends less would not be served either.
    pub(crate) fn full(&self, queue: &FlightQueue) -> Refusal {
        if self.fleet.answers(self.now, self.limits.terms()) {
            let retry_after = queue.retry_after();
            Refusal::QueueFull { retry_after }
        } else {
            Refusal::NoWorker
        }
    }
}

fn has_targets(class: &SloClass) -> bool {
    class.ttft.is_some() || class.tpot.is_some() || class.e2e.is_some()
}

/// Whether some classes have targets and others have none.
pub(crate) fn some_class_yields(policy: &SloPolicy) -> bool {
    let classes = &policy.classes;
    classes.iter().any(has_targets) && !classes.iter().all(has_targets)
}

/// The account to which a tenant is charged. Tenants without a share of their own have one account
/// together, or a client that invents names would have as many shares as names.
fn account_name<'a>(policy: &SloPolicy, tenant: &'a str) -> &'a str {
    let is_named = policy.tenants.iter().any(|one| one.name == tenant);
    if is_named { tenant } else { "" }
}

fn prompt_deadline(request: &Request) -> Option<Duration> {
    let slo = &request.slo;
    slo.ttft.into_iter().chain(slo.e2e).min()
}

fn bounded_retry_after(retry_after: Duration) -> Duration {
    retry_after.clamp(Duration::from_millis(1), RETRY_AFTER_NEVER)
}
