//! Server-sent events.
//!
//! Owns: the order of chunks in a stream, and the comments that keep a silent one alive. Never: decides
//! when a stream starts (an error before that is an HTTP status). Invariant: a stream ends with `data: [DONE]` if and
//! only if all of the answer was sent; otherwise its last event is an error object, so that
//! nobody takes half an answer for a whole one (lesson 16).

use super::chunk::{Chunks, event};
use super::{Frame, Kind, usage};
use crate::ask::UsageShown;
use crate::choice::Delta;
use crate::error::ApiError;
use crate::flights::Flights;
use crate::timing::{TIMING, TimingShown};
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

/// What an answer says next; nothing at its end.
type Addition = Option<Result<(usize, Delta), ApiError>>;

/// A stream to be: everything known after the first event.
pub(crate) struct Live {
    pub(crate) frame: Frame,
    pub(crate) flights: Flights,
    pub(crate) usage: UsageShown,
    pub(crate) timing: TimingShown,
    pub(crate) keep_alive: Option<Duration>,
}

/// What proxies and clients drop, and no timer of theirs overlooks.
const COMMENT: &[u8] = b": keep-alive\n\n";

/// The response, beginning with the first addition, or with a comment if it is not there yet.
pub(crate) fn stream(live: Live, first: Option<(usize, Delta)>) -> Response {
    let timing = match live.timing {
        TimingShown::Asked => live.flights.timing().header(),
        TimingShown::Never => None,
    };
    // It is passed on with each chunk, so it stays where it is.
    let mut sender = Box::new(Sender {
        waiting: vec![Delta::default(); live.flights.count()],
        chunks: Chunks::new(&live.frame),
        quiet: live.keep_alive.map(|span| Box::pin(sleep(span))),
        last: Instant::now(),
        live,
        ready: Vec::new(),
        opened: false,
        over: false,
    });
    match first {
        Some(first) => sender.add(first),
        None => sender.ready.extend(COMMENT),
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
    headers.extend(timing.map(|value| (TIMING, value)));
    // Proxies of nginx's kind would collect the stream otherwise.
    headers.insert(
        HeaderName::from_static("x-accel-buffering"),
        HeaderValue::from_static("no"),
    );
    response
}

struct Sender {
    live: Live,
    /// What each choice has that no client would notice yet: scores of text that is held back.
    waiting: Vec<Delta>,
    chunks: Chunks,
    /// Rings when a comment may be due. It is not wound up for each event: when it rings too early,
    /// it is set to the rest.
    quiet: Option<Pin<Box<Sleep>>>,
    /// When the last event was there.
    last: Instant,
    /// What goes out next: whole events.
    ready: Vec<u8>,
    /// Whether the client was told who speaks.
    opened: bool,
    over: bool,
}

impl Sender {
    /// Goes out with the first token, not before it: clients take this event for its coming.
    fn open(&mut self) {
        let opened = std::mem::replace(&mut self.opened, true);
        if !opened && self.live.frame.kind == Kind::Chat {
            for index in 0..self.live.flights.count() {
                let chunk = self.live.frame.opening(index);
                self.send(chunk);
            }
        }
    }

    /// What goes out next. No more than one event is drawn for it: the rest waits where it is counted.
    async fn next(&mut self) -> Option<Bytes> {
        while self.ready.is_empty() && !self.over {
            let Some(next) = self.event().await else {
                return Some(Bytes::from_static(COMMENT));
            };
            self.take(next);
        }
        let ready = std::mem::take(&mut self.ready);
        (!ready.is_empty()).then(|| Bytes::from(ready))
    }

    /// The next addition, or none for so long that a comment is due.
    async fn event(&mut self) -> Option<Addition> {
        let next = self.live.flights.next();
        let (Some(quiet), Some(span)) = (&mut self.quiet, self.live.keep_alive) else {
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
            if now >= self.last + span {
                self.last = now;
                quiet.as_mut().reset(now + span);
                return None;
            }
            quiet.as_mut().reset(self.last + span);
        }
    }

    fn take(&mut self, next: Addition) {
        if self.quiet.is_some() {
            self.last = Instant::now();
        }
        match next {
            Some(Ok(added)) => self.add(added),
            Some(Err(error)) => {
                self.ready.extend(event(&error.object()));
                self.over = true;
            }
            None => self.close(),
        }
    }

    fn panicked(&mut self) -> Bytes {
        let error = ApiError::internal("panicked", "The server failed on this request.");
        self.live.flights.fail(&error);
        self.ready.clear();
        self.over = true;
        event(&error.object())
    }

    fn add(&mut self, (index, delta): (usize, Delta)) {
        self.open();
        let Delta {
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
            let whose = (&self.live.frame, index);
            let out = &mut self.ready;
            self.chunks.addition(out, whose, &delta, usage.as_ref());
        }
    }

    fn close(&mut self) {
        let Live {
            frame,
            flights,
            usage,
            timing,
            ..
        } = &self.live;
        if *usage != UsageShown::Never || *timing != TimingShown::Never {
            let chunk = frame.closing(flights, (*usage, *timing));
            self.ready.extend(event(&Value::Object(chunk)));
        }
        self.ready.extend(b"data: [DONE]\n\n");
        self.over = true;
    }

    fn send(&mut self, mut chunk: Map<String, Value>) {
        chunk.extend(self.usage().map(|usage| ("usage".to_owned(), usage)));
        self.ready.extend(event(&Value::Object(chunk)));
    }

    /// Token counts as a chunk other than the last shows them.
    fn usage(&self) -> Option<Value> {
        match self.live.usage {
            UsageShown::Never => None,
            UsageShown::AtEnd => Some(Value::Null),
            UsageShown::Always => Some(usage(self.live.flights.counts())),
        }
    }
}
