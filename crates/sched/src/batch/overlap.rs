//! The step ahead: the same decode step once more, emitted while the one before it runs, so that
//! the device never waits for the host.
//!
//! Owns: when there is one, and its content. Never: chooses: where the planner might place another
//! sequence, or one would have to give up blocks, there is none. It is emitted when the step under
//! way is about to end: a prompt that arrives before that is in the very next step, and only a
//! later one waits for one step more.
//! Invariant: each sequence in it draws a token in the step before it, and runs that token here. If
//! that token ends the sequence after all, its results of the step ahead are dropped, and its slot
//! and blocks stay with it until then: KV written beyond `computed` is never used.

use super::StepPipeline;
use super::steps::{SegmentInFlight, StepInFlight};
use super::targets::{self, DecodeCandidate};
use crate::context::WorkerContext;
use crate::forecast::WorkForecast;
use crate::memory::{KvMemory, SequenceWindow};
use crate::policy::ServiceRank;
use crate::sequences::{SequencePhase, SequenceTable, WorkerSequence};
use cleave_domain::{Segment, StepPlan};
use cleave_kv::PlanePool;

/// The choice of the step after the one under way.
pub(crate) struct StepAhead<'a> {
    pub(crate) context: &'a mut WorkerContext,
    pub(crate) sequences: &'a mut SequenceTable,
    pub(crate) memory: &'a mut KvMemory,
    pub(crate) steps: &'a mut StepPipeline,
    pub(crate) forecast: &'a WorkForecast,
}

impl StepAhead<'_> {
    /// Emits one more step like the only one under way, if the engine takes it and nothing else is
    /// to be placed; whether it did.
    pub(crate) fn plan(&mut self) -> bool {
        let now = self.context.now();
        let at = self.steps.ahead_at(self.context.limits());
        if at.is_none_or(|at| now < at) {
            return false;
        }
        let Some(step) = self.steps.running() else {
            return false;
        };
        // Any sequence that cannot draw ahead leaves the whole step to the planner.
        let Some(ranks) = self.all_go_on(step) else {
            return false;
        };
        // Slots that become free, waiting sequences, missing blocks or broken targets all need the
        // planner's choice, which this step must not anticipate.
        let slots_freed = step.segments.len() - ranks.len();
        let placeable = !ranks.is_empty() && !self.others_wait(slots_freed);
        if !placeable || !self.has_blocks(&ranks) || !self.all_run_together(&ranks) {
            return false;
        }
        let (mut plan, mut placed) = (StepPlan::default(), Vec::new());
        for rank in ranks {
            let (segment, place) = self.place_ahead(rank);
            plan.segments.push(segment);
            placed.push(place);
        }
        self.steps
            .emit(self.context, plan, placed, None, self.forecast);
        true
    }

    /// Ranks of the sequences of the step that will draw once more, whatever they draw in it;
    /// `None` if not all of it is decoding, or one may not be drawn ahead. A moving sequence may
    /// have to pause after any step.
    fn all_go_on(&self, step: &StepInFlight) -> Option<Vec<ServiceRank>> {
        let context = self.context.limits().capacity.context_tokens_max;
        let mut ranks = Vec::new();
        for placed in &step.segments {
            let sequence = self.sequences.get(placed.handoff)?;
            let decodes =
                placed.phase == SequencePhase::Decode && placed.tokens == 1 && placed.samples;
            if !decodes {
                return None;
            }
            if sequence.closing() || sequence.ends_next(context) {
                continue;
            }
            if sequence.moving.is_some() || !sequence.request.sampling.can_draw_ahead() {
                return None;
            }
            ranks.push(sequence.rank());
        }
        Some(ranks)
    }

    /// Whether the planner might place a sequence that is in no step: it has a slot, or will find
    /// one.
    fn others_wait(&self, slots_freed: usize) -> bool {
        let slot_free = slots_freed > 0 || self.sequences.has_free_slot();
        let waiting = |sequence: &WorkerSequence| {
            !sequence.stepping() && (slot_free || sequence.slot().is_some())
        };
        self.sequences.active().any(waiting)
    }

    /// Whether all of them have room for the token under way, or can have it without another's
    /// blocks.
    fn has_blocks(&self, ranks: &[ServiceRank]) -> bool {
        let size = self.context.block_tokens();
        let sequences = ranks
            .iter()
            .filter_map(|rank| self.sequences.get(rank.handoff));
        let lacking = sequences.clone().map(|sequence| sequence.lacks(2, size));
        let windows = self.memory.windows();
        let windows = windows.map_or(0, PlanePool::blocks_available);
        let window_lacking = sequences.map(|sequence| sequence.window_lacks(2, size));
        lacking.sum::<u64>() <= u64::from(self.memory.blocks().blocks_available())
            && window_lacking.sum::<u64>() <= u64::from(windows)
    }

    /// Whether all of them would run together by the planner's rule.
    fn all_run_together(&self, ranks: &[ServiceRank]) -> bool {
        let now = self.context.now();
        let candidates = ranks.iter().filter_map(|rank| {
            let sequence = self.sequences.get(rank.handoff)?;
            let mut candidate = DecodeCandidate::new(sequence, self.forecast, now);
            candidate.context_tokens += 1;
            Some(candidate)
        });
        let candidates: Vec<_> = candidates.collect();
        let placed = targets::BatchLoad::default();
        targets::deferred(self.forecast.prices(), placed, &candidates, now).is_empty()
    }

    /// Adds the token that is being drawn to the step. The sequence has a slot, and room was
    /// counted.
    fn place_ahead(&mut self, rank: ServiceRank) -> (Segment, SegmentInFlight) {
        let (size, now) = (self.context.block_tokens(), self.context.now());
        self.sequences.enter_step(rank.handoff, now);
        let sequence = self.sequences.get_mut(rank.handoff);
        let sequence = sequence.expect("it is in the step under way");
        let slot = sequence.slot().expect("a sequence that runs has a slot");
        let blocks = (sequence.len() + 1).div_ceil(size);
        assert!(self.memory.grow(sequence, blocks), "blocks were counted");
        let segment = Segment {
            slot,
            position: sequence.kv.computed() + 1,
            len: 1,
            blocks: sequence
                .kv
                .table()
                .iter()
                .map(|block| block.block)
                .collect(),
            logits: sequence.logits(1),
            drafts: Vec::new(),
            state: sequence.kv.state().map(|state| state.segment_ahead()),
            window: sequence.kv.window().map(SequenceWindow::table),
        };
        let placed = SegmentInFlight {
            handoff: rank.handoff,
            slot,
            tokens: 1,
            drafts: 0,
            phase: sequence.phase,
            samples: true,
            pools: false,
        };
        (segment, placed)
    }
}

impl WorkerSequence {
    /// Whether its next token is its last one, whatever it is.
    fn ends_next(&self, context_tokens_max: u32) -> bool {
        let output_count = self.output_count() as usize + 1;
        self.request.is_at_limit(output_count, context_tokens_max)
    }
}
