//! The use of the pool's blocks, and a count of leaked ones.
//!
//! Owns: the sums over the sequences in [`WorkerNote::Pool`]. Never: walks a table or the pool, as
//! `check` does: it runs after every fact that matters.
//! Invariant: the pool's count of held blocks equals the sum that sequences and copies hold; the
//! difference is leaked.

use crate::WorkerNote;
use crate::memory::SequenceWindow;
use crate::sequences::SequenceStage;
use crate::snapshot::LoadSnapshot;
use cleave_domain::{KvPlane, WorkerLoad};
use cleave_kv::PlanePool;

impl LoadSnapshot<'_> {
    /// The use of the pool, while the load is this one.
    pub(crate) fn audit(&self, load: WorkerLoad) -> WorkerNote {
        let (mut reserved, mut leased, mut quarantined) = (0, 0, 0);
        let offloading = |plane| u64::from(self.memory.offloading_count(plane));
        let mut slots_named = offloading(KvPlane::State);
        let mut named = offloading(KvPlane::Blocks);
        let mut windows_named = offloading(KvPlane::Window);
        for sequence in self.sequences.iter() {
            let blocks = sequence.kv.table().len() as u64;
            named += blocks;
            slots_named += sequence
                .kv
                .state()
                .map_or(0, |state| state.held().count() as u64);
            windows_named += sequence.kv.window().map_or(0, SequenceWindow::blocks_held);
            match sequence.stage() {
                SequenceStage::Reserved => reserved += blocks,
                SequenceStage::Closing { .. } if sequence.quarantined() => quarantined += blocks,
                SequenceStage::Active | SequenceStage::Sending if !sequence.decodes_here() => {
                    leased += blocks
                }
                SequenceStage::Active
                | SequenceStage::Sending
                | SequenceStage::Paused
                | SequenceStage::Closing { .. } => {}
            }
        }
        let leaked = self.memory.blocks().holders_total().abs_diff(named);
        let states = self.memory.states();
        let slots_held = states.map_or(0, PlanePool::holders_total);
        let windows = self.memory.windows();
        let windows_held = windows.map_or(0, PlanePool::holders_total);
        let count = |blocks: u64| u32::try_from(blocks).unwrap_or(u32::MAX);
        WorkerNote::Pool {
            blocks_held: self.memory.blocks().blocks_held(),
            blocks_free: load.blocks_free,
            blocks_cached: self.memory.blocks().blocks_cached(),
            sequences_running: load.sequences_running,
            sequences_waiting: load.sequences_waiting,
            blocks_reserved: count(reserved),
            blocks_leased: count(leased),
            blocks_quarantined: count(quarantined),
            blocks_leaked: count(leaked),
            blocks_swapped: count(self.sequences.blocks_swapped()),
            states_held: states.map_or(0, PlanePool::blocks_held),
            states_cached: states.map_or(0, PlanePool::blocks_cached),
            states_leaked: count(slots_held.abs_diff(slots_named)),
            windows_held: windows.map_or(0, PlanePool::blocks_held),
            windows_cached: windows.map_or(0, PlanePool::blocks_cached),
            windows_leaked: count(windows_held.abs_diff(windows_named)),
        }
    }
}

#[cfg(test)]
pub(crate) mod tests {
    use crate::{PoolWriter, WorkerBrain, WorkerLimits, WorkerNote};
    use cleave_domain::{Capacity, Prices, Role, WorkerRef};
    use std::time::Duration;

    pub(crate) fn limits() -> WorkerLimits {
        WorkerLimits {
            me: WorkerRef::default(),
            role: Role::Both,
            capacity: Capacity {
                block_tokens: 4,
                block_bytes: 4,
                blocks_count: 8,
                slots_count: 1,
                step_tokens_max: 4,
                context_tokens_max: 8,
                states: None,
                windows: None,
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
            writer: PoolWriter::Receiver,
            prices: Prices::default(),
            steps_in_flight: 1,
            speculation: None,
        }
    }

    fn leaked(brain: &WorkerBrain) -> u32 {
        match brain.machines.snapshot().audit(brain.load()) {
            WorkerNote::Pool { blocks_leaked, .. } => blocks_leaked,
            other => panic!("{other:?}"),
        }
    }

    /// A count of zero leaked blocks means something only if a block without an owner is counted.
    #[test]
    fn a_block_without_an_owner_counts_as_leaked() {
        let mut brain = WorkerBrain::new(limits());
        assert_eq!(leaked(&brain), 0);
        for blocks in 1..=3 {
            brain.machines.memory.leak_block();
            assert_eq!(leaked(&brain), blocks);
        }
    }
}
