//! Links between processes of one host. Control packets, credit and heartbeats travel on a Unix
//! socket; at the start it also carries the handle of a device pool, or else the descriptor of a
//! shared-memory ring, through which payloads then travel.
//!
//! The name of the socket is abstract: a killed process leaves nothing behind, and only processes
//! of the same network namespace can connect. A connection is the proof that the ring can be
//! shared; the host identity in an address only avoids attempts between hosts.
//!
//! Owns: the listener, the identity of this host, the requests to a peer on it, and the size of a
//! ring.
//! Never: talks to a process of another user; creates or maps a ring on a thread that drives tasks.
//! Invariant: a ring is no larger than the window of its receiver requires; a ring larger than this
//! end would create, and larger than 1 GiB, is not mapped.

mod ring;

pub(crate) use ring::{
    MappedArea, ReceiverRing, RingShape, SenderRing, SenderSlot, SlotView, copy_past_caches,
};

use crate::address::HostAddress;
use crate::config::{LinkEvent, LinksConfig};
use crate::credit::CreditAccount;
use crate::handshake::{DialledLink, LinkTerms, RequestedLink, perform_handshake};
use crate::incoming::{
    self, AcceptPolicy, IdentifiedPeer, JoinRequest, LinkReceiver, LinkStream, PayloadSource,
    ReceiveSession, SlotReadiness,
};
use crate::link::{PayloadStore, SlotDelivery};
use crate::outgoing::PayloadChannel;
use crate::pools::PeerPool;
use crate::socket::{LinkError, MessageReader, write_message};
use crate::transports::cuda_ipc::PeerProcess;
use crate::wire::LinkMessage;
use cleave_domain::WorkerRef;
use ring::{receive_descriptor, send_descriptor};
use std::io;
use std::os::unix::fs::MetadataExt;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, OnceLock};
use tokio::io::Interest;
use tokio::net::unix::{OwnedReadHalf, OwnedWriteHalf};
use tokio::net::{UnixListener, UnixStream};
use tokio::sync::mpsc;
use tokio::time::timeout;

/// Limit of the names that are tried: process ids are unique only within their namespace, so a name
/// may be taken.
const NAMES_TRIED_MAX: u32 = 16;

/// Limit of a mapped ring whose receiver has a higher credit than this worker.
const RING_BYTES_MAX: u64 = 1 << 30;

/// A connection from a process of this host.
pub(crate) type HostStream = UnixStream;
pub(crate) type HostPeer = IdentifiedPeer<OwnedReadHalf, OwnedWriteHalf>;
pub(crate) type HostDialled = DialledLink<OwnedReadHalf, OwnedWriteHalf>;

/// The listener for processes of the same host.
#[derive(Debug)]
pub struct HostListener {
    listener: UnixListener,
    address: HostAddress,
}

impl HostListener {
    /// Binds a free name.
    ///
    /// # Errors
    /// If the system has no abstract sockets, or does not identify its host and boot.
    pub fn bind() -> io::Result<Self> {
        static SERIAL: AtomicU64 = AtomicU64::new(0);
        let host_id = host_id()?;
        for _ in 0..NAMES_TRIED_MAX {
            let serial = SERIAL.fetch_add(1, Ordering::Relaxed);
            let name = format!("cleave-kv-{}-{serial}", std::process::id());
            match UnixListener::bind(format!("\0{name}")) {
                Err(error) if error.kind() == io::ErrorKind::AddrInUse => continue,
                Err(error) => return Err(error),
                Ok(listener) => {
                    let address = HostAddress { host_id, name };
                    return Ok(Self { listener, address });
                }
            }
        }
        Err(io::ErrorKind::AddrInUse.into())
    }

    /// The address that is announced to peers.
    pub fn address(&self) -> &HostAddress {
        &self.address
    }

    /// Accepts the next connection.
    pub(crate) async fn accept(&self) -> io::Result<HostStream> {
        Ok(self.listener.accept().await?.0)
    }
}

/// Whether the address belongs to this host, in this boot.
pub(crate) fn is_this_host(address: &HostAddress) -> bool {
    host_id().is_ok_and(|host_id| host_id == address.host_id)
}

/// The identity of this host: its boot and the network namespace. Abstract sockets are private to a
/// namespace, so pods of one node cannot connect. It is read once, because it cannot change while
/// the process lives.
fn host_id() -> io::Result<String> {
    static HOST_ID: OnceLock<String> = OnceLock::new();
    if let Some(id) = HOST_ID.get() {
        return Ok(id.clone());
    }
    let boot = std::fs::read_to_string("/proc/sys/kernel/random/boot_id")?;
    let namespace = std::fs::metadata("/proc/self/ns/net")?.ino();
    let id = format!("{}-{namespace}", boot.trim());
    Ok(HOST_ID.get_or_init(|| id).clone())
}

/// Refuses a peer of another user: memory is shared only within one user.
fn same_user(stream: &UnixStream) -> Result<(), LinkError> {
    let (peer_user, own_user) = (stream.peer_cred()?.uid(), rustix::process::geteuid());
    if peer_user == own_user.as_raw() {
        Ok(())
    } else {
        Err(LinkError::SharedMemory(io::Error::other(format!(
            "the peer runs as user {peer_user}, this worker as {own_user:?}"
        ))))
    }
}

fn split(config: &LinksConfig, stream: UnixStream) -> LinkStream<OwnedReadHalf, OwnedWriteHalf> {
    let (reader, writer) = stream.into_split();
    let reader = MessageReader::new(reader, config.silence_max, config.block_bytes);
    LinkStream { reader, writer }
}

/// As [`incoming::identify`], for a stream on this host.
pub(crate) async fn identify(
    config: &LinksConfig,
    stream: HostStream,
) -> Result<HostPeer, LinkError> {
    same_user(&stream)?;
    let policy = AcceptPolicy {
        config,
        // Only processes of this user can connect here.
        is_known: &|_| true,
    };
    match incoming::read_join_request(policy, split(config, stream)).await? {
        JoinRequest::Link(identified) => Ok(identified),
        JoinRequest::FurtherStream { .. } => Err(LinkError::Unexpected(
            "further stream for a shared-memory link",
        )),
        JoinRequest::RdmaLink(_) => Err(LinkError::Unexpected(
            "request for an RDMA ring on a host socket",
        )),
    }
}

/// Grants the pool to the peer, or creates a ring for it, and receives on that path until the link
/// ends. Returns the reason for the end.
pub(crate) async fn receive(
    identified: HostPeer,
    session: ReceiveSession,
    config: &LinksConfig,
    gate: PoolGate<'_>,
) -> LinkError {
    let IdentifiedPeer { peer, mut stream } = identified;
    let shape = ring_shape(config);
    let opened = open_payload_source(&mut stream, config, shape, session.key, peer, &gate);
    let payload_source = match timeout(config.connect_timeout, opened).await {
        Ok(Ok(payload_source)) => payload_source,
        Ok(Err(error)) => return error,
        Err(_) => return LinkError::HandshakeTimedOut(config.connect_timeout),
    };
    let account = match &payload_source {
        PayloadSource::Ring(..) => CreditAccount::of_slots(shape.slots_count),
        PayloadSource::Pool | PayloadSource::Buffers(_) => CreditAccount::of_bytes(shape.credit()),
    };
    let link_receiver = LinkReceiver {
        peer,
        block_bytes: config.block_bytes,
        account,
        payload_source,
        events: gate.events.clone(),
        grants: config.grants.clone(),
    };
    incoming::receive_heads(stream, link_receiver, session).await
}

/// The pool access of peers, and the receiver of link events.
pub(crate) struct PoolGate<'a> {
    pub(crate) events: &'a mpsc::Sender<LinkEvent>,
    /// Grants the pool to a peer, and watches for the end of its process.
    pub(crate) grant_pool:
        &'a (dyn Fn(WorkerRef, PeerProcess) -> Result<Vec<u8>, String> + Send + Sync),
}

/// The shape of a ring: slots for the configured window, and at least for two blocks. Slots are
/// rounded up to pages, so slots much shorter than a page would occupy many times the window; then
/// the number is reduced.
pub(crate) fn ring_shape(config: &LinksConfig) -> RingShape {
    let slot_bytes = config.frame_bytes();
    let block_slots = config.block_bytes.div_ceil(slot_bytes);
    let one = RingShape {
        slot_bytes,
        slots_count: 1,
    };
    let slots_max = 2 * u64::from(config.window()) / one.bytes();
    let slots_max = u32::try_from(slots_max).unwrap_or(u32::MAX);
    let slots_count = (config.window() / slot_bytes).min(slots_max);
    RingShape {
        slots_count: slots_count.max(2 * block_slots),
        ..one
    }
}

/// The shape of the ring that the receiver's terms describe.
pub(crate) fn agreed_ring_shape(
    config: &LinksConfig,
    terms: LinkTerms,
) -> Result<RingShape, LinkError> {
    let shape = RingShape {
        slot_bytes: terms.frame_bytes,
        slots_count: terms.window / terms.frame_bytes.max(1),
    };
    if shape.slots_count == 0 || shape.window() != u64::from(terms.window) {
        return Err(LinkError::Unexpected("credit that is no number of slots"));
    }
    let bytes_max = RING_BYTES_MAX.max(self::ring_shape(config).bytes());
    if shape.bytes() > bytes_max {
        let bytes = shape.bytes();
        return Err(LinkError::SharedMemory(io::Error::other(format!(
            "the peer's ring has {bytes} bytes, and {bytes_max} is the most that is mapped"
        ))));
    }
    Ok(shape)
}

/// Memory of the ring of an incoming link.
#[cfg(test)]
pub(crate) fn ring_bytes(config: &LinksConfig) -> u64 {
    ring_shape(config).bytes()
}

/// Runs `work` on a blocking thread: creating and mapping a ring fills its memory, which takes too
/// long for a thread that drives other tasks.
async fn run_blocking<T: Send + 'static>(
    work: impl FnOnce() -> io::Result<T> + Send + 'static,
) -> Result<T, LinkError> {
    let done = tokio::task::spawn_blocking(work).await;
    done.map_err(|_| LinkError::Closing)?
        .map_err(LinkError::SharedMemory)
}

/// Sends the welcome, and the handle of the pool or the descriptor of the ring, as the peer
/// requests. When the descriptor is sent nothing else may be on the socket, because a descriptor
/// that arrives with an ordinary read is lost.
async fn open_payload_source(
    stream: &mut LinkStream<OwnedReadHalf, OwnedWriteHalf>,
    config: &LinksConfig,
    shape: RingShape,
    key: u64,
    peer: WorkerRef,
    gate: &PoolGate<'_>,
) -> Result<PayloadSource, LinkError> {
    let welcome = LinkMessage::Welcome {
        me: config.me,
        credit: shape.window(),
        key,
        frame_bytes: shape.slot_bytes,
    };
    write_message(&mut stream.writer, &welcome, &[]).await?;
    let mut request = stream.reader.message().await?;
    if request == LinkMessage::AskPool {
        let socket: &UnixStream = stream.writer.as_ref();
        let offer = match (&config.pools, PeerProcess::of(socket)) {
            (None, _) => LinkMessage::NoPool(String::new()),
            // A peer whose end cannot be observed could write for ever.
            (Some(_), Err(error)) => LinkMessage::NoPool(error.to_string()),
            (Some(_), Ok(process)) => match (gate.grant_pool)(peer, process) {
                Ok(handle) => LinkMessage::Pool(handle),
                Err(reason) => LinkMessage::NoPool(reason),
            },
        };
        write_message(&mut stream.writer, &offer, &[]).await?;
        request = stream.reader.message().await?;
        if request == LinkMessage::Opened && matches!(offer, LinkMessage::Pool(_)) {
            return Ok(PayloadSource::Pool);
        }
    }
    match request {
        LinkMessage::Ping(_) => {}
        _ => return Err(LinkError::Unexpected("before the ring was sent")),
    }
    let (mirror, fd) = run_blocking(move || ReceiverRing::create(shape)).await?;
    let socket: &UnixStream = stream.writer.as_ref();
    let sent = socket.async_io(Interest::WRITABLE, || send_descriptor(socket, &fd));
    sent.await?;
    Ok(PayloadSource::Ring(mirror, SlotReadiness::Mapped))
}

/// Connects, shakes hands and opens the peer's pool, or maps its ring.
pub(crate) async fn dial(
    config: &LinksConfig,
    peer: WorkerRef,
    address: &HostAddress,
) -> Result<(DialledLink<OwnedReadHalf, OwnedWriteHalf>, PayloadChannel), LinkError> {
    let name = &address.name;
    let stream = UnixStream::connect(format!("\0{name}")).await;
    let stream = stream.map_err(|error| LinkError::Connect(format!("socket {name}"), error))?;
    same_user(&stream)?;
    let mut stream = split(config, stream);
    let terms = perform_handshake(config, peer, RequestedLink::Link, &mut stream).await?;
    let shape = agreed_ring_shape(config, terms)?;
    let unopened = match ask_pool(config, &mut stream).await? {
        PoolReply::Opened(pool) => {
            let frame_bytes = terms.frame_bytes;
            let channel = PayloadChannel {
                store: PayloadStore::Pool { pool, frame_bytes },
                pool_unopened: None,
            };
            let streams = vec![stream];
            return Ok((DialledLink { streams, terms }, channel));
        }
        PoolReply::Unopened(reason) => reason,
    };
    write_message(&mut stream.writer, &LinkMessage::Ping(0), &[]).await?;
    let socket: &UnixStream = stream.reader.stream().as_ref();
    let received = socket.async_io(Interest::READABLE, || receive_descriptor(socket));
    let fd = received.await.map_err(LinkError::SharedMemory)?;
    let ring = run_blocking(move || SenderRing::open(&fd, shape)).await?;
    let channel = PayloadChannel {
        store: PayloadStore::Ring(ring, SlotDelivery::Mapped),
        pool_unopened: unopened,
    };
    let streams = vec![stream];
    Ok((DialledLink { streams, terms }, channel))
}

/// The result of the request for the peer's pool.
enum PoolReply {
    Opened(Arc<dyn PeerPool>),
    /// The reason, if both ends have a pool.
    Unopened(Option<String>),
}

async fn ask_pool(
    config: &LinksConfig,
    stream: &mut LinkStream<OwnedReadHalf, OwnedWriteHalf>,
) -> Result<PoolReply, LinkError> {
    let Some(pools) = &config.pools else {
        return Ok(PoolReply::Unopened(None));
    };
    write_message(&mut stream.writer, &LinkMessage::AskPool, &[]).await?;
    let handle = match stream.reader.message().await? {
        LinkMessage::Pool(handle) => handle,
        LinkMessage::NoPool(reason) => {
            return Ok(PoolReply::Unopened((!reason.is_empty()).then_some(reason)));
        }
        _ => return Err(LinkError::Unexpected("in answer to a pool request")),
    };
    let pools = Arc::clone(pools);
    let opened = tokio::task::spawn_blocking(move || pools.open(&handle)).await;
    match opened.map_err(|_| LinkError::Closing)? {
        Ok(pool) => {
            write_message(&mut stream.writer, &LinkMessage::Opened, &[]).await?;
            Ok(PoolReply::Opened(pool))
        }
        Err(reason) => Ok(PoolReply::Unopened(Some(reason))),
    }
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use super::run_blocking;

    /// The drivers of workers run on the threads of the runtime, and a ring has tens of MiB to
    /// fill.
    #[tokio::test]
    async fn rings_are_mapped_off_the_runtime_threads() {
        let this = std::thread::current().id();
        let other = run_blocking(|| Ok(std::thread::current().id())).await;
        assert_ne!(other.unwrap(), this);
    }
}
