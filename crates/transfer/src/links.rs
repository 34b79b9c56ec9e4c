//! All links of one worker: the routes to peers, outgoing links dialled on demand, and incoming
//! links accepted.
//!
//! Owns: the table of routes and links, and the tasks that carry links. Never: reads or verifies a
//! payload.
//!
//! Each incarnation of a peer is a peer of its own. The routers know which incarnations exist; this
//! module does not compare them.
//! Invariant: at most one outgoing and one incoming link per incarnation; a link that ends is
//! reported lost once, and its next use dials anew; nothing is kept of an incarnation that was
//! forgotten.

use crate::address::PeerRoute;
use crate::config::{LinkDown, LinkEvent, LinksConfig};
use crate::dial_backoff::DialBackoff;
use crate::incoming::{self, AcceptPolicy, IdentifiedPeer, JoinRequest, ReceiveSession};
use crate::link::Link;
use crate::outgoing::OutboundLink;
use crate::pools::{PoolAccess, PoolAccessList};
use crate::socket::{LinkError, write_message};
use crate::transports::Transport;
use crate::transports::cuda_ipc::PeerProcess;
use crate::transports::local::{self, LocalEndpoint, LocalNet};
use crate::transports::nixl;
use crate::transports::shm::{self, HostListener, HostStream, PoolGate};
use crate::transports::tcp::{TcpLinkStream, TcpReader, TcpWriter};
use crate::wire::LinkMessage;
use cleave_domain::WorkerRef;
use parking_lot::{Mutex, MutexGuard};
use std::collections::{BTreeMap, BTreeSet};
use std::io;
use std::sync::Arc;
use tokio::net::{TcpListener, TcpStream};
use tokio::sync::{Notify, OwnedSemaphorePermit, Semaphore, mpsc};
use tokio::task::JoinSet;
use tokio::time::timeout;
use tracing::{debug, info, warn};

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
    table: Mutex<LinkTable>,
    /// Notified when a route is added.
    route_added: Notify,
    dial_backoff: Arc<DialBackoff>,
    /// One permit for each ring that peers may write to over NIXL.
    ring_permits: Arc<Semaphore>,
}

/// The listeners of a worker for other processes.
#[derive(Debug, Default)]
pub struct Listeners {
    /// The TCP listener; the caller knows the address at which peers reach it.
    pub tcp: Option<TcpListener>,
    /// The listener for processes of the same host.
    pub host: Option<HostListener>,
}

#[derive(Debug, Default)]
struct LinkTable {
    routes: BTreeMap<WorkerRef, PeerRoute>,
    outgoing: BTreeMap<WorkerRef, Arc<Link>>,
    incoming: BTreeMap<WorkerRef, IncomingLink>,
    /// One lock per incarnation: one task at a time receives from it, and of the tasks that wait
    /// only the newest continues.
    receive_locks: BTreeMap<WorkerRef, ReceiveLock>,
    /// The last turn of each incarnation that has a lock; its number identifies the link.
    newest_turns: BTreeMap<WorkerRef, u64>,
    turns_count: u64,
    /// Incarnations that were granted the pool and whose processes have not ended.
    watched_processes: BTreeSet<WorkerRef>,
}

/// An incoming link that is being received.
#[derive(Debug)]
struct IncomingLink {
    key: u64,
    further_streams: mpsc::Sender<TcpLinkStream>,
    replaced: Arc<Notify>,
}

/// Held by the task that receives.
type ReceiveLock = Arc<tokio::sync::Mutex<()>>;

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
        let shared = LinksState {
            pool_access: PoolAccessList::new(config.pools.clone()),
            ring_permits: Arc::new(Semaphore::new(config.rings_max)),
            config,
            events,
            net,
            table: Mutex::default(),
            route_added: Notify::new(),
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
        self.shared.lock().routes.insert(peer, route);
        self.shared.route_added.notify_waiters();
        if let Err(down) = self.link(peer) {
            debug!(%peer, %down, "peer not dialled");
        }
    }

    /// Forgets a peer whose incarnation has ended or that no router names any more. Messages
    /// already queued are still sent if possible; the end of that link is not reported.
    pub fn remove_peer(&self, peer: WorkerRef) {
        let mut table = self.shared.lock();
        table.routes.remove(&peer);
        table.outgoing.remove(&peer);
        self.shared.dial_backoff.clear(peer);
    }

    /// Whether this incarnation of a peer can write into this worker's pool. A peer that is known
    /// to be on another host never gets access.
    pub fn pool_access(&self, peer: WorkerRef) -> PoolAccess {
        let table = self.shared.lock();
        let is_on_other_host = match table.routes.get(&peer) {
            Some(PeerRoute::Remote(addresses)) => {
                let host_address = addresses.shared_memory.as_ref();
                !host_address.is_some_and(shm::is_this_host)
            }
            Some(PeerRoute::Local) | None => false,
        };
        drop(table);
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
        let mut table = self.shared.lock();
        let Some(route) = table.routes.get(&peer).cloned() else {
            return Err(LinkDown::NoRoute(peer));
        };
        if let Some(link) = table.outgoing.get(&peer)
            && !link.is_broken()
        {
            return Ok(Arc::clone(link));
        }
        let (link, carrier) = Link::new(peer, self.shared.config.grants.clone());
        table.outgoing.insert(peer, Arc::clone(&link));
        drop(table);
        let shared = Arc::downgrade(&self.shared);
        // The task holds no `Links`, so that dropping them closes the queue and ends the task.
        let config = self.shared.config.clone();
        let (end, net) = (self.shared.local_endpoint(), self.shared.net.clone());
        let dial_backoff = Arc::clone(&self.shared.dial_backoff);
        tokio::spawn(async move {
            let outbound = OutboundLink {
                config: &config,
                peer,
                events: &end.events,
                dial_backoff: &dial_backoff,
            };
            let error = match &route {
                PeerRoute::Local => local::carry(&net, &end, peer, carrier).await,
                PeerRoute::Remote(addresses) => outbound.carry(addresses, carrier).await,
            };
            let forgotten = match shared.upgrade() {
                Some(shared) => shared.lock().end_outgoing(peer) == PeerKnown::No,
                None => true,
            };
            if forgotten {
                // A failure that was recorded after the peer was forgotten is removed, too.
                dial_backoff.clear(peer)
            } else {
                report_lost(&end.events, peer, &error, "outgoing").await
            }
        });
        Ok(link)
    }

    /// Accepts links while it is polled. Dropping it ends the incoming links.
    pub async fn serve(self, listeners: Listeners) {
        let Listeners { tcp, host } = listeners;
        let unidentified = Arc::new(Semaphore::new(UNIDENTIFIED_MAX));
        let mut accept_tasks = JoinSet::new();
        loop {
            while accept_tasks.try_join_next().is_some() {}
            let permit = Arc::clone(&unidentified).acquire_owned().await;
            let permit = permit.expect("the semaphore is never closed");
            let shared = Arc::clone(&self.shared);
            let accepted = tokio::select! {
                accepted = accept_tcp(tcp.as_ref()) => accepted.map(|stream| {
                    accept_tasks.spawn(shared.accept_tcp_link(stream, permit));
                }),
                accepted = accept_host(host.as_ref()) => accepted.map(|stream| {
                    accept_tasks.spawn(shared.accept_host_link(stream, permit));
                }),
            };
            // No descriptor was free, or the peer has disconnected: neither is a reason to stop.
            if let Err(error) = accepted {
                warn!(%error, "cannot accept a data link");
                tokio::time::sleep(self.shared.config.beat).await;
            }
        }
    }
}

async fn accept_tcp(listener: Option<&TcpListener>) -> io::Result<TcpStream> {
    match listener {
        Some(listener) => Ok(listener.accept().await?.0),
        None => std::future::pending().await,
    }
}

async fn accept_host(listener: Option<&HostListener>) -> io::Result<HostStream> {
    match listener {
        Some(listener) => listener.accept().await,
        None => std::future::pending().await,
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

    fn lock(&self) -> MutexGuard<'_, LinkTable> {
        self.table.lock()
    }

    /// Whether a router has named a peer to this worker.
    fn is_known(&self, peer: WorkerRef) -> bool {
        self.lock().routes.contains_key(&peer)
    }

    /// Waits until a router names a peer that connected before the worker knew it.
    async fn wait_until_known(&self, peer: WorkerRef) -> bool {
        let named = async {
            loop {
                let learned = self.route_added.notified();
                if self.is_known(peer) {
                    return;
                }
                learned.await;
            }
        };
        let within = self.config.unknown_peer_timeout();
        timeout(within, named).await.is_ok()
    }

    async fn accept_tcp_link(
        self: Arc<Self>,
        stream: TcpStream,
        unidentified_permit: OwnedSemaphorePermit,
    ) {
        let policy = AcceptPolicy {
            config: &self.config,
            // A peer with a certificate of the fleet may learn the configuration of the fleet.
            is_known: &|peer| self.config.peer_tls.is_some() || self.is_known(peer),
        };
        let request = incoming::identify(policy, stream).await;
        let refused = match request {
            Ok(JoinRequest::Link(identified))
                if !self.config.transports.contains(&Transport::Tcp) =>
            {
                identified
                    .reject("this worker takes no links over TCP")
                    .await
            }
            Ok(JoinRequest::Link(identified)) => {
                drop(unidentified_permit);
                let config = self.config.clone();
                let events = self.events.clone();
                let peer = identified.peer;
                let receive = async move |session| {
                    incoming::receive(identified, session, &config, &events).await
                };
                return self.receive_in_turn(peer, receive).await;
            }
            Ok(JoinRequest::RdmaLink(identified)) => {
                return self.accept_rdma_link(identified, unidentified_permit).await;
            }
            Ok(JoinRequest::FurtherStream { from, key, stream }) => {
                drop(unidentified_permit);
                self.join_stream(from, key, stream).await
            }
            Err(error) => Err(error),
        };
        if let Err(error) = refused {
            warn!(%error, "data link refused");
        }
    }

    /// Creates a ring for a peer that asks for one, if a router has named the peer: a ring keeps
    /// its memory for as long as the link.
    async fn accept_rdma_link(
        self: Arc<Self>,
        mut identified: IdentifiedPeer<TcpReader, TcpWriter>,
        unidentified_permit: OwnedSemaphorePermit,
    ) {
        let peer = identified.peer;
        let nixl = match self.config.nixl() {
            None => Err("this worker takes no links over NIXL"),
            Some(_) if !self.wait_until_known(peer).await => {
                Err("no router has named this peer to the worker")
            }
            Some(nixl) => Ok(Arc::clone(nixl)),
        };
        drop(unidentified_permit);
        let nixl = match nixl {
            Ok(nixl) => nixl,
            Err(reason) => {
                let refusal = LinkMessage::NoRing(reason.to_owned());
                let reply = write_message(&mut identified.stream.writer, &refusal, &[]).await;
                return warn!(%peer, reason, told = ?reply, "refused to create a ring for a NIXL link");
            }
        };
        let own = Arc::clone(&self);
        let receive = async move |session| {
            let setup = nixl::RdmaSetup {
                config: &own.config,
                nixl: &nixl,
                ring_permits: &own.ring_permits,
            };
            nixl::receive(identified, session, setup, &own.events).await
        };
        self.receive_in_turn(peer, receive).await;
    }

    async fn accept_host_link(
        self: Arc<Self>,
        stream: HostStream,
        unidentified_permit: OwnedSemaphorePermit,
    ) {
        let identified = shm::identify(&self.config, stream).await;
        drop(unidentified_permit);
        match identified {
            Ok(identified) => {
                let peer = identified.peer;
                let own = Arc::clone(&self);
                let receive = async move |session| {
                    let gate = PoolGate {
                        events: &own.events,
                        grant_pool: &|peer, process| own.grant_pool(peer, process),
                    };
                    shm::receive(identified, session, &own.config, gate).await
                };
                self.receive_in_turn(peer, receive).await;
            }
            Err(error) => warn!(%error, "data link refused"),
        }
    }

    /// Grants the pool to a peer of this host, which can use it until its process has ended.
    fn grant_pool(
        self: &Arc<Self>,
        peer: WorkerRef,
        process: PeerProcess,
    ) -> Result<Vec<u8>, String> {
        let handle = self.pool_access.grant(peer)?;
        if self.lock().watched_processes.insert(peer) {
            let shared = Arc::downgrade(self);
            tokio::spawn(async move {
                process.wait_ended().await;
                if let Some(shared) = shared.upgrade() {
                    shared.fence(peer).await;
                }
            });
        }
        Ok(handle)
    }

    /// Fences a peer whose process has ended.
    async fn fence(&self, peer: WorkerRef) {
        // The receiving task releases its lock after the last event of the link, so that
        // `Fenced` comes after it.
        let lock = self.lock().receive_locks.get(&peer).cloned();
        if let Some(lock) = lock {
            drop(lock.lock().await);
            self.lock().end_turn(peer, lock);
        }
        self.lock().watched_processes.remove(&peer);
        if self.pool_access.fence(peer) {
            info!(%peer, "peer process has ended: the peer is fenced from the pool");
            // The receiver of events is gone only when the worker itself is closing.
            let _ = self.events.send(LinkEvent::Fenced { peer }).await;
        }
    }

    /// Adds a further stream to the link with this key.
    async fn join_stream(
        &self,
        from: WorkerRef,
        key: u64,
        stream: TcpLinkStream,
    ) -> Result<(), LinkError> {
        let mut stream = stream;
        let joining = self.lock().further_streams(from, key);
        let Some(joining) = joining else {
            let reason = LinkError::NoSuchLink.to_string();
            write_message(&mut stream.writer, &LinkMessage::Reject(reason), &[]).await?;
            return Err(LinkError::NoSuchLink);
        };
        write_message(&mut stream.writer, &LinkMessage::Joined, &[]).await?;
        let joined = joining.send(stream).await;
        joined.map_err(|_| LinkError::NoSuchLink)
    }

    /// Receives from a peer until its link ends; replaces an earlier link of the same peer.
    async fn receive_in_turn(
        self: Arc<Self>,
        peer: WorkerRef,
        receive: impl AsyncFnOnce(ReceiveSession) -> LinkError,
    ) {
        let turn = self.lock().begin_turn(peer);
        // The earlier task releases the lock only after it has reported the loss, so the loss is
        // reported before anything that arrives on this link.
        let receive_lock = turn.lock.lock().await;
        let session = self.lock().register_incoming(peer, turn.number);
        if let Some(session) = session {
            let key = session.key;
            let error = receive(session).await;
            self.lock().end_incoming(peer, key);
            report_lost(&self.events, peer, &error, "incoming").await;
        }
        drop(receive_lock);
        self.lock().end_turn(peer, turn.lock);
    }
}

/// One turn to receive from a peer.
struct ReceiveTurn {
    number: u64,
    lock: ReceiveLock,
}

impl LinkTable {
    /// Begins a turn: the current link of the peer, if any, is asked to end.
    fn begin_turn(&mut self, peer: WorkerRef) -> ReceiveTurn {
        if let Some(earlier) = self.incoming.get(&peer) {
            earlier.replaced.notify_one();
        }
        self.turns_count += 1;
        self.newest_turns.insert(peer, self.turns_count);
        ReceiveTurn {
            number: self.turns_count,
            lock: Arc::clone(self.receive_locks.entry(peer).or_default()),
        }
    }

    /// Registers the new link of the peer, unless a newer one is already waiting.
    fn register_incoming(&mut self, peer: WorkerRef, number: u64) -> Option<ReceiveSession> {
        if self.newest_turns.get(&peer) != Some(&number) {
            return None;
        }
        let key = number;
        let (joining, joined) = mpsc::channel(incoming::STREAMS_MAX);
        let replaced = Arc::new(Notify::new());
        let link = IncomingLink {
            key,
            further_streams: joining,
            replaced: Arc::clone(&replaced),
        };
        self.incoming.insert(peer, link);
        Some(ReceiveSession {
            key,
            further_streams: joined,
            replaced,
        })
    }

    /// The channel for further streams of this link.
    fn further_streams(&self, from: WorkerRef, key: u64) -> Option<mpsc::Sender<TcpLinkStream>> {
        let link = self.incoming.get(&from).filter(|link| link.key == key);
        link.map(|link| link.further_streams.clone())
    }

    fn end_incoming(&mut self, peer: WorkerRef, key: u64) {
        if let Some(current) = self.incoming.get(&peer)
            && current.key == key
        {
            self.incoming.remove(&peer);
        }
    }

    /// Removes the lock unless another task waits for it. Locks are handed out under this table's
    /// lock only, so no task can begin to wait meanwhile.
    fn end_turn(&mut self, peer: WorkerRef, lock: ReceiveLock) {
        drop(lock);
        if let Some(lock) = self.receive_locks.get(&peer)
            && Arc::strong_count(lock) == 1
        {
            self.receive_locks.remove(&peer);
            self.newest_turns.remove(&peer);
        }
    }

    /// Removes a link that has ended; a new one may already be in its place.
    fn end_outgoing(&mut self, peer: WorkerRef) -> PeerKnown {
        if self
            .outgoing
            .get(&peer)
            .is_some_and(|link| link.is_broken())
        {
            self.outgoing.remove(&peer);
        }
        if self.routes.contains_key(&peer) {
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

async fn report_lost(
    events: &mpsc::Sender<LinkEvent>,
    peer: WorkerRef,
    error: &LinkError,
    direction: &str,
) {
    info!(%peer, %error, direction, "link ended");
    let reason = error.to_string();
    // The receiver of events is gone only when the worker itself is closing.
    let _ = events.send(LinkEvent::Lost { peer, reason }).await;
}
