//! The blocks that a worker swaps to host memory.
//!
//! Owns: swapping blocks out and in, and their content meanwhile. Never: keeps more blocks than the
//! world gives it. Invariant: every copy that the brain asks for is answered once.

use super::{AnswerTime, CellWorker, EngineOp, OpFault};
use cleave_domain::{BlockIndex, HandoffId, KvUnit};
use cleave_sched::{SwapOutcome, WorkerInput};
use std::time::Duration;

impl CellWorker {
    pub(super) fn swap(&mut self, op: EngineOp) -> Result<(), String> {
        if let EngineOp::SwapOut { units, .. } | EngineOp::SwapIn { units, .. } = &op {
            let copied = units.iter().map(|(unit, block)| (unit.plane, *block));
            self.check_no_step_writes(copied)?;
        }
        self.ops.push_back(op);
        Ok(())
    }

    /// Drops a hand-off's content in host memory and its queued swaps; gives the answers that the
    /// brain is owed.
    pub(super) fn drop_swapped(&mut self, handoff: HandoffId) -> Vec<WorkerInput> {
        let is_copy_out =
            |op: &EngineOp| matches!(op, EngineOp::SwapOut { handoff: h, .. } if *h == handoff);
        if self.answers == AnswerTime::AtItsEnd {
            self.swapped_blocks.remove(&handoff);
            if self.ops.iter().any(is_copy_out) {
                self.dropped_swaps.insert(handoff);
            }
            return Vec::new();
        }
        let dropped = |op: &EngineOp| match op {
            EngineOp::SwapOut { handoff: h, .. } if *h == handoff => {
                Some(WorkerInput::SwappedOut {
                    handoff,
                    outcome: SwapOutcome::Dropped,
                    took: Duration::ZERO,
                })
            }
            EngineOp::SwapIn { handoff: h, .. } if *h == handoff => Some(WorkerInput::SwappedIn {
                handoff,
                outcome: SwapOutcome::Dropped,
                took: Duration::ZERO,
            }),
            _ => None,
        };
        let answers = self.ops.iter().filter_map(dropped).collect();
        self.ops.retain(|op| dropped(op).is_none());
        self.swapped_blocks.remove(&handoff);
        if self.busy.as_ref().is_some_and(|(op, _)| is_copy_out(op)) {
            self.dropped_swaps.insert(handoff);
        }
        answers
    }

    pub(super) fn swap_out(
        &mut self,
        handoff: HandoffId,
        units: &[(KvUnit, BlockIndex)],
        fault: Option<&OpFault>,
    ) -> SwapOutcome {
        if self.dropped_swaps.remove(&handoff) {
            return SwapOutcome::Dropped;
        }
        let swapped: usize = self.swapped_blocks.values().map(Vec::len).sum();
        if fault.is_some() || swapped + units.len() > self.limits.swap_blocks as usize {
            return SwapOutcome::Broken;
        }
        let read =
            |(unit, block): &(KvUnit, BlockIndex)| self.engine.read_unit(*unit, *block).to_vec();
        let content = units.iter().map(read).collect();
        self.swapped_blocks.insert(handoff, content);
        SwapOutcome::Copied
    }

    pub(super) fn swap_in(
        &mut self,
        handoff: HandoffId,
        units: &[(KvUnit, BlockIndex)],
        fault: Option<&OpFault>,
    ) -> Result<SwapOutcome, String> {
        let Some(content) = self.swapped_blocks.remove(&handoff) else {
            // The brain dropped the content while the copy was in progress.
            return Ok(SwapOutcome::Dropped);
        };
        if fault.is_some() {
            return Ok(SwapOutcome::Broken);
        }
        if content.len() != units.len() {
            return Err(format!(
                "{} swaps {} blocks of {handoff} into {}",
                self.worker,
                content.len(),
                units.len()
            ));
        }
        for ((unit, block), cells) in units.iter().zip(content) {
            self.engine.write_unit(*unit, *block, 0, &cells);
        }
        Ok(SwapOutcome::Copied)
    }
}
