//! Faults of a world: their kinds, and the failures of links.
//!
//! Owns: how long a fault lasts. Never: draws one.
//! Invariant: a fault ends by itself.

use std::time::Duration;

/// Speed of links, and their failure rates while faults last.
#[derive(Clone, Debug)]
pub(crate) struct LinkBehaviour {
    pub(crate) latency: Duration,
    /// Largest random addition to each message's latency.
    pub(crate) jitter: Duration,
    pub(crate) nanos_per_byte: u64,
    /// Longest time until a side notices that the other is gone.
    pub(crate) notice_max: Duration,
    /// Frames damaged, of a thousand.
    pub(crate) damage: u32,
    /// Frames that name a block of an earlier reservation, of a thousand.
    pub(crate) stale_blocks: u32,
    /// Packets lost without the link breaking, of a thousand.
    pub(crate) loss: u32,
    /// Packets that arrive twice, of a thousand.
    pub(crate) duplicates: u32,
    /// Packets that overtake others, of a thousand: a link may have several streams.
    pub(crate) overtake: u32,
    /// Steps, reads and writes that the device fails, of a thousand.
    pub(crate) broken: u32,
}

/// A fault that begins at one moment.
#[derive(Clone, Copy, Debug)]
pub(crate) enum ChaosFault {
    /// The process dies and starts again later.
    Crash { worker: usize, back: Duration },
    /// The process is frozen: SIGSTOP, then SIGCONT.
    Freeze { worker: usize, span: Duration },
    /// The process is asked to drain; it starts again once it is done.
    Drain { worker: usize, back: Duration },
    /// The link between two workers breaks and stays down.
    Cut {
        pair: (usize, usize),
        span: Duration,
    },
    /// The stream between a worker and a router breaks.
    Disconnect {
        router: usize,
        worker: usize,
        span: Duration,
    },
    /// The engine hangs in its operation.
    Hang { worker: usize, span: Duration },
    /// A worker loses its connections to all others.
    Isolate { worker: usize, span: Duration },
    /// A router dies with its clients' connections; its next life starts later.
    Restart { router: usize, back: Duration },
    /// Messages between routers and workers take longer for a while.
    Slow { extra: Duration, span: Duration },
}

impl LinkBehaviour {
    /// The sum of all rates that may make a hand-off fail.
    pub(super) fn failure_rates_sum(&self) -> u32 {
        self.damage + self.stale_blocks + self.loss + self.broken
    }
}

impl ChaosFault {
    pub(super) fn duration(self) -> Duration {
        match self {
            Self::Crash { back: span, .. }
            | Self::Drain { back: span, .. }
            | Self::Restart { back: span, .. }
            | Self::Hang { span, .. }
            | Self::Isolate { span, .. }
            | Self::Freeze { span, .. }
            | Self::Cut { span, .. }
            | Self::Disconnect { span, .. }
            | Self::Slow { span, .. } => span,
        }
    }
}
