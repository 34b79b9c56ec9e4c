//! One request after the other, or thousands at once.
//!
//! Owns: connections, and reading an answer into a record. Never: asks again (but, once and counted,
//! where a server closed a kept connection instead of answering), or waits for its turn: the pool has
//! no limit. Invariant: whatever happens, a record says how its request ended.

use crate::connection::{Answered, Connector, connector};
use crate::record::{Failure, Outcome, Record};
use crate::sse::{self, Event, Lines};
use crate::stages::Stages;
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
/// What servers answer beside streams.
const ANSWER_BYTES_MAX: usize = 4 << 20;
const ANSWER_MAX: Duration = Duration::from_secs(60);
/// Of an error's text.
const TEXT_CHARS_MAX: usize = 300;

/// A server's address and the connections to it.
#[derive(Clone, Debug)]
pub(crate) struct Client {
    pool: Pool<Connector, Full<Bytes>>,
    /// Keeps no connection.
    fresh: Pool<Connector, Full<Bytes>>,
    /// Scheme and authority, then the path before `/v1`.
    base: String,
}

/// The client's clock: zero is the run's start.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Clock(pub(crate) Instant);

impl Clock {
    pub(crate) fn now(self) -> Time {
        Time::ZERO + self.0.elapsed()
    }
}

impl Client {
    /// Checks an address such as `http://127.0.0.1:8000`; `/v1` at its end is allowed. Who vouches for one of
    /// `https://`: the authorities of a file, or else this system's.
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
        let pool = |kept: usize| {
            Pool::builder(TokioExecutor::new())
                .pool_max_idle_per_host(kept)
                .build(connector(dial.clone()))
        };
        Ok(Self {
            pool: pool(usize::MAX),
            fresh: pool(0),
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
        (path, body): (&str, Option<&Value>),
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
            let response = self.ask(request, &mut 0).await.map_err(flat)?;
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

    /// Asks once more, on a new connection, if a kept one was closed before an answer came: servers
    /// close kept connections just when they are used again, and clients that people use do the same. It is
    /// counted before the second answer is waited for, which may take longer than anybody waits.
    async fn ask(
        &self,
        request: Request<Full<Bytes>>,
        asked_again: &mut u32,
    ) -> Result<Response<Incoming>, PoolError> {
        match self.pool.request(request.clone()).await {
            Err(error) if was_closed(&error) => {
                *asked_again += 1;
                self.fresh.request(request).await
            }
            Ok(response) => {
                Answered::note(response.extensions());
                Ok(response)
            }
            Err(error) => Err(error),
        }
    }

    /// Sends `request` and reads the answer into `record`; returns how it ended.
    pub(crate) async fn stream(
        &self,
        request: Request<Full<Bytes>>,
        (clock, record): (Clock, &mut Record),
    ) -> Outcome {
        let response = match self.ask(request, &mut record.asked_again).await {
            Ok(response) => response,
            Err(error) => {
                let kind = match error.is_connect() {
                    true => Failure::Connect,
                    false => Failure::Broken,
                };
                return failed(kind, &flat(error).to_string());
            }
        };
        if response.status() != StatusCode::OK {
            return turned_away(response).await;
        }
        let timing = response.headers().get("x-cleave-timing");
        record.stages = timing
            .and_then(|value| value.to_str().ok())
            .and_then(Stages::parse);
        answer(response.into_body(), (clock, record)).await
    }
}

/// Whether it was a kept connection that was closed instead of an answer. A new one that dies is the server's
/// failure, and asking again would hide it.
fn was_closed(error: &PoolError) -> bool {
    let kept = error.connect_info().is_some_and(Answered::over);
    let cause = error.source().and_then(|cause| cause.downcast_ref());
    kept && cause.is_some_and(hyper::Error::is_incomplete_message)
}

/// An error with its causes in one line.
fn flat(error: PoolError) -> anyhow::Error {
    let error = anyhow::Error::from(error);
    anyhow::anyhow!("{error:#}")
}

fn failed(kind: Failure, text: &str) -> Outcome {
    let text = text.chars().take(TEXT_CHARS_MAX).collect();
    Outcome::Failed { kind, text }
}

/// What an answer other than 200 says.
async fn turned_away(response: Response<Incoming>) -> Outcome {
    let status = response.status();
    let retry_after = response.headers().get(RETRY_AFTER);
    let retry_after = retry_after.and_then(|value| value.to_str().ok()?.trim().parse().ok());
    // Read to its end, so that the connection can be used again.
    let body = Limited::new(response.into_body(), ANSWER_BYTES_MAX)
        .collect()
        .await;
    if status == StatusCode::TOO_MANY_REQUESTS {
        return Outcome::Refused {
            status: status.as_u16(),
            retry_after,
        };
    }
    let bytes = body.map(|body| body.to_bytes()).unwrap_or_default();
    let text = String::from_utf8_lossy(&bytes);
    failed(Failure::Status, &format!("{status}: {}", text.trim()))
}

async fn answer(mut body: Incoming, (clock, record): (Clock, &mut Record)) -> Outcome {
    let mut lines = Lines::default();
    let (mut finished, mut ended, mut flaw) = (false, false, None);
    while let Some(frame) = body.frame().await {
        let frame = match frame {
            Ok(frame) => frame,
            Err(error) => return failed(Failure::Broken, &error.to_string()),
        };
        let Some(bytes) = frame.data_ref() else {
            continue;
        };
        let now = clock.now();
        let fed = lines.feed(bytes, |data| match sse::read(data) {
            Event::End => ended = true,
            Event::Error(text) => flaw = Some((Failure::Error, text)),
            Event::Garbled => {
                flaw = Some((Failure::Garbled, String::from_utf8_lossy(data).into_owned()));
            }
            Event::Chunk(chunk) => {
                if chunk.output {
                    record.chunk(now);
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
            return failed(Failure::Garbled, "a line without an end");
        }
        if let Some((kind, text)) = flaw.take() {
            return failed(kind, &text);
        }
        // The body's end follows; waiting for it lets the connection be used again.
    }
    match ended || finished {
        true => Outcome::Done,
        false => failed(
            Failure::Cut,
            &format!("the stream ended after {} chunks", record.chunks),
        ),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::sync::Arc;
    use std::sync::atomic::{AtomicUsize, Ordering};
    use tokio::io::{AsyncReadExt, AsyncWriteExt};
    use tokio::net::{TcpListener, TcpStream};

    /// A server that gives its connections, in the order in which they come, so many answers each, and
    /// closes them at the request after that; and the number of connections that came.
    async fn serve(answers: &'static [usize]) -> (Client, Arc<AtomicUsize>) {
        let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
        let address = listener.local_addr().unwrap();
        let client = Client::new(&format!("http://{address}"), None).unwrap();
        let came = Arc::new(AtomicUsize::new(0));
        let count = came.clone();
        tokio::spawn(async move {
            while let Ok((mut socket, _)) = listener.accept().await {
                let left = answers[count.fetch_add(1, Ordering::SeqCst)];
                for _ in 0..left {
                    hear(&mut socket).await;
                    let answer = b"HTTP/1.1 200 OK\r\ncontent-length: 2\r\n\r\n{}";
                    socket.write_all(answer).await.unwrap();
                }
                hear(&mut socket).await;
            }
        });
        (client, came)
    }

    /// Until a request's head is there; none here has a body.
    async fn hear(socket: &mut TcpStream) {
        let mut head = Vec::new();
        while !head.ends_with(b"\r\n\r\n") {
            head.push(socket.read_u8().await.unwrap());
        }
    }

    async fn asks(client: &Client) -> Result<StatusCode, String> {
        let answer = client.json(("/", None), &HeaderMap::new()).await;
        answer
            .map(|(status, _)| status)
            .map_err(|error| format!("{error:#}"))
    }

    #[tokio::test]
    async fn a_fresh_connection_that_died_was_asked_again() {
        let (client, came) = serve(&[0, 1]).await;
        let error = asks(&client).await.unwrap_err();
        assert!(error.contains("connection closed"), "{error}");
        assert_eq!(came.load(Ordering::SeqCst), 1);
    }

    #[tokio::test]
    async fn a_kept_connection_that_was_closed_is_asked_again_once() {
        let (client, came) = serve(&[1, 1]).await;
        for _ in 0..2 {
            assert_eq!(asks(&client).await, Ok(StatusCode::OK));
        }
        assert_eq!(came.load(Ordering::SeqCst), 2);

        let (client, came) = serve(&[1, 0, 1]).await;
        assert_eq!(asks(&client).await, Ok(StatusCode::OK));
        assert!(asks(&client).await.is_err(), "twice is a failure");
        assert_eq!(came.load(Ordering::SeqCst), 2);
    }

    /// How it ended, and how often it was asked again.
    async fn streamed(client: &Client) -> (Failure, u32) {
        let mut request = Request::new(Full::default());
        *request.uri_mut() = client.uri("/").unwrap();
        let mut record = Record::new(0, 0, Time::ZERO);
        let clock = Clock(Instant::now());
        let outcome = client.stream(request, (clock, &mut record)).await;
        let Outcome::Failed { kind, .. } = outcome else {
            panic!("an answer that is no stream: {outcome:?}");
        };
        (kind, record.asked_again)
    }

    #[tokio::test]
    async fn a_request_that_was_sent_twice_counted_as_one_that_was_not() {
        let (client, _) = serve(&[1, 1]).await;
        assert_eq!(streamed(&client).await, (Failure::Cut, 0));
        assert_eq!(streamed(&client).await, (Failure::Cut, 1));
        let (client, _) = serve(&[1, 0]).await;
        assert_eq!(streamed(&client).await, (Failure::Cut, 0));
        assert_eq!(streamed(&client).await, (Failure::Broken, 1));
    }
}
