//! Ways to route, compared on the same arrivals, and the rate that each can bear.
//!
//! Owns: what each way is, and the search. Never: changes what devices cost, or how many there are: every
//! way gets the same ones.
//! Invariant: a way that refuses, fails or is late misses; only what met every target counts.

use super::{Arrival, Device, Fleet, Outcome, Scenario, run};
use cleave_domain::{Role, SloPolicy, Time};
use cleave_router::{Limits, Mode, Placement};
use std::collections::BTreeMap;
use std::sync::Arc;
use std::time::Duration;

/// Divisions are tried with so many workers.
const DIVISIONS_MAX: u32 = 8;

/// Who serves all that comes within this time serves them at any rate.
const AT_ONCE: Duration = Duration::from_millis(100);

/// A way to route.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum Way {
    /// By predicted times; one worker or two, whichever serves better.
    Auto,
    /// By predicted times, always on two workers.
    Split,
    /// By predicted times, always on one; every worker does both.
    Whole,
    /// To the least loaded pair; nothing is predicted or refused for its promise.
    LoadSplit,
    /// To the least loaded worker; every worker does both.
    LoadWhole,
    /// Pairs by turns.
    TurnsSplit,
    /// Workers by turns; every worker does both.
    TurnsWhole,
}

impl Way {
    /// All, the house's own first.
    pub const ALL: [Self; 7] = [
        Self::Auto,
        Self::Split,
        Self::Whole,
        Self::LoadSplit,
        Self::LoadWhole,
        Self::TurnsSplit,
        Self::TurnsWhole,
    ];

    /// Its name in tables.
    pub fn name(self) -> &'static str {
        match self {
            Self::Auto => "slo auto",
            Self::Split => "slo split",
            Self::Whole => "slo aggregated",
            Self::LoadSplit => "load-only split",
            Self::LoadWhole => "load-only aggregated",
            Self::TurnsSplit => "round-robin split",
            Self::TurnsWhole => "round-robin aggregated",
        }
    }

    fn mode(self) -> Mode {
        match self {
            Self::Auto | Self::Split | Self::Whole => Mode::Slo,
            Self::LoadSplit | Self::LoadWhole => Mode::Load,
            Self::TurnsSplit | Self::TurnsWhole => Mode::RoundRobin,
        }
    }

    fn placement(self) -> Placement {
        match self {
            Self::Auto => Placement::Auto,
            Self::Split | Self::LoadSplit | Self::TurnsSplit => Placement::Split,
            Self::Whole | Self::LoadWhole | Self::TurnsWhole => Placement::Whole,
        }
    }

    /// What a router that goes this way is told at birth. A baseline holds what the paper systems hold: it
    /// has no reason to refuse anybody.
    pub fn router(self, policy: &Arc<SloPolicy>) -> Limits {
        let baseline = self.mode() != Mode::Slo;
        let patience = Duration::from_secs(3600);
        let defaults = Limits::default();
        Limits {
            flights_max: 1 << 20,
            queue_max: 1 << 20,
            queue_wait_max: match baseline {
                true => patience,
                false => defaults.queue_wait_max,
            },
            mode: self.mode(),
            placement: self.placement(),
            policy: Arc::clone(policy),
            ..defaults
        }
    }

    /// The devices of a fleet as this way uses them.
    pub fn devices(self, fleet: &Fleet) -> Vec<Device> {
        let mut devices = fleet.devices();
        if self.placement() == Placement::Whole {
            for device in &mut devices {
                device.limits.role = Role::Both;
            }
        }
        devices
    }
}

/// What does not change from way to way.
#[derive(Clone, Debug)]
pub struct Contest {
    /// The devices.
    pub fleet: Fleet,
    /// The promises.
    pub policy: Arc<SloPolicy>,
    /// How far a step may be off its price, in thousandths.
    pub noise_permille: u32,
    /// Draws noise and tokens.
    pub seed: u64,
}

/// What a search came to.
#[derive(Clone, Debug, Default)]
pub struct Found {
    /// The highest rate that was found to be borne.
    pub best: Option<Tried>,
    /// The lowest that was not; its run may have been stopped when that was clear.
    pub broken: Option<Tried>,
}

/// A rate, and what came of it.
#[derive(Clone, Debug)]
pub struct Tried {
    /// Arrivals per second, in thousandths.
    pub rate_milli: u64,
    /// At that rate.
    pub outcome: Outcome,
}

impl Contest {
    /// The same devices with the legs divided as serves these arrivals best where both legs always part:
    /// every division of up to eight workers, and multiples of those for more. As many arrivals are left
    /// out as the fleet is larger than eight.
    pub fn divided(&self, arrivals: &[Arrival]) -> Fleet {
        let workers = self.fleet.workers_count().max(2);
        let parts = workers.min(DIVISIONS_MAX);
        let every = (workers / parts) as usize;
        let fewer: Vec<Arrival> = arrivals.iter().step_by(every).cloned().collect();
        let divide = |prefill: u32, parts: u32| Fleet {
            profile: self.fleet.profile.clone(),
            prefill,
            decode: parts - prefill,
            both: 0,
        };
        let good = |prefill: u32| {
            let contest = Self {
                fleet: divide(prefill, parts),
                ..self.clone()
            };
            let outcome = run(&contest.scenario(Way::Split, fewer.clone()));
            let score = &outcome.score;
            // Between equals, the one whose first tokens come earlier.
            (score.all.good, std::cmp::Reverse(score.all.ttft.p90))
        };
        let prefill = (1..parts).max_by_key(|prefill| good(*prefill)).unwrap_or(1);
        divide(prefill * workers / parts, workers)
    }

    /// One way's scenario.
    pub fn scenario(&self, way: Way, arrivals: Vec<Arrival>) -> Scenario {
        Scenario {
            devices: way.devices(&self.fleet),
            routers_count: 1,
            router: way.router(&self.policy),
            arrivals,
            message: Duration::from_micros(200),
            noise_permille: self.noise_permille,
            grain: Duration::ZERO,
            misses_max: BTreeMap::new(),
            starter: None,
            seed: self.seed,
        }
    }

    /// The highest rate at which every class meets its goal, within a twentieth, of arrivals that
    /// `at_rate` makes for any rate; none if even a hundredth of `from_milli` is too much.
    pub fn search(&self, way: Way, from_milli: u64, at_rate: Arrivals) -> Found {
        let mut search = Search::of(self, way, at_rate);
        search.attempt(from_milli);
        search.run(from_milli)
    }

    /// The same of the way that chooses, where it is known already what comes of the first rate.
    pub(crate) fn search_from(&self, first: &Tried, at_rate: Arrivals) -> Found {
        let mut search = Search::of(self, Way::Auto, at_rate);
        search.found(first.clone());
        search.run(first.rate_milli)
    }

    /// More misses than this, and the class is below its goal.
    fn misses_max(&self, arrivals: &[Arrival]) -> BTreeMap<String, u64> {
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
    pub fn meets(&self, outcome: &Outcome) -> bool {
        let classes = outcome.score.classes.iter();
        let short = |class: &&super::ClassScore| {
            let goal = u64::from(self.policy.class(&class.class).attainment_permille);
            class.good * 1000 < goal * class.arrivals
        };
        classes.filter(short).count() == 0
    }
}

/// The arrivals at a rate in thousandths of one per second.
pub type Arrivals<'a> = &'a dyn Fn(u64) -> Vec<Arrival>;

/// A search for the highest rate.
struct Search<'a> {
    contest: &'a Contest,
    way: Way,
    at_rate: Arrivals<'a>,
    found: Found,
}

impl<'a> Search<'a> {
    fn of(contest: &'a Contest, way: Way, at_rate: Arrivals<'a>) -> Self {
        Self {
            contest,
            way,
            at_rate,
            found: Found::default(),
        }
    }

    /// Doubles or halves from the first rate, which was tried, until one serves and one does not; then
    /// between these.
    fn run(mut self, from_milli: u64) -> Found {
        let mut rate = from_milli;
        while self.found.broken.is_none() && !self.serves_all_at_once() {
            rate *= 2;
            self.attempt(rate);
        }
        while self.found.best.is_none() && rate > from_milli / 100 && rate > 1 {
            rate /= 2;
            self.attempt(rate);
        }
        while let Some((low, high)) = self.found.between()
            && high - low > (low / 20).max(1)
        {
            self.attempt(low.midpoint(high));
        }
        self.found
    }

    /// A greater rate would be no more of a load.
    fn serves_all_at_once(&self) -> bool {
        let best = self.found.best.as_ref();
        best.is_some_and(|best| best.outcome.score.span <= AT_ONCE)
    }

    /// Runs until all is over or some class has broken its goal.
    fn attempt(&mut self, rate_milli: u64) {
        let arrivals = (self.at_rate)(rate_milli);
        let mut scenario = self.contest.scenario(self.way, arrivals);
        scenario.misses_max = self.contest.misses_max(&scenario.arrivals);
        let outcome = run(&scenario);
        self.found(Tried {
            rate_milli,
            outcome,
        });
    }

    /// What nobody asked of a fleet says nothing about it.
    fn found(&mut self, tried: Tried) {
        let served = self.contest.meets(&tried.outcome) && !tried.outcome.clients.is_empty();
        match served {
            true => self.found.best = Some(tried),
            false => self.found.broken = Some(tried),
        }
    }
}

impl Found {
    fn between(&self) -> Option<(u64, u64)> {
        let (best, broken) = self.best.as_ref().zip(self.broken.as_ref())?;
        Some((best.rate_milli, broken.rate_milli))
    }
}

/// The same arrivals at another rate: their gaps shrink or grow.
pub fn at_rate(arrivals: &[Arrival], rate_milli: u64) -> Vec<Arrival> {
    let (Some(first), Some(last)) = (arrivals.first(), arrivals.last()) else {
        return Vec::new();
    };
    let gaps = arrivals.len() as u128 - 1;
    let span = last.at.since(first.at).as_nanos().max(1);
    let wanted = gaps * 1_000_000_000_000 / u128::from(rate_milli.max(1));
    let moved = |arrival: &Arrival| {
        let since = arrival.at.since(first.at).as_nanos();
        let nanos = u64::try_from(since * wanted / span).unwrap_or(u64::MAX);
        Arrival {
            at: Time::from_nanos(nanos),
            ..arrival.clone()
        }
    };
    arrivals.iter().map(moved).collect()
}

#[cfg(test)]
mod tests {
    use super::super::{Prompt, check};
    use super::*;
    use cleave_domain::{Scaling, Slo, SloClass};
    use std::cell::Cell;

    fn come(millis: &[u64]) -> Vec<Arrival> {
        let arrival = |millis: &u64| Arrival {
            at: Time::ZERO + Duration::from_millis(*millis),
            prompt: Prompt::alone(*millis, 100),
            output_tokens: 2,
            slo: Slo::default(),
            priority: 0,
        };
        millis.iter().map(arrival).collect()
    }

    #[test]
    fn a_fleet_that_serves_all_at_once_was_asked_for_more_and_more() {
        let class = SloClass {
            ttft: Some(Duration::from_secs(60)),
            ..SloClass::default()
        };
        let contest = Contest {
            fleet: "both=1,profile=h100-llama-3-8b".parse().unwrap(),
            policy: Arc::new(SloPolicy {
                classes: vec![class],
                ..SloPolicy::default()
            }),
            noise_permille: 0,
            seed: 1,
        };
        let arrivals = come(&[0, 1000, 2000]);
        let asked = Cell::new(0);
        let faster = |rate_milli| {
            asked.set(asked.get() + 1);
            at_rate(&arrivals, rate_milli)
        };
        let checked = check(&contest, 1000, &faster);
        assert!(checked.met && checked.breaks.is_none(), "{checked:?}");
        let best = checked.best.expect("one at a time is nothing");
        assert_eq!(
            best.rate_milli, 32_000,
            "the first at which all come at once"
        );
        assert_eq!(asked.get(), 6);
    }

    #[test]
    fn a_policy_that_scales_is_checked_with_a_fleet_that_does_not() {
        let class = SloClass {
            ttft: Some(Duration::from_secs(60)),
            ..SloClass::default()
        };
        let contest = Contest {
            fleet: "both=1,profile=h100-llama-3-8b".parse().unwrap(),
            policy: Arc::new(SloPolicy {
                classes: vec![class],
                scaling: Some(Scaling::new(2)),
                ..SloPolicy::default()
            }),
            noise_permille: 0,
            seed: 1,
        };
        let arrivals = come(&[0, 1000]);
        // It ends.
        let outcome = run(&contest.scenario(Way::Auto, arrivals));
        assert!(contest.meets(&outcome), "{outcome:?}");
    }
}
