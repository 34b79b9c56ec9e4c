//! Listening: connections of any client, and the limits on each.
//!
//! Owns: accepting, TLS, telling clients from peers, and every limit on connections. Never knows a
//! route. Invariant: no more connections are open than the limit says, and none is idle or stalled
//! for longer than the limits say.
//!
//! One port may have three sets of routes ([`PortRoutes`]): for connections in clear, for TLS under
//! the front's certificate, and for peers. A connection's first bytes tell which one it gets, so
//! that clients and workers need one address only; and routes that a port lacks cannot be reached.

mod connection;
mod half_close;
mod limits;
mod open_files;
mod peer_router;
#[cfg(test)]
mod tests;
mod watch;

pub use limits::HttpLimits;
pub use open_files::fit_to_open_files;
pub use peer_router::{PeerRouterClient, PeerRouterLoad, PeerRouterUnavailable};

use axum::Router;
use cleave_telemetry::{LogLimit, ServerSeries};
use cleave_tls::tokio_rustls::LazyConfigAcceptor;
use cleave_tls::{PeerProtocol, PeerTls, ServerTls, rustls};
use std::io;
use std::net::SocketAddr;
use std::sync::Arc;
use std::time::{Duration, Instant};
use tokio::net::{TcpListener, TcpStream};
use tokio::sync::{Semaphore, watch as channel};
use tokio::task::{JoinHandle, JoinSet};
use tokio::time::timeout;
use tracing::{debug, warn};
use watch::ConnectionCloseReason;

/// How long answers under way may take to leave when the server stops.
const FLUSH_MAX: Duration = Duration::from_secs(2);
/// The pause after a failed accept: the system is short of files or memory.
const ACCEPT_RETRY_PAUSE: Duration = Duration::from_millis(100);
/// The first byte of a TLS handshake; no HTTP request begins with it.
const TLS_HANDSHAKE_BYTE: u8 = 0x16;

/// The reason why a port cannot be served.
#[derive(Debug, thiserror::Error)]
pub enum ServerError {
    /// A port cannot be bound.
    #[error("cannot listen on {0}")]
    Bind(String, #[source] io::Error),
}

/// The certificates of a router, read before it listens.
#[derive(Clone, Debug, Default)]
pub struct RouterTls {
    /// The certificate for clients, if they use TLS.
    pub front: Option<ServerTls>,
    /// The certificates by which the fleet's processes know each other, if any.
    pub peers: Option<PeerTls>,
}

/// The routes behind one port.
#[derive(Clone, Debug)]
pub struct PortRoutes {
    /// For connections in clear.
    pub clear: Router,
    /// For clients that speak TLS.
    pub secure: Option<(ServerTls, Router)>,
    /// For peers, who show a certificate.
    pub peers: Option<(PeerTls, Router)>,
}

impl PortRoutes {
    /// Only routes in clear, without TLS.
    pub fn clear(clear: Router) -> Self {
        Self {
            clear,
            secure: None,
            peers: None,
        }
    }
}

/// A listener bound to `address`.
pub async fn bind(address: &str) -> Result<TcpListener, ServerError> {
    let bound = TcpListener::bind(address).await;
    bound.map_err(|error| ServerError::Bind(address.to_owned(), error))
}

/// A server that runs.
#[derive(Debug)]
pub struct HttpServer {
    pub address: SocketAddr,
    stop: channel::Sender<bool>,
    task: JoinHandle<()>,
}

/// The state that every connection of a server shares.
#[derive(Clone, Debug)]
struct HttpServerState {
    routes: Arc<PortRoutes>,
    limits: HttpLimits,
    series: ServerSeries,
    stopping: channel::Receiver<bool>,
    /// Limits the lines about clients that are no peers.
    strangers_log: Arc<LogLimit>,
}

impl HttpServer {
    /// Serves HTTP/1.1 and HTTP/2, whichever the client speaks.
    pub fn start(
        listener: TcpListener,
        faces: PortRoutes,
        limits: HttpLimits,
        series: ServerSeries,
    ) -> Result<Self, ServerError> {
        let local = listener.local_addr();
        let address = local.map_err(|error| ServerError::Bind("the listener".into(), error))?;
        let (stop, stopping) = channel::channel(false);
        let shared = HttpServerState {
            routes: Arc::new(faces),
            limits,
            series,
            stopping,
            strangers_log: Arc::default(),
        };
        Ok(Self {
            address,
            stop,
            task: tokio::spawn(accept(listener, shared)),
        })
    }

    /// Takes no new connection, lets answers leave for a moment, then closes.
    pub async fn stop(mut self) {
        self.stop.send_replace(true);
        if timeout(FLUSH_MAX, &mut self.task).await.is_err() {
            self.task.abort();
        }
    }
}

/// Accepts until it is stopped, or its server is dropped; then waits for the open connections.
async fn accept(listener: TcpListener, shared: HttpServerState) {
    let count = shared.limits.connections() as usize;
    let places = Arc::new(Semaphore::new(count.min(Semaphore::MAX_PERMITS)));
    let mut stopping = shared.stopping.clone();
    let mut connections = JoinSet::new();
    loop {
        let accepted = tokio::select! {
            accepted = listener.accept() => accepted,
            Some(_) = connections.join_next() => continue,
            _ = stopping.changed() => break,
        };
        let (stream, from) = match accepted {
            Ok(accepted) => accepted,
            Err(error) => {
                warn!(%error, "cannot accept a connection");
                tokio::time::sleep(ACCEPT_RETRY_PAUSE).await;
                continue;
            }
        };
        // Closed at once: a balancer tries another server, and open connections keep their
        // resources.
        let Ok(place) = Arc::clone(&places).try_acquire_owned() else {
            shared.series.connection_ended("full");
            continue;
        };
        let shared = shared.clone();
        connections.spawn(async move {
            shared.series.open.inc();
            let ended = shared.route_connection(stream, from).await;
            shared.series.open.dec();
            match ended {
                Ok(()) => {}
                Err(ConnectionEnd::Closed(reason)) => {
                    debug!(%from, reason = reason.label(), "connection closed by the server");
                    shared.series.connection_ended(reason.label());
                }
                Err(ConnectionEnd::Broken(error)) => debug!(%from, %error, "a connection ended"),
            }
            drop(place);
        });
    }
    drop(listener);
    while connections.join_next().await.is_some() {}
}

/// Why a connection ended before it was done.
#[derive(Debug)]
enum ConnectionEnd {
    Closed(ConnectionCloseReason),
    Broken(io::Error),
}

impl HttpServerState {
    /// Detects the kind of a connection, and serves it.
    async fn route_connection(
        &self,
        stream: TcpStream,
        from: SocketAddr,
    ) -> Result<(), ConnectionEnd> {
        // Tokens are small and must not wait for further bytes.
        if let Err(error) = stream.set_nodelay(true) {
            debug!(%error, "cannot set TCP_NODELAY");
        }
        let PortRoutes {
            clear,
            secure,
            peers,
        } = self.routes.as_ref();
        if secure.is_none() && peers.is_none() {
            return self.serve(stream, from, clear).await;
        }
        let mut byte = [0];
        let peeked = timeout(self.limits.idle_max, stream.peek(&mut byte)).await;
        let peeked = peeked.map_err(|_| ConnectionEnd::Closed(ConnectionCloseReason::Idle))?;
        match peeked.map_err(ConnectionEnd::Broken)? {
            0 => Ok(()),
            _ if byte[0] != TLS_HANDSHAKE_BYTE => self.serve(stream, from, clear).await,
            _ => self.serve_tls(stream, from).await,
        }
    }

    async fn serve_tls(&self, stream: TcpStream, from: SocketAddr) -> Result<(), ConnectionEnd> {
        let begin = LazyConfigAcceptor::new(rustls::server::Acceptor::default(), stream);
        let hello = self.within_headers_wait(begin).await?;
        let name = hello.client_hello();
        let meant = PeerTls::is_peer_name(name.server_name());
        match self.routes.as_ref() {
            PortRoutes {
                peers: Some((tls, routes)),
                ..
            } if meant => {
                let stream = self
                    .within_headers_wait(tls.accept_started(hello, PeerProtocol::Control))
                    .await;
                let stream = stream.inspect_err(|ended| {
                    if let ConnectionEnd::Broken(error) = ended {
                        if let Some(left_out) = self.strangers_log.admit(Instant::now()) {
                            warn!(%from, %error, left_out, "connection refused: the client is no peer of this fleet");
                        }
                        self.series.connection_ended("no_peer");
                    }
                })?;
                self.serve(stream, from, routes).await
            }
            PortRoutes {
                secure: Some((tls, routes)),
                ..
            } => {
                let stream = self
                    .within_headers_wait(hello.into_stream(tls.config()))
                    .await?;
                self.serve(stream, from, routes).await
            }
            PortRoutes { .. } => Err(ConnectionEnd::Broken(io::Error::other(
                "this port accepts clients without TLS only",
            ))),
        }
    }

    /// Applies the time limit on request headers to a handshake.
    async fn within_headers_wait<T>(
        &self,
        shaking: impl Future<Output = io::Result<T>>,
    ) -> Result<T, ConnectionEnd> {
        let shaken = timeout(self.limits.headers_wait_max, shaking).await;
        let shaken =
            shaken.map_err(|_| ConnectionEnd::Closed(ConnectionCloseReason::SlowHeaders))?;
        shaken.map_err(ConnectionEnd::Broken)
    }
}
