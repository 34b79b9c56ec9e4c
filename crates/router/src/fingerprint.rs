//! Fingerprints of a router's state, for model checking.
//!
//! Owns: the choice of state that decides a brain's future. Never: changes anything, or costs
//! anything while serving.
//! Invariant: two brains with equal fingerprints answer equal futures with equal orders, ends and
//! fences. Left out are spans that are only reported (`waited`, `took`, `retry_after`) and values
//! last emitted for the record; times count from now on; and numbers that only define an order are
//! replaced by their ranks.

use crate::brain::RouterBrain;
use crate::fleet::FleetWorker;
use crate::flight::{FailedAttempt, FlightAttempt, FlightPhase, FlightRecord};
use crate::ledger::{LegClaim, StreamSpan};
use crate::timers::FlightTimer;
use crate::verdict::FlightTimestamps;
use cleave_domain::{FlightId, Time};
use std::hash::{Hash, Hasher};

impl RouterBrain {
    /// Hashes the state that decides this brain's future, and nothing else, so that a model checker
    /// may merge two states with equal fingerprints. The limits are not hashed: they belong to a
    /// world, not to a state. The caller has drained the outputs.
    ///
    /// Equal inputs from then on, at equal distances in time, give equal outputs, except for
    /// reported spans of time (`waited`, `took`, `retry_after`) and numbers that define an order:
    /// by how many flights one arrived before another makes no difference.
    pub fn fingerprint(&self, hasher: &mut impl Hasher) {
        assert!(self.outputs.is_empty(), "outputs are drained first");
        self.hash_fleet(hasher);
        let mut arrivals: Vec<(u64, FlightId)> = Vec::new();
        self.flights.len().hash(hasher);
        for (id, flight) in &self.flights {
            arrivals.push((flight.place.arrival, *id));
            id.hash(hasher);
            self.hash_flight(flight, hasher);
            for timer in FlightTimer::ALL {
                self.ahead(self.timers.get(*id, timer)).hash(hasher);
            }
        }
        arrivals.sort_unstable();
        for (_, flight) in arrivals {
            flight.hash(hasher);
        }
        (self.retry_at.len(), self.stuck_deadlines.len()).hash(hasher);
        for (at, worker) in &self.retry_at {
            (self.ahead(Some(*at)), worker).hash(hasher);
        }
        for (at, worker) in &self.stuck_deadlines {
            (self.ahead(Some(*at)), worker).hash(hasher);
        }
        self.ahead(self.renew_at).hash(hasher);
        self.failing_over.hash(hasher);
        self.cancelling.len().hash(hasher);
        for (flight, cancelled) in &self.cancelling {
            (flight, cancelled.stage).hash(hasher);
        }
        for (worker, at) in self.lost_lately() {
            (worker, self.ago(at)).hash(hasher);
        }
        self.draining.hash(hasher);
        self.readiness.hash(hasher);
        self.tally.leads().hash(hasher);
        self.tally.hash_scores(self.now, hasher);
        self.ahead(self.queue_due_at).hash(hasher);
        let next_service = self.queue_due_at.map(|_| self.queue_served_at);
        self.ahead(next_service).hash(hasher);
    }

    /// Time until `at`; zero for the past.
    fn ahead(&self, at: Option<Time>) -> Option<u128> {
        at.map(|at| at.since(self.now).as_nanos())
    }

    /// Nanoseconds that passed since `at`.
    fn ago(&self, at: Time) -> u128 {
        self.now.since(at).as_nanos()
    }

    fn hash_fleet(&self, hasher: &mut impl Hasher) {
        // Never chosen is a rank of its own: every worker begins with it.
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

    fn hash_worker(&self, worker: &FleetWorker, hasher: &mut impl Hasher) {
        let about = &worker.description;
        worker.me.hash(hasher);
        (about.role, &about.fingerprint, about.queue_max).hash(hasher);
        about.device.hash(hasher);
        let capacity = &about.capacity;
        (capacity.block_tokens, capacity.blocks_count).hash(hasher);
        (capacity.slots_count, capacity.context_tokens_max).hash(hasher);
        let load = &worker.load;
        (load.queue_tokens, load.blocks_free).hash(hasher);
        if let Some(states) = capacity.states {
            (states, load.states_free).hash(hasher);
        }
        // Placement uses their sum only.
        let sequences = load.sequences_running;
        load.sequences_waiting
            .saturating_add(sequences)
            .hash(hasher);
        (worker.draining, worker.progress, worker.unresponsive).hash(hasher);
        self.ahead(Some(worker.closed_until)).hash(hasher);
        let claims = worker.ledger.handoffs().map(|(handoff, claim)| {
            // The number of an order matters only by the number of later ones.
            let order = claim.order.filter(|_| claim.unreported);
            let since = order.map(|order| worker.orders - order);
            let order = None;
            let span = claim.span;
            let ahead = [span.from, span.until].map(|at| (self.ahead(Some(at)), self.ago(at)));
            let ahead = (claim.span != StreamSpan::NONE).then_some((ahead, span.tokens));
            let span = StreamSpan::NONE;
            (
                handoff,
                LegClaim {
                    order,
                    span,
                    ..*claim
                },
                since,
                ahead,
            )
        });
        for claim in claims {
            claim.hash(hasher);
        }
        // The rest matters only where prices are known.
        if worker.priced() {
            worker.prices.hash(hasher);
            (load.context_tokens, load.streams).hash(hasher);
            (load.backlog, load.tpot_least).hash(hasher);
            (
                load.sequences_running,
                self.ago(worker.load_received_at),
                load.step_left,
            )
                .hash(hasher);
            self.ago(worker.ledger.at_work_since).hash(hasher);
        }
    }

    fn hash_flight(&self, flight: &FlightRecord, hasher: &mut impl Hasher) {
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
        (flight.unplaceable_at == Some(self.fleet.version())).hash(hasher);
        (flight.moves_aborted, flight.yielded_at).hash(hasher);
        self.hash_target_state(flight, hasher);
        match &flight.stage {
            FlightPhase::Waiting => 0.hash(hasher),
            FlightPhase::Flying(attempt) => {
                1.hash(hasher);
                hash_attempt(attempt, hasher);
            }
            FlightPhase::CountingTokens(FailedAttempt {
                handoff,
                fence,
                peer_in_doubt: doubtful,
                context_tokens_max,
                unanswered_by,
            }) => {
                (2, handoff, fence, doubtful).hash(hasher);
                (context_tokens_max, unanswered_by).hash(hasher);
            }
        }
        let moving = flight.moving.as_ref();
        moving.map(|m| (m.handoff, m.why)).hash(hasher);
        if let Some(leg) = flight.leg() {
            hash_attempt(leg, hasher);
        }
    }
}

impl RouterBrain {
    /// Hashes a flight's targets, and the state that decides whether they are met.
    fn hash_target_state(&self, flight: &FlightRecord, hasher: &mut impl Hasher) {
        let slo = &flight.request.slo;
        (slo, &flight.place.queue).hash(hasher);
        (flight.overtaken, flight.downgrades, flight.charged).hash(hasher);
        flight.late_workers.hash(hasher);
        flight.forecast.hash(hasher);
        let aims = [slo.ttft, slo.tpot, slo.e2e];
        if aims.iter().any(Option::is_some) {
            let latest = self.ahead(Some(flight.place.latest_start));
            (latest, self.ago(flight.submitted)).hash(hasher);
            let FlightTimestamps {
                began,
                lost,
                ordered,
                first,
                landed,
                decode,
            } = flight.timestamps;
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

fn hash_attempt(attempt: &FlightAttempt, hasher: &mut impl Hasher) {
    let FlightAttempt {
        handoff,
        prefill,
        decode,
        of,
        context_tokens_max,
        reserved,
        prefilled,
        leg_failure,
        landed,
        finished,
    } = attempt;
    (handoff, prefill, decode, of, context_tokens_max).hash(hasher);
    (reserved, prefilled, leg_failure, landed).hash(hasher);
    let finished = finished.map(|finish| (finish.reason as u8, finish.output_tokens));
    finished.hash(hasher);
}
