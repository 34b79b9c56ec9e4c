//! Admission of requests, and the handling of targets that cannot be met.
//!
//! Owns: admission, the classes' `unmet` actions, the passes over the queue, and the record of
//! decisions. Never: predicts; `forecast` does. Invariant: a request with a target is placed only
//! where that is predicted to be met, and answered as soon as it cannot be. A request that has
//! failed once, or has a token with its client, is never refused for its target.
//!
//! **Overtaking.** A pass goes through the queue in its order. A flight that would meet its target
//! nowhere holds up no other. A flight that finds no room may be overtaken by those of other queues
//! that do, [`OVERTAKEN_MAX`] times; from then on the queue stops until it is placed, so that large
//! requests do not starve. A flight without targets that yields to those with some holds up only
//! its own queue; it may starve until its waiting time is over. In the modes by load and round
//! robin nothing overtakes.

#[cfg(test)]
mod tests;

use crate::brain::RouterBrain;
use crate::candidates::ChosenPlacement;
use crate::event::{DecisionOutcome, PlacementDecision, RequestForecast, RouterNote, RoutingMode};
use crate::flight::FlightRecord;
use crate::forecast::{PlacementPriority, RequestNeed, TargetMiss};
use crate::policy::{AttemptSize, NoPlacement};
use crate::queue::{QueueId, QueueKind, QueuePlace};
use crate::scale::workers_expected;
use crate::tally::AccountKey;
use crate::timers::FlightTimer;
use cleave_domain::{
    Ending, FlightId, OnSloMiss, Refusal, Request, SloClass, SloMetric, SloPolicy, Time,
};
use std::collections::BTreeSet;
use std::sync::Arc;
use std::time::Duration;

/// How often a flight that finds no room may be overtaken.
const OVERTAKEN_MAX: u32 = 16;
/// Flights that find no place in one pass, at most.
const TRIES_MAX: u32 = 8;
/// Quantile of recent answers that is expected as a request's length, in thousandths.
const ANSWER_PERMILLE: usize = 750;
/// The same for other sequences that a placement competes with.
const LONG_PERMILLE: usize = 950;
/// A request that yields leaves this part of the tightest gap that any class promises.
const SPARED_PARTS: u32 = 8;
/// `retry_after` of a request that could not be served on an idle fleet either.
const RETRY_AFTER_NEVER: Duration = Duration::from_secs(30);

impl FlightRecord {
    pub(crate) fn payer(&self) -> AccountKey<'_> {
        AccountKey {
            class: &self.place.queue.class,
            tenant: &self.place.queue.tenant,
        }
    }

    pub(crate) fn class<'a>(&self, policy: &'a SloPolicy) -> &'a SloClass {
        policy.class(&self.place.queue.class)
    }

    /// Whether it may still be refused.
    pub(crate) fn is_new(&self) -> bool {
        self.failure.is_none() && !self.has_output()
    }
}

impl ChosenPlacement {
    pub(crate) fn miss(&self) -> Option<TargetMiss> {
        self.forecast.and_then(|forecast| forecast.miss)
    }
}

impl RouterBrain {
    pub(crate) fn submitted(&mut self, id: FlightId, request: Arc<Request>) {
        assert!(!self.flights.contains_key(&id), "{id} was submitted twice");
        self.arrivals += 1;
        let refusal = if self.readiness.is_draining() {
            Some(Refusal::Draining)
        } else if self.flights.len() >= self.limits.flights_max as usize {
            Some(self.full())
        } else {
            None
        };
        let place = self.place(id, &request, self.arrivals, self.now);
        let sizes = self.fleet.block_sizes();
        let unmet = self.limits.policy.class(&request.slo.class).unmet.clone();
        let mut flight = FlightRecord::new(place, request, sizes, self.now);
        flight.on_miss = unmet;
        self.tally.open(flight.payer());
        self.scaling.arrived(self.now, &flight.request, &self.fleet);
        self.flights.insert(id, flight);
        match refusal {
            Some(refusal) => self.refuse(id, refusal, Vec::new()),
            None => self.admit(id),
        }
    }

    /// The queue place of a request with this arrival.
    fn place(&self, id: FlightId, request: &Request, arrival: u64, since: Time) -> QueuePlace {
        let class = self.limits.policy.class(&request.slo.class);
        let tokens = (request.prompt.len() + request.generated.len()) as u32;
        let alone = self.fleet.prompt_alone(tokens);
        QueuePlace {
            queue: QueueId {
                kind: QueueKind::New,
                priority: request.slo.priority,
                class: Arc::from(class.name.as_str()),
                tenant: Arc::from(account_name(&self.limits.policy, &request.slo.tenant)),
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

    /// Places a flight that is not in the queue, or lets it wait, or ends it.
    fn admit(&mut self, id: FlightId) {
        match self.find(id) {
            Err(NoPlacement::NoWorker) => match workers_expected(&self.limits.policy) {
                Some(start_max) => self.wait_for_workers(id, start_max),
                None => self.refuse(id, Refusal::NoWorker, Vec::new()),
            },
            Err(NoPlacement::TooLong { tokens_max }) => {
                self.refuse(id, Refusal::TooLong { tokens_max }, Vec::new());
            }
            Ok(placement) => match placement.miss() {
                Some(miss) => self.unmet(id, miss, placement.considered),
                None if self.is_next(id) => self.start(id, &placement),
                None => {
                    self.wait(id);
                    if self.overtakes() {
                        self.serve_queue_soon();
                    }
                }
            },
            Err(NoPlacement::Busy) => match self.too_long_a_wait(id) {
                Some(late) => self.unmet(id, late, Vec::new()),
                None => self.wait(id),
            },
        }
    }

    /// Whether the flight would be first if it stood in the queue.
    fn is_next(&mut self, id: FlightId) -> bool {
        if self.queue.len() == 0 {
            return true;
        }
        let Some(place) = self.flights.get(&id).map(|flight| flight.place.clone()) else {
            return false;
        };
        // The flight joins for the moment of the question only.
        self.queue.join(&place);
        let next = self.head();
        self.queue.leave(&place);
        next == Some(id)
    }

    /// Where no worker has room: the target that it would miss behind those who wait, if any.
    fn too_long_a_wait(&self, id: FlightId) -> Option<TargetMiss> {
        let flight = self.flights.get(&id)?;
        let need = self.need(flight)?;
        let (aim, target) = match need.ttft {
            Some(ttft) => (SloMetric::Ttft, ttft),
            None => (SloMetric::EndToEnd, need.prompt_left()? + need.counted_wait),
        };
        let query = self.query(flight, Some(&need));
        let relief = self.fleet.relief(&query)?;
        let census = self.fleet.census();
        let decodes = census.decode + census.both;
        // Waiting flights are served as slots become free; each worker of a device of its own frees
        // some.
        let workers = decodes.min(census.devices).max(1);
        let queue_wait = relief * (self.queue.len() / workers + 1);
        let alone = self.fleet.alone_least(&query);
        let predicted = need.counted_wait + need.ttft_by.stretch(queue_wait + alone);
        let clears = (alone <= target).then(|| predicted.saturating_sub(target));
        (predicted > target).then_some(TargetMiss {
            aim,
            predicted,
            met_after: clears,
        })
    }

    /// Handles a target that cannot be met, by the rule of the flight's class.
    pub(crate) fn unmet(
        &mut self,
        id: FlightId,
        late: TargetMiss,
        considered: Vec<RequestForecast>,
    ) {
        let Some(flight) = self.flights.get(&id) else {
            return;
        };
        let until = |limit: &Duration| flight.submitted + *limit;
        // A checked policy has no cycle of downgrades; one on a tape may have.
        let downgrades_max = self.limits.policy.classes.len() as u32;
        let class = self.class_of(flight);
        match &flight.on_miss {
            // A target that would be missed on an idle fleet too is not waited for.
            OnSloMiss::Queue(limit) if self.now < until(limit) && late.met_after.is_some() => {
                if !self.queue.contains(&flight.place) {
                    self.wait(id);
                }
            }
            OnSloMiss::Downgrade(to) if to != &class.name && flight.downgrades < downgrades_max => {
                let to = self.limits.policy.class(to).clone();
                self.downgrade(id, &to, considered);
            }
            OnSloMiss::Reject | OnSloMiss::Queue(_) | OnSloMiss::Downgrade(_) => {
                let TargetMiss {
                    aim,
                    predicted,
                    met_after: clears,
                } = late;
                let refusal = Refusal::Late {
                    aim,
                    predicted,
                    retry_after: bounded_retry_after(clears.unwrap_or(RETRY_AFTER_NEVER)),
                };
                self.refuse(id, refusal, considered);
            }
        }
    }

    fn downgrade(&mut self, id: FlightId, to: &SloClass, considered: Vec<RequestForecast>) {
        let class = to.name.clone();
        let decided = DecisionOutcome::Downgraded {
            class: class.clone(),
        };
        self.decide(id, decided, considered);
        let Some(flight) = self.flights.get(&id) else {
            return;
        };
        self.queue.leave(&flight.place);
        self.timers.set(id, FlightTimer::StepTimeout, None);
        let policy = Arc::clone(&self.limits.policy);
        let mut request = Request::clone(&flight.request);
        request.slo.class = class;
        request.slo.priority = policy.priority_for(&request.slo.tenant, to.priority);
        (request.slo.ttft, request.slo.tpot, request.slo.e2e) = (to.ttft, to.tpot, to.e2e);
        let place = self.place(id, &request, flight.place.arrival, flight.submitted);
        // The charge is refunded to the class that it leaves.
        self.tally.charge(flight.payer(), -flight.charged, &policy);
        self.tally.close(flight.payer());
        if let Some(flight) = self.flights.get_mut(&id) {
            flight.place = place;
            flight.request = Arc::new(request);
            flight.on_miss = to.unmet.clone();
            flight.downgrades += 1;
            flight.charged = 0;
            flight.wait_until = None;
            self.tally.open(flight.payer());
        }
        self.admit(id);
    }

    pub(crate) fn refuse(
        &mut self,
        id: FlightId,
        refusal: Refusal,
        considered: Vec<RequestForecast>,
    ) {
        self.decide(id, DecisionOutcome::Refused(refusal.clone()), considered);
        self.end(id, Ending::Refused(refusal));
    }

    /// Handles the end of a flight's waiting time, or its latest start.
    pub(crate) fn waited_out(&mut self, id: FlightId) {
        let Some(flight) = self.flights.get(&id) else {
            return;
        };
        let by_time = self.limits.mode == RoutingMode::Slo && flight.is_new();
        let Some(due) = prompt_deadline(&flight.request).filter(|_| by_time) else {
            return self.end_without_place(id);
        };
        let need = self.need(flight);
        let query = self.query(flight, need.as_ref());
        let alone = self.fleet.alone_least(&query);
        let queues = matches!(flight.on_miss, OnSloMiss::Queue(_));
        // Its prefix may be cached somewhere, so it may start later than was assumed.
        let last = flight.submitted + due.saturating_sub(alone);
        if !queues && last > self.now {
            return match flight.wait_until.filter(|at| *at > self.now) {
                Some(at) => self
                    .timers
                    .set(id, FlightTimer::StepTimeout, Some(at.min(last))),
                None => self.end_without_place(id),
            };
        }
        let relief = need.and_then(|_| self.fleet.relief(&query));
        if self.full() == Refusal::NoWorker {
            return self.end_without_place(id);
        }
        let miss = TargetMiss {
            aim: match flight.request.slo.ttft {
                Some(_) => SloMetric::Ttft,
                None => SloMetric::EndToEnd,
            },
            predicted: self.now.since(flight.submitted) + alone,
            met_after: Some(relief.unwrap_or_else(|| self.queue.retry_after())),
        };
        self.unmet(id, miss, Vec::new());
    }

    // === passes over the queue ===

    /// Whether a flight that finds no place may be overtaken.
    pub(crate) fn overtakes(&self) -> bool {
        self.limits.mode == RoutingMode::Slo && self.fleet.priced()
    }

    /// The flight to be placed next.
    pub(crate) fn head(&self) -> Option<FlightId> {
        self.next_of(&BTreeSet::new(), &BTreeSet::new())
    }

    fn next_of(&self, closed: &BTreeSet<QueueId>, passed: &BTreeSet<FlightId>) -> Option<FlightId> {
        let turn = Some(self.fleet.version());
        let is_passed = |id| {
            let flight = self.flights.get(&id);
            let waits_on =
                |flight: &FlightRecord| flight.unplaceable_at == turn || flight.pauses(self.now);
            passed.contains(&id) || flight.is_none_or(waits_on)
        };
        self.queue.first(&self.tally, closed, is_passed)
    }

    /// Places as many flights as possible, in the order of the queue.
    /// A flight that finds no room closes its queue for the pass, or ends the pass, by its overtake
    /// rule.
    pub(crate) fn serve_queue(&mut self) {
        let mut closed = BTreeSet::new();
        let mut overtaken: Vec<FlightId> = Vec::new();
        let mut passed = BTreeSet::new();
        let mut tries = 0;
        while let Some(id) = self.next_of(&closed, &passed).filter(|_| tries < TRIES_MAX) {
            let queue = self.flights.get(&id).map(|f| f.place.queue_id());
            match self.seek(id) {
                Ok(placement) => match placement.miss() {
                    None => {
                        self.start(id, &placement);
                        self.count_overtaken(&overtaken);
                    }
                    Some(miss) => {
                        tries += 1;
                        passed.insert(id);
                        self.unmet(id, miss, placement.considered);
                    }
                },
                // It holds up no other flight.
                Err(NoPlacement::TooLong { .. } | NoPlacement::NoWorker) => {}
                Err(NoPlacement::Busy) => {
                    tries += 1;
                    // The fleet is full, whatever an earlier refusal said.
                    if let Some(flight) = self.flights.get_mut(&id) {
                        flight.refused = None;
                    }
                    let stands = self.stands(id);
                    if stands == OvertakeRule::Forbidden {
                        break;
                    }
                    if stands == OvertakeRule::Counted {
                        overtaken.push(id);
                    }
                    closed.extend(queue);
                }
            }
        }
    }

    fn count_overtaken(&mut self, flights: &[FlightId]) {
        for id in flights {
            if let Some(flight) = self.flights.get_mut(id) {
                flight.overtaken += 1;
            }
        }
    }

    fn stands(&self, id: FlightId) -> OvertakeRule {
        let Some(flight) = self.flights.get(&id).filter(|_| self.overtakes()) else {
            return OvertakeRule::Forbidden;
        };
        if self.yields(flight) {
            OvertakeRule::Uncounted
        } else if flight.overtaken < OVERTAKEN_MAX {
            OvertakeRule::Counted
        } else {
            OvertakeRule::Forbidden
        }
    }

    /// Makes a pass over the queue after news of room or time, but at most one in each interval.
    pub(crate) fn serve_queue_soon(&mut self) {
        if self.passes.ask(self.now, self.queue.len() == 0) {
            self.serve_queue();
        }
    }

    // === what a flight needs ===

    pub(crate) fn class_of(&self, flight: &FlightRecord) -> &SloClass {
        flight.class(&self.limits.policy)
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
        let class = self.class_of(flight);
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
            tpot: slo.and_then(|slo| slo.tpot),
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

    /// Notes a decision about the flight and its reasons.
    pub(crate) fn decide(
        &mut self,
        id: FlightId,
        outcome: DecisionOutcome,
        considered: Vec<RequestForecast>,
    ) {
        let Some(flight) = self.flights.get(&id) else {
            return;
        };
        let slo = &flight.request.slo;
        let named = &self.class_of(flight).name;
        let decision = PlacementDecision {
            flight: id,
            class: slo.class.clone(),
            tenant: slo.tenant.clone(),
            waited: self.now.since(flight.submitted),
            ttft_permille: self.tally.ttft(named, self.now).permille(),
            tpot_permille: self.tally.tpot(named, self.now).permille(),
            considered,
            outcome,
        };
        self.note(RouterNote::Decided(Box::new(decision)));
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

/// How overtaking affects a flight that finds no room.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum OvertakeRule {
    /// It may be overtaken, without a count.
    Uncounted,
    /// It may be overtaken a limited number of times, which are counted.
    Counted,
    /// It may not be overtaken.
    Forbidden,
}

/// The account to which a tenant is charged. Tenants without a share of their own have one account
/// together, or a client that invents names would have as many shares as names.
fn account_name<'a>(policy: &SloPolicy, tenant: &'a str) -> &'a str {
    let is_named = policy.tenants.iter().any(|one| one.name == tenant);
    if is_named { tenant } else { "" }
}

/// Deadline of its prompt, measured from its arrival.
fn prompt_deadline(request: &Request) -> Option<Duration> {
    let slo = &request.slo;
    slo.ttft.into_iter().chain(slo.e2e).min()
}

fn bounded_retry_after(retry_after: Duration) -> Duration {
    retry_after.clamp(Duration::from_millis(1), RETRY_AFTER_NEVER)
}
