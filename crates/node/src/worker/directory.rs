//! Which peers the routers have named, and which routers stand by each.
//!
//! Never: compares lives; a peer is known for as long as one router says so.

use cleave_domain::{RouterId, WorkerId, WorkerRef};
use std::collections::{BTreeMap, BTreeSet};

/// Lives of other workers, by what the connected routers said last.
#[derive(Debug, Default)]
pub(crate) struct Directory {
    named: BTreeMap<WorkerRef, BTreeSet<RouterId>>,
}

impl Directory {
    /// A router says that this life is there.
    pub(crate) fn name(&mut self, peer: WorkerRef, router: RouterId) {
        self.named.entry(peer).or_default().insert(router);
    }

    /// A router says that it is over. Gives it back if nobody says otherwise.
    pub(crate) fn strike(&mut self, peer: WorkerRef, router: RouterId) -> Vec<WorkerRef> {
        self.strike_where(router, |named| named == peer)
    }

    /// A router is gone. Gives the peers that only it had named.
    pub(crate) fn strike_all(&mut self, router: RouterId) -> Vec<WorkerRef> {
        self.strike_where(router, |_| true)
    }

    /// Whether any life of the worker is known.
    pub(crate) fn has(&self, worker: WorkerId) -> bool {
        self.named.keys().any(|peer| peer.worker == worker)
    }

    fn strike_where(
        &mut self,
        router: RouterId,
        which: impl Fn(WorkerRef) -> bool,
    ) -> Vec<WorkerRef> {
        let mut gone = Vec::new();
        self.named.retain(|peer, routers| {
            let struck = which(*peer) && routers.remove(&router);
            if struck && routers.is_empty() {
                gone.push(*peer);
            }
            !routers.is_empty()
        });
        gone
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use cleave_domain::Incarnation;

    fn life(worker: u64, incarnation: u64) -> WorkerRef {
        WorkerRef {
            worker: WorkerId(worker),
            incarnation: Incarnation(incarnation),
        }
    }

    #[test]
    fn lesson_15_a_peer_is_known_while_one_router_stands_by_it() {
        let (first, second) = (RouterId(1), RouterId(2));
        let mut directory = Directory::default();
        directory.name(life(7, 9), first);
        directory.name(life(7, 9), second);
        directory.name(life(7, 3), first);
        assert_eq!(directory.strike(life(7, 9), first), []);
        assert_eq!(directory.strike(life(7, 9), first), []);
        assert_eq!(directory.strike_all(first), [life(7, 3)]);
        assert!(directory.has(WorkerId(7)));
        assert_eq!(directory.strike(life(7, 9), second), [life(7, 9)]);
        assert!(!directory.has(WorkerId(7)));
    }
}
