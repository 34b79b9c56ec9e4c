//! What two workers say to each other about one hand-off. The payload of a frame travels beside
//! it; brains see only this.

use cleave_domain::{BlockHash, BlockRef, Cause, HandoffId, TokenId};
use serde::{Deserialize, Serialize};

/// From worker to worker over a link. Nothing may depend on the order in which packets arrive: a
/// hand-off has landed when seal, blocks and digest agree, whichever came last.
#[derive(Clone, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
pub enum Packet {
    /// Sender to receiver: bytes of a block.
    Frame {
        /// The attempt.
        handoff: HandoffId,
        /// Where they go: the receiver's block and the generation it was reserved with.
        block: BlockRef,
        /// Which bytes of which block of the sequence.
        part: BlockPart,
        /// XXH3-64 of the payload as the sender computed it.
        checksum: u64,
    },
    /// Sender to receiver: that was all.
    Seal(Seal),
    /// Receiver to sender: complete and verified; the lease may go.
    Landed {
        /// The attempt.
        handoff: HandoffId,
    },
    /// Either way: no longer wanted; what the other end holds for it may go. The answer to a frame
    /// or seal of an unknown hand-off; never answered itself.
    Abandoned {
        /// The attempt.
        handoff: HandoffId,
        /// Why.
        cause: Cause,
    },
    /// Receiver to sender, over a link whose sender writes into the receiver's pool itself: write
    /// nothing more of this. Answered by `Stopped`, also when the hand-off is unknown.
    Stop {
        /// The attempt.
        handoff: HandoffId,
    },
    /// Sender to receiver: no write of this is under way, and none will follow. Until then the
    /// receiver's blocks are in quarantine.
    Stopped {
        /// The attempt.
        handoff: HandoffId,
    },
}

impl Packet {
    /// The hand-off this is about.
    pub fn handoff(&self) -> HandoffId {
        match self {
            Self::Frame { handoff, .. }
            | Self::Landed { handoff }
            | Self::Stop { handoff }
            | Self::Stopped { handoff }
            | Self::Abandoned { handoff, .. } => *handoff,
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
#[derive(Clone, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
pub struct Seal {
    /// The attempt.
    pub handoff: HandoffId,
    /// Blocks sent (skipped ones not counted).
    pub blocks_count: u32,
    /// The digest over every frame, in any order, and every other field of this seal
    /// ([`crate::handoff::Digest::close`]); both ends compute it.
    pub digest: u64,
    /// The hash of the tokens, prompt and output, that the receiver was told of with its reservation,
    /// as the sender has them ([`crate::block_hash`] of all of them as one block). If the receiver has
    /// others, the KV is of another text.
    pub content: BlockHash,
    /// Output tokens drawn since the reservation, `[tokens >= 1]`, emitted already by the sender. The
    /// last of them has no KV yet: the KV covers everything before it.
    pub output: Vec<TokenId>,
}

/// How the payload of a packet arrived, as whoever received it found.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
pub enum Condition {
    /// As it was sent; packets without a payload always are.
    Intact,
    /// The payload is not what the sender checksummed.
    Damaged,
}
