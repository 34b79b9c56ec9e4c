//! What a step gave.
//!
//! Owns: taking a step's result apart: tokens to clients, blocks to the cache and to the peer, the
//! ends of sequences. Never: believes a result that does not answer the plan.
//! Invariant: each sequence of a step is settled exactly once, whatever became of it meanwhile.

use crate::brain::{Placed, Step};
use crate::close::Close;
use crate::sequence::{Phase, Sequence, Stage};
use crate::{Brain, Note, Output};
use cleave_domain::{
    Emission, Failure, HandoffId, PromptFacts, Report, Sampled, SlotIndex, StepId, StepResult,
    TokenId,
};
use cleave_kv::block_hash;
use cleave_kv::handoff::sender;
use std::collections::BTreeMap;
use std::time::Duration;

/// Which blocks of a sequence will not change any more.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Ready {
    /// Those that are full: more of the prompt is to come.
    FullBlocks,
    /// The last one too: nothing more is run here.
    All,
}

impl Ready {
    /// How many leading blocks that are.
    pub(crate) fn blocks(self, computed: u32, block_tokens: u32) -> u32 {
        match self {
            Self::FullBlocks => computed / block_tokens,
            Self::All => computed.div_ceil(block_tokens),
        }
    }
}

impl Brain {
    // === facts ===

    pub(crate) fn stepped(&mut self, result: StepResult, took: Duration) {
        let StepResult {
            step: id,
            sampled,
            prompt_scores,
        } = result;
        let Some(step) = self.step_over(id) else {
            return;
        };
        if step.void {
            return self.take_back(&step);
        }
        let Some(counts) = step.draws(&sampled) else {
            return self.broke(&step, "the result answers another plan");
        };
        // A running mean over about eight steps.
        self.step_mean = match id.0 {
            1 => took,
            _ => (self.step_mean * 7 + took) / 8,
        };
        self.learn(&step, took);
        self.measure(&step, took);
        self.count_drafts(&step, sampled.len());
        let mut sampled = sampled.into_iter().map(|(_, sampled)| sampled);
        let mut scores: BTreeMap<SlotIndex, Vec<Sampled>> = prompt_scores.into_iter().collect();
        for (placed, count) in step.placed.into_iter().zip(counts) {
            let drawn = sampled.by_ref().take(count).collect();
            let scores = scores.remove(&placed.slot).unwrap_or_default();
            self.settle(placed, drawn, scores);
        }
        self.say_prefix();
    }

    /// The sequence in `slot` fails, and the others of the step run again; without a slot all of them
    /// fail. What the step was to write was given to nobody yet, so it makes no difference whether it was
    /// written.
    pub(crate) fn step_failed(&mut self, id: StepId, slot: Option<SlotIndex>, reason: &str) {
        let Some(step) = self.step_over(id) else {
            return;
        };
        if step.void {
            return self.take_back(&step);
        }
        let named = step.placed.iter().find(|placed| slot == Some(placed.slot));
        let Some(named) = named.map(|placed| placed.handoff) else {
            return self.broke(&step, reason);
        };
        let failure = Failure::Engine(reason.into());
        self.close(named, Close::Failed(failure));
        for next in &mut self.under_way {
            next.void = true;
        }
        self.take_back(&step);
    }

    /// Each sequence of the step is as it was before, and opens its slot anew: the engine may know tokens
    /// of it that nobody was given.
    fn take_back(&mut self, step: &Step) {
        self.stirred = true;
        for placed in &step.placed {
            let Some(sequence) = self.sequences.get_mut(&placed.handoff) else {
                continue;
            };
            sequence.steps_count -= 1;
            sequence.opened = false;
            sequence.speculating.forget_guess();
            if sequence.closing() && !sequence.stepping() {
                sequence.unseat(&mut self.slots);
            }
            self.release_if_settled(placed.handoff);
        }
    }

    /// Takes the oldest step under way, if it is this; the one behind it runs from now on.
    fn step_over(&mut self, id: StepId) -> Option<Step> {
        if self.under_way.front()?.id != id {
            return None;
        }
        let step = self.under_way.pop_front();
        if let Some(next) = self.under_way.front_mut() {
            next.since = self.now;
        }
        step
    }

    /// Nothing here can go on, and nothing new is to come.
    pub(crate) fn engine_lost(&mut self, reason: &str) {
        self.drain();
        let handoffs: Vec<HandoffId> = self.handoffs().collect();
        for handoff in handoffs {
            self.close(handoff, Close::Failed(Failure::Engine(reason.into())));
        }
    }

    fn broke(&mut self, step: &Step, reason: &str) {
        for placed in &step.placed {
            if let Some(sequence) = self.sequences.get_mut(&placed.handoff) {
                sequence.steps_count -= 1;
                if !sequence.stepping() {
                    // If it was over before, only the step kept its slot.
                    sequence.unseat(&mut self.slots);
                }
            }
            let failure = Failure::Engine(reason.into());
            self.close(placed.handoff, Close::Failed(failure));
            self.release_if_settled(placed.handoff);
        }
    }

    // === one sequence ===

    fn settle(&mut self, placed: Placed, drawn: Vec<Sampled>, scores: Vec<Sampled>) {
        let handoff = placed.handoff;
        let Some(sequence) = self.sequences.get_mut(&handoff) else {
            return;
        };
        sequence.steps_count -= 1;
        if sequence.closing() {
            if !sequence.stepping() {
                sequence.unseat(&mut self.slots);
            }
            return self.release_if_settled(handoff);
        }
        sequence.computed += placed.tokens - placed.drafts;
        sequence.pace.stepped(self.now);
        sequence.prompt_scores.extend(scores);
        self.weigh_guess(handoff, &drawn);
        if drawn.is_empty() {
            self.publish(handoff);
            return self.export(handoff, Ready::FullBlocks);
        }
        for (place, sampled) in drawn.into_iter().enumerate() {
            let Some(sequence) = self.sequences.get_mut(&handoff) else {
                return;
            };
            // What the step drew beyond the sequence's end is nobody's.
            if sequence.stage != Stage::Active {
                return;
            }
            // The token before was a draft, and so it was run.
            sequence.computed += u32::from(place > 0);
            let token = sampled.token;
            self.emit(handoff, sampled);
            self.publish(handoff);
            self.advance(handoff, token);
        }
        let goes_on = |s: &Sequence| placed.phase == Phase::Decode && s.stage == Stage::Active;
        if self.sequences.get(&handoff).is_some_and(goes_on) {
            self.leave(handoff);
        }
    }

    /// The token leaves for the client before anything else is done about it.
    fn emit(&mut self, handoff: HandoffId, sampled: Sampled) {
        let now = self.now;
        let Some(sequence) = self.sequences.get_mut(&handoff) else {
            return;
        };
        let prompt = (sequence.phase == Phase::Prompt).then(|| PromptFacts {
            cached_tokens: sequence.cached_tokens,
            scores: std::mem::take(&mut sequence.prompt_scores),
            timing: sequence.prefill_timing(now),
        });
        let emission = Emission {
            index: sequence.output_count(),
            sampled,
            prompt,
        };
        self.say(Output::Emit { handoff, emission });
    }

    /// Where the sequence goes from its new token on: to its end, to the peer, or to the next step.
    fn advance(&mut self, handoff: HandoffId, token: TokenId) {
        let context = self.limits.capacity.context_tokens_max;
        let Some(sequence) = self.sequences.get_mut(&handoff) else {
            return;
        };
        sequence.tokens.push(token);
        if let Some(reason) = sequence.ended(context) {
            return self.close(handoff, Close::Finished(reason));
        }
        if sequence.phase == Phase::Decode {
            return;
        }
        let router = sequence.router;
        let timing = sequence.prefill_timing(self.now);
        sequence.phase = Phase::Decode;
        if sequence.outgoing.is_none() {
            let count = sequence.output_count();
            sequence.pace.begin(self.now, self.now, count);
            self.tell(router, Report::Prefilled { handoff, timing });
            self.note(Note::Joined { handoff });
            self.tell(router, Report::Landed { handoff });
            return;
        }
        // The receiver was told of all but the token just drawn.
        let told = &sequence.tokens[..sequence.tokens.len() - 1];
        let told = block_hash(sequence.request.cache_salt, None, told);
        sequence.stage = Stage::Sending;
        let bytes = sequence
            .outgoing
            .as_ref()
            .map_or(0, |sender| sender.bytes());
        sequence.times.drawn = Some((self.now, bytes));
        self.active.remove(&sequence.rank);
        sequence.unseat(&mut self.slots);
        self.tell(router, Report::Prefilled { handoff, timing });
        self.export(handoff, Ready::All);
        let (content, output) = (told, vec![token]);
        self.send(handoff, sender::Input::Sampled { content, output });
    }

    /// Lets the pool know the content of blocks that became full.
    pub(crate) fn publish(&mut self, handoff: HandoffId) {
        let size = self.limits.capacity.block_tokens;
        let Some(sequence) = self.sequences.get_mut(&handoff) else {
            return;
        };
        if !self.limits.prefix_cache || sequence.computed / size <= sequence.published {
            return;
        }
        sequence.extend_hashes(size);
        while sequence.published < sequence.computed / size {
            let i = sequence.published as usize;
            self.pool.complete(sequence.table[i], sequence.hashes[i]);
            sequence.published += 1;
        }
    }

    /// Lets the sender, if there is one, have the blocks that will not change any more.
    pub(crate) fn export(&mut self, handoff: HandoffId, ready: Ready) {
        let size = self.limits.capacity.block_tokens;
        let Some(sequence) = self.sequences.get_mut(&handoff) else {
            return;
        };
        if sequence.outgoing.is_none() {
            return;
        }
        let done = ready.blocks(sequence.computed, size);
        let new = sequence.exported..done;
        sequence.exported = done;
        let table = &sequence.table[new.start as usize..new.end as usize];
        let blocks: Vec<_> = new.zip(table.iter().map(|block| block.block)).collect();
        for (ordinal, from) in blocks {
            self.send(handoff, sender::Input::Computed { ordinal, from });
        }
    }

    // === measures ===

    fn learn(&mut self, step: &Step, took: Duration) {
        self.learner.observe(&step.work, took);
        let capacity = &self.limits.capacity;
        let (most, block) = (capacity.step_tokens_max, capacity.block_tokens);
        self.quantum = cleave_planner::quantum(self.learner.prices(), most, block);
    }

    /// `drawn_count` tokens in all.
    fn count_drafts(&mut self, step: &Step, drawn_count: usize) {
        let Some(drafting) = step.drafting else {
            return;
        };
        let sequences = step.placed.iter().filter(|placed| placed.samples).count();
        let count = |tokens| u32::try_from(tokens).expect("a step's tokens are counted in 32 bits");
        self.note(Note::Drafted {
            drafted_tokens: count(step.drafts.len()),
            accepted_tokens: count(drawn_count - sequences),
            drafting,
        });
    }

    fn measure(&mut self, step: &Step, took: Duration) {
        let (decode, prefill): (Vec<&Placed>, Vec<&Placed>) =
            step.placed.iter().partition(|placed| {
                placed.phase == Phase::Decode && placed.tokens - placed.drafts == 1
            });
        let prefill_tokens: u32 = prefill.iter().map(|placed| placed.tokens).sum();
        let decode_sequences = u32::try_from(decode.len()).expect("slots are counted in 32 bits");
        if prefill_tokens > 0 {
            self.swap_prices
                .prefilled(prefill_tokens + decode_sequences, took);
        }
        self.note(Note::Stepped {
            prefill_tokens,
            decode_sequences,
            took,
            work: step.work,
            predicted: step.predicted,
        });
    }
}

impl Step {
    /// How many tokens were drawn of each segment; `None` if they are no answer to it. Whoever samples has one, and
    /// one more for each leading draft that was drawn.
    fn draws(&self, sampled: &[(SlotIndex, Sampled)]) -> Option<Vec<usize>> {
        let (mut drawn, mut drafts) = (sampled, self.drafts.as_slice());
        let mut counts = Vec::with_capacity(self.placed.len());
        for placed in &self.placed {
            let (guessed, others) = drafts.split_at(placed.drafts as usize);
            drafts = others;
            let own = drawn.iter().take_while(|(slot, _)| *slot == placed.slot);
            let count = own.count();
            let (own, rest) = drawn.split_at(count);
            drawn = rest;
            let asked = match placed.samples {
                true => 1..=guessed.len() + 1,
                false => 0..=0,
            };
            let verified = own.iter().map(|(_, sampled)| sampled.token).zip(guessed);
            let all_but_last = count.saturating_sub(1);
            if !asked.contains(&count)
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
