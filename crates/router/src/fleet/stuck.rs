//! How long flights wait for workers that make no progress.
//!
//! Owns: the deadline of each stuck worker. Never: decides that a worker is stuck; the worker
//! reports it. Invariant: a worker has at most one deadline, and none while it progresses.

use crate::fleet::RouterFleet;
use cleave_domain::{Time, WorkerId};
use std::collections::BTreeSet;

/// Deadlines after which flights leave a stuck worker in any case.
#[derive(Clone, Debug, Default)]
pub(crate) struct StuckDeadlines {
    deadlines: BTreeSet<(Time, WorkerId)>,
}

impl StuckDeadlines {
    pub(crate) fn first(&self) -> Option<Time> {
        self.deadlines.first().map(|(at, _)| *at)
    }

    /// Sets the deadline of a worker that has just become stuck.
    pub(crate) fn begin(&mut self, worker: WorkerId, at: Time) {
        self.end(worker);
        self.deadlines.insert((at, worker));
    }

    /// Forgets a worker: it progresses again, or is gone.
    pub(crate) fn end(&mut self, worker: WorkerId) {
        self.deadlines.retain(|(_, id)| *id != worker);
    }

    /// Removes and returns the first worker whose deadline has passed.
    pub(crate) fn take_due(&mut self, now: Time) -> Option<WorkerId> {
        let (at, worker) = self.deadlines.first().copied()?;
        if at > now {
            return None;
        }
        self.deadlines.remove(&(at, worker));
        Some(worker)
    }

    pub(crate) fn iter(&self) -> impl ExactSizeIterator<Item = &(Time, WorkerId)> {
        self.deadlines.iter()
    }

    pub(crate) fn check(&self, fleet: &RouterFleet) {
        let workers: BTreeSet<WorkerId> = self.deadlines.iter().map(|(_, id)| *id).collect();
        assert_eq!(
            workers.len(),
            self.deadlines.len(),
            "a stuck worker has two deadlines"
        );
        for worker in workers {
            let stuck = fleet
                .incarnation_of(worker)
                .is_some_and(|worker| fleet.is_stuck(worker));
            assert!(stuck, "{worker} has a stuck deadline and is not stuck");
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::time::Duration;

    fn at(seconds: u64) -> Time {
        Time::ZERO + Duration::from_secs(seconds)
    }

    #[test]
    fn a_worker_is_left_once_at_its_deadline() {
        let mut stuck = StuckDeadlines::default();
        stuck.begin(WorkerId(2), at(5));
        stuck.begin(WorkerId(1), at(7));
        assert_eq!(stuck.first(), Some(at(5)));
        assert_eq!(stuck.take_due(at(4)), None);
        assert_eq!(stuck.take_due(at(6)), Some(WorkerId(2)));
        assert_eq!(stuck.take_due(at(6)), None);
        stuck.end(WorkerId(1));
        assert_eq!((stuck.first(), stuck.take_due(at(9))), (None, None));
    }

    #[test]
    fn a_later_deadline_replaces_the_first() {
        let mut stuck = StuckDeadlines::default();
        stuck.begin(WorkerId(1), at(5));
        stuck.begin(WorkerId(1), at(8));
        assert_eq!(stuck.take_due(at(7)), None);
        assert_eq!(stuck.take_due(at(8)), Some(WorkerId(1)));
        assert_eq!(stuck.first(), None);
    }

    #[test]
    #[should_panic(expected = "is not stuck")]
    fn only_stuck_workers_have_a_deadline() {
        let mut stuck = StuckDeadlines::default();
        stuck.begin(WorkerId(1), at(5));
        stuck.check(&RouterFleet::default());
    }
}
