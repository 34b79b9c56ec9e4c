//! The stream of `/ui/events`.
//!
//! Owns: the connection and where an event ends. Never: knows what an event says. Invariant: an event is
//! bounded, and a server that is silent for too long is an error.

use anyhow::{Context, bail, ensure};
use http_body_util::{BodyExt, Empty};
use hyper::body::{Bytes, Incoming};
use hyper::{Request, Uri};
use hyper_util::client::legacy::Client;
use hyper_util::rt::TokioExecutor;
use serde_json::Value;
use std::time::Duration;

/// A server says something each second.
const SILENCE_MAX: Duration = Duration::from_secs(20);

/// A thousand workers take a hundred thousand bytes.
const EVENT_BYTES_MAX: usize = 64 << 20;

/// See the module.
pub(super) struct Events {
    body: Incoming,
    rest: Vec<u8>,
}

impl Events {
    /// Asks for it.
    pub(super) async fn open(url: &str, key: Option<&str>) -> anyhow::Result<Self> {
        let base = url.trim_end_matches('/');
        let uri: Uri = format!("{base}/ui/events")
            .parse()
            .with_context(|| format!("--url {url}"))?;
        ensure!(
            uri.scheme_str() == Some("http"),
            "--url {url}: only http:// is spoken here; behind TLS use the admin port in the clear, or a browser"
        );
        let mut request = Request::get(uri).header("accept", "text/event-stream");
        if let Some(key) = key {
            request = request.header("authorization", format!("Bearer {key}"));
        }
        let request = request.body(Empty::<Bytes>::new())?;
        let client = Client::builder(TokioExecutor::new()).build_http();
        let answer = client.request(request).await;
        let answer = answer.with_context(|| format!("cannot reach {base}"))?;
        let status = answer.status();
        if status.is_success() {
            return Ok(Self {
                body: answer.into_body(),
                rest: Vec::new(),
            });
        }
        let said = answer.into_body().collect().await?.to_bytes();
        let said: Value = serde_json::from_slice(&said).unwrap_or_default();
        let message = said["error"]["message"].as_str().unwrap_or("no reason");
        bail!("{base}/ui/events: {status}: {message}")
    }

    /// The next event: its name and what it says.
    pub(super) async fn next(&mut self) -> anyhow::Result<(String, Value)> {
        loop {
            if let Some(end) = self.rest.windows(2).position(|pair| pair == b"\n\n") {
                let event: Vec<u8> = self.rest.drain(..end + 2).collect();
                return read(&event);
            }
            ensure!(self.rest.len() < EVENT_BYTES_MAX, "an event has no end");
            let frame = tokio::time::timeout(SILENCE_MAX, self.body.frame()).await;
            let frame = frame.context("the server says nothing")?;
            let frame = frame.context("the server ended the stream")??;
            if let Some(bytes) = frame.data_ref() {
                self.rest.extend_from_slice(bytes);
            }
        }
    }
}

fn read(event: &[u8]) -> anyhow::Result<(String, Value)> {
    let text = std::str::from_utf8(event).context("an event is not text")?;
    let field = |name| text.lines().find_map(|line| line.strip_prefix(name));
    let name = field("event: ").context("an event has no name")?;
    let data = field("data: ").context("an event says nothing")?;
    let data = serde_json::from_str(data).context("an event is not JSON")?;
    Ok((name.to_owned(), data))
}
