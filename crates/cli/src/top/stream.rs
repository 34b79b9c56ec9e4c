//! The stream of `/ui/events`.
//!
//! Owns: the connection, and the division into events. Never: knows the contents of an event.
//! Invariant: the size of an event is limited, and a server that is silent for too long is an
//! error.

use crate::server_client::{PageRefusal, ServerClient};
use anyhow::{Context, ensure};
use http_body_util::BodyExt;
use hyper::StatusCode;
use hyper::body::Incoming;
use serde_json::Value;
use std::time::Duration;

/// Limit of silence; a server sends an event each second.
const SILENCE_MAX: Duration = Duration::from_secs(20);

/// Limit of an event; a thousand workers take about a hundred thousand bytes.
const EVENT_BYTES_MAX: usize = 64 << 20;

/// The stream of events.
pub(super) struct UiEvents {
    body: Incoming,
    rest: Vec<u8>,
}

impl UiEvents {
    pub(super) async fn open(pages: &ServerClient) -> anyhow::Result<Self> {
        let opened = pages.get("/ui/events", "text/event-stream").await;
        let body = opened.map_err(|error| {
            let refusal = error.downcast_ref::<PageRefusal>();
            if refusal.is_some_and(|refusal| refusal.status == StatusCode::UNAUTHORIZED) {
                error.context(
                    "the server asks for its operators' key: give it by --admin-key-file or \
                     CLEAVE_ADMIN_KEY",
                )
            } else {
                error
            }
        })?;
        Ok(Self {
            body,
            rest: Vec::new(),
        })
    }

    /// Returns the next event: its name and its data.
    pub(super) async fn next(&mut self) -> anyhow::Result<(String, Value)> {
        loop {
            if let Some(end) = self.rest.windows(2).position(|pair| pair == b"\n\n") {
                let event: Vec<u8> = self.rest.drain(..end + 2).collect();
                return read(&event);
            }
            ensure!(
                self.rest.len() < EVENT_BYTES_MAX,
                "an event is larger than 64 MiB"
            );
            let frame = tokio::time::timeout(SILENCE_MAX, self.body.frame()).await;
            let frame = frame.context("the server sends no events")?;
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
    let data = field("data: ").context("an event has no data")?;
    let data = serde_json::from_str(data).context("an event is not JSON")?;
    Ok((name.to_owned(), data))
}
