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

#[cfg(test)]
pub(crate) mod tests {
    use crate::{Brain, Limits, Note, Writer};
    use cleave_domain::{Capacity, Prices, Role, WorkerRef};
    use std::time::Duration;

    pub(crate) fn limits() -> Limits {
        Limits {
            me: WorkerRef::default(),
            role: Role::Both,
            capacity: Capacity {
                block_tokens: 4,
                block_bytes: 4,
                blocks_count: 8,
                slots_count: 1,
                step_tokens_max: 4,
                context_tokens_max: 8,
            },
            vocab_size: 10,
            queue_max: 1,
            lease: Duration::from_secs(1),
            stall_max: Duration::from_secs(1),
            step_max: Duration::from_secs(1),
            prefix_cache: true,
            swap_blocks: 0,
            host_blocks: 0,
            disk_blocks: 0,
            writer: Writer::Receiver,
            prices: Prices::default(),
            steps_in_flight: 1,
            speculation: None,
        }
    }

    fn leaked(brain: &Brain) -> u32 {
        match brain.audit(brain.load()) {
            Note::Pool { blocks_leaked, .. } => blocks_leaked,
            other => panic!("{other:?}"),
        }
    }

    /// "0 leaked" means something only if a block that nobody names is counted.
    #[test]
    fn a_block_that_no_sequence_names_is_leaked() {
        let mut brain = Brain::new(limits());
        assert_eq!(leaked(&brain), 0);
        for blocks in 1..=3 {
            brain.pool.take().expect("eight are free");
            assert_eq!(leaked(&brain), blocks);
        }
    }
}
