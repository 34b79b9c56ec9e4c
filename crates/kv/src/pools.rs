//! All planes of a worker's KV memory behind one allocator.
//!
//! Owns: which prefix a new holding may reuse, and the only way to a live state slot.
//! Never: gives a sequence a part of what it needs.
//! Invariant: [`KvPools::secure`] takes blocks and slot together or nothing, so no sequence waits
//! for one plane while it holds another.

use crate::hash::snapshot_hash;
use crate::pool::{BlockReservation, PlanePool, PrefixChanges};
use cleave_domain::{BlockHash, BlockRef, Capacity, KvPlane};
use std::hash::Hasher;

/// The pools of a worker's planes.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct KvPools {
    /// Blocks of tokens, free, held and cached.
    pub blocks: PlanePool,
    /// The state slots, live ones and snapshots; `None` if the model has no states.
    pub states: Option<PlanePool>,
}

/// The planes in which a reused prefix must be found.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum PrefixNeed {
    /// That of blocks: another worker runs the rest, and sends the state.
    Blocks,
    /// Every plane: the rest is run here, from the state after the prefix.
    EveryPlane,
}

/// The memory that a sequence holds after [`KvPools::secure`].
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct SecuredKv {
    /// The blocks of the reused prefix.
    pub table: Vec<BlockRef>,
    /// The other blocks that were asked for.
    pub reservation: BlockReservation,
    /// The state, where the model has states.
    pub state: Option<SecuredState>,
}

/// The state of a sequence after [`KvPools::secure`].
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct SecuredState {
    /// The slot that is the sequence's own, with undefined content.
    pub live: BlockRef,
    /// The snapshot after the reused prefix; held, `None` without a prefix.
    pub restore: Option<BlockRef>,
    /// Leading blocks whose content is known, as many as were reused or more.
    pub known_blocks: u32,
}

/// The prefix that a new holding can reuse.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
struct ReusablePrefix {
    /// Number of leading blocks.
    blocks: u32,
    /// The leading blocks that are only cached.
    cached: u32,
    /// The content of the state after them; `None` without blocks.
    snapshot: Option<BlockHash>,
    /// Leading blocks whose content is known.
    known_blocks: u32,
}

impl KvPools {
    /// Pools of free blocks and slots.
    pub fn new(capacity: &Capacity) -> Self {
        Self {
            blocks: PlanePool::new(capacity.blocks_count),
            states: capacity.states.map(|states| PlanePool::new(states.count)),
        }
    }

    /// The number of leading blocks of a sequence with these block hashes that a new holding would
    /// reuse now.
    pub fn prefix_blocks(&self, hashes: &[BlockHash], need: PrefixNeed) -> u32 {
        self.reusable(hashes, need).blocks
    }

    /// Holds the longest prefix of `hashes` that can be reused, takes a live slot where the model
    /// has states, and reserves the rest of `blocks` blocks; all or none.
    pub fn secure(
        &mut self,
        hashes: &[BlockHash],
        need: PrefixNeed,
        blocks: u32,
    ) -> Option<SecuredKv> {
        let prefix = self.reusable(hashes, need);
        if prefix.cached + blocks - prefix.blocks > self.blocks.blocks_available() {
            return None;
        }
        let state = match &mut self.states {
            None => None,
            Some(states) if states.blocks_available() == 0 => return None,
            Some(states) => {
                // The snapshot first: the live slot might be made from it.
                let hold = |hash| states.hold(hash).expect("room was counted");
                let restore = prefix.snapshot.map(hold);
                Some(SecuredState {
                    live: states.take().expect("room was counted"),
                    restore,
                    known_blocks: prefix.known_blocks,
                })
            }
        };
        let held = hashes[..prefix.blocks as usize].iter();
        let held = held.map(|hash| self.blocks.hold(*hash).expect("room was counted"));
        let table = held.collect();
        let reservation = self.blocks.reserve(blocks - prefix.blocks);
        Some(SecuredKv {
            table,
            reservation: reservation.expect("room was counted"),
            state,
        })
    }

    /// With states, a prefix can be continued here only from a snapshot after it, with a slot for
    /// the copy beside it.
    fn reusable(&self, hashes: &[BlockHash], need: PrefixNeed) -> ReusablePrefix {
        let hits = self.blocks.prefix_hits(hashes);
        let whole = ReusablePrefix {
            blocks: hits.blocks,
            cached: hits.cached,
            snapshot: None,
            known_blocks: hits.blocks,
        };
        let Some(states) = self
            .states
            .as_ref()
            .filter(|_| need == PrefixNeed::EveryPlane)
        else {
            return whole;
        };
        let none = ReusablePrefix {
            known_blocks: hits.blocks,
            ..ReusablePrefix::default()
        };
        let known = hashes[..hits.blocks as usize].iter().enumerate().rev();
        let mut snapshots = known.map(|(last, hash)| (last + 1, snapshot_hash(*hash)));
        let Some((blocks, snapshot)) = snapshots.find(|(_, hash)| states.contains(*hash)) else {
            return none;
        };
        // Holding a snapshot that is only cached takes a slot, and the live one takes another.
        let only_cached = states.prefix_hits(&[snapshot]).cached;
        if states.blocks_available() < 1 + only_cached {
            return none;
        }
        let prefix = self.blocks.prefix_hits(&hashes[..blocks]);
        ReusablePrefix {
            blocks: prefix.blocks,
            cached: prefix.cached,
            snapshot: Some(snapshot),
            known_blocks: hits.blocks,
        }
    }

    /// Changes of both indexes since the last call, as [`PlanePool::take_changes`].
    pub fn take_changes(&mut self) -> PrefixChanges {
        let mut changes = self.blocks.take_changes();
        if let Some(states) = &mut self.states {
            let PrefixChanges { stored, evicted } = states.take_changes();
            changes.stored.extend(stored);
            changes.evicted.extend(evicted);
        }
        changes
    }

    /// Whether a content can be found, of a block or of a snapshot.
    pub fn contains(&self, hash: BlockHash) -> bool {
        let states = self.states.as_ref();
        self.blocks.contains(hash) || states.is_some_and(|states| states.contains(hash))
    }

    /// The pool of a plane; `None` if the model has no states.
    pub fn plane(&self, plane: KvPlane) -> Option<&PlanePool> {
        match plane {
            KvPlane::Blocks => Some(&self.blocks),
            KvPlane::State => self.states.as_ref(),
        }
    }

    /// The pool of a plane, as [`KvPools::plane`].
    pub fn plane_mut(&mut self, plane: KvPlane) -> Option<&mut PlanePool> {
        match plane {
            KvPlane::Blocks => Some(&mut self.blocks),
            KvPlane::State => self.states.as_mut(),
        }
    }

    /// All contents that can be found, of blocks and of snapshots.
    pub fn contents(&self) -> impl Iterator<Item = BlockHash> + '_ {
        let snapshots = self.states.iter().flat_map(PlanePool::contents);
        self.blocks.contents().chain(snapshots)
    }

    /// Hashes the state that decides the behaviour, as [`PlanePool::fingerprint`].
    pub fn fingerprint(&self, hasher: &mut impl Hasher) {
        let Self { blocks, states } = self;
        blocks.fingerprint(hasher);
        if let Some(states) = states {
            states.fingerprint(hasher);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::{KvPools, PrefixNeed, SecuredKv};
    use crate::hash::snapshot_hash;
    use cleave_domain::{BlockHash, BlockRef, Capacity, StateCapacity};

    fn pools(blocks_count: u32, states: u32) -> KvPools {
        KvPools::new(&Capacity {
            block_tokens: 4,
            block_bytes: 8,
            blocks_count,
            slots_count: 2,
            step_tokens_max: 8,
            context_tokens_max: 64,
            states: (states > 0).then_some(StateCapacity {
                bytes: 20,
                count: states,
            }),
        })
    }

    fn hashes(count: u8) -> Vec<BlockHash> {
        (1..=count).map(|of| BlockHash([of; 16])).collect()
    }

    /// Caches the leading blocks, and snapshots after some of them.
    fn cached(pools: &mut KvPools, blocks: u8, snapshots: &[u8]) {
        let held: Vec<BlockRef> = (1..=blocks)
            .map(|of| {
                let held = pools.blocks.take().unwrap();
                pools.blocks.set_content(held, BlockHash([of; 16]));
                held
            })
            .collect();
        held.into_iter().for_each(|held| pools.blocks.release(held));
        let states = pools.states.as_mut().unwrap();
        for of in snapshots {
            let slot = states.take().unwrap();
            states.set_content(slot, snapshot_hash(BlockHash([*of; 16])));
            states.release(slot);
        }
    }

    fn check(pools: &KvPools, secured: &SecuredKv) {
        let table = secured.table.iter().copied();
        pools.blocks.check(table, secured.reservation.count());
        let state = secured.state.unwrap();
        let held = std::iter::once(state.live).chain(state.restore);
        pools.states.as_ref().unwrap().check(held, 0);
    }

    #[test]
    fn a_prefix_ends_at_its_longest_snapshot() {
        let mut pools = pools(8, 4);
        cached(&mut pools, 5, &[1, 3]);
        let need = PrefixNeed::EveryPlane;
        assert_eq!(pools.prefix_blocks(&hashes(5), need), 3);
        assert_eq!(pools.prefix_blocks(&hashes(2), need), 1);
        assert_eq!(pools.prefix_blocks(&hashes(5), PrefixNeed::Blocks), 5);
        let secured = pools.secure(&hashes(6), need, 7).unwrap();
        assert_eq!((secured.table.len(), secured.reservation.count()), (3, 4));
        let state = secured.state.unwrap();
        assert_eq!(state.known_blocks, 5);
        assert!(state.restore.is_some_and(|restore| restore != state.live));
        check(&pools, &secured);
    }

    #[test]
    fn a_sent_state_needs_no_snapshot() {
        let mut pools = pools(8, 2);
        cached(&mut pools, 2, &[]);
        let secured = pools.secure(&hashes(2), PrefixNeed::Blocks, 3).unwrap();
        assert_eq!(secured.table.len(), 2);
        assert_eq!(secured.state.unwrap().restore, None);
        check(&pools, &secured);
    }

    #[test]
    fn without_room_for_the_copy_a_snapshot_is_not_reused() {
        let mut pools = pools(8, 2);
        cached(&mut pools, 2, &[2]);
        let need = PrefixNeed::EveryPlane;
        let other = pools.secure(&[], need, 1).unwrap();
        assert_eq!(pools.prefix_blocks(&hashes(2), need), 0);
        // The live slot takes the place of the snapshot, which is of no use without it.
        let secured = pools.secure(&hashes(2), need, 2).unwrap();
        let state = secured.state.unwrap();
        assert_eq!((state.restore, state.known_blocks), (None, 2));
        assert_eq!(pools.secure(&hashes(2), need, 2), None, "no slot is left");
        assert_ne!(other.state.unwrap().live, secured.state.unwrap().live);
    }

    #[test]
    fn a_snapshot_in_use_is_shared() {
        let mut pools = pools(8, 3);
        cached(&mut pools, 2, &[2]);
        let need = PrefixNeed::EveryPlane;
        let first = pools.secure(&hashes(2), need, 2).unwrap();
        let second = pools.secure(&hashes(2), need, 2).unwrap();
        let restore = |secured: &SecuredKv| secured.state.unwrap().restore;
        assert_eq!(restore(&first), restore(&second));
        assert!(restore(&first).is_some());
    }

    // Invariant: I52.
    #[test]
    fn blocks_and_slot_are_taken_together_or_not_at_all() {
        for (blocks, states) in [(3, 1), (8, 0)] {
            let mut pools = pools(blocks, 2);
            cached(&mut pools, 2, &[2]);
            let held: Vec<_> = (states..2)
                .map(|_| pools.states.as_mut().unwrap().take().unwrap())
                .collect();
            let before = pools.clone();
            assert_eq!(pools.secure(&hashes(2), PrefixNeed::EveryPlane, 4), None);
            assert_eq!(pools, before, "with {held:?}");
        }
    }

    #[test]
    fn without_states_the_blocks_decide_alone() {
        let mut pools = pools(4, 0);
        let held = pools.blocks.take().unwrap();
        pools.blocks.set_content(held, hashes(1)[0]);
        pools.blocks.release(held);
        let secured = pools.secure(&hashes(2), PrefixNeed::EveryPlane, 3).unwrap();
        assert_eq!((secured.table.len(), secured.state), (1, None));
        assert_eq!(pools.secure(&[], PrefixNeed::EveryPlane, 2), None);
    }

    #[test]
    fn changes_and_contents_name_snapshots_too() {
        let mut pools = pools(4, 1);
        cached(&mut pools, 1, &[1]);
        let block = BlockHash([1; 16]);
        let expected = vec![block, snapshot_hash(block)];
        assert_eq!(pools.contents().collect::<Vec<_>>(), expected);
        assert_eq!(pools.take_changes().stored, expected);
        pools.states.as_mut().unwrap().take().unwrap();
        assert_eq!(pools.take_changes().evicted, [snapshot_hash(block)]);
    }
}
