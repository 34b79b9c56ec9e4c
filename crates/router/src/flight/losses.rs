//! Workers that are lost together, and pauses before flights are placed again.
//!
//! Owns: which failures count, and when a flight whose worker was lost is placed again. Never:
//! chooses a worker. Invariant: workers lost within `losses_together` have one cause (this router
//! was suspended, a switch failed), and its effect on a flight is no failure of the flight; but at
//! most `failures_max` failures of a flight are excused, since it may be the cause itself. After a
//! first failure a flight is placed at once; after each later one, and each of a shared cause,
//! after a growing pause.

use crate::event::RouterLimits;
use cleave_domain::{Failure, Time, WorkerId};
use std::collections::BTreeMap;
use std::time::Duration;

/// Upper limit of a pause, in multiples of [`RouterLimits::retry_pause`].
///
/// [`RouterLimits::retry_pause`]: crate::RouterLimits::retry_pause
const PAUSES_MAX: u32 = 64;

#[derive(Clone, Debug, Default)]
pub(crate) struct RecentLosses {
    recent: BTreeMap<WorkerId, Time>,
}

impl RecentLosses {
    /// Records a lost worker, and forgets losses that have nothing to do with it.
    pub(crate) fn record(&mut self, worker: WorkerId, now: Time, together: Duration) {
        self.recent.retain(|_, at| now.since(*at) < together);
        self.recent.insert(worker, now);
    }

    /// Workers that were lost so recently that the next loss has the same cause.
    pub(crate) fn lately(
        &self,
        now: Time,
        together: Duration,
    ) -> impl Iterator<Item = (WorkerId, Time)> {
        let recent = self.recent.iter().map(|(worker, at)| (*worker, *at));
        recent.filter(move |(_, at)| now.since(*at) < together)
    }

    /// Whether several workers were lost lately, which has one cause.
    pub(crate) fn is_shared(&self, now: Time, together: Duration) -> bool {
        self.lately(now, together).nth(1).is_some()
    }
}

/// The failures of one flight, and the part of them that does not count.
#[derive(Clone, Debug, Default)]
pub(crate) struct FailureBudget {
    failures: u32,
    /// Failures with a cause that other flights shared: they do not count.
    spared: u32,
    last: Option<Failure>,
    /// When its worker was last lost, unless that failure is excused already.
    lost_at: Option<Time>,
}

impl FailureBudget {
    /// Attempts that failed, for whatever cause.
    pub(crate) fn failures(&self) -> u32 {
        self.failures
    }

    pub(crate) fn spared(&self) -> u32 {
        self.spared
    }

    /// The failures that count.
    pub(crate) fn counted(&self) -> u32 {
        self.failures - self.spared
    }

    /// The reason of the last failure.
    pub(crate) fn last(&self) -> Option<&Failure> {
        self.last.as_ref()
    }

    fn spare(&mut self, failures_max: u32) {
        if self.spared < failures_max {
            self.spared += 1;
        }
        self.lost_at = None;
    }

    /// Counts an attempt's failure; `shared` tells whether the loss of a worker has a cause that
    /// other flights share.
    pub(crate) fn count(&mut self, failure: Failure, shared: bool, failures_max: u32, now: Time) {
        self.failures += 1;
        match failure {
            Failure::WorkerLost if shared => self.spare(failures_max),
            Failure::WorkerLost => self.lost_at = Some(now),
            _ => {}
        }
        self.last = Some(failure);
    }

    /// When an attempt failed by a loss that may turn out to have a shared cause.
    pub(crate) fn lost_lately(&self, now: Time, together: Duration) -> Option<Time> {
        self.lost_at.filter(|at| now.since(*at) < together)
    }

    /// Excuses the last failure, if it was by a loss that turns out to have a shared cause.
    pub(crate) fn excuse_loss(&mut self, now: Time, limits: &RouterLimits) {
        if self.lost_lately(now, limits.losses_together).is_some() {
            self.spare(limits.failures_max);
        }
    }

    /// The pause before the flight may be placed again after its last failure, if any.
    pub(crate) fn retry_pause(&self, shared: bool, limits: &RouterLimits) -> Option<Duration> {
        let again = self.failures > 1 || shared;
        if self.last != Some(Failure::WorkerLost) || !again || limits.retry_pause.is_zero() {
            return None;
        }
        let times = 4_u32.saturating_pow(self.failures.saturating_sub(1));
        Some(limits.retry_pause * times.min(PAUSES_MAX))
    }

    pub(crate) fn check(&self) {
        assert!(self.spared <= self.failures, "more failures are spared");
        assert_eq!(
            self.failures > 0,
            self.last.is_some(),
            "a failure has no reason"
        );
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn at(millis: u64) -> Time {
        Time::ZERO + Duration::from_millis(millis)
    }

    #[test]
    fn losses_within_the_limit_have_one_cause() {
        let together = Duration::from_millis(100);
        let mut losses = RecentLosses::default();
        losses.record(WorkerId(1), at(0), together);
        assert!(!losses.is_shared(at(0), together), "one loss is its own");
        losses.record(WorkerId(2), at(99), together);
        assert!(losses.is_shared(at(99), together));
        assert!(!losses.is_shared(at(100), together), "the first is past");
        losses.record(WorkerId(2), at(150), together);
        assert!(!losses.is_shared(at(150), together), "it is one worker");
        assert!(
            losses
                .lately(at(150), together)
                .eq([(WorkerId(2), at(150))])
        );
        losses.record(WorkerId(3), at(150), Duration::ZERO);
        assert!(!losses.is_shared(at(150), Duration::ZERO), "never");
    }

    fn limits() -> RouterLimits {
        RouterLimits {
            failures_max: 2,
            retry_pause: Duration::from_millis(50),
            losses_together: Duration::from_millis(100),
            ..RouterLimits::default()
        }
    }

    #[test]
    fn failures_of_a_shared_cause_are_spared_up_to_a_limit() {
        let mut budget = FailureBudget::default();
        for (count, counted) in [(1, 0), (2, 0), (3, 1)] {
            budget.count(Failure::WorkerLost, true, 2, at(0));
            assert_eq!((budget.failures(), budget.counted()), (count, counted));
            budget.check();
        }
        budget.count(Failure::Rejected, true, 2, at(0));
        assert_eq!(budget.counted(), 2, "it was no loss");
    }

    #[test]
    fn a_loss_is_excused_once_when_its_cause_is_known() {
        let limits = limits();
        let mut budget = FailureBudget::default();
        budget.count(Failure::WorkerLost, false, 2, at(0));
        assert_eq!(budget.counted(), 1);
        budget.excuse_loss(at(99), &limits);
        budget.excuse_loss(at(99), &limits);
        assert_eq!(budget.counted(), 0);
        budget.count(Failure::WorkerLost, false, 2, at(200));
        budget.excuse_loss(at(300), &limits);
        assert_eq!(budget.counted(), 1, "it was too long ago");
        budget.check();
    }

    #[test]
    fn pauses_grow_with_each_loss() {
        let limits = limits();
        let mut budget = FailureBudget::default();
        let mut pause = |failure, shared| {
            budget.count(failure, shared, 2, at(0));
            budget.retry_pause(shared, &limits)
        };
        let millis = |count| Some(Duration::from_millis(count));
        assert_eq!(pause(Failure::WorkerLost, false), None, "the first one");
        assert_eq!(pause(Failure::WorkerLost, false), millis(200));
        assert_eq!(pause(Failure::Rejected, false), None, "no loss");
        assert_eq!(pause(Failure::WorkerLost, false), millis(3200));
        assert_eq!(pause(Failure::WorkerLost, false), millis(3200), "at most");
        let mut budget = FailureBudget::default();
        budget.count(Failure::WorkerLost, true, 2, at(0));
        assert_eq!(budget.retry_pause(true, &limits), millis(50));
    }
}
