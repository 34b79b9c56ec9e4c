//! Which states are one and the same to a model checker.
//!
//! Owns: what of a brain decides its future. Never: changes anything, or costs anything while serving.
//! Invariant: two brains with equal fingerprints answer equal futures with equal orders, ends and
//! fences. Left out is what only tells how long something took (`waited`, `took`, `retry_after`) or
//! what was said last for the record; times count from now on; and numbers that only put things in an
//! order are replaced by their ranks.

use crate::alarm::Alarm;
use crate::brain::Brain;
use crate::fleet::Worker;
use crate::flight::{Attempt, Broken, Flight, Stage};
use crate::ledger::{Promise, Span};
use crate::verdict::Clock;
use cleave_domain::{FlightId, Time};
use std::hash::{Hash, Hasher};

impl Brain {
    /// Hashes what decides this brain's future behaviour, and nothing else, so that a model checker
    /// may take two states with equal fingerprints for one. The limits are not hashed: they are a
    /// world's, not a state's. Outputs must have been drained.
    ///
    /// Equal inputs from then on, at equal distances in time, give equal outputs, but for spans of
    /// time that are told (`waited`, `took`, `retry_after`) and the order's names: which flight
    /// arrived how many flights before another makes no difference, as long as it was before.
    pub fn fingerprint(&self, hasher: &mut impl Hasher) {
        assert!(self.outputs.is_empty(), "outputs are drained first");
        self.hash_fleet(hasher);
        let mut arrivals: Vec<(u64, FlightId)> = Vec::new();
        self.flights.len().hash(hasher);
        for (id, flight) in &self.flights {
            arrivals.push((flight.place.arrival, *id));
            id.hash(hasher);
            self.hash_flight(flight, hasher);
            for alarm in Alarm::ALL {
                self.ahead(self.alarms.get(*id, alarm)).hash(hasher);
            }
        }
        arrivals.sort_unstable();
        for (_, flight) in arrivals {
            flight.hash(hasher);
        }
        (self.doors.len(), self.patience.len()).hash(hasher);
        for (at, worker) in &self.doors {
            (self.ahead(Some(*at)), worker).hash(hasher);
        }
        for (at, worker) in &self.patience {
            (self.ahead(Some(*at)), worker).hash(hasher);
        }
        self.ahead(self.renew_at).hash(hasher);
        self.rescued.hash(hasher);
        self.leaving.len().hash(hasher);
        for (flight, leaving) in &self.leaving {
            (flight, leaving.stage).hash(hasher);
        }
        for (worker, at) in self.lost_lately() {
            (worker, self.ago(at)).hash(hasher);
        }
        self.draining.hash(hasher);
        self.readiness.hash(hasher);
        self.tally.leads().hash(hasher);
        self.tally.hash_scores(self.now, hasher);
        self.ahead(self.look_at).hash(hasher);
        let next_look = self.look_at.map(|_| self.looked_at);
        self.ahead(next_look).hash(hasher);
    }

    /// How far ahead a time is; what is past is past.
    fn ahead(&self, at: Option<Time>) -> Option<u128> {
        at.map(|at| at.since(self.now).as_nanos())
    }

    /// How long ago a time was.
    fn ago(&self, at: Time) -> u128 {
        self.now.since(at).as_nanos()
    }

    fn hash_fleet(&self, hasher: &mut impl Hasher) {
        // Never is a rank of its own: it is what a worker begins with.
        let mut chosen: Vec<u64> = vec![0];
        chosen.extend(self.fleet.workers().map(|worker| worker.chosen));
        chosen.sort_unstable();
        chosen.dedup();
        self.fleet.workers().count().hash(hasher);
        for worker in self.fleet.workers() {
            chosen.partition_point(|c| *c < worker.chosen).hash(hasher);
            self.hash_worker(worker, hasher);
        }
        self.fleet.hash_groups(hasher);
    }

    fn hash_worker(&self, worker: &Worker, hasher: &mut impl Hasher) {
        let about = &worker.description;
        worker.me.hash(hasher);
        (about.role, &about.fingerprint, about.queue_max).hash(hasher);
        about.device.hash(hasher);
        let capacity = &about.capacity;
        (capacity.block_tokens, capacity.blocks_count).hash(hasher);
        (capacity.slots_count, capacity.context_tokens_max).hash(hasher);
        let load = &worker.load;
        (load.queue_tokens, load.blocks_free).hash(hasher);
        // Placing sees their sum only.
        let sequences = load.sequences_running;
        load.sequences_waiting
            .saturating_add(sequences)
            .hash(hasher);
        (worker.draining, worker.progress).hash(hasher);
        self.ahead(Some(worker.shut_until)).hash(hasher);
        let promises = worker.ledger.handoffs().map(|(handoff, promise)| {
            // A number that names an order: how many have been sent since is what decides.
            let order = promise.order.filter(|_| promise.fresh);
            let since = order.map(|order| worker.orders - order);
            let order = None;
            let span = promise.span;
            let ahead = [span.from, span.until].map(|at| (self.ahead(Some(at)), self.ago(at)));
            let ahead = (promise.span != Span::NONE).then_some((ahead, span.tokens));
            let span = Span::NONE;
            (
                handoff,
                Promise {
                    order,
                    span,
                    ..*promise
                },
                since,
                ahead,
            )
        });
        for promise in promises {
            promise.hash(hasher);
        }
        // The rest only decides where prices are known.
        if worker.priced() {
            worker.prices.hash(hasher);
            (load.context_tokens, load.streams).hash(hasher);
            (load.backlog, load.tpot_least).hash(hasher);
            (
                load.sequences_running,
                self.ago(worker.heard),
                load.step_left,
            )
                .hash(hasher);
            self.ago(worker.ledger.at_work_since).hash(hasher);
        }
    }

    fn hash_flight(&self, flight: &Flight, hasher: &mut impl Hasher) {
        let request = &flight.request;
        (&request.prompt, &request.generated).hash(hasher);
        (request.stop.max_tokens, request.stop.min_tokens).hash(hasher);
        (&request.stop.stop_tokens, request.priority).hash(hasher);
        (request.cache_salt, &flight.drawn_by).hash(hasher);
        let sizes: Vec<u32> = flight.content.block_sizes().collect();
        sizes.hash(hasher);
        (flight.attempts, flight.failures, &flight.failure).hash(hasher);
        let lost_at = self.failed_lately(flight).map(|at| self.ago(at));
        let pause = flight.pause_until.filter(|_| flight.pauses(self.now));
        (flight.failures_spared, lost_at, self.ahead(pause)).hash(hasher);
        flight
            .refused
            .as_ref()
            .map(std::mem::discriminant)
            .hash(hasher);
        (flight.refusals, &flight.excluded, &flight.avoided).hash(hasher);
        self.ahead(flight.wait_until).hash(hasher);
        (flight.homeless == Some(self.fleet.turns())).hash(hasher);
        (flight.stays, flight.yielded_at).hash(hasher);
        self.hash_promise(flight, hasher);
        match &flight.stage {
            Stage::Waiting => 0.hash(hasher),
            Stage::Flying(attempt) => {
                1.hash(hasher);
                hash_attempt(attempt, hasher);
            }
            Stage::Counting(Broken {
                handoff,
                fence,
                doubtful,
                context_tokens_max,
            }) => (2, handoff, fence, doubtful, context_tokens_max).hash(hasher),
        }
        let moving = flight.moving.as_ref();
        moving.map(|m| (m.handoff, m.why)).hash(hasher);
        if let Some(leg) = flight.leg() {
            hash_attempt(leg, hasher);
        }
    }
}

impl Brain {
    /// What a flight was promised, and what that will be worth.
    fn hash_promise(&self, flight: &Flight, hasher: &mut impl Hasher) {
        let slo = &flight.request.slo;
        (slo, &flight.place.queue).hash(hasher);
        (flight.overtaken, flight.downgrades, flight.charged).hash(hasher);
        flight.late.hash(hasher);
        flight.outlook.hash(hasher);
        let aims = [slo.ttft, slo.tpot, slo.e2e];
        if aims.iter().any(Option::is_some) {
            let latest = self.ahead(Some(flight.place.latest));
            (latest, self.ago(flight.submitted)).hash(hasher);
            let Clock {
                began,
                lost,
                ordered,
                first,
                landed,
                decode,
            } = flight.clock;
            (
                ordered.map(|at| self.ago(at)),
                landed.map(|at| self.ago(at)),
            )
                .hash(hasher);
            first
                .map(|(at, timing)| (self.ago(at), timing))
                .hash(hasher);
            (lost, began.map(|at| self.ago(at)), decode).hash(hasher);
            self.ahead(flight.due).hash(hasher);
        }
    }
}

fn hash_attempt(attempt: &Attempt, hasher: &mut impl Hasher) {
    let Attempt {
        handoff,
        prefill,
        decode,
        of,
        context_tokens_max,
        reserved,
        prefilled,
        trouble,
        landed,
        finished,
    } = attempt;
    (handoff, prefill, decode, of, context_tokens_max).hash(hasher);
    (reserved, prefilled, trouble, landed).hash(hasher);
    let finished = finished.map(|finish| (finish.reason as u8, finish.output_tokens));
    finished.hash(hasher);
}
