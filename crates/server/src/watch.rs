//! The state of a connection by which it is kept or closed.
//!
//! Owns: the facts about one connection by which it is closed. Never reads a clock: moments are
//! passed in. Invariant: a connection with a request under way is closed only if there is something
//! to send that its client does not read.

use super::HttpLimits;
use parking_lot::{Mutex, MutexGuard};
use std::collections::BTreeMap;
use tokio::time::Instant;

/// The first bytes of HTTP/2; no HTTP/1 request begins with them.
const HTTP2: &[u8] = b"PRI";

#[derive(Debug)]
pub(super) struct ConnectionWatch(Mutex<ConnectionWatchState>);

#[derive(Debug)]
struct ConnectionWatchState {
    open: usize,
    /// When the last of them ended, or the first bytes after that arrived.
    since: Instant,
    input: InputSinceRequest,
    /// Set by the first bytes; holds for every later request.
    is_http2: bool,
    /// Answers with data handed out, and since when no more was asked for.
    offered: BTreeMap<u64, Instant>,
    number: u64,
}

/// Whether anything has come since the last request ended.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum InputSinceRequest {
    Nothing,
    Something,
}

/// The reason for closing a connection.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum ConnectionCloseReason {
    SlowHeaders,
    Idle,
    Stalled,
}

impl ConnectionCloseReason {
    /// The label in the metric.
    pub(super) fn label(self) -> &'static str {
        match self {
            Self::SlowHeaders => "slow_headers",
            Self::Idle => "idle",
            Self::Stalled => "stalled",
        }
    }
}

impl ConnectionWatch {
    /// For a connection that begins now.
    pub(super) fn new(now: Instant) -> Self {
        Self(Mutex::new(ConnectionWatchState {
            open: 0,
            since: now,
            input: InputSinceRequest::Nothing,
            is_http2: false,
            offered: BTreeMap::new(),
            number: 0,
        }))
    }

    fn lock(&self) -> MutexGuard<'_, ConnectionWatchState> {
        self.0.lock()
    }

    pub(super) fn bytes_received(&self, bytes: &[u8], now: Instant) {
        let mut state = self.lock();
        if state.open == 0 && state.input == InputSinceRequest::Nothing {
            state.is_http2 |= state.number == 0 && bytes.starts_with(HTTP2);
            state.input = InputSinceRequest::Something;
            state.since = now;
        }
    }

    /// A request's headers have arrived. Gives the request's number.
    pub(super) fn begin(&self) -> u64 {
        let mut state = self.lock();
        state.open += 1;
        state.number += 1;
        state.number
    }

    /// Part of this request's answer was handed out.
    pub(super) fn answer_offered(&self, number: u64, now: Instant) {
        self.lock().offered.insert(number, now);
    }

    /// The client has read it.
    pub(super) fn answer_read(&self, number: u64) {
        self.lock().offered.remove(&number);
    }

    /// The request is over.
    pub(super) fn end(&self, number: u64, now: Instant) {
        let mut state = self.lock();
        state.offered.remove(&number);
        state.open -= 1;
        if state.open == 0 {
            state.since = now;
            state.input = InputSinceRequest::Nothing;
        }
    }

    /// The reason to close the connection; `None` if it may stay.
    pub(super) fn verdict(
        &self,
        limits: &HttpLimits,
        now: Instant,
    ) -> Option<ConnectionCloseReason> {
        let state = self.lock();
        let waited = now.saturating_duration_since(state.since);
        // HTTP/2 frames may arrive at any time without a request.
        let is_in_headers = state.input == InputSinceRequest::Something && !state.is_http2;
        let mut offered = state.offered.values();
        let oldest = offered.any(|since| now.duration_since(*since) >= limits.stall_max);
        match state.open {
            0 if is_in_headers && waited >= limits.headers_wait_max => {
                Some(ConnectionCloseReason::SlowHeaders)
            }
            0 if waited >= limits.idle_max => Some(ConnectionCloseReason::Idle),
            0 => None,
            _ => oldest.then_some(ConnectionCloseReason::Stalled),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::time::Duration;

    // Invariant: I45.
    #[test]
    fn a_connection_is_closed_only_if_its_client_delays() {
        let start = Instant::now();
        let at = |seconds| start + Duration::from_secs(seconds);
        let limits = HttpLimits {
            headers_wait_max: Duration::from_secs(5),
            idle_max: Duration::from_secs(100),
            stall_max: Duration::from_secs(50),
            ..HttpLimits::default()
        };
        let watch = ConnectionWatch::new(start);
        let verdict = |seconds| watch.verdict(&limits, at(seconds));
        assert_eq!(
            [verdict(99), verdict(100)],
            [None, Some(ConnectionCloseReason::Idle)]
        );
        watch.bytes_received(b"G", at(90));
        watch.bytes_received(b"E", at(94));
        assert_eq!(
            [verdict(94), verdict(95)],
            [None, Some(ConnectionCloseReason::SlowHeaders)]
        );
        let number = watch.begin();
        assert_eq!(verdict(9000), None, "a prompt may take its time");
        watch.answer_offered(number, at(9000));
        assert_eq!(
            [verdict(9049), verdict(9050)],
            [None, Some(ConnectionCloseReason::Stalled)]
        );
        watch.answer_read(number);
        assert_eq!(verdict(9050), None);
        let other = watch.begin();
        watch.answer_offered(other, at(9050));
        watch.end(number, at(9060));
        assert_eq!(
            verdict(9100),
            Some(ConnectionCloseReason::Stalled),
            "one of several"
        );
        watch.end(other, at(9100));
        assert_eq!(
            [verdict(9199), verdict(9200)],
            [None, Some(ConnectionCloseReason::Idle)]
        );
    }

    #[test]
    fn http2_frames_are_not_slow_headers() {
        let start = Instant::now();
        let limits = HttpLimits::default();
        let watch = ConnectionWatch::new(start);
        watch.bytes_received(b"PRI * HTTP/2.0\r\n", start);
        let later = start + limits.headers_wait_max;
        assert_eq!(watch.verdict(&limits, later), None);
        let number = watch.begin();
        watch.end(number, later);
        watch.bytes_received(b"\0\0\x08\x06", later);
        let later = later + limits.headers_wait_max;
        assert_eq!(watch.verdict(&limits, later), None);
    }
}
