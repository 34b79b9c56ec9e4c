//! The fleet as a policy sees it.
//!
//! Owns: the snapshot of each worker on which a choice is based, the groups of workers that may
//! exchange blocks, and the better of the groups' choices. Never: changes anything, or ranks the
//! workers of a group: `judge` does by forecast, `policy` by load or in turn.
//! Invariant: what this router promised and a worker has not confirmed counts as taken.

mod worker_forecast;

use crate::event::{LegPlacement, RequestForecast, RouterReadiness, RoutingMode};
use crate::fleet::{CompatibleWorkers, FleetWorker, RouterFleet};
use crate::placement::forecast::{PlacementForecast, RequestNeed, WorkerForecast};
use crate::placement::judge::judge;
use crate::placement::policy::{
    self, AttemptSize, LegChoice, NoPlacement, RoutingTerms, WorkerSnapshot,
};
use crate::placement::prefix::PrefixHashes;
use cleave_domain::{AdapterId, Fingerprint, Role, Time, WorkerId, WorkerRef};
use cleave_planner::Predict;
use std::collections::{BTreeMap, BTreeSet};
use std::time::Duration;
use worker_forecast::worker_forecast;

/// The inputs of a placement.
#[derive(Clone, Copy, Debug)]
pub(crate) struct PlacementQuery<'a> {
    pub(crate) ask: AttemptSize,
    pub(crate) content: &'a PrefixHashes,
    /// Its LoRA adapter: only workers that serve it are considered.
    pub(crate) adapter: Option<AdapterId>,
    pub(crate) excluded: &'a BTreeSet<WorkerId>,
    /// Failed attempts of it: with any, some of the excluded workers failed it; without, they only
    /// refused.
    pub(crate) failures: u32,
    /// Weights and arithmetic that drew the tokens its client has: only the same draw the ones that
    /// follow. None while it has none.
    pub(crate) drawn_by: Option<&'a Fingerprint>,
    pub(crate) now: Time,
    pub(crate) terms: RoutingTerms,
    /// Its needs in time; none where times do not decide.
    pub(crate) need: Option<&'a RequestNeed>,
}

#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct ChosenPlacement {
    pub(crate) choice: LegChoice,
    pub(crate) forecast: Option<PlacementForecast>,
    /// The best placements that were compared, this one first.
    pub(crate) considered: Vec<RequestForecast>,
    /// The mean gap between tokens that its client was promised.
    pub(crate) tpot: Option<Duration>,
}

/// The size and target of a sequence that moves.
#[derive(Clone, Copy, Debug)]
pub(crate) struct MigrationCost {
    pub(crate) ask: AttemptSize,
    pub(crate) tpot: Option<Duration>,
}

impl PlacementQuery<'_> {
    /// The same content with another size and other exclusions.
    pub(crate) fn asking<'a>(
        &self,
        ask: AttemptSize,
        excluded: &'a BTreeSet<WorkerId>,
    ) -> PlacementQuery<'a>
    where
        Self: 'a,
    {
        PlacementQuery {
            ask,
            content: self.content,
            adapter: self.adapter,
            excluded,
            failures: self.failures,
            drawn_by: self.drawn_by,
            now: self.now,
            terms: self.terms,
            need: self.need,
        }
    }

    fn admits(&self, fingerprint: &Fingerprint) -> bool {
        self.drawn_by.is_none_or(|drawn_by| drawn_by == fingerprint)
    }
}

impl ChosenPlacement {
    fn by_load(choice: LegChoice) -> Self {
        let forecast = RequestForecast {
            prefill: choice.prefill,
            decode: choice.decode,
            cached_tokens: choice.cached_tokens,
            ttft: Duration::ZERO,
            tpot: Duration::ZERO,
            e2e: Duration::ZERO,
            output_tokens: 0,
        };
        Self {
            choice,
            forecast: None,
            considered: vec![forecast],
            tpot: None,
        }
    }

    /// None if there is no forecast.
    fn by_prices(forecasts: &[PlacementForecast]) -> Option<Self> {
        let best = forecasts.first()?;
        let choice = LegChoice {
            prefill: best.request.prefill,
            decode: best.request.decode,
            cached_tokens: best.request.cached_tokens,
            cost: 0,
            reason: best.reason,
        };
        Some(Self {
            choice,
            forecast: Some(*best),
            considered: forecasts.iter().map(|forecast| forecast.request).collect(),
            tpot: None,
        })
    }

    /// The better of two groups' choices: one predicted to meet its targets, then one with a
    /// prediction, then the sooner.
    fn better(self, other: Self) -> Self {
        let rank = |placement: &Self| match &placement.forecast {
            Some(forecast) => (forecast.miss.is_some(), false, forecast.request.e2e, 0),
            None => (false, true, Duration::ZERO, placement.choice.cost),
        };
        if rank(&other) < rank(&self) {
            other
        } else {
            self
        }
    }
}

impl RouterFleet {
    /// Whether the shortest possible request would find a pair.
    pub(crate) fn readiness(&self, now: Time, terms: RoutingTerms) -> RouterReadiness {
        if self.pairs_among(now, terms, FleetWorker::accepts) {
            return RouterReadiness::Ready;
        }
        let accepting = || self.workers().filter(|worker| worker.accepts());
        let roles = || accepting().map(|worker| worker.description.role);
        RouterReadiness::NoPair {
            prefill: roles().filter(|role| role.prefills()).count() as u32,
            decode: roles().filter(|role| role.decodes()).count() as u32,
        }
    }

    /// Returns whether a request can be placed on workers that accept orders and are responsive.
    pub(crate) fn answers(&self, now: Time, terms: RoutingTerms) -> bool {
        self.pairs_among(now, terms, |worker| {
            worker.accepts() && !worker.unresponsive
        })
    }

    fn pairs_among(
        &self,
        now: Time,
        terms: RoutingTerms,
        able: impl Fn(&FleetWorker) -> bool,
    ) -> bool {
        let alone = terms.mode == RoutingMode::Slo && terms.placement == LegPlacement::Auto;
        let alone = alone && self.workers().any(|w| w.accepts() && w.priced());
        // With prices one worker alone may serve any request.
        let placement = match terms.placement {
            LegPlacement::Auto if alone => LegPlacement::Whole,
            other => other,
        };
        let query = PlacementQuery {
            ask: AttemptSize::SHORTEST,
            content: &PrefixHashes::default(),
            adapter: None,
            excluded: &BTreeSet::new(),
            failures: 0,
            drawn_by: None,
            now,
            terms: RoutingTerms { placement, ..terms },
            need: None,
        };
        match self.choose_among(&query, able) {
            Ok(_) | Err(NoPlacement::Busy) => true,
            Err(NoPlacement::NoWorker | NoPlacement::TooLong { .. }) => false,
        }
    }

    /// Chooses in each group and takes the best choice.
    pub(crate) fn choose(&self, query: &PlacementQuery) -> Result<ChosenPlacement, NoPlacement> {
        self.choose_among(query, |worker| !worker.draining)
    }

    fn choose_among(
        &self,
        query: &PlacementQuery,
        counts: impl Fn(&FleetWorker) -> bool,
    ) -> Result<ChosenPlacement, NoPlacement> {
        let mut best: Result<ChosenPlacement, NoPlacement> = Err(NoPlacement::NoWorker);
        let groups = self.groups().iter();
        for (_, group) in groups.filter(|(fingerprint, _)| query.admits(fingerprint)) {
            let found = match self.choose_by_prices(group, query, &counts) {
                Some(found) => found,
                None => {
                    let candidates = self.candidates(group, query, &counts);
                    policy::choose(&candidates, &query.ask, query.terms)
                        .map(ChosenPlacement::by_load)
                }
            };
            best = match (best, found) {
                (Ok(old), Ok(new)) => Ok(old.better(new)),
                (Ok(old), Err(_)) => Ok(old),
                (Err(_), Ok(new)) => Ok(new),
                (Err(old), Err(new)) => Err(old.max(new)),
            };
        }
        best
    }

    /// None where prices are unknown.
    fn choose_by_prices(
        &self,
        group: &CompatibleWorkers,
        query: &PlacementQuery,
        counts: &impl Fn(&FleetWorker) -> bool,
    ) -> Option<Result<ChosenPlacement, NoPlacement>> {
        let need = query.need?;
        let workers = self.considered(group, query, need, counts);
        let snapshots = workers.iter().map(|worker| &worker.snapshot);
        policy::placement_exists(snapshots, &query.ask, query.terms.placement).ok()?;
        let forecasts = judge(&workers, need, query.terms.placement);
        let placement = forecasts.map(|forecasts| ChosenPlacement::by_prices(&forecasts));
        match placement {
            Ok(placement) => placement.map(Ok),
            Err(no_place) => Some(Err(no_place)),
        }
    }

    /// Predicted time until a worker has room again, where none has: the soonest end of a stream.
    pub(crate) fn relief(&self, query: &PlacementQuery) -> Option<Duration> {
        let need = query.need?;
        let groups = self.groups().iter();
        let able = groups.filter(|(fingerprint, _)| query.admits(fingerprint));
        let reliefs = able.flat_map(|(_, group)| {
            let serves = |role: Role| {
                if query.ask.prefill_only {
                    role.prefills()
                } else {
                    role.decodes()
                }
            };
            let counts = |w: &FleetWorker| !w.draining && serves(w.description.role);
            let workers = self.considered(group, query, need, &counts);
            workers.iter().map(|p| p.time_to_free_slot(need)).min()
        });
        reliefs.min()
    }

    /// Time of a prompt on an idle worker with nothing cached: a first estimate, by any worker's
    /// prices.
    pub(crate) fn prompt_alone(&self, tokens: u32) -> Duration {
        let priced = || self.workers().filter(|worker| worker.priced());
        let prefills = |worker: &&FleetWorker| worker.description.role.prefills();
        let any = priced().find(prefills).or_else(|| priced().next());
        any.map_or(Duration::ZERO, |worker| {
            let chunk = worker.description.capacity.step_tokens_max;
            worker.prices.prefill(0, tokens, chunk)
        })
    }

    /// The least time of the prompt over all workers, if all were idle.
    pub(crate) fn alone_least(&self, query: &PlacementQuery) -> Duration {
        let Some(need) = query.need else {
            return Duration::ZERO;
        };
        let groups = self.groups().iter();
        let able = groups.filter(|(fingerprint, _)| query.admits(fingerprint));
        let alone = able.flat_map(|(_, group)| {
            let workers = self.considered(group, query, need, &|w: &FleetWorker| !w.draining);
            workers.iter().map(|p| p.alone).min()
        });
        alone.min().unwrap_or_default()
    }

    /// Chooses a target for a sequence that runs on `source`.
    pub(crate) fn choose_target(
        &self,
        source: WorkerRef,
        query: &PlacementQuery,
    ) -> Result<WorkerRef, NoPlacement> {
        let worker = self.get(source).ok_or(NoPlacement::NoWorker)?;
        let group = self.groups().get(&worker.description.fingerprint);
        let group = group.ok_or(NoPlacement::NoWorker)?;
        let other = |worker: &FleetWorker| !worker.draining && worker.me != source;
        policy::choose_target(&self.candidates(group, query, &other), &query.ask)
    }

    fn candidates(
        &self,
        group: &CompatibleWorkers,
        query: &PlacementQuery,
        counts: &impl Fn(&FleetWorker) -> bool,
    ) -> Vec<WorkerSnapshot> {
        let cached = self.cached(group, query);
        self.members(group)
            .filter(|worker| counts(worker) && worker.serves(query.adapter))
            .map(|worker| {
                let cached = cached.get(&worker.me.worker).copied();
                self.candidate(worker, query, cached.unwrap_or_default())
            })
            .collect()
    }

    /// Forecasts of the workers that are considered; none without any prices.
    fn considered<'a>(
        &'a self,
        group: &'a CompatibleWorkers,
        query: &PlacementQuery,
        need: &RequestNeed,
        counts: &impl Fn(&FleetWorker) -> bool,
    ) -> Vec<WorkerForecast<'a>> {
        let mut workers = Vec::with_capacity(group.workers.len());
        // `extend` would move each item through the whole chain of iterators.
        let all = self.worker_forecasts(group, query, need, counts);
        all.for_each(|worker_forecast| workers.push(worker_forecast));
        if query.terms.placement != LegPlacement::Split {
            let stuck = |worker| self.is_stuck_worker(worker);
            self.devices()
                .leave_one_each(&mut workers, query, need, stuck);
        }
        workers
    }

    fn worker_forecasts<'a>(
        &'a self,
        group: &'a CompatibleWorkers,
        query: &PlacementQuery,
        need: &RequestNeed,
        counts: &impl Fn(&FleetWorker) -> bool,
    ) -> impl Iterator<Item = WorkerForecast<'a>> {
        // A worker without prices yet is assumed to be like the first one with prices.
        let template = self.members(group).find(|worker| worker.priced());
        let cached = template.map(|_| self.cached(group, query));
        let template = template.map(|worker| (&worker.prices, cached.unwrap_or_default()));
        template.into_iter().flat_map(move |(fallback, cached)| {
            let counting = self
                .members(group)
                .filter(|worker| counts(worker) && worker.serves(query.adapter));
            counting.map(move |worker| {
                let cached = cached.get(&worker.me.worker).copied().unwrap_or_default();
                let prices = if worker.priced() {
                    &worker.prices
                } else {
                    fallback
                };
                let snapshot = self.candidate(worker, query, cached);
                worker_forecast(worker, prices, snapshot, need)
            })
        })
    }

    /// The workers of a group that have the beginning of the content.
    fn cached(
        &self,
        group: &CompatibleWorkers,
        query: &PlacementQuery,
    ) -> BTreeMap<WorkerId, CachedPrefix> {
        let Some(capacity) = self.group_capacity(group) else {
            return BTreeMap::new();
        };
        let hashes = query.content.hashes(capacity.block_tokens);
        let found = group.prefixes.longest_prefixes(hashes);
        let mut hits = match capacity.states {
            Some(_) => group.prefixes.snapshot_prefixes(hashes, &found),
            None => found.iter().map(|(_, blocks)| *blocks).collect(),
        };
        if let Some(window) = capacity.window() {
            let workers = found.iter().map(|(worker, _)| *worker);
            let known: Vec<_> = workers.zip(hits).collect();
            hits = group.prefixes.window_prefixes(hashes, window, &known);
        }
        let cached = found.into_iter().zip(hits);
        cached
            .map(|((worker, blocks), hit_blocks)| {
                let cached = CachedPrefix { blocks, hit_blocks };
                (worker.worker, cached)
            })
            .collect()
    }

    /// Whether news of this worker could give `query` a place.
    pub(crate) fn could_help(&self, worker: WorkerRef, query: &PlacementQuery) -> bool {
        self.at_best(worker, query).is_some_and(|candidate| {
            let whole = query.need.is_some() || query.terms.placement == LegPlacement::Whole;
            let placement = if whole {
                query.terms.placement
            } else {
                LegPlacement::Split
            };
            policy::has_room(&candidate, &query.ask, placement)
        })
    }

    /// Whether news of this worker could give a running sequence a target.
    pub(crate) fn could_take(&self, worker: WorkerRef, query: &PlacementQuery) -> bool {
        self.at_best(worker, query)
            .is_some_and(|candidate| policy::choose_target(&[candidate], &query.ask).is_ok())
    }

    /// An optimistic snapshot: cached blocks only make room, so all are assumed cached.
    fn at_best(&self, worker_ref: WorkerRef, query: &PlacementQuery) -> Option<WorkerSnapshot> {
        let fits = |w: &&FleetWorker| {
            !w.draining && query.admits(&w.description.fingerprint) && w.serves(query.adapter)
        };
        let worker = self.get(worker_ref).filter(fits)?;
        let block_tokens = worker.description.capacity.block_tokens;
        let blocks = query.ask.prompt_tokens.div_ceil(block_tokens);
        let cached = CachedPrefix {
            blocks,
            hit_blocks: blocks,
        };
        Some(self.candidate(worker, query, cached))
    }

    /// A worker's last report with later claims added. Open claims of this router are a lower
    /// bound, whatever the report says; and sums saturate: a worker that claims too much looks
    /// full, never empty.
    fn candidate(
        &self,
        worker: &FleetWorker,
        query: &PlacementQuery,
        cached: CachedPrefix,
    ) -> WorkerSnapshot {
        let about = &worker.description;
        let load = &worker.load;
        let totals = worker.ledger.totals();
        let busy = load
            .sequences_running
            .saturating_add(load.sequences_waiting)
            .saturating_add(totals.sequences_fresh);
        let queue_tokens = load.queue_tokens.saturating_add(totals.tokens_fresh);
        let window = about.capacity.window();
        let of_claim = window.map_or(0, |window| window.blocks_max(1));
        let windows_fresh = totals
            .claims_fresh
            .saturating_mul(of_claim)
            .min(totals.blocks_fresh);
        WorkerSnapshot {
            worker: worker.me,
            role: about.role,
            memory_short: self.is_short_of_memory(worker.me.worker),
            closed: worker.stuck()
                || worker.closed_until > query.now
                || query.excluded.contains(&worker.me.worker),
            capacity: about.capacity,
            blocks_free: load.blocks_free.saturating_sub(totals.blocks_fresh),
            states_free: load.states_free.saturating_sub(totals.claims_fresh),
            windows_free: load.windows_free.saturating_sub(windows_fresh),
            sequences: busy.max(totals.sequences),
            queue_max: about.queue_max,
            prompts_open: totals.prompts,
            queue_tokens: queue_tokens.max(totals.tokens),
            cached_blocks: cached.blocks,
            hit_blocks: cached.hit_blocks,
            adapter_place: worker.adapter_place(query.adapter),
            chosen: worker.chosen,
        }
    }
}

/// Leading blocks of a content that a worker reported.
#[derive(Clone, Copy, Debug, Default)]
struct CachedPrefix {
    blocks: u32,
    /// Blocks of the prefix that a request would reuse: see [`WorkerSnapshot::hit_blocks`].
    hit_blocks: u32,
}
