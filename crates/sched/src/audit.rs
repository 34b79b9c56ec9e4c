//! What the pool's blocks are for, and whether any is nobody's.
//!
//! Owns: the sums over the sequences that [`Note::Pool`] tells. Never: walks a table or the pool, as
//! `check` does: it runs after every fact that matters.
//! Invariant: what the pool says is held is what the sequences say they hold, and what is copied out of
//! it; the difference is leaked.

use crate::sequence::Stage;
use crate::{Brain, Note};
use cleave_domain::Load;

impl Brain {
    pub(crate) fn audit(&self, load: Load) -> Note {
        let (mut reserved, mut leased, mut quarantined) = (0, 0, 0);
        let mut named = self.tiers.leaving().len() as u64;
        for sequence in self.sequences.values() {
            let blocks = sequence.table.len() as u64;
            named += blocks;
            match sequence.stage {
                Stage::Reserved => reserved += blocks,
                Stage::Closing { .. } if sequence.quarantined() => quarantined += blocks,
                Stage::Active | Stage::Sending if !sequence.decodes_here() => leased += blocks,
                Stage::Active | Stage::Sending | Stage::Still | Stage::Closing { .. } => {}
            }
        }
        let leaked = self.pool.holdings().abs_diff(named);
        let count = |blocks: u64| u32::try_from(blocks).unwrap_or(u32::MAX);
        Note::Pool {
            blocks_held: self.pool.blocks_held(),
            blocks_free: load.blocks_free,
            blocks_cached: self.pool.blocks_cached(),
            sequences_running: load.sequences_running,
            sequences_waiting: load.sequences_waiting,
            blocks_reserved: count(reserved),
            blocks_leased: count(leased),
            blocks_quarantined: count(quarantined),
            blocks_leaked: count(leaked),
            blocks_swapped: count(self.blocks_swapped()),
        }
    }
}
