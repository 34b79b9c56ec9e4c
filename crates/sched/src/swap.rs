//! Sequences whose blocks are in host memory for a while.
//!
//! Owns: the way out of the pool and back, and how each of its stages ends.
//! Never: frees a block that is being copied; keeps more in host memory than `swap_blocks`.
//! Invariant: a sequence that is swapped is active and in no step; what `SwapOut` kept is dropped
//! at least once, by `SwapIn` or by `SwapDrop`. After a copy that broke, `SwapDrop` may name what the
//! body has dropped itself.

use crate::admit::Reach;
use crate::policy::{self, Way};
use crate::sequence::Sequence;
use crate::{Brain, Note, Output, SwapOutcome};
use cleave_domain::{Failure, HandoffId};
use std::time::Duration;

/// Where a swapped sequence's KV is.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(crate) struct Swap {
    /// How far it has come.
    pub(crate) stage: SwapStage,
    /// Blocks with KV in them: as many are copied each way.
    pub(crate) blocks: u32,
    /// Leading tokens whose KV is in them.
    pub(crate) computed: u32,
}

/// See [`Swap`].
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(crate) enum SwapStage {
    /// Its blocks are being read.
    Out,
    /// In host memory alone.
    Kept,
    /// Its new blocks are being written.
    In,
}

/// Whether room is there at once.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Yield {
    /// Its blocks are free.
    Now,
    /// Once what reads them is done.
    Later,
}

impl Brain {
    // === the way out ===

    /// Has a sequence give up its blocks, the cheaper way. It comes back when there is room.
    pub(crate) fn give_way(&mut self, handoff: HandoffId) -> Yield {
        self.stay(handoff, Failure::OutOfBlocks);
        let Some(sequence) = self.sequences.get(&handoff) else {
            return Yield::Now;
        };
        if self.read_for_a_move(handoff) {
            return Yield::Later;
        }
        let blocks = sequence
            .computed
            .div_ceil(self.limits.capacity.block_tokens);
        let room = self.blocks_swapped() + u64::from(blocks) <= u64::from(self.limits.swap_blocks);
        let able = sequence.generates() && blocks > 0 && room;
        if able && policy::way(&self.swap_prices, blocks, sequence.computed) == Way::Swap {
            self.swap_out(handoff, blocks);
            return Yield::Later;
        }
        self.preempt(handoff);
        Yield::Now
    }

    /// Takes everything from a sequence; it will compute its tokens again, and go on drawing where
    /// it stopped.
    fn preempt(&mut self, handoff: HandoffId) {
        let Some(sequence) = self.sequences.get_mut(&handoff) else {
            return;
        };
        let recomputed_tokens = sequence.computed;
        sequence.swap = None;
        sequence.give_back(&mut self.pool);
        sequence.prompt_scores.clear();
        sequence.unseat(&mut self.slots);
        self.note(Note::Preempted {
            handoff,
            recomputed_tokens,
        });
    }

    fn swap_out(&mut self, handoff: HandoffId, blocks: u32) {
        let Some(sequence) = self.sequences.get_mut(&handoff) else {
            return;
        };
        sequence.unseat(&mut self.slots);
        sequence.swap = Some(Swap {
            stage: SwapStage::Out,
            blocks,
            computed: sequence.computed,
        });
        let table = sequence.table[..blocks as usize].iter();
        let blocks = table.map(|held| held.block).collect();
        self.say(Output::SwapOut { handoff, blocks });
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
            self.say(Output::SwapDrop { handoff });
            return self.preempt(handoff);
        }
        sequence.swap = Some(Swap {
            stage: SwapStage::Kept,
            ..swap
        });
        if let Some(sequence) = self.sequences.get_mut(&handoff) {
            sequence.give_back(&mut self.pool);
        }
        self.swap_prices.swapped_out(swap.blocks, took);
        self.note(Note::SwappedOut {
            handoff,
            blocks: swap.blocks,
            took,
        });
    }

    // === the way back ===

    /// Has a sequence's blocks copied back; false if there are not enough.
    pub(crate) fn swap_in(&mut self, handoff: HandoffId) -> bool {
        let Some(mut sequence) = self.sequences.remove(&handoff) else {
            return false;
        };
        // With room to grow, or it would be the next to give way.
        let size = self.limits.capacity.block_tokens;
        let whole = sequence.len().div_ceil(size) == self.pool.blocks_count();
        let growth = u32::from(!whole);
        let secured = self.secure(&mut sequence, Reach::Nothing, growth);
        let mut blocks = Vec::new();
        if let Some(swap) = sequence.swap.as_mut().filter(|_| secured) {
            swap.stage = SwapStage::In;
            for _ in 0..swap.blocks {
                let held = self.pool.take_promised(&mut sequence.promise);
                let held = held.expect("promised just now");
                blocks.push(held.block);
                sequence.table.push(held);
            }
        }
        self.sequences.insert(handoff, sequence);
        if secured {
            self.say(Output::SwapIn { handoff, blocks });
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
            // It has its blocks; what should be in them is brought back or computed again.
            self.say(Output::SwapDrop { handoff });
            self.note(Note::Preempted {
                handoff,
                recomputed_tokens: swap.computed,
            });
            return self.fetch(handoff);
        }
        sequence.computed = swap.computed;
        self.swap_prices.swapped_in(swap.blocks, took);
        self.note(Note::SwappedIn {
            handoff,
            blocks: swap.blocks,
            took,
        });
        self.publish(handoff);
    }

    /// A sequence that is over: what host memory has of it goes.
    pub(crate) fn drop_swap(&mut self, handoff: HandoffId) {
        let Some(sequence) = self.sequences.get_mut(&handoff) else {
            return;
        };
        let Some(swap) = sequence.swap else {
            return;
        };
        if swap.stage == SwapStage::Kept {
            sequence.swap = None;
        }
        self.say(Output::SwapDrop { handoff });
    }

    // === looking ===

    fn swapping(&mut self, handoff: HandoffId, stage: SwapStage) -> Option<(&mut Sequence, Swap)> {
        let sequence = self.sequences.get_mut(&handoff)?;
        let swap = sequence.swap.filter(|swap| swap.stage == stage)?;
        Some((sequence, swap))
    }

    /// Blocks in host memory, or on their way there or back.
    pub(crate) fn blocks_swapped(&self) -> u64 {
        let swaps = self.sequences.values().filter_map(|s| s.swap);
        swaps.map(|swap| u64::from(swap.blocks)).sum()
    }

    /// Blocks that will be free once they have been copied, of sequences that wait for nothing else.
    pub(crate) fn blocks_coming(&self) -> u64 {
        let out = self
            .sequences
            .values()
            .filter(|s| s.swap.is_some_and(|swap| swap.stage == SwapStage::Out));
        let out: u64 = out.map(|s| s.table.len() as u64).sum();
        out + self.blocks_lent()
    }
}
