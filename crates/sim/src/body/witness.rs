//! Who holds what on a worker, as it says itself.
//!
//! Owns: the book of reservations kept from the worker's own words, to hold it to them.
//! Never: asks the brain. Invariant: a block is in the book from `Reserved` until `Landed` or
//! `Released` of its hand-off, under one name.

use super::{Body, Op, Payload};
use cleave_domain::{BlockIndex, BlockRef, Generation, HandoffId, Report, WorkerRef};
use cleave_sched::Export;
use std::hash::{Hash, Hasher};

impl Body {
    pub(crate) fn witness(&mut self, report: &Report) -> Result<(), String> {
        match report {
            Report::Reserved {
                handoff,
                present,
                blocks,
            } if !self.joint.contains(handoff) => {
                for (ordinal, block) in (*present..).zip(blocks) {
                    self.places.insert((*handoff, ordinal), *block);
                    let entry = (*handoff, block.generation);
                    if let Some((other, _)) = self.reserved.insert(block.block, entry) {
                        return Err(format!(
                            "{} gives {} to {handoff}, and {other} has it",
                            self.me, block.block
                        ));
                    }
                }
            }
            Report::Landed { handoff } | Report::Released { handoff } => {
                self.reserved.retain(|_, (holder, _)| holder != handoff);
                self.senders.remove(handoff);
                self.places.retain(|(holder, _), _| holder != handoff);
            }
            _ => {}
        }
        Ok(())
    }

    /// For whom a block waits to be filled.
    pub(crate) fn reserved_for(&self, block: BlockIndex) -> Option<(HandoffId, Generation)> {
        self.reserved.get(&block).copied()
    }

    /// Who was to write what was reserved for a hand-off.
    pub(crate) fn sender_of(&self, handoff: HandoffId) -> Option<WorkerRef> {
        self.senders.get(&handoff).copied()
    }

    /// The block reserved for one of a sequence's blocks.
    pub(crate) fn reserved_at(&self, handoff: HandoffId, ordinal: u32) -> Option<BlockRef> {
        self.places.get(&(handoff, ordinal)).copied()
    }

    /// Writes of frames asked for and not begun.
    pub(crate) fn imports(&self) -> usize {
        let is_import = |op: &&Op| matches!(op, Op::Import { .. });
        self.ops.iter().filter(is_import).count()
    }

    /// The read under way, and what it read.
    pub(crate) fn writing(&self) -> Option<(Export, Payload)> {
        match &self.busy {
            Some((Op::Export(export), _)) => {
                Some((*export, self.engine.read(export.from).to_vec()))
            }
            _ => None,
        }
    }

    /// Another worker writes into the pool, past this one.
    pub(crate) fn written_into(
        &mut self,
        handoff: HandoffId,
        block: BlockRef,
        cells: &Payload,
    ) -> Result<(), String> {
        let owner = self.reserved.get(&block.block);
        if owner != Some(&(handoff, block.generation)) {
            return Err(format!(
                "S3: {handoff} is written into {}'s {}/{}, which is held for {owner:?}",
                self.me, block.block, block.generation
            ));
        }
        self.engine.write(block.block, 0, cells);
        Ok(())
    }

    /// The engine's draws are its own from now on.
    pub(crate) fn give_voice(&mut self, voice: u64) {
        self.engine.voice = voice;
    }

    /// Feeds all that tells this body, its brain aside, from another.
    pub(crate) fn feed(&self, print: &mut impl Hasher) {
        self.me.hash(print);
        (self.draining, self.exiting).hash(print);
        self.engine.feed(print);
        (self.busy.is_some(), self.doomed.is_some()).hash(print);
        for op in self.busy.iter().map(|(op, _)| op).chain(&self.ops) {
            op.feed(print);
        }
        self.reserved.hash(print);
        self.senders.hash(print);
        self.sealed.hash(print);
        self.host.hash(print);
        self.unwanted.hash(print);
    }

    /// Nothing of any hand-off is left here.
    pub(crate) fn check_empty(&self) -> Result<(), String> {
        let me = self.me;
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
        if !self.reserved.is_empty() {
            return Err(format!("{me} never released {:?}", self.reserved));
        }
        if !self.host.is_empty() {
            return Err(format!("{me} keeps in host memory {:?}", self.host.keys()));
        }
        if !self.exporting.is_empty() {
            return Err(format!("{me} waits for exports: {:?}", self.exporting));
        }
        Ok(())
    }
}
