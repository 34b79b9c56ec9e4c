//! What a worker says of itself.

use serde::{Deserialize, Serialize};
use std::fmt;

/// Which half of a request a worker serves.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
pub enum Leg {
    /// Runs prompts and hands their KV on.
    Prefill,
    /// Receives KV and generates.
    Decode,
    /// Either, per request.
    Both,
}

impl Leg {
    /// Whether a worker of this leg may run prompts for others.
    pub fn prefills(self) -> bool {
        matches!(self, Self::Prefill | Self::Both)
    }

    /// Whether a worker of this leg may generate.
    pub fn decodes(self) -> bool {
        matches!(self, Self::Decode | Self::Both)
    }
}

impl fmt::Display for Leg {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::Prefill => "prefill",
            Self::Decode => "decode",
            Self::Both => "both",
        })
    }
}

/// What must be equal for KV blocks to mean the same on two workers: weights revision, numeric
/// type, block layout and size. A readable text; equality is all that counts.
#[derive(Clone, Debug, Default, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
pub struct Fingerprint(pub String);

/// What a worker is and what it can hold; sent once when it joins.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct WorkerDescription {
    /// Which half it serves.
    pub leg: Leg,
    /// The model's served name.
    pub model: String,
    /// With whom it may exchange blocks.
    pub fingerprint: Fingerprint,
    /// Tokens per block.
    pub block_tokens: u32,
    /// Blocks in its pool.
    pub blocks_count: u32,
    /// Bytes of one block, all layers.
    pub block_bytes: u64,
    /// The longest sequence it takes, prompt and output together.
    pub context_tokens_max: u32,
    /// Sequences it runs at once.
    pub slots_count: u32,
    /// Requests it queues at most, each leg.
    pub queue_max: u32,
}

/// How busy a worker is, as of its last step.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Load {
    /// Prompt tokens accepted and not yet computed.
    pub queue_tokens: u64,
    /// Sequences waiting for their first step or for blocks.
    pub sequences_waiting: u32,
    /// Sequences in the running batch.
    pub sequences_running: u32,
    /// Blocks neither held nor promised; cached prefixes that could be evicted count as free.
    pub blocks_free: u32,
}
