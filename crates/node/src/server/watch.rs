//! What a connection is waiting for, and since when.
//!
//! Owns: the facts about one connection by which it is let go. Never: reads a clock: moments are handed
//! in. Invariant: a connection with a request under way is let go only if there is something to send
//! that its client does not take.

use super::HttpLimits;
use std::collections::BTreeMap;
use std::sync::{Mutex, MutexGuard, PoisonError};
use tokio::time::Instant;

/// What HTTP/2 begins with, as far as no request of HTTP/1 does.
const HTTP2: &[u8] = b"PRI";

/// See the module.
#[derive(Debug)]
pub(super) struct Watch(Mutex<State>);

#[derive(Debug)]
struct State {
    /// Requests under way.
    open: usize,
    /// When the last of them ended; the first bytes after that, if any have come.
    since: Instant,
    heard: Heard,
    /// Every later request is of it too.
    is_http2: bool,
    /// Answers of which something was given out, and since when nothing more was asked for.
    offered: BTreeMap<u64, Instant>,
    number: u64,
}

/// Whether anything has come since the last request ended.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Heard {
    Nothing,
    Something,
}

/// Why a connection is let go.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Reason {
    SlowHeaders,
    Idle,
    Stalled,
}

impl Reason {
    /// In a metric's label.
    pub(super) fn word(self) -> &'static str {
        match self {
            Self::SlowHeaders => "slow_headers",
            Self::Idle => "idle",
            Self::Stalled => "stalled",
        }
    }
}

impl Watch {
    /// Of a connection that begins now.
    pub(super) fn new(now: Instant) -> Self {
        Self(Mutex::new(State {
            open: 0,
            since: now,
            heard: Heard::Nothing,
            is_http2: false,
            offered: BTreeMap::new(),
            number: 0,
        }))
    }

    fn lock(&self) -> MutexGuard<'_, State> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// These bytes came.
    pub(super) fn heard(&self, bytes: &[u8], now: Instant) {
        let mut state = self.lock();
        if state.open == 0 && state.heard == Heard::Nothing {
            state.is_http2 |= state.number == 0 && bytes.starts_with(HTTP2);
            state.heard = Heard::Something;
            state.since = now;
        }
    }

    /// A request's headers are there. It has this number.
    pub(super) fn begin(&self) -> u64 {
        let mut state = self.lock();
        state.open += 1;
        state.number += 1;
        state.number
    }

    /// Something of this request's answer was given out.
    pub(super) fn offer(&self, number: u64, now: Instant) {
        self.lock().offered.insert(number, now);
    }

    /// The client has taken it.
    pub(super) fn take(&self, number: u64) {
        self.lock().offered.remove(&number);
    }

    /// The request is over.
    pub(super) fn end(&self, number: u64, now: Instant) {
        let mut state = self.lock();
        state.offered.remove(&number);
        state.open -= 1;
        if state.open == 0 {
            state.since = now;
            state.heard = Heard::Nothing;
        }
    }

    /// Why it is to be let go; nothing if it may stay.
    pub(super) fn verdict(&self, limits: &HttpLimits, now: Instant) -> Option<Reason> {
        let state = self.lock();
        let waited = now.saturating_duration_since(state.since);
        // Of HTTP/2 frames come at any time, whatever they are.
        let is_in_headers = state.heard == Heard::Something && !state.is_http2;
        let mut offered = state.offered.values();
        let oldest = offered.any(|since| now.duration_since(*since) >= limits.stall_max);
        match state.open {
            0 if is_in_headers && waited >= limits.headers_wait_max => Some(Reason::SlowHeaders),
            0 if waited >= limits.idle_max => Some(Reason::Idle),
            0 => None,
            _ => oldest.then_some(Reason::Stalled),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::time::Duration;

    #[test]
    fn who_waits_for_us_is_not_let_go_and_who_keeps_us_waiting_is() {
        let start = Instant::now();
        let at = |seconds| start + Duration::from_secs(seconds);
        let limits = HttpLimits {
            headers_wait_max: Duration::from_secs(5),
            idle_max: Duration::from_secs(100),
            stall_max: Duration::from_secs(50),
            ..HttpLimits::default()
        };
        let watch = Watch::new(start);
        let verdict = |seconds| watch.verdict(&limits, at(seconds));
        assert_eq!([verdict(99), verdict(100)], [None, Some(Reason::Idle)]);
        watch.heard(b"G", at(90));
        watch.heard(b"E", at(94));
        assert_eq!(
            [verdict(94), verdict(95)],
            [None, Some(Reason::SlowHeaders)]
        );
        let number = watch.begin();
        assert_eq!(verdict(9000), None, "a prompt may take its time");
        watch.offer(number, at(9000));
        assert_eq!(
            [verdict(9049), verdict(9050)],
            [None, Some(Reason::Stalled)]
        );
        watch.take(number);
        assert_eq!(verdict(9050), None);
        let other = watch.begin();
        watch.offer(other, at(9050));
        watch.end(number, at(9060));
        assert_eq!(verdict(9100), Some(Reason::Stalled), "one of several");
        watch.end(other, at(9100));
        assert_eq!([verdict(9199), verdict(9200)], [None, Some(Reason::Idle)]);
    }

    #[test]
    fn frames_of_http2_were_taken_for_a_request_that_does_not_end() {
        let start = Instant::now();
        let limits = HttpLimits::default();
        let watch = Watch::new(start);
        watch.heard(b"PRI * HTTP/2.0\r\n", start);
        let later = start + limits.headers_wait_max;
        assert_eq!(watch.verdict(&limits, later), None);
        let number = watch.begin();
        watch.end(number, later);
        watch.heard(b"\0\0\x08\x06", later);
        let later = later + limits.headers_wait_max;
        assert_eq!(watch.verdict(&limits, later), None);
    }
}
