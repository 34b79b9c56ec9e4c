//! What a worker keeps in host memory.
//!
//! Owns: copying blocks out and back, and what is kept meanwhile. Never: keeps more blocks than the
//! world gives it. Invariant: every copy asked for is answered once.

use super::{Body, Luck, Op};
use cleave_domain::{BlockIndex, HandoffId};
use cleave_sched::{Input, SwapOutcome};
use std::time::Duration;

impl Body {
    pub(crate) fn swap(&mut self, op: Op) -> Result<(), String> {
        if let Op::SwapOut { blocks, .. } | Op::SwapIn { blocks, .. } = &op {
            self.check_copied(blocks.iter().copied())?;
        }
        self.ops.push_back(op);
        Ok(())
    }

    /// Drops what host memory has of a hand-off, and what was to go there; gives the answers the
    /// brain is owed.
    pub(crate) fn swap_drop(&mut self, handoff: HandoffId) -> Vec<Input> {
        let dropped = |op: &Op| match op {
            Op::SwapOut { handoff: h, .. } if *h == handoff => Some(Input::SwappedOut {
                handoff,
                outcome: SwapOutcome::Dropped,
                took: Duration::ZERO,
            }),
            Op::SwapIn { handoff: h, .. } if *h == handoff => Some(Input::SwappedIn {
                handoff,
                outcome: SwapOutcome::Dropped,
                took: Duration::ZERO,
            }),
            _ => None,
        };
        let answers = self.ops.iter().filter_map(dropped).collect();
        self.ops.retain(|op| dropped(op).is_none());
        self.host.remove(&handoff);
        if matches!(&self.busy, Some((Op::SwapOut { handoff: h, .. }, _)) if *h == handoff) {
            self.unwanted.insert(handoff);
        }
        answers
    }

    pub(super) fn swap_out(
        &mut self,
        handoff: HandoffId,
        blocks: &[BlockIndex],
        luck: Luck,
    ) -> SwapOutcome {
        if self.unwanted.remove(&handoff) {
            return SwapOutcome::Dropped;
        }
        let kept: usize = self.host.values().map(Vec::len).sum();
        if luck == Luck::Broken || kept + blocks.len() > self.limits.swap_blocks as usize {
            return SwapOutcome::Broken;
        }
        let read = |block: &BlockIndex| self.engine.read(*block).to_vec();
        let content = blocks.iter().map(read).collect();
        self.host.insert(handoff, content);
        SwapOutcome::Copied
    }

    pub(super) fn swap_in(
        &mut self,
        handoff: HandoffId,
        blocks: &[BlockIndex],
        luck: Luck,
    ) -> Result<SwapOutcome, String> {
        let Some(content) = self.host.remove(&handoff) else {
            // It was dropped while the copy was under way.
            return Ok(SwapOutcome::Dropped);
        };
        if luck == Luck::Broken {
            return Ok(SwapOutcome::Broken);
        }
        if content.len() != blocks.len() {
            return Err(format!(
                "{} swaps {} blocks of {handoff} into {}",
                self.me,
                content.len(),
                blocks.len()
            ));
        }
        for (block, cells) in blocks.iter().zip(content) {
            self.engine.write(*block, 0, &cells);
        }
        Ok(SwapOutcome::Copied)
    }
}
