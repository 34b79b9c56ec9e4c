//! Links between processes of one host, over a ring of slots that both processes map. Control
//! packets, credit and heartbeats travel on a Unix socket; at the start it also carries the handle
//! of a device pool (`cuda_ipc`), or else the descriptor of the ring, through which payloads then
//! travel.
//!
//! Owns: the listener, the identity of this host, the requests to a peer on it, the rings and their
//! size.
//! Never: talks to a process of another user; creates or maps a ring on a thread that drives tasks.
//! Invariant: a ring is no larger than the window of its receiver requires; a ring larger than this
//! end would create, and larger than 1 GiB, is not mapped.

mod listener;
mod receiver;
mod ring;

pub(crate) use listener::{HostAddress, HostListener};
pub(crate) use ring::{
    MappedArea, ReceiverRing, RingShape, SenderRing, SenderSlot, SlotView, copy_past_caches,
};

use super::cuda_ipc::{self, PoolReply};
use super::{DialChoice, DialFuture, DialTurn, LinkTransport, Transport, dial_within};
use crate::address::{AddressScheme, DataAddresses, PeerRoute};
use crate::config::LinksConfig;
use crate::handshake::{DialledLink, LinkTerms, RequestedLink, perform_handshake};
use crate::incoming::LinkStream;
use crate::link::{PayloadStore, SlotDelivery};
use crate::listeners::{ListenOptions, TransportOffer};
use crate::outgoing::{DialledTransport, EstablishedLink, OutboundLink};
use crate::socket::{LinkError, MessageReader, write_message};
use crate::wire::LinkMessage;
use cleave_domain::WorkerRef;
use ring::receive_descriptor;
use std::io;
use tokio::io::Interest;
use tokio::net::UnixStream;
use tokio::net::unix::{OwnedReadHalf, OwnedWriteHalf};

/// Limit of a mapped ring whose receiver has a higher credit than this worker.
const RING_BYTES_MAX: u64 = 1 << 30;

/// The transport through shared memory.
pub(crate) struct SharedMemoryTransport;

/// The channel for payloads between processes of one host.
pub(crate) struct PayloadChannel {
    pub(crate) store: PayloadStore,
    /// The reason for which the peer's pool is not open, if both ends would share pools.
    pub(crate) pool_unopened: Option<String>,
}

impl LinkTransport for SharedMemoryTransport {
    fn scheme(&self) -> Option<AddressScheme> {
        Some(AddressScheme {
            is_addition: false,
            is_valid: |part| HostAddress::parse(part).is_some(),
        })
    }

    fn offer(&self, options: &mut ListenOptions) -> io::Result<Option<TransportOffer>> {
        if !options.transports.contains(&Transport::SharedMemory) {
            return Ok(None);
        }
        let listener = HostListener::bind()?;
        Ok(Some(TransportOffer {
            part: listener.address().to_string(),
            listener: Some(Box::new(listener)),
        }))
    }

    fn dial_choice<'a>(&self, config: &LinksConfig, route: &'a PeerRoute) -> DialChoice<'a> {
        match route.part(Transport::SharedMemory) {
            Some(part)
                if config.transports.contains(&Transport::SharedMemory) && is_this_host(part) =>
            {
                DialChoice::Dial(DialTurn::InOrder, part)
            }
            _ => DialChoice::Unusable,
        }
    }

    fn dial<'a>(&'a self, link: OutboundLink<'a>, address: &'a str) -> DialFuture<'a> {
        Box::pin(async move {
            let established = dial_within(link.config.connect_timeout, establish(link, address));
            Ok(Box::new(established.await?) as Box<dyn EstablishedLink>)
        })
    }
}

/// Whether the part of an address belongs to this host, in this boot.
fn is_this_host(part: &str) -> bool {
    HostAddress::parse(part).is_some_and(|address| address.is_of_this_host())
}

/// Whether a worker with these addresses runs on this host.
pub(super) fn is_on_this_host(addresses: &DataAddresses) -> bool {
    addresses
        .part(Transport::SharedMemory)
        .is_some_and(is_this_host)
}

fn failure(reason: String) -> LinkError {
    LinkError::Transport(Transport::SharedMemory, reason)
}

/// Dials, and reports why the link goes through a ring although both ends would share pools.
async fn establish(
    link: OutboundLink<'_>,
    part: &str,
) -> Result<DialledTransport<OwnedReadHalf, OwnedWriteHalf>, LinkError> {
    let address = HostAddress::parse(part).expect("the parts of an address are valid");
    let (dialled, channel) = dial(link.config, link.peer, &address).await?;
    let PayloadChannel {
        store,
        pool_unopened,
    } = channel;
    let transport = match store {
        PayloadStore::Pool { .. } => Transport::CudaIpc,
        PayloadStore::Buffers(_) | PayloadStore::Ring(..) => Transport::SharedMemory,
    };
    if let Some(reason) = pool_unopened {
        link.report_fallback(Transport::CudaIpc, transport, reason)
            .await?;
    }
    Ok(DialledTransport {
        dialled,
        transport,
        store,
    })
}

/// Refuses a peer of another user: memory is shared only within one user.
fn same_user(stream: &UnixStream) -> Result<(), LinkError> {
    let (peer_user, own_user) = (stream.peer_cred()?.uid(), rustix::process::geteuid());
    if peer_user == own_user.as_raw() {
        Ok(())
    } else {
        Err(failure(format!(
            "the peer runs as user {peer_user}, this worker as {own_user:?}"
        )))
    }
}

fn split(config: &LinksConfig, stream: UnixStream) -> LinkStream<OwnedReadHalf, OwnedWriteHalf> {
    let (reader, writer) = stream.into_split();
    let reader = MessageReader::new(reader, config.silence_max, config.block_bytes);
    LinkStream { reader, writer }
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
    let unopened = match cuda_ipc::ask_pool(config, &mut stream).await? {
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
    let fd = received.await.map_err(|error| failure(error.to_string()))?;
    let ring = run_blocking(move || SenderRing::open(&fd, shape)).await?;
    let channel = PayloadChannel {
        store: PayloadStore::Ring(ring, SlotDelivery::Mapped),
        pool_unopened: unopened,
    };
    let streams = vec![stream];
    Ok((DialledLink { streams, terms }, channel))
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
        return Err(failure(format!(
            "the peer's ring has {bytes} bytes, and {bytes_max} is the most that is mapped"
        )));
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
        .map_err(|error| failure(error.to_string()))
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
