//! Whether a fleet can keep a policy's promises, and what gives way first when more is asked of it.
//!
//! Owns: the question. Never: forgives: what was refused misses its goal as what came late does.
//! Invariant: what breaks first does so just above the highest rate at which nothing does.

use super::{Arrivals, ClassScore, Contest, Outcome, Tried, Way, run};
use cleave_domain::Aim;

/// What became of a fleet and a policy under a workload.
#[derive(Clone, Debug)]
pub struct Checked {
    /// At the rate asked about.
    pub outcome: Outcome,
    /// Whether every class met its goal there.
    pub met: bool,
    /// The highest rate at which every class does.
    pub best: Option<Tried>,
    /// What breaks at the lowest rate that is too much.
    pub breaks: Option<Break>,
}

/// A class that misses its goal.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Break {
    /// Arrivals per second, in thousandths.
    pub rate_milli: u64,
    /// Which class.
    pub class: String,
    /// How many were promised to.
    pub goal_permille: u64,
    /// What most of those that missed were, or missed first.
    pub most: Miss,
    /// The stage most often at fault for those late.
    pub stage: Option<&'static str>,
}

/// How a request misses.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Miss {
    /// It was turned away.
    Refused,
    /// It was late.
    Late(Aim),
    /// It broke off.
    Failed,
}

impl Miss {
    /// Its name in tables.
    pub fn name(self) -> &'static str {
        match self {
            Self::Refused => "refused",
            Self::Late(aim) => aim.name(),
            Self::Failed => "failed",
        }
    }
}

/// Runs the workload at the rate asked about, then looks for the highest rate that can be borne. No run
/// goes on for longer than it takes to see that its rate is too much, but the first.
pub fn check(contest: &Contest, rate_milli: u64, at_rate: Arrivals) -> Checked {
    let outcome = run(&contest.scenario(Way::Auto, at_rate(rate_milli)));
    let first = Tried {
        rate_milli,
        outcome,
    };
    let found = contest.search_from(&first, at_rate);
    Checked {
        met: contest.meets(&first.outcome),
        outcome: first.outcome,
        best: found.best,
        breaks: found.broken.and_then(|broken| worst(contest, &broken)),
    }
}

/// The class that is furthest below its goal.
fn worst(contest: &Contest, broken: &Tried) -> Option<Break> {
    let goal =
        |class: &ClassScore| u64::from(contest.policy.class(&class.class).attainment_permille);
    // Of a run that was stopped only what was missed by then tells.
    let over = |class: &ClassScore| {
        let missed = (class.arrivals - class.good - class.unfinished) * 1000;
        let allowed = 1000_u64.saturating_sub(goal(class)) * class.arrivals;
        missed.checked_sub(allowed).filter(|over| *over > 0)
    };
    let classes = broken.outcome.score.classes.iter();
    let classes =
        classes.filter_map(|class| Some((over(class)? * 1_000_000 / class.arrivals, class)));
    let (_, class) = classes.max_by_key(|(over, _)| *over)?;
    let aims = [Aim::Ttft, Aim::Tpot, Aim::EndToEnd];
    let late = aims
        .iter()
        .map(|aim| (class.late[*aim as usize], Miss::Late(*aim)));
    let most = late
        .chain([(class.refused, Miss::Refused), (class.failed, Miss::Failed)])
        .max_by_key(|(count, _)| *count);
    let stages = class.stages.iter();
    Some(Break {
        rate_milli: broken.rate_milli,
        class: class.class.clone(),
        goal_permille: goal(class),
        most: most.map_or(Miss::Failed, |(_, miss)| miss),
        stage: stages
            .max_by_key(|(_, count)| **count)
            .map(|(stage, _)| *stage),
    })
}
