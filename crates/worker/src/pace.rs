//! How long steps take.
//!
//! Owns: whether time is measured or priced, and the steps whose priced time has yet to pass. Never
//! runs a step.
//! Invariant: a step is answered once, and reported to have taken its price, whatever the timer
//! did. Of two steps under way the second begins when the first is over.

use cleave_domain::{Prices, StepPlan, StepResult, StepWork};
use cleave_planner::Predict;
use cleave_sched::WorkerInput;
use std::collections::VecDeque;
use std::time::{Duration, Instant};
use tokio::time::{Instant as Moment, sleep_until};

/// How long an engine's steps take.
#[derive(Clone, Debug, Default, PartialEq)]
pub enum StepTime {
    /// Measured; the engine has a thread of its own.
    #[default]
    Measured,
    /// The time that these prices give, on tokio's clock and without a processor: for an engine
    /// that computes nothing. Such workers cost no thread, and follow tokio's virtual time. Blocks
    /// are copied while a step runs, as on devices.
    Priced(Prices),
}

impl StepTime {
    /// Prices of steps, as far as they are known before any has run.
    pub fn prices(&self) -> Prices {
        match self {
            Self::Measured => Prices::default(),
            Self::Priced(prices) => prices.clone(),
        }
    }
}

/// Answers steps once their time has passed.
#[derive(Debug)]
pub(super) struct StepPacer {
    time: StepTime,
    /// A step that has been run, and the moment at which its time has passed.
    pending: Option<(Moment, WorkerInput)>,
    /// Later steps, and how long each takes.
    queued: VecDeque<(Duration, WorkerInput)>,
    /// The end of the last measured step.
    ended: Option<Instant>,
    /// How late and how early the last timer was. Timers tick in milliseconds, and a decode step
    /// may take few of them: the next step compensates, so that the rate is as priced.
    late: Duration,
    early: Duration,
}

/// The resolution of timers.
const TICK: Duration = Duration::from_millis(1);
/// Lateness beyond this is not compensated: the machine was busy.
const LATE_MAX: Duration = Duration::from_millis(5);

impl StepPacer {
    pub(super) fn new(time: StepTime) -> Self {
        Self {
            time,
            pending: None,
            queued: VecDeque::new(),
            ended: None,
            late: Duration::ZERO,
            early: Duration::ZERO,
        }
    }

    /// A step failed: the time of the next one begins now.
    pub(super) fn step_failed(&mut self) {
        self.ended = Some(Instant::now());
    }

    /// Takes the result of a step that began then. Gives the answer, unless its time has yet to
    /// pass.
    pub(super) fn stepped(
        &mut self,
        plan: &StepPlan,
        result: StepResult,
        began: Instant,
    ) -> Option<WorkerInput> {
        let prices = match &self.time {
            StepTime::Measured => {
                let ended = Instant::now();
                let began = self.ended.map_or(began, |before| began.max(before));
                self.ended = Some(ended);
                let took = ended.saturating_duration_since(began);
                return Some(WorkerInput::Stepped { result, took });
            }
            StepTime::Priced(prices) => prices,
        };
        let took = prices.step(&StepWork::of_plan(plan));
        self.queued
            .push_back((took, WorkerInput::Stepped { result, took }));
        if self.pending.is_none() {
            self.begin_next();
        }
        None
    }

    /// Starts the time of the next step.
    fn begin_next(&mut self) {
        self.pending = self.queued.pop_front().map(|(takes, answer)| {
            let over = Moment::now() + (takes + self.early).saturating_sub(self.late);
            (over, answer)
        });
    }

    /// Whether a step's time has yet to pass.
    pub(super) fn is_pending(&self) -> bool {
        self.pending.is_some()
    }

    /// Returns when the time of the pending step has passed, with its answer; without one, never.
    pub(super) async fn step_over(&mut self) -> WorkerInput {
        let Some((over, _)) = &self.pending else {
            return std::future::pending().await;
        };
        let over = *over;
        // Rounded to the nearest tick; timers by themselves round up.
        sleep_until(over - TICK / 2).await;
        let (_, answer) = self
            .pending
            .take()
            .expect("a step is pending, as checked above");
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
    fn a_failed_step_adds_no_time_to_the_next() {
        let mut pace = StepPacer::new(StepTime::Measured);
        let minute = Duration::from_secs(60);
        let Some(long_ago) = Instant::now().checked_sub(minute) else {
            return;
        };
        pace.step_failed();
        let answer = pace.stepped(&StepPlan::default(), StepResult::default(), long_ago);
        let Some(WorkerInput::Stepped { took, .. }) = answer else {
            panic!("{answer:?}");
        };
        assert!(took < minute, "{took:?}");
    }

    #[tokio::test(start_paused = true)]
    async fn a_priced_step_takes_its_price_on_the_clock() {
        let prices = Prices {
            rows: vec![RowPrice {
                rows: 1,
                nanos: 40_000_000_000,
            }],
            ..Prices::default()
        };
        let mut pace = StepPacer::new(StepTime::Priced(prices));
        let (result, began) = (StepResult::default(), Instant::now());
        assert_eq!(pace.stepped(&StepPlan::default(), result, began), None);
        assert!(pace.is_pending());
        let before = Moment::now();
        let WorkerInput::Stepped { took, .. } = pace.step_over().await else {
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
        let mut pace = StepPacer::new(StepTime::Priced(prices));
        let before = Moment::now();
        for step in 1..=2 {
            let result = StepResult {
                step: StepId(step),
                ..StepResult::default()
            };
            assert_eq!(
                pace.stepped(&StepPlan::default(), result, Instant::now()),
                None
            );
        }
        for number in 1..=2 {
            let WorkerInput::Stepped { result, took } = pace.step_over().await else {
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
    fn waiting_for_the_previous_step_is_not_measured() {
        let mut pace = StepPacer::new(StepTime::Measured);
        // Both began a minute ago.
        let minute = Duration::from_secs(60);
        let began = Instant::now().checked_sub(minute).unwrap();
        let mut all = Duration::ZERO;
        for _ in 0..2 {
            let Some(WorkerInput::Stepped { took, .. }) =
                pace.stepped(&StepPlan::default(), StepResult::default(), began)
            else {
                panic!("a step that is measured is over");
            };
            all += took;
        }
        assert!(all <= began.elapsed(), "{all:?}");
    }

    #[tokio::test(start_paused = true)]
    async fn steps_shorter_than_a_timer_tick_keep_their_rate() {
        let prices = Prices {
            rows: vec![RowPrice {
                rows: 1,
                nanos: 1_300_000,
            }],
            ..Prices::default()
        };
        let mut pace = StepPacer::new(StepTime::Priced(prices));
        let before = Moment::now();
        for _ in 0..1000 {
            let (result, began) = (StepResult::default(), Instant::now());
            assert_eq!(pace.stepped(&StepPlan::default(), result, began), None);
            pace.step_over().await;
        }
        let took = before.elapsed().as_secs_f64();
        assert!((1.299..=1.302).contains(&took), "{took}");
    }
}
