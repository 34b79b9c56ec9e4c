//! The stream of `/ui/events`.
//!
//! Owns: the connection and where an event ends. Never: knows what an event says. Invariant: an event is
//! bounded, and a server that is silent for too long is an error.

use crate::page::Pages;
use anyhow::{Context, ensure};
use http_body_util::BodyExt;
use hyper::body::Incoming;
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
    pub(super) async fn open(pages: &Pages) -> anyhow::Result<Self> {
        Ok(Self {
            body: pages.get("/ui/events", "text/event-stream").await?,
            rest: Vec::new(),
        })
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
