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
use cleave_domain::{FlightId, Time};
use std::collections::BTreeMap;
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
        self.draining.hash(hasher);
        self.readiness.hash(hasher);
    }

    /// How far ahead a time is; what is past is past.
    fn ahead(&self, at: Option<Time>) -> Option<u128> {
        at.map(|at| at.since(self.now).as_nanos())
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
        let capacity = &about.capacity;
        (capacity.block_tokens, capacity.blocks_count).hash(hasher);
        (capacity.slots_count, capacity.context_tokens_max).hash(hasher);
        let load = &worker.load;
        (load.queue_tokens, load.blocks_free).hash(hasher);
        // Placing sees their sum only.
        (load.sequences_waiting + load.sequences_running).hash(hasher);
        (worker.draining, worker.progress).hash(hasher);
        self.ahead(Some(worker.shut_until)).hash(hasher);
        let promises: BTreeMap<_, _> = worker.ledger.handoffs().collect();
        promises.hash(hasher);
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
        (flight.refusals, &flight.excluded, &flight.avoided).hash(hasher);
        self.ahead(flight.wait_until).hash(hasher);
        (flight.homeless == Some(self.fleet.turns())).hash(hasher);
        (flight.stays, flight.yielded_at).hash(hasher);
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
