//! The sending end over sockets: dial the best address that works, shake hands, measure, then carry
//! parcels until it breaks.
//!
//! Owns: the order of transports, and the terms on which a link is made. Never: decides
//! what is sent, or keeps anything of a link that ended.
//! Invariant: a transport that both ends announced and that does not work is told
//! ([`LinkEvent::FellBack`]) before the next one is tried; so is NIXL where one end alone has it.

use crate::address::{Addresses, HostAddress};
use crate::buffer::Buffers;
use crate::config::{LinkEvent, LinksConfig};
use crate::host::{self, HostDialled};
use crate::incoming::{STREAMS_MAX, Stream};
use crate::link::{Cargo, Carrier, Credit, Parcel, Store};
use crate::measure::{NONCE_LAST, measure};
use crate::nixl::{self, Nixl, Writer};
use crate::pass::{HANDOFFS_MAX, Passes};
use crate::shared_memory::Slot;
use crate::socket::{Reader, SocketError, write};
use crate::tcp::{self, TcpReader, TcpWriter};
use crate::transport::Transport;
use crate::wire::{FrameHead, Hello, Message};
use cleave_domain::{HandoffId, WorkerRef};
use cleave_kv::{Packet, Seal};
use std::collections::BTreeSet;
use std::sync::Arc;
use std::time::Duration;
use tokio::io::{AsyncRead, AsyncWrite};
use tokio::sync::{Mutex, mpsc};
use tokio::task::JoinSet;
use tokio::time::{MissedTickBehavior, interval, timeout};

/// Connections that stand, in agreement.
pub(crate) struct Dialled<R, W> {
    pub(crate) streams: Vec<Stream<R, W>>,
    pub(crate) terms: Terms,
}

/// What is asked of a peer that is dialled.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Wish {
    /// A link whose payloads come over its streams, or as its host can bring them.
    Link,
    /// One whose payloads this worker's network card writes into a ring of the peer's.
    Landing,
}

/// What carries payloads between processes of a host.
pub(crate) struct Carriage {
    pub(crate) store: Store,
    /// Why the peer's pool, which both ends would have shared, is not open.
    pub(crate) unopened: Option<String>,
}

/// What the receiver's welcome said.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Terms {
    pub(crate) window: u32,
    pub(crate) frame_bytes: u32,
    key: u64,
}

impl Terms {
    /// On terms under which no block could ever be sent, or only in crumbs, no link is made: hand-offs
    /// would wait on it for ever, and nobody would know why.
    fn check(self, config: &LinksConfig, peer: WorkerRef) -> Result<Self, SocketError> {
        let (block_bytes, frame_bytes_min) = (config.block_bytes, config.frame_bytes_min());
        let (window, frame_bytes) = (self.window, self.frame_bytes);
        if window < block_bytes {
            return Err(SocketError::Refused(format!(
                "worker {peer} gives {window} bytes of credit, and a block has {block_bytes}"
            )));
        }
        if frame_bytes < frame_bytes_min {
            return Err(SocketError::Refused(format!(
                "worker {peer} takes frames of {frame_bytes} bytes, and {frame_bytes_min} is the least"
            )));
        }
        Ok(self)
    }
}

/// Who carries to whom, and who is told.
#[derive(Clone, Copy)]
pub(crate) struct Errand<'a> {
    pub(crate) config: &'a LinksConfig,
    pub(crate) peer: WorkerRef,
    pub(crate) events: &'a mpsc::Sender<LinkEvent>,
}

/// A way to a peer that both ends have.
enum Way<'a> {
    Host(&'a HostAddress),
    Nixl(&'a Arc<Nixl>, &'a str),
    Tcp(&'a str),
}

impl Way<'_> {
    fn transport(&self) -> Transport {
        match self {
            Self::Host(_) => Transport::SharedMemory,
            Self::Nixl(..) => Transport::Nixl,
            Self::Tcp(_) => Transport::Tcp,
        }
    }
}

/// Connections that stand, and what carries payloads.
enum Made {
    Within(HostDialled, (Transport, Store)),
    Between(Dialled<TcpReader, TcpWriter>, (Transport, Store)),
}

impl Errand<'_> {
    /// Carries one link from dial to end, by the best way that works. Returns why it ended.
    pub(crate) async fn carry(self, addresses: &Addresses, carrier: Carrier) -> SocketError {
        let ways = self.ways(addresses);
        for (index, way) in ways.iter().enumerate() {
            if let Some(reason) = self.passed_over(way, addresses) {
                let step = (Transport::Nixl, Transport::Tcp);
                if let Err(closing) = self.fall_back(step, reason).await {
                    return closing;
                }
            }
            let error = match self.dial(way).await {
                Ok(Made::Within(dialled, carriage)) => {
                    return self.run(dialled, carriage, carrier).await;
                }
                Ok(Made::Between(dialled, carriage)) => {
                    return self.run(dialled, carriage, carrier).await;
                }
                Err(error) => error,
            };
            let next = ways.get(index + 1).filter(|_| !error.holds_for_all());
            let Some(next) = next else {
                return error;
            };
            let step = (way.transport(), next.transport());
            if let Err(closing) = self.fall_back(step, error.to_string()).await {
                return closing;
            }
        }
        let peer = self.peer;
        let reason = match addresses.tcp {
            None => "it can be reached from its own host only, and that is another",
            Some(_) => "none of the transports that this worker may use reaches it",
        };
        SocketError::Refused(format!("worker {peer}: {reason}"))
    }

    /// The best first.
    fn ways<'a>(&'a self, addresses: &'a Addresses) -> Vec<Way<'a>> {
        let Self { config, .. } = self;
        let Addresses {
            tcp,
            shared_memory,
            nixl,
        } = addresses;
        let host = shared_memory.as_ref().filter(|address| {
            config.transports.contains(&Transport::SharedMemory) && host::is_here(address)
        });
        let library = config.nixl().filter(|_| *nixl);
        let is_tcp = config.transports.contains(&Transport::Tcp);
        let nixl = library.zip(tcp.as_deref());
        let nixl = nixl.map(|(library, address)| Way::Nixl(library, address));
        let tcp = tcp.as_deref().filter(|_| is_tcp).map(Way::Tcp);
        let host = host.map(Way::Host);
        host.into_iter().chain(nixl).chain(tcp).collect()
    }

    /// Why the peer is not tried over NIXL before this, if one of the two could.
    fn passed_over(self, way: &Way<'_>, addresses: &Addresses) -> Option<String> {
        let Way::Tcp(_) = way else {
            return None;
        };
        let is_wanted = self.config.transports.contains(&Transport::Nixl);
        match (self.config.nixl(), addresses.nixl) {
            (None, true) if is_wanted => Some("this worker has no NIXL library".to_owned()),
            (Some(_), false) => Some("the peer has no NIXL library".to_owned()),
            _ => None,
        }
    }

    async fn dial(self, way: &Way<'_>) -> Result<Made, SocketError> {
        let Self { config, peer, .. } = self;
        let within = match way {
            Way::Nixl(..) => config.agents_timeout(),
            Way::Host(_) | Way::Tcp(_) => config.connect_timeout,
        };
        let dialled = async {
            match way {
                Way::Host(address) => {
                    let (dialled, carriage) = host::dial(config, peer, address).await?;
                    let Carriage { store, unopened } = carriage;
                    let transport = match store {
                        Store::Pool { .. } => Transport::CudaIpc,
                        Store::Buffers(_) | Store::Ring(..) => Transport::SharedMemory,
                    };
                    if let Some(reason) = unopened {
                        let step = (Transport::CudaIpc, transport);
                        self.fall_back(step, reason).await?;
                    }
                    Ok(Made::Within(dialled, (transport, store)))
                }
                Way::Nixl(library, address) => {
                    let (dialled, store) = nixl::dial(config, peer, (library, address)).await?;
                    Ok(Made::Between(dialled, (Transport::Nixl, store)))
                }
                Way::Tcp(address) => {
                    let dialled = dial(config, peer, address).await?;
                    let Terms {
                        window,
                        frame_bytes,
                        ..
                    } = dialled.terms;
                    let frame_bytes = frame_bytes.min(config.stream_frame_bytes());
                    let store = Store::Buffers(Buffers::new(frame_bytes, window));
                    Ok(Made::Between(dialled, (Transport::Tcp, store)))
                }
            }
        };
        let dialled = timeout(within, dialled).await;
        dialled.unwrap_or(Err(SocketError::Slow(within)))
    }

    async fn fall_back(
        self,
        (from, to): (Transport, Transport),
        reason: String,
    ) -> Result<(), SocketError> {
        let told = self.events.send(LinkEvent::FellBack {
            peer: self.peer,
            from,
            to,
            reason,
        });
        told.await.map_err(|_| SocketError::Closing)
    }

    /// Measures, opens the link and carries until it ends.
    async fn run<R, W>(
        self,
        mut dialled: Dialled<R, W>,
        (transport, store): (Transport, Store),
        carrier: Carrier,
    ) -> SocketError
    where
        R: AsyncRead + Unpin + Send + 'static,
        W: AsyncWrite + Unpin + Send + 'static,
    {
        let Self {
            config,
            peer,
            events,
        } = self;
        let Terms { window, .. } = dialled.terms;
        let Carrier { credit, queue } = carrier;
        let writing = Writing(store.writer());
        let measured = tokio::select! {
            measured = measure(&mut dialled.streams, transport, &store) => measured,
            error = writing.failed() => Err(error),
        };
        let (speed, lent) = match measured {
            Ok(measured) => measured,
            Err(error) => return error,
        };
        // Slots of the probe come back by themselves.
        credit.open(store, window - lent);
        for event in [
            LinkEvent::Measured { peer, speed },
            LinkEvent::Granted { peer },
        ] {
            if events.send(event).await.is_err() {
                return SocketError::Closing;
            }
        }
        let queue = Arc::new(Mutex::new(queue));
        let mut writers = JoinSet::new();
        let mut readers = JoinSet::new();
        for Stream { reader, writer } in dialled.streams {
            let means = Means {
                far: writing.0.clone(),
                shown: Shown::of(config.passes.clone()),
            };
            writers.spawn(send_parcels(
                Arc::clone(&queue),
                (writer, means),
                config.beat,
            ));
            readers.spawn(hear_grants(
                reader,
                Granted {
                    peer,
                    window,
                    credit: Arc::clone(&credit),
                    events: events.clone(),
                },
            ));
        }
        drop(queue);
        let error = loop {
            tokio::select! {
                ended = writers.join_next() => match ended {
                    // Nobody sends any more; what the other streams still carry goes out whole.
                    Some(Ok(Ok(()))) => {}
                    Some(Ok(Err(error))) => break error,
                    Some(Err(_)) | None => break SocketError::Closing,
                },
                ended = readers.join_next() => {
                    let ended = ended.expect("readers end only with the link");
                    break ended.unwrap_or(SocketError::Closing);
                }
                error = writing.failed() => break error,
            }
        };
        // One lost stream is the link lost.
        writers.shutdown().await;
        readers.shutdown().await;
        error
    }
}

/// What brings slots to the receiver, for as long as the link is carried.
struct Writing(Option<Arc<Writer>>);

impl Writing {
    async fn failed(&self) -> SocketError {
        match &self.0 {
            Some(writer) => SocketError::Nixl(writer.failed().await),
            None => std::future::pending().await,
        }
    }
}

impl Drop for Writing {
    fn drop(&mut self) {
        if let Some(writer) = &self.0 {
            writer.close();
        }
    }
}

/// Connects all streams and shakes hands.
async fn dial(
    config: &LinksConfig,
    peer: WorkerRef,
    address: &str,
) -> Result<Dialled<TcpReader, TcpWriter>, SocketError> {
    let mut first = tcp::dial(config, address).await?;
    let terms = shake_hands(config, (peer, Wish::Link), &mut first).await?;
    let mut streams = vec![first];
    let streams_count = usize::from(config.streams_count).clamp(1, STREAMS_MAX);
    while streams.len() < streams_count {
        let mut further = tcp::dial(config, address).await?;
        let join = Message::Join {
            from: config.me,
            key: terms.key,
        };
        write(&mut further.writer, &join, &[]).await?;
        match further.reader.message().await? {
            Message::Joined => streams.push(further),
            Message::Reject(reason) => return Err(SocketError::Rejected(reason)),
            _ => return Err(SocketError::Unexpected("in answer to a join")),
        }
    }
    Ok(Dialled { streams, terms })
}

/// Says who this is and hears on which terms the link is taken.
pub(crate) async fn shake_hands<R, W>(
    config: &LinksConfig,
    (peer, wish): (WorkerRef, Wish),
    stream: &mut Stream<R, W>,
) -> Result<Terms, SocketError>
where
    R: AsyncRead + Unpin,
    W: AsyncWrite + Unpin,
{
    let hello = Hello {
        from: config.me,
        to: peer,
        block_bytes: config.block_bytes,
        fingerprint: config.fingerprint.0.clone(),
    };
    let hello = match wish {
        Wish::Link => Message::Hello(hello),
        Wish::Landing => Message::Approach(hello),
    };
    write(&mut stream.writer, &hello, &[]).await?;
    match stream.reader.message().await? {
        Message::Welcome { me, .. } if me != peer => Err(SocketError::Refused(format!(
            "worker {me} answers where worker {peer} was to be"
        ))),
        Message::Welcome {
            me: _,
            credit,
            key,
            frame_bytes,
        } => {
            let terms = Terms {
                window: u32::try_from(credit).unwrap_or(u32::MAX),
                frame_bytes: frame_bytes.min(config.block_bytes),
                key,
            };
            terms.check(config, peer)
        }
        Message::Reject(reason) => Err(SocketError::Rejected(reason)),
        _ => Err(SocketError::Unexpected("in place of a welcome")),
    }
}

/// A receiver can only give back what it got.
pub(crate) const BEYOND_WINDOW: SocketError = SocketError::Unexpected("grant beyond the window");

/// Whichever stream is free takes the next parcel. Ends well when nobody can send any more.
async fn send_parcels<W: AsyncWrite + Unpin>(
    queue: Arc<Mutex<mpsc::UnboundedReceiver<Parcel>>>,
    (mut writer, means): (W, Means),
    beat: Duration,
) -> Result<(), SocketError> {
    let mut beats = interval(beat);
    beats.set_missed_tick_behavior(MissedTickBehavior::Delay);
    let mut nonce = NONCE_LAST;
    let Means { far, mut shown } = means;
    loop {
        let next = async { queue.lock().await.recv().await };
        tokio::select! {
            parcel = next => match parcel {
                Some(parcel) => {
                    if let Some(pass) = shown.pass(&parcel.packet) {
                        write(&mut writer, &pass, &[]).await?;
                    }
                    send_parcel(&mut writer, far.as_deref(), parcel).await?;
                }
                None => {
                    if let Some(far) = &far {
                        far.all_settled().await;
                    }
                    return Ok(());
                }
            },
            _ = beats.tick() => {
                nonce += 1;
                write(&mut writer, &Message::Ping(nonce), &[]).await?;
            }
        }
    }
}

/// What a stream writes with beside itself.
struct Means {
    /// The card that brings the payloads, where one does.
    far: Option<Arc<Writer>>,
    shown: Shown,
}

/// Which hand-offs were shown a pass for on one stream.
struct Shown {
    passes: Option<Passes>,
    handoffs: BTreeSet<HandoffId>,
}

impl Shown {
    fn of(passes: Option<Passes>) -> Self {
        Self {
            passes,
            handoffs: BTreeSet::new(),
        }
    }

    /// What must be said before this packet is.
    fn pass(&mut self, packet: &Packet) -> Option<Message> {
        let (Packet::Frame { handoff, .. } | Packet::Seal(Seal { handoff, .. })) = packet else {
            return None;
        };
        let pass = self.passes.as_ref()?.held(*handoff)?;
        if self.handoffs.len() >= HANDOFFS_MAX {
            self.handoffs.clear();
        }
        let is_new = self.handoffs.insert(*handoff);
        is_new.then_some(Message::Pass(*handoff, pass))
    }
}

/// From now on the slot is the receiver's. Its bytes are on their way when the receiver hears of it.
pub(crate) fn lend(slot: Slot, far: Option<&Writer>) -> u32 {
    let len = slot.len();
    let number = slot.lend();
    if let Some(far) = far {
        far.write(number, len);
    }
    number
}

async fn send_parcel<W: AsyncWrite + Unpin>(
    writer: &mut W,
    far: Option<&Writer>,
    parcel: Parcel,
) -> Result<(), SocketError> {
    let Parcel { packet, cargo } = parcel;
    let message = match packet {
        Packet::Frame {
            handoff,
            block,
            part,
            checksum,
        } => {
            let head = FrameHead {
                handoff,
                block,
                part,
                checksum,
            };
            match cargo {
                Some(Cargo::Slot(slot)) => Message::SlotFrame(head, lend(slot, far)),
                Some(Cargo::Buffer(bytes)) => {
                    return write(writer, &Message::Frame(head), &bytes).await;
                }
                None => Message::PoolFrame(head),
            }
        }
        Packet::Seal(seal) => Message::Seal(seal),
        Packet::Landed { handoff } => Message::Landed(handoff),
        Packet::Abandoned { handoff, cause } => Message::Abandoned(handoff, cause),
        Packet::Stop { handoff } => Message::Stop(handoff),
        Packet::Stopped { handoff } => Message::Stopped(handoff),
    };
    write(writer, &message, &[]).await
}

/// Where grants go.
struct Granted {
    peer: WorkerRef,
    window: u32,
    credit: Arc<Credit>,
    events: mpsc::Sender<LinkEvent>,
}

async fn hear_grants<R: AsyncRead + Unpin>(mut reader: Reader<R>, granted: Granted) -> SocketError {
    let Granted {
        peer,
        window,
        credit,
        events,
    } = granted;
    loop {
        let sound = match reader.message().await {
            Ok(Message::Grant(bytes)) => credit.grant(bytes, window),
            Ok(Message::GrantSlots(slots)) => {
                credit.settled(&slots).await;
                credit.grant_slots(&slots)
            }
            Ok(Message::Pong(_)) => continue,
            Ok(_) => return SocketError::Unexpected("from the receiver of a link"),
            Err(error) => return error,
        };
        if !sound {
            return BEYOND_WINDOW;
        }
        if events.send(LinkEvent::Granted { peer }).await.is_err() {
            return SocketError::Closing;
        }
    }
}
