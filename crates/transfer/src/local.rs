//! Links between workers of one process: buffers change hands, bytes are not copied; or, where blocks are in devices'
//! memory, they are copied straight from pool to pool and nothing changes hands.
//!
//! Owns: who is in this process. Never: checksums what cannot have changed.
//! Invariant: a link leads to the life of the worker that was asked for, of the same fingerprint, and
//! keeps the same credit as any other.

use crate::buffer::Buffers;
use crate::config::{LinkEvent, LinkSpeed};
use crate::credit::Account;
use crate::link::{Cargo, Carrier, Parcel, Store};
use crate::payload::{Payload, Place};
use crate::pools::{self, Access, DirectPart, PeerPool};
use crate::socket::SocketError;
use crate::transport::Transport;
use cleave_domain::{Fingerprint, WorkerId, WorkerRef};
use cleave_kv::{Condition, Packet};
use std::collections::BTreeMap;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};
use tokio::sync::{Notify, mpsc, oneshot};
use tracing::warn;

/// Bytes that are copied to see how fast memory is.
const PROBE_BYTES: usize = 1 << 20;

/// Who is in this process. Clones are the same net.
#[derive(Clone, Debug, Default)]
pub struct LocalNet {
    ends: Arc<Mutex<BTreeMap<WorkerId, End>>>,
    left: Arc<Notify>,
}

/// A worker as its neighbours see it.
#[derive(Clone, Debug)]
pub(crate) struct End {
    pub(crate) me: WorkerRef,
    pub(crate) fingerprint: Fingerprint,
    pub(crate) window: u32,
    pub(crate) frame_bytes: u32,
    pub(crate) access: Arc<Access>,
    pub(crate) events: mpsc::Sender<LinkEvent>,
}

impl LocalNet {
    pub(crate) fn enter(&self, end: End) {
        self.lock().insert(end.me.worker, end);
    }

    pub(crate) fn leave(&self, me: WorkerRef) {
        let mut ends = self.lock();
        if ends.get(&me.worker).is_some_and(|end| end.me == me) {
            ends.remove(&me.worker);
        }
        drop(ends);
        self.left.notify_waiters();
    }

    /// Returns once that life is not here any more.
    async fn without(&self, peer: WorkerRef) {
        loop {
            let left = self.left.notified();
            tokio::pin!(left);
            // From now on nothing is missed.
            left.as_mut().enable();
            if self.find(peer).is_none() {
                return;
            }
            left.await;
        }
    }

    /// Finds a worker in the life asked for.
    fn find(&self, peer: WorkerRef) -> Option<End> {
        let found = self.lock().get(&peer.worker).cloned();
        found.filter(|end| end.me == peer)
    }

    fn lock(&self) -> MutexGuard<'_, BTreeMap<WorkerId, End>> {
        self.ends.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// Carries one link within the process. Returns why it ended.
pub(crate) async fn carry(
    net: &LocalNet,
    near: &End,
    peer: WorkerRef,
    carrier: Carrier,
) -> SocketError {
    let Some(far) = net.find(peer) else {
        return SocketError::Refused(format!("worker {peer} is not in this process"));
    };
    if far.fingerprint != near.fingerprint {
        let (ours, theirs) = (&near.fingerprint.0, &far.fingerprint.0);
        return SocketError::Refused(format!(
            "KV does not fit: worker {} has fingerprint \"{ours}\", worker {peer} has \"{theirs}\"",
            near.me
        ));
    }
    let Carrier { credit, mut queue } = carrier;
    let account = Account::of_bytes(far.window);
    let frame_bytes = near.frame_bytes.min(far.frame_bytes);
    let (store, speed) = match open_pool(net, near, &far).await {
        Some((pool, probed)) => {
            let speed = LinkSpeed::of(Transport::Local, Duration::ZERO, probed);
            (Store::Pool { pool, frame_bytes }, speed)
        }
        None => {
            let buffers = Buffers::new(frame_bytes, far.window);
            (Store::Buffers(buffers), measure())
        }
    };
    credit.open(store, far.window);
    for event in [
        LinkEvent::Measured { peer, speed },
        LinkEvent::Granted { peer },
    ] {
        if near.events.send(event).await.is_err() {
            return SocketError::Closing;
        }
    }
    loop {
        tokio::select! {
            returned = account.returned() => {
                assert!(credit.grant(returned.bytes, far.window), "only what was taken returns");
                if near.events.send(LinkEvent::Granted { peer }).await.is_err() {
                    return SocketError::Closing;
                }
            }
            parcel = queue.recv() => {
                let Some(parcel) = parcel else { return SocketError::Closing };
                let Some(event) = arrival(near.me, &account, parcel) else {
                    return SocketError::Overdrawn;
                };
                if far.events.send(event).await.is_err() {
                    return SocketError::Closed;
                }
            }
            () = far.events.closed() => return SocketError::Closed,
        }
    }
}

/// The neighbour's pool, if blocks can be copied straight into it, and how fast that is.
async fn open_pool(
    net: &LocalNet,
    near: &End,
    far: &End,
) -> Option<(Arc<dyn PeerPool>, (usize, Duration))> {
    let (pools, peer) = (near.access.pools()?, far.me);
    far.access.pools()?;
    let opened = async {
        let handle = far.access.give(near.me)?;
        let (held, gone) = oneshot::channel();
        tokio::spawn(sever(net.clone(), near.me, (far.clone(), gone)));
        let pool = Arc::new(Held {
            pool: pools.open(&handle)?,
            _held: held,
        });
        let probed = pools::measure(Arc::clone(&pool) as Arc<dyn PeerPool>).await?;
        Ok::<_, String>((pool as Arc<dyn PeerPool>, probed))
    };
    let opened = opened.await;
    opened
        .inspect_err(|reason| warn!(%peer, reason, "blocks go by way of the host's memory"))
        .ok()
}

/// A neighbour's pool. When nobody holds it any more, nothing is written through it.
#[derive(Debug)]
struct Held {
    pool: Arc<dyn PeerPool>,
    _held: oneshot::Sender<()>,
}

impl PeerPool for Held {
    fn write(&self, parts: &[DirectPart]) -> Result<Vec<u64>, String> {
        self.pool.write(parts)
    }

    fn probe(&self) -> Result<usize, String> {
        self.pool.probe()
    }
}

/// Tells a worker when a neighbour that could write into its pool cannot any more: it has left, and nobody holds what
/// it had opened.
async fn sever(net: LocalNet, near: WorkerRef, (far, gone): (End, oneshot::Receiver<()>)) {
    let End { access, events, .. } = far;
    // It does not keep the worker that it tells alive.
    let events = events.downgrade();
    let _ = gone.await;
    net.without(near).await;
    if access.sever(near)
        && let Some(events) = events.upgrade()
    {
        // Nobody listens any more when that worker is closing too.
        let _ = events.send(LinkEvent::Severed { peer: near }).await;
    }
}

/// What a hand-over costs is the copy out of one pool and the copy into the other: memory's speed.
fn measure() -> LinkSpeed {
    let from = vec![1; PROBE_BYTES];
    let mut to = vec![0; PROBE_BYTES];
    let start = Instant::now();
    to.copy_from_slice(std::hint::black_box(&from));
    std::hint::black_box(&to);
    LinkSpeed::of(
        Transport::Local,
        Duration::ZERO,
        (to.len(), start.elapsed()),
    )
}

/// Bytes that change hands are the very ones that were sent: they cannot have changed on the way.
fn arrival(from: WorkerRef, account: &Arc<Account>, parcel: Parcel) -> Option<LinkEvent> {
    // Within a process nobody need show what lets it in.
    let Parcel {
        packet,
        cargo,
        pass: _,
    } = parcel;
    let payload = match (&packet, cargo) {
        (_, Some(Cargo::Buffer(buffer))) => {
            let hold = account.take(buffer.len() as u64)?;
            Some(Payload::new(Place::Buffer(buffer), hold))
        }
        (_, Some(Cargo::Slot(_))) => unreachable!("a local link has buffers"),
        (Packet::Frame { part, checksum, .. }, None) => {
            let hold = account.take(u64::from(part.len))?;
            Some(Payload::new(Place::Pool(*checksum), hold))
        }
        (_, None) => None,
    };
    Some(LinkEvent::Arrived {
        from,
        packet,
        condition: Condition::Intact,
        payload,
    })
}
