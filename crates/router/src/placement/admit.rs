//! Admission of requests, and the passes over the queue.
//!
//! Owns: admission, the order of a pass, and the wait of a flight that finds no place. Never:
//! predicts, or knows the further way of an attempt; `forecast` and `reports` do.
//! Invariant: a request with a target is placed only where that is predicted to be met, and
//! answered as soon as it cannot be; a flight waits with a time limit. A request that has failed
//! once, or has a token with its client, is never refused for its target.
//!
//! **Overtaking.** A pass goes through the queue in its order. A flight that would meet its target
//! nowhere holds up no other. A flight that finds no room may be overtaken by those of other queues
//! that do, [`OVERTAKEN_MAX`] times; from then on the queue stops until it is placed, so that large
//! requests do not starve. A flight without targets that yields to those with some holds up only
//! its own queue; it may starve until its waiting time is over. In the modes by load and round
//! robin nothing overtakes.
//!
//! [`OVERTAKEN_MAX`]: crate::placement::rules::OVERTAKEN_MAX

use crate::event::{DecisionOutcome, RequestForecast, RoutingMode};
use crate::fleet::leases::LeaseRenewal;
use crate::flight::end::FlightEndings;
use crate::flight::legs::LegRules;
use crate::flight::state::FlightRecord;
use crate::flight::timers::FlightTimer;
use crate::placement::candidates::ChosenPlacement;
use crate::placement::forecast::TargetMiss;
use crate::placement::policy::NoPlacement;
use crate::placement::rules::{OvertakeRule, PlacementRules, UnmetAction};
use crate::queue::passes::QueuePasses;
use crate::queue::{QueueId, QueueKind, RETRY_AFTER};
use crate::scaling::workers_expected;
use cleave_domain::{
    Ending, Failure, FlightId, OnSloMiss, Refusal, Request, SloClass, SloMetric, WorkerRef,
};
use std::collections::BTreeSet;
use std::sync::Arc;
use std::time::Duration;

/// Flights that find no place in one pass, at most.
const TRIES_MAX: u32 = 8;

/// The rules of admission, over all that a placement changes.
#[derive(Debug)]
pub(crate) struct FlightAdmission<'a> {
    pub(crate) ends: FlightEndings<'a>,
    pub(crate) leases: &'a mut LeaseRenewal,
    pub(crate) passes: &'a mut QueuePasses,
}

impl ChosenPlacement {
    pub(crate) fn miss(&self) -> Option<TargetMiss> {
        self.forecast.and_then(|forecast| forecast.miss)
    }
}

impl<'a> FlightAdmission<'a> {
    pub(crate) fn legs(&mut self) -> &mut LegRules<'a> {
        &mut self.ends.legs
    }

    fn flight(&self, id: FlightId) -> Option<&FlightRecord> {
        self.ends.flight(id)
    }

    fn flight_mut(&mut self, id: FlightId) -> Option<&mut FlightRecord> {
        self.ends.legs.flights.get_mut(id)
    }

    /// Admits a new request, unless it is refused at once.
    pub(crate) fn submitted(
        &mut self,
        id: FlightId,
        request: Arc<Request>,
        refusal: Option<Refusal>,
    ) {
        let FlightEndings {
            legs,
            tally,
            scaling,
            queue,
        } = &mut self.ends;
        assert!(!legs.flights.contains(id), "{id} was submitted twice");
        let (now, limits) = (legs.cx.now, legs.cx.limits);
        let is_full = legs.flights.len() >= limits.flights_max as usize;
        let arrival = legs.flights.next_arrival();
        let sizes = legs.fleet.block_sizes();
        let rules = PlacementRules {
            now,
            limits,
            fleet: legs.fleet,
            tally,
        };
        let refusal = refusal.or_else(|| is_full.then(|| rules.full(queue)));
        let place = rules.queue_place(id, &request, arrival, now);
        let mut flight = FlightRecord::new(place, request, sizes, now);
        flight.on_miss = limits.policy.class(&flight.request.slo.class).unmet.clone();
        tally.open(flight.payer());
        scaling.arrived(now, &flight.request, legs.fleet);
        legs.flights.enter(id, flight);
        match refusal {
            Some(refusal) => self.ends.refuse(id, refusal, Vec::new()),
            None => self.admit(id),
        }
    }

    /// Places a flight that is not in the queue, or lets it wait, or ends it.
    fn admit(&mut self, id: FlightId) {
        match self.find(id) {
            Err(NoPlacement::NoWorker) => {
                match workers_expected(&self.ends.legs.cx.limits.policy) {
                    Some(start_max) => self.wait_for_workers(id, start_max),
                    None => self.ends.refuse(id, Refusal::NoWorker, Vec::new()),
                }
            }
            Err(NoPlacement::TooLong { tokens_max }) => {
                let refusal = Refusal::TooLong { tokens_max };
                self.ends.refuse(id, refusal, Vec::new());
            }
            Ok(placement) => match placement.miss() {
                Some(miss) => self.unmet(id, miss, placement.considered),
                None if self.is_next(id) => self.start(id, &placement),
                None => {
                    self.wait(id);
                    if self.ends.rules().overtakes() {
                        self.serve_queue_soon();
                    }
                }
            },
            Err(NoPlacement::Busy) => {
                let flight = self.flight(id);
                let rules = self.ends.rules();
                match flight.and_then(|flight| rules.miss_by_waiting(flight, self.ends.queue)) {
                    Some(late) => self.unmet(id, late, Vec::new()),
                    None => self.wait(id),
                }
            }
        }
    }

    /// The best placement of the flight now.
    pub(crate) fn find(&self, id: FlightId) -> Result<ChosenPlacement, NoPlacement> {
        let flight = self.flight(id).ok_or(NoPlacement::NoWorker)?;
        self.ends.rules().find(flight)
    }

    /// The same, and marks the flight if no worker could ever take it.
    pub(crate) fn seek(&mut self, id: FlightId) -> Result<ChosenPlacement, NoPlacement> {
        let found = self.find(id);
        let hopeless = matches!(
            found,
            Err(NoPlacement::TooLong { .. } | NoPlacement::NoWorker)
        );
        let version = self.ends.legs.fleet.version();
        if let Some(flight) = self.flight_mut(id).filter(|_| hopeless) {
            flight.unplaceable_at = Some(version);
        }
        found
    }

    /// Whether the flight would be first if it stood in the queue.
    fn is_next(&mut self, id: FlightId) -> bool {
        if self.ends.queue.len() == 0 {
            return true;
        }
        let Some(place) = self.flight(id).map(|flight| flight.place.clone()) else {
            return false;
        };
        // The flight joins for the moment of the question only.
        self.ends.queue.join(&place);
        let next = self.head();
        self.ends.queue.leave(&place);
        next == Some(id)
    }

    /// Handles a target that cannot be met, by the rule of the flight's class.
    pub(crate) fn unmet(
        &mut self,
        id: FlightId,
        late: TargetMiss,
        considered: Vec<RequestForecast>,
    ) {
        let Some(flight) = self.flight(id) else {
            return;
        };
        match self.ends.rules().unmet_action(flight, &late) {
            UnmetAction::Wait => {
                if !self.ends.queue.contains(&flight.place) {
                    self.wait(id);
                }
            }
            UnmetAction::Downgrade(to) => self.downgrade(id, &to, considered),
            UnmetAction::Refuse(refusal) => self.ends.refuse(id, refusal, considered),
        }
    }

    fn downgrade(&mut self, id: FlightId, to: &SloClass, considered: Vec<RequestForecast>) {
        let class = to.name.clone();
        let decided = DecisionOutcome::Downgraded {
            class: class.clone(),
        };
        self.ends.decide(id, decided, considered);
        let policy = Arc::clone(&self.ends.legs.cx.limits.policy);
        let Some(flight) = self.flight(id) else {
            return;
        };
        let mut request = Request::clone(&flight.request);
        request.slo.class = class;
        request.slo.priority = policy.priority_for(&request.slo.tenant, to.priority);
        (request.slo.ttft, request.slo.tpot, request.slo.e2e) = (to.ttft, to.tpot, to.e2e);
        let rules = self.ends.rules();
        let place = rules.queue_place(id, &request, flight.place.arrival, flight.submitted);
        let FlightEndings {
            legs, queue, tally, ..
        } = &mut self.ends;
        legs.flights.set_timer(id, FlightTimer::StepTimeout, None);
        if let Some(flight) = legs.flights.get_mut(id) {
            queue.leave(&flight.place);
            // The charge is refunded to the class that it leaves.
            tally.charge(flight.payer(), -flight.charged, &policy);
            tally.close(flight.payer());
            flight.place = place;
            flight.request = Arc::new(request);
            flight.on_miss = to.unmet.clone();
            flight.downgrades += 1;
            flight.charged = 0;
            flight.wait_until = None;
            tally.open(flight.payer());
        }
        self.admit(id);
    }

    // === waiting ===

    /// Joins the queue; a new flight ends where the queue, or its class's part of it, is full.
    pub(crate) fn wait(&mut self, id: FlightId) {
        let Some(flight) = self.flight(id) else {
            return;
        };
        let class = flight.class(&self.ends.legs.cx.limits.policy);
        let full = class
            .queue_max
            .is_some_and(|max| self.ends.queue.len_of(&flight.place.queue.class) >= max);
        let fresh = flight.failures.last().is_none();
        if fresh && full {
            return self.end_without_place(id);
        }
        if fresh && self.ends.queue.is_full() {
            match self.ends.queue.last_behind(&flight.place) {
                Some(last) => self.end_without_place(last),
                None => return self.end_without_place(id),
            }
        }
        let Some(flight) = self.flight(id) else {
            return;
        };
        let limit = self.ends.rules().wait_limit(flight);
        self.ends.decide(id, DecisionOutcome::Waits, Vec::new());
        let FlightEndings { legs, queue, .. } = &mut self.ends;
        let by_time = fresh && legs.cx.limits.mode == RoutingMode::Slo;
        legs.flights.set_waiting(id);
        let Some(flight) = legs.flights.get_mut(id) else {
            return;
        };
        if !flight.pauses(legs.cx.now) {
            flight.refusals.reconsider(|_| false);
        }
        flight.refusals.wait();
        let until = *flight.wait_until.get_or_insert(limit);
        let latest = Some(flight.place.latest_start).filter(|_| by_time);
        if !fresh {
            flight.place.queue.kind = QueueKind::Resumed;
        }
        queue.join(&flight.place);
        let until = until.min(latest.unwrap_or(until));
        legs.flights
            .set_timer(id, FlightTimer::StepTimeout, Some(until));
    }

    /// Lets a flight wait until workers are there; its targets count from then on. While a worker
    /// is to be started, no request is refused for want of one before the worker could be there.
    fn wait_for_workers(&mut self, id: FlightId, start_max: Duration) {
        if let Some(flight) = self.flight_mut(id) {
            let limit = match flight.on_miss {
                OnSloMiss::Queue(limit) => limit.max(start_max),
                OnSloMiss::Reject | OnSloMiss::Downgrade(_) => start_max,
            };
            flight.on_miss = OnSloMiss::Queue(limit);
            flight.place.latest_start = flight.submitted + limit;
            flight.awaits_start = true;
        }
        self.wait(id);
    }

    /// Handles the end of a flight's waiting time, or its latest start.
    pub(crate) fn waited_out(&mut self, id: FlightId) {
        let Some(flight) = self.flight(id) else {
            return;
        };
        let (now, limits) = (self.ends.legs.cx.now, self.ends.legs.cx.limits);
        let by_time = limits.mode == RoutingMode::Slo && flight.is_new();
        let Some(due) = flight.prompt_deadline().filter(|_| by_time) else {
            return self.end_without_place(id);
        };
        let (alone, relief) = self.ends.rules().prompt_times(flight);
        let queues = matches!(flight.on_miss, OnSloMiss::Queue(_));
        // Its prefix may be cached somewhere, so it may start later than was assumed.
        let last = flight.submitted + due.saturating_sub(alone);
        if !queues && last > now {
            return match flight.wait_until.filter(|at| *at > now) {
                Some(at) => {
                    let at = Some(at.min(last));
                    let flights = &mut self.ends.legs.flights;
                    flights.set_timer(id, FlightTimer::StepTimeout, at);
                }
                None => self.end_without_place(id),
            };
        }
        if self.full() == Refusal::NoWorker {
            return self.end_without_place(id);
        }
        let retry_after = || self.ends.queue.retry_after();
        let miss = TargetMiss {
            aim: match flight.request.slo.ttft {
                Some(_) => SloMetric::Ttft,
                None => SloMetric::EndToEnd,
            },
            predicted: now.since(flight.submitted) + alone,
            met_after: Some(relief.unwrap_or_else(retry_after)),
        };
        self.unmet(id, miss, Vec::new());
    }

    /// Ends a flight without a place: refused if it never ran, failed if it did. One that only
    /// waited too long after a failure had retries left, so its last failure is the reason.
    pub(crate) fn end_without_place(&mut self, id: FlightId) {
        let exists = !matches!(self.find(id), Err(NoPlacement::NoWorker));
        let full = self.full();
        let Some(flight) = self.flight(id) else {
            return;
        };
        let failure = match flight.failures.last() {
            Some(last) if flight.failures.counted() > self.ends.legs.cx.limits.failures_max => {
                Failure::RetriesSpent(Box::new(last.clone()))
            }
            Some(last) => last.clone(),
            None if exists => {
                let refusal = unplaced(flight.refusals.last(), full);
                return self.ends.refuse(id, refusal, Vec::new());
            }
            None => return self.ends.refuse(id, Refusal::NoWorker, Vec::new()),
        };
        self.ends.end(id, Ending::Failed(failure));
    }

    fn full(&self) -> Refusal {
        self.ends.rules().full(self.ends.queue)
    }

    // === passes over the queue ===

    /// The flight to be placed next.
    pub(crate) fn head(&self) -> Option<FlightId> {
        self.next_of(&BTreeSet::new(), &BTreeSet::new())
    }

    fn next_of(&self, closed: &BTreeSet<QueueId>, passed: &BTreeSet<FlightId>) -> Option<FlightId> {
        let legs = &self.ends.legs;
        let turn = Some(legs.fleet.version());
        let is_passed = |id| {
            let flight = legs.flights.get(id);
            let waits_on =
                |flight: &FlightRecord| flight.unplaceable_at == turn || flight.pauses(legs.cx.now);
            passed.contains(&id) || flight.is_none_or(waits_on)
        };
        self.ends.queue.first(self.ends.tally, closed, is_passed)
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
            let queue = self.flight(id).map(|f| f.place.queue_id());
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
                    if let Some(flight) = self.flight_mut(id) {
                        flight.refusals.forget_reason();
                    }
                    match self.overtake_rule(id) {
                        OvertakeRule::Forbidden => break,
                        OvertakeRule::Counted => overtaken.push(id),
                        OvertakeRule::Uncounted => {}
                    }
                    closed.extend(queue);
                }
            }
        }
    }

    fn count_overtaken(&mut self, flights: &[FlightId]) {
        for id in flights {
            if let Some(flight) = self.flight_mut(*id) {
                flight.overtaken += 1;
            }
        }
    }

    fn overtake_rule(&self, id: FlightId) -> OvertakeRule {
        let rule = |flight| self.ends.rules().overtake_rule(flight);
        self.flight(id).map_or(OvertakeRule::Forbidden, rule)
    }

    /// Makes a pass over the queue after news of room or time, but at most one in each interval.
    pub(crate) fn serve_queue_soon(&mut self) {
        let is_empty = self.ends.queue.len() == 0;
        if self.passes.ask(self.ends.legs.cx.now, is_empty) {
            self.serve_queue();
        }
    }

    /// Makes a pass over the queue after news of a worker, if that could help the first flight.
    pub(crate) fn news_of(&mut self, worker: WorkerRef) {
        if self.ends.queue.len() == 0 {
            return;
        }
        if self.ends.rules().overtakes() {
            return self.serve_queue_soon();
        }
        let head = self.head().and_then(|id| self.flight(id));
        let legs = &self.ends.legs;
        let helps = |flight: &FlightRecord| {
            let query = flight.query(None, legs.cx.limits, legs.cx.now);
            legs.fleet.could_help(worker, &query)
        };
        if head.is_some_and(helps) {
            self.serve_queue();
        }
    }

    /// Closes a worker for `wait`, and makes a pass over the queue then.
    pub(crate) fn close_worker(&mut self, worker: WorkerRef, wait: Duration) {
        let (least, _) = RETRY_AFTER;
        let legs = &mut self.ends.legs;
        // A worker's own estimate may be long; another try each second costs nothing.
        let until = legs.cx.now + wait.clamp(least / 10, Duration::from_secs(1));
        legs.fleet.close_until(worker, until);
        self.passes.retry(worker.worker, until);
    }
}

/// The refusal of a request that waited for room in vain, by the last refusal of a worker: a queue
/// was full only if no worker gave another reason. `full` is the fleet's own answer.
fn unplaced(refused: Option<&Refusal>, full: Refusal) -> Refusal {
    match (refused, full) {
        (Some(Refusal::NoBlocks { .. }), Refusal::QueueFull { retry_after }) => {
            Refusal::NoBlocks { retry_after }
        }
        (None | Some(Refusal::QueueFull { .. } | Refusal::NoBlocks { .. }), full) => full,
        (
            Some(
                other @ (Refusal::Late { .. }
                | Refusal::TooLong { .. }
                | Refusal::OutOfVocabulary { .. }),
            ),
            _,
        ) => other.clone(),
        // The fleet is not full, and no worker serves the request: another router may know better.
        (Some(Refusal::NoWorker | Refusal::Draining | Refusal::WrongWorker), _) => {
            Refusal::NoWorker
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use cleave_domain::SloMetric;

    #[test]
    fn no_other_refusal_of_a_worker_becomes_queue_full() {
        let soon = Duration::from_secs(1);
        let full = Refusal::QueueFull { retry_after: soon };
        let late = Refusal::Late {
            aim: SloMetric::Ttft,
            predicted: soon,
            retry_after: soon,
        };
        let no_blocks = Refusal::NoBlocks { retry_after: soon };
        for (refused, answer) in [
            (full.clone(), full.clone()),
            (no_blocks.clone(), no_blocks),
            (late.clone(), late),
            (
                Refusal::TooLong { tokens_max: 7 },
                Refusal::TooLong { tokens_max: 7 },
            ),
            (
                Refusal::OutOfVocabulary { vocab_size: 9 },
                Refusal::OutOfVocabulary { vocab_size: 9 },
            ),
            (Refusal::NoWorker, Refusal::NoWorker),
            (Refusal::Draining, Refusal::NoWorker),
            (Refusal::WrongWorker, Refusal::NoWorker),
        ] {
            assert_eq!(
                unplaced(Some(&refused), full.clone()),
                answer,
                "{refused:?}"
            );
        }
        assert_eq!(unplaced(None, full.clone()), full);
    }
}
