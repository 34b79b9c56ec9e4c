//! Results of a step.
//!
//! Owns: distribution of a step's result: tokens to clients, blocks to the cache and to the peer,
//! ends of sequences. Never: uses a result that does not answer the plan.
//! Invariant: each sequence of a step is settled exactly once, even if it was closed meanwhile.

use super::StepPipeline;
use super::steps::{SegmentInFlight, StepInFlight};
use crate::context::WorkerContext;
use crate::forecast::WorkForecast;
use crate::handoff::{CloseReason, Handoffs, PeerTraffic, ReadyBlocks};
use crate::memory::KvMemory;
use crate::sequences::{SequencePhase, SequenceStage, SequenceTable, WorkerSequence};
use crate::speculate::DraftAcceptance;
use crate::{StepFault, WorkerNote, WorkerOutput};
use cleave_domain::{
    Emission, Failure, FinishReason, HandoffId, POOLED_TOKEN, PromptFacts, Report, SampledToken,
    SlotIndex, StepId, StepResult, TokenId,
};
use cleave_kv::block_hash;
use cleave_kv::handoff::sender;
use std::collections::BTreeMap;
use std::sync::Arc;
use std::time::Duration;

/// The results of steps, and their distribution.
pub(crate) struct StepResults<'a> {
    pub(crate) context: &'a mut WorkerContext,
    pub(crate) sequences: &'a mut SequenceTable,
    pub(crate) memory: &'a mut KvMemory,
    pub(crate) peers: &'a mut PeerTraffic,
    pub(crate) steps: &'a mut StepPipeline,
    pub(crate) forecast: &'a mut WorkForecast,
    pub(crate) acceptance: &'a mut DraftAcceptance,
}

impl StepResults<'_> {
    // === facts ===

    /// Settles each sequence of a step; false if the result is of no use.
    pub(crate) fn stepped(&mut self, result: StepResult, took: Duration) -> bool {
        let StepResult {
            step: id,
            sampled,
            prompt_scores,
            forced,
            pooled,
        } = result;
        let Some(step) = self.steps.finish(id, self.context.now()) else {
            return false;
        };
        if step.unusable {
            self.take_back(&step);
            return false;
        }
        let counts = step.draws(&sampled);
        let Some(counts) = counts.filter(|_| step.answers_poolings(&pooled)) else {
            let failure = Failure::Engine("the result answers another plan".to_owned());
            self.broke(&step, &failure);
            return false;
        };
        self.steps.measure(id, took);
        self.forecast.observe_step(&step.work, took);
        self.measure(&step, took);
        self.count_drafts(&step, sampled.len());
        let mut sampled = sampled.into_iter().map(|(_, sampled)| sampled);
        let mut scores: BTreeMap<SlotIndex, Vec<SampledToken>> =
            prompt_scores.into_iter().collect();
        let mut forced: BTreeMap<SlotIndex, Vec<TokenId>> = forced.into_iter().collect();
        let mut pooled = pooled.into_iter().map(|(_, values)| values);
        for (placed, count) in step.segments.into_iter().zip(counts) {
            let values = placed.pools.then(|| pooled.next()).flatten();
            let drawn: Vec<SampledToken> = sampled.by_ref().take(count).collect();
            let scores = scores.remove(&placed.slot).unwrap_or_default();
            let forced = forced.remove(&placed.slot).unwrap_or_default();
            if let Some(sequence) = self.sequences.get_mut(placed.handoff) {
                sequence.speculating.propose(forced);
                if let Some(values) = values {
                    sequence.pooled.take(values);
                }
            }
            self.settle(placed, drawn, scores);
        }
        true
    }

    /// Fails the sequences in `slots`, and has the others of the step run again; without a slot all
    /// of them fail. Nothing that the step was to write was given to any client or peer yet, so it
    /// makes no difference whether it was written.
    pub(crate) fn step_failed(
        &mut self,
        id: StepId,
        slots: &[SlotIndex],
        fault: StepFault,
        reason: String,
    ) {
        let Some(step) = self.steps.finish(id, self.context.now()) else {
            return;
        };
        if step.unusable {
            return self.take_back(&step);
        }
        let is_named = |placed: &&SegmentInFlight| slots.contains(&placed.slot);
        if !step.segments.iter().any(|placed| is_named(&placed)) {
            return self.broke(&step, &Failure::Engine(reason));
        }
        let failure = fault.failure(reason);
        for named in step.segments.iter().filter(is_named) {
            self.handoffs()
                .close(named.handoff, CloseReason::Failed(failure.clone()));
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
            let handoff = placed.handoff;
            self.sequences.forget_opening(handoff);
            if let Some(sequence) = self.sequences.get_mut(handoff) {
                sequence.speculating.discard_drafts();
                self.memory.state_lost(sequence);
            }
            self.sequences.leave_step(handoff);
            self.handoffs().release_if_settled(handoff);
        }
    }

    fn broke(&mut self, step: &StepInFlight, failure: &Failure) {
        for placed in &step.segments {
            self.sequences.leave_step(placed.handoff);
            let failed = CloseReason::Failed(failure.clone());
            self.handoffs().close(placed.handoff, failed);
            self.handoffs().release_if_settled(placed.handoff);
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
        self.sequences.leave_step(handoff);
        let Some(sequence) = self.sequences.get_mut(handoff) else {
            return;
        };
        if sequence.closing() {
            return self.handoffs().release_if_settled(handoff);
        }
        sequence.kv.advance(placed.tokens - placed.drafts);
        sequence.client_timing.step_ended(self.context.now());
        sequence.prompt_scores.extend(scores);
        self.memory.state_reached(sequence);
        sequence.speculating.compare(&drawn, self.acceptance);
        if let Some(vector) = sequence.pooled_result() {
            return self.finish_pooled(handoff, vector);
        }
        if drawn.is_empty() {
            self.memory.publish(sequence);
            self.handoffs().export(handoff, ReadyBlocks::FullBlocks);
            return self.slide(handoff);
        }
        for (place, sampled) in drawn.into_iter().enumerate() {
            let Some(sequence) = self.sequences.get_mut(handoff) else {
                return;
            };
            // Tokens that the step drew beyond the sequence's end are dropped.
            if sequence.stage() != SequenceStage::Active {
                break;
            }
            // The token before was an accepted draft, so its KV was computed.
            sequence.kv.advance(u32::from(place > 0));
            let token = sampled.token;
            emit(self.context, sequence, sampled, None);
            self.memory.publish(sequence);
            self.advance(handoff, token);
        }
        let continues = |s: &WorkerSequence| {
            placed.phase == SequencePhase::Decode && s.stage() == SequenceStage::Active
        };
        if self.sequences.get(handoff).is_some_and(continues) {
            self.handoffs().advance_move(handoff);
        }
        self.slide(handoff);
    }

    /// Gives up what lies behind the window of a sequence, unless it is over, moves, or is still
    /// being read for a move. A hand-off of its prompt reads only what its next token reads too.
    fn slide(&mut self, handoff: HandoffId) {
        let reads = self.peers.reads_for_move(handoff);
        let sequence = self.sequences.get_mut(handoff);
        let stays = |s: &&mut WorkerSequence| !s.closing() && s.moving.is_none() && !reads;
        if let Some(sequence) = sequence.filter(stays) {
            self.memory.slide(sequence);
        }
    }

    /// Gives a pooled sequence's vector away, and ends the sequence.
    fn finish_pooled(&mut self, handoff: HandoffId, vector: Arc<[f32]>) {
        let Some(sequence) = self.sequences.get_mut(handoff) else {
            return;
        };
        let sampled = SampledToken {
            token: POOLED_TOKEN,
            scores: None,
        };
        emit(self.context, sequence, sampled, Some(vector));
        self.memory.publish(sequence);
        sequence.tokens.push(POOLED_TOKEN);
        let finished = CloseReason::Finished(FinishReason::Length);
        self.handoffs().close(handoff, finished);
    }

    /// Moves the sequence on by its new token: to its end, to the peer, or to the next step.
    fn advance(&mut self, handoff: HandoffId, token: TokenId) {
        let context = self.context.limits().capacity.context_tokens_max;
        let Some(sequence) = self.sequences.get_mut(handoff) else {
            return;
        };
        sequence.tokens.push(token);
        if let Some(reason) = sequence.finish_reason(context) {
            return self
                .handoffs()
                .close(handoff, CloseReason::Finished(reason));
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
        let received = block_hash(sequence.request.cache_scope(), None, received);
        let bytes = sequence
            .outgoing
            .as_ref()
            .map_or(0, |sender| sender.bytes());
        sequence.times.drawn = Some((self.context.now(), bytes));
        self.sequences.begin_sending(handoff);
        self.context
            .report(router, Report::Prefilled { handoff, timing });
        let mut handoffs = self.handoffs();
        handoffs.export(handoff, ReadyBlocks::All);
        handoffs.export_state(handoff, handoff);
        let (content, output) = (received, vec![token]);
        handoffs.send(handoff, sender::SenderInput::Sampled { content, output });
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
            self.memory
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

    fn handoffs(&mut self) -> Handoffs<'_> {
        Handoffs {
            context: self.context,
            sequences: self.sequences,
            memory: self.memory,
            peers: self.peers,
            forecast: self.forecast,
        }
    }
}

/// Emits a token before anything else is done about it: latency is the client's.
fn emit(
    context: &mut WorkerContext,
    sequence: &mut WorkerSequence,
    sampled: SampledToken,
    pooled: Option<Arc<[f32]>>,
) {
    let prompt = (sequence.phase == SequencePhase::Prompt).then(|| PromptFacts {
        cached_tokens: sequence.cached_tokens,
        scores: std::mem::take(&mut sequence.prompt_scores),
        timing: sequence.prefill_timing(context.now()),
        pooled,
    });
    let emission = Emission {
        index: sequence.output_count(),
        sampled,
        prompt,
    };
    let handoff = sequence.handoff();
    context.emit(WorkerOutput::Emit { handoff, emission });
}

impl StepInFlight {
    /// Whether there are values for each segment that pools, in the order of the plan.
    fn answers_poolings(&self, pooled: &[(SlotIndex, Arc<[f64]>)]) -> bool {
        let pools = self.segments.iter().filter(|placed| placed.pools);
        let slots = pooled.iter().map(|(slot, _)| *slot);
        pools.map(|placed| placed.slot).eq(slots)
    }

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
