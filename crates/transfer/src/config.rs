//! How links are set up, and what a worker hears from them.
//!
//! Owns: every size and time of links, with its default, and the closed list of their events. Never:
//! opens anything.
//! Invariant: whatever a config says, a window holds two blocks, and a frame is no longer than a block.

use crate::nixl::Nixl;
use crate::pass::Passes;
use crate::payload::Payload;
use crate::pools::Pools;
use crate::transport::Transport;
use cleave_domain::{Fingerprint, WorkerRef};
use cleave_kv::{Condition, Packet};
use cleave_tls::PeerTls;
use std::collections::BTreeSet;
use std::sync::Arc;
use std::time::Duration;

/// How often an idle connection, of whatever kind, says that it is there.
pub const BEAT: Duration = Duration::from_secs(1);
/// Ten missed beats. A process that dies closes its connections at once; this is for machines that
/// vanish, and long enough for one that is merely overloaded.
pub const SILENCE_MAX: Duration = Duration::from_secs(10);
/// The usual credit: more than a link of 100 Gbit/s with a round trip of 2 ms has under way.
pub const CREDIT_BYTES: u32 = 32 << 20;
/// The usual longest frame: waking the next stage, once per frame, does not show at this length.
pub const FRAME_BYTES_MAX: u32 = 1 << 20;
/// The shortest limit on frames: below it a block would be crumbs, each with a head and a wake-up.
const FRAME_BYTES_MIN: u32 = 4 << 10;
/// The longest frame over TCP, so that a block of a MiB is spread over all streams.
const STREAM_FRAME_BYTES_MAX: u32 = 256 << 10;
/// The usual number of TCP connections of one link: one core can neither send nor receive as much
/// as a fast network carries.
pub const STREAMS_COUNT: u16 = 4;

/// The usual number of rings for peers of other hosts: 2 GiB of them.
pub const RINGS_MAX: usize = 64;

/// What all links of one worker share.
#[derive(Clone, Debug)]
pub struct LinksConfig {
    /// Who this is; named in every handshake.
    pub me: WorkerRef,
    /// Peers with another fingerprint are turned away.
    pub fingerprint: Fingerprint,
    /// Bytes of one block; no frame is longer, at either end.
    pub block_bytes: u32,
    /// The longest frame taken, at least 4 KiB or a block; the size of a slot where memory is shared.
    pub frame_bytes_max: u32,
    /// TCP connections of a link that this worker dials, 1 to 16.
    pub streams_count: u16,
    /// Payload bytes that one peer may have on their way here or kept here, at least two blocks.
    /// It bounds the memory that a peer can take, and hides the round trip of a fast link.
    pub credit_bytes: u32,
    /// How often an idle link is tried.
    pub beat: Duration,
    /// A link on which nothing was heard for this long is lost; several beats.
    pub silence_max: Duration,
    /// How long connecting and the handshake may take, together.
    pub connect_timeout: Duration,
    /// The pool, if peers may write into it themselves and it can be copied from straight into theirs.
    pub pools: Option<Arc<dyn Pools>>,
    /// By which both ends of a connection over TCP show that they are of one fleet. Without it anybody
    /// who reaches the port is heard.
    pub peers: Option<PeerTls>,
    /// By which a sender shows that it may write what was reserved; both ends have them, or neither.
    pub passes: Option<Passes>,
    /// NVIDIA's transfer library, if links to other hosts may go over it and take it in.
    pub nixl: Option<Arc<Nixl>>,
    /// Rings that peers may write to over NIXL at one time, each of `credit_bytes` or so of pinned memory; the next peer
    /// is told to go another way.
    pub rings_max: usize,
    /// By which transports links to and from other processes are made. Default all.
    pub transports: BTreeSet<Transport>,
}

impl LinksConfig {
    /// Usual timings and sizes.
    pub fn new(me: WorkerRef, fingerprint: Fingerprint, block_bytes: u32) -> Self {
        Self {
            me,
            fingerprint,
            block_bytes,
            frame_bytes_max: FRAME_BYTES_MAX,
            streams_count: STREAMS_COUNT,
            credit_bytes: CREDIT_BYTES,
            beat: BEAT,
            silence_max: SILENCE_MAX,
            connect_timeout: Duration::from_secs(5),
            pools: None,
            peers: None,
            passes: None,
            nixl: None,
            rings_max: RINGS_MAX,
            transports: Transport::ALL.into(),
        }
    }

    /// The library, if this worker may use it.
    pub(crate) fn nixl(&self) -> Option<&Arc<Nixl>> {
        let is_allowed = self.transports.contains(&Transport::Nixl);
        self.nixl.as_ref().filter(|_| is_allowed)
    }

    /// How long the making of one agent may take: it opens every device of its host first.
    pub(crate) fn landing_timeout(&self) -> Duration {
        self.connect_timeout * 2
    }

    /// How long connecting, the handshake and the making of two agents may take, together: longer than the receiver
    /// takes to say that it makes none.
    pub(crate) fn agents_timeout(&self) -> Duration {
        self.connect_timeout * 4
    }

    /// How long the first writes of a link over NIXL may take: they connect the cards.
    pub(crate) fn first_writes_timeout(&self) -> Duration {
        self.connect_timeout * 2
    }

    /// How long a peer may ask for a ring before the routers' word of it is here.
    pub(crate) fn acquaintance_timeout(&self) -> Duration {
        self.connect_timeout / 2
    }

    /// Credit a peer starts with: never so little that a block could not be sent while another is
    /// being written to the pool.
    pub(crate) fn window(&self) -> u32 {
        self.credit_bytes.max(self.block_bytes.saturating_mul(2))
    }

    /// The longest frame.
    pub(crate) fn frame_bytes(&self) -> u32 {
        let most = self.block_bytes.max(1);
        self.frame_bytes_max.max(FRAME_BYTES_MIN).min(most)
    }

    /// The least that a peer's longest frame may be.
    pub(crate) fn frame_bytes_min(&self) -> u32 {
        FRAME_BYTES_MIN.min(self.block_bytes)
    }

    /// The longest frame over TCP.
    pub(crate) fn stream_frame_bytes(&self) -> u32 {
        self.frame_bytes().min(STREAM_FRAME_BYTES_MAX)
    }
}

/// What a worker hears from its links.
#[derive(Debug)]
pub enum LinkEvent {
    /// A peer sent something. Frames carry their payload.
    Arrived {
        /// Who sent it, as it proved in the handshake.
        from: WorkerRef,
        /// What.
        packet: Packet,
        /// Of a frame's payload, as far as its checksum was looked at on arrival; `Payload::land` has
        /// the last word.
        condition: Condition,
        /// A frame's bytes.
        payload: Option<Payload>,
    },
    /// A peer wanted to write what it has no pass for. Its link ends.
    Forged {
        /// Who.
        peer: WorkerRef,
    },
    /// The link to this peer has more credit than before: blocks that wait for it may go.
    Granted {
        /// To whom.
        peer: WorkerRef,
    },
    /// A link was measured at its start.
    Measured {
        /// To whom.
        peer: WorkerRef,
        /// What it can do.
        speed: LinkSpeed,
    },
    /// A better transport than the one that is tried next was there by both ends' word and did not work, or only one
    /// end has it: transfers to this peer will be slower than they could be.
    FellBack {
        /// To whom.
        peer: WorkerRef,
        /// Which transport did not work.
        from: Transport,
        /// Which one is tried in its place.
        to: Transport,
        /// Why.
        reason: String,
    },
    /// A link, outgoing or incoming, broke or was never made; what was on it will not arrive.
    Lost {
        /// To or from whom.
        peer: WorkerRef,
        /// For the log.
        reason: String,
    },
    /// A peer that could write into this worker's pool cannot any more: its process has ended. Said once, after
    /// everything else of that life.
    Severed {
        /// Who.
        peer: WorkerRef,
    },
}

/// What a link's self-test measured.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct LinkSpeed {
    /// What carries the link.
    pub transport: Transport,
    /// The shortest round trip of a few.
    pub latency: Duration,
    /// Payload bytes per second, one way.
    pub bytes_per_second: u64,
}

impl LinkSpeed {
    /// From how long so many bytes took.
    pub(crate) fn of(
        transport: Transport,
        latency: Duration,
        (bytes, took): (usize, Duration),
    ) -> Self {
        let nanos = took.max(Duration::from_nanos(1)).as_nanos();
        let per_second = bytes as u128 * 1_000_000_000 / nanos;
        Self {
            transport,
            latency,
            bytes_per_second: u64::try_from(per_second).unwrap_or(u64::MAX),
        }
    }
}

/// Why nothing can be sent to a peer now.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum LinkDown {
    /// Nobody said where the peer is.
    #[error("no address is known for worker {0}: the router names it before the first hand-off")]
    NoRoute(WorkerRef),
    /// The link broke; a `LinkEvent::Lost` says why.
    #[error("the link to {0} is broken")]
    Broken(WorkerRef),
}
