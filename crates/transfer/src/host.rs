//! The socket between processes of one host: control packets, credit and signs of life travel on it, and at the start
//! what payloads need to go another way: the handle of a device's pool, or else the descriptor of a ring.
//!
//! Its name is an abstract one: nothing is left behind by a process that is killed, and only
//! processes of the same network namespace can connect. That they can is the proof that the ring can
//! be shared; the host's identity in an address only saves the attempt between hosts.
//!
//! Owns: the listener, the identity of this host, what is asked of a peer of it, and the size of a ring.
//! Never: talks to a process of another user; makes or maps a ring on a thread that drives tasks.
//! Invariant: a ring is no larger than its receiver's window warrants, and none larger than this end
//! would make, or 1 GiB, is mapped.

use crate::address::HostAddress;
use crate::config::{LinkEvent, LinksConfig};
use crate::credit::Account;
use crate::handshake::{Dialled, Terms, Wish, shake_hands};
use crate::incoming::{self, Arrivals, Door, Hearing, Knock, Places, Seat, Stream, Visitor};
use crate::life::PeerProcess;
use crate::link::{Delivery, Store};
use crate::outgoing::Carriage;
use crate::pools::PeerPool;
use crate::shared_memory::{Mirror, Ring, Shape, receive_descriptor, send_descriptor};
use crate::socket::{Reader, SocketError, write};
use crate::wire::Message;
use cleave_domain::WorkerRef;
use std::io;
use std::os::unix::fs::MetadataExt;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, OnceLock};
use tokio::io::Interest;
use tokio::net::unix::{OwnedReadHalf, OwnedWriteHalf};
use tokio::net::{UnixListener, UnixStream};
use tokio::sync::mpsc;
use tokio::time::timeout;

/// Names are tried until one is free: process ids are unique only within their namespace.
const NAMES_TRIED_MAX: u32 = 16;

/// What is mapped of a peer whose credit is set higher than this worker's own.
const RING_BYTES_MAX: u64 = 1 << 30;

/// A connection from a process of this host.
pub(crate) type HostStream = UnixStream;
pub(crate) type HostVisitor = Visitor<OwnedReadHalf, OwnedWriteHalf>;
pub(crate) type HostDialled = Dialled<OwnedReadHalf, OwnedWriteHalf>;

/// Where processes of the same host reach a worker.
#[derive(Debug)]
pub struct HostListener {
    listener: UnixListener,
    address: HostAddress,
}

impl HostListener {
    /// Takes a free name.
    ///
    /// # Errors
    /// If this system has no such sockets, or does not say which boot of which host it is.
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

    /// What peers are to be told.
    pub fn address(&self) -> &HostAddress {
        &self.address
    }

    /// The next process that connects.
    pub(crate) async fn accept(&self) -> io::Result<HostStream> {
        Ok(self.listener.accept().await?.0)
    }
}

/// Whether the address is one of this host, in this boot.
pub(crate) fn is_here(address: &HostAddress) -> bool {
    host_id().is_ok_and(|host_id| host_id == address.host_id)
}

/// The host in this boot, and the network namespace: sockets without a file are each namespace's own, so pods of one
/// node do not meet. Read once: it stays as long as the process can live.
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

/// Under another user, memory is not shared.
fn same_user(stream: &UnixStream) -> Result<(), SocketError> {
    let (theirs, ours) = (stream.peer_cred()?.uid(), rustix::process::geteuid());
    match theirs == ours.as_raw() {
        true => Ok(()),
        false => Err(SocketError::SharedMemory(io::Error::other(format!(
            "the peer runs as user {theirs}, this worker as {ours:?}"
        )))),
    }
}

fn split(config: &LinksConfig, stream: UnixStream) -> Stream<OwnedReadHalf, OwnedWriteHalf> {
    let (reader, writer) = stream.into_split();
    let reader = Reader::new(reader, config.silence_max, config.block_bytes);
    Stream { reader, writer }
}

/// As [`incoming::greet`].
pub(crate) async fn greet(
    config: &LinksConfig,
    stream: HostStream,
) -> Result<HostVisitor, SocketError> {
    same_user(&stream)?;
    let door = Door {
        config,
        // Only processes of this user come this way.
        is_known: &|_| true,
    };
    match incoming::hear_knock(door, split(config, stream)).await? {
        Knock::Link(visitor) => Ok(visitor),
        Knock::Join { .. } => Err(SocketError::Unexpected("further stream beside a ring")),
        Knock::Approach(_) => Err(SocketError::Unexpected(
            "wish for a ring of a network card's",
        )),
    }
}

/// Gives the visitor the pool, or makes a ring for it, and receives that way until the link ends. Returns why it ended.
pub(crate) async fn receive(
    visitor: HostVisitor,
    seat: Seat,
    (config, gate): (&LinksConfig, Gate<'_>),
) -> SocketError {
    let Visitor { peer, mut stream } = visitor;
    let shape = shape(config);
    let opened = open(&mut stream, (config, shape, seat.key), (peer, &gate));
    let places = match timeout(config.connect_timeout, opened).await {
        Ok(Ok(places)) => places,
        Ok(Err(error)) => return error,
        Err(_) => return SocketError::Slow(config.connect_timeout),
    };
    let account = match &places {
        Places::Ring(..) => Account::of_slots(shape.slots_count),
        Places::Pool | Places::Buffers(_) => Account::of_bytes(shape.credit()),
    };
    let hearing = Hearing {
        peer,
        block_bytes: config.block_bytes,
        account,
        places,
        events: gate.events.clone(),
        passes: config.passes.clone(),
    };
    incoming::receive_heads(stream, hearing, seat).await
}

/// Who may come how far.
pub(crate) struct Gate<'a> {
    pub(crate) events: &'a mpsc::Sender<LinkEvent>,
    /// Gives the pool to a peer, and tells when its process has ended.
    pub(crate) give: &'a (dyn Fn(WorkerRef, PeerProcess) -> Result<Vec<u8>, String> + Send + Sync),
}

/// Slots for the usual window, and never for less than two blocks. Slots much shorter than a page would
/// take many times the window in memory: then there are fewer.
pub(crate) fn shape(config: &LinksConfig) -> Shape {
    let slot_bytes = config.frame_bytes();
    let block_slots = config.block_bytes.div_ceil(slot_bytes);
    let one = Shape {
        slot_bytes,
        slots_count: 1,
    };
    let slots_max = 2 * u64::from(config.window()) / one.bytes();
    let slots_max = u32::try_from(slots_max).unwrap_or(u32::MAX);
    let slots_count = (config.window() / slot_bytes).min(slots_max);
    Shape {
        slots_count: slots_count.max(2 * block_slots),
        ..one
    }
}

/// The ring that a receiver's terms speak of.
pub(crate) fn agreed_shape(config: &LinksConfig, terms: Terms) -> Result<Shape, SocketError> {
    let shape = Shape {
        slot_bytes: terms.frame_bytes,
        slots_count: terms.window / terms.frame_bytes.max(1),
    };
    if shape.slots_count == 0 || shape.window() != u64::from(terms.window) {
        return Err(SocketError::Unexpected("credit that is no number of slots"));
    }
    let bytes_max = RING_BYTES_MAX.max(self::shape(config).bytes());
    if shape.bytes() > bytes_max {
        let bytes = shape.bytes();
        return Err(SocketError::SharedMemory(io::Error::other(format!(
            "the peer's ring has {bytes} bytes, and {bytes_max} is the most that is mapped"
        ))));
    }
    Ok(shape)
}

/// Memory that the ring of an incoming link takes.
#[cfg(test)]
pub(crate) fn ring_bytes(config: &LinksConfig) -> u64 {
    shape(config).bytes()
}

/// Making and mapping memory fills it: too long for a thread that others wait for.
async fn aside<T: Send + 'static>(
    work: impl FnOnce() -> io::Result<T> + Send + 'static,
) -> Result<T, SocketError> {
    let done = tokio::task::spawn_blocking(work).await;
    done.map_err(|_| SocketError::Closing)?
        .map_err(SocketError::SharedMemory)
}

/// Welcomes the peer, and gives it the pool or the ring's descriptor, whichever it asks for. When the descriptor is
/// sent nothing else may be on the socket, because one that meets an ordinary read is lost.
async fn open(
    stream: &mut Stream<OwnedReadHalf, OwnedWriteHalf>,
    (config, shape, key): (&LinksConfig, Shape, u64),
    (peer, gate): (WorkerRef, &Gate<'_>),
) -> Result<Places, SocketError> {
    let welcome = Message::Welcome {
        me: config.me,
        credit: shape.window(),
        key,
        frame_bytes: shape.slot_bytes,
    };
    write(&mut stream.writer, &welcome, &[]).await?;
    let mut wish = stream.reader.message().await?;
    if wish == Message::AskPool {
        let socket: &UnixStream = stream.writer.as_ref();
        let offer = match (&config.pools, PeerProcess::of(socket)) {
            (None, _) => Message::NoPool(String::new()),
            // Whose end cannot be seen could write for ever.
            (Some(_), Err(error)) => Message::NoPool(error.to_string()),
            (Some(_), Ok(process)) => match (gate.give)(peer, process) {
                Ok(handle) => Message::Pool(handle),
                Err(reason) => Message::NoPool(reason),
            },
        };
        write(&mut stream.writer, &offer, &[]).await?;
        wish = stream.reader.message().await?;
        if wish == Message::Opened && matches!(offer, Message::Pool(_)) {
            return Ok(Places::Pool);
        }
    }
    match wish {
        Message::Ping(_) => {}
        _ => return Err(SocketError::Unexpected("before the ring was sent")),
    }
    let (mirror, fd) = aside(move || Mirror::create(shape)).await?;
    let socket: &UnixStream = stream.writer.as_ref();
    let sent = socket.async_io(Interest::WRITABLE, || send_descriptor(socket, &fd));
    sent.await?;
    Ok(Places::Ring(mirror, Arrivals::Mapped))
}

/// Connects, shakes hands and opens the peer's pool, or maps its ring.
pub(crate) async fn dial(
    config: &LinksConfig,
    peer: WorkerRef,
    address: &HostAddress,
) -> Result<(Dialled<OwnedReadHalf, OwnedWriteHalf>, Carriage), SocketError> {
    let name = &address.name;
    let stream = UnixStream::connect(format!("\0{name}")).await;
    let stream = stream.map_err(|error| SocketError::Connect(format!("socket {name}"), error))?;
    same_user(&stream)?;
    let mut stream = split(config, stream);
    let terms = shake_hands(config, (peer, Wish::Link), &mut stream).await?;
    let shape = agreed_shape(config, terms)?;
    let unopened = match ask_pool(config, &mut stream).await? {
        Asked::Opened(pool) => {
            let frame_bytes = terms.frame_bytes;
            let carriage = Carriage {
                store: Store::Pool { pool, frame_bytes },
                unopened: None,
            };
            let streams = vec![stream];
            return Ok((Dialled { streams, terms }, carriage));
        }
        Asked::Unopened(reason) => reason,
    };
    write(&mut stream.writer, &Message::Ping(0), &[]).await?;
    let socket: &UnixStream = stream.reader.stream().as_ref();
    let received = socket.async_io(Interest::READABLE, || receive_descriptor(socket));
    let fd = received.await.map_err(SocketError::SharedMemory)?;
    let ring = aside(move || Ring::open(&fd, shape)).await?;
    let carriage = Carriage {
        store: Store::Ring(ring, Delivery::Mapped),
        unopened,
    };
    let streams = vec![stream];
    Ok((Dialled { streams, terms }, carriage))
}

/// What came of asking for the peer's pool.
enum Asked {
    Opened(Arc<dyn PeerPool>),
    /// Why, if both ends have one.
    Unopened(Option<String>),
}

async fn ask_pool(
    config: &LinksConfig,
    stream: &mut Stream<OwnedReadHalf, OwnedWriteHalf>,
) -> Result<Asked, SocketError> {
    let Some(pools) = &config.pools else {
        return Ok(Asked::Unopened(None));
    };
    write(&mut stream.writer, &Message::AskPool, &[]).await?;
    let handle = match stream.reader.message().await? {
        Message::Pool(handle) => handle,
        Message::NoPool(reason) => {
            return Ok(Asked::Unopened((!reason.is_empty()).then_some(reason)));
        }
        _ => return Err(SocketError::Unexpected("in answer to a wish for the pool")),
    };
    let pools = Arc::clone(pools);
    let opened = tokio::task::spawn_blocking(move || pools.open(&handle)).await;
    match opened.map_err(|_| SocketError::Closing)? {
        Ok(pool) => {
            write(&mut stream.writer, &Message::Opened, &[]).await?;
            Ok(Asked::Opened(pool))
        }
        Err(reason) => Ok(Asked::Unopened(Some(reason))),
    }
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use super::aside;

    /// Drivers of workers run on the runtime's threads, and a ring takes tens of MiB to fill.
    #[tokio::test]
    async fn memory_is_filled_on_no_thread_that_drives_tasks() {
        let this = std::thread::current().id();
        let other = aside(|| Ok(std::thread::current().id())).await;
        assert_ne!(other.unwrap(), this);
    }
}
