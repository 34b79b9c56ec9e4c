//! The routes to the peers that routers have named to a worker.
//!
//! Owns: the routes, and the wait for one. Never: dials.
//! Invariant: a peer is known from the moment its route is set until the route is removed.

use crate::address::PeerRoute;
use cleave_domain::WorkerRef;
use parking_lot::{Mutex, MutexGuard};
use std::collections::BTreeMap;
use std::time::Duration;
use tokio::sync::Notify;
use tokio::time::timeout;

/// The routes of one worker.
#[derive(Debug, Default)]
pub(crate) struct PeerRoutes {
    routes: Mutex<BTreeMap<WorkerRef, PeerRoute>>,
    /// Notified when a route is added.
    added: Notify,
}

impl PeerRoutes {
    pub(crate) fn set(&self, peer: WorkerRef, route: PeerRoute) {
        self.lock().insert(peer, route);
        self.added.notify_waiters();
    }

    pub(crate) fn remove(&self, peer: WorkerRef) {
        self.lock().remove(&peer);
    }

    pub(crate) fn get(&self, peer: WorkerRef) -> Option<PeerRoute> {
        self.lock().get(&peer).cloned()
    }

    /// Whether a router has named a peer to this worker.
    pub(crate) fn is_known(&self, peer: WorkerRef) -> bool {
        self.lock().contains_key(&peer)
    }

    /// Waits until a router names a peer that connected before the worker knew it.
    pub(crate) async fn wait_until_known(&self, peer: WorkerRef, within: Duration) -> bool {
        let named = async {
            loop {
                let learned = self.added.notified();
                if self.is_known(peer) {
                    return;
                }
                learned.await;
            }
        };
        timeout(within, named).await.is_ok()
    }

    fn lock(&self) -> MutexGuard<'_, BTreeMap<WorkerRef, PeerRoute>> {
        self.routes.lock()
    }
}
