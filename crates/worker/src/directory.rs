//! The peers that the routers have named, and which routers vouch for each.
//!
//! Never compares incarnations; a peer is known for as long as one router names it.

use cleave_domain::{RouterId, WorkerId, WorkerRef};
use std::collections::{BTreeMap, BTreeSet};

/// Incarnations of other workers, as the connected routers last reported them.
#[derive(Debug, Default)]
pub(crate) struct PeerDirectory {
    named: BTreeMap<WorkerRef, BTreeSet<RouterId>>,
}

impl PeerDirectory {
    /// A router reports that this incarnation is connected.
    pub(crate) fn add(&mut self, peer: WorkerRef, router: RouterId) {
        self.named.entry(peer).or_default().insert(router);
    }

    /// A router reports that it is gone. Gives it back if no other router names it.
    pub(crate) fn remove(&mut self, peer: WorkerRef, router: RouterId) -> Vec<WorkerRef> {
        self.remove_where(router, |named| named == peer)
    }

    /// A router is gone. Gives the peers that only this router had named.
    pub(crate) fn remove_router(&mut self, router: RouterId) -> Vec<WorkerRef> {
        self.remove_where(router, |_| true)
    }

    /// Whether any incarnation of the worker is known.
    pub(crate) fn knows(&self, worker: WorkerId) -> bool {
        self.named.keys().any(|peer| peer.worker == worker)
    }

    fn remove_where(
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

    // Lesson: 15.
    #[test]
    fn a_peer_is_known_while_any_router_names_it() {
        let (first, second) = (RouterId(1), RouterId(2));
        let mut directory = PeerDirectory::default();
        directory.add(life(7, 9), first);
        directory.add(life(7, 9), second);
        directory.add(life(7, 3), first);
        assert_eq!(directory.remove(life(7, 9), first), []);
        assert_eq!(directory.remove(life(7, 9), first), []);
        assert_eq!(directory.remove_router(first), [life(7, 3)]);
        assert!(directory.knows(WorkerId(7)));
        assert_eq!(directory.remove(life(7, 9), second), [life(7, 9)]);
        assert!(!directory.knows(WorkerId(7)));
    }
}
