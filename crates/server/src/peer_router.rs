//! Asks the fleet's other routers for their readiness, their load and stored responses.
//!
//! Owns: the connection, by mutual TLS where the fleet has certificates and in clear otherwise, and
//! the reason why an answer is unusable. Never: knows what an answer to [`PeerRouterClient::ask`]
//! means. Invariant: where the fleet has certificates, a router without one is neither asked nor
//! believed, and every wait ends.

use axum::http::uri::Uri;
use axum::http::{HeaderMap, Method, Request, StatusCode};
use bytes::Bytes;
use cleave_tls::{HttpTlsStream, PeerTls};
use http_body_util::{BodyExt, Empty, Limited};
use hyper_util::client::legacy::Client;
use hyper_util::client::legacy::connect::HttpConnector;
use hyper_util::rt::{TokioExecutor, TokioTimer};
use serde::Deserialize;
use std::collections::BTreeMap;
use std::error::Error;
use std::net::SocketAddr;
use std::time::Duration;
use tokio::time::timeout;
use tower::util::BoxCloneSyncService;
use tower::{Service, ServiceExt, service_fn};

/// How long a router may take to answer.
const ANSWER_MAX: Duration = Duration::from_secs(1);
/// How long a router may take to send a stored conversation.
const LONG_ANSWER_MAX: Duration = Duration::from_secs(3);
/// Limit on the length of an answer to the two questions; real answers are short.
const ANSWER_BYTES_MAX: usize = 16 << 10;
/// How often a connection to a peer is probed, and how long it may take to answer: a router may be
/// gone without closing, and another one may have its address.
const PING: Duration = Duration::from_secs(2);

type DialError = Box<dyn Error + Send + Sync>;

/// The HTTP client for other routers. Clones share connections.
#[derive(Clone, Debug)]
pub enum PeerRouterClient {
    Clear(Client<HttpConnector, Empty<Bytes>>),
    Peers(Client<BoxCloneSyncService<Uri, HttpTlsStream, DialError>, Empty<Bytes>>),
}

/// The answer to `GET /load`.
#[derive(Clone, Debug, Deserialize)]
pub struct PeerRouterLoad {
    /// Sequences that are open.
    pub server_load: u64,
    /// The limit on open sequences, if there is one.
    pub server_load_max: Option<u64>,
    /// Sequences that are open, of each model.
    #[serde(default)]
    pub models: BTreeMap<String, u64>,
}

/// The reason why a router gets no requests.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum PeerRouterUnavailable {
    /// It reports that it is not ready.
    NotReady,
    /// It could not be asked, or its answer was not understood.
    NoAnswer(String),
}

impl PeerRouterClient {
    pub fn new(peers: Option<PeerTls>) -> Self {
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

    /// The load of a router that is ready.
    pub async fn ready_load(
        &self,
        address: SocketAddr,
    ) -> Result<PeerRouterLoad, PeerRouterUnavailable> {
        match self.get(address, "/ready").await {
            Ok((StatusCode::OK, _)) => self
                .load(address)
                .await
                .map_err(PeerRouterUnavailable::NoAnswer),
            Ok((StatusCode::SERVICE_UNAVAILABLE, _)) => Err(PeerRouterUnavailable::NotReady),
            Ok((status, body)) => Err(PeerRouterUnavailable::NoAnswer(unexpected_answer(
                "/ready", status, &body,
            ))),
            Err(reason) => Err(PeerRouterUnavailable::NoAnswer(reason)),
        }
    }

    /// The load of a router, ready or not; or why it is unknown.
    pub async fn load(&self, address: SocketAddr) -> Result<PeerRouterLoad, String> {
        let (status, body) = self.get(address, "/load").await?;
        if status != StatusCode::OK {
            return Err(unexpected_answer("/load", status, &body));
        }
        serde_json::from_slice(&body)
            .map_err(|error| format!("cannot parse the answer to /load: {error}"))
    }

    /// The answer of a router to a request without a body, of `bytes_max` bytes at most.
    pub async fn ask(
        &self,
        address: SocketAddr,
        method: &Method,
        path: &str,
        headers: &HeaderMap,
        bytes_max: usize,
    ) -> Result<(StatusCode, Bytes), String> {
        let answer = self.fetch(address, method, path, headers, bytes_max);
        in_time(LONG_ANSWER_MAX, path, answer).await
    }

    async fn get(&self, address: SocketAddr, path: &str) -> Result<(StatusCode, Bytes), String> {
        let headers = HeaderMap::new();
        let answer = self.fetch(address, &Method::GET, path, &headers, ANSWER_BYTES_MAX);
        in_time(ANSWER_MAX, path, answer).await
    }

    async fn fetch(
        &self,
        address: SocketAddr,
        method: &Method,
        path: &str,
        headers: &HeaderMap,
        bytes_max: usize,
    ) -> Result<(StatusCode, Bytes), String> {
        let request = |scheme: &str| {
            let uri = format!("{scheme}://{address}{path}");
            let request = Request::builder().method(method).uri(&uri);
            let request = request.body(Empty::new());
            let mut request = request.map_err(|error| format!("{uri}: {error}"))?;
            request.headers_mut().extend(headers.clone());
            Ok::<_, String>(request)
        };
        let answered = match self {
            Self::Clear(client) => client.request(request("http")?),
            Self::Peers(client) => client.request(request("https")?),
        };
        let answer = answered.await.map_err(|error| root_cause(&error))?;
        let status = answer.status();
        let body = Limited::new(answer.into_body(), bytes_max);
        let body = body
            .collect()
            .await
            .map_err(|error| root_cause(error.as_ref()))?;
        Ok((status, body.to_bytes()))
    }
}

/// The answer, if it comes within the limit.
async fn in_time<T>(
    limit: Duration,
    path: &str,
    answer: impl Future<Output = Result<T, String>>,
) -> Result<T, String> {
    let answered = timeout(limit, answer).await;
    let late = |_| format!("{path} was not answered within {} s", limit.as_secs());
    answered.map_err(late)?
}

/// Describes an unexpected answer by its status and first line.
fn unexpected_answer(path: &str, status: StatusCode, body: &[u8]) -> String {
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

/// The innermost cause: the outer ones only say that there is one.
fn root_cause(error: &(dyn Error + 'static)) -> String {
    let reasons = std::iter::successors(Some(error), |&error| error.source());
    reasons.last().map_or_else(String::new, ToString::to_string)
}
