//! Sequences whose blocks are in host memory for a while.
//!
//! Owns: the copy out of the pool and back, and how each of its stages ends.
//! Never: frees a block that is being copied; stores more than `swap_blocks` in host memory.
//! Invariant: a swapped sequence is active and in no step; the blocks that `SwapOut` stored are
//! dropped at least once, by `SwapIn` or by `SwapDrop`. After a failed copy, `SwapDrop` may name
//! blocks that the body has dropped itself.

use crate::admit::CacheReuse;
use crate::policy::{self, PreemptionMethod};
use crate::sequences::WorkerSequence;
use crate::{SwapOutcome, WorkerBrain, WorkerNote, WorkerOutput};
use cleave_domain::{Failure, HandoffId};
use std::time::Duration;

/// State of a swapped sequence.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(crate) struct SwapState {
    pub(crate) stage: SwapStage,
    /// Blocks with KV in them: as many are copied each way.
    pub(crate) blocks: u32,
    /// The blocks and the pieces of its state together: its share of host memory, and its cost to
    /// copy.
    pub(crate) units: u32,
    /// Leading tokens whose KV is in them.
    pub(crate) computed: u32,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(crate) enum SwapStage {
    /// Its blocks are being read.
    Out,
    /// Stored in host memory alone.
    Swapped,
    /// Its new blocks are being written.
    In,
}

/// When the blocks of a victim are free.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum BlockRelease {
    /// At once: no copy reads them.
    Now,
    /// After the copies that read them.
    Later,
}

impl WorkerBrain {
    // === the way out ===

    /// Takes a sequence's blocks, by the cheaper method. It continues when there is room.
    pub(crate) fn preempt_now(&mut self, handoff: HandoffId) -> BlockRelease {
        self.abort_move(handoff, Failure::OutOfBlocks);
        let Some(sequence) = self.sequences.get(&handoff) else {
            return BlockRelease::Now;
        };
        if self.read_for_a_move(handoff) {
            return BlockRelease::Later;
        }
        // Swapping needs room in host memory, and pays only for a sequence that would decode at
        // once.
        let blocks = sequence.computed.div_ceil(self.context.block_tokens());
        let pieces = self.context.limits().capacity.state_pieces();
        let units = blocks + sequence.state.map_or(0, |_| pieces);
        let fits_host = self.blocks_swapped() + u64::from(units)
            <= u64::from(self.context.limits().swap_blocks);
        let whole = sequence.decodes_next() && sequence.has_current_state();
        let able = whole && blocks > 0 && fits_host;
        if able
            && policy::preemption_method(&self.swap_prices, units, sequence.computed)
                == PreemptionMethod::Swap
        {
            self.swap_out(handoff, blocks, units);
            return BlockRelease::Later;
        }
        self.preempt(handoff);
        BlockRelease::Now
    }

    /// Takes everything from a sequence; it will compute its tokens again, and continue drawing
    /// where it stopped.
    pub(crate) fn preempt(&mut self, handoff: HandoffId) {
        let Some(sequence) = self.sequences.get_mut(&handoff) else {
            return;
        };
        let recomputed_tokens = sequence.computed;
        sequence.swap = None;
        sequence.release_blocks(&mut self.pools);
        sequence.prompt_scores.clear();
        sequence.free_slot(&mut self.slots_free);
        self.context.note(WorkerNote::Preempted {
            handoff,
            recomputed_tokens,
        });
    }

    fn swap_out(&mut self, handoff: HandoffId, blocks: u32, units: u32) {
        let Some(sequence) = self.sequences.get_mut(&handoff) else {
            return;
        };
        sequence.free_slot(&mut self.slots_free);
        sequence.swap = Some(SwapState {
            stage: SwapStage::Out,
            blocks,
            units,
            computed: sequence.computed,
        });
        let table = sequence.table[..blocks as usize].iter();
        let blocks = table.map(|held| held.block).collect();
        let state = sequence.state.map(|state| state.live.block);
        self.context.emit(WorkerOutput::SwapOut {
            handoff,
            blocks,
            state,
        });
    }

    pub(crate) fn swapped_out(&mut self, handoff: HandoffId, outcome: SwapOutcome, took: Duration) {
        let Some((sequence, swap)) = self.swapping(handoff, SwapStage::Out) else {
            return;
        };
        if sequence.closing() {
            sequence.swap = None;
            return self.release_if_settled(handoff);
        }
        if outcome != SwapOutcome::Copied {
            self.context.emit(WorkerOutput::SwapDrop { handoff });
            return self.preempt(handoff);
        }
        sequence.swap = Some(SwapState {
            stage: SwapStage::Swapped,
            ..swap
        });
        if let Some(sequence) = self.sequences.get_mut(&handoff) {
            sequence.release_blocks(&mut self.pools);
        }
        self.swap_prices.swapped_out(swap.units, took);
        self.context.note(WorkerNote::SwappedOut {
            handoff,
            blocks: swap.units,
            took,
        });
    }

    // === the way back ===

    /// Copies a sequence's blocks and state back; false if there is no room for them.
    pub(crate) fn swap_in(&mut self, handoff: HandoffId) -> bool {
        let Some(mut sequence) = self.sequences.remove(&handoff) else {
            return false;
        };
        // One block more than it needs now, or it would be the next victim.
        let size = self.context.block_tokens();
        let whole = sequence.len().div_ceil(size) == self.pools.blocks.blocks_count();
        let growth = u32::from(!whole);
        let secured = self.secure(&mut sequence, CacheReuse::NoBlock, growth);
        let mut blocks = Vec::new();
        if let Some(swap) = sequence.swap.as_mut().filter(|_| secured) {
            swap.stage = SwapStage::In;
            for _ in 0..swap.blocks {
                let held = self.pools.blocks.take_reserved(&mut sequence.reservation);
                let held = held.expect("reserved just now");
                blocks.push(held.block);
                sequence.table.push(held);
            }
        }
        let state = sequence.state.map(|state| state.live.block);
        self.sequences.insert(handoff, sequence);
        if secured {
            self.context.emit(WorkerOutput::SwapIn {
                handoff,
                blocks,
                state,
            });
        }
        secured
    }

    pub(crate) fn swapped_in(&mut self, handoff: HandoffId, outcome: SwapOutcome, took: Duration) {
        let Some((sequence, swap)) = self.swapping(handoff, SwapStage::In) else {
            return;
        };
        sequence.swap = None;
        if sequence.closing() {
            return self.release_if_settled(handoff);
        }
        if outcome != SwapOutcome::Copied {
            // It has its blocks; their content is fetched from a tier or computed again.
            self.context.emit(WorkerOutput::SwapDrop { handoff });
            self.context.note(WorkerNote::Preempted {
                handoff,
                recomputed_tokens: swap.computed,
            });
            return self.fetch(handoff);
        }
        sequence.computed = swap.computed;
        self.state_reached(handoff);
        self.swap_prices.swapped_in(swap.units, took);
        self.context.note(WorkerNote::SwappedIn {
            handoff,
            blocks: swap.units,
            took,
        });
        self.publish(handoff);
    }

    /// Drops the host memory's copy of a sequence that is over.
    pub(crate) fn drop_swap(&mut self, handoff: HandoffId) {
        let Some(sequence) = self.sequences.get_mut(&handoff) else {
            return;
        };
        let Some(swap) = sequence.swap else {
            return;
        };
        if swap.stage == SwapStage::Swapped {
            sequence.swap = None;
        }
        self.context.emit(WorkerOutput::SwapDrop { handoff });
    }

    // === looking ===

    fn swapping(
        &mut self,
        handoff: HandoffId,
        stage: SwapStage,
    ) -> Option<(&mut WorkerSequence, SwapState)> {
        let sequence = self.sequences.get_mut(&handoff)?;
        let swap = sequence.swap.filter(|swap| swap.stage == stage)?;
        Some((sequence, swap))
    }

    /// Blocks and pieces of states in host memory, or being copied there or back.
    pub(crate) fn blocks_swapped(&self) -> u64 {
        let swaps = self.sequences.values().filter_map(|s| s.swap);
        swaps.map(|swap| u64::from(swap.units)).sum()
    }

    /// Blocks that will be free once they have been copied, of sequences that wait for nothing
    /// else.
    pub(crate) fn blocks_coming(&self) -> u64 {
        let out = self
            .sequences
            .values()
            .filter(|s| s.swap.is_some_and(|swap| swap.stage == SwapStage::Out));
        let out: u64 = out.map(|s| s.table.len() as u64).sum();
        out + self.blocks_pinned()
    }
}
