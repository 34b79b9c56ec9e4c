//! Server-sent events.
//!
//! Owns: the order of events in a stream, and the signs of life of a silent one. Never:
//! decides when a stream starts (an error before that is an HTTP status), or knows the JSON of an
//! event, which the API's [`EventRenderer`] writes. Invariant: a stream ends with the API's last
//! events if and only if the whole answer was sent; otherwise its last event is an error, so that
//! no client takes half an answer for a whole one (lesson 16).

use crate::error::ApiError;
use crate::flights::AnswerFlights;
use crate::output_piece::OutputPieces;
use crate::request::UsageShown;
use crate::surface::{AnswerEnd, EventRenderer, EventUsage};
use crate::timing::{TIMING_HEADER, TimingShown};
use axum::body::Body;
use axum::http::{HeaderName, HeaderValue, header};
use axum::response::Response;
use bytes::Bytes;
use futures::{FutureExt, StreamExt, stream as streams};
use std::panic::AssertUnwindSafe;
use std::pin::Pin;
use std::time::Duration;
use tokio::time::{Instant, Sleep, sleep};

/// The next pieces of an answer, with the index of their choice; `None` at its end.
type NextPieces = Option<Result<(usize, OutputPieces), ApiError>>;

/// The setup of a stream: everything known when its first event arrives.
pub(crate) struct StreamSetup {
    pub(crate) events: Box<dyn EventRenderer>,
    pub(crate) flights: AnswerFlights,
    pub(crate) usage: UsageShown,
    pub(crate) timing: TimingShown,
    pub(crate) keep_alive: Option<Duration>,
}

/// Builds the response. It begins with the first pieces, or with a sign of life if there is none
/// yet.
pub(crate) fn stream(live: StreamSetup, first: Option<(usize, OutputPieces)>) -> Response {
    let timing = match live.timing {
        TimingShown::Asked => live.flights.timing().header(),
        TimingShown::Never => None,
    };
    // The sender moves with each chunk, so it is boxed.
    let mut sender = Box::new(SseWriter {
        waiting: vec![OutputPieces::default(); live.flights.count()],
        silence_timer: live.keep_alive.map(|span| Box::pin(sleep(span))),
        last_event_at: Instant::now(),
        live,
        ready: Vec::new(),
        first_sent: false,
        finished: false,
    });
    match first {
        Some((index, pieces)) => sender.add_pieces(index, pieces),
        None => sender.ready.extend(sender.live.events.keep_alive()),
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
    /// Pieces of each choice that a client would not notice yet: scores of text that is held back.
    waiting: Vec<OutputPieces>,
    /// Fires when a sign of life may be due. It is not reset for each event; if it fires too early,
    /// it is set to the remaining time.
    silence_timer: Option<Pin<Box<Sleep>>>,
    /// Time of the last event.
    last_event_at: Instant,
    /// Whole events to send next.
    ready: Vec<u8>,
    /// Whether the events before the first pieces were sent.
    first_sent: bool,
    finished: bool,
}

impl SseWriter {
    /// Sends the events before the first pieces. They accompany the first token, because clients
    /// measure the time to the first event.
    fn send_first(&mut self) {
        if !std::mem::replace(&mut self.first_sent, true) {
            let (usage, count) = (self.usage(), self.live.flights.count());
            self.live.events.first(&mut self.ready, count, usage);
        }
    }

    /// Returns the next bytes. At most one event is taken from the flight for it: the rest waits
    /// where the router counts it.
    async fn next(&mut self) -> Option<Bytes> {
        while self.ready.is_empty() && !self.finished {
            let Some(next) = self.next_or_silence().await else {
                return Some(Bytes::from_static(self.live.events.keep_alive()));
            };
            self.apply(next);
        }
        let ready = std::mem::take(&mut self.ready);
        (!ready.is_empty()).then(|| Bytes::from(ready))
    }

    /// Returns the next pieces, or `None` when a sign of life is due.
    async fn next_or_silence(&mut self) -> Option<NextPieces> {
        let next = self.live.flights.next();
        let (Some(quiet), Some(span)) = (&mut self.silence_timer, self.live.keep_alive) else {
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

    fn apply(&mut self, next: NextPieces) {
        match next {
            Some(Ok((index, pieces))) => self.add_pieces(index, pieces),
            Some(Err(error)) => {
                self.live.events.error(&mut self.ready, &error);
                self.finished = true;
            }
            None => self.finish(),
        }
        // Pieces that a renderer leaves out are silence to a proxy.
        if self.silence_timer.is_some() && !self.ready.is_empty() {
            self.last_event_at = Instant::now();
        }
    }

    fn panicked(&mut self) -> Bytes {
        let error = ApiError::internal("panicked", "The server failed on this request.");
        self.live.flights.end_with_error(&error);
        self.ready.clear();
        self.finished = true;
        let mut last = Vec::new();
        self.live.events.error(&mut last, &error);
        Bytes::from(last)
    }

    fn add_pieces(&mut self, index: usize, pieces: OutputPieces) {
        self.send_first();
        let waiting = &mut self.waiting[index];
        waiting.append(pieces);
        if waiting.are_noticeable() {
            let pieces = std::mem::take(waiting);
            let usage = self.usage();
            let (out, events) = (&mut self.ready, &mut self.live.events);
            events.pieces(out, index, &pieces, usage);
        }
    }

    fn finish(&mut self) {
        let StreamSetup {
            events,
            flights,
            usage,
            timing,
            keep_alive: _,
        } = &mut self.live;
        let end = AnswerEnd {
            counts: flights.counts(),
            timing: (*timing == TimingShown::Asked).then(|| flights.timing().object()),
        };
        events.last(&mut self.ready, *usage, end);
        self.finished = true;
    }

    /// Token counts as every event but the last shows them.
    fn usage(&self) -> EventUsage {
        match self.live.usage {
            UsageShown::Never => EventUsage::Hidden,
            UsageShown::AtEnd => EventUsage::AtEnd,
            UsageShown::Always => EventUsage::SoFar(self.live.flights.counts()),
        }
    }
}
