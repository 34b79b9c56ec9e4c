//! Results of a step.
//!
//! Owns: distribution of a step's result: tokens to clients, blocks to the cache and to the peer,
//! ends of sequences. Never: uses a result that does not answer the plan.
//! Invariant: each sequence of a step is settled exactly once, even if it was closed meanwhile.

use crate::batch::{SegmentInFlight, StepInFlight};
use crate::handoff::CloseReason;
use crate::sequences::{SequencePhase, SequenceStage, WorkerSequence};
use crate::{WorkerBrain, WorkerNote, WorkerOutput};
use cleave_domain::{
    Emission, Failure, HandoffId, KvUnit, PromptFacts, Report, SampledToken, SlotIndex, StepId,
    StepResult, TokenId,
};
use cleave_kv::block_hash;
use cleave_kv::handoff::sender;
use std::collections::BTreeMap;
use std::time::Duration;

/// Blocks of a sequence that will not change any more.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum ReadyBlocks {
    /// The full ones: more of the prompt is to come.
    FullBlocks,
    /// The last one too: nothing more is run here.
    All,
}

impl ReadyBlocks {
    /// Number of leading blocks.
    pub(crate) fn blocks(self, computed: u32, block_tokens: u32) -> u32 {
        match self {
            Self::FullBlocks => computed / block_tokens,
            Self::All => computed.div_ceil(block_tokens),
        }
    }
}

impl WorkerBrain {
    // === facts ===

    pub(crate) fn stepped(&mut self, result: StepResult, took: Duration) {
        let StepResult {
            step: id,
            sampled,
            prompt_scores,
        } = result;
        let Some(step) = self.steps.finish(id, self.context.now()) else {
            return;
        };
        if step.unusable {
            return self.take_back(&step);
        }
        let Some(counts) = step.draws(&sampled) else {
            return self.broke(&step, "the result answers another plan");
        };
        self.steps.measure(id, took);
        self.forecast.observe_step(&step.work, took);
        self.measure(&step, took);
        self.count_drafts(&step, sampled.len());
        let mut sampled = sampled.into_iter().map(|(_, sampled)| sampled);
        let mut scores: BTreeMap<SlotIndex, Vec<SampledToken>> =
            prompt_scores.into_iter().collect();
        for (placed, count) in step.segments.into_iter().zip(counts) {
            let drawn = sampled.by_ref().take(count).collect();
            let scores = scores.remove(&placed.slot).unwrap_or_default();
            self.settle(placed, drawn, scores);
        }
        self.report_prefixes();
    }

    /// Fails the sequences in `slots`, and has the others of the step run again; without a slot all
    /// of them fail. Nothing that the step was to write was given to any client or peer yet, so it
    /// makes no difference whether it was written.
    pub(crate) fn step_failed(&mut self, id: StepId, slots: &[SlotIndex], reason: &str) {
        let Some(step) = self.steps.finish(id, self.context.now()) else {
            return;
        };
        if step.unusable {
            return self.take_back(&step);
        }
        let is_named = |placed: &&SegmentInFlight| slots.contains(&placed.slot);
        if !step.segments.iter().any(|placed| is_named(&placed)) {
            return self.broke(&step, reason);
        }
        for named in step.segments.iter().filter(is_named) {
            let failure = Failure::Engine(reason.into());
            self.close(named.handoff, CloseReason::Failed(failure));
        }
        self.steps.spoil();
        self.take_back(&step);
    }

    /// Takes each sequence of the step back to where it stood before, and opens its slot anew: the
    /// engine may have drawn tokens of it that were never emitted. The state is lost, if it has
    /// one.
    fn take_back(&mut self, step: &StepInFlight) {
        self.context.changed();
        for placed in &step.segments {
            let Some(sequence) = self.sequences.get_mut(&placed.handoff) else {
                continue;
            };
            sequence.steps_count -= 1;
            sequence.opened = false;
            sequence.speculating.discard_drafts();
            // Unlike a block's, the content of a state's slot is that of its last tokens alone.
            if let (Some(state), Some(states)) = (&mut sequence.state, &mut self.pools.states) {
                let spare = state.lose();
                spare.into_iter().for_each(|slot| states.release(slot));
            }
            if sequence.closing() && !sequence.stepping() {
                sequence.free_slot(&mut self.slots_free);
            }
            self.release_if_settled(placed.handoff);
        }
    }

    /// Fails every sequence and drains: the engine can run nothing more.
    pub(crate) fn engine_lost(&mut self, reason: &str) {
        self.reports.drain(&mut self.context);
        let handoffs: Vec<HandoffId> = self.handoffs().collect();
        for handoff in handoffs {
            self.close(handoff, CloseReason::Failed(Failure::Engine(reason.into())));
        }
    }

    fn broke(&mut self, step: &StepInFlight, reason: &str) {
        for placed in &step.segments {
            if let Some(sequence) = self.sequences.get_mut(&placed.handoff) {
                sequence.steps_count -= 1;
                if !sequence.stepping() {
                    // If it was over before, only the step kept its slot.
                    sequence.free_slot(&mut self.slots_free);
                }
            }
            let failure = Failure::Engine(reason.into());
            self.close(placed.handoff, CloseReason::Failed(failure));
            self.release_if_settled(placed.handoff);
        }
    }

    // === one sequence ===

    fn settle(
        &mut self,
        placed: SegmentInFlight,
        drawn: Vec<SampledToken>,
        scores: Vec<SampledToken>,
    ) {
        let handoff = placed.handoff;
        let Some(sequence) = self.sequences.get_mut(&handoff) else {
            return;
        };
        sequence.steps_count -= 1;
        if sequence.closing() {
            if !sequence.stepping() {
                sequence.free_slot(&mut self.slots_free);
            }
            return self.release_if_settled(handoff);
        }
        sequence.computed += placed.tokens - placed.drafts;
        sequence.client_timing.step_ended(self.context.now());
        sequence.prompt_scores.extend(scores);
        self.state_reached(handoff);
        self.weigh_guess(handoff, &drawn);
        if drawn.is_empty() {
            self.publish(handoff);
            return self.export(handoff, ReadyBlocks::FullBlocks);
        }
        for (place, sampled) in drawn.into_iter().enumerate() {
            let Some(sequence) = self.sequences.get_mut(&handoff) else {
                return;
            };
            // Tokens that the step drew beyond the sequence's end are dropped.
            if sequence.stage != SequenceStage::Active {
                return;
            }
            // The token before was an accepted draft, so its KV was computed.
            sequence.computed += u32::from(place > 0);
            let token = sampled.token;
            self.emit(handoff, sampled);
            self.publish(handoff);
            self.advance(handoff, token);
        }
        let continues = |s: &WorkerSequence| {
            placed.phase == SequencePhase::Decode && s.stage == SequenceStage::Active
        };
        if self.sequences.get(&handoff).is_some_and(continues) {
            self.advance_move(handoff);
        }
    }

    /// Emits the token before anything else is done about it: latency is the client's.
    fn emit(&mut self, handoff: HandoffId, sampled: SampledToken) {
        let now = self.context.now();
        let Some(sequence) = self.sequences.get_mut(&handoff) else {
            return;
        };
        let prompt = (sequence.phase == SequencePhase::Prompt).then(|| PromptFacts {
            cached_tokens: sequence.cached_tokens,
            scores: std::mem::take(&mut sequence.prompt_scores),
            timing: sequence.prefill_timing(now),
        });
        let emission = Emission {
            index: sequence.output_count(),
            sampled,
            prompt,
        };
        self.context.emit(WorkerOutput::Emit { handoff, emission });
    }

    /// Moves the sequence on by its new token: to its end, to the peer, or to the next step.
    fn advance(&mut self, handoff: HandoffId, token: TokenId) {
        let context = self.context.limits().capacity.context_tokens_max;
        let Some(sequence) = self.sequences.get_mut(&handoff) else {
            return;
        };
        sequence.tokens.push(token);
        if let Some(reason) = sequence.finish_reason(context) {
            return self.close(handoff, CloseReason::Finished(reason));
        }
        if sequence.phase == SequencePhase::Decode {
            return;
        }
        let router = sequence.router;
        let timing = sequence.prefill_timing(self.context.now());
        sequence.phase = SequencePhase::Decode;
        if sequence.outgoing.is_none() {
            let count = sequence.output_count();
            sequence
                .client_timing
                .first_token(self.context.now(), self.context.now(), count);
            self.context
                .report(router, Report::Prefilled { handoff, timing });
            self.context.note(WorkerNote::Joined { handoff });
            self.context.report(router, Report::Landed { handoff });
            return;
        }
        // The receiver knows all tokens but the one just drawn.
        let received = &sequence.tokens[..sequence.tokens.len() - 1];
        let received = block_hash(sequence.request.cache_salt, None, received);
        sequence.stage = SequenceStage::Sending;
        let bytes = sequence
            .outgoing
            .as_ref()
            .map_or(0, |sender| sender.bytes());
        sequence.times.drawn = Some((self.context.now(), bytes));
        self.active.remove(&sequence.rank);
        sequence.free_slot(&mut self.slots_free);
        self.context
            .report(router, Report::Prefilled { handoff, timing });
        self.export(handoff, ReadyBlocks::All);
        self.export_state(handoff, handoff);
        let (content, output) = (received, vec![token]);
        self.send(handoff, sender::SenderInput::Sampled { content, output });
    }

    /// Registers the content of blocks that became full with the pool.
    pub(crate) fn publish(&mut self, handoff: HandoffId) {
        let size = self.context.block_tokens();
        let Some(sequence) = self.sequences.get_mut(&handoff) else {
            return;
        };
        if !self.context.limits().prefix_cache || sequence.computed / size <= sequence.published {
            return;
        }
        sequence.extend_hashes(size);
        while sequence.published < sequence.computed / size {
            let i = sequence.published as usize;
            self.pools
                .blocks
                .set_content(sequence.table[i], sequence.hashes[i]);
            sequence.published += 1;
        }
    }

    /// Gives the sender, if there is one, the blocks that will not change any more.
    pub(crate) fn export(&mut self, handoff: HandoffId, ready: ReadyBlocks) {
        let size = self.context.block_tokens();
        let Some(sequence) = self.sequences.get_mut(&handoff) else {
            return;
        };
        if sequence.outgoing.is_none() {
            return;
        }
        // A sequence that is computed again has sent its first blocks before.
        let done = ready.blocks(sequence.computed, size).max(sequence.exported);
        let new = sequence.exported..done;
        sequence.exported = done;
        let table = &sequence.table[new.start as usize..new.end as usize];
        let blocks: Vec<_> = new.zip(table.iter().map(|block| block.block)).collect();
        for (ordinal, from) in blocks {
            let unit = KvUnit::block(ordinal);
            self.send(handoff, sender::SenderInput::Computed { unit, from });
        }
    }

    // === measures ===

    /// Reports drafted and accepted tokens; `drawn_count` is the number of tokens drawn in the
    /// step.
    fn count_drafts(&mut self, step: &StepInFlight, drawn_count: usize) {
        let Some(drafting) = step.drafting else {
            return;
        };
        let sequences = step.segments.iter().filter(|placed| placed.samples).count();
        let count = |tokens| u32::try_from(tokens).expect("a step's tokens are counted in 32 bits");
        self.context.note(WorkerNote::Drafted {
            drafted_tokens: count(step.drafts.len()),
            accepted_tokens: count(drawn_count - sequences),
            drafting,
        });
    }

    fn measure(&mut self, step: &StepInFlight, took: Duration) {
        let (decode, prefill): (Vec<&SegmentInFlight>, Vec<&SegmentInFlight>) =
            step.segments.iter().partition(|placed| {
                placed.phase == SequencePhase::Decode && placed.tokens - placed.drafts == 1
            });
        let prefill_tokens: u32 = prefill.iter().map(|placed| placed.tokens).sum();
        let decode_sequences = u32::try_from(decode.len()).expect("slots are counted in 32 bits");
        if prefill_tokens > 0 {
            self.swap_prices
                .prefilled(prefill_tokens + decode_sequences, took);
        }
        self.context.note(WorkerNote::Stepped {
            prefill_tokens,
            decode_sequences,
            took,
            work: step.work,
            predicted: step.predicted,
        });
    }
}

impl StepInFlight {
    /// Tokens drawn for each segment; `None` if the result does not fit the plan. A segment that
    /// samples draws one token, and one more for each leading draft that was accepted.
    fn draws(&self, sampled: &[(SlotIndex, SampledToken)]) -> Option<Vec<usize>> {
        let (mut drawn, mut drafts) = (sampled, self.drafts.as_slice());
        let mut counts = Vec::with_capacity(self.segments.len());
        for placed in &self.segments {
            let (guessed, others) = drafts.split_at(placed.drafts as usize);
            drafts = others;
            let own = drawn.iter().take_while(|(slot, _)| *slot == placed.slot);
            let count = own.count();
            let (own, rest) = drawn.split_at(count);
            drawn = rest;
            let expected_counts = if placed.samples {
                1..=guessed.len() + 1
            } else {
                0..=0
            };
            let verified = own.iter().map(|(_, sampled)| sampled.token).zip(guessed);
            let all_but_last = count.saturating_sub(1);
            if !expected_counts.contains(&count)
                || verified
                    .take(all_but_last)
                    .any(|(token, guess)| token != *guess)
            {
                return None;
            }
            counts.push(count);
        }
        drawn.is_empty().then_some(counts)
    }
}
