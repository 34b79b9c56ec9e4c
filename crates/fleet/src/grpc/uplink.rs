//! The worker's end: it dials every router and stays connected.
//!
//! Owns: which addresses are dialled, how soon again, and that each router is joined once. Never:
//! gives up. Invariant: the description that a router sends is checked before this worker sends
//! its registration.

use super::inbound::{InboundMessage, MessageFraming, MessageHandler, receive_all};
use super::resolve::local_address;
use super::service::StreamError;
use super::watch_names;
use super::window::{MessageWindow, send_all};
use super::{
    DIAL_MAX, DOWNWARD_BYTES_MAX, ROUTERS_MAX, SILENCE_MIN, STREAM_ITEMS_MAX, UPWARD_BYTES_MAX,
    WELCOME_MAX, heartbeat_interval, next_message, with_causes,
};
use crate::acceptor::{RouterSession, WorkerAcceptor};
use crate::connection::ToWorker;
use crate::wire::proto::fleet_client::FleetClient;
use crate::wire::{FleetWireError, PROTOCOL, decode, nanos, proto, within};
use cleave_domain::RouterId;
use cleave_tls::tokio_rustls::client::TlsStream;
use cleave_tls::{ExplainedStream, PeerProtocol, PeerTls};
use cleave_transfer::{DataAddresses, Transport, WriteGrant};
use hyper_util::rt::TokioIo;
use parking_lot::Mutex;
use std::collections::{BTreeMap, BTreeSet};
use std::io;
use std::net::SocketAddr;
use std::sync::Arc;
use std::time::Duration;
use tokio::net::TcpStream;
use tokio::sync::{mpsc, watch};
use tokio::task::{AbortHandle, JoinSet};
use tokio::time::{Instant, sleep, timeout};
use tokio_stream::wrappers::ReceiverStream;
use tonic::Streaming;
use tonic::transport::{Channel, Endpoint, Uri};
use tower::{Service, service_fn};
use tracing::{info, warn};

/// The first pause after a lost connection, and the longest.
const DIAL_PAUSES: (Duration, Duration) = (Duration::from_millis(100), Duration::from_secs(5));

/// The longest pause after a router turned this worker away: for its model or its release, which
/// change by other processes only.
const TURNED_AWAY_PAUSE_MAX: Duration = Duration::from_secs(30);

/// How long a worker that stops waits for a router to read its last messages.
pub const FAREWELL_MAX: Duration = Duration::from_secs(2);

/// The time between two lines about an address that turns this worker away, whose reason has
/// numbers that change.
const TURNED_AWAY_LINE_EVERY: Duration = Duration::from_secs(60);

/// A worker's connections to its routers.
#[derive(Debug)]
pub struct Uplink {
    /// Accepts the routers. The data address of its registration may have an unspecified host,
    /// which each connection fills in.
    pub acceptor: WorkerAcceptor,
    /// Addresses of the routers, `host:port` each.
    pub routers: Vec<String>,
    /// Certificates that authenticate routers to this worker, and this worker to them.
    pub peers: Option<PeerTls>,
    /// Shows the connections that stand.
    pub connections: watch::Sender<RouterConnections>,
}

/// The state of a worker's connections to its routers.
#[derive(Clone, Debug, Default)]
pub struct RouterConnections {
    /// Connections that stand; one ends once the router has read its last message, or
    /// [`FAREWELL_MAX`] after it.
    pub count: usize,
    /// The address of the last dial that failed since a connection stood, and the reason.
    pub last_failure: Option<String>,
}

/// The state that the connections of one worker share.
struct UplinkState {
    acceptor: WorkerAcceptor,
    peers: Option<PeerTls>,
    connections: watch::Sender<RouterConnections>,
    /// A name may resolve to several addresses of one router: it is joined once.
    routers: Mutex<BTreeSet<RouterId>>,
}

impl Uplink {
    /// Stays connected for as long as it is polled.
    pub async fn run(self) {
        let shared = Arc::new(UplinkState {
            acceptor: self.acceptor,
            peers: self.peers,
            connections: self.connections,
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
    shared: Arc<UplinkState>,
    address: SocketAddr,
    addresses: watch::Receiver<BTreeSet<SocketAddr>>,
) {
    let mut dial = DialPauses::default();
    while addresses.borrow().contains(&address) && !shared.acceptor.inbox.is_closed() {
        let ended = connect_once(&shared, address).await;
        if shared.acceptor.inbox.is_closed() {
            return;
        }
        let pause = match ended {
            // The end of a connection that stood is logged already.
            Ok(()) => dial.connection_ended(),
            Err(error) => {
                let (pause, is_news) = dial.failed(&error, Instant::now());
                // A second address of a connected router is no reason to be without one.
                if !matches!(error, UplinkError::AlreadyConnected(_)) {
                    shared.connections.send_modify(|connections| {
                        connections.last_failure = Some(format!("{address}: {error}"));
                    });
                }
                if is_news {
                    let next_dial_s = pause.as_secs_f64();
                    let error = error.to_string();
                    warn!(%address, error, next_dial_s, "not connected to the router; trying again");
                }
                pause
            }
        };
        // Spread out, so that a restarted router is not met by its whole fleet at once.
        sleep(pause.mul_f64(rand::random_range(0.5..1.0))).await;
    }
}

/// Pauses between dials of one address, and which failures are logged.
#[derive(Debug, Default)]
struct DialPauses {
    failures: u32,
    last_error: String,
    /// When a line said that the router turns this worker away.
    turned_away_at: Option<Instant>,
}

impl DialPauses {
    /// A connection stood and has ended: returns the pause before the next dial.
    fn connection_ended(&mut self) -> Duration {
        *self = Self::default();
        DIAL_PAUSES.0
    }

    /// A dial failed: returns the pause before the next one, and whether a line is to say so. A
    /// router that stays away is worth one line, not one every five seconds.
    fn failed(&mut self, error: &UplinkError, now: Instant) -> (Duration, bool) {
        let is_turned_away = matches!(error, UplinkError::Stream(StreamError::Rejected(_)));
        let (first, longest) = DIAL_PAUSES;
        let longest = if is_turned_away {
            TURNED_AWAY_PAUSE_MAX
        } else {
            longest
        };
        let pause = first.saturating_mul(2_u32.saturating_pow(self.failures));
        self.failures = self.failures.saturating_add(1);
        let text = error.to_string();
        let is_other = self.last_error != text;
        self.last_error = text;
        let is_news = if is_turned_away {
            let since = self
                .turned_away_at
                .map(|at| now.saturating_duration_since(at));
            since.is_none_or(|since| since >= TURNED_AWAY_LINE_EVERY)
        } else {
            is_other
        };
        if is_turned_away && is_news {
            self.turned_away_at = Some(now);
        }
        (pause.min(longest), is_news)
    }
}

/// One connection, from dial to end. `Ok` if it stood.
async fn connect_once(shared: &UplinkState, address: SocketAddr) -> Result<(), UplinkError> {
    let endpoint = Endpoint::from_shared(format!("http://{address}"))?
        .connect_timeout(DIAL_MAX)
        .tcp_nodelay(true)
        .initial_stream_window_size(1 << 20)
        .initial_connection_window_size(4 << 20);
    let channel = match &shared.peers {
        None => endpoint.connect().await?,
        Some(peers) => {
            endpoint
                .connect_with_connector(tls_connector(peers, address))
                .await?
        }
    };
    let (out, messages) = mpsc::channel(STREAM_ITEMS_MAX);
    let mut messages = open(channel, messages).await?;
    let (router, beat) = receive_greeting(&mut messages).await?;
    let Some(_claim) = RouterClaim::take(shared, router) else {
        return Err(UplinkError::AlreadyConnected(router));
    };
    send_hello(shared, address, &out).await?;
    receive_welcome(&mut messages).await?;
    info!(%address, %router, "connected to a router");
    let (session, mut upward) = shared
        .acceptor
        .join(router)
        .await
        .map_err(StreamError::from)?;
    shared.connections.send_modify(|connections| {
        connections.count += 1;
        connections.last_failure = None;
    });
    let window = MessageWindow::default();
    let silence = shared.acceptor.registration.silence;
    let ended = tokio::select! {
        error = send_all::<proto::Upward>(&mut upward, &out, beat, &window) => error,
        error = receive_all(&mut messages, &session, silence, &window) => error,
    };
    session.close().await;
    let disconnected = || {
        shared
            .connections
            .send_modify(|connections| connections.count -= 1);
    };
    match ended {
        StreamError::Stopped => {
            info!(%address, %router, "left a router: this process is stopping");
            // The driver's end may have been noticed by a message from the router.
            let rest = send_all::<proto::Upward>(&mut upward, &out, beat, &window);
            let _ = timeout(FAREWELL_MAX, rest).await;
            end_stream(&mut messages, out).await;
            disconnected();
            Ok(())
        }
        StreamError::NameTaken => {
            disconnected();
            Err(wait_for_name(&mut messages, &out, beat, silence)
                .await
                .into())
        }
        _ => {
            disconnected();
            warn!(%address, %router, error = %ended, "connection to a router ended");
            Ok(())
        }
    }
}

/// Ends the worker's direction of the stream, and waits until the router, which has then read all
/// of it, ends the other. A process that exits earlier looks like a failure to the router: its last
/// report, that it drains, may not arrive.
async fn end_stream(messages: &mut Streaming<proto::Downward>, out: mpsc::Sender<proto::Upward>) {
    drop(out);
    let all_read = async { while let Ok(Some(_)) = messages.message().await {} };
    // The router notices the loss by itself.
    let _ = timeout(FAREWELL_MAX, all_read).await;
}

/// The router has another worker of this name: it keeps the connection, and ends it when the name
/// is free. Says why it ended. The router is dialled again soon, and less often each time that this
/// is in vain.
async fn wait_for_name(
    messages: &mut Streaming<proto::Downward>,
    out: &mpsc::Sender<proto::Upward>,
    beat: Duration,
    silence: Duration,
) -> StreamError {
    let (_nothing, mut silent) = mpsc::channel(1);
    // Only beats travel, and beats are not counted.
    let window = MessageWindow::default();
    let listen = async {
        loop {
            if let Err(error) = next_message(messages, silence).await {
                return error;
            }
        }
    };
    let ended = tokio::select! {
        error = send_all::<proto::Upward>(&mut silent, out, beat, &window) => error,
        error = listen => error,
    };
    match ended {
        StreamError::Closed => StreamError::NameTaken,
        error => error,
    }
}

/// Dials the router at this address, who must show that it is of this fleet.
fn tls_connector(
    peers: &PeerTls,
    address: SocketAddr,
) -> impl Service<Uri, Response = SecureStream, Error = io::Error, Future: Send> + use<> {
    let peers = peers.clone();
    service_fn(move |_: Uri| {
        let peers = peers.clone();
        async move {
            let stream = TcpStream::connect(address).await?;
            stream.set_nodelay(true)?;
            let accepted = timeout(DIAL_MAX, peers.connect(stream, PeerProtocol::Control)).await;
            let slow =
                |_| io::Error::new(io::ErrorKind::TimedOut, "the TLS handshake takes too long");
            Ok(TokioIo::new(ExplainedStream(accepted.map_err(slow)??)))
        }
    })
}

type SecureStream = TokioIo<ExplainedStream<TlsStream<TcpStream>>>;

/// Why there is no connection.
#[derive(Debug, thiserror::Error)]
enum UplinkError {
    #[error("cannot connect: {}", with_causes(.0.to_string(), .0))]
    Transport(#[from] tonic::transport::Error),
    #[error("{0}")]
    Stream(#[from] StreamError),
    #[error("no answer within {0:?}: is this a Cleave router?")]
    NoAnswer(Duration),
    #[error("router {0} is connected already under another address")]
    AlreadyConnected(RouterId),
    #[error("cannot tell which address of this machine the router sees: {0}; name one")]
    Address(io::Error),
}

async fn open(
    channel: Channel,
    messages: mpsc::Receiver<proto::Upward>,
) -> Result<Streaming<proto::Downward>, UplinkError> {
    let mut client = FleetClient::new(channel)
        .max_decoding_message_size(DOWNWARD_BYTES_MAX)
        .max_encoding_message_size(UPWARD_BYTES_MAX);
    let opened = timeout(DIAL_MAX, client.join(ReceiverStream::new(messages))).await;
    let opened = opened.map_err(|_| UplinkError::NoAnswer(DIAL_MAX))?;
    Ok(opened.map_err(StreamError::from)?.into_inner())
}

/// Receives the greeting: the router's id, and the interval at which it wants heartbeats.
async fn receive_greeting(
    messages: &mut Streaming<proto::Downward>,
) -> Result<(RouterId, Duration), UplinkError> {
    use proto::downward::Kind;
    match first(messages, DIAL_MAX).await? {
        Kind::Greeting(greeting) => Ok(check_greeting(&greeting)?),
        _ => Err(StreamError::Unexpected("message in place of a greeting").into()),
    }
}

fn check_greeting(greeting: &proto::Greeting) -> Result<(RouterId, Duration), StreamError> {
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
    within("greeting.router", router, 0..=ROUTERS_MAX - 1)?;
    let silences = nanos(SILENCE_MIN)..=u64::MAX;
    within("greeting.silence_nanos", silence_nanos, silences)?;
    let silence = Duration::from_nanos(silence_nanos);
    Ok((RouterId(router), heartbeat_interval(silence)))
}

async fn send_hello(
    shared: &UplinkState,
    address: SocketAddr,
    out: &mpsc::Sender<proto::Upward>,
) -> Result<(), UplinkError> {
    let mut registration = shared.acceptor.registration_now();
    if let Ok(addresses) = DataAddresses::parse(&registration.data_address)
        && let Some(Ok(mut data)) = addresses.part(Transport::Tcp).map(str::parse::<SocketAddr>)
        && data.ip().is_unspecified()
    {
        data.set_ip(local_address(address).await.map_err(UplinkError::Address)?);
        let addresses = addresses.with(Transport::Tcp, data.to_string());
        registration.data_address = addresses.to_string();
    }
    let hello = proto::upward::Kind::Hello(proto::Hello::from(&registration));
    Ok(send(out, hello).await?)
}

async fn receive_welcome(messages: &mut Streaming<proto::Downward>) -> Result<(), UplinkError> {
    use proto::downward::Kind;
    match first(messages, WELCOME_MAX).await? {
        Kind::Welcome(proto::Welcome {}) => Ok(()),
        Kind::Rejection(proto::Rejection { reason }) => Err(StreamError::Rejected(reason).into()),
        _ => Err(StreamError::Unexpected("message in place of a welcome").into()),
    }
}

async fn first(
    messages: &mut Streaming<proto::Downward>,
    limit: Duration,
) -> Result<proto::downward::Kind, UplinkError> {
    let message = timeout(limit, messages.message()).await;
    let message = message.map_err(|_| UplinkError::NoAnswer(limit))?;
    let message = message.map_err(StreamError::from)?;
    let kind = message.ok_or(StreamError::Closed)?.kind;
    Ok(kind.ok_or(StreamError::Wire(FleetWireError::Missing("downward.kind")))?)
}

/// The one connection to a router.
struct RouterClaim<'a> {
    shared: &'a UplinkState,
    router: RouterId,
}

impl<'a> RouterClaim<'a> {
    fn take(shared: &'a UplinkState, router: RouterId) -> Option<Self> {
        let mut routers = shared.routers.lock();
        routers.insert(router).then_some(Self { shared, router })
    }
}

impl Drop for RouterClaim<'_> {
    fn drop(&mut self) {
        let routers = self.shared.routers.lock();
        let mut routers = routers;
        routers.remove(&self.router);
    }
}

async fn send(
    out: &mpsc::Sender<proto::Upward>,
    kind: proto::upward::Kind,
) -> Result<(), StreamError> {
    let message = proto::Upward { kind: Some(kind) };
    out.send(message).await.map_err(|_| StreamError::Closed)
}

impl MessageHandler<proto::Downward> for RouterSession {
    async fn handle(&self, content: ToWorker) -> Result<(), StreamError> {
        let is_last = matches!(content, ToWorker::NameTaken { .. });
        self.receive(content).await?;
        if is_last {
            return Err(StreamError::NameTaken);
        }
        Ok(())
    }
}

impl InboundMessage for proto::Downward {
    type Content = ToWorker;

    fn framing(self) -> MessageFraming<Self> {
        use proto::downward::Kind;
        match self.kind {
            Some(Kind::Beat(beat)) => MessageFraming::Beat(beat),
            Some(Kind::Batch(batch)) => MessageFraming::Batch(batch.messages),
            _ => MessageFraming::One(self),
        }
    }

    fn content(self) -> Result<ToWorker, StreamError> {
        use proto::downward::Kind;
        match self.kind {
            Some(Kind::Order(order)) => {
                let (order, context) = decode("order", &order)?;
                Ok(ToWorker::Order { order, context })
            }
            Some(Kind::Peer(peer)) => {
                let (worker, data_address) = decode("peer", &peer)?;
                Ok(ToWorker::Peer {
                    worker,
                    data_address,
                })
            }
            Some(Kind::Pass(pass)) => {
                let (handoff, grant) = decode("pass", &pass)?;
                let grant = WriteGrant(grant);
                Ok(ToWorker::Grant { handoff, grant })
            }
            Some(Kind::Adapter(adapter)) => {
                let ((request, change), command) = decode("adapter", &adapter)?;
                Ok(ToWorker::Adapter {
                    request,
                    change,
                    command,
                })
            }
            Some(Kind::PeerGone(worker)) => Ok(ToWorker::PeerGone {
                worker: decode("peer_gone", &worker)?,
            }),
            Some(Kind::NameTaken(data_address)) => Ok(ToWorker::NameTaken {
                data_address: decode("name_taken", &data_address)?,
            }),
            Some(Kind::Greeting(_) | Kind::Welcome(_) | Kind::Rejection(_)) => {
                Err(StreamError::Unexpected("greeting in mid-stream"))
            }
            Some(Kind::Beat(_) | Kind::Batch(_)) => {
                Err(StreamError::Unexpected("beat or batch within a batch"))
            }
            None => Err(FleetWireError::Missing("downward.kind").into()),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_worker_that_is_turned_away_backs_off_with_a_line_a_minute() {
        let mut dial = DialPauses::default();
        let mut now = Instant::now();
        let began = now;
        let (mut dials, mut lines) = (0, 0);
        while now < began + Duration::from_secs(600) {
            // The reason has a number that changes.
            let reason = format!("this router serves another model (requests open: {dials})");
            let error = UplinkError::Stream(StreamError::Rejected(reason));
            let (pause, is_news) = dial.failed(&error, now);
            assert!(pause <= TURNED_AWAY_PAUSE_MAX);
            (dials, lines) = (dials + 1, lines + u32::from(is_news));
            now += pause;
        }
        assert!((20..=30).contains(&dials), "{dials} dials in ten minutes");
        assert!((6..=10).contains(&lines), "{lines} lines in ten minutes");
        // A router that is away is dialled every five seconds, with a line for each other reason.
        let away = UplinkError::NoAnswer(DIAL_MAX);
        let outcomes: Vec<_> = (0..9).map(|_| dial.failed(&away, now)).collect();
        assert_eq!(outcomes[0], (DIAL_PAUSES.1, true));
        assert!(
            outcomes[1..]
                .iter()
                .all(|one| *one == (DIAL_PAUSES.1, false))
        );
        assert_eq!(dial.connection_ended(), DIAL_PAUSES.0);
        assert_eq!(dial.failed(&away, now), (DIAL_PAUSES.0, true));
    }

    #[test]
    fn a_greeting_out_of_bounds_is_refused() {
        let sound = proto::Greeting {
            protocol: PROTOCOL,
            router: ROUTERS_MAX - 1,
            silence_nanos: 100_000_000,
        };
        let (router, beat) = check_greeting(&sound).unwrap();
        assert_eq!(router, RouterId(ROUTERS_MAX - 1));
        assert_eq!(beat, Duration::from_millis(25));
        let mut foreign = sound;
        foreign.router = u64::MAX;
        let error = check_greeting(&foreign).unwrap_err().to_string();
        assert!(error.contains("greeting.router") && error.contains("18446744073709551615"));
        let mut hasty = sound;
        hasty.silence_nanos = 10_000_000;
        let error = check_greeting(&hasty).unwrap_err().to_string();
        assert!(error.contains("greeting.silence_nanos"), "{error}");
    }
}
