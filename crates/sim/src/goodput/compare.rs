//! Ways to route, compared on the same arrivals, and the rate that each can bear.
//!
//! Owns: what each way is, and the search. Never: changes what devices cost, or how many there are: every
//! way gets the same ones.
//! Invariant: a way that refuses, fails or is late misses; only what met every target counts.

use super::{Arrival, Device, Fleet, Outcome, Scenario, run};
use cleave_domain::{Role, SloPolicy, Time};
use cleave_router::{Limits, Mode, Placement};
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

/// The most that a way could bear.
#[derive(Clone, Debug)]
pub struct Best {
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
            misses_max: None,
            seed: self.seed,
        }
    }

    /// The highest rate at which every class meets its goal, within a twentieth, of arrivals that
    /// `at_rate` makes for any rate; none if even a hundredth of `from_milli` is too much.
    pub fn best(
        &self,
        way: Way,
        from_milli: u64,
        at_rate: &dyn Fn(u64) -> Vec<Arrival>,
    ) -> Option<Best> {
        let attempt = |rate_milli: u64| {
            let arrivals = at_rate(rate_milli);
            if arrivals.is_empty() {
                return None;
            }
            let at_once = all_at_once(&arrivals);
            let outcome = self.attempt(way, arrivals)?;
            let best = Best {
                rate_milli,
                outcome,
            };
            Some((best, at_once))
        };
        let mut low = attempt(from_milli).map(|(best, _)| best);
        let mut high = from_milli;
        if low.is_some() {
            while let Some((best, at_once)) = attempt(high * 2) {
                high *= 2;
                low = Some(best);
                if at_once {
                    return low;
                }
            }
            high *= 2;
        } else {
            let mut rate = from_milli;
            while low.is_none() && rate > from_milli / 100 && rate > 1 {
                high = rate;
                rate /= 2;
                low = attempt(rate).map(|(best, _)| best);
            }
        }
        let mut low = low?;
        while high - low.rate_milli > (low.rate_milli / 20).max(1) {
            let middle = low.rate_milli.midpoint(high);
            match attempt(middle) {
                Some((best, _)) => low = best,
                None => high = middle,
            }
        }
        Some(low)
    }

    /// The outcome, if every class met its goal.
    fn attempt(&self, way: Way, arrivals: Vec<Arrival>) -> Option<Outcome> {
        let mut scenario = self.scenario(way, arrivals);
        scenario.misses_max = Some(self.misses_max(&scenario.arrivals));
        let outcome = run(&scenario);
        self.meets(&outcome).then_some(outcome)
    }

    /// More misses than this, and some class is below its goal, whichever they are of.
    fn misses_max(&self, arrivals: &[Arrival]) -> u64 {
        let goals = self.policy.classes.iter();
        let least = goals.map(|class| class.attainment_permille).min();
        let allowed = 1000 - u64::from(least.unwrap_or(0)).min(1000);
        (arrivals.len() as u64 * allowed).div_ceil(1000)
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

/// Whether a greater rate would be no more of a load.
pub(crate) fn all_at_once(arrivals: &[Arrival]) -> bool {
    let last = arrivals.iter().map(|arrival| arrival.at).max();
    last.is_none_or(|last| last <= Time::ZERO + AT_ONCE)
}
