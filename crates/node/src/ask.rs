//! Asking the fleet's other routers how they are.
//!
//! Owns: the way there, which is mutual TLS where the fleet's processes know each other, and clear otherwise; and
//! what was wrong with an answer. Never: asks on a request's way. Invariant: where the fleet has certificates nobody
//! without one is asked or believed.

use axum::http::StatusCode;
use axum::http::uri::Uri;
use bytes::Bytes;
use cleave_tls::{PeerTls, Stream};
use http_body_util::{BodyExt, Empty, Limited};
use hyper_util::client::legacy::Client;
use hyper_util::client::legacy::connect::HttpConnector;
use hyper_util::rt::{TokioExecutor, TokioTimer};
use serde::Deserialize;
use std::error::Error;
use std::net::SocketAddr;
use std::time::Duration;
use tokio::time::timeout;
use tower::util::BoxCloneSyncService;
use tower::{Service, ServiceExt, service_fn};

/// How long a router may take to answer.
const ANSWER_MAX: Duration = Duration::from_secs(1);
/// An answer is a few words.
const ANSWER_BYTES_MAX: usize = 16 << 10;
/// How often a connection to a peer is tried, and how long it may take to answer: a router may be gone without a
/// word, and another one be at its address.
const PING: Duration = Duration::from_secs(2);

type Fault = Box<dyn Error + Send + Sync>;

/// What routers are asked with. Clones share connections.
#[derive(Clone, Debug)]
pub(crate) enum Asker {
    Clear(Client<HttpConnector, Empty<Bytes>>),
    Peers(Client<BoxCloneSyncService<Uri, Stream, Fault>, Empty<Bytes>>),
}

/// `GET /load`.
#[derive(Clone, Copy, Debug, Deserialize)]
pub(crate) struct Load {
    /// Sequences that are open.
    pub(crate) server_load: u64,
    /// With so many it refuses the next one.
    pub(crate) server_load_max: Option<u64>,
}

/// Why a router is not to be sent anything.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) enum Away {
    /// It says that it would serve no request.
    NotReady,
    /// It could not be asked, or what it said was no answer.
    Unasked(String),
}

impl Asker {
    pub(crate) fn new(peers: Option<PeerTls>) -> Self {
        let Some(peers) = peers else {
            let client = Client::builder(TokioExecutor::new()).build_http();
            return Self::Clear(client);
        };
        let dial = service_fn(move |uri: Uri| {
            let mut connector = peers.connector(HttpConnector::new());
            async move { connector.ready().await?.call(uri).await }
        });
        let client = Client::builder(TokioExecutor::new())
            .timer(TokioTimer::new())
            .http2_only(true)
            .http2_keep_alive_interval(PING)
            .http2_keep_alive_timeout(PING)
            .http2_keep_alive_while_idle(true)
            .build(BoxCloneSyncService::new(dial));
        Self::Peers(client)
    }

    /// How much a router has that would serve a request.
    pub(crate) async fn ready_load(&self, address: SocketAddr) -> Result<Load, Away> {
        match self.get(address, "/ready").await {
            Ok((StatusCode::OK, _)) => self.load(address).await.map_err(Away::Unasked),
            Ok((StatusCode::SERVICE_UNAVAILABLE, _)) => Err(Away::NotReady),
            Ok((status, body)) => Err(Away::Unasked(told("/ready", status, &body))),
            Err(reason) => Err(Away::Unasked(reason)),
        }
    }

    /// How much a router has, ready or not; or why that is unknown.
    pub(crate) async fn load(&self, address: SocketAddr) -> Result<Load, String> {
        let (status, body) = self.get(address, "/load").await?;
        if status != StatusCode::OK {
            return Err(told("/load", status, &body));
        }
        serde_json::from_slice(&body).map_err(|error| format!("/load is not understood: {error}"))
    }

    async fn get(&self, address: SocketAddr, path: &str) -> Result<(StatusCode, Bytes), String> {
        let late = |_| format!("{path} was not answered within {} s", ANSWER_MAX.as_secs());
        timeout(ANSWER_MAX, self.answer(address, path))
            .await
            .map_err(late)?
    }

    async fn answer(&self, address: SocketAddr, path: &str) -> Result<(StatusCode, Bytes), String> {
        let uri = |scheme: &str| {
            let uri = format!("{scheme}://{address}{path}");
            uri.parse().map_err(|error| format!("{uri}: {error}"))
        };
        let asked = match self {
            Self::Clear(client) => client.get(uri("http")?),
            Self::Peers(client) => client.get(uri("https")?),
        };
        let answer = asked.await.map_err(|error| last(&error))?;
        let status = answer.status();
        let body = Limited::new(answer.into_body(), ANSWER_BYTES_MAX);
        let body = body.collect().await.map_err(|error| last(error.as_ref()))?;
        Ok((status, body.to_bytes()))
    }
}

/// A router's answer that is none: its first line says why.
fn told(path: &str, status: StatusCode, body: &[u8]) -> String {
    let body = String::from_utf8_lossy(body);
    let line: String = body
        .lines()
        .next()
        .unwrap_or_default()
        .chars()
        .take(200)
        .collect();
    format!("{path} was answered by {status}: {line}")
}

/// The last reason of all: the others only say that there was one.
fn last(error: &(dyn Error + 'static)) -> String {
    let reasons = std::iter::successors(Some(error), |&error| error.source());
    reasons.last().map_or_else(String::new, ToString::to_string)
}
