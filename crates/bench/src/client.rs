//! The HTTP client, for one request or thousands at once.
//!
//! Owns: connections, and reading an answer into a record. Never: resends a request (except once
//! and counted, when a server closed a kept connection instead of answering), or queues it: the
//! pool has no limit. Invariant: a record always says how its request ended.

use crate::connection::{AnsweredFlag, TrackedConnector, connector};
use crate::record::{RequestFailure, RequestMeasurement, RequestOutcome};
use crate::sse::{self, SseEvent, SseLines};
use crate::stages::StageTimes;
use anyhow::{Context, bail, ensure};
use bytes::Bytes;
use cleave_domain::Time;
use http_body_util::{BodyExt, Full, Limited};
use hyper::body::Incoming;
use hyper::header::{HeaderMap, RETRY_AFTER};
use hyper::{Method, Request, Response, StatusCode, Uri};
use hyper_util::client::legacy::connect::HttpConnector;
use hyper_util::client::legacy::{Client as Pool, Error as PoolError};
use hyper_util::rt::TokioExecutor;
use serde_json::Value;
use std::error::Error as _;
use std::path::Path;
use std::time::{Duration, Instant};

const CONNECT_MAX: Duration = Duration::from_secs(10);
/// Largest answer that is not a stream.
const ANSWER_BYTES_MAX: usize = 4 << 20;
const ANSWER_MAX: Duration = Duration::from_secs(60);
/// Longest error text that is kept.
const TEXT_CHARS_MAX: usize = 300;

/// A server's address and the connections to it.
#[derive(Clone, Debug)]
pub(crate) struct BenchClient {
    kept_connections: Pool<TrackedConnector, Full<Bytes>>,
    /// Pool that keeps no connection.
    fresh_connections: Pool<TrackedConnector, Full<Bytes>>,
    /// Scheme, authority, and the path before `/v1`.
    base: String,
}

/// The client's clock; zero is the run's start.
#[derive(Clone, Copy, Debug)]
pub(crate) struct RunClock(pub(crate) Instant);

impl RunClock {
    pub(crate) fn now(self) -> Time {
        Time::ZERO + self.0.elapsed()
    }
}

impl BenchClient {
    /// Checks an address such as `http://127.0.0.1:8000`; `/v1` at its end is allowed. Certificates
    /// of `https://` are verified by the authorities in the file, or else by the system's.
    pub(crate) fn new(url: &str, authorities: Option<&Path>) -> anyhow::Result<Self> {
        let uri: Uri = url.parse().with_context(|| format!("URL `{url}`"))?;
        let scheme = match uri.scheme_str() {
            Some(scheme @ ("http" | "https")) => scheme,
            _ => bail!("URL `{url}`: expected http://host:port or https://host:port"),
        };
        ensure!(uri.query().is_none(), "URL `{url}` has a query");
        let authority = uri.authority().context("URL without a host")?;
        let path = uri.path().trim_end_matches('/');
        let path = path.strip_suffix("/v1").unwrap_or(path);
        let mut plain = HttpConnector::new();
        plain.set_nodelay(true);
        plain.set_connect_timeout(Some(CONNECT_MAX));
        let dial = cleave_tls::connector(plain, &uri, authorities)?;
        let pool = |idle_max: usize| {
            Pool::builder(TokioExecutor::new())
                .pool_max_idle_per_host(idle_max)
                .build(connector(dial.clone()))
        };
        Ok(Self {
            kept_connections: pool(usize::MAX),
            fresh_connections: pool(0),
            base: format!("{scheme}://{authority}{path}"),
        })
    }

    pub(crate) fn uri(&self, path: &str) -> anyhow::Result<Uri> {
        let uri = format!("{}{path}", self.base);
        uri.parse().with_context(|| format!("URL `{uri}`"))
    }

    /// A JSON answer, whatever its status.
    pub(crate) async fn json(
        &self,
        path: &str,
        body: Option<&Value>,
        headers: &HeaderMap,
    ) -> anyhow::Result<(StatusCode, Value)> {
        let (method, body) = match body {
            Some(body) => (Method::POST, Bytes::from(body.to_string())),
            None => (Method::GET, Bytes::new()),
        };
        let mut request = Request::new(Full::new(body));
        *request.method_mut() = method;
        *request.uri_mut() = self.uri(path)?;
        *request.headers_mut() = headers.clone();
        let answer = async {
            let response = self
                .send_with_resend(request, &mut 0)
                .await
                .map_err(flatten_error)?;
            let status = response.status();
            let body = Limited::new(response.into_body(), ANSWER_BYTES_MAX)
                .collect()
                .await;
            let bytes = body.map_err(|error| anyhow::anyhow!("{error}"))?.to_bytes();
            let text = || Value::from(String::from_utf8_lossy(&bytes).into_owned());
            let value = serde_json::from_slice(&bytes).unwrap_or_else(|_| text());
            anyhow::Ok((status, value))
        };
        let answer = tokio::time::timeout(ANSWER_MAX, answer).await;
        answer
            .context("no answer within a minute")
            .flatten()
            .with_context(|| format!("{}{path}", self.base))
    }

    /// Resends once, on a new connection, if a kept one was closed before an answer came: servers
    /// close idle connections just when they are used again, and common clients resend too. The
    /// resend is counted before its answer is awaited, since the caller may time out first.
    async fn send_with_resend(
        &self,
        request: Request<Full<Bytes>>,
        resent_count: &mut u32,
    ) -> Result<Response<Incoming>, PoolError> {
        match self.kept_connections.request(request.clone()).await {
            Err(error) if kept_connection_closed(&error) => {
                *resent_count += 1;
                self.fresh_connections.request(request).await
            }
            Ok(response) => {
                AnsweredFlag::mark(response.extensions());
                Ok(response)
            }
            Err(error) => Err(error),
        }
    }

    /// Sends `request` and reads the answer into `record`; returns how it ended.
    pub(crate) async fn stream(
        &self,
        request: Request<Full<Bytes>>,
        clock: RunClock,
        record: &mut RequestMeasurement,
    ) -> RequestOutcome {
        let response = match self
            .send_with_resend(request, &mut record.resent_count)
            .await
        {
            Ok(response) => response,
            Err(error) => {
                let kind = if error.is_connect() {
                    RequestFailure::Connect
                } else {
                    RequestFailure::Broken
                };
                return failed(kind, &flatten_error(error).to_string());
            }
        };
        if response.status() != StatusCode::OK {
            return read_refusal(response).await;
        }
        let timing = response.headers().get("x-cleave-timing");
        record.stages = timing
            .and_then(|value| value.to_str().ok())
            .and_then(StageTimes::parse);
        read_stream(response.into_body(), clock, record).await
    }
}

/// Whether a kept connection was closed instead of answering. A new connection that dies is the
/// server's failure, and resending would hide it.
fn kept_connection_closed(error: &PoolError) -> bool {
    let was_reused = error.connect_info().is_some_and(AnsweredFlag::is_set_on);
    let cause = error.source().and_then(|cause| cause.downcast_ref());
    was_reused && cause.is_some_and(hyper::Error::is_incomplete_message)
}

/// An error with its causes in one line.
fn flatten_error(error: PoolError) -> anyhow::Error {
    let error = anyhow::Error::from(error);
    anyhow::anyhow!("{error:#}")
}

fn failed(kind: RequestFailure, text: &str) -> RequestOutcome {
    let text = text.chars().take(TEXT_CHARS_MAX).collect();
    RequestOutcome::Failed { kind, text }
}

/// The outcome of an answer other than 200.
async fn read_refusal(response: Response<Incoming>) -> RequestOutcome {
    let status = response.status();
    let retry_after = response.headers().get(RETRY_AFTER);
    let retry_after = retry_after.and_then(|value| value.to_str().ok()?.trim().parse().ok());
    // Reads the body to its end, so that the connection can be used again.
    let body = Limited::new(response.into_body(), ANSWER_BYTES_MAX)
        .collect()
        .await;
    if status == StatusCode::TOO_MANY_REQUESTS {
        return RequestOutcome::Refused {
            status: status.as_u16(),
            retry_after,
        };
    }
    let bytes = body.map(|body| body.to_bytes()).unwrap_or_default();
    let text = String::from_utf8_lossy(&bytes);
    failed(
        RequestFailure::Status,
        &format!("{status}: {}", text.trim()),
    )
}

async fn read_stream(
    mut body: Incoming,
    clock: RunClock,
    record: &mut RequestMeasurement,
) -> RequestOutcome {
    let mut lines = SseLines::default();
    let (mut finished, mut ended, mut failure) = (false, false, None);
    while let Some(frame) = body.frame().await {
        let frame = match frame {
            Ok(frame) => frame,
            Err(error) => return failed(RequestFailure::Broken, &error.to_string()),
        };
        let Some(bytes) = frame.data_ref() else {
            continue;
        };
        let now = clock.now();
        let fed = lines.feed(bytes, |data| match sse::parse_event(data) {
            SseEvent::End => ended = true,
            SseEvent::Error(text) => failure = Some((RequestFailure::Error, text)),
            SseEvent::Malformed => {
                failure = Some((
                    RequestFailure::Garbled,
                    String::from_utf8_lossy(data).into_owned(),
                ));
            }
            SseEvent::Chunk(chunk) => {
                if chunk.output {
                    record.receive_chunk(now);
                }
                finished |= chunk.finished;
                if let Some(usage) = chunk.usage {
                    record.usage = Some(usage.length);
                    record.cached = usage.cached;
                }
                record.stages = chunk.stages.or(record.stages);
            }
        });
        if fed.is_err() {
            return failed(RequestFailure::Garbled, "a line longer than the limit");
        }
        if let Some((kind, text)) = failure.take() {
            return failed(kind, &text);
        }
        // Reading on to the body's end lets the connection be used again.
    }
    if ended || finished {
        RequestOutcome::Done
    } else {
        failed(
            RequestFailure::Cut,
            &format!("the stream ended after {} chunks", record.chunks),
        )
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::sync::Arc;
    use std::sync::atomic::{AtomicUsize, Ordering};
    use tokio::io::{AsyncReadExt, AsyncWriteExt};
    use tokio::net::{TcpListener, TcpStream};

    /// A server that answers a given number of requests on each connection, in the order of the
    /// connections, and closes it at the next request; also gives the number of connections.
    async fn serve(answers: &'static [usize]) -> (BenchClient, Arc<AtomicUsize>) {
        let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
        let address = listener.local_addr().unwrap();
        let client = BenchClient::new(&format!("http://{address}"), None).unwrap();
        let connections_count = Arc::new(AtomicUsize::new(0));
        let count = connections_count.clone();
        tokio::spawn(async move {
            while let Ok((mut socket, _)) = listener.accept().await {
                let left = answers[count.fetch_add(1, Ordering::SeqCst)];
                for _ in 0..left {
                    read_head(&mut socket).await;
                    let answer = b"HTTP/1.1 200 OK\r\ncontent-length: 2\r\n\r\n{}";
                    socket.write_all(answer).await.unwrap();
                }
                read_head(&mut socket).await;
            }
        });
        (client, connections_count)
    }

    /// Reads a request's head; these requests have no body.
    async fn read_head(socket: &mut TcpStream) {
        let mut head = Vec::new();
        while !head.ends_with(b"\r\n\r\n") {
            head.push(socket.read_u8().await.unwrap());
        }
    }

    async fn request_status(client: &BenchClient) -> Result<StatusCode, String> {
        let answer = client.json("/", None, &HeaderMap::new()).await;
        answer
            .map(|(status, _)| status)
            .map_err(|error| format!("{error:#}"))
    }

    #[tokio::test]
    async fn a_request_on_a_fresh_connection_is_not_resent() {
        let (client, connections_count) = serve(&[0, 1]).await;
        let error = request_status(&client).await.unwrap_err();
        assert!(error.contains("connection closed"), "{error}");
        assert_eq!(connections_count.load(Ordering::SeqCst), 1);
    }

    #[tokio::test]
    async fn a_request_on_a_closed_kept_connection_is_resent_once() {
        let (client, connections_count) = serve(&[1, 1]).await;
        for _ in 0..2 {
            assert_eq!(request_status(&client).await, Ok(StatusCode::OK));
        }
        assert_eq!(connections_count.load(Ordering::SeqCst), 2);

        let (client, connections_count) = serve(&[1, 0, 1]).await;
        assert_eq!(request_status(&client).await, Ok(StatusCode::OK));
        assert!(request_status(&client).await.is_err(), "twice is a failure");
        assert_eq!(connections_count.load(Ordering::SeqCst), 2);
    }

    /// How the request failed, and how often it was resent.
    async fn streamed(client: &BenchClient) -> (RequestFailure, u32) {
        let mut request = Request::new(Full::default());
        *request.uri_mut() = client.uri("/").unwrap();
        let mut record = RequestMeasurement::new(0, 0, Time::ZERO);
        let clock = RunClock(Instant::now());
        let outcome = client.stream(request, clock, &mut record).await;
        let RequestOutcome::Failed { kind, .. } = outcome else {
            panic!("an answer that is no stream: {outcome:?}");
        };
        (kind, record.resent_count)
    }

    #[tokio::test]
    async fn resent_requests_are_counted() {
        let (client, _) = serve(&[1, 1]).await;
        assert_eq!(streamed(&client).await, (RequestFailure::Cut, 0));
        assert_eq!(streamed(&client).await, (RequestFailure::Cut, 1));
        let (client, _) = serve(&[1, 0]).await;
        assert_eq!(streamed(&client).await, (RequestFailure::Cut, 0));
        assert_eq!(streamed(&client).await, (RequestFailure::Broken, 1));
    }
}
