//! Whether a fleet keeps a policy's promises, and which class misses its goal first under more
//! load.
//!
//! Owns: the check. Never: excuses a miss: refused requests miss their goal as late ones do.
//! Invariant: the first missed goal occurs just above the highest rate at which none is missed.

use super::{
    ArrivalsAtRate, ClassScore, GoodputOutcome, RateTrial, RoutingComparison, RoutingScheme, run,
};
use cleave_domain::SloMetric;

/// The outcome of a policy on a fleet at the requested rate.
#[derive(Clone, Debug)]
pub struct PolicyCheck {
    /// Arrivals per second, in thousandths.
    rate_milli: u64,
    pub outcome: GoodputOutcome,
    /// Whether every class met its goal at that rate.
    pub met: bool,
}

/// How much load a policy's goals bear on a fleet.
#[derive(Clone, Debug)]
pub struct PolicyLimit {
    /// The highest rate at which every class meets its goal.
    pub best: Option<RateTrial>,
    /// The missed goal at the lowest rate that is too much.
    pub missed_first: Option<MissedGoal>,
}

/// A class that misses its goal.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct MissedGoal {
    /// Arrivals per second, in thousandths.
    pub rate_milli: u64,
    pub class: String,
    /// The share that was to be met, in thousandths.
    pub goal_permille: u64,
    /// How most of the missed requests missed.
    pub most: MissKind,
    /// The stage most often at fault for late requests.
    pub stage: Option<&'static str>,
}

/// How a request misses its goal.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum MissKind {
    /// It was turned away.
    Refused,
    Late(SloMetric),
    Failed,
}

impl MissKind {
    /// The name that tables show.
    pub fn name(self) -> &'static str {
        match self {
            Self::Refused => "refused",
            Self::Late(aim) => aim.name(),
            Self::Failed => "failed",
        }
    }
}

/// Runs the workload at the requested rate.
pub fn check(
    comparison: &RoutingComparison,
    rate_milli: u64,
    at_rate: ArrivalsAtRate,
) -> PolicyCheck {
    let outcome = run(&comparison.scenario(RoutingScheme::Auto, at_rate(rate_milli)));
    PolicyCheck {
        rate_milli,
        met: comparison.meets_goals(&outcome),
        outcome,
    }
}

impl PolicyCheck {
    /// Searches the highest rate that meets every goal. Each run stops as soon as its rate is
    /// clearly too much.
    pub fn find_limit(
        &self,
        comparison: &RoutingComparison,
        at_rate: ArrivalsAtRate,
    ) -> PolicyLimit {
        let first = RateTrial {
            rate_milli: self.rate_milli,
            outcome: self.outcome.clone(),
        };
        let found = comparison.search_from(&first, at_rate);
        PolicyLimit {
            best: found.best,
            missed_first: found
                .broken
                .and_then(|broken| worst_class(comparison, &broken)),
        }
    }
}

/// The class that is furthest below its goal.
fn worst_class(comparison: &RoutingComparison, broken: &RateTrial) -> Option<MissedGoal> {
    let goal =
        |class: &ClassScore| u64::from(comparison.policy.class(&class.class).attainment_permille);
    // A stopped run counts only the misses so far.
    let over = |class: &ClassScore| {
        let missed = (class.arrivals - class.good - class.unfinished) * 1000;
        let allowed = 1000_u64.saturating_sub(goal(class)) * class.arrivals;
        missed.checked_sub(allowed).filter(|over| *over > 0)
    };
    let classes = broken.outcome.score.classes.iter();
    let classes =
        classes.filter_map(|class| Some((over(class)? * 1_000_000 / class.arrivals, class)));
    let (_, class) = classes.max_by_key(|(over, _)| *over)?;
    let aims = [SloMetric::Ttft, SloMetric::Tpot, SloMetric::EndToEnd];
    let late = aims
        .iter()
        .map(|aim| (class.late[*aim as usize], MissKind::Late(*aim)));
    let most = late
        .chain([
            (class.refused, MissKind::Refused),
            (class.failed, MissKind::Failed),
        ])
        .max_by_key(|(count, _)| *count);
    let stages = class.stages.iter();
    Some(MissedGoal {
        rate_milli: broken.rate_milli,
        class: class.class.clone(),
        goal_permille: goal(class),
        most: most.map_or(MissKind::Failed, |(_, miss)| miss),
        stage: stages
            .max_by_key(|(_, count)| **count)
            .map(|(stage, _)| *stage),
    })
}
