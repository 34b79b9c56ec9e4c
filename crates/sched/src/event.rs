//! Everything that can happen to a worker, and everything it can ask of its body.

use cleave_domain::{
    BlockIndex, Failure, HandoffId, Leg, Order, Report, RouterId, Sampled, Slot, StepPlan,
    StepResult, WorkerId, WorkerRef,
};
use cleave_kv::{BlockPart, Packet};
use serde::{Deserialize, Serialize};
use std::time::Duration;

/// What a worker's brain is told once, at birth.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Limits {
    /// Who this is.
    pub me: WorkerRef,
    /// Which legs it serves.
    pub leg: Leg,
    /// Tokens per block.
    pub block_tokens: u32,
    /// Bytes per block; frames of one block add up to it.
    pub block_bytes: u32,
    /// Blocks in the pool.
    pub blocks_count: u32,
    /// Sequences in one step at most (`max_num_seqs`).
    pub slots_count: u32,
    /// Tokens in one step at most (`max_num_batched_tokens`); bounds the prefill chunk.
    pub step_tokens_max: u32,
    /// The model's context: prompt and output.
    pub context_tokens_max: u32,
    /// Prefill orders queued, and reservations waiting, at most; each.
    pub queue_max: u32,
    /// Output tokens to set blocks aside for when a sequence is reserved (or its `max_tokens`, if
    /// smaller); beyond it blocks are taken as they are needed.
    pub expected_output_tokens: u32,
    /// How long a hand-off lives without its router renewing it.
    pub lease: Duration,
    /// Whether blocks of finished sequences are kept for reuse.
    pub prefix_cache: bool,
}

/// What happened.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub enum Input {
    /// A router wants something.
    Ordered {
        /// Which router; the answer goes there.
        router: RouterId,
        /// What.
        order: Order,
    },
    /// A router connected; it knows nothing of this worker yet.
    RouterJoined {
        /// Which.
        router: RouterId,
    },
    /// A router is gone, and with it the clients of its flights.
    RouterLost {
        /// Which.
        router: RouterId,
    },
    /// Another worker said something. A frame's payload is kept by the body until it is imported
    /// or discarded.
    Arrived {
        /// Who.
        from: WorkerRef,
        /// What.
        packet: Packet,
    },
    /// The link to another worker broke; what was under way on it will not arrive.
    LinkLost {
        /// To whom.
        peer: WorkerId,
    },
    /// The engine copied bytes out and the link took them.
    Exported {
        /// The attempt.
        handoff: HandoffId,
        /// Which bytes.
        part: BlockPart,
        /// Their XXH3-64.
        checksum: u64,
    },
    /// A frame's payload is in the pool.
    Imported {
        /// The attempt.
        handoff: HandoffId,
        /// Which bytes.
        part: BlockPart,
    },
    /// The step ran.
    Stepped {
        /// What it gave.
        result: StepResult,
        /// How long the engine took.
        took: Duration,
    },
    /// The engine refused or broke the step; nothing of its results can be used.
    StepFailed {
        /// The engine's words.
        reason: String,
    },
    /// The process was asked to end: accept nothing new.
    Draining,
}

/// What the body must do, in this order.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub enum Output {
    /// Run this. At most one step is under way.
    Step(StepPlan),
    /// Say this to a router.
    Tell {
        /// Which.
        router: RouterId,
        /// What.
        report: Report,
    },
    /// A token for the client; goes past the router's brain.
    Emit {
        /// The router whose client it is.
        router: RouterId,
        /// The token.
        emission: Emission,
    },
    /// Copy a block out of the pool and send it: one frame or several, then `Exported` for each.
    Export {
        /// The attempt.
        handoff: HandoffId,
        /// To whom.
        to: WorkerRef,
        /// From where.
        block: BlockIndex,
        /// Which block of the sequence.
        ordinal: u32,
        /// To where.
        slot: Slot,
    },
    /// Say this to another worker, after the frames that were exported before.
    Send {
        /// To whom.
        to: WorkerRef,
        /// What; never a frame.
        packet: Packet,
    },
    /// Write a kept frame's payload into the pool, then `Imported`.
    Import {
        /// The attempt.
        handoff: HandoffId,
        /// Which frame.
        part: BlockPart,
        /// To where.
        slot: Slot,
    },
    /// Drop a kept frame's payload.
    Discard {
        /// The attempt.
        handoff: HandoffId,
        /// Which frame.
        part: BlockPart,
    },
    /// The hand-off is over for this worker: drop every kept payload and unsent frame of it.
    Forget {
        /// The attempt.
        handoff: HandoffId,
    },
    /// Draining is done: nothing is left here.
    Drained,
    /// A fact worth counting.
    Note(Note),
}

/// A token on its way to a client.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Emission {
    /// The attempt.
    pub handoff: HandoffId,
    /// Which output token of the request, counted from 0.
    pub index: u32,
    /// The token with its scores.
    pub sampled: Sampled,
    /// With the first token, when asked for: scores of prompt tokens 1.. (the first has none).
    pub prompt_scores: Vec<Sampled>,
}

/// Facts for metrics and logs. The simulator and the real worker count the same ones.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub enum Note {
    /// A step ran.
    Stepped {
        /// Prompt tokens in it.
        prefill_tokens: u32,
        /// Sequences that decoded in it.
        decode_sequences: u32,
        /// How long it took.
        took: Duration,
    },
    /// A prompt found some of its blocks in the prefix cache.
    PrefixLooked {
        /// Prompt tokens.
        prompt_tokens: u32,
        /// Of these, found.
        cached_tokens: u32,
    },
    /// A prompt waited this long for its first chunk.
    PrefillStarted {
        /// From order to first chunk.
        waited: Duration,
    },
    /// A hand-off's last frame left.
    Sealed {
        /// The attempt.
        handoff: HandoffId,
        /// Bytes sent.
        bytes: u64,
        /// Blocks sent.
        blocks: u32,
        /// From the first frame to the seal.
        took: Duration,
    },
    /// A hand-off arrived whole.
    Landed {
        /// The attempt.
        handoff: HandoffId,
        /// Bytes received.
        bytes: u64,
        /// Blocks received.
        blocks: u32,
        /// From reservation to landing.
        took: Duration,
        /// From the seal's arrival to landing: what the overlap with prefill did not hide.
        exposed: Duration,
    },
    /// Both legs were here; nothing had to move.
    Joined {
        /// The attempt.
        handoff: HandoffId,
    },
    /// A hand-off failed at this end.
    HandoffFailed {
        /// The attempt.
        handoff: HandoffId,
        /// Why.
        failure: Failure,
    },
    /// A late, foreign or doubled frame was dropped.
    FrameDiscarded {
        /// The attempt it named.
        handoff: HandoffId,
    },
    /// A running sequence lost its blocks and will be recomputed.
    Preempted {
        /// The attempt.
        handoff: HandoffId,
        /// Tokens whose KV is computed again.
        recomputed_tokens: u32,
    },
    /// From the order to cancel to every block free.
    CancelFreed {
        /// How long.
        took: Duration,
    },
    /// How the pool stands, after each step.
    Pool {
        /// Held by sequences and reservations.
        blocks_held: u32,
        /// Free or only cached.
        blocks_free: u32,
        /// Cached prefixes nobody holds.
        blocks_cached: u32,
        /// Sequences running.
        sequences_running: u32,
        /// Sequences waiting.
        sequences_waiting: u32,
    },
}
