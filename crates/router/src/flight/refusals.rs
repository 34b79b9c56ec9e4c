//! The workers that did not take a flight.
//!
//! Owns: the workers not to be asked in this round, those that refused the flight as late, and the
//! last reason. Never: chooses another worker, or decides that the flight ends.
//! Invariant: a round counts every worker that refused in it, the late ones in every round until
//! the flight waits.

use crate::placement::forecast::TargetMiss;
use cleave_domain::{Refusal, WorkerId};
use std::collections::BTreeSet;

/// Workers tried in one round before a flight waits for news.
const ROUND_WORKERS: u32 = 3;

#[derive(Clone, Debug, Default)]
pub(crate) struct WorkerRefusals {
    /// Workers that refused since the flight last had a reservation.
    count: u32,
    /// The last refusal with a reason.
    last: Option<Refusal>,
    /// Workers not to be asked in this round: they refused, or failed the flight.
    excluded: BTreeSet<WorkerId>,
    /// Workers that refused it as too late since it last waited.
    late: BTreeSet<WorkerId>,
}

impl WorkerRefusals {
    pub(crate) fn count(&self) -> u32 {
        self.count
    }

    pub(crate) fn last(&self) -> Option<&Refusal> {
        self.last.as_ref()
    }

    pub(crate) fn excluded(&self) -> &BTreeSet<WorkerId> {
        &self.excluded
    }

    pub(crate) fn late(&self) -> &BTreeSet<WorkerId> {
        &self.late
    }

    /// Whether so many workers refused that the flight waits for news instead of trying every
    /// worker of a large fleet.
    pub(crate) fn is_round_over(&self) -> bool {
        self.count >= ROUND_WORKERS
    }

    /// Records that a worker does not take the flight; none is the refusal of a worker that gave no
    /// answer.
    pub(crate) fn refuse(&mut self, worker: WorkerId, refusal: Option<Refusal>) {
        if let Some(Refusal::Late { .. }) = refusal {
            self.late.insert(worker);
        }
        // One worker's draining, or a routing mistake, replaces no answer of another worker.
        let is_answer = !matches!(
            refusal,
            Some(Refusal::Draining | Refusal::WrongWorker | Refusal::NoAdapter { .. })
        );
        if is_answer || self.last.is_none() {
            self.last = refusal.or(self.last.take());
        }
        self.count += 1;
        self.excluded.insert(worker);
    }

    /// Excludes workers that failed the flight.
    pub(crate) fn exclude(&mut self, workers: impl IntoIterator<Item = WorkerId>) {
        self.excluded.extend(workers);
    }

    /// Allows excluded workers again, except those for which `keep` holds.
    pub(crate) fn reconsider(&mut self, keep: impl Fn(WorkerId) -> bool) {
        self.excluded.retain(|worker| keep(*worker));
    }

    /// A worker took the flight, and the next round begins. Workers that refused it as late stay
    /// excluded, or they would be asked again and again.
    pub(crate) fn accept(&mut self) {
        self.count = self.late.len() as u32;
        self.excluded.clone_from(&self.late);
    }

    /// The flight waits: any worker may be asked after it, but the excluded ones stay excluded.
    pub(crate) fn wait(&mut self) {
        self.count = 0;
        self.late.clear();
    }

    /// Forgets the last reason: the fleet is full, whatever a worker answered before.
    pub(crate) fn forget_reason(&mut self) {
        self.last = None;
    }

    pub(crate) fn check(&self) {
        assert!(
            self.late.len() <= self.count as usize,
            "a worker refused as late and was not counted"
        );
    }
}

/// The miss of a target that a worker predicted in its refusal.
pub(crate) fn refused_late(refusal: Option<&Refusal>) -> Option<TargetMiss> {
    match refusal {
        Some(Refusal::Late {
            aim,
            predicted,
            retry_after,
        }) => Some(TargetMiss {
            aim: *aim,
            predicted: *predicted,
            met_after: Some(*retry_after),
        }),
        _ => None,
    }
}

/// Whether any other worker would repeat the refusal.
pub(crate) fn is_final(refusal: &Refusal) -> bool {
    match refusal {
        Refusal::TooLong { .. } | Refusal::OutOfVocabulary { .. } => true,
        Refusal::QueueFull { .. }
        | Refusal::NoBlocks { .. }
        | Refusal::NoWorker
        | Refusal::Late { .. }
        | Refusal::Draining
        | Refusal::WrongWorker
        | Refusal::NoAdapter { .. } => false,
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use cleave_domain::SloMetric;
    use std::time::Duration;

    const SECOND: Duration = Duration::from_secs(1);

    fn late() -> Refusal {
        Refusal::Late {
            aim: SloMetric::Ttft,
            predicted: SECOND,
            retry_after: SECOND,
        }
    }

    fn excluded(refusals: &WorkerRefusals) -> Vec<u64> {
        refusals.excluded().iter().map(|worker| worker.0).collect()
    }

    #[test]
    fn a_round_ends_after_three_workers() {
        let mut refusals = WorkerRefusals::default();
        for number in 1..=3 {
            assert!(!refusals.is_round_over());
            refusals.refuse(WorkerId(number), None);
        }
        assert!(refusals.is_round_over());
        assert_eq!(excluded(&refusals), [1, 2, 3]);
        refusals.accept();
        assert!(!refusals.is_round_over());
        assert!(refusals.excluded().is_empty());
    }

    #[test]
    fn late_workers_stay_excluded_until_the_flight_waits() {
        let mut refusals = WorkerRefusals::default();
        refusals.refuse(WorkerId(1), Some(late()));
        refusals.refuse(WorkerId(2), None);
        refusals.accept();
        refusals.check();
        assert_eq!((excluded(&refusals), refusals.count()), (vec![1], 1));
        refusals.wait();
        refusals.check();
        assert_eq!((excluded(&refusals), refusals.count()), (vec![1], 0));
        refusals.accept();
        assert!(refusals.excluded().is_empty());
    }

    #[test]
    fn an_answer_is_replaced_by_answers_only() {
        let mut refusals = WorkerRefusals::default();
        let full = Refusal::QueueFull {
            retry_after: SECOND,
        };
        for (refusal, last) in [
            (Some(Refusal::Draining), Some(Refusal::Draining)),
            (Some(full.clone()), Some(full.clone())),
            (Some(Refusal::WrongWorker), Some(full.clone())),
            (None, Some(full)),
            (Some(late()), Some(late())),
        ] {
            refusals.refuse(WorkerId(1), refusal);
            assert_eq!(refusals.last(), last.as_ref());
        }
        refusals.forget_reason();
        assert_eq!(refusals.last(), None);
    }

    #[test]
    fn failed_workers_are_allowed_again_one_by_one() {
        let mut refusals = WorkerRefusals::default();
        refusals.exclude([WorkerId(4), WorkerId(5)]);
        assert_eq!((excluded(&refusals), refusals.count()), (vec![4, 5], 0));
        refusals.reconsider(|worker| worker == WorkerId(5));
        assert_eq!(excluded(&refusals), [5]);
        refusals.reconsider(|_| false);
        assert!(refusals.excluded().is_empty());
    }
}
