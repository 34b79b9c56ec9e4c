//! The step ahead: the same decode step once more, said while the one before it runs, so that the device
//! never waits for the host.
//!
//! Owns: when there is one, and what is in it. Never: chooses: where the planner might place somebody else,
//! or somebody would have to give way, there is none. It is said when the step under way is about to end: until
//! then whoever comes is in the very next step, and only who comes later waits for one more.
//! Invariant: whoever is in it draws a token in the step before it, and it runs that token. If that ends the
//! sequence after all, what the step ahead gives of it is dropped, and its slot and blocks stay with it until
//! then: what is written beyond `computed` is given to nobody.

use crate::Brain;
use crate::batch;
use crate::brain::{Placed, Step};
use crate::policy::Rank;
use crate::sequence::{Phase, Sequence};
use cleave_domain::{Segment, StepPlan, Time};
use std::time::Duration;

/// How long before the step under way is predicted to end the next one is said: what a body's timer may be
/// late, and the host's own way to the device. Of a long step a part, since so much predictions are off.
const LEAD: Duration = Duration::from_millis(2);
const LEAD_PARTS: u32 = 8;

impl Brain {
    /// From when on a step ahead may be said, if the engine takes one now.
    pub(crate) fn ahead_at(&self) -> Option<Time> {
        let step = self.under_way.front()?;
        let alone = self.under_way.len() == 1 && !step.void;
        let takes_one = self.limits.steps_in_flight >= 2 && alone;
        let lead = LEAD.max(step.predicted / LEAD_PARTS);
        takes_one.then(|| step.since + step.predicted.saturating_sub(lead))
    }

    /// Asks for one more step like the only one under way, if the engine takes it and nothing else is to
    /// be placed.
    pub(crate) fn plan_ahead(&mut self) {
        if self.ahead_at().is_none_or(|at| self.now < at) {
            return;
        }
        let Some(step) = self.under_way.front() else {
            return;
        };
        let Some(ranks) = self.all_go_on(step) else {
            return;
        };
        let slots_freed = step.placed.len() - ranks.len();
        let placeable = !ranks.is_empty() && !self.others_wait(slots_freed);
        if !placeable || !self.has_blocks(&ranks) || !self.keeps_promises(&ranks) {
            return;
        }
        let (mut plan, mut placed) = (StepPlan::default(), Vec::new());
        for rank in ranks {
            let (segment, place) = self.place_ahead(rank);
            plan.segments.push(segment);
            placed.push(place);
        }
        self.say_step(plan, placed, None);
    }

    /// Those of the step that draw once more, whatever they draw in it; `None` if not all of it is decoding,
    /// or one may not be drawn ahead. One that moves may have to stand still after any step.
    fn all_go_on(&self, step: &Step) -> Option<Vec<Rank>> {
        let context = self.limits.capacity.context_tokens_max;
        let mut ranks = Vec::new();
        for placed in &step.placed {
            let sequence = self.sequences.get(&placed.handoff)?;
            let decodes = placed.phase == Phase::Decode && placed.tokens == 1 && placed.samples;
            if !decodes {
                return None;
            }
            if sequence.closing() || sequence.ends_next(context) {
                continue;
            }
            if sequence.moving.is_some() || !sequence.request.sampling.draws_ahead() {
                return None;
            }
            ranks.push(sequence.rank);
        }
        Some(ranks)
    }

    /// Whether the planner might place one that is in no step: it has a slot, or will find one.
    fn others_wait(&self, slots_freed: usize) -> bool {
        let seats = slots_freed > 0 || !self.slots.is_empty();
        let waiting =
            |sequence: &Sequence| !sequence.stepping() && (seats || sequence.slot.is_some());
        let mut active = self.active.iter();
        active.any(|rank| waiting(&self.sequences[&rank.handoff]))
    }

    /// Whether all of them have room for the token under way, or can have it without another's blocks.
    fn has_blocks(&self, ranks: &[Rank]) -> bool {
        let size = self.limits.capacity.block_tokens;
        let lacking = ranks
            .iter()
            .map(|rank| self.sequences[&rank.handoff].lacks(2, size));
        lacking.sum::<u64>() <= u64::from(self.pool.blocks_available())
    }

    /// Whether none of them would have to sit it out.
    fn keeps_promises(&self, ranks: &[Rank]) -> bool {
        let candidates = ranks.iter().filter_map(|rank| {
            let mut candidate = self.candidate(*rank)?;
            candidate.context_tokens += 1;
            Some(candidate)
        });
        let candidates: Vec<_> = candidates.collect();
        let placed = batch::Placed::default();
        batch::sit_out(self.learner.prices(), placed, &candidates, self.now).is_empty()
    }

    /// Puts the token that is being drawn into the step. The sequence has a slot, and room was counted.
    fn place_ahead(&mut self, rank: Rank) -> (Segment, Placed) {
        let size = self.limits.capacity.block_tokens;
        let sequence = self.sequences.get_mut(&rank.handoff);
        let sequence = sequence.expect("it is in the step under way");
        let slot = sequence.slot.expect("a sequence that runs has a slot");
        let blocks = (sequence.len() + 1).div_ceil(size);
        while sequence.table.len() < blocks as usize {
            let block = self.pool.take_promised(&mut sequence.promise);
            let block = block.or_else(|| self.pool.take());
            sequence.table.push(block.expect("blocks were counted"));
        }
        sequence.steps_count += 1;
        sequence.pace.step(self.now);
        let segment = Segment {
            slot,
            position: sequence.computed + 1,
            len: 1,
            blocks: sequence.table.iter().map(|block| block.block).collect(),
            logits: sequence.logits(1),
            drafts: Vec::new(),
        };
        let placed = Placed {
            handoff: rank.handoff,
            slot,
            tokens: 1,
            drafts: 0,
            phase: sequence.phase,
            samples: true,
        };
        (segment, placed)
    }
}

impl Sequence {
    /// Whether its next token is its last one, whatever it is.
    fn ends_next(&self, context_tokens_max: u32) -> bool {
        let output_count = self.output_count() as usize + 1;
        self.request.full(output_count, context_tokens_max)
    }
}
