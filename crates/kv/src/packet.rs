//! The packets that two workers exchange about one hand-off. The payload of a frame travels beside
//! its packet; brains see only the packet.

use cleave_domain::{AbandonCause, BlockHash, BlockRef, HandoffId, KvPlane, KvUnit, TokenId};
use serde::{Deserialize, Serialize};

/// A packet from worker to worker over a link. Nothing may depend on the order in which packets
/// arrive: a hand-off has landed when seal, blocks and digest agree, whichever arrived last.
#[derive(Clone, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
pub enum Packet {
    /// Sender to receiver: bytes of a block.
    Frame {
        handoff: HandoffId,
        /// The receiver's block, and the generation it was reserved with.
        block: BlockRef,
        /// The byte range in the sequence.
        part: BlockPart,
        /// XXH3-64 of the payload as the sender computed it.
        checksum: u64,
    },
    /// Sender to receiver: everything was sent.
    Seal(Seal),
    /// Receiver to sender: complete and verified; the lease may end.
    Landed { handoff: HandoffId },
    /// Either way: the hand-off is no longer wanted; the other end may release what it holds for
    /// it. Also the answer to a frame or seal of an unknown hand-off; never answered itself.
    Abandoned {
        handoff: HandoffId,
        cause: AbandonCause,
    },
    /// Receiver to sender, over a link whose sender writes into the receiver's pool: write nothing
    /// more of this hand-off. Answered by `Stopped`, also when the hand-off is unknown.
    Stop { handoff: HandoffId },
    /// Sender to receiver: no write of this hand-off is in progress, and none will follow. Until
    /// then the receiver's blocks stay in quarantine.
    Stopped { handoff: HandoffId },
}

impl Packet {
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

/// A byte range of a block of a sequence, or of a piece of its state or window.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
pub struct BlockPart {
    /// The plane of the block or piece.
    #[serde(default)]
    pub plane: KvPlane,
    /// Its index, as in [`KvUnit::ordinal`].
    pub ordinal: u32,
    /// The first byte within the block or piece.
    pub offset: u32,
    /// The number of bytes, at least 1.
    pub len: u32,
}

impl BlockPart {
    /// The block or piece that has the range.
    pub fn unit(&self) -> KvUnit {
        KvUnit {
            plane: self.plane,
            ordinal: self.ordinal,
        }
    }
}

/// Closes a hand-off: the blocks that must have arrived, and the state of the sequence.
#[derive(Clone, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
pub struct Seal {
    pub handoff: HandoffId,
    /// The number of blocks sent (skipped blocks not counted).
    pub blocks_count: u32,
    /// The digest over every frame of a block, in any order, and every other field of this seal
    /// ([`crate::handoff::HandoffDigest::seal_digest`]); both ends compute it.
    pub digest: u64,
    /// The hash of the tokens, prompt and output, that were sent to the receiver with its
    /// reservation, as the sender has them ([`crate::block_hash`] of all of them as one block). If
    /// it differs, the KV belongs to another text.
    pub content: BlockHash,
    /// Output tokens drawn since the reservation, `[tokens >= 1]`, already emitted by the sender.
    /// The last of them has no KV yet: the KV covers everything before it.
    pub output: Vec<TokenId>,
    /// The digest over every frame of the state, in any order; `None` if the sequence has no state.
    #[serde(default)]
    pub state: Option<u64>,
    /// The blocks of the window plane that were sent; `None` if the model has no such plane.
    #[serde(default)]
    pub window: Option<SealedWindow>,
}

/// The part of a seal about the window plane.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
pub struct SealedWindow {
    /// The ordinal of the first block that was sent; all behind it were, up to the last of the
    /// sequence.
    pub first: u32,
    /// The digest over every frame of them, in any order.
    pub digest: u64,
}

/// Whether the payload of a packet arrived intact, as checked by the receiver.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
pub enum PayloadCondition {
    /// The bytes that were sent. Packets without a payload are always intact.
    Intact,
    /// The payload does not match the checksum of the sender.
    Damaged,
}
