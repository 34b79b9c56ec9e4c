//! How long steps take.
//!
//! Owns: the one place that knows whether time passes by itself or is priced, and the steps whose time
//! has yet to pass. Never: runs a step.
//! Invariant: a step is answered once, and is said to have taken what it was priced at, whatever the
//! timer made of it. Of two under way the second begins when the first is over.

use cleave_domain::{Prices, StepPlan, StepResult, Work};
use cleave_planner::Predict;
use cleave_sched::Input;
use std::collections::VecDeque;
use std::time::{Duration, Instant};
use tokio::time::{Instant as Moment, sleep_until};

/// How long an engine's steps take.
#[derive(Clone, Debug, Default, PartialEq)]
pub enum StepTime {
    /// As long as they take; the engine has a thread of its own.
    #[default]
    Measured,
    /// What these prices say, on tokio's clock and on no processor: for an engine that computes
    /// nothing. Such workers cost no thread, and where tokio's time is virtual so is theirs. Blocks
    /// are copied while a step runs, as devices do.
    Priced(Prices),
}

impl StepTime {
    /// What steps cost, as far as it is known before any has run.
    pub(crate) fn prices(&self) -> Prices {
        match self {
            Self::Measured => Prices::default(),
            Self::Priced(prices) => prices.clone(),
        }
    }
}

/// Lets the time of steps pass.
#[derive(Debug)]
pub(super) struct Pace {
    time: StepTime,
    /// A step that has been run, and when its time has passed.
    pending: Option<(Moment, Input)>,
    /// Those behind it, and how long they take.
    behind: VecDeque<(Duration, Input)>,
    /// When the last step that was measured was over.
    ended: Option<Instant>,
    /// By how much the last timer was late, and by how much early. Timers tick in milliseconds, and a
    /// decode step may take not many more: the next one makes up for it, so that the rate is what was
    /// priced.
    late: Duration,
    early: Duration,
}

/// Timers tick in so much.
const TICK: Duration = Duration::from_millis(1);
/// Of a machine that was busy for longer no more is made up for.
const LATE_MAX: Duration = Duration::from_millis(5);

impl Pace {
    pub(super) fn new(time: StepTime) -> Self {
        Self {
            time,
            pending: None,
            behind: VecDeque::new(),
            ended: None,
            late: Duration::ZERO,
            early: Duration::ZERO,
        }
    }

    /// A step failed: what comes next has not run for as long as it did.
    pub(super) fn failed(&mut self) {
        self.ended = Some(Instant::now());
    }

    /// A step that began then has been run. Gives the answer, unless its time has yet to pass.
    pub(super) fn stepped(
        &mut self,
        plan: &StepPlan,
        (result, began): (StepResult, Instant),
    ) -> Option<Input> {
        let prices = match &self.time {
            StepTime::Measured => {
                let ended = Instant::now();
                let began = self.ended.map_or(began, |before| began.max(before));
                self.ended = Some(ended);
                let took = ended.saturating_duration_since(began);
                return Some(Input::Stepped { result, took });
            }
            StepTime::Priced(prices) => prices,
        };
        let took = prices.step(&Work::of(plan));
        self.behind
            .push_back((took, Input::Stepped { result, took }));
        if self.pending.is_none() {
            self.begin_next();
        }
        None
    }

    /// The time of the step that is next begins to pass.
    fn begin_next(&mut self) {
        self.pending = self.behind.pop_front().map(|(takes, answer)| {
            let over = Moment::now() + (takes + self.early).saturating_sub(self.late);
            (over, answer)
        });
    }

    /// Whether a step's time has yet to pass.
    pub(super) fn is_pending(&self) -> bool {
        self.pending.is_some()
    }

    /// Returns when the time of the pending step has passed, with its answer; without one, never.
    pub(super) async fn over(&mut self) -> Input {
        let Some((over, _)) = &self.pending else {
            return std::future::pending().await;
        };
        let over = *over;
        // Rounded to the nearest tick; timers by themselves round up.
        sleep_until(over - TICK / 2).await;
        let (_, answer) = self.pending.take().expect("it was looked at above");
        let now = Moment::now();
        self.late = now.saturating_duration_since(over).min(LATE_MAX);
        self.early = over.saturating_duration_since(now);
        self.begin_next();
        answer
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use cleave_domain::{RowPrice, StepId};

    #[test]
    fn the_step_behind_one_that_failed_was_priced_with_both() {
        let mut pace = Pace::new(StepTime::Measured);
        let minute = Duration::from_secs(60);
        let Some(long_ago) = Instant::now().checked_sub(minute) else {
            return;
        };
        pace.failed();
        let answer = pace.stepped(&StepPlan::default(), (StepResult::default(), long_ago));
        let Some(Input::Stepped { took, .. }) = answer else {
            panic!("{answer:?}");
        };
        assert!(took < minute, "{took:?}");
    }

    #[tokio::test(start_paused = true)]
    async fn a_priced_step_takes_its_price_and_no_processor() {
        let prices = Prices {
            rows: vec![RowPrice {
                rows: 1,
                nanos: 40_000_000_000,
            }],
            ..Prices::default()
        };
        let mut pace = Pace::new(StepTime::Priced(prices));
        let ran = (StepResult::default(), Instant::now());
        assert_eq!(pace.stepped(&StepPlan::default(), ran), None);
        assert!(pace.is_pending());
        let before = Moment::now();
        let Input::Stepped { took, .. } = pace.over().await else {
            panic!("a step is answered as one");
        };
        assert_eq!(took, Duration::from_secs(40));
        assert_eq!(before.elapsed(), Duration::from_secs(40));
        assert!(!pace.is_pending());
    }

    #[tokio::test(start_paused = true)]
    async fn a_step_behind_another_begins_when_that_is_over() {
        let prices = Prices {
            rows: vec![RowPrice {
                rows: 1,
                nanos: 40_000_000,
            }],
            ..Prices::default()
        };
        let mut pace = Pace::new(StepTime::Priced(prices));
        let before = Moment::now();
        for step in 1..=2 {
            let result = StepResult {
                step: StepId(step),
                ..StepResult::default()
            };
            assert_eq!(
                pace.stepped(&StepPlan::default(), (result, Instant::now())),
                None
            );
        }
        for number in 1..=2 {
            let Input::Stepped { result, took } = pace.over().await else {
                panic!("a step is answered as one");
            };
            let millis = 40 * u32::try_from(number).unwrap();
            assert_eq!(
                (result.step, took),
                (StepId(number), Duration::from_millis(40))
            );
            assert_eq!(before.elapsed(), Duration::from_millis(1) * millis);
        }
        assert!(!pace.is_pending());
    }

    #[test]
    fn what_a_step_waited_for_the_one_before_it_counted_as_its_own_time() {
        let mut pace = Pace::new(StepTime::Measured);
        // Both an hour ago.
        let minute = Duration::from_secs(60);
        let began = Instant::now().checked_sub(minute).unwrap();
        let mut all = Duration::ZERO;
        for _ in 0..2 {
            let Some(Input::Stepped { took, .. }) =
                pace.stepped(&StepPlan::default(), (StepResult::default(), began))
            else {
                panic!("a step that is measured is over");
            };
            all += took;
        }
        assert!(all <= began.elapsed(), "{all:?}");
    }

    #[tokio::test(start_paused = true)]
    async fn steps_shorter_than_a_tick_did_not_come_at_their_rate() {
        let prices = Prices {
            rows: vec![RowPrice {
                rows: 1,
                nanos: 1_300_000,
            }],
            ..Prices::default()
        };
        let mut pace = Pace::new(StepTime::Priced(prices));
        let before = Moment::now();
        for _ in 0..1000 {
            let ran = (StepResult::default(), Instant::now());
            assert_eq!(pace.stepped(&StepPlan::default(), ran), None);
            pace.over().await;
        }
        let took = before.elapsed().as_secs_f64();
        assert!((1.299..=1.302).contains(&took), "{took}");
    }
}
