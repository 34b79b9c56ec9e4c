//! Facts that a worker's brain tells for metrics, traces and logs.
//!
//! Owns: the notes and the outcome of speculation. Never: asks the body for anything.
//! Invariant: a note changes no decision.

use crate::outcome::{FetchOutcome, OffloadOutcome};
use cleave_domain::{Failure, HandoffId, StepWork};
use cleave_kv::TierLevel;
use serde::{Deserialize, Serialize};
use std::time::Duration;

/// Outcome of speculation in a step.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
pub enum DraftOutcome {
    Drafted,
    /// No sequence repeats itself, so there was nothing to draft.
    NoGuess,
    /// The drafts are accepted too rarely for what their rows cost.
    NoGain,
    /// The drafts would make the step longer than a stream's target allows.
    NoTime,
    /// No row or block is left.
    NoRoom,
}

/// Facts for metrics and logs. The simulator and the real worker count the same ones.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub enum WorkerNote {
    Stepped {
        prefill_tokens: u32,
        /// Sequences that decoded in it.
        decode_sequences: u32,
        took: Duration,
        work: StepWork,
        /// Predicted time; zero before prices were known.
        predicted: Duration,
    },
    /// A step in which sequences drew their next token could have verified drafts.
    Drafted {
        /// Draft tokens that the step verified.
        drafted_tokens: u32,
        accepted_tokens: u32,
        /// Why there were drafts or none.
        drafting: DraftOutcome,
    },
    /// A prompt was looked up in the prefix cache.
    #[serde(rename = "PrefixLooked")]
    PrefixLookedUp {
        prompt_tokens: u32,
        cached_tokens: u32,
    },
    /// A prompt's first chunk is placed in a step.
    PrefillStarted {
        /// Time from the order to the first chunk.
        waited: Duration,
    },
    /// A hand-off's last frame was sent.
    Sealed {
        handoff: HandoffId,
        bytes: u64,
        blocks: u32,
        /// From the first frame to the seal.
        took: Duration,
    },
    /// A hand-off arrived whole.
    Landed {
        handoff: HandoffId,
        bytes: u64,
        blocks: u32,
        /// Time from reservation to landing.
        took: Duration,
        /// Time from the seal's arrival to landing: the part that the overlap with prefill did not
        /// hide.
        exposed: Duration,
    },
    /// Both legs ran on this worker; nothing had to be transferred.
    Joined { handoff: HandoffId },
    /// A hand-off failed at this end.
    HandoffFailed {
        handoff: HandoffId,
        failure: Failure,
    },
    /// An order named a hand-off and leg that exist here already.
    Repeated { handoff: HandoffId },
    /// A late, foreign or doubled frame was dropped.
    FrameDiscarded { handoff: HandoffId },
    /// A running sequence lost its blocks and will be recomputed.
    Preempted {
        handoff: HandoffId,
        /// Tokens whose KV is computed again.
        recomputed_tokens: u32,
    },
    /// A running sequence was copied to host memory.
    SwappedOut {
        handoff: HandoffId,
        /// Blocks, and pieces of its state.
        blocks: u32,
        took: Duration,
    },
    /// A swapped sequence was copied back into the pool.
    SwappedIn {
        handoff: HandoffId,
        /// Blocks, and pieces of its state.
        blocks: u32,
        took: Duration,
    },
    /// A block's copy to a tier ended.
    #[serde(rename = "Kept")]
    Offloaded {
        place: TierLevel,
        outcome: OffloadOutcome,
        took: Duration,
    },
    /// A fetch of a sequence's leading blocks from the tiers ended.
    Fetched {
        handoff: HandoffId,
        asked: u32,
        came: u32,
        outcome: FetchOutcome,
        /// Time since it was requested.
        took: Duration,
    },
    /// Occupancy of the tiers, whenever it has changed.
    Tiers {
        /// Blocks in host memory, or being copied there.
        host_blocks: u32,
        /// Blocks on disk, or being written there.
        disk_blocks: u32,
    },
    /// A running sequence moved to another worker.
    #[serde(rename = "MovedOut")]
    MigratedOut {
        handoff: HandoffId,
        bytes: u64,
        blocks: u32,
        /// Time from the order to the landing.
        took: Duration,
        /// Part of it during which the sequence was paused.
        still: Duration,
    },
    /// A running sequence was to move, and the move was aborted.
    #[serde(rename = "Stayed")]
    MigrationAborted {
        handoff: HandoffId,
        failure: Failure,
    },
    /// The step under way exceeds `step_max`.
    Stuck { running: Duration },
    /// Time from the order to cancel until every block is free.
    CancelFreed { took: Duration },
    /// State of the pool, whenever it has changed.
    Pool {
        /// Held by sequences and reservations.
        blocks_held: u32,
        /// Free or only cached.
        blocks_free: u32,
        /// Cached prefixes that no sequence holds.
        blocks_cached: u32,
        sequences_running: u32,
        sequences_waiting: u32,
        /// Part of those held: by reservations whose KV has not landed.
        blocks_reserved: u32,
        /// Part of those held: by prompts that run or are sent under a lease.
        blocks_leased: u32,
        /// Part of those held: by hand-offs that are over and whose writer has not stopped.
        blocks_quarantined: u32,
        /// Held without an owner that the audit can name; anything but 0 is a defect.
        blocks_leaked: u32,
        blocks_swapped: u32,
        /// State slots held by sequences: their states and the snapshots that they use.
        #[serde(default)]
        states_held: u32,
        /// Snapshots that no sequence uses.
        #[serde(default)]
        states_cached: u32,
        /// State slots held without an owner; anything but 0 is a defect.
        #[serde(default)]
        states_leaked: u32,
        /// Blocks of the window plane held by sequences.
        #[serde(default)]
        windows_held: u32,
        /// Blocks of the window plane that no sequence holds, kept for their content.
        #[serde(default)]
        windows_cached: u32,
        /// Blocks of the window plane held without an owner; anything but 0 is a defect.
        #[serde(default)]
        windows_leaked: u32,
    },
}

impl WorkerNote {
    /// The hand-off that it is about, if any.
    pub fn handoff(&self) -> Option<HandoffId> {
        match self {
            Self::Sealed { handoff, .. }
            | Self::Landed { handoff, .. }
            | Self::Joined { handoff }
            | Self::HandoffFailed { handoff, .. }
            | Self::Repeated { handoff }
            | Self::FrameDiscarded { handoff }
            | Self::Preempted { handoff, .. }
            | Self::SwappedOut { handoff, .. }
            | Self::SwappedIn { handoff, .. }
            | Self::Fetched { handoff, .. }
            | Self::MigratedOut { handoff, .. }
            | Self::MigrationAborted { handoff, .. } => Some(*handoff),
            Self::Stepped { .. }
            | Self::Drafted { .. }
            | Self::PrefixLookedUp { .. }
            | Self::PrefillStarted { .. }
            | Self::Stuck { .. }
            | Self::CancelFreed { .. }
            | Self::Offloaded { .. }
            | Self::Tiers { .. }
            | Self::Pool { .. } => None,
        }
    }
}
