//! Everything that can happen to a worker, and everything it can ask of its body.
//!
//! Owns: the whole contract between brain and body, and what is noted for people. Never: an address, a
//! byte of KV or a moment of a clock; a body adds those.
//! Invariant: every value serialises, so that a tape of inputs replays to the same outputs.

use crate::Lookup;
use crate::outcome::{FetchOutcome, KeepOutcome, SwapOutcome};
use cleave_domain::{
    BlockHash, BlockIndex, BlockRef, Capacity, Emission, Failure, HandoffId, LinkPrice, Order,
    Prices, Report, Role, RouterId, SlotIndex, StepId, StepPlan, StepResult, Work, WorkerRef,
};
use cleave_kv::{BlockPart, Condition, Packet, Place, Writer};
use serde::{Deserialize, Serialize};
use std::time::Duration;

/// What a worker's brain is told once, at birth.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Limits {
    /// Who this is.
    pub me: WorkerRef,
    /// Which legs it serves, until an order says otherwise.
    pub role: Role,
    /// What the engine can hold and run.
    pub capacity: Capacity,
    /// Tokens of the model's vocabulary: what names another could never run, and is refused.
    pub vocab_size: u32,
    /// Prefill orders queued, and reservations waiting, at most; each.
    pub queue_max: u32,
    /// How long a hand-off lives without its router renewing it.
    pub lease: Duration,
    /// How long a hand-off may stand still once nothing is left to compute for it: a frame or seal
    /// that got lost without its link breaking. While blocks of a sequence that stands still are yet to
    /// be read, `step_max` comes on top: they may queue behind a step.
    pub stall_max: Duration,
    /// How long a step may take before the worker says that it is stuck.
    pub step_max: Duration,
    /// Whether blocks of finished sequences are kept for reuse.
    pub prefix_cache: bool,
    /// Blocks of host memory to which sequences may be swapped when the pool is short; 0 for none.
    pub swap_blocks: u32,
    /// Blocks of host memory for what the prefix cache would lose; 0 for none, and then none on disk.
    #[serde(default)]
    pub host_blocks: u32,
    /// Blocks on disk for the same.
    #[serde(default)]
    pub disk_blocks: u32,
    /// How frames from other workers reach the pool.
    pub writer: Writer,
    /// What its work costs, as measured before it joined; corrected by every step from then on.
    pub prices: Prices,
    /// Steps under way at most: 1, or 2 if the engine takes one while it runs the one before.
    #[serde(default = "one_step")]
    pub steps_in_flight: u32,
    /// How tokens are guessed that a step verifies, no more of each sequence than the engine takes; `None` for
    /// none.
    #[serde(default)]
    pub speculation: Option<Lookup>,
}

/// What tapes that do not say it were written with.
fn one_step() -> u32 {
    1
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
    /// Another worker said something. The body keeps a frame's payload; exactly one `Import` or
    /// `Discard` answers it before the next input.
    Arrived {
        /// Who.
        from: WorkerRef,
        /// What.
        packet: Packet,
        /// Whether a frame's payload has the checksum that the sender gave it.
        condition: Condition,
    },
    /// Nothing that another worker's life still does can reach this pool: its process is known to have
    /// ended, or its access was revoked. More than a lost link, which stops no write under way. Said once
    /// of each life is enough: it is remembered.
    Severed {
        /// From whose.
        peer: WorkerRef,
    },
    /// The one answer to `SwapOut`.
    SwappedOut {
        /// The attempt.
        handoff: HandoffId,
        /// What became of it.
        outcome: SwapOutcome,
        /// How long the copy took.
        took: Duration,
    },
    /// The one answer to `SwapIn`.
    SwappedIn {
        /// The attempt.
        handoff: HandoffId,
        /// What became of it.
        outcome: SwapOutcome,
        /// How long the copy took.
        took: Duration,
    },
    /// An earlier life left these on disk, whole as far as is known. Said once, before anything else, if
    /// at all.
    FoundOnDisk {
        /// What they contain.
        contents: Vec<BlockHash>,
    },
    /// The one answer to `Shelve`: the block is no longer read.
    Shelved {
        /// Which content.
        content: BlockHash,
        /// What became of it.
        outcome: KeepOutcome,
        /// How long the copy took.
        took: Duration,
    },
    /// The one answer to `WriteOn`.
    WrittenOn {
        /// Which content.
        content: BlockHash,
        /// What became of it.
        outcome: KeepOutcome,
        /// How long it took.
        took: Duration,
    },
    /// The one answer to `Fetch`: none of its blocks is written any more.
    Fetched {
        /// The attempt.
        handoff: HandoffId,
        /// So many of the blocks, from the first on, are in the pool, each verified.
        came: u32,
        /// Why not more.
        outcome: FetchOutcome,
        /// From when it was asked for.
        took: Duration,
        /// Of that, finding, checking and copying its blocks: no step in between, no other's fetch.
        worked: Duration,
    },
    /// The link to another worker's life broke; what was under way on it will not arrive, and it is
    /// said before anything that arrives on a new one.
    LinkLost {
        /// To whom.
        peer: WorkerRef,
    },
    /// The body measured the link to another worker.
    LinkMeasured {
        /// To whom.
        peer: WorkerRef,
        /// What it found.
        price: LinkPrice,
    },
    /// The one answer to `Export`, also after `Forget` or `LinkLost`: the block is no longer read.
    Exported {
        /// The attempt.
        handoff: HandoffId,
        /// Which block of the sequence.
        ordinal: u32,
        /// What became of it.
        outcome: ExportOutcome,
    },
    /// The one answer to `Import`, also after `Forget`: the block is no longer written.
    Imported {
        /// The attempt.
        handoff: HandoffId,
        /// Which bytes.
        part: BlockPart,
        /// What became of them.
        outcome: ImportOutcome,
    },
    /// The step ran.
    Stepped {
        /// What it gave.
        result: StepResult,
        /// How long the engine took; of one behind another, since that was over.
        took: Duration,
    },
    /// The engine refused or broke the step; what it was to write is unknown, and nothing of its
    /// results can be used.
    StepFailed {
        /// Which.
        step: StepId,
        /// The slot for whose sequence alone it failed, if the engine knows: without that one it would have
        /// run, and nothing but the positions of the plan's segments can have been written.
        #[serde(default)]
        slot: Option<SlotIndex>,
        /// The engine's words.
        reason: String,
    },
    /// The engine broke, and nothing makes that good but a new process. What it had before it is
    /// still answered.
    EngineLost {
        /// The engine's words.
        reason: String,
    },
    /// The brain's deadline passed; an early wake-up is harmless.
    Woke,
    /// The process was asked to end: accept nothing new.
    Draining,
}

/// What the body must do, in this order.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub enum Output {
    /// Run this, after the one under way if there is one; at most [`Limits::steps_in_flight`] are. They are
    /// answered in this order.
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
        /// The attempt; its flight names the router.
        handoff: HandoffId,
        /// The token.
        emission: Emission,
    },
    /// Copy a block out of the pool and send it, as one frame or several; answered by `Exported`.
    Export(Export),
    /// Say this to another worker, at once: frames of exports that are not answered yet may follow.
    Send {
        /// To whom.
        to: WorkerRef,
        /// What; never a frame.
        packet: Packet,
    },
    /// Write the payload of the frame that just arrived into the pool; answered by `Imported`.
    Import {
        /// The attempt.
        handoff: HandoffId,
        /// Which frame.
        part: BlockPart,
        /// To where.
        block: BlockRef,
    },
    /// Drop the payload of the frame that just arrived.
    Discard {
        /// The attempt.
        handoff: HandoffId,
        /// Which frame.
        part: BlockPart,
    },
    /// Copy these blocks to host memory, to be kept under the hand-off's name; answered by
    /// `SwappedOut`. The blocks stay as they are until then.
    SwapOut {
        /// The attempt.
        handoff: HandoffId,
        /// From where, in the sequence's order.
        blocks: Vec<BlockIndex>,
    },
    /// Copy what `SwapOut` kept back into these blocks, as many as it had, and drop it; answered by
    /// `SwappedIn`.
    SwapIn {
        /// The attempt.
        handoff: HandoffId,
        /// To where, in the sequence's order.
        blocks: Vec<BlockIndex>,
    },
    /// Drop what `SwapOut` kept, or would have; `SwapOut` and `SwapIn` are answered all the same.
    SwapDrop {
        /// The attempt.
        handoff: HandoffId,
    },
    /// Copy a block of the prefix cache to host memory, to be kept by its content; answered by `Shelved`.
    /// The block stays as it is until then.
    Shelve {
        /// What it contains: the content's name, and whose it is.
        content: BlockHash,
        /// From where.
        block: BlockIndex,
    },
    /// Write what host memory keeps of a content to disk, where it stays beside it; answered by
    /// `WrittenOn`.
    WriteOn {
        /// Which content.
        content: BlockHash,
    },
    /// Copy contents that are kept into these blocks, each verified; answered by `Fetched`. They stay kept.
    /// Whatever is amiss with one, those before it are of use.
    Fetch {
        /// The attempt.
        handoff: HandoffId,
        /// What, and to where, in the sequence's order.
        blocks: Vec<(BlockHash, BlockIndex)>,
    },
    /// Bring no more of it back; `Fetch` is answered all the same, and soon.
    FetchStop {
        /// The attempt.
        handoff: HandoffId,
    },
    /// Keep a content in this place no longer.
    TierDrop {
        /// Which content.
        content: BlockHash,
        /// Where.
        place: Place,
    },
    /// The hand-off is over for this worker: what is still under way of it need not be finished, but
    /// every `Export` and `Import` is still answered.
    Forget {
        /// The attempt.
        handoff: HandoffId,
    },
    /// Draining is done: nothing is left here.
    Drained,
    /// A fact worth counting.
    Note(Note),
}

/// See [`Output::Export`].
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Export {
    /// The attempt.
    pub handoff: HandoffId,
    /// To whom.
    pub to: WorkerRef,
    /// From where.
    pub from: BlockIndex,
    /// Which block of the sequence.
    pub ordinal: u32,
    /// To where.
    pub block: BlockRef,
}

impl Export {
    /// The fact that answers it.
    pub fn answer(&self, outcome: ExportOutcome) -> Input {
        Input::Exported {
            handoff: self.handoff,
            ordinal: self.ordinal,
            outcome,
        }
    }
}

/// See [`Input::Exported`].
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
pub enum ExportOutcome {
    /// The link took all its frames.
    Sent {
        /// The fold of its frames into the seal's digest.
        digest: u64,
        /// Payload bytes.
        bytes: u64,
    },
    /// The hand-off was forgotten or the link was lost before that.
    Dropped,
    /// The engine could not read it.
    Broken,
}

/// See [`Input::Imported`].
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
pub enum ImportOutcome {
    /// The bytes are in the pool.
    Written,
    /// The hand-off was forgotten before that.
    Dropped,
    /// What is in the pool does not have the checksum that was sent with it.
    Damaged,
    /// The engine could not write them.
    Broken,
}

/// What became of the guesses for a step.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
pub enum Drafting {
    /// Some are verified.
    Drafted,
    /// There were none: no sequence repeats itself.
    NoGuess,
    /// They are too rarely right for what their rows cost.
    NoGain,
    /// They would make the step longer than a stream in it was promised.
    NoTime,
    /// No row or block is left.
    NoRoom,
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
        /// What it had to do.
        work: Work,
        /// How long it was predicted to take; zero before anything was known.
        predicted: Duration,
    },
    /// A step in which sequences drew their next token could have verified guesses.
    Drafted {
        /// Tokens guessed and verified.
        drafted_tokens: u32,
        /// Of these, true.
        accepted_tokens: u32,
        /// What came of it, or why nothing did.
        drafting: Drafting,
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
    /// An order named a hand-off and leg that is here already.
    Repeated {
        /// The attempt.
        handoff: HandoffId,
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
    /// A running sequence gave up its blocks to host memory.
    SwappedOut {
        /// The attempt.
        handoff: HandoffId,
        /// How many.
        blocks: u32,
        /// How long the copy took.
        took: Duration,
    },
    /// It has them back.
    SwappedIn {
        /// The attempt.
        handoff: HandoffId,
        /// How many.
        blocks: u32,
        /// How long the copy took.
        took: Duration,
    },
    /// A content was to be kept below the pool.
    Kept {
        /// Where.
        place: Place,
        /// Whether it is.
        outcome: KeepOutcome,
        /// How long that took.
        took: Duration,
    },
    /// A sequence's beginning was brought back from below the pool.
    Fetched {
        /// The attempt.
        handoff: HandoffId,
        /// Blocks asked for.
        asked: u32,
        /// Blocks that came.
        came: u32,
        /// Why not more.
        outcome: FetchOutcome,
        /// From when it was asked for.
        took: Duration,
    },
    /// How full the places below the pool are, whenever that has changed.
    Tiers {
        /// Blocks in host memory, or on their way there.
        host_blocks: u32,
        /// Blocks on disk, or on their way there.
        disk_blocks: u32,
    },
    /// A running sequence moved to another worker.
    MovedOut {
        /// The new attempt.
        handoff: HandoffId,
        /// Bytes sent.
        bytes: u64,
        /// Blocks sent.
        blocks: u32,
        /// From the order to the landing.
        took: Duration,
        /// Of that, how long it stood still.
        still: Duration,
    },
    /// A running sequence was to move, and did not.
    Stayed {
        /// The new attempt.
        handoff: HandoffId,
        /// Why.
        failure: Failure,
    },
    /// The step under way takes too long.
    Stuck {
        /// So far.
        running: Duration,
    },
    /// From the order to cancel to every block free.
    CancelFreed {
        /// How long.
        took: Duration,
    },
    /// How the pool stands, whenever that has changed.
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
        /// Of those held: by reservations whose KV has not landed.
        blocks_reserved: u32,
        /// Of those held: by prompts that run or leave under a lease, to be handed on.
        blocks_leased: u32,
        /// Of those held: by hand-offs that are over and whose writer has not stopped.
        blocks_quarantined: u32,
        /// Held by nobody that the audit can name; anything but 0 is a defect.
        blocks_leaked: u32,
        /// Blocks in host memory.
        blocks_swapped: u32,
    },
}
