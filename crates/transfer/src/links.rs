//! All links of one worker: outgoing links dialled on demand, and incoming links accepted.
//!
//! Owns: the table of outgoing links, and the tasks that carry and accept links. Never: reads or
//! verifies a payload.
//!
//! Each incarnation of a peer is a peer of its own. The routers know which incarnations exist; this
//! module does not compare them.
//! Invariant: at most one outgoing link per incarnation; a link that ends is reported lost once,
//! and its next use dials anew; nothing is kept of an incarnation that was forgotten.

use crate::address::PeerRoute;
use crate::config::{LinkDown, LinkEvent, LinksConfig};
use crate::dial_backoff::DialBackoff;
use crate::incoming_links::{IncomingLinks, report_lost};
use crate::link::Link;
use crate::listeners::Listeners;
use crate::outgoing::OutboundLink;
use crate::peer_routes::PeerRoutes;
use crate::pools::{PoolAccess, PoolAccessList};
use crate::transports::Transport;
use crate::transports::local::{LocalAttachment, LocalEndpoint, LocalNet};
use cleave_domain::WorkerRef;
use parking_lot::{Mutex, MutexGuard};
use std::collections::BTreeMap;
use std::sync::Arc;
use tokio::sync::{Semaphore, mpsc};
use tokio::task::JoinSet;
use tracing::{debug, warn};

/// Limit of incoming connections that have not identified themselves; more wait in the kernel.
const UNIDENTIFIED_MAX: usize = 64;

/// A worker's links. Clones share one set of links; dropping the last clone ends the outgoing
/// links.
#[derive(Clone, Debug)]
pub struct Links {
    shared: Arc<LinksState>,
}

#[derive(Debug)]
struct LinksState {
    config: LinksConfig,
    pool_access: Arc<PoolAccessList>,
    events: mpsc::Sender<LinkEvent>,
    net: LocalNet,
    routes: Arc<PeerRoutes>,
    /// Locked before the routes, so that no link is made to a peer that is being forgotten.
    outgoing: Mutex<BTreeMap<WorkerRef, Arc<Link>>>,
    incoming: Arc<IncomingLinks>,
    dial_backoff: Arc<DialBackoff>,
}

/// Whether a router has named a peer to this worker.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum PeerKnown {
    Yes,
    No,
}

impl Links {
    /// Creates the set without any link. Link events go to `events`; workers on the same `net` can
    /// be reached by [`PeerRoute::Local`].
    pub fn new(config: LinksConfig, events: mpsc::Sender<LinkEvent>, net: LocalNet) -> Self {
        let pool_access = PoolAccessList::new(config.pools.clone());
        let routes = Arc::<PeerRoutes>::default();
        let incoming = IncomingLinks::new(
            config.clone(),
            events.clone(),
            Arc::clone(&routes),
            Arc::clone(&pool_access),
        );
        let shared = LinksState {
            pool_access,
            config,
            events,
            net,
            routes,
            outgoing: Mutex::default(),
            incoming,
            dial_backoff: Arc::default(),
        };
        shared.net.add(shared.local_endpoint());
        Self {
            shared: Arc::new(shared),
        }
    }

    /// Sets the route to a peer, and dials it at once, so that the link is measured before the
    /// first block.
    pub fn add_peer(&self, peer: WorkerRef, route: PeerRoute) {
        self.shared.routes.set(peer, route);
        if let Err(down) = self.link(peer) {
            debug!(%peer, %down, "peer not dialled");
        }
    }

    /// Forgets a peer whose incarnation has ended or that no router names any more. Messages
    /// already queued are still sent if possible; the end of that link is not reported.
    pub fn remove_peer(&self, peer: WorkerRef) {
        let mut outgoing = self.shared.lock();
        self.shared.routes.remove(peer);
        outgoing.remove(&peer);
        self.shared.dial_backoff.forget(peer);
    }

    /// Whether this incarnation of a peer can write into this worker's pool. A peer that is known
    /// to be on another host never gets access.
    pub fn pool_access(&self, peer: WorkerRef) -> PoolAccess {
        let is_on_other_host = match self.shared.routes.get(peer) {
            Some(PeerRoute::Remote(addresses)) => {
                let mut transports = Transport::ALL.into_iter();
                !transports.any(|transport| transport.implementation().can_share_pool(&addresses))
            }
            Some(PeerRoute::Local) | None => false,
        };
        if is_on_other_host {
            self.shared.pool_access.deny(peer)
        } else {
            self.shared.pool_access.access_of(peer)
        }
    }

    /// Denies the pool to this incarnation of a peer, unless it was granted before. Returns its
    /// access from now on.
    pub fn deny_pool(&self, peer: WorkerRef) -> PoolAccess {
        self.shared.pool_access.deny(peer)
    }

    /// The link to a peer, dialled now if there is none. Messages wait until the link is
    /// established; if it cannot be, `LinkEvent::Lost` follows.
    ///
    /// # Errors
    /// `NoRoute` if no router named the peer, or the peer was forgotten.
    pub fn link(&self, peer: WorkerRef) -> Result<Arc<Link>, LinkDown> {
        let mut outgoing = self.shared.lock();
        let Some(route) = self.shared.routes.get(peer) else {
            return Err(LinkDown::NoRoute(peer));
        };
        if let Some(link) = outgoing.get(&peer)
            && !link.is_broken()
        {
            return Ok(Arc::clone(link));
        }
        let (link, carrier) = Link::new(peer, self.shared.config.grants.clone());
        outgoing.insert(peer, Arc::clone(&link));
        drop(outgoing);
        let shared = Arc::downgrade(&self.shared);
        // The task holds no `Links`, so that dropping them closes the queue and ends the task.
        let config = self.shared.config.clone();
        let local = LocalAttachment {
            endpoint: self.shared.local_endpoint(),
            net: self.shared.net.clone(),
        };
        let events = self.shared.events.clone();
        let dial_backoff = Arc::clone(&self.shared.dial_backoff);
        tokio::spawn(async move {
            let outbound = OutboundLink {
                config: &config,
                peer,
                events: &events,
                dial_backoff: &dial_backoff,
                local: &local,
            };
            let error = outbound.carry(&route, carrier).await;
            let forgotten = match shared.upgrade() {
                Some(shared) => shared.end_outgoing(peer) == PeerKnown::No,
                None => true,
            };
            if forgotten {
                // A failure that was recorded after the peer was forgotten is removed, too.
                dial_backoff.forget(peer)
            } else {
                report_lost(&events, peer, &error, "outgoing").await
            }
        });
        Ok(link)
    }

    /// Accepts links while it is polled. Dropping it ends the incoming links.
    pub async fn serve(self, mut listeners: Listeners) {
        let unidentified = Arc::new(Semaphore::new(UNIDENTIFIED_MAX));
        let mut accept_tasks = JoinSet::new();
        loop {
            while accept_tasks.try_join_next().is_some() {}
            let permit = Arc::clone(&unidentified).acquire_owned().await;
            let permit = permit.expect("the semaphore is never closed");
            match listeners.accept().await {
                Ok(connection) => {
                    let incoming = Arc::clone(&self.shared.incoming);
                    accept_tasks.spawn(connection.serve(incoming, permit));
                }
                // No descriptor was free, or the peer has disconnected: neither is a reason to
                // stop.
                Err(error) => {
                    warn!(%error, "cannot accept a data link");
                    tokio::time::sleep(self.shared.config.beat).await;
                }
            }
        }
    }
}

impl LinksState {
    fn local_endpoint(&self) -> LocalEndpoint {
        LocalEndpoint {
            me: self.config.me,
            fingerprint: self.config.fingerprint.clone(),
            window: self.config.window(),
            frame_bytes: self.config.frame_bytes(),
            pool_access: Arc::clone(&self.pool_access),
            events: self.events.clone(),
        }
    }

    fn lock(&self) -> MutexGuard<'_, BTreeMap<WorkerRef, Arc<Link>>> {
        self.outgoing.lock()
    }

    /// Removes a link that has ended; a new one may already be in its place.
    fn end_outgoing(&self, peer: WorkerRef) -> PeerKnown {
        let mut outgoing = self.lock();
        if outgoing.get(&peer).is_some_and(|link| link.is_broken()) {
            outgoing.remove(&peer);
        }
        if self.routes.is_known(peer) {
            PeerKnown::Yes
        } else {
            PeerKnown::No
        }
    }
}

impl Drop for LinksState {
    fn drop(&mut self) {
        self.net.remove(self.config.me);
    }
}
