//! What a worker says of itself.

use serde::{Deserialize, Serialize};
use std::fmt;

/// Which legs a worker serves.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
pub enum Role {
    /// Runs prompts and hands their KV on.
    Prefill,
    /// Receives KV and generates.
    Decode,
    /// Either, per request.
    Both,
}

impl Role {
    /// Whether a worker of this role runs prompts.
    pub fn prefills(self) -> bool {
        matches!(self, Self::Prefill | Self::Both)
    }

    /// Whether a worker of this role generates.
    pub fn decodes(self) -> bool {
        matches!(self, Self::Decode | Self::Both)
    }
}

impl fmt::Display for Role {
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
    /// Which legs it serves.
    pub role: Role,
    /// The model's served name.
    pub model: String,
    /// With whom it may exchange blocks.
    pub fingerprint: Fingerprint,
    /// What it can hold.
    pub capacity: Capacity,
    /// Requests it queues at most, each leg.
    pub queue_max: u32,
}

/// What an engine can hold and run; the same numbers for engine, scheduler and router.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Capacity {
    /// Tokens per block.
    pub block_tokens: u32,
    /// Bytes of one block: `layers × 2 × kv_heads × block_tokens × head_dim × element`.
    pub block_bytes: u32,
    /// Blocks in the pool.
    pub blocks_count: u32,
    /// Sequences in one step at most (`max_num_seqs`).
    pub slots_count: u32,
    /// Tokens in one step at most (`max_num_batched_tokens`); bounds the prefill chunk.
    pub step_tokens_max: u32,
    /// The longest sequence, prompt and output together.
    pub context_tokens_max: u32,
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
    /// Whether its steps come to an end.
    pub progress: Progress,
}

/// Whether a worker gets anywhere.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash, Serialize, Deserialize)]
pub enum Progress {
    /// Idle, or in a step that takes no longer than a step may.
    #[default]
    Moving,
    /// The step under way takes longer than any should.
    Stuck,
}
