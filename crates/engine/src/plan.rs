//! Validation of step plans.
//!
//! Owns: every rule that a [`StepPlan`] must keep; no part of a plan is trusted.
//! Never: changes an engine.
//! Invariant: an accepted plan cannot index outside a buffer, write two sequences into one block or
//! state slot, or run a token that is neither in the slot's history nor being drawn for it.

use crate::model::pooling_of;
use crate::sampling::{self, SamplingSlot};
use crate::{EngineDescription, EngineError};
use cleave_domain::{
    BlockIndex, Capacity, LogitsWanted, OpenSlot, Pooling, Segment, SegmentPooling, SegmentState,
    StateCapacity, StepPlan,
};

/// Records the blocks and slots that a plan names. Serial numbers make clearing between plans
/// unnecessary.
#[derive(Debug)]
pub(crate) struct PlanCheck {
    /// Segment that last named a block, as a serial number.
    named_by_segment: Vec<u64>,
    /// Plan that last wrote a block.
    written_by_plan: Vec<u64>,
    /// Plan that last ran a slot.
    ran_by_plan: Vec<u64>,
    /// Plan that last wrote a state slot, and plan that last restored it.
    state_written_by_plan: Vec<u64>,
    state_restored_by_plan: Vec<u64>,
    /// Segment that last named a block of the window plane, and plan that last wrote one.
    window_named_by_segment: Vec<u64>,
    window_written_by_plan: Vec<u64>,
    segments_serial: u64,
    plans_serial: u64,
    /// Limit of a segment's drafts, see [`crate::Engine::drafts_max`].
    drafts_max: u32,
}

impl PlanCheck {
    pub(crate) fn new(capacity: &Capacity, drafts_max: u32) -> Self {
        let blocks_count = capacity.blocks_count as usize;
        let states_count = capacity.states.map_or(0, |states| states.count as usize);
        let windows_count = capacity.windows.map_or(0, |windows| windows.count as usize);
        Self {
            window_named_by_segment: vec![0; windows_count],
            window_written_by_plan: vec![0; windows_count],
            drafts_max,
            named_by_segment: vec![0; blocks_count],
            written_by_plan: vec![0; blocks_count],
            ran_by_plan: vec![0; capacity.slots_count as usize],
            state_written_by_plan: vec![0; states_count],
            state_restored_by_plan: vec![0; states_count],
            segments_serial: 0,
            plans_serial: 0,
        }
    }

    /// Checks a plan; the error names the problem, and the slot if it concerns one.
    pub(crate) fn check(
        &mut self,
        engine: &EngineDescription,
        slots: &[Option<SamplingSlot>],
        plan: &StepPlan,
    ) -> Result<(), EngineError> {
        let segments = plan.segments.iter();
        let pooling = segments.filter(|segment| segment.logits == LogitsWanted::Pool);
        let pooling = pooling.map(|segment| segment.slot);
        if !pooling.eq(plan.poolings.iter().map(|at| at.slot)) {
            let problem = "vectors that are not those of the segments that pool";
            return Err(EngineError::Plan(problem.to_owned()));
        }
        for (index, open) in plan.opens.iter().enumerate() {
            let of_slot = |problem| EngineError::Slot(open.slot, problem);
            check_open(engine, open).map_err(of_slot)?;
            if plan.opens[..index].iter().any(|o| o.slot == open.slot) {
                return Err(of_slot("is opened twice".to_owned()));
            }
        }
        self.plans_serial += 1;
        let mut rows = 0;
        for segment in &plan.segments {
            rows += segment.len as usize;
            if rows > engine.capacity.step_tokens_max as usize {
                let most = engine.capacity.step_tokens_max;
                let problem = format!("{rows} tokens or more in a step of {most}");
                return Err(EngineError::Plan(problem));
            }
            self.check_segment(engine, slots, plan, segment)
                .map_err(|problem| EngineError::Slot(segment.slot, problem))?;
        }
        Ok(())
    }

    fn check_segment(
        &mut self,
        engine: &EngineDescription,
        slots: &[Option<SamplingSlot>],
        plan: &StepPlan,
        segment: &Segment,
    ) -> Result<(), String> {
        let slot = segment.slot.0 as usize;
        let Some(ran) = self.ran_by_plan.get_mut(slot) else {
            return Err(format!(
                "no such slot, there are {}",
                engine.capacity.slots_count
            ));
        };
        if std::mem::replace(ran, self.plans_serial) == self.plans_serial {
            return Err("has two segments".to_owned());
        }
        // A slot that this plan opens has the history of its `OpenSlot`, not that of its old
        // sequence.
        let opened = plan.opens.iter().find(|open| open.slot == segment.slot);
        let (tokens_count, reported_count, draws_ahead) = match (opened, &slots[slot]) {
            (Some(open), _) => {
                let tokens_count = open.prompt.len() + open.output.len();
                (tokens_count, tokens_count, true)
            }
            (None, Some(slot)) => (
                slot.tokens_count(),
                slot.reported_count(),
                slot.sampling.can_draw_ahead(),
            ),
            (None, None) => return Err("was never opened".to_owned()),
        };
        if segment.len == 0 {
            return Err("a segment without tokens".to_owned());
        }
        let position = segment.position as usize;
        let end = position + segment.len as usize;
        if end > engine.capacity.context_tokens_max as usize {
            let most = engine.capacity.context_tokens_max;
            return Err(format!("position {end} in a context of {most}"));
        }
        self.check_drafts(engine, segment)?;
        let end = end - segment.drafts.len();
        if end > tokens_count {
            return Err(format!("tokens {position}..{end} of {tokens_count}"));
        }
        // The last token is pending: only a draw that depends on no earlier token may run before
        // the caller has it.
        if end > reported_count && !draws_ahead {
            return Err(format!(
                "token {reported_count} is being drawn, and the draw after it looks at it: collect first"
            ));
        }
        let samples = matches!(
            segment.logits,
            LogitsWanted::Sample | LogitsWanted::ScoreAndSample
        );
        if samples && end != tokens_count {
            return Err(format!("samples after {end} of {tokens_count} tokens"));
        }
        check_pooling(engine, plan, segment, tokens_count)?;
        let end = end + segment.drafts.len();
        self.check_blocks(engine, segment, end)?;
        self.check_window(engine, segment, end)?;
        match (engine.capacity.states, &segment.state) {
            (None, None) => Ok(()),
            (None, Some(_)) => Err("has a state slot, the model has no state".to_owned()),
            (Some(_), None) => Err("has no state slot, the model has a state".to_owned()),
            (Some(states), Some(state)) => self.check_state(states, state, segment.position),
        }
    }

    /// Checks the state slots of a segment: no other segment may see what this one writes.
    fn check_state(
        &mut self,
        states: StateCapacity,
        state: &SegmentState,
        position: u32,
    ) -> Result<(), String> {
        let SegmentState {
            slot,
            restore,
            snapshot,
        } = *state;
        let named = [Some(slot), restore, snapshot];
        if let Some(outside) = named.iter().flatten().find(|slot| slot.0 >= states.count) {
            let count = states.count;
            return Err(format!("no state slot {}, there are {count}", outside.0));
        }
        if position == 0 && restore.is_some() {
            return Err("restores a state at position 0".to_owned());
        }
        let plan = self.plans_serial;
        for written in [Some(slot), snapshot].into_iter().flatten() {
            let index = written.0 as usize;
            let before = std::mem::replace(&mut self.state_written_by_plan[index], plan);
            if before == plan {
                return Err(format!("state slot {index} is written twice"));
            }
        }
        if let Some(restored) = restore {
            self.state_restored_by_plan[restored.0 as usize] = plan;
        }
        let is_both = |slot: &&BlockIndex| {
            let index = slot.0 as usize;
            (
                self.state_written_by_plan[index],
                self.state_restored_by_plan[index],
            ) == (plan, plan)
        };
        match named.iter().flatten().find(is_both) {
            Some(slot) => Err(format!("state slot {} is restored and written", slot.0)),
            None => Ok(()),
        }
    }

    /// Checks drafts: they are the segment's last tokens but never its first, and each is within
    /// the vocabulary.
    fn check_drafts(&self, engine: &EngineDescription, segment: &Segment) -> Result<(), String> {
        let count = segment.drafts.len();
        if count == 0 {
            return Ok(());
        }
        if count > self.drafts_max as usize {
            let most = self.drafts_max;
            return Err(format!("{count} drafts, the engine takes {most}"));
        }
        if segment.logits != LogitsWanted::Sample || count >= segment.len as usize {
            let rule = "only of a segment that samples, and after its history";
            return Err(format!("{count} drafts of {} tokens: {rule}", segment.len));
        }
        let vocab_size = engine.vocab_size;
        let foreign = segment.drafts.iter().find(|token| **token >= vocab_size);
        foreign.map_or(Ok(()), |token| {
            Err(format!("draft {token} in a vocabulary of {vocab_size}"))
        })
    }

    fn check_blocks(
        &mut self,
        engine: &EngineDescription,
        segment: &Segment,
        end: usize,
    ) -> Result<(), String> {
        let block_tokens = engine.capacity.block_tokens as usize;
        let needed = end.div_ceil(block_tokens);
        let Some(table) = segment.blocks.get(..needed) else {
            let has = segment.blocks.len();
            return Err(format!("{has} blocks for {end} tokens, needs {needed}"));
        };
        let first_written = segment.position as usize / block_tokens;
        self.segments_serial += 1;
        for (ordinal, block) in table.iter().enumerate() {
            let index = block.0 as usize;
            let Some(named) = self.named_by_segment.get_mut(index) else {
                return Err(block_out_of_range(engine, *block));
            };
            if std::mem::replace(named, self.segments_serial) == self.segments_serial {
                return Err(format!("block {block} is twice in its table"));
            }
            // Blocks before the segment's first position are only read, and may be shared.
            if ordinal >= first_written {
                let written =
                    std::mem::replace(&mut self.written_by_plan[index], self.plans_serial);
                if written == self.plans_serial {
                    return Err(format!("block {block} is written by two sequences"));
                }
            }
        }
        Ok(())
    }
}

impl PlanCheck {
    /// Checks the blocks of the window plane: those of every position that the segment runs or its
    /// window reads. Follows `check_blocks`, of the same segment.
    fn check_window(
        &mut self,
        engine: &EngineDescription,
        segment: &Segment,
        end: usize,
    ) -> Result<(), String> {
        let (window, table) = match (engine.capacity.window(), &segment.window) {
            (None, None) => return Ok(()),
            (None, Some(_)) => return Err("has a window, the model has none".to_owned()),
            (Some(_), None) => return Err("has no window, the model has one".to_owned()),
            (Some(window), Some(table)) => (window, table),
        };
        let size = engine.capacity.block_tokens;
        let needed = window.first_block(segment.position)..(end as u32).div_ceil(size);
        let past = table.first as usize + table.blocks.len();
        if table.first > needed.start || past < needed.end as usize {
            return Err(format!(
                "blocks {}..{past} of its window, needs {needed:?}",
                table.first
            ));
        }
        let first_written = segment.position / size;
        for (ordinal, block) in table.entries().take_while(|(at, _)| *at < needed.end) {
            let index = block.0 as usize;
            let Some(named) = self.window_named_by_segment.get_mut(index) else {
                return Err(format!("no block {block} in the window plane"));
            };
            if std::mem::replace(named, self.segments_serial) == self.segments_serial {
                return Err(format!("block {block} is twice in its window"));
            }
            if ordinal >= first_written {
                let written = &mut self.window_written_by_plan[index];
                if std::mem::replace(written, self.plans_serial) == self.plans_serial {
                    return Err(format!(
                        "block {block} of the window is written by two sequences"
                    ));
                }
            }
        }
        Ok(())
    }
}

/// Checks that the window plane has room for the longest step of one sequence: it could never run
/// else.
pub(crate) fn check_windows(capacity: &Capacity) -> Result<(), EngineError> {
    let (Some(windows), Some(window)) = (capacity.windows, capacity.window()) else {
        return Ok(());
    };
    let least = window.blocks_max(capacity.step_tokens_max);
    let context_blocks = capacity.context_tokens_max.div_ceil(capacity.block_tokens);
    let least = least.min(context_blocks).min(capacity.blocks_count);
    if windows.count < least {
        return Err(EngineError::Plan(format!(
            "the window plane has {} blocks, and a step of {} tokens needs {least}: give the KV \
             cache more memory, or steps fewer tokens",
            windows.count, capacity.step_tokens_max
        )));
    }
    Ok(())
}

/// Checks that a segment that pools has a vector of its tokens.
fn check_pooling(
    engine: &EngineDescription,
    plan: &StepPlan,
    segment: &Segment,
    tokens_count: usize,
) -> Result<(), String> {
    if segment.logits != LogitsWanted::Pool {
        return Ok(());
    }
    let Some(SegmentPooling { pooling, sum, .. }) = pooling_of(plan, segment) else {
        return Err("pools no vector".to_owned());
    };
    let tokens = u32::try_from(tokens_count).unwrap_or(u32::MAX);
    if !pooling.reads(segment.position, segment.len, tokens) {
        return Err("pools no token of the segment".to_owned());
    }
    let continues = *pooling == Pooling::Mean && segment.position > 0;
    if sum.is_some() != continues {
        return Err("has a sum of no tokens, or lacks one".to_owned());
    }
    if let Pooling::Logits(tokens) = pooling
        && let Some(token) = tokens.iter().find(|token| **token >= engine.vocab_size)
    {
        return Err(format!("pools the logit of token {token}"));
    }
    Ok(())
}

/// Error message for a block that the pool does not have.
fn block_out_of_range(engine: &EngineDescription, block: BlockIndex) -> String {
    format!(
        "no block {block}, the pool has {}",
        engine.capacity.blocks_count
    )
}

fn check_open(engine: &EngineDescription, open: &OpenSlot) -> Result<(), String> {
    if open.slot.0 >= engine.capacity.slots_count {
        return Err(format!(
            "no such slot, there are {}",
            engine.capacity.slots_count
        ));
    }
    sampling::check(open, engine.vocab_size as usize)
}
