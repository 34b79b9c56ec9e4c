//! The sending end over sockets: dial the best address that works, shake hands, measure, then carry
//! parcels until it breaks.
//!
//! Owns: the order of transports, and the terms on which a link is made. Never: decides
//! what is sent, or keeps anything of a link that ended.
//! Invariant: a transport that both ends announced and that does not work is told
//! ([`LinkEvent::FellBack`]) before the next one is tried; so is NIXL where one end alone has it.

use crate::address::{Addresses, HostAddress};
use crate::buffer::Buffers;
use crate::config::{LinkEvent, LinkSpeed, LinksConfig};
use crate::handshake::{self, Dialled, Terms};
use crate::host::{self, HostDialled};
use crate::incoming::Stream;
use crate::link::{Cargo, Carrier, Credit, Parcel, Store};
use crate::measure::{NONCE_LAST, measure};
use crate::nixl::{self, Nixl, Writer};
use crate::pass::HANDOFFS_MAX;
use crate::setbacks::{REST_MIN, Setbacks};
use crate::shared_memory::Slot;
use crate::socket::{Reader, SocketError, write};
use crate::tcp::{TcpReader, TcpWriter};
use crate::transport::Transport;
use crate::wire::{FrameHead, Message};
use cleave_domain::{HandoffId, WorkerRef};
use cleave_kv::{Packet, Seal};
use std::collections::BTreeSet;
use std::sync::Arc;
use std::time::Duration;
use tokio::io::{AsyncRead, AsyncWrite};
use tokio::sync::{Mutex, mpsc};
use tokio::task::JoinSet;
use tokio::time::{Instant, MissedTickBehavior, interval, timeout};

/// What carries payloads between processes of a host.
pub(crate) struct Carriage {
    pub(crate) store: Store,
    /// Why the peer's pool, which both ends would have shared, is not open.
    pub(crate) unopened: Option<String>,
}

/// Who carries to whom, and who is told.
#[derive(Clone, Copy)]
pub(crate) struct Errand<'a> {
    pub(crate) config: &'a LinksConfig,
    pub(crate) peer: WorkerRef,
    pub(crate) events: &'a mpsc::Sender<LinkEvent>,
    /// What is remembered of NIXL.
    pub(crate) setbacks: &'a Setbacks,
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
    /// Over NIXL, whose writes may fail where its agents did not: so it counts as made once it was measured.
    Written(Standing<TcpReader, TcpWriter>),
}

/// A link that was measured.
struct Standing<R, W> {
    dialled: Dialled<R, W>,
    store: Store,
    writing: Writing,
    speed: LinkSpeed,
    /// Credit that the probe still has.
    lent: u32,
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
            let next = ways.get(index + 1);
            let error = match self.rests(way, next) {
                Some(error) => error,
                None => match self.dial(way).await {
                    Ok(Made::Within(dialled, carriage)) => {
                        return self.measure_and_run(dialled, carriage, carrier).await;
                    }
                    Ok(Made::Between(dialled, carriage)) => {
                        return self.measure_and_run(dialled, carriage, carrier).await;
                    }
                    Ok(Made::Written(standing)) => return self.run(standing, carrier).await,
                    Err(error) => self.noted(way, error),
                },
            };
            let is_wanted = !carrier.queue.is_closed() || !carrier.queue.is_empty();
            let next = next.filter(|_| is_wanted && !error.holds_for_all());
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
        // What no card writes is TCP with more hands, or has the host's ways in its place.
        let (before, after) = match self.is_by_card() {
            true => (nixl, None),
            false => (None, nixl),
        };
        let ways = host.into_iter().chain(before);
        ways.chain(tcp).chain(after).collect()
    }

    fn is_by_card(&self) -> bool {
        self.config.nixl().is_some_and(|nixl| nixl.is_by_card())
    }

    /// Why a way is left alone for now; one without another behind it never is.
    fn rests(&self, way: &Way<'_>, next: Option<&Way<'_>>) -> Option<SocketError> {
        let (Way::Nixl(..), Some(_)) = (way, next) else {
            return None;
        };
        self.setbacks.rest(self.peer).map(SocketError::Nixl)
    }

    /// Remembers what was in vain, unless the peer as a whole cannot be reached or does not want the link.
    fn noted(&self, way: &Way<'_>, error: SocketError) -> SocketError {
        let is_nobody = matches!(error, SocketError::Connect(..) | SocketError::NoPeer(_));
        if let Way::Nixl(..) = way
            && !is_nobody
            && !error.holds_for_all()
        {
            let reason = match &error {
                SocketError::Nixl(reason) => reason.clone(),
                other => other.to_string(),
            };
            self.setbacks.note(self.peer, reason);
        }
        error
    }

    /// Why the peer is not tried over NIXL before this, if one of the two could.
    fn passed_over(self, way: &Way<'_>, addresses: &Addresses) -> Option<String> {
        let Way::Tcp(_) = way else {
            return None;
        };
        let is_wanted = self.config.transports.contains(&Transport::Nixl);
        match (self.config.nixl(), addresses.nixl) {
            (None, true) if is_wanted => Some("this worker has no NIXL library".to_owned()),
            (Some(_), false) if self.is_by_card() => {
                Some("the peer has no NIXL library".to_owned())
            }
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
                    let dialled = handshake::dial(config, peer, address).await?;
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
        match dialled.unwrap_or(Err(SocketError::Slow(within)))? {
            Made::Between(dialled, carriage @ (Transport::Nixl, _)) => {
                let within = config.first_writes_timeout();
                let standing = timeout(within, stand(dialled, carriage)).await;
                standing
                    .unwrap_or(Err(SocketError::Unwritten(within)))
                    .map(Made::Written)
            }
            made => Ok(made),
        }
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
    async fn measure_and_run<R, W>(
        self,
        dialled: Dialled<R, W>,
        carriage: (Transport, Store),
        carrier: Carrier,
    ) -> SocketError
    where
        R: AsyncRead + Unpin + Send + 'static,
        W: AsyncWrite + Unpin + Send + 'static,
    {
        match stand(dialled, carriage).await {
            Ok(standing) => self.run(standing, carrier).await,
            Err(error) => error,
        }
    }

    /// A link over NIXL has ended. Where writes fail soon after those that were measured did not, the next dial goes another
    /// way; and it may begin as soon as the link is seen to be broken.
    fn ended_over_nixl(self, since: Instant, error: &SocketError) {
        match error {
            SocketError::Nixl(reason) if since.elapsed() < REST_MIN => {
                self.setbacks.note(self.peer, reason.clone());
            }
            _ => self.setbacks.forget(self.peer),
        }
    }

    /// Opens the link and carries until it ends.
    async fn run<R, W>(self, standing: Standing<R, W>, carrier: Carrier) -> SocketError
    where
        R: AsyncRead + Unpin + Send + 'static,
        W: AsyncWrite + Unpin + Send + 'static,
    {
        let Self {
            config,
            peer,
            events,
            ..
        } = self;
        let Standing {
            dialled,
            store,
            writing,
            speed,
            lent,
        } = standing;
        let (since, transport) = (Instant::now(), speed.transport);
        let Terms { window, .. } = dialled.terms;
        let Carrier { credit, queue } = carrier;
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
                shown: Shown::default(),
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
        if transport == Transport::Nixl {
            self.ended_over_nixl(since, &error);
        }
        // One lost stream is the link lost.
        writers.shutdown().await;
        readers.shutdown().await;
        error
    }
}

/// Measures a link.
async fn stand<R, W>(
    mut dialled: Dialled<R, W>,
    (transport, store): (Transport, Store),
) -> Result<Standing<R, W>, SocketError>
where
    R: AsyncRead + Unpin,
    W: AsyncWrite + Unpin,
{
    let writing = Writing(store.writer());
    let (speed, lent) = tokio::select! {
        measured = measure(&mut dialled.streams, transport, &store) => measured?,
        error = writing.failed() => return Err(error),
    };
    Ok(Standing {
        dialled,
        store,
        writing,
        speed,
        lent,
    })
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
                    if let Some(pass) = shown.pass(&parcel) {
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
#[derive(Default)]
struct Shown {
    handoffs: BTreeSet<HandoffId>,
}

impl Shown {
    /// What must be said before this parcel is.
    fn pass(&mut self, parcel: &Parcel) -> Option<Message> {
        let (Packet::Frame { handoff, .. } | Packet::Seal(Seal { handoff, .. })) = &parcel.packet
        else {
            return None;
        };
        let pass = parcel.pass?;
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
    let Parcel {
        packet,
        cargo,
        pass: _,
    } = parcel;
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
