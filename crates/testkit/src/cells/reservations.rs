//! Block reservations of a worker, rebuilt from its own reports.
//!
//! Owns: the record of which hand-off each reserved block belongs to, against which the worker is
//! checked. Never: asks the brain. Invariant: a block is in the record from `Reserved` until
//! `Landed` or `Released` of its hand-off, for one hand-off.

use super::{CellWorker, EngineOp, FrameCells};
use cleave_domain::{
    BlockIndex, BlockRef, Generation, HandoffId, KvPlane, KvUnit, Report, WorkerRef,
};
use cleave_sched::BlockExport;
use std::hash::{Hash, Hasher};

impl CellWorker {
    pub(super) fn witness(&mut self, report: &Report) -> Result<(), String> {
        match report {
            Report::Reserved {
                handoff,
                present,
                blocks,
                state,
                window,
            } => {
                for (ordinal, block) in (*present..).zip(blocks) {
                    self.reserve(*handoff, KvUnit::block(ordinal), *block);
                    self.own(*handoff, KvPlane::Blocks, *block)?;
                }
                if let Some(slot) = state {
                    for ordinal in 0..self.limits.capacity.state_pieces() {
                        let plane = KvPlane::State;
                        self.reserve(*handoff, KvUnit { plane, ordinal }, *slot);
                    }
                    self.own(*handoff, KvPlane::State, *slot)?;
                }
                let window = window.iter().flat_map(|w| (w.first..).zip(&w.blocks));
                for (ordinal, block) in window {
                    for unit in self.limits.capacity.window_units(ordinal) {
                        self.reserve(*handoff, unit, *block);
                    }
                    self.own(*handoff, KvPlane::Window, *block)?;
                }
            }
            Report::Landed { handoff } | Report::Released { handoff } => {
                self.block_owners.retain(|_, (holder, _)| holder != handoff);
                self.senders.remove(handoff);
                self.reserved_blocks
                    .retain(|(holder, _), _| holder != handoff);
            }
            _ => {}
        }
        Ok(())
    }

    fn reserve(&mut self, handoff: HandoffId, unit: KvUnit, block: BlockRef) {
        self.reserved_blocks.insert((handoff, unit), block);
    }

    fn own(&mut self, handoff: HandoffId, plane: KvPlane, block: BlockRef) -> Result<(), String> {
        let entry = (handoff, block.generation);
        match self.block_owners.insert((plane, block.block), entry) {
            None => Ok(()),
            Some((other, _)) => Err(format!(
                "{} reserves {} of the plane {plane} for {handoff}, but {other} holds it",
                self.worker, block.block
            )),
        }
    }

    /// The hand-off that a block or slot is reserved for.
    pub fn reserved_for(
        &self,
        plane: KvPlane,
        block: BlockIndex,
    ) -> Option<(HandoffId, Generation)> {
        self.block_owners.get(&(plane, block)).copied()
    }

    /// The worker that may write a hand-off's reserved blocks.
    pub fn sender_of(&self, handoff: HandoffId) -> Option<WorkerRef> {
        self.senders.get(&handoff).copied()
    }

    /// The block or slot reserved for this block or piece of a hand-off.
    pub fn reserved_at(&self, handoff: HandoffId, unit: KvUnit) -> Option<BlockRef> {
        self.reserved_blocks.get(&(handoff, unit)).copied()
    }

    /// Imports of frames that are queued and have not begun.
    pub fn imports(&self) -> usize {
        let is_import = |op: &&EngineOp| matches!(op, EngineOp::Import { .. });
        self.ops.iter().filter(is_import).count()
    }

    /// The export in progress, with the cells that it reads.
    pub fn writing(&self) -> Option<(BlockExport, FrameCells)> {
        match &self.busy {
            Some((EngineOp::Export(export), _)) => {
                let cells = self.engine.read_unit(export.unit(), export.from);
                Some((*export, cells.to_vec()))
            }
            _ => None,
        }
    }

    /// Another worker writes into this pool, one-sided, without this worker's engine.
    pub fn written_into(&mut self, export: &BlockExport, cells: &FrameCells) -> Result<(), String> {
        let BlockExport {
            handoff,
            plane,
            block,
            ..
        } = *export;
        let owner = self.block_owners.get(&(plane, block.block));
        if owner != Some(&(handoff, block.generation)) {
            return Err(format!(
                "S3: {handoff} is written into {}'s {}/{}, which is held for {owner:?}",
                self.worker, block.block, block.generation
            ));
        }
        self.engine.write_unit(export.unit(), block.block, 0, cells);
        Ok(())
    }

    /// Hashes the state of this worker without its brain.
    pub fn feed(&self, print: &mut impl Hasher) {
        self.worker.hash(print);
        (self.draining, self.exiting).hash(print);
        self.engine.hash_into(print);
        (self.busy.is_some(), self.failing_step.is_some()).hash(print);
        for op in self.busy.iter().map(|(op, _)| op).chain(&self.ops) {
            op.hash_into(print);
        }
        self.block_owners.hash(print);
        self.senders.hash(print);
        self.sealed.hash(print);
        self.swapped_blocks.hash(print);
        self.dropped_swaps.hash(print);
    }

    /// Checks that no hand-off holds anything on this worker.
    pub fn check_empty(&self) -> Result<(), String> {
        let me = self.worker;
        let pool = self.brain.pool();
        if !self.brain.idle() {
            return Err(format!("{me} is not idle"));
        }
        if pool.blocks_available() != self.limits.capacity.blocks_count {
            return Err(format!(
                "{me} leaked: {} of {} blocks are available",
                pool.blocks_available(),
                self.limits.capacity.blocks_count
            ));
        }
        let slots_held = self.brain.states().map_or(0, |states| states.blocks_held());
        if slots_held > 0 {
            return Err(format!("{me} leaked {slots_held} state slots"));
        }
        let windows_held = self.brain.windows().map_or(0, |pool| pool.blocks_held());
        if windows_held > 0 {
            return Err(format!("{me} leaked {windows_held} blocks of windows"));
        }
        if !self.block_owners.is_empty() {
            return Err(format!("{me} never released {:?}", self.block_owners));
        }
        if !self.swapped_blocks.is_empty() {
            return Err(format!(
                "{me} keeps in host memory {:?}",
                self.swapped_blocks.keys()
            ));
        }
        if !self.exporting.is_empty() {
            return Err(format!("{me} waits for exports: {:?}", self.exporting));
        }
        Ok(())
    }
}
