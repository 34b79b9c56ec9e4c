//! Server-sent events.
//!
//! Owns: the order of chunks in a stream, and the comments that keep a silent one alive. Never:
//! decides when a stream starts: an error before that is an HTTP status. Invariant: a stream ends
//! with `data: [DONE]` if and only if the whole answer was sent; otherwise its last event is an
//! error object, so that no client takes half an answer for a whole one (lesson 16).

use super::chunk::{ChunkWriter, event};
use super::{AnswerEnvelope, CompletionKind, usage_json};
use crate::choice::ChoiceDelta;
use crate::error::ApiError;
use crate::flights::AnswerFlights;
use crate::request::UsageShown;
use crate::timing::{TIMING_HEADER, TimingShown};
use axum::body::Body;
use axum::http::{HeaderName, HeaderValue, header};
use axum::response::Response;
use bytes::Bytes;
use futures::{FutureExt, StreamExt, stream as streams};
use serde_json::{Map, Value};
use std::panic::AssertUnwindSafe;
use std::pin::Pin;
use std::time::Duration;
use tokio::time::{Instant, Sleep, sleep};

/// The next addition to an answer; `None` at its end.
type NextDelta = Option<Result<(usize, ChoiceDelta), ApiError>>;

/// The setup of a stream: everything known when its first event arrives.
pub(crate) struct StreamSetup {
    pub(crate) frame: AnswerEnvelope,
    pub(crate) flights: AnswerFlights,
    pub(crate) usage: UsageShown,
    pub(crate) timing: TimingShown,
    pub(crate) keep_alive: Option<Duration>,
}

/// A comment, which clients ignore and which resets the idle timers of proxies.
const KEEP_ALIVE_COMMENT: &[u8] = b": keep-alive\n\n";

/// Builds the response. It begins with the first addition, or with a comment if there is none yet.
pub(crate) fn stream(live: StreamSetup, first: Option<(usize, ChoiceDelta)>) -> Response {
    let timing = match live.timing {
        TimingShown::Asked => live.flights.timing().header(),
        TimingShown::Never => None,
    };
    // The sender moves with each chunk, so it is boxed.
    let mut sender = Box::new(SseWriter {
        waiting: vec![ChoiceDelta::default(); live.flights.count()],
        chunks: ChunkWriter::new(&live.frame),
        comment_timer: live.keep_alive.map(|span| Box::pin(sleep(span))),
        last_event_at: Instant::now(),
        live,
        ready: Vec::new(),
        roles_sent: false,
        finished: false,
    });
    match first {
        Some((index, delta)) => sender.add_delta(index, delta),
        None => sender.ready.extend(KEEP_ALIVE_COMMENT),
    }
    let chunks = streams::unfold(sender, |mut sender| async {
        let chunk = match AssertUnwindSafe(sender.next()).catch_unwind().await {
            Ok(chunk) => chunk,
            Err(_) => Some(sender.panicked()),
        };
        chunk.map(|chunk| (chunk, sender))
    });
    let mut response = Response::new(Body::from_stream(
        chunks.map(Ok::<_, std::convert::Infallible>),
    ));
    let headers = response.headers_mut();
    headers.insert(
        header::CONTENT_TYPE,
        HeaderValue::from_static("text/event-stream; charset=utf-8"),
    );
    headers.insert(header::CACHE_CONTROL, HeaderValue::from_static("no-cache"));
    headers.extend(timing.map(|value| (TIMING_HEADER, value)));
    // Proxies such as nginx would buffer the stream otherwise.
    headers.insert(
        HeaderName::from_static("x-accel-buffering"),
        HeaderValue::from_static("no"),
    );
    response
}

struct SseWriter {
    live: StreamSetup,
    /// Additions of each choice that a client would not notice yet: scores of text that is held
    /// back.
    waiting: Vec<ChoiceDelta>,
    chunks: ChunkWriter,
    /// Fires when a comment may be due. It is not reset for each event; if it fires too early, it
    /// is set to the remaining time.
    comment_timer: Option<Pin<Box<Sleep>>>,
    /// Time of the last event.
    last_event_at: Instant,
    /// Whole events to send next.
    ready: Vec<u8>,
    /// Whether the chunks with the role were sent.
    roles_sent: bool,
    finished: bool,
}

impl SseWriter {
    /// Sends the chunks with the role. They accompany the first token, because clients measure the
    /// time to the first event.
    fn send_roles(&mut self) {
        let opened = std::mem::replace(&mut self.roles_sent, true);
        if !opened && self.live.frame.kind == CompletionKind::Chat {
            for index in 0..self.live.flights.count() {
                let chunk = self.live.frame.role_chunk(index);
                self.send(chunk);
            }
        }
    }

    /// Returns the next bytes. At most one event is taken from the flight for it: the rest waits
    /// where the router counts it.
    async fn next(&mut self) -> Option<Bytes> {
        while self.ready.is_empty() && !self.finished {
            let Some(next) = self.next_or_comment().await else {
                return Some(Bytes::from_static(KEEP_ALIVE_COMMENT));
            };
            self.apply(next);
        }
        let ready = std::mem::take(&mut self.ready);
        (!ready.is_empty()).then(|| Bytes::from(ready))
    }

    /// Returns the next addition, or `None` when a comment is due.
    async fn next_or_comment(&mut self) -> Option<NextDelta> {
        let next = self.live.flights.next();
        let (Some(quiet), Some(span)) = (&mut self.comment_timer, self.live.keep_alive) else {
            return Some(next.await);
        };
        tokio::pin!(next);
        loop {
            tokio::select! {
                biased;
                next = &mut next => return Some(next),
                () = quiet.as_mut() => {}
            }
            let now = Instant::now();
            if now >= self.last_event_at + span {
                self.last_event_at = now;
                quiet.as_mut().reset(now + span);
                return None;
            }
            quiet.as_mut().reset(self.last_event_at + span);
        }
    }

    fn apply(&mut self, next: NextDelta) {
        if self.comment_timer.is_some() {
            self.last_event_at = Instant::now();
        }
        match next {
            Some(Ok((index, delta))) => self.add_delta(index, delta),
            Some(Err(error)) => {
                self.ready.extend(event(&error.object()));
                self.finished = true;
            }
            None => self.finish(),
        }
    }

    fn panicked(&mut self) -> Bytes {
        let error = ApiError::internal("panicked", "The server failed on this request.");
        self.live.flights.end_with_error(&error);
        self.ready.clear();
        self.finished = true;
        event(&error.object())
    }

    fn add_delta(&mut self, index: usize, delta: ChoiceDelta) {
        self.send_roles();
        let ChoiceDelta {
            text,
            scores,
            finish,
        } = delta;
        let waiting = &mut self.waiting[index];
        waiting.text += &text;
        waiting.scores.extend(scores);
        waiting.finish = finish;
        if !waiting.is_empty() {
            let delta = std::mem::take(waiting);
            let usage = self.usage();
            let (out, frame) = (&mut self.ready, &self.live.frame);
            self.chunks
                .write_delta(out, frame, index, &delta, usage.as_ref());
        }
    }

    fn finish(&mut self) {
        let StreamSetup {
            frame,
            flights,
            usage,
            timing,
            ..
        } = &self.live;
        if *usage != UsageShown::Never || *timing != TimingShown::Never {
            let chunk = frame.usage_chunk(flights, *usage, *timing);
            self.ready.extend(event(&Value::Object(chunk)));
        }
        self.ready.extend(b"data: [DONE]\n\n");
        self.finished = true;
    }

    fn send(&mut self, mut chunk: Map<String, Value>) {
        chunk.extend(self.usage().map(|usage| ("usage".to_owned(), usage)));
        self.ready.extend(event(&Value::Object(chunk)));
    }

    /// Token counts as every chunk but the last shows them.
    fn usage(&self) -> Option<Value> {
        match self.live.usage {
            UsageShown::Never => None,
            UsageShown::AtEnd => Some(Value::Null),
            UsageShown::Always => Some(usage_json(self.live.flights.counts())),
        }
    }
}
