//! Workers that are lost together, and pauses before flights are placed again.
//!
//! Owns: which failures count, and when a flight whose worker was lost is placed again. Never:
//! chooses a worker. Invariant: workers lost within `losses_together` have one cause (this router
//! was suspended, a switch failed), and its effect on a flight is no failure of the flight; but at
//! most `failures_max` failures of a flight are excused, since it may be the cause itself. After a
//! first failure a flight is placed at once; after each later one, and each of a shared cause,
//! after a growing pause.

use crate::brain::RouterBrain;
use crate::flight::{FlightPhase, FlightRecord};
use crate::timers::FlightTimer;
use cleave_domain::{Failure, FlightId, Time, WorkerId};
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
}

impl RouterBrain {
    /// When the flight failed by a loss that may turn out to have a shared cause.
    pub(crate) fn failed_lately(&self, flight: &FlightRecord) -> Option<Time> {
        let together = self.limits.losses_together;
        flight.lost_at.filter(|at| self.now.since(*at) < together)
    }

    fn is_loss_shared(&self) -> bool {
        self.losses.is_shared(self.now, self.limits.losses_together)
    }

    /// Records a lost worker. If another one was lost just before, flights that failed by that are
    /// excused.
    pub(crate) fn count_loss(&mut self, worker: WorkerId) {
        let (now, together) = (self.now, self.limits.losses_together);
        let lately = |at: Time| now.since(at) < together;
        self.losses.record(worker, now, together);
        if !self.is_loss_shared() {
            return;
        }
        let failures_max = self.limits.failures_max;
        for flight in self.flights.values_mut() {
            if flight.lost_at.is_some_and(lately) {
                flight.spare(failures_max);
            }
        }
    }

    /// Counts an attempt's failure on its flight's budget.
    pub(crate) fn count_failure(&mut self, id: FlightId, failure: Failure) {
        let shared = self.is_loss_shared();
        let failures_max = self.limits.failures_max;
        let Some(flight) = self.flights.get_mut(&id) else {
            return;
        };
        flight.failures += 1;
        match failure {
            Failure::WorkerLost if shared => flight.spare(failures_max),
            Failure::WorkerLost => flight.lost_at = Some(self.now),
            _ => {}
        }
        flight.failure = Some(failure);
    }

    /// When a flight that failed may be placed again, if not at once.
    pub(crate) fn pause_for(&self, flight: &FlightRecord, failure: &Failure) -> Option<Time> {
        let again = flight.failures > 1 || self.is_loss_shared();
        if *failure != Failure::WorkerLost || !again || self.limits.retry_pause.is_zero() {
            return None;
        }
        let times = 4_u32.saturating_pow(flight.failures.saturating_sub(1));
        Some(self.now + self.limits.retry_pause * times.min(PAUSES_MAX))
    }

    /// Puts a flight into the queue, where it is not placed before `until`.
    pub(crate) fn pause(&mut self, id: FlightId, until: Time) {
        if let Some(flight) = self.flights.get_mut(&id) {
            flight.pause_until = Some(until);
        }
        self.timers.set(id, FlightTimer::RetryDelay, Some(until));
        self.wait(id);
    }

    /// Ends the pause of a waiting flight. The workers that failed it are tried again only if no
    /// other has room now.
    pub(crate) fn pause_over(&mut self, id: FlightId) {
        let Some(flight) = self.flights.get_mut(&id) else {
            return;
        };
        flight.pause_until = None;
        if !matches!(flight.stage, FlightPhase::Waiting) {
            return;
        }
        if self.find(id).is_err() {
            self.reconsider(id, |_| false);
        }
        self.serve_queue();
        // The queue placed others first: from now on any worker will do.
        if self.is_waiting(id) {
            self.reconsider(id, |_| false);
        }
    }

    fn is_waiting(&self, id: FlightId) -> bool {
        let flight = self.flights.get(&id);
        flight.is_some_and(|flight| matches!(flight.stage, FlightPhase::Waiting))
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
