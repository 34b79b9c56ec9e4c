//! Workers that are lost together, and pauses before flights are placed again.
//!
//! Owns: which failures count, and when a flight whose worker was lost is placed again. Never:
//! chooses a worker. Invariant: workers lost within `losses_together` have one cause (this router
//! was suspended, a switch failed), and its effect on a flight is no failure of the flight; but at
//! most `failures_max` failures of a flight are excused, since it may be the cause itself. After a
//! first failure a flight is placed at once; after each later one, and each of a shared cause,
//! after a growing pause.

use crate::event::RouterLimits;
use crate::flight::FlightRecord;
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

impl FlightRecord {
    pub(crate) fn failures_counted(&self) -> u32 {
        self.failures - self.failures_spared
    }

    fn spare(&mut self, failures_max: u32) {
        if self.failures_spared < failures_max {
            self.failures_spared += 1;
        }
        self.lost_at = None;
    }

    /// Whether it may not be placed yet.
    pub(crate) fn pauses(&self, now: Time) -> bool {
        self.pause_until.is_some_and(|until| until > now)
    }

    /// When it failed by a loss that may turn out to have a shared cause.
    pub(crate) fn failed_lately(&self, now: Time, together: Duration) -> Option<Time> {
        self.lost_at.filter(|at| now.since(*at) < together)
    }

    /// Counts an attempt's failure on its budget; `shared` tells whether the cause is others' too.
    pub(crate) fn count_failure(
        &mut self,
        failure: Failure,
        shared: bool,
        failures_max: u32,
        now: Time,
    ) {
        self.failures += 1;
        match failure {
            Failure::WorkerLost if shared => self.spare(failures_max),
            Failure::WorkerLost => self.lost_at = Some(now),
            _ => {}
        }
        self.failure = Some(failure);
    }

    /// The pause before it may be placed again after its last failure, if any.
    pub(crate) fn retry_pause(&self, shared: bool, limits: &RouterLimits) -> Option<Duration> {
        let again = self.failures > 1 || shared;
        if self.failure != Some(Failure::WorkerLost) || !again || limits.retry_pause.is_zero() {
            return None;
        }
        let times = 4_u32.saturating_pow(self.failures.saturating_sub(1));
        Some(limits.retry_pause * times.min(PAUSES_MAX))
    }

    /// Excuses it, if it failed by a loss that turns out to have a shared cause.
    pub(crate) fn excuse_loss(&mut self, now: Time, limits: &RouterLimits) {
        if self.failed_lately(now, limits.losses_together).is_some() {
            self.spare(limits.failures_max);
        }
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
}
