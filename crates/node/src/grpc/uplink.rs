//! The worker's end: it dials every router and stays connected.
//!
//! Owns: which addresses are dialled, how soon again, and that each router is joined once. Never:
//! gives up. Invariant: what a router says of itself is checked before this worker introduces itself.

use super::resolve::local_address;
use super::service::StreamError;
use super::watch_names;
use super::window::{Window, speak};
use super::{
    DIAL_MAX, DOWNWARD_BYTES_MAX, ROUTERS_MAX, SILENCE_MIN, STREAM_ITEMS_MAX, UPWARD_BYTES_MAX,
    WELCOME_MAX, beat_for, heard, with_causes,
};
use crate::door::{Call, WorkerDoor};
use crate::line::Downward;
use crate::wire::proto::fleet_client::FleetClient;
use crate::wire::{PROTOCOL, WireError, nanos, proto, within};
use cleave_domain::RouterId;
use cleave_tls::tokio_rustls::client::TlsStream;
use cleave_tls::{Explained, Line, PeerTls};
use cleave_transfer::Addresses;
use hyper_util::rt::TokioIo;
use std::collections::{BTreeMap, BTreeSet};
use std::io;
use std::net::SocketAddr;
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;
use tokio::net::TcpStream;
use tokio::sync::{mpsc, watch};
use tokio::task::{AbortHandle, JoinSet};
use tokio::time::{sleep, timeout};
use tokio_stream::wrappers::ReceiverStream;
use tonic::Streaming;
use tonic::transport::{Channel, Endpoint, Uri};
use tower::{Service, service_fn};
use tracing::{info, warn};

/// The first pause after a lost connection, and the longest.
const PAUSES: (Duration, Duration) = (Duration::from_millis(100), Duration::from_secs(5));

/// A worker's connections to its routers.
#[derive(Debug)]
pub(crate) struct Uplink {
    /// Where routers come in. Its introduction's data address may have an unspecified host, which
    /// each connection fills in.
    pub(crate) door: WorkerDoor,
    /// `host:port` each.
    pub(crate) routers: Vec<String>,
    /// By which it knows a router, and shows who it is.
    pub(crate) peers: Option<PeerTls>,
    /// Routers connected now.
    pub(crate) connected: watch::Sender<usize>,
}

/// What the connections of one worker share.
struct Shared {
    door: WorkerDoor,
    peers: Option<PeerTls>,
    connected: watch::Sender<usize>,
    /// A name may resolve to several addresses of one router: it is joined once.
    routers: Mutex<BTreeSet<RouterId>>,
}

impl Uplink {
    /// Stays connected for as long as it is polled.
    pub(crate) async fn run(self) {
        let shared = Arc::new(Shared {
            door: self.door,
            peers: self.peers,
            connected: self.connected,
            routers: Mutex::default(),
        });
        let (found, mut addresses) = watch::channel(BTreeSet::new());
        let mut tasks = JoinSet::new();
        tasks.spawn(watch_names(self.routers, found));
        let mut dialled: BTreeMap<SocketAddr, AbortHandle> = BTreeMap::new();
        loop {
            dialled.retain(|_, task| !task.is_finished());
            let current = addresses.borrow_and_update().clone();
            for address in current {
                let dial = || stay_connected(Arc::clone(&shared), address, addresses.clone());
                dialled
                    .entry(address)
                    .or_insert_with(|| tasks.spawn(dial()));
            }
            if addresses.changed().await.is_err() {
                return;
            }
        }
    }
}

/// Connects again and again, until the address belongs to no router any more. A connection that
/// stands is kept even then: the name says where to dial, not whom to serve.
async fn stay_connected(
    shared: Arc<Shared>,
    address: SocketAddr,
    addresses: watch::Receiver<BTreeSet<SocketAddr>>,
) {
    let (first, longest) = PAUSES;
    let mut pause = first;
    let mut told = String::new();
    while addresses.borrow().contains(&address) && !shared.door.inbox.is_closed() {
        let error = match converse(&shared, address).await {
            Ok(()) => {
                pause = first;
                "the router closed the connection".to_owned()
            }
            Err(error) => error.to_string(),
        };
        if shared.door.inbox.is_closed() {
            return;
        }
        // A router that stays away is worth one line, not one every five seconds.
        if told != error {
            warn!(%address, error, "not connected to the router; trying again");
            told = error;
        }
        // Spread out, so that a restarted router is not met by its whole fleet at once.
        sleep(pause.mul_f64(rand::random_range(0.5..1.0))).await;
        pause = (pause * 2).min(longest);
    }
}

/// One connection, from dial to end. `Ok` if it stood.
async fn converse(shared: &Shared, address: SocketAddr) -> Result<(), UplinkError> {
    let endpoint = Endpoint::from_shared(format!("http://{address}"))?
        .connect_timeout(DIAL_MAX)
        .tcp_nodelay(true)
        .initial_stream_window_size(1 << 20)
        .initial_connection_window_size(4 << 20);
    let channel = match &shared.peers {
        None => endpoint.connect().await?,
        Some(peers) => {
            endpoint
                .connect_with_connector(secured(peers, address))
                .await?
        }
    };
    let (out, words) = mpsc::channel(STREAM_ITEMS_MAX);
    let mut words = open(channel, words).await?;
    let (router, beat) = greeting(&mut words).await?;
    let Some(_seat) = Seat::take(shared, router) else {
        return Err(UplinkError::Twice(router));
    };
    introduce(shared, address, &out).await?;
    welcome(&mut words).await?;
    info!(%address, %router, "connected to a router");
    let (call, upward) = shared.door.join(router).await.map_err(StreamError::from)?;
    shared.connected.send_modify(|count| *count += 1);
    let window = Window::default();
    let silence = shared.door.introduction.silence;
    let ended = tokio::select! {
        error = speak::<proto::Upward>(upward, &out, beat, &window) => error,
        error = listen(&mut words, &call, silence, &window) => error,
    };
    shared.connected.send_modify(|count| *count -= 1);
    call.leave().await;
    if let StreamError::NameTaken = ended {
        let silence = shared.door.introduction.silence;
        return Err(stand_by(&mut words, &out, beat, silence).await.into());
    }
    match ended {
        StreamError::Stopped => info!(%address, %router, "left a router: this process is stopping"),
        _ => warn!(%address, %router, error = %ended, "connection to a router ended"),
    }
    Ok(())
}

/// The router has another worker of this name: it keeps the connection, and ends it when the name is free.
/// Says why it ended. The router is dialled again soon, and less often each time that this is in vain.
async fn stand_by(
    words: &mut Streaming<proto::Downward>,
    out: &mpsc::Sender<proto::Upward>,
    beat: Duration,
    silence: Duration,
) -> StreamError {
    let (_nothing, silent) = mpsc::channel(1);
    // Only beats travel, and beats are not counted.
    let window = Window::default();
    let listen = async {
        loop {
            if let Err(error) = heard(words, silence).await {
                return error;
            }
        }
    };
    let ended = tokio::select! {
        error = speak::<proto::Upward>(silent, out, beat, &window) => error,
        error = listen => error,
    };
    match ended {
        StreamError::Closed => StreamError::NameTaken,
        error => error,
    }
}

/// Dials the router at this address, who must show that it is of this fleet.
fn secured(
    peers: &PeerTls,
    address: SocketAddr,
) -> impl Service<Uri, Response = SecureStream, Error = io::Error, Future: Send> + use<> {
    let peers = peers.clone();
    service_fn(move |_: Uri| {
        let peers = peers.clone();
        async move {
            let stream = TcpStream::connect(address).await?;
            stream.set_nodelay(true)?;
            let shaken = timeout(DIAL_MAX, peers.connect(stream, Line::Control)).await;
            let slow =
                |_| io::Error::new(io::ErrorKind::TimedOut, "the TLS handshake takes too long");
            Ok(TokioIo::new(Explained(shaken.map_err(slow)??)))
        }
    })
}

type SecureStream = TokioIo<Explained<TlsStream<TcpStream>>>;

/// Why there is no connection.
#[derive(Debug, thiserror::Error)]
enum UplinkError {
    #[error("cannot connect: {}", with_causes(.0.to_string(), .0))]
    Transport(#[from] tonic::transport::Error),
    #[error("{0}")]
    Stream(#[from] StreamError),
    #[error("no answer within {0:?}: is this a Cleave router?")]
    Slow(Duration),
    #[error("router {0} is connected already under another address")]
    Twice(RouterId),
    #[error("cannot tell which address of this machine the router sees: {0}; name one")]
    Address(io::Error),
}

async fn open(
    channel: Channel,
    words: mpsc::Receiver<proto::Upward>,
) -> Result<Streaming<proto::Downward>, UplinkError> {
    let mut client = FleetClient::new(channel)
        .max_decoding_message_size(DOWNWARD_BYTES_MAX)
        .max_encoding_message_size(UPWARD_BYTES_MAX);
    let opened = timeout(DIAL_MAX, client.join(ReceiverStream::new(words))).await;
    let opened = opened.map_err(|_| UplinkError::Slow(DIAL_MAX))?;
    Ok(opened.map_err(StreamError::from)?.into_inner())
}

/// Which router it is, and how often it wants to hear something.
async fn greeting(
    words: &mut Streaming<proto::Downward>,
) -> Result<(RouterId, Duration), UplinkError> {
    use proto::downward::Kind;
    match first(words, DIAL_MAX).await? {
        Kind::Greeting(greeting) => Ok(greeted(&greeting)?),
        _ => Err(StreamError::Unexpected("message in place of a greeting").into()),
    }
}

fn greeted(greeting: &proto::Greeting) -> Result<(RouterId, Duration), StreamError> {
    let proto::Greeting {
        protocol,
        router,
        silence_nanos,
    } = *greeting;
    if protocol != PROTOCOL {
        return Err(StreamError::Rejected(format!(
            "the router speaks protocol {protocol}, this worker {PROTOCOL}: run the same release"
        )));
    }
    within("greeting.router", router, (0, ROUTERS_MAX - 1))?;
    let silences = (nanos(SILENCE_MIN), u64::MAX);
    within("greeting.silence_nanos", silence_nanos, silences)?;
    let silence = Duration::from_nanos(silence_nanos);
    Ok((RouterId(router), beat_for(silence)))
}

async fn introduce(
    shared: &Shared,
    address: SocketAddr,
    out: &mpsc::Sender<proto::Upward>,
) -> Result<(), UplinkError> {
    let mut introduction = shared.door.introduce();
    if let Ok(mut addresses) = Addresses::parse(&introduction.data_address)
        && let Some(Ok(mut data)) = addresses.tcp.as_deref().map(str::parse::<SocketAddr>)
        && data.ip().is_unspecified()
    {
        data.set_ip(local_address(address).await.map_err(UplinkError::Address)?);
        addresses.tcp = Some(data.to_string());
        introduction.data_address = addresses.to_string();
    }
    let hello = proto::upward::Kind::Hello(introduction.into());
    Ok(say(out, hello).await?)
}

async fn welcome(words: &mut Streaming<proto::Downward>) -> Result<(), UplinkError> {
    use proto::downward::Kind;
    match first(words, WELCOME_MAX).await? {
        Kind::Welcome(proto::Welcome {}) => Ok(()),
        Kind::Rejection(proto::Rejection { reason }) => Err(StreamError::Rejected(reason).into()),
        _ => Err(StreamError::Unexpected("message in place of a welcome").into()),
    }
}

async fn first(
    words: &mut Streaming<proto::Downward>,
    patience: Duration,
) -> Result<proto::downward::Kind, UplinkError> {
    let message = timeout(patience, words.message()).await;
    let message = message.map_err(|_| UplinkError::Slow(patience))?;
    let message = message.map_err(StreamError::from)?;
    let kind = message.ok_or(StreamError::Closed)?.kind;
    Ok(kind.ok_or(StreamError::Wire(WireError::Missing("downward.kind")))?)
}

/// The one connection to a router.
struct Seat<'a> {
    shared: &'a Shared,
    router: RouterId,
}

impl<'a> Seat<'a> {
    fn take(shared: &'a Shared, router: RouterId) -> Option<Self> {
        let mut routers = shared
            .routers
            .lock()
            .unwrap_or_else(PoisonError::into_inner);
        routers.insert(router).then_some(Self { shared, router })
    }
}

impl Drop for Seat<'_> {
    fn drop(&mut self) {
        let routers = self.shared.routers.lock();
        let mut routers = routers.unwrap_or_else(PoisonError::into_inner);
        routers.remove(&self.router);
    }
}

async fn say(
    out: &mpsc::Sender<proto::Upward>,
    kind: proto::upward::Kind,
) -> Result<(), StreamError> {
    let word = proto::Upward { kind: Some(kind) };
    out.send(word).await.map_err(|_| StreamError::Closed)
}

async fn listen(
    words: &mut Streaming<proto::Downward>,
    call: &Call,
    silence: Duration,
    window: &Window,
) -> StreamError {
    loop {
        let heard = match heard(words, silence).await {
            Ok(message) => receive(message, call, window).await,
            Err(error) => Err(error),
        };
        if let Err(error) = heard {
            return error;
        }
    }
}

/// Handles one message of the stream.
async fn receive(
    message: proto::Downward,
    call: &Call,
    window: &Window,
) -> Result<(), StreamError> {
    use proto::downward::Kind;
    match message.kind {
        Some(Kind::Beat(beat)) => return window.confirm(beat),
        Some(Kind::Batch(batch)) => {
            for message in batch.messages {
                handle(word(message)?, call).await?;
            }
        }
        _ => handle(word(message)?, call).await?,
    }
    window.receive();
    Ok(())
}

async fn handle(word: Downward, call: &Call) -> Result<(), StreamError> {
    let last = matches!(word, Downward::NameTaken { .. });
    call.hear(word).await?;
    match last {
        true => Err(StreamError::NameTaken),
        false => Ok(()),
    }
}

/// The content of a message that is neither a beat nor a batch.
fn word(message: proto::Downward) -> Result<Downward, StreamError> {
    use proto::downward::Kind;
    match message.kind {
        Some(Kind::Order(mut order)) => {
            let mark = order.mark.take();
            Ok(Downward::Order {
                order: order.try_into()?,
                mark: mark.map(|mark| Arc::new(mark.into())),
            })
        }
        Some(Kind::Peer(proto::Peer {
            worker,
            data_address,
        })) => {
            let worker = worker.ok_or(WireError::Missing("peer.worker"))?.into();
            Ok(Downward::Peer {
                worker,
                data_address,
            })
        }
        Some(Kind::Pass(pass)) => {
            let (handoff, pass) = pass.try_into()?;
            Ok(Downward::Pass { handoff, pass })
        }
        Some(Kind::PeerGone(worker)) => Ok(Downward::PeerGone {
            worker: worker.into(),
        }),
        Some(Kind::NameTaken(proto::NameTaken { data_address })) => {
            Ok(Downward::NameTaken { data_address })
        }
        Some(Kind::Greeting(_) | Kind::Welcome(_) | Kind::Rejection(_)) => {
            Err(StreamError::Unexpected("greeting in mid-stream"))
        }
        Some(Kind::Beat(_) | Kind::Batch(_)) => {
            Err(StreamError::Unexpected("beat or batch within a batch"))
        }
        None => Err(WireError::Missing("downward.kind").into()),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_router_had_an_id_or_a_patience_that_no_router_has() {
        let sound = proto::Greeting {
            protocol: PROTOCOL,
            router: ROUTERS_MAX - 1,
            silence_nanos: 100_000_000,
        };
        let (router, beat) = greeted(&sound).unwrap();
        assert_eq!(router, RouterId(ROUTERS_MAX - 1));
        assert_eq!(beat, Duration::from_millis(25));
        let mut foreign = sound;
        foreign.router = u64::MAX;
        let error = greeted(&foreign).unwrap_err().to_string();
        assert!(error.contains("greeting.router") && error.contains("18446744073709551615"));
        let mut hasty = sound;
        hasty.silence_nanos = 10_000_000;
        let error = greeted(&hasty).unwrap_err().to_string();
        assert!(error.contains("greeting.silence_nanos"), "{error}");
    }
}
