//! Streams that draw their next token in a step.
//!
//! Owns: slots for sequences whose KV is here, their growth, and the choice of sequences that give
//! up blocks for it. Never: places a stream whose presence breaks a tighter stream's target.
//! Invariant: no sequence that is in the step already gives up its blocks.

use super::plan::{StepBuilder, StepPlanner};
use super::targets::{self, DecodeCandidate};
use crate::handoff::CloseReason;
use crate::memory::BlockRelease;
use crate::policy::{self, PreemptionVictim, ServiceRank};
use crate::sequences::WorkerSequence;
use cleave_domain::{Failure, HandoffId};

impl StepPlanner<'_> {
    /// Gives free slots to sequences whose KV is here before prompts get any: their clients already
    /// read a stream.
    fn give_slots_to_landed(&mut self) {
        if !self.sequences.has_free_slot() {
            return;
        }
        for rank in self.sequences.active_where(WorkerSequence::awaits_slot) {
            if !self.sequences.give_slot(rank.handoff) {
                return;
            }
        }
    }

    pub(super) fn place_decodes(&mut self, draft: &mut StepBuilder) {
        // A sequence that gives up its slot makes room for another that landed, hence the loop.
        loop {
            self.give_slots_to_landed();
            let one = self.sequences.active_where(|s| {
                let waits = draft.leaves_out(s.handoff());
                s.slot().is_some() && s.tokens_to_run() == 1 && !s.stepping() && !waits
            });
            if !one.is_empty() {
                // Streams whose presence would break a tighter stream's target wait for a later
                // step.
                let out = self.sit_out(&one, draft);
                let chosen = one.into_iter().filter(|rank| !out.contains(&rank.handoff));
                let chosen: Vec<ServiceRank> = chosen.collect();
                draft.deferred.extend(out);
                for rank in chosen {
                    self.place_decode(rank, draft);
                }
            } else if draft.segments.is_empty() && !draft.deferred.is_empty() {
                // The sequences for which others were deferred cannot run, so the deferred ones
                // may.
                draft.deferred.clear();
            } else {
                return;
            }
        }
    }

    /// Streams that could run and are deferred, because they would break the target of one that
    /// runs.
    fn sit_out(&self, ranks: &[ServiceRank], draft: &StepBuilder) -> Vec<HandoffId> {
        let now = self.context.now();
        let sequences = ranks
            .iter()
            .filter_map(|rank| self.sequences.get(rank.handoff));
        let candidates = sequences.map(|s| DecodeCandidate::new(s, self.forecast, now));
        let candidates: Vec<_> = candidates.collect();
        targets::deferred(self.forecast.prices(), draft.held, &candidates, now)
    }

    /// Places one token of a running sequence. If it needs a block and none is left, the least
    /// important sequence gives up its own; none in this draft does, because those in it are more
    /// important. A sequence that needs blocks which are still being copied waits for a later step.
    fn place_decode(&mut self, rank: ServiceRank, draft: &mut StepBuilder) {
        let handoff = rank.handoff;
        let (size, blocks_count) = (
            self.context.block_tokens(),
            self.context.limits().capacity.blocks_count,
        );
        loop {
            let Some(sequence) = self.sequences.get_mut(handoff) else {
                return;
            };
            // It may have become a victim since it was listed.
            if sequence.slot().is_none() {
                return;
            }
            // A block or state that a move still reads must not be written: the sequence waits for
            // the copy.
            if self.peers.reads_last_block(sequence, size) {
                return draft.waiting.push(handoff);
            }
            // A sequence longer than the whole pool can never grow: it fails.
            let blocks = sequence.len().div_ceil(size);
            if blocks > blocks_count {
                let failed = CloseReason::Failed(Failure::OutOfBlocks);
                return self.handoffs().close(handoff, failed);
            }
            if self.memory.grow(sequence, blocks) {
                break;
            }
            // No block is left. A moving sequence pauses a little early instead of taking another's
            // block.
            if self.handoffs().pause_early(handoff) {
                return;
            }
            // Blocks of earlier victims are already being freed, and not all are spoken for: wait
            // for one.
            if self.memory.blocks_coming(self.sequences) > draft.blocks_awaited {
                draft.blocks_awaited += 1;
                return draft.waiting.push(handoff);
            }
            // Otherwise a victim gives up its blocks; it may be this sequence itself.
            let candidates = self.sequences.iter().filter(|s| s.preemptible());
            let victim = policy::victim(rank, candidates.map(|s| (s.rank(), s.token_due())));
            let (PreemptionVictim::LessImportant(victim_handoff)
            | PreemptionVictim::Itself(victim_handoff)) = victim;
            // A fetch writes to the victim's blocks, so they are free only after it has stopped.
            let victim = self.sequences.get_mut(victim_handoff);
            if let Some(victim) = victim.filter(|victim| victim.kv.fetch().is_some()) {
                self.memory.stop_fetch(self.context, victim);
                return draft.waiting.push(handoff);
            }
            match self.preempt(victim_handoff) {
                BlockRelease::Later => {
                    draft.blocks_awaited += 1;
                    return draft.waiting.push(handoff);
                }
                BlockRelease::Now if victim_handoff == handoff => return,
                BlockRelease::Now => {}
            }
        }
        // Its target now limits the time that prompts and drafts may add to this step.
        if let Some(sequence) = self.sequences.get(handoff) {
            let now = self.context.now();
            let candidate = DecodeCandidate::new(sequence, self.forecast, now);
            draft.held.add(&candidate, now);
        }
        self.place(handoff, 1, draft);
    }

    /// Takes a sequence's blocks; it goes on when there is room. A move of it is aborted first, and
    /// blocks that the move still reads are free only after that.
    fn preempt(&mut self, handoff: HandoffId) -> BlockRelease {
        self.handoffs().abort_move(handoff, Failure::OutOfBlocks);
        if self.peers.reads_for_move(handoff) {
            return BlockRelease::Later;
        }
        self.memory.preempt(self.context, self.sequences, handoff)
    }
}
