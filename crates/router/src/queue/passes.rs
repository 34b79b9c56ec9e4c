//! When waiting flights are tried again.
//!
//! Owns: the times of the next passes over the queue, and the version of the fleet at the last one
//! over all flights. Never: makes a pass, or knows which flight is next.
//! Invariant: two passes that news causes are [`QUEUE_SERVICE_INTERVAL`] apart; a pass that was put
//! off is due at the end of that interval.

use cleave_domain::{Time, WorkerId};
use std::collections::BTreeSet;
use std::time::Duration;

/// Interval between two passes after news, where prices decide: every worker's report is news.
const QUEUE_SERVICE_INTERVAL: Duration = Duration::from_millis(2);

#[derive(Clone, Debug)]
pub(crate) struct QueuePasses {
    /// The last pass after news.
    served_at: Time,
    /// The next one, if it was put off.
    due_at: Option<Time>,
    /// Times at which workers that refused may be asked again.
    retry_at: BTreeSet<(Time, WorkerId)>,
    /// Version of the fleet after which waiting flights were last tried.
    fleet_version: u64,
}

impl Default for QueuePasses {
    fn default() -> Self {
        Self {
            served_at: Time::ZERO,
            due_at: None,
            retry_at: BTreeSet::new(),
            fleet_version: 0,
        }
    }
}

impl QueuePasses {
    pub(crate) fn deadline(&self) -> Option<Time> {
        let retry_at = self.retry_at.first().map(|(at, _)| *at);
        retry_at.into_iter().chain(self.due_at).min()
    }

    /// Asks for a pass after news of room or time. Returns whether it is to be made now; otherwise
    /// it is due at the end of the interval.
    pub(crate) fn ask(&mut self, now: Time, queue_is_empty: bool) -> bool {
        let at = self.served_at + QUEUE_SERVICE_INTERVAL;
        let pass_now = !queue_is_empty && now >= at;
        if pass_now {
            self.served_at = now;
        }
        self.due_at = (!queue_is_empty && !pass_now).then_some(at);
        pass_now
    }

    pub(crate) fn is_due(&self, now: Time) -> bool {
        self.due_at.is_some_and(|at| at <= now)
    }

    /// Remembers that a worker that refused may be asked again then.
    pub(crate) fn retry(&mut self, worker: WorkerId, at: Time) {
        self.retry_at.insert((at, worker));
    }

    /// Removes the retries that are due. Returns whether there were any.
    pub(crate) fn take_retries(&mut self, now: Time) -> bool {
        let before = self.retry_at.len();
        self.retry_at.retain(|(at, _)| *at > now);
        self.retry_at.len() < before
    }

    /// Records the fleet's version. Returns whether it changed: then any waiting flight may find a
    /// place.
    pub(crate) fn fleet_changed(&mut self, version: u64) -> bool {
        std::mem::replace(&mut self.fleet_version, version) != version
    }

    // === for the fingerprint ===

    pub(crate) fn retries(&self) -> &BTreeSet<(Time, WorkerId)> {
        &self.retry_at
    }

    /// The pass that is due, and the one before it.
    pub(crate) fn due(&self) -> Option<(Time, Time)> {
        self.due_at.map(|due_at| (due_at, self.served_at))
    }

    pub(crate) fn check(&self) {
        if let Some(due_at) = self.due_at {
            assert_eq!(
                due_at,
                self.served_at + QUEUE_SERVICE_INTERVAL,
                "a pass is due at another time than an interval after the last"
            );
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn at(micros: u64) -> Time {
        Time::ZERO + Duration::from_micros(micros)
    }

    #[test]
    fn passes_after_news_are_an_interval_apart() {
        let mut passes = QueuePasses::default();
        assert!(passes.ask(at(5000), false), "the first one is made at once");
        assert!(!passes.ask(at(5001), false) && !passes.ask(at(6999), false));
        assert_eq!(passes.deadline(), Some(at(7000)));
        passes.check();
        assert!(!passes.is_due(at(6999)) && passes.is_due(at(7000)));
        assert!(passes.ask(at(7000), false));
        assert_eq!(passes.deadline(), None);
    }

    #[test]
    fn no_pass_is_due_over_an_empty_queue() {
        let mut passes = QueuePasses::default();
        assert!(passes.ask(at(5000), false) && !passes.ask(at(5001), false));
        assert!(!passes.ask(at(5002), true));
        assert_eq!(passes.deadline(), None);
    }

    #[test]
    fn retries_that_are_due_are_taken_together() {
        let mut passes = QueuePasses::default();
        passes.retry(WorkerId(2), at(20));
        passes.retry(WorkerId(1), at(10));
        passes.retry(WorkerId(3), at(30));
        assert_eq!(passes.deadline(), Some(at(10)));
        assert!(!passes.take_retries(at(9)));
        assert!(passes.take_retries(at(20)));
        assert!(!passes.take_retries(at(20)));
        assert_eq!(passes.deadline(), Some(at(30)));
    }
}
