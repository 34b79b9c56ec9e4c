//! Fingerprints of a router's state, for model checking.
//!
//! Owns: the choice of state that decides a brain's future. Never: changes anything, or costs
//! anything while serving.
//! Invariant: two brains with equal fingerprints answer equal futures with equal orders, ends and
//! fences. Left out are spans that are only reported (`waited`, `took`, `retry_after`) and values
//! last emitted for the record; times count from now on; and numbers that only define an order are
//! replaced by their ranks.

use crate::accounting::tally::ServiceTally;
use crate::accounting::verdict::FlightTimestamps;
use crate::fleet::leases::LeaseRenewal;
use crate::fleet::ledger::{LegClaim, StreamSpan};
use crate::fleet::stuck::StuckDeadlines;
use crate::fleet::{FleetWorker, RouterFleet};
use crate::flight::losses::RecentLosses;
use crate::flight::releases::LegReleases;
use crate::flight::state::{FlightRecord, RouterFlights};
use crate::flight::timers::FlightTimer;
use crate::queue::passes::QueuePasses;
use cleave_domain::{FlightId, Time};
use std::hash::{Hash, Hasher};
use std::time::Duration;

/// Hashes the parts of a brain with times that count from now on.
#[derive(Clone, Copy, Debug)]
pub(crate) struct FingerprintClock {
    pub(crate) now: Time,
    /// As in the limits of the brain.
    pub(crate) losses_together: Duration,
}

impl FingerprintClock {
    pub(crate) fn hash_flights(
        self,
        flights: &RouterFlights,
        fleet_version: u64,
        hasher: &mut impl Hasher,
    ) {
        let mut arrivals: Vec<(u64, FlightId)> = Vec::new();
        flights.len().hash(hasher);
        for (id, flight) in flights.iter() {
            arrivals.push((flight.place.arrival, id));
            id.hash(hasher);
            self.hash_flight(flight, fleet_version, hasher);
            for timer in FlightTimer::ALL {
                self.ahead(flights.timer(id, timer)).hash(hasher);
            }
        }
        arrivals.sort_unstable();
        for (_, flight) in arrivals {
            flight.hash(hasher);
        }
    }

    /// Hashes the deadlines of the fleet, and the flights that wait for them.
    pub(crate) fn hash_deadlines(
        self,
        passes: &QueuePasses,
        stuck: &StuckDeadlines,
        leases: &LeaseRenewal,
        hasher: &mut impl Hasher,
    ) {
        let retries = passes.retries();
        let stuck = stuck.iter();
        (retries.len(), stuck.len()).hash(hasher);
        for (at, worker) in retries.iter().chain(stuck) {
            (self.ahead(Some(*at)), worker).hash(hasher);
        }
        self.ahead(leases.deadline()).hash(hasher);
    }

    pub(crate) fn hash_releases(self, releases: &LegReleases, hasher: &mut impl Hasher) {
        releases.stages().collect::<Vec<_>>().hash(hasher);
    }

    pub(crate) fn hash_losses(self, losses: &RecentLosses, hasher: &mut impl Hasher) {
        for (worker, at) in losses.lately(self.now, self.losses_together) {
            (worker, self.ago(at)).hash(hasher);
        }
    }

    pub(crate) fn hash_service(
        self,
        tally: &ServiceTally,
        passes: &QueuePasses,
        hasher: &mut impl Hasher,
    ) {
        tally.leads().hash(hasher);
        tally.hash_scores(self.now, hasher);
        let due = passes.due();
        self.ahead(due.map(|(due_at, _)| due_at)).hash(hasher);
        self.ahead(due.map(|(_, served_at)| served_at)).hash(hasher);
    }

    /// Time until `at`; zero for the past.
    fn ahead(self, at: Option<Time>) -> Option<u128> {
        at.map(|at| at.since(self.now).as_nanos())
    }

    /// Nanoseconds that passed since `at`.
    fn ago(self, at: Time) -> u128 {
        self.now.since(at).as_nanos()
    }

    pub(crate) fn hash_fleet(self, fleet: &RouterFleet, hasher: &mut impl Hasher) {
        // Never chosen is a rank of its own: every worker begins with it.
        let mut chosen: Vec<u64> = vec![0];
        chosen.extend(fleet.workers().map(|worker| worker.chosen));
        chosen.sort_unstable();
        chosen.dedup();
        fleet.workers().count().hash(hasher);
        for worker in fleet.workers() {
            chosen.partition_point(|c| *c < worker.chosen).hash(hasher);
            self.hash_worker(worker, hasher);
        }
        fleet.hash_groups(hasher);
    }

    fn hash_worker(self, worker: &FleetWorker, hasher: &mut impl Hasher) {
        let load = &worker.load;
        (worker.me, &worker.description).hash(hasher);
        (load.queue_tokens, load.blocks_free, load.states_free).hash(hasher);
        load.windows_free.hash(hasher);
        // Placement uses their sum only.
        let sequences = load.sequences_running;
        load.sequences_waiting
            .saturating_add(sequences)
            .hash(hasher);
        (worker.draining, worker.progress, worker.unresponsive).hash(hasher);
        (&worker.adapters, &worker.adapter_problems).hash(hasher);
        self.ahead(Some(worker.closed_until)).hash(hasher);
        for (handoff, claim) in worker.ledger.handoffs() {
            // The number of an order matters only by the number of later ones.
            let order = claim.order.filter(|_| claim.unreported);
            let later = order.map(|order| worker.orders - order);
            let StreamSpan {
                from,
                until,
                tokens,
            } = claim.span;
            let span = [from, until].map(|at| (self.ahead(Some(at)), self.ago(at)));
            let span = (claim.span != StreamSpan::NONE).then_some((span, tokens));
            let timeless = LegClaim {
                order: None,
                span: StreamSpan::NONE,
                ..*claim
            };
            (handoff, timeless, later, span).hash(hasher);
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

    fn hash_flight(self, flight: &FlightRecord, fleet_version: u64, hasher: &mut impl Hasher) {
        let request = &flight.request;
        (&request.prompt, &request.generated).hash(hasher);
        (request.stop.max_tokens, request.stop.min_tokens).hash(hasher);
        (&request.stop.stop_tokens, request.priority).hash(hasher);
        (request.cache_scope(), &flight.drawn_by).hash(hasher);
        let sizes: Vec<u32> = flight.content.block_sizes().collect();
        sizes.hash(hasher);
        let failures = &flight.failures;
        (flight.attempts(), failures.failures(), failures.last()).hash(hasher);
        let lost_at = failures.lost_lately(self.now, self.losses_together);
        let lost_at = lost_at.map(|at| self.ago(at));
        let pause = flight.pause_until.filter(|_| flight.pauses(self.now));
        (failures.spared(), lost_at, self.ahead(pause)).hash(hasher);
        flight
            .refusals
            .last()
            .map(std::mem::discriminant)
            .hash(hasher);
        let refusals = &flight.refusals;
        (
            refusals.count(),
            refusals.excluded(),
            flight.moves.avoided(),
        )
            .hash(hasher);
        self.ahead(flight.wait_until).hash(hasher);
        (flight.unplaceable_at == Some(fleet_version)).hash(hasher);
        (flight.moves.aborted(), flight.moves.yielded_at()).hash(hasher);
        self.hash_target_state(flight, hasher);
        let moving = flight.moving();
        let moving = moving.map(|moving| (moving.handoff, moving.why, &moving.leg));
        (flight.stage(), moving).hash(hasher);
    }

    /// Hashes a flight's targets, and the state that decides whether they are met.
    fn hash_target_state(self, flight: &FlightRecord, hasher: &mut impl Hasher) {
        let slo = &flight.request.slo;
        (slo, &flight.place.queue).hash(hasher);
        (flight.overtaken, flight.downgrades, flight.charged).hash(hasher);
        flight.refusals.late().hash(hasher);
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
            let first = first.map(|(at, timing)| (self.ago(at), timing));
            let past = [began, ordered, landed].map(|at| at.map(|at| self.ago(at)));
            (past, first, lost, decode).hash(hasher);
            self.ahead(flight.due).hash(hasher);
        }
    }
}
