//! Listening: connections from strangers, and what each may cost.
//!
//! Owns: accepting, TLS, who is a client and who a peer, and every limit on connections. Never: knows a
//! route. Invariant: no more connections stand than the limit says, and none stands that neither does
//! nor waits for anything for longer than the limits say.
//!
//! One port may have three faces ([`Faces`]): what is said in clear, what is said under the front's
//! certificate, and what peers say. A connection's first bytes tell which it is, so clients and workers
//! still need one address only; and a face that is not there cannot be reached.

mod connection;
mod files;
mod limits;
#[cfg(test)]
mod tests;
mod watch;

pub(crate) use files::fit;
pub use limits::HttpLimits;

use crate::NodeError;
use crate::telemetry::ServerSeries;
use axum::Router;
use cleave_tls::tokio_rustls::LazyConfigAcceptor;
use cleave_tls::{FrontTls, Line, PeerTls, rustls};
use std::io;
use std::net::SocketAddr;
use std::sync::Arc;
use std::time::Duration;
use tokio::net::{TcpListener, TcpStream};
use tokio::sync::{Semaphore, watch as channel};
use tokio::task::{JoinHandle, JoinSet};
use tokio::time::timeout;
use tracing::{debug, warn};
use watch::Reason;

/// How long answers under way may take to leave when the server stops.
const FLUSH_MAX: Duration = Duration::from_secs(2);
/// The pause after the system would not hand out a connection: it is short of something.
const SHORTAGE: Duration = Duration::from_millis(100);
/// The first byte of a TLS handshake, which no request begins with.
const HANDSHAKE: u8 = 0x16;

/// What there is behind one port.
#[derive(Clone, Debug)]
pub(crate) struct Faces {
    /// For what comes in clear.
    pub(crate) clear: Router,
    /// For clients that speak TLS.
    pub(crate) secure: Option<(FrontTls, Router)>,
    /// For peers, who show a certificate.
    pub(crate) peers: Option<(PeerTls, Router)>,
}

impl Faces {
    /// The one that there is without TLS.
    pub(crate) fn clear(clear: Router) -> Self {
        Self {
            clear,
            secure: None,
            peers: None,
        }
    }
}

/// A listener bound to `address`.
pub(crate) async fn bind(address: &str) -> Result<TcpListener, NodeError> {
    let bound = TcpListener::bind(address).await;
    bound.map_err(|error| NodeError::Bind(address.to_owned(), error))
}

/// A server that runs.
#[derive(Debug)]
pub(crate) struct Server {
    pub(crate) address: SocketAddr,
    stop: channel::Sender<bool>,
    task: JoinHandle<()>,
}

/// What every connection of a server shares.
#[derive(Clone, Debug)]
struct Shared {
    faces: Arc<Faces>,
    limits: HttpLimits,
    series: ServerSeries,
    stopping: channel::Receiver<bool>,
}

impl Server {
    /// Serves HTTP/1.1 and HTTP/2, whichever the client speaks.
    pub(crate) fn start(
        listener: TcpListener,
        faces: Faces,
        (limits, series): (HttpLimits, ServerSeries),
    ) -> Result<Self, NodeError> {
        let local = listener.local_addr();
        let address = local.map_err(|error| NodeError::Bind("the listener".into(), error))?;
        let (stop, stopping) = channel::channel(false);
        let shared = Shared {
            faces: Arc::new(faces),
            limits,
            series,
            stopping,
        };
        Ok(Self {
            address,
            stop,
            task: tokio::spawn(accept(listener, shared)),
        })
    }

    /// Takes no new connection, lets answers leave for a moment, then closes.
    pub(crate) async fn stop(mut self) {
        self.stop.send_replace(true);
        if timeout(FLUSH_MAX, &mut self.task).await.is_err() {
            self.task.abort();
        }
    }
}

/// Until it is told to stop, or its server is dropped; then waits for the connections that stand.
async fn accept(listener: TcpListener, shared: Shared) {
    let count = shared.limits.connections_max as usize;
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
                warn!(%error, "cannot take a connection");
                tokio::time::sleep(SHORTAGE).await;
                continue;
            }
        };
        // Closed at once: a balancer tries another server, and those who are here keep what they have.
        let Ok(place) = Arc::clone(&places).try_acquire_owned() else {
            shared.series.let_go("full");
            continue;
        };
        let shared = shared.clone();
        connections.spawn(async move {
            shared.series.open.inc();
            let ended = shared.greet(stream, from).await;
            shared.series.open.dec();
            match ended {
                Ok(()) => {}
                Err(Ended::LetGo(reason)) => {
                    debug!(%from, ?reason, "a connection was let go");
                    shared.series.let_go(reason.word());
                }
                Err(Ended::Broken(error)) => debug!(%from, %error, "a connection ended"),
            }
            drop(place);
        });
    }
    drop(listener);
    while connections.join_next().await.is_some() {}
}

/// Why a connection ended before it was done.
#[derive(Debug)]
enum Ended {
    LetGo(Reason),
    Broken(io::Error),
}

impl Shared {
    /// Finds out who it is, and serves them.
    async fn greet(&self, stream: TcpStream, from: SocketAddr) -> Result<(), Ended> {
        // Tokens are small and wait for nothing.
        if let Err(error) = stream.set_nodelay(true) {
            debug!(%error, "cannot set TCP_NODELAY");
        }
        let Faces {
            clear,
            secure,
            peers,
        } = self.faces.as_ref();
        if secure.is_none() && peers.is_none() {
            return self.serve(stream, from, clear).await;
        }
        let mut byte = [0];
        let peeked = timeout(self.limits.idle_max, stream.peek(&mut byte)).await;
        let peeked = peeked.map_err(|_| Ended::LetGo(Reason::Idle))?;
        match peeked.map_err(Ended::Broken)? {
            0 => Ok(()),
            _ if byte[0] != HANDSHAKE => self.serve(stream, from, clear).await,
            _ => self.shake_hands(stream, from).await,
        }
    }

    async fn shake_hands(&self, stream: TcpStream, from: SocketAddr) -> Result<(), Ended> {
        let begin = LazyConfigAcceptor::new(rustls::server::Acceptor::default(), stream);
        let hello = self.in_time(begin).await?;
        let name = hello.client_hello();
        let meant = PeerTls::is_meant(name.server_name());
        match self.faces.as_ref() {
            Faces {
                peers: Some((tls, routes)),
                ..
            } if meant => {
                let stream = self.in_time(tls.take(hello, Line::Control)).await;
                let stream = stream.inspect_err(|ended| {
                    if let Ended::Broken(error) = ended {
                        warn!(%from, %error, "turned away: no peer of this fleet");
                        self.series.let_go("no_peer");
                    }
                })?;
                self.serve(stream, from, routes).await
            }
            Faces {
                secure: Some((tls, routes)),
                ..
            } => {
                let stream = self.in_time(hello.into_stream(tls.config())).await?;
                self.serve(stream, from, routes).await
            }
            Faces { .. } => Err(Ended::Broken(io::Error::other(
                "clients speak to this port in clear",
            ))),
        }
    }

    /// A handshake is a request's headers, as far as a slow client goes.
    async fn in_time<T>(&self, shaking: impl Future<Output = io::Result<T>>) -> Result<T, Ended> {
        let shaken = timeout(self.limits.headers_wait_max, shaking).await;
        let shaken = shaken.map_err(|_| Ended::LetGo(Reason::SlowHeaders))?;
        shaken.map_err(Ended::Broken)
    }
}
