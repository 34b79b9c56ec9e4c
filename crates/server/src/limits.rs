//! Limits on what one connection may cost.

use std::time::Duration;

/// Headers of one request in bytes, on either protocol.
pub(super) const HEADERS_BYTES_MAX: u32 = 64 << 10;
/// Header lines of one request.
pub(super) const HEADERS_COUNT_MAX: usize = 128;
/// Streams that a client may open and reset faster than they are handled. An HTTP/2 client beyond
/// it is cut off.
pub(super) const RESETS_MAX: usize = 32;
/// How often an HTTP/2 connection is probed, and how long it may take to answer.
pub(super) const PING: (Duration, Duration) = (Duration::from_secs(20), Duration::from_secs(20));

/// Limits on the connections of one port.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct HttpLimits {
    /// Connections at once, of clients and workers; more are closed at once. By default
    /// [`Self::CONNECTIONS_MAX`], or fewer without a warning where the system does not allow so
    /// many.
    pub connections_max: Option<u32>,
    /// Requests at once on one connection of HTTP/2. Default 256.
    pub streams_max: u32,
    /// From the first byte of a request to the last of its headers, and for a TLS handshake.
    /// Default 15 s.
    pub headers_wait_max: Duration,
    /// How long a connection may stand without a request. Default 120 s: longer than balancers keep
    /// theirs, or they would send requests on connections that are being closed.
    pub idle_max: Duration,
    /// How long a client may read nothing while there is something to send. Default 60 s. (A client
    /// that reads no tokens is ended by `reader_wait_max` of the brain's limits first.)
    pub stall_max: Duration,
}

impl Default for HttpLimits {
    fn default() -> Self {
        Self {
            connections_max: None,
            streams_max: 256,
            headers_wait_max: Duration::from_secs(15),
            idle_max: Duration::from_secs(120),
            stall_max: Duration::from_secs(60),
        }
    }
}

impl HttpLimits {
    /// Connections at once, where the operator gave no number: some 100 KB of memory each, when all
    /// have a request.
    pub const CONNECTIONS_MAX: u32 = 16_384;

    pub(super) fn connections(&self) -> u32 {
        self.connections_max.unwrap_or(Self::CONNECTIONS_MAX)
    }

    /// How often each connection is checked: no limit is exceeded by more than a quarter.
    pub(super) fn period(&self) -> Duration {
        let least = self.headers_wait_max.min(self.idle_max).min(self.stall_max);
        (least / 4).clamp(Duration::from_millis(1), Duration::from_secs(5))
    }
}
