//! Links between workers of one process: buffers are handed over without a copy. If blocks are in
//! device memory, they are copied directly from pool to pool and no buffer is used.
//!
//! Owns: the list of workers in this process. Never: checksums bytes that cannot have changed.
//! Invariant: a link leads to the requested incarnation of the worker, of the same fingerprint, and
//! has the same credit as any other link.

use crate::address::PeerRoute;
use crate::buffer::BufferPool;
use crate::config::{LinkEvent, LinkSpeed, LinksConfig};
use crate::credit::CreditAccount;
use crate::link::{LinkCarrier, OutboundPayload, PayloadStore, QueuedMessage};
use crate::outgoing::{EstablishedLink, OutboundLink};
use crate::payload::{PayloadLocation, ReceivedPayload};
use crate::pools::{self, DirectCopy, PeerPool, PoolAccessList};
use crate::socket::LinkError;
use crate::transports::{
    DialChoice, DialFuture, DialTurn, LinkTransport, Transport, TransportFuture,
};
use cleave_domain::{Fingerprint, WorkerId, WorkerRef};
use cleave_kv::{Packet, PayloadCondition};
use parking_lot::{Mutex, MutexGuard};
use std::collections::BTreeMap;
use std::sync::Arc;
use std::time::{Duration, Instant};
use tokio::sync::{Notify, mpsc, oneshot};
use tracing::warn;

/// Size of the copy that measures the bandwidth of memory.
const PROBE_BYTES: usize = 1 << 20;

/// The workers of this process. Clones share the list.
#[derive(Clone, Debug, Default)]
pub struct LocalNet {
    endpoints: Arc<Mutex<BTreeMap<WorkerId, LocalEndpoint>>>,
    endpoint_removed: Arc<Notify>,
}

/// A worker as other workers of the process see it.
#[derive(Clone, Debug)]
pub(crate) struct LocalEndpoint {
    pub(crate) me: WorkerRef,
    pub(crate) fingerprint: Fingerprint,
    pub(crate) window: u32,
    pub(crate) frame_bytes: u32,
    pub(crate) pool_access: Arc<PoolAccessList>,
    pub(crate) events: mpsc::Sender<LinkEvent>,
}

/// This worker, and the workers of its process.
#[derive(Debug)]
pub(crate) struct LocalAttachment {
    pub(crate) net: LocalNet,
    pub(crate) endpoint: LocalEndpoint,
}

/// The transport within a process.
pub(crate) struct LocalTransport;

impl LinkTransport for LocalTransport {
    fn dial_choice<'a>(&self, _config: &LinksConfig, route: &'a PeerRoute) -> DialChoice<'a> {
        match route {
            // Workers of a process find each other by name.
            PeerRoute::Local => DialChoice::Dial(DialTurn::InOrder, ""),
            PeerRoute::Remote(_) => DialChoice::Unusable,
        }
    }

    fn dial<'a>(&'a self, link: OutboundLink<'a>, _address: &'a str) -> DialFuture<'a> {
        Box::pin(async move {
            let link = dial(link.local, link.peer).await?;
            Ok(Box::new(link) as Box<dyn EstablishedLink>)
        })
    }
}

impl LocalNet {
    pub(crate) fn add(&self, end: LocalEndpoint) {
        self.lock().insert(end.me.worker, end);
    }

    pub(crate) fn remove(&self, me: WorkerRef) {
        let mut ends = self.lock();
        if ends.get(&me.worker).is_some_and(|end| end.me == me) {
            ends.remove(&me.worker);
        }
        drop(ends);
        self.endpoint_removed.notify_waiters();
    }

    /// Returns once that incarnation is no longer in this process.
    async fn wait_until_removed(&self, peer: WorkerRef) {
        loop {
            let left = self.endpoint_removed.notified();
            tokio::pin!(left);
            // The notification is registered before the check, so none is missed.
            left.as_mut().enable();
            if self.find(peer).is_none() {
                return;
            }
            left.await;
        }
    }

    /// The worker in the requested incarnation.
    fn find(&self, peer: WorkerRef) -> Option<LocalEndpoint> {
        let found = self.lock().get(&peer.worker).cloned();
        found.filter(|end| end.me == peer)
    }

    fn lock(&self) -> MutexGuard<'_, BTreeMap<WorkerId, LocalEndpoint>> {
        self.endpoints.lock()
    }
}

/// A link to a worker of this process that was found, and the memory for its payloads.
struct LocalLink {
    far: LocalEndpoint,
    store: PayloadStore,
    speed: LinkSpeed,
}

impl EstablishedLink for LocalLink {
    fn carry<'a>(
        self: Box<Self>,
        link: OutboundLink<'a>,
        carrier: LinkCarrier,
    ) -> TransportFuture<'a, LinkError> {
        let Self { far, store, speed } = *self;
        Box::pin(async move {
            carrier.credit.open(store, far.window);
            carry(&link.local.endpoint, &far, speed, carrier).await
        })
    }
}

/// Finds the peer, and opens its pool or measures memory.
async fn dial(attachment: &LocalAttachment, peer: WorkerRef) -> Result<LocalLink, LinkError> {
    let LocalAttachment {
        net,
        endpoint: near,
    } = attachment;
    let Some(far) = net.find(peer) else {
        return Err(LinkError::RejectedHere(format!(
            "worker {peer} is not in this process"
        )));
    };
    if far.fingerprint != near.fingerprint {
        let (near_fingerprint, far_fingerprint) = (&near.fingerprint.0, &far.fingerprint.0);
        return Err(LinkError::RejectedHere(format!(
            "KV does not fit: worker {} has fingerprint \"{near_fingerprint}\", worker {peer} has \"{far_fingerprint}\"",
            near.me
        )));
    }
    let frame_bytes = near.frame_bytes.min(far.frame_bytes);
    let (store, speed) = match open_pool(net, near, &far).await {
        Some((pool, (bytes, elapsed))) => {
            let speed = LinkSpeed::of(Transport::Local, Duration::ZERO, bytes, elapsed);
            (PayloadStore::Pool { pool, frame_bytes }, speed)
        }
        None => {
            let buffers = BufferPool::new(frame_bytes, far.window);
            (PayloadStore::Buffers(buffers), measure())
        }
    };
    Ok(LocalLink { far, store, speed })
}

/// Carries one link within the process. Returns the reason for the end.
async fn carry(
    near: &LocalEndpoint,
    far: &LocalEndpoint,
    speed: LinkSpeed,
    carrier: LinkCarrier,
) -> LinkError {
    let peer = far.me;
    let LinkCarrier { credit, mut queue } = carrier;
    let account = CreditAccount::of_bytes(far.window);
    for event in [
        LinkEvent::Measured { peer, speed },
        LinkEvent::CreditGranted { peer },
    ] {
        if near.events.send(event).await.is_err() {
            return LinkError::Closing;
        }
    }
    loop {
        tokio::select! {
            returned = account.wait_returned() => {
                assert!(credit.grant(returned.bytes, far.window), "only what was taken returns");
                if near.events.send(LinkEvent::CreditGranted { peer }).await.is_err() {
                    return LinkError::Closing;
                }
            }
            message = queue.recv() => {
                let Some(message) = message else { return LinkError::Closing };
                let Some(event) = arrived_event(near.me, &account, message) else {
                    return LinkError::CreditExceeded;
                };
                if far.events.send(event).await.is_err() {
                    return LinkError::Closed;
                }
            }
            () = far.events.closed() => return LinkError::Closed,
        }
    }
}

/// The peer's pool, if blocks can be copied directly into it, and the measured bandwidth.
async fn open_pool(
    net: &LocalNet,
    near: &LocalEndpoint,
    far: &LocalEndpoint,
) -> Option<(Arc<dyn PeerPool>, (usize, Duration))> {
    let (pools, peer) = (near.pool_access.pools()?, far.me);
    far.pool_access.pools()?;
    let opened = async {
        let handle = far.pool_access.grant(near.me)?;
        let (held, dropped) = oneshot::channel();
        tokio::spawn(report_fenced(net.clone(), near.me, far.clone(), dropped));
        let pool = Arc::new(LocalPeerPool {
            pool: pools.open(&handle)?,
            _held: held,
        });
        let probed = pools::measure(Arc::clone(&pool) as Arc<dyn PeerPool>).await?;
        Ok::<_, String>((pool as Arc<dyn PeerPool>, probed))
    };
    let opened = opened.await;
    opened
        .inspect_err(|reason| warn!(%peer, reason, "cannot open the peer pool: blocks are copied through host memory"))
        .ok()
}

/// A peer's pool. Dropping the last clone shows that nothing more is written through it.
#[derive(Debug)]
struct LocalPeerPool {
    pool: Arc<dyn PeerPool>,
    _held: oneshot::Sender<()>,
}

impl PeerPool for LocalPeerPool {
    fn write(&self, parts: &[DirectCopy]) -> Result<Vec<u64>, String> {
        self.pool.write(parts)
    }

    fn probe(&self) -> Result<usize, String> {
        self.pool.probe()
    }
}

/// Reports to a worker that a local peer can no longer write into its pool: the peer has left, and
/// the pool that it had opened is no longer held.
async fn report_fenced(
    net: LocalNet,
    near: WorkerRef,
    far: LocalEndpoint,
    pool_dropped: oneshot::Receiver<()>,
) {
    let LocalEndpoint {
        pool_access: access,
        events,
        ..
    } = far;
    // A weak sender does not keep the worker alive.
    let events = events.downgrade();
    let _ = pool_dropped.await;
    net.wait_until_removed(near).await;
    if access.fence(near)
        && let Some(events) = events.upgrade()
    {
        // The receiver of events is gone only when that worker is closing, too.
        let _ = events.send(LinkEvent::Fenced { peer: near }).await;
    }
}

/// The speed of memory: handing blocks over costs the copy out of one pool and the copy into the
/// other.
fn measure() -> LinkSpeed {
    let from = vec![1; PROBE_BYTES];
    let mut to = vec![0; PROBE_BYTES];
    let start = Instant::now();
    to.copy_from_slice(std::hint::black_box(&from));
    std::hint::black_box(&to);
    LinkSpeed::of(Transport::Local, Duration::ZERO, to.len(), start.elapsed())
}

/// The event for a queued message. Its bytes are the ones that were sent; they cannot have changed.
fn arrived_event(
    from: WorkerRef,
    account: &Arc<CreditAccount>,
    message: QueuedMessage,
) -> Option<LinkEvent> {
    // Write grants are not checked within a process.
    let QueuedMessage {
        packet,
        payload,
        grant: _,
    } = message;
    let payload = match (&packet, payload) {
        (_, Some(OutboundPayload::Buffer(buffer))) => {
            let hold = account.hold_bytes(buffer.len() as u64)?;
            Some(ReceivedPayload::new(PayloadLocation::Buffer(buffer), hold))
        }
        (_, Some(OutboundPayload::Slot(_))) => unreachable!("local links use buffers, not slots"),
        (Packet::Frame { part, checksum, .. }, None) => {
            let hold = account.hold_bytes(u64::from(part.len))?;
            Some(ReceivedPayload::new(PayloadLocation::Pool(*checksum), hold))
        }
        (_, None) => None,
    };
    Some(LinkEvent::Arrived {
        from,
        packet,
        condition: PayloadCondition::Intact,
        payload,
    })
}
