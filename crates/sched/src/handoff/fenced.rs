//! Workers that are fenced: they can write nothing here any more.
//!
//! Owns: the last fenced incarnation of each worker that was fenced lately. Never: grows without
//! limit.
//! Invariant: for a known worker, that incarnation and every earlier one is fenced. A forgotten one
//! is treated like any other worker: a lease ends the hand-off that it would never write.

use cleave_domain::{Incarnation, WorkerId, WorkerRef};
use std::collections::{BTreeMap, VecDeque};
use std::hash::{Hash, Hasher};

/// Far more than routers could still name by mistake, at some thirty bytes each.
const KEPT_MAX: usize = 1024;

/// The workers that were fenced last.
#[derive(Clone, Debug, Default)]
pub(crate) struct FencedPeers {
    incarnations: BTreeMap<WorkerId, Incarnation>,
    by_age: VecDeque<WorkerId>,
}

impl FencedPeers {
    /// Remembers one, and forgets the oldest if there are too many.
    pub(crate) fn add(&mut self, peer: WorkerRef) {
        if let Some(last) = self.incarnations.get_mut(&peer.worker) {
            *last = (*last).max(peer.incarnation);
            return;
        }
        self.incarnations.insert(peer.worker, peer.incarnation);
        self.by_age.push_back(peer.worker);
        if self.by_age.len() > KEPT_MAX
            && let Some(oldest) = self.by_age.pop_front()
        {
            self.incarnations.remove(&oldest);
        }
    }

    /// Whether this incarnation, or a later one of the same worker, was fenced.
    pub(crate) fn covers(&self, peer: WorkerRef) -> bool {
        let last = self.incarnations.get(&peer.worker);
        last.is_some_and(|last| peer.incarnation <= *last)
    }
}

impl Hash for FencedPeers {
    /// Leaves out the order, which only says which one is forgotten first, hundreds of workers
    /// later.
    fn hash<H: Hasher>(&self, hasher: &mut H) {
        self.incarnations.hash(hasher);
    }
}

#[cfg(test)]
mod tests {
    use super::{FencedPeers, KEPT_MAX};
    use cleave_domain::{Incarnation, WorkerId, WorkerRef};

    fn peer(worker: u64, incarnation: u64) -> WorkerRef {
        WorkerRef {
            worker: WorkerId(worker),
            incarnation: Incarnation(incarnation),
        }
    }

    #[test]
    fn a_fenced_incarnation_covers_earlier_ones_only() {
        let mut fenced = FencedPeers::default();
        fenced.add(peer(1, 5));
        fenced.add(peer(1, 3));
        assert!(fenced.covers(peer(1, 4)) && fenced.covers(peer(1, 5)));
        assert!(!fenced.covers(peer(1, 6)) && !fenced.covers(peer(2, 1)));
    }

    #[test]
    fn fenced_peers_are_bounded_in_number() {
        let mut fenced = FencedPeers::default();
        for worker in 0..10 * KEPT_MAX as u64 {
            fenced.add(peer(worker, 1));
            fenced.add(peer(worker, 2));
        }
        let counts = (fenced.incarnations.len(), fenced.by_age.len());
        assert_eq!(counts, (KEPT_MAX, KEPT_MAX));
        assert!(fenced.covers(peer(10 * KEPT_MAX as u64 - 1, 2)));
    }
}
