//! Routing schemes compared on the same arrivals, and the rate that each sustains.
//!
//! Owns: the definition of each scheme, and the rate search. Never: changes the price or number of
//! devices: every scheme gets the same ones. Invariant: refused, failed and late requests are
//! misses; only requests that met every target count.

use super::{AdapterFleet, FleetSpec, GoodputOutcome, RequestArrival, Scenario, WorkerDevice, run};
use cleave_domain::{Role, SloPolicy, Time};
use cleave_router::{LegPlacement, RouterLimits, RoutingMode};
use std::collections::BTreeMap;
use std::sync::Arc;
use std::time::Duration;

/// The largest fleet of which every division into legs is tried.
const DIVISIONS_MAX: u32 = 8;

/// A fleet that serves arrivals within this time serves them at any rate.
const SERVED_AT_ONCE_SPAN: Duration = Duration::from_millis(100);

/// A scheme of placing requests on workers.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum RoutingScheme {
    /// By predicted times; one worker or two, whichever serves better.
    Auto,
    /// By predicted times, always on two workers.
    Split,
    /// By predicted times, always on one; every worker does both.
    Whole,
    /// To the least loaded pair; nothing is forecast or refused for its SLO.
    LoadSplit,
    /// To the least loaded worker; every worker does both.
    LoadWhole,
    /// Pairs of workers in round-robin order.
    RoundRobinSplit,
    /// Workers in round-robin order; every worker does both.
    RoundRobinWhole,
}

impl RoutingScheme {
    /// All schemes, Cleave's default first.
    pub const ALL: [Self; 7] = [
        Self::Auto,
        Self::Split,
        Self::Whole,
        Self::LoadSplit,
        Self::LoadWhole,
        Self::RoundRobinSplit,
        Self::RoundRobinWhole,
    ];

    /// The name that tables show.
    pub fn name(self) -> &'static str {
        match self {
            Self::Auto => "slo auto",
            Self::Split => "slo split",
            Self::Whole => "slo aggregated",
            Self::LoadSplit => "load-only split",
            Self::LoadWhole => "load-only aggregated",
            Self::RoundRobinSplit => "round-robin split",
            Self::RoundRobinWhole => "round-robin aggregated",
        }
    }

    fn mode(self) -> RoutingMode {
        match self {
            Self::Auto | Self::Split | Self::Whole => RoutingMode::Slo,
            Self::LoadSplit | Self::LoadWhole => RoutingMode::Load,
            Self::RoundRobinSplit | Self::RoundRobinWhole => RoutingMode::RoundRobin,
        }
    }

    fn placement(self) -> LegPlacement {
        match self {
            Self::Auto => LegPlacement::Auto,
            Self::Split | Self::LoadSplit | Self::RoundRobinSplit => LegPlacement::Split,
            Self::Whole | Self::LoadWhole | Self::RoundRobinWhole => LegPlacement::Whole,
        }
    }

    /// The router limits of this scheme. A baseline refuses no request, as in the papers' systems.
    pub fn router_limits(self, policy: &Arc<SloPolicy>) -> RouterLimits {
        let baseline = self.mode() != RoutingMode::Slo;
        let run_max = Duration::from_secs(3600);
        let defaults = RouterLimits::default();
        RouterLimits {
            flights_max: 1 << 20,
            queue_max: 1 << 20,
            queue_wait_max: if baseline {
                run_max
            } else {
                defaults.queue_wait_max
            },
            mode: self.mode(),
            placement: self.placement(),
            policy: Arc::clone(policy),
            ..defaults
        }
    }

    /// The devices of a fleet as this scheme uses them.
    pub fn devices(self, fleet: &FleetSpec) -> Vec<WorkerDevice> {
        let mut devices = fleet.devices();
        if self.placement() == LegPlacement::Whole {
            for device in &mut devices {
                device.limits.role = Role::Both;
            }
        }
        devices
    }
}

/// The inputs that all compared schemes share.
#[derive(Clone, Debug)]
pub struct RoutingComparison {
    pub fleet: FleetSpec,
    pub policy: Arc<SloPolicy>,
    /// The adapters of every worker, if requests name any.
    pub adapters: Option<AdapterFleet>,
    /// How far a step may be off its price, in thousandths.
    pub noise_permille: u32,
    /// Seeds the noise and the tokens.
    pub seed: u64,
}

/// The result of a rate search.
#[derive(Clone, Debug, Default)]
pub struct RateSearchResult {
    /// The highest rate that met every goal.
    pub best: Option<RateTrial>,
    /// The lowest rate that missed one; its run may have stopped early.
    pub broken: Option<RateTrial>,
}

/// A rate with its outcome.
#[derive(Clone, Debug)]
pub struct RateTrial {
    /// Arrivals per second, in thousandths.
    pub rate_milli: u64,
    pub outcome: GoodputOutcome,
}

impl RoutingComparison {
    /// The same devices, divided into legs as serves these arrivals best when every request is
    /// split: tries every division of up to eight workers, and multiples of those for larger
    /// fleets. Larger fleets are tried on proportionally fewer arrivals. `trying` gets the number
    /// of each division, from 1, and their count.
    pub fn best_division(
        &self,
        arrivals: &[RequestArrival],
        trying: &dyn Fn(u32, u32),
    ) -> FleetSpec {
        let workers = self.fleet.workers_count().max(2);
        let parts = workers.min(DIVISIONS_MAX);
        let every = (workers / parts) as usize;
        let fewer: Vec<RequestArrival> = arrivals.iter().step_by(every).cloned().collect();
        let divide = |prefill: u32, parts: u32| FleetSpec {
            profile: self.fleet.profile.clone(),
            prefill,
            decode: parts - prefill,
            both: 0,
        };
        let good = |prefill: u32| {
            trying(prefill, parts - 1);
            let comparison = Self {
                fleet: divide(prefill, parts),
                ..self.clone()
            };
            let outcome = run(&comparison.scenario(RoutingScheme::Split, fewer.clone()));
            let score = &outcome.score;
            // Ties go to the earlier first tokens.
            (score.all.good, std::cmp::Reverse(score.all.ttft.p90))
        };
        let prefill = (1..parts).max_by_key(|prefill| good(*prefill)).unwrap_or(1);
        divide(prefill * workers / parts, workers)
    }

    pub fn scenario(&self, scheme: RoutingScheme, arrivals: Vec<RequestArrival>) -> Scenario {
        Scenario {
            devices: scheme.devices(&self.fleet),
            routers_count: 1,
            router: scheme.router_limits(&self.policy),
            arrivals,
            message_time: Duration::from_micros(200),
            noise_permille: self.noise_permille,
            grain: Duration::ZERO,
            misses_max: BTreeMap::new(),
            adapters: self.adapters,
            orchestrator: None,
            seed: self.seed,
        }
    }

    /// The highest rate at which every class meets its goal, within a twentieth, of arrivals that
    /// `at_rate` makes for any rate; none if even a hundredth of `from_milli` is too much.
    pub fn search(
        &self,
        scheme: RoutingScheme,
        from_milli: u64,
        at_rate: ArrivalsAtRate,
    ) -> RateSearchResult {
        let mut search = RateSearch::of(self, scheme, at_rate);
        search.try_rate(from_milli);
        search.run(from_milli)
    }

    /// The search of the automatic scheme, where the outcome of the first rate is known already.
    pub(crate) fn search_from(
        &self,
        first: &RateTrial,
        at_rate: ArrivalsAtRate,
    ) -> RateSearchResult {
        let mut search = RateSearch::of(self, RoutingScheme::Auto, at_rate);
        search.record(first.clone());
        search.run(first.rate_milli)
    }

    /// The most misses with which each class still meets its goal.
    fn misses_max(&self, arrivals: &[RequestArrival]) -> BTreeMap<String, u64> {
        let mut counts: BTreeMap<String, u64> = BTreeMap::new();
        for arrival in arrivals {
            *counts.entry(arrival.slo.class.clone()).or_default() += 1;
        }
        for (class, count) in &mut counts {
            let goal = u64::from(self.policy.class(class).attainment_permille);
            *count = *count * 1000_u64.saturating_sub(goal) / 1000;
        }
        counts
    }

    /// Whether every class met its goal.
    pub fn meets_goals(&self, outcome: &GoodputOutcome) -> bool {
        let classes = outcome.score.classes.iter();
        let short = |class: &&super::ClassScore| {
            let goal = u64::from(self.policy.class(&class.class).attainment_permille);
            class.good * 1000 < goal * class.arrivals
        };
        classes.filter(short).count() == 0
    }
}

/// A function from a rate, in thousandths of one per second, to its arrivals.
pub type ArrivalsAtRate<'a> = &'a dyn Fn(u64) -> Vec<RequestArrival>;

/// A search for the highest rate in progress.
struct RateSearch<'a> {
    comparison: &'a RoutingComparison,
    scheme: RoutingScheme,
    at_rate: ArrivalsAtRate<'a>,
    found: RateSearchResult,
}

impl<'a> RateSearch<'a> {
    fn of(
        comparison: &'a RoutingComparison,
        scheme: RoutingScheme,
        at_rate: ArrivalsAtRate<'a>,
    ) -> Self {
        Self {
            comparison,
            scheme,
            at_rate,
            found: RateSearchResult::default(),
        }
    }

    /// Doubles or halves the first rate, which was tried, until one rate serves and one does not;
    /// then bisects between them.
    fn run(mut self, from_milli: u64) -> RateSearchResult {
        let mut rate = from_milli;
        while self.found.broken.is_none() && !self.serves_all_at_once() {
            rate *= 2;
            self.try_rate(rate);
        }
        while self.found.best.is_none() && rate > from_milli / 100 && rate > 1 {
            rate /= 2;
            self.try_rate(rate);
        }
        while let Some((low, high)) = self.found.bracket()
            && high - low > (low / 20).max(1)
        {
            self.try_rate(low.midpoint(high));
        }
        self.found
    }

    /// Whether a higher rate would be no more load: all requests arrive and are served at once.
    fn serves_all_at_once(&self) -> bool {
        let best = self.found.best.as_ref();
        best.is_some_and(|best| best.outcome.score.span <= SERVED_AT_ONCE_SPAN)
    }

    /// Runs until everything is over or some class has missed its goal.
    fn try_rate(&mut self, rate_milli: u64) {
        let arrivals = (self.at_rate)(rate_milli);
        let mut scenario = self.comparison.scenario(self.scheme, arrivals);
        scenario.misses_max = self.comparison.misses_max(&scenario.arrivals);
        let outcome = run(&scenario);
        self.record(RateTrial {
            rate_milli,
            outcome,
        });
    }

    /// An outcome without clients says nothing about the fleet, so it counts as not served.
    fn record(&mut self, tried: RateTrial) {
        let served =
            self.comparison.meets_goals(&tried.outcome) && !tried.outcome.clients.is_empty();
        if served {
            self.found.best = Some(tried)
        } else {
            self.found.broken = Some(tried)
        }
    }
}

impl RateSearchResult {
    fn bracket(&self) -> Option<(u64, u64)> {
        let (best, broken) = self.best.as_ref().zip(self.broken.as_ref())?;
        Some((best.rate_milli, broken.rate_milli))
    }
}

/// The same arrivals at another rate: their gaps shrink or grow.
pub fn at_rate(arrivals: &[RequestArrival], rate_milli: u64) -> Vec<RequestArrival> {
    let (Some(first), Some(last)) = (arrivals.first(), arrivals.last()) else {
        return Vec::new();
    };
    let gaps = arrivals.len() as u128 - 1;
    let span = last.at.since(first.at).as_nanos().max(1);
    let new_span = gaps * 1_000_000_000_000 / u128::from(rate_milli.max(1));
    let moved = |arrival: &RequestArrival| {
        let since = arrival.at.since(first.at).as_nanos();
        let nanos = u64::try_from(since * new_span / span).unwrap_or(u64::MAX);
        RequestArrival {
            at: Time::from_nanos(nanos),
            ..arrival.clone()
        }
    };
    arrivals.iter().map(moved).collect()
}

#[cfg(test)]
mod tests {
    use super::super::{PromptRecipe, check};
    use super::*;
    use cleave_domain::{RequestSlo, ScalingPolicy, SloClass};
    use std::cell::Cell;

    fn arrivals_at(millis: &[u64]) -> Vec<RequestArrival> {
        let arrival = |millis: &u64| RequestArrival {
            at: Time::ZERO + Duration::from_millis(*millis),
            prompt: PromptRecipe::unshared(*millis, 100),
            output_tokens: 2,
            slo: RequestSlo::default(),
            priority: 0,
            adapter: None,
        };
        millis.iter().map(arrival).collect()
    }

    #[test]
    fn a_rate_search_ends_when_all_arrive_at_once() {
        let class = SloClass {
            ttft: Some(Duration::from_secs(60)),
            ..SloClass::default()
        };
        let comparison = RoutingComparison {
            fleet: "both=1,profile=h100-llama-3-8b".parse().unwrap(),
            policy: Arc::new(SloPolicy {
                classes: vec![class],
                ..SloPolicy::default()
            }),
            adapters: None,
            noise_permille: 0,
            seed: 1,
        };
        let arrivals = arrivals_at(&[0, 1000, 2000]);
        let runs = Cell::new(0);
        let faster = |rate_milli| {
            runs.set(runs.get() + 1);
            at_rate(&arrivals, rate_milli)
        };
        let checked = check(&comparison, 1000, &faster);
        assert_eq!(runs.get(), 1, "the answer needs one run");
        let limit = checked.find_limit(&comparison, &faster);
        assert!(checked.met && limit.missed_first.is_none(), "{limit:?}");
        let best = limit.best.expect("one at a time is nothing");
        assert_eq!(
            best.rate_milli, 32_000,
            "the first at which all come at once"
        );
        assert_eq!(runs.get(), 6);
    }

    #[test]
    fn a_scaling_policy_is_checked_on_a_fixed_fleet() {
        let class = SloClass {
            ttft: Some(Duration::from_secs(60)),
            ..SloClass::default()
        };
        let comparison = RoutingComparison {
            fleet: "both=1,profile=h100-llama-3-8b".parse().unwrap(),
            policy: Arc::new(SloPolicy {
                classes: vec![class],
                scaling: Some(ScalingPolicy::new(2)),
                ..SloPolicy::default()
            }),
            adapters: None,
            noise_permille: 0,
            seed: 1,
        };
        let arrivals = arrivals_at(&[0, 1000]);
        // Without a scaling policy left in it, the run ends.
        let outcome = run(&comparison.scenario(RoutingScheme::Auto, arrivals));
        assert!(comparison.meets_goals(&outcome), "{outcome:?}");
    }
}
