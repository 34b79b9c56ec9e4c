//! What one connection may cost.

use std::time::Duration;

/// Headers of one request in bytes, on either protocol.
pub(super) const HEADERS_BYTES_MAX: u32 = 64 << 10;
/// Header lines of one request.
pub(super) const HEADERS_COUNT_MAX: usize = 128;
/// Streams that a client may begin and break off faster than they are looked at. A client of HTTP/2 that
/// does nothing else is cut off.
pub(super) const RESETS_MAX: usize = 32;
/// How often a connection of HTTP/2 is tried, and how long it may take to answer.
pub(super) const PING: (Duration, Duration) = (Duration::from_secs(20), Duration::from_secs(20));

/// Limits on the connections of one port.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct HttpLimits {
    /// Connections at once, of clients and workers; more are closed at once. Default 16384: some
    /// 100 KB of memory each, when all have a request.
    pub connections_max: u32,
    /// Requests at once on one connection of HTTP/2. Default 256.
    pub streams_max: u32,
    /// From the first byte of a request to the last of its headers, and for a TLS handshake. Default
    /// 15 s.
    pub headers_wait_max: Duration,
    /// How long a connection may stand without a request. Default 120 s: longer than balancers keep
    /// theirs, or they would send requests on connections that are being closed.
    pub idle_max: Duration,
    /// How long a client may take nothing of what there is to send. Default 60 s. (One that reads no
    /// tokens is let go by `reader_wait_max` of the brain's limits first.)
    pub stall_max: Duration,
}

impl Default for HttpLimits {
    fn default() -> Self {
        Self {
            connections_max: 16_384,
            streams_max: 256,
            headers_wait_max: Duration::from_secs(15),
            idle_max: Duration::from_secs(120),
            stall_max: Duration::from_secs(60),
        }
    }
}

impl HttpLimits {
    /// How often each connection is looked at: no limit is overrun by more than a quarter.
    pub(super) fn period(&self) -> Duration {
        let least = self.headers_wait_max.min(self.idle_max).min(self.stall_max);
        (least / 4).clamp(Duration::from_millis(1), Duration::from_secs(5))
    }
}
