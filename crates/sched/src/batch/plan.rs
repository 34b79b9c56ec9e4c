//! The next step: which sequences run how many tokens.
//!
//! Owns: slots, growth, the choice of sequences that give up blocks, and the joint batch: decode
//! tokens first, prompt chunks in the room that is left, drafts last. Never: waits for anything;
//! what cannot run now is tried again in the next step.
//! Invariant: the most important active sequence runs in every step, unless every slot or every
//! block is held by sequences that will run without it, the blocks it is given were being filled
//! from a tier and are free once that has stopped, or it has the slack to be deferred once.

use super::StepPipeline;
use super::steps::SegmentInFlight;
use super::targets::BatchLoad;
use crate::context::WorkerContext;
use crate::forecast::WorkForecast;
use crate::handoff::{Handoffs, PeerTraffic};
use crate::memory::{KvMemory, SequenceWindow};
use crate::sequences::{SequenceTable, WorkerSequence};
use crate::speculate::{DraftAcceptance, Drafting};
use cleave_domain::{Failure, HandoffId, LogitsWanted, Segment, StepPlan};

/// A step being put together.
pub(crate) struct StepBuilder {
    pub(crate) plan: StepPlan,
    /// In the order of the plan's segments.
    pub(crate) segments: Vec<SegmentInFlight>,
    /// Tokens that the step still has room for.
    pub(super) tokens_left: u32,
    /// Work in the step, with the targets of its streams.
    pub(crate) held: BatchLoad,
    /// Sequences that must wait for a copy to end.
    pub(super) waiting: Vec<HandoffId>,
    /// Sequences deferred to a later step.
    pub(super) deferred: Vec<HandoffId>,
    /// Blocks being freed that sequences of `waiting` will take.
    pub(super) blocks_awaited: u64,
    /// A prompt got a block of tokens beyond what the streams have slack for; at most one does in a
    /// step.
    pub(super) late_prompt_placed: bool,
}

impl StepBuilder {
    fn new(tokens_max: u32) -> Self {
        Self {
            plan: StepPlan::default(),
            segments: Vec::new(),
            tokens_left: tokens_max,
            held: BatchLoad::default(),
            waiting: Vec::new(),
            deferred: Vec::new(),
            blocks_awaited: 0,
            late_prompt_placed: false,
        }
    }

    /// Whether the sequence is to run in a later step.
    pub(super) fn leaves_out(&self, handoff: HandoffId) -> bool {
        self.waiting.contains(&handoff) || self.deferred.contains(&handoff)
    }
}

/// The choice of the next step, when none is under way.
pub(crate) struct StepPlanner<'a> {
    pub(crate) context: &'a mut WorkerContext,
    pub(crate) sequences: &'a mut SequenceTable,
    pub(crate) memory: &'a mut KvMemory,
    pub(crate) peers: &'a mut PeerTraffic,
    pub(crate) steps: &'a mut StepPipeline,
    pub(crate) forecast: &'a mut WorkForecast,
    pub(crate) acceptance: &'a DraftAcceptance,
}

impl StepPlanner<'_> {
    /// Emits a step if there is something to run; whether it did.
    pub(crate) fn plan(&mut self) -> bool {
        let mut draft = StepBuilder::new(self.context.limits().capacity.step_tokens_max);
        self.recompute_lost_states(&mut draft);
        // Decodes first: a stream that draws late is noticed at every token. Chunks then fill the
        // rows and the time that the streams leave, and drafts take only what remains.
        self.place_decodes(&mut draft);
        self.place_chunks(&mut draft);
        let drafting = self.drafting().place_drafts(&mut draft);
        if draft.segments.is_empty() {
            return false;
        }
        let (plan, segments) = (draft.plan, draft.segments);
        self.steps
            .emit(self.context, plan, segments, drafting, self.forecast);
        true
    }

    /// Takes everything from sequences without a state to go on from; they compute their tokens
    /// again, and what they have sent stays valid. One whose blocks are being read waits for that.
    fn recompute_lost_states(&mut self, draft: &mut StepBuilder) {
        let lost = |s: &WorkerSequence| !s.stepping() && s.lacks_state();
        for rank in self.sequences.active_where(lost) {
            let handoff = rank.handoff;
            let failure = Failure::Engine("a step failed, and the state with it".to_owned());
            self.handoffs().abort_move(handoff, failure);
            let sequence = self.sequences.get(handoff);
            if sequence.is_some_and(|sequence| self.peers.reads_any_block(sequence)) {
                draft.waiting.push(handoff);
            } else {
                self.memory.drop_kv(self.context, self.sequences, handoff);
            }
        }
    }

    /// Adds the next `tokens` tokens of a sequence to the draft. It has a slot and the blocks.
    pub(super) fn place(&mut self, handoff: HandoffId, tokens: u32, draft: &mut StepBuilder) {
        draft.plan.opens.extend(self.sequences.open_slot(handoff));
        let Some(sequence) = self.sequences.get(handoff) else {
            return;
        };
        let slot = sequence.slot().expect("a sequence that runs has a slot");
        let logits = sequence.logits(tokens);
        if logits == LogitsWanted::Pool {
            draft.plan.poolings.extend(sequence.segment_pooling(slot));
        }
        draft.plan.segments.push(Segment {
            slot,
            position: sequence.kv.computed(),
            len: tokens,
            blocks: sequence
                .kv
                .table()
                .iter()
                .map(|block| block.block)
                .collect(),
            logits,
            drafts: Vec::new(),
            state: sequence
                .kv
                .state()
                .map(|state| state.segment(sequence.kv.computed())),
            window: sequence.kv.window().map(SequenceWindow::table),
        });
        draft.segments.push(SegmentInFlight {
            handoff,
            slot,
            tokens,
            drafts: 0,
            phase: sequence.phase,
            samples: logits.samples(),
            pools: logits == LogitsWanted::Pool,
        });
        draft.tokens_left -= tokens;
        self.sequences.enter_step(handoff, self.context.now());
    }

    // === narrower rules ===

    pub(super) fn handoffs(&mut self) -> Handoffs<'_> {
        Handoffs {
            context: self.context,
            sequences: self.sequences,
            memory: self.memory,
            peers: self.peers,
            forecast: self.forecast,
        }
    }

    fn drafting(&mut self) -> Drafting<'_> {
        Drafting {
            limits: self.context.limits(),
            sequences: self.sequences,
            memory: self.memory,
            forecast: self.forecast,
            acceptance: self.acceptance,
        }
    }
}
