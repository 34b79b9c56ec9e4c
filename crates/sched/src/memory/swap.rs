//! Sequences whose blocks are in host memory for a while.
//!
//! Owns: the copy out of the pool and back, and how each of its stages ends.
//! Never: frees a block that is being copied; stores more than `swap_blocks` in host memory.
//! Invariant: a swapped sequence is active and in no step; the blocks that `SwapOut` stored are
//! dropped at least once, by `SwapIn` or by `SwapDrop`. After a failed copy, `SwapDrop` may name
//! blocks that the body has dropped itself.

use super::{CacheReuse, KvMemory, SequenceWindow};
use crate::context::WorkerContext;
use crate::policy::{self, PreemptionMethod};
use crate::sequences::{SequenceTable, WorkerSequence};
use crate::{SwapOutcome, WorkerNote, WorkerOutput};
use cleave_domain::{HandoffId, WindowTable};
use std::time::Duration;

/// State of a swapped sequence.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(crate) struct SwapState {
    stage: SwapStage,
    /// Blocks with KV in them: as many are copied each way.
    blocks: u32,
    /// The blocks and the pieces of its state and window together: its share of host memory, and
    /// its cost to copy.
    pub(crate) units: u32,
    /// Leading tokens whose KV is in them.
    computed: u32,
}

impl SwapState {
    /// Whether its blocks are being copied, out or in.
    pub(crate) fn is_copied(self) -> bool {
        matches!(self.stage, SwapStage::Out | SwapStage::In)
    }

    /// Whether its blocks leave the pool, and are not yet free.
    pub(crate) fn is_leaving(self) -> bool {
        self.stage == SwapStage::Out
    }
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
enum SwapStage {
    /// Its blocks are being read.
    Out,
    /// Stored in host memory alone.
    Swapped,
    /// Its new blocks are being written.
    In,
}

/// The size of a sequence in host memory.
#[derive(Clone, Copy, Debug)]
struct SwapSize {
    /// Blocks with KV in them.
    blocks: u32,
    /// The blocks and the pieces of its state and window together.
    units: u32,
}

/// Whether a copy back from host memory brought the sequence's KV.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum SwapEnd {
    /// It did, or the sequence is over.
    Settled,
    /// The sequence has its blocks, with undefined content.
    Lost,
}

/// When the blocks of a victim are free.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum BlockRelease {
    /// At once: no copy reads them.
    Now,
    /// After the copies that read them.
    Later,
}

impl KvMemory {
    // === the way out ===

    /// Takes a sequence's blocks, by the cheaper method. It continues when there is room. Nothing
    /// may be reading its blocks.
    pub(crate) fn preempt(
        &mut self,
        context: &mut WorkerContext,
        sequences: &mut SequenceTable,
        handoff: HandoffId,
    ) -> BlockRelease {
        let swapped = sequences.blocks_swapped();
        let Some(sequence) = sequences.get(handoff) else {
            return BlockRelease::Now;
        };
        // Swapping needs room in host memory, and pays only for a sequence that would decode at
        // once.
        let blocks = sequence.kv.computed.div_ceil(self.block_tokens);
        let capacity = &context.limits().capacity;
        let mut units = blocks + sequence.kv.state.map_or(0, |_| capacity.state_pieces());
        if let Some(window) = self.pools.window() {
            let live = blocks - window.first_block(sequence.kv.computed).min(blocks);
            units += live * capacity.window_pieces();
        }
        let fits_host = swapped + u64::from(units) <= u64::from(context.limits().swap_blocks);
        let whole = sequence.decodes_next() && sequence.has_current_state();
        let able = whole && blocks > 0 && fits_host;
        if able
            && policy::preemption_method(&self.swap_prices, units, sequence.kv.computed)
                == PreemptionMethod::Swap
        {
            // The live window alone is swapped, because it is what comes back.
            if let Some(sequence) = sequences.get_mut(handoff) {
                self.slide(sequence);
            }
            swap_out(context, sequences, handoff, SwapSize { blocks, units });
            return BlockRelease::Later;
        }
        self.drop_kv(context, sequences, handoff);
        BlockRelease::Now
    }

    /// Takes everything from a sequence; it will compute its tokens again, and continue drawing
    /// where it stopped.
    pub(crate) fn drop_kv(
        &mut self,
        context: &mut WorkerContext,
        sequences: &mut SequenceTable,
        handoff: HandoffId,
    ) {
        sequences.free_slot(handoff);
        let Some(sequence) = sequences.get_mut(handoff) else {
            return;
        };
        let recomputed_tokens = sequence.kv.computed;
        sequence.kv.swap = None;
        self.release(sequence);
        sequence.prompt_scores.clear();
        sequence.pooled.clear();
        context.note(WorkerNote::Preempted {
            handoff,
            recomputed_tokens,
        });
    }

    /// Handles the end of a copy to host memory. The caller releases the sequence if it is over.
    pub(crate) fn swapped_out(
        &mut self,
        context: &mut WorkerContext,
        sequences: &mut SequenceTable,
        handoff: HandoffId,
        outcome: SwapOutcome,
        took: Duration,
    ) {
        let Some((sequence, swap)) = swapping(sequences, handoff, SwapStage::Out) else {
            return;
        };
        if sequence.closing() {
            sequence.kv.swap = None;
            return;
        }
        if outcome != SwapOutcome::Copied {
            context.emit(WorkerOutput::SwapDrop { handoff });
            return self.drop_kv(context, sequences, handoff);
        }
        sequence.kv.swap = Some(SwapState {
            stage: SwapStage::Swapped,
            ..swap
        });
        self.release(sequence);
        self.swap_prices.swapped_out(swap.units, took);
        context.note(WorkerNote::SwappedOut {
            handoff,
            blocks: swap.units,
            took,
        });
    }

    // === the way back ===

    /// Copies a sequence's blocks and state back; false if there is no room for them.
    pub(crate) fn swap_in(
        &mut self,
        context: &mut WorkerContext,
        sequence: &mut WorkerSequence,
    ) -> bool {
        // One block more than it needs now, or it would be the next victim.
        let whole = sequence.len().div_ceil(self.block_tokens) == self.pools.blocks.blocks_count();
        let growth = u32::from(!whole);
        let computed = sequence.kv.swap.map_or(0, |swap| swap.computed);
        if !self.secure(sequence, CacheReuse::NoBlock { computed }, growth) {
            return false;
        }
        if let Some(swap) = &mut sequence.kv.swap {
            swap.stage = SwapStage::In;
            let blocks = swap.blocks;
            self.take_reserved(sequence, blocks);
            self.take_window(sequence, blocks);
        }
        context.emit(WorkerOutput::SwapIn {
            handoff: sequence.handoff(),
            blocks: sequence.kv.table.iter().map(|held| held.block).collect(),
            state: sequence.kv.state.map(|state| state.live.block),
            window: sequence.kv.window.as_ref().map(SequenceWindow::table),
        });
        true
    }

    /// Handles the end of a copy back from host memory. After a failed one the content of the
    /// sequence's blocks is fetched from a tier or computed again. The caller releases the sequence
    /// if it is over.
    pub(crate) fn swapped_in(
        &mut self,
        context: &mut WorkerContext,
        sequences: &mut SequenceTable,
        handoff: HandoffId,
        outcome: SwapOutcome,
        took: Duration,
    ) -> SwapEnd {
        let Some((sequence, swap)) = swapping(sequences, handoff, SwapStage::In) else {
            return SwapEnd::Settled;
        };
        sequence.kv.swap = None;
        if sequence.closing() {
            return SwapEnd::Settled;
        }
        if outcome != SwapOutcome::Copied {
            context.emit(WorkerOutput::SwapDrop { handoff });
            context.note(WorkerNote::Preempted {
                handoff,
                recomputed_tokens: swap.computed,
            });
            if sequence.kv.window.is_none() {
                return SwapEnd::Lost;
            }
            // Its window is for the tokens that follow, and it is to be computed from the first.
            self.release(sequence);
            return SwapEnd::Settled;
        }
        sequence.kv.computed = swap.computed;
        self.state_reached(sequence);
        self.swap_prices.swapped_in(swap.units, took);
        context.note(WorkerNote::SwappedIn {
            handoff,
            blocks: swap.units,
            took,
        });
        self.publish(sequence);
        SwapEnd::Settled
    }

    /// Blocks that will be free once they have been copied, of sequences that wait for nothing
    /// else.
    pub(crate) fn blocks_coming(&self, sequences: &SequenceTable) -> u64 {
        let leaving = |s: &&WorkerSequence| s.kv.swap.is_some_and(SwapState::is_leaving);
        let out = sequences.iter().filter(leaving);
        let out: u64 = out.map(|s| s.kv.table.len() as u64).sum();
        out + self.blocks_pinned()
    }

    /// Learns the cost of computing tokens again, from a step with prompt tokens.
    pub(crate) fn prefilled(&mut self, tokens: u32, took: Duration) {
        self.swap_prices.prefilled(tokens, took);
    }
}

/// Stores a sequence in host memory; its blocks are free once they have been copied.
fn swap_out(
    context: &mut WorkerContext,
    sequences: &mut SequenceTable,
    handoff: HandoffId,
    size: SwapSize,
) {
    sequences.free_slot(handoff);
    let Some(sequence) = sequences.get_mut(handoff) else {
        return;
    };
    let SwapSize { blocks, units } = size;
    sequence.kv.swap = Some(SwapState {
        stage: SwapStage::Out,
        blocks,
        units,
        computed: sequence.kv.computed,
    });
    let table = sequence.kv.table[..blocks as usize].iter();
    let blocks = table.map(|held| held.block).collect();
    let state = sequence.kv.state.map(|state| state.live.block);
    let window = sequence.kv.window.as_ref().map(|window| {
        let WindowTable { first, mut blocks } = window.table();
        blocks.truncate(size.blocks.saturating_sub(first) as usize);
        WindowTable { first, blocks }
    });
    context.emit(WorkerOutput::SwapOut {
        handoff,
        blocks,
        state,
        window,
    });
}

/// Drops the host memory's copy of a sequence that is over.
pub(crate) fn drop_swap(context: &mut WorkerContext, sequence: &mut WorkerSequence) {
    let Some(swap) = sequence.kv.swap else {
        return;
    };
    if swap.stage == SwapStage::Swapped {
        sequence.kv.swap = None;
    }
    let handoff = sequence.handoff();
    context.emit(WorkerOutput::SwapDrop { handoff });
}

/// A sequence that is in this stage of a swap.
fn swapping(
    sequences: &mut SequenceTable,
    handoff: HandoffId,
    stage: SwapStage,
) -> Option<(&mut WorkerSequence, SwapState)> {
    let sequence = sequences.get_mut(handoff)?;
    let swap = sequence.kv.swap.filter(|swap| swap.stage == stage)?;
    Some((sequence, swap))
}
