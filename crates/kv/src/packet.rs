//! What two workers say to each other about one hand-off. The payload of a frame travels beside
//! it; brains see only this.

use cleave_domain::{Failure, HandoffId, Slot, TokenId};
use serde::{Deserialize, Serialize};

/// From worker to worker over a link. A link keeps the order of what is sent through it.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub enum Packet {
    /// Sender to receiver: bytes of a block.
    Frame {
        /// The attempt.
        handoff: HandoffId,
        /// Where they go: the receiver's block and the generation it was reserved with.
        slot: Slot,
        /// Which bytes of which block of the sequence.
        part: BlockPart,
        /// XXH3-64 of the payload as the sender computed it.
        checksum: u64,
        /// Whether the payload that arrived has that checksum; the link says so.
        intact: bool,
    },
    /// Sender to receiver: that was all.
    Seal(Seal),
    /// Receiver to sender: complete and verified; the lease may go.
    Landed {
        /// The attempt.
        handoff: HandoffId,
    },
    /// Either way: given up; what the other end holds for it may go.
    Failed {
        /// The attempt.
        handoff: HandoffId,
        /// Why.
        failure: Failure,
    },
}

impl Packet {
    /// The hand-off this is about.
    pub fn handoff(&self) -> HandoffId {
        match self {
            Self::Frame { handoff, .. }
            | Self::Landed { handoff }
            | Self::Failed { handoff, .. } => *handoff,
            Self::Seal(seal) => seal.handoff,
        }
    }
}

/// A byte range of a block of a sequence.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
pub struct BlockPart {
    /// Which block of the sequence, counted from its start (skipped ones included).
    pub ordinal: u32,
    /// First byte within the block.
    pub offset: u32,
    /// Number of bytes, at least 1.
    pub len: u32,
}

/// Closes a hand-off: what must have arrived, and where the sequence stands.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Seal {
    /// The attempt.
    pub handoff: HandoffId,
    /// Blocks sent (skipped ones not counted).
    pub blocks_count: u32,
    /// The digest over every frame, in any order; both ends compute it.
    pub digest: u64,
    /// The token drawn from the last prompt position; emitted already by the sender.
    pub first_token: TokenId,
    /// Position of that token: the sequence's KV covers `0..position`.
    pub position: u32,
}
