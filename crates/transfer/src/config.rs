//! The configuration of links, and the events that a worker receives from them.
//!
//! Owns: every size and time limit of links, with its default, and the closed list of link events.
//! Never: opens anything.
//! Invariant: for every configuration, a window holds at least two blocks, and a frame is no longer
//! than a block.

use crate::grant::GrantIssuer;
use crate::payload::ReceivedPayload;
use crate::pools::PoolSharing;
use crate::transports::Transport;
use crate::transports::nixl::Nixl;
use cleave_domain::{Fingerprint, WorkerRef};
use cleave_kv::{Packet, PayloadCondition};
use cleave_tls::PeerTls;
use std::collections::BTreeSet;
use std::sync::Arc;
use std::time::Duration;

/// The interval at which an idle connection, of any kind, sends a heartbeat.
pub const BEAT: Duration = Duration::from_secs(1);
/// Ten missed heartbeats. A process that dies closes its connections at once; this limit is for
/// machines that vanish, and is long enough for a machine that is only overloaded.
pub const SILENCE_MAX: Duration = Duration::from_secs(10);
/// The default credit: more than the bandwidth-delay product of 100 Gbit/s and a round trip of 2
/// ms.
pub const CREDIT_BYTES: u32 = 32 << 20;
/// The default maximum length of a frame. At this length the cost of one wake-up per frame is
/// negligible.
pub const FRAME_BYTES_MAX: u32 = 1 << 20;
/// The smallest permitted frame limit. Below it a block would be cut into many frames, each with a
/// head and a wake-up.
const FRAME_BYTES_MIN: u32 = 4 << 10;
/// The default number of TCP connections of one link: one core can neither send nor receive at the
/// rate of a fast network.
pub const STREAMS_COUNT: u16 = 4;

/// The default limit of rings for peers on other hosts: 2 GiB in all at the default credit.
pub const RINGS_MAX: usize = 64;

/// The configuration that all links of one worker share.
#[derive(Clone, Debug)]
pub struct LinksConfig {
    /// This worker, as named in every handshake.
    pub me: WorkerRef,
    /// Peers with another fingerprint are refused.
    pub fingerprint: Fingerprint,
    /// Bytes of one block; no frame is longer, at either end.
    pub block_bytes: u32,
    /// The longest frame accepted, at least 4 KiB or a block; the size of a slot in shared memory.
    pub frame_bytes_max: u32,
    /// TCP connections of a link that this worker dials, 1 to 16.
    pub streams_count: u16,
    /// Payload bytes that one peer may have on the way here or held here, at least two blocks. It
    /// bounds the memory that a peer can occupy, and hides the round trip of a fast link.
    pub credit_bytes: u32,
    /// The heartbeat interval of an idle link.
    pub beat: Duration,
    /// A link that receives nothing for this long is lost; several heartbeats.
    pub silence_max: Duration,
    /// The time limit of connecting and the handshake together.
    pub connect_timeout: Duration,
    /// This worker's pool, if peers may write into it directly and blocks can be copied from it
    /// into theirs.
    pub pools: Option<Arc<dyn PoolSharing>>,
    /// Certificates with which both ends of a TCP connection prove that they belong to one fleet.
    /// Without them every client that reaches the port is accepted.
    pub peer_tls: Option<PeerTls>,
    /// Write grants, with which a sender proves that it may write to reserved blocks. Both ends
    /// have them, or neither.
    pub grants: Option<GrantIssuer>,
    /// NVIDIA's transfer library, if links to other hosts may use it.
    pub nixl: Option<Arc<Nixl>>,
    /// Limit of rings that peers may write to over NIXL at one time, each of about `credit_bytes`
    /// of pinned memory. A further peer is refused and falls back to another transport.
    pub rings_max: usize,
    /// The transports of links to and from other processes. Default: all.
    pub transports: BTreeSet<Transport>,
}

impl LinksConfig {
    /// The default times and sizes.
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
            peer_tls: None,
            grants: None,
            nixl: None,
            rings_max: RINGS_MAX,
            transports: Transport::ALL.into(),
        }
    }

    /// The initial credit of a peer: at least two blocks, so that one can be sent while another is
    /// being written to the pool.
    pub(crate) fn window(&self) -> u32 {
        self.credit_bytes.max(self.block_bytes.saturating_mul(2))
    }

    /// The longest frame on any transport.
    pub(crate) fn frame_bytes(&self) -> u32 {
        let most = self.block_bytes.max(1);
        self.frame_bytes_max.max(FRAME_BYTES_MIN).min(most)
    }

    /// The smallest frame limit that is accepted of a peer.
    pub(crate) fn frame_bytes_min(&self) -> u32 {
        FRAME_BYTES_MIN.min(self.block_bytes)
    }
}

/// An event that a worker receives from its links.
#[derive(Debug)]
pub enum LinkEvent {
    /// A packet arrived. Frames carry their payload.
    Arrived {
        /// The sender, as proved in the handshake.
        from: WorkerRef,
        /// The packet that arrived.
        packet: Packet,
        /// Whether the payload matched its checksum, as far as it was checked on arrival;
        /// `ReceivedPayload::write_verified` decides in the end.
        condition: PayloadCondition,
        /// The bytes of a frame; `None` for other packets.
        payload: Option<ReceivedPayload>,
    },
    /// A peer attempted a write without a valid grant. Its link ends.
    InvalidGrant {
        /// The peer that attempted the write.
        peer: WorkerRef,
    },
    /// The link to this peer has more credit than before, so blocks that wait for credit may be
    /// sent.
    CreditGranted {
        /// The receiver at the link's other end.
        peer: WorkerRef,
    },
    /// A link was measured when it was established.
    Measured {
        /// The receiver at the link's other end.
        peer: WorkerRef,
        /// Its latency and bandwidth.
        speed: LinkSpeed,
    },
    /// A preferred transport that both ends announced did not work, or only one end has it.
    /// Transfers to this peer are slower than they could be.
    FellBack {
        /// The receiver at the link's other end.
        peer: WorkerRef,
        /// The transport that did not work.
        from: Transport,
        /// The transport that is tried in its place.
        to: Transport,
        /// The reason for the change, for the log.
        reason: String,
    },
    /// A link, outgoing or incoming, broke or was never established. Messages still on the way will
    /// not arrive.
    Lost {
        /// The worker at the other end.
        peer: WorkerRef,
        /// The reason, for the log.
        reason: String,
    },
    /// A peer that could write into this worker's pool no longer can, because its process has
    /// ended. Reported once, after every other event of that incarnation.
    Fenced {
        /// The peer that can no longer write.
        peer: WorkerRef,
    },
}

/// The result of a link's self-test.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct LinkSpeed {
    /// The transport of the link.
    pub transport: Transport,
    /// The shortest round trip of a few.
    pub latency: Duration,
    /// Payload bytes per second, one way.
    pub bytes_per_second: u64,
}

impl LinkSpeed {
    /// The speed at which `bytes` were sent in `elapsed`.
    pub(crate) fn of(
        transport: Transport,
        latency: Duration,
        bytes: usize,
        elapsed: Duration,
    ) -> Self {
        let nanos = elapsed.max(Duration::from_nanos(1)).as_nanos();
        let per_second = bytes as u128 * 1_000_000_000 / nanos;
        Self {
            transport,
            latency,
            bytes_per_second: u64::try_from(per_second).unwrap_or(u64::MAX),
        }
    }
}

/// The reason why nothing can be sent to a peer now.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum LinkDown {
    /// No router has named the address of the peer.
    #[error("no address is known for worker {0}: the router names it before the first hand-off")]
    NoRoute(WorkerRef),
    /// The link broke; a `LinkEvent::Lost` has the reason.
    #[error("the link to {0} is broken")]
    Broken(WorkerRef),
}
