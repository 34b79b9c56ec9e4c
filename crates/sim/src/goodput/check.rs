//! Whether a fleet can keep a policy's promises, and what gives way first when more is asked of it.
//!
//! Owns: the question. Never: forgives: what was refused misses its goal as what came late does.
//! Invariant: what breaks first is looked for above the highest rate at which nothing does.

use super::compare::all_at_once;
use super::{Arrival, Best, ClassScore, Contest, Outcome, Way, run};
use cleave_domain::Aim;

/// The rate grows by a tenth until something breaks, so often at most: to about seven times as much.
const STEPS_MAX: u32 = 20;

/// What became of a fleet and a policy under a workload.
#[derive(Clone, Debug)]
pub struct Checked {
    /// At the rate asked about.
    pub outcome: Outcome,
    /// Whether every class met its goal there.
    pub met: bool,
    /// The highest rate at which every class does.
    pub best: Option<Best>,
    /// What breaks just above that, or at the lowest rate that was tried.
    pub breaks: Option<Break>,
}

/// A class that misses its goal.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Break {
    /// Arrivals per second, in thousandths.
    pub rate_milli: u64,
    /// Which class.
    pub class: String,
    /// How many of a thousand had every target met.
    pub attainment_permille: u64,
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
    /// It broke off, or was still under way.
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

/// Runs the workload at the rate asked about, then looks for the highest rate that can be borne, then
/// above it.
pub fn check(contest: &Contest, rate_milli: u64, at_rate: &dyn Fn(u64) -> Vec<Arrival>) -> Checked {
    let at = |rate_milli| run(&contest.scenario(Way::Auto, at_rate(rate_milli)));
    let outcome = at(rate_milli);
    let best = contest.best(Way::Auto, rate_milli, at_rate);
    let mut rate = best.as_ref().map_or(1, |best| best.rate_milli);
    let mut breaks = None;
    let steps = match best
        .as_ref()
        .is_some_and(|best| all_at_once(&at_rate(best.rate_milli)))
    {
        true => 0,
        false => STEPS_MAX,
    };
    for _ in 0..steps {
        rate += (rate / 10).max(1);
        breaks = worst(contest, rate, &at(rate));
        if breaks.is_some() {
            break;
        }
    }
    Checked {
        met: contest.meets(&outcome),
        outcome,
        best,
        breaks,
    }
}

/// The class that is furthest below its goal.
fn worst(contest: &Contest, rate_milli: u64, outcome: &Outcome) -> Option<Break> {
    let goal =
        |class: &ClassScore| u64::from(contest.policy.class(&class.class).attainment_permille);
    let short = |class: &&ClassScore| class.good * 1000 < goal(class) * class.arrivals;
    let classes = outcome.score.classes.iter().filter(short);
    let class = classes.max_by_key(|class| goal(class) - class.attainment_permille())?;
    let aims = [Aim::Ttft, Aim::Tpot, Aim::EndToEnd];
    let late = aims
        .iter()
        .map(|aim| (class.late[*aim as usize], Miss::Late(*aim)));
    let most = late
        .chain([
            (class.refused, Miss::Refused),
            (class.failed + class.unfinished, Miss::Failed),
        ])
        .max_by_key(|(count, _)| *count);
    let stages = class.stages.iter();
    Some(Break {
        rate_milli,
        class: class.class.clone(),
        attainment_permille: class.attainment_permille(),
        goal_permille: goal(class),
        most: most.map_or(Miss::Failed, |(_, miss)| miss),
        stage: stages
            .max_by_key(|(_, count)| **count)
            .map(|(stage, _)| *stage),
    })
}
