//! The state of a sequence, where the model has layers with a state.
//!
//! Owns: the slots that one sequence holds, and what is known of their content.
//! Never: takes the live slot: [`cleave_kv::KvPools::secure`] does, together with the blocks.
//! Invariant: a sequence with blocks, held or reserved, has a live slot, and no other has one.

use cleave_domain::BlockRef;
use cleave_kv::{PlanePool, SecuredState};

#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(crate) struct SequenceState {
    /// The slot that its steps read and write.
    pub(crate) live: BlockRef,
    /// The snapshot from which its first step begins; held until that step has succeeded.
    pub(crate) restore: Option<BlockRef>,
}

impl SequenceState {
    pub(crate) fn new(secured: SecuredState) -> Self {
        let SecuredState { live, restore, .. } = secured;
        Self { live, restore }
    }

    /// The slots that it holds.
    pub(crate) fn held(&self) -> impl Iterator<Item = BlockRef> + use<> {
        std::iter::once(self.live).chain(self.restore)
    }

    /// Returns every slot to the pool.
    pub(crate) fn release(self, states: &mut PlanePool) {
        self.held().for_each(|slot| states.release(slot));
    }
}
