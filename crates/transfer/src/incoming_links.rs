//! The incoming links of one worker, in turns.
//!
//! Owns: the table of incoming links and of the processes that may write to the pool. Never: reads
//! a hello, or verifies a payload.
//! Invariant: at most one incoming link per incarnation; a link that ends is reported lost once,
//! before anything of its successor arrives; a peer is fenced after the last event of its links.

use crate::config::{LinkEvent, LinksConfig};
use crate::incoming::{ReceiveSession, STREAMS_MAX};
use crate::peer_routes::PeerRoutes;
use crate::pools::PoolAccessList;
use crate::socket::{LinkError, write_message};
use crate::transports::cuda_ipc::PeerProcess;
use crate::transports::tcp::TcpLinkStream;
use crate::wire::LinkMessage;
use cleave_domain::WorkerRef;
use parking_lot::{Mutex, MutexGuard};
use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;
use tokio::sync::{Notify, Semaphore, mpsc};
use tracing::{info, warn};

/// The receiving side of all transports of one worker.
#[derive(Debug)]
pub(crate) struct IncomingLinks {
    pub(crate) config: LinksConfig,
    pub(crate) events: mpsc::Sender<LinkEvent>,
    pub(crate) routes: Arc<PeerRoutes>,
    /// One permit for each ring that peers on other hosts may write to.
    pub(crate) ring_permits: Arc<Semaphore>,
    pool_access: Arc<PoolAccessList>,
    table: Mutex<IncomingTable>,
}

#[derive(Debug, Default)]
struct IncomingTable {
    links: BTreeMap<WorkerRef, IncomingLink>,
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

impl IncomingLinks {
    pub(crate) fn new(
        config: LinksConfig,
        events: mpsc::Sender<LinkEvent>,
        routes: Arc<PeerRoutes>,
        pool_access: Arc<PoolAccessList>,
    ) -> Arc<Self> {
        Arc::new(Self {
            ring_permits: Arc::new(Semaphore::new(config.rings_max)),
            config,
            events,
            routes,
            pool_access,
            table: Mutex::default(),
        })
    }

    fn lock(&self) -> MutexGuard<'_, IncomingTable> {
        self.table.lock()
    }

    /// Grants the pool to a peer of this host, which can use it until its process has ended.
    pub(crate) fn grant_pool(
        self: &Arc<Self>,
        peer: WorkerRef,
        process: PeerProcess,
    ) -> Result<Vec<u8>, String> {
        let handle = self.pool_access.grant(peer)?;
        if self.lock().watched_processes.insert(peer) {
            let links = Arc::downgrade(self);
            tokio::spawn(async move {
                process.wait_ended().await;
                if let Some(links) = links.upgrade() {
                    links.fence(peer).await;
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
    pub(crate) async fn join_stream(
        &self,
        from: WorkerRef,
        key: u64,
        mut stream: TcpLinkStream,
    ) -> Result<(), LinkError> {
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
    pub(crate) async fn receive_in_turn(
        &self,
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

impl IncomingTable {
    /// Begins a turn: the current link of the peer, if any, is asked to end.
    fn begin_turn(&mut self, peer: WorkerRef) -> ReceiveTurn {
        if let Some(earlier) = self.links.get(&peer) {
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
        let (joining, joined) = mpsc::channel(STREAMS_MAX);
        let replaced = Arc::new(Notify::new());
        let link = IncomingLink {
            key,
            further_streams: joining,
            replaced: Arc::clone(&replaced),
        };
        self.links.insert(peer, link);
        Some(ReceiveSession {
            key,
            further_streams: joined,
            replaced,
        })
    }

    /// The channel for further streams of this link.
    fn further_streams(&self, from: WorkerRef, key: u64) -> Option<mpsc::Sender<TcpLinkStream>> {
        let link = self.links.get(&from).filter(|link| link.key == key);
        link.map(|link| link.further_streams.clone())
    }

    fn end_incoming(&mut self, peer: WorkerRef, key: u64) {
        if let Some(current) = self.links.get(&peer)
            && current.key == key
        {
            self.links.remove(&peer);
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
}

/// Reports the end of a link, in the log and to the worker. A peer that closes it leaves, or has
/// died: then its router warns.
pub(crate) async fn report_lost(
    events: &mpsc::Sender<LinkEvent>,
    peer: WorkerRef,
    error: &LinkError,
    direction: &str,
) {
    if error.is_closing() {
        info!(%peer, %error, direction, "link lost");
    } else {
        warn!(%peer, %error, direction, "link lost");
    }
    let reason = error.to_string();
    // The receiver of events is gone only when the worker itself is closing.
    let _ = events.send(LinkEvent::Lost { peer, reason }).await;
}
