//! States of a step's sequences, before and after its pass.
//!
//! Owns: the order in which states are cleared, restored, and copied to snapshots. Never: reads a
//! state. Invariant: the pass of a step finds in each segment's slot the state after exactly the
//! tokens before the segment, if the caller named the right slots; a snapshot has those of the
//! segment too.

use super::ModelEngine;
use crate::EngineError;
use crate::ops::Ops;
use cleave_domain::{KvPlane, StepPlan};

impl<O: Ops> ModelEngine<O> {
    /// Queues, before a step's pass, the clearing of states at position 0 and the copies of
    /// restored ones.
    pub(super) fn prepare_states(&mut self, plan: &StepPlan) -> Result<(), EngineError> {
        for segment in &plan.segments {
            let Some(state) = segment.state else {
                continue;
            };
            if segment.position == 0 {
                self.ops.clear_state(&mut self.pool, state.slot)?;
            } else if let Some(snapshot) = state.restore {
                self.ops
                    .copy_block(&mut self.pool, KvPlane::State, snapshot, state.slot)?;
            }
        }
        Ok(())
    }

    /// Queues, after a step's pass, the copies of states to snapshots. They come after the draw,
    /// because a device may run a recorded pass only then.
    pub(super) fn take_snapshots(&mut self, plan: &StepPlan) -> Result<(), EngineError> {
        for state in plan.segments.iter().filter_map(|segment| segment.state) {
            if let Some(snapshot) = state.snapshot {
                self.ops
                    .copy_block(&mut self.pool, KvPlane::State, state.slot, snapshot)?;
            }
        }
        Ok(())
    }

    /// Drops the draw of a step that failed after it was queued: no caller collects the step, and
    /// the next fetch would return its tokens.
    pub(super) fn discard_draw(&mut self) {
        if !self.ops.can_draw() {
            return;
        }
        (0..self.in_flight.len()).for_each(|index| self.settle(index));
        self.drawn.clear();
        // An error of the draw is that of the device, which the caller gets already.
        let _ = self.ops.fetch_drawn(&mut self.drawn);
    }
}
