//! Everything that can happen to a worker, and everything it can ask of its body.
//!
//! Owns: the whole contract between brain and body, but for the notes (`note.rs`). Never: an
//! address, a byte of KV or a reading of a clock; a body adds those.
//! Invariant: every value serialises, so that a tape of inputs replays to the same outputs.

use crate::LookupLimits;
use crate::note::WorkerNote;
use crate::outcome::{FetchOutcome, OffloadOutcome, StepFault, SwapOutcome};
use cleave_domain::{
    BlockHash, BlockIndex, BlockRef, Capacity, Emission, HandoffId, HandoffTarget, KvPlane, KvUnit,
    LinkPrice, Order, Prices, Report, Role, RouterId, SlotIndex, StepId, StepPlan, StepResult,
    WindowTable, WorkerRef,
};
use cleave_kv::{BlockPart, Packet, PayloadCondition, PoolWriter, TierLevel};
use serde::{Deserialize, Serialize};
use std::time::Duration;

/// Configuration of a worker's brain, fixed at construction.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct WorkerLimits {
    pub me: WorkerRef,
    /// Legs that it serves, until an order changes them.
    pub role: Role,
    /// Limits of the engine.
    pub capacity: Capacity,
    /// Size of the model's vocabulary: a request that names a token beyond it is refused, since the
    /// engine could not run it.
    pub vocab_size: u32,
    /// Upper limit of queued prefill orders, and separately of waiting reservations.
    pub queue_max: u32,
    /// How long a hand-off lives without its router renewing it.
    pub lease: Duration,
    /// How long a hand-off may make no progress once nothing is left to compute for it: a frame or
    /// seal was lost although its link stands. While blocks of a paused sequence are still to be
    /// read, `step_max` is added: reads may queue behind a step.
    pub stall_max: Duration,
    /// How long a step may take before the worker reports that it is stuck.
    pub step_max: Duration,
    /// Whether blocks of finished sequences are kept for reuse.
    pub prefix_cache: bool,
    /// Blocks of host memory to which sequences may be swapped when the pool is short; 0 for none.
    /// A piece of a state counts as a block.
    pub swap_blocks: u32,
    /// Blocks of host memory for prefix-cache blocks that would be evicted; 0 for none, and then
    /// none on disk either. A piece of a snapshot of a state counts as a block.
    #[serde(default)]
    pub host_blocks: u32,
    /// Blocks on disk for the same purpose.
    #[serde(default)]
    pub disk_blocks: u32,
    /// How frames from other workers reach the pool.
    pub writer: PoolWriter,
    /// Prices measured before the worker joined; every step corrects them from then on.
    pub prices: Prices,
    /// Steps under way at most: 1, or 2 if the engine takes one while it runs the one before.
    #[serde(default = "one_step")]
    pub steps_in_flight: u32,
    /// Limits of prompt-lookup speculation, further bounded by what the engine takes for each
    /// sequence; `None` for none. None if the model has states.
    #[serde(default)]
    pub speculation: Option<LookupLimits>,
}

impl WorkerLimits {
    /// Whether a target has the window that a sequence of `tokens` tokens needs there, for as many
    /// blocks as it has itself.
    pub(crate) fn fits_window(&self, target: &HandoffTarget, tokens: u32) -> bool {
        match (self.capacity.window(), &target.window) {
            (None, None) => true,
            (Some(of_model), Some(window)) => {
                let end = window.first as usize + window.blocks.len();
                window.first == of_model.first_block(tokens)
                    && end == target.present as usize + target.blocks.len()
            }
            _ => false,
        }
    }

    /// The limits without what a model with states cannot have: a wrong draft cannot be taken back
    /// from a state.
    pub(crate) fn possible(self) -> Self {
        if self.capacity.states.is_none() {
            return self;
        }
        Self {
            speculation: None,
            ..self
        }
    }
}

/// Default for tapes written before the field existed.
fn one_step() -> u32 {
    1
}

impl WorkerInput {
    /// Whether it is about a copy that is under way: it changes nothing that a step or a router
    /// depends on until all of its hand-off has landed.
    pub(crate) fn is_copy_under_way(&self) -> bool {
        matches!(
            self,
            Self::Imported { .. }
                | Self::Exported { .. }
                | Self::Arrived {
                    packet: Packet::Frame { .. },
                    ..
                }
        )
    }
}

/// A piece of a snapshot or of a block of the window plane, as long as a block, but for the last.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
pub struct SnapshotPiece {
    /// Its number, from 0.
    pub ordinal: u32,
    /// Its content, by which it is stored.
    pub content: BlockHash,
}

/// A state that is copied back from the tiers.
#[derive(Clone, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
pub struct StateFetch {
    /// The contents of all pieces, in order.
    pub pieces: Vec<BlockHash>,
    /// The slot that they go to.
    pub slot: BlockIndex,
}

/// A window to be fetched from a tier.
#[derive(Clone, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
pub struct WindowFetch {
    /// The contents of all pieces of all blocks, in order.
    pub pieces: Vec<BlockHash>,
    /// The blocks that they go to.
    pub table: WindowTable,
}

#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub enum WorkerInput {
    /// A router sent an order.
    Ordered {
        /// The sender; the answer goes there.
        router: RouterId,
        order: Order,
    },
    /// A router connected; it has received nothing from this worker yet.
    RouterJoined { router: RouterId },
    /// A router's connection ended, and with it the clients of its flights.
    RouterLost { router: RouterId },
    /// A packet arrived from another worker. The body keeps a frame's payload; exactly one
    /// `Import` or `Discard` answers it before the next input.
    Arrived {
        from: WorkerRef,
        packet: Packet,
        /// Whether the checksum of a frame's payload is right.
        condition: PayloadCondition,
    },
    /// A peer is fenced: no operation of this incarnation can reach this pool any more, because its
    /// process ended or its access was revoked. Stronger than a lost link, which stops no write
    /// under way. One input for each incarnation is enough: it is remembered.
    #[serde(rename = "Severed")]
    Fenced { peer: WorkerRef },
    /// Answers `SwapOut`, exactly once.
    SwappedOut {
        handoff: HandoffId,
        outcome: SwapOutcome,
        took: Duration,
    },
    /// Answers `SwapIn`, exactly once.
    SwappedIn {
        handoff: HandoffId,
        outcome: SwapOutcome,
        took: Duration,
    },
    /// An earlier incarnation left these contents on disk, whole as far as is known. At most one,
    /// before any other input.
    FoundOnDisk { contents: Vec<BlockHash> },
    /// Answers `Shelve`, once: the block is no longer read.
    #[serde(rename = "Shelved")]
    Offloaded {
        content: BlockHash,
        outcome: OffloadOutcome,
        took: Duration,
    },
    /// Answers `SpillToDisk`, exactly once.
    #[serde(rename = "WrittenOn")]
    SpilledToDisk {
        content: BlockHash,
        outcome: OffloadOutcome,
        took: Duration,
    },
    /// Answers `Fetch`, once: none of its blocks is written any more.
    Fetched {
        handoff: HandoffId,
        /// Number of leading blocks that are in the pool, each verified; after the last one, the
        /// pieces of the state count.
        came: u32,
        outcome: FetchOutcome,
        /// Time since it was requested.
        took: Duration,
        /// Time spent on finding, checking and copying its blocks, without steps and other fetches
        /// in between.
        worked: Duration,
    },
    /// The link to another worker's incarnation broke; what was under way on it will not arrive. It
    /// comes before anything that arrives on a new link.
    LinkLost { peer: WorkerRef },
    /// The body measured the link to another worker.
    LinkMeasured { peer: WorkerRef, price: LinkPrice },
    /// Answers `Export`, once, also after `Forget` or `LinkLost`: the block is no longer read.
    Exported {
        handoff: HandoffId,
        /// Plane of the block, or of the piece of a state.
        #[serde(default)]
        plane: KvPlane,
        /// Its index, as in [`KvUnit::ordinal`].
        ordinal: u32,
        outcome: ExportOutcome,
    },
    /// Answers `Import`, once, also after `Forget`: the block is no longer written.
    Imported {
        handoff: HandoffId,
        part: BlockPart,
        outcome: ImportOutcome,
    },
    Stepped {
        result: StepResult,
        /// Time on the engine; of a step queued behind another, since that one ended.
        took: Duration,
    },
    /// The engine refused or broke the step; its writes are undefined, and none of its results can
    /// be used.
    StepFailed {
        step: StepId,
        /// Slots of the sequences that alone made it fail, as far as the engine knows: without them
        /// it would have run, and nothing but the positions of the plan's segments can have been
        /// written. Empty: it failed for all.
        #[serde(default)]
        slots: Vec<SlotIndex>,
        #[serde(default)]
        fault: StepFault,
        /// The reason; without a text of a constraint.
        reason: String,
    },
    /// The engine broke, and only a new process repairs that. Steps and copies that it had accepted
    /// are still answered.
    EngineLost { reason: String },
    /// The brain's deadline passed; an early wake-up is harmless.
    Woke,
    /// The process was asked to end: accept nothing new.
    Draining,
}

/// Work for the body, to be performed in this order.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub enum WorkerOutput {
    /// Run this step, after the one under way if there is one; at most
    /// [`WorkerLimits::steps_in_flight`] are under way. They are answered in this order.
    Step(StepPlan),
    /// Send this report to a router.
    #[serde(rename = "Tell")]
    Report { router: RouterId, report: Report },
    /// Send a token to the client; it bypasses the router's brain.
    Emit {
        /// The attempt; its flight names the router.
        handoff: HandoffId,
        emission: Emission,
    },
    /// Copy a block, or a piece of a state, out of the pool and send it, as one frame or several;
    /// answered by `Exported`.
    Export(BlockExport),
    /// Send this packet to another worker, at once: frames of exports that are not answered yet may
    /// follow.
    Send {
        to: WorkerRef,
        /// Any packet but a frame.
        packet: Packet,
    },
    /// Write the payload of the frame that just arrived into the pool; answered by `Imported`.
    Import {
        handoff: HandoffId,
        part: BlockPart,
        block: BlockRef,
    },
    /// Drop the payload of the frame that just arrived.
    Discard { handoff: HandoffId, part: BlockPart },
    /// Copy these blocks and this state to host memory, under the hand-off's name; answered by
    /// `SwappedOut`. They do not change until then.
    SwapOut {
        handoff: HandoffId,
        /// In the sequence's order.
        blocks: Vec<BlockIndex>,
        /// The slot of its state, where the model has states.
        #[serde(default)]
        state: Option<BlockIndex>,
        /// Its live window, where the model has such a plane.
        #[serde(default)]
        window: Option<WindowTable>,
    },
    /// Copy what `SwapOut` stored back into these blocks, as many as it had, and this slot, and
    /// drop it; answered by `SwappedIn`.
    SwapIn {
        handoff: HandoffId,
        /// In the sequence's order.
        blocks: Vec<BlockIndex>,
        /// The slot of its state, where the model has states.
        #[serde(default)]
        state: Option<BlockIndex>,
        /// Its live window, where the model has such a plane.
        #[serde(default)]
        window: Option<WindowTable>,
    },
    /// Drop what `SwapOut` stored or is storing; `SwapOut` and `SwapIn` are answered all the same.
    SwapDrop { handoff: HandoffId },
    /// Copy a block of the prefix cache to host memory, under its content hash, or pieces of a
    /// snapshot or of a block of the window plane, each under its own; answered by `Offloaded`. The
    /// block does not change until then.
    #[serde(rename = "Shelve")]
    Offload {
        content: BlockHash,
        /// The plane of the block.
        #[serde(default)]
        plane: KvPlane,
        /// The block, or the slot of the snapshot.
        block: BlockIndex,
        /// The pieces that are to be copied; empty for a block of the plane of blocks.
        #[serde(default)]
        pieces: Vec<SnapshotPiece>,
    },
    /// Write a content from host memory to disk, and keep both copies; answered by `SpilledToDisk`.
    #[serde(rename = "WriteOn")]
    SpillToDisk { content: BlockHash },
    /// Copy stored contents into these blocks, and then the pieces of a window and of a state, each
    /// verified; answered by `Fetched`. They stay stored. Where one fails, those before it remain
    /// valid.
    Fetch {
        handoff: HandoffId,
        /// Contents and their destinations, in the sequence's order.
        blocks: Vec<(BlockHash, BlockIndex)>,
        /// The window before their end, where the tiers have it.
        #[serde(default)]
        window: Option<WindowFetch>,
        /// The state after them, where the model has states.
        #[serde(default)]
        state: Option<StateFetch>,
    },
    /// Stop the fetch early; `Fetch` is still answered, soon.
    FetchStop { handoff: HandoffId },
    /// Delete a content from this tier.
    TierDrop {
        content: BlockHash,
        place: TierLevel,
    },
    /// The hand-off is over for this worker: its copies under way need not be finished, but every
    /// `Export` and `Import` is still answered.
    Forget { handoff: HandoffId },
    /// Draining is complete: nothing is left here.
    Drained,
    /// A fact for metrics, traces and logs.
    Note(WorkerNote),
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct BlockExport {
    pub handoff: HandoffId,
    pub to: WorkerRef,
    /// Plane of the block, or of the piece of a state.
    #[serde(default)]
    pub plane: KvPlane,
    /// Block or slot of this pool.
    pub from: BlockIndex,
    /// Its index, as in [`KvUnit::ordinal`].
    pub ordinal: u32,
    /// Block or slot of the receiver's pool.
    pub block: BlockRef,
}

impl BlockExport {
    /// The block, or the piece of a state, that is exported.
    pub fn unit(&self) -> KvUnit {
        KvUnit {
            plane: self.plane,
            ordinal: self.ordinal,
        }
    }

    /// The input that answers it.
    pub fn answer(&self, outcome: ExportOutcome) -> WorkerInput {
        WorkerInput::Exported {
            handoff: self.handoff,
            plane: self.plane,
            ordinal: self.ordinal,
            outcome,
        }
    }
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
pub enum ExportOutcome {
    /// The link took all its frames.
    Sent {
        /// This block's contribution to the seal's digest.
        digest: u64,
        bytes: u64,
    },
    /// The hand-off was forgotten or the link was lost before that.
    Dropped,
    /// The engine could not read it.
    Broken,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
pub enum ImportOutcome {
    /// The bytes are in the pool.
    Written,
    /// The hand-off was forgotten before that.
    Dropped,
    /// The bytes in the pool do not match the checksum that was sent with them.
    Damaged,
    /// The engine could not write them.
    Broken,
}
