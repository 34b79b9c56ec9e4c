//! All planes of a worker's KV memory behind one allocator.
//!
//! Owns: which prefix a new holding may reuse, and the only way to a live state slot.
//! Never: gives a sequence a part of what it needs.
//! Invariant: [`KvPools::secure`] takes blocks, window and slot together or nothing, so no sequence
//! waits for one plane while it holds another.

use crate::hash::{snapshot_hash, window_hash};
use crate::pool::{BlockReservation, HolderCharge, PlanePool, PrefixChanges};
use cleave_domain::{BlockHash, BlockRef, Capacity, KvPlane, KvWindow};
use std::collections::VecDeque;
use std::hash::Hasher;

/// The pools of a worker's planes.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct KvPools {
    /// Blocks of tokens, free, held and cached.
    pub blocks: PlanePool,
    /// The state slots, live ones and snapshots; `None` if the model has no states.
    pub states: Option<PlanePool>,
    /// The blocks of the window plane; `None` if the model has none. Holders pay for shared ones.
    pub windows: Option<PlanePool>,
    /// The window that they serve, where there are any.
    window: Option<KvWindow>,
}

/// The blocks of the window plane that a sequence needs.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct WindowNeed {
    /// The position of the first token that is run with them; `None` for the one after the reused
    /// prefix.
    pub position: Option<u32>,
    /// The most tokens that are run at once.
    pub tokens: u32,
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
    /// The window, where the model has such a plane.
    pub window: Option<SecuredWindow>,
}

/// The window of a sequence after [`KvPools::secure`].
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct SecuredWindow {
    /// The ordinal of the first block that the sequence needs.
    pub first: u32,
    /// The blocks of the reused prefix, from the first needed one on.
    pub table: VecDeque<BlockRef>,
    /// The other blocks: with them, enough for each of its steps if it gives up those behind the
    /// window after each.
    pub reservation: BlockReservation,
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
            blocks: PlanePool::new(capacity.blocks_count, HolderCharge::Nothing),
            states: capacity
                .states
                .map(|states| PlanePool::new(states.count, HolderCharge::Nothing)),
            windows: capacity
                .windows
                .map(|windows| PlanePool::new(windows.count, HolderCharge::OneBlock)),
            window: capacity.window(),
        }
    }

    /// The number of leading blocks of a sequence with these block hashes that a new holding would
    /// reuse now.
    pub fn prefix_blocks(&self, hashes: &[BlockHash], need: PrefixNeed) -> u32 {
        self.reusable(hashes, need).blocks
    }

    /// Holds the longest prefix of `hashes` that can be reused, with the window before its end,
    /// takes a live slot where the model has states, and reserves the rest of `blocks` blocks, and
    /// of the window; all or none.
    pub fn secure(
        &mut self,
        hashes: &[BlockHash],
        need: PrefixNeed,
        blocks: u32,
        of_window: WindowNeed,
    ) -> Option<SecuredKv> {
        let prefix = self.reusable(hashes, need);
        if prefix.cached + blocks - prefix.blocks > self.blocks.blocks_available() {
            return None;
        }
        let window = match self.window {
            None => None,
            Some(window) => {
                let room = WindowRoom::new(window, of_window, prefix.blocks, blocks);
                Some(room.filter_available(self.windows.as_ref())?)
            }
        };
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
            window: window.map(|room| self.take_window(hashes, room)),
        })
    }

    /// Holds the blocks of a reused prefix's window, and reserves the others. Room was counted.
    fn take_window(&mut self, hashes: &[BlockHash], room: WindowRoom) -> SecuredWindow {
        let WindowRoom { first, held, count } = room;
        let pool = self.windows.as_mut().expect("a window has a pool");
        let prefix = hashes.iter().skip(first as usize).take(held as usize);
        let hold = |hash: &BlockHash| pool.hold(window_hash(*hash)).expect("room was counted");
        let table = prefix.map(hold).collect();
        let reservation = pool.reserve(count - held);
        SecuredWindow {
            first,
            table,
            reservation: reservation.expect("room was counted"),
        }
    }

    /// For each number of leading blocks of `hashes`, from none on, whether the pool has the window
    /// before their end.
    fn known_windows(&self, hashes: &[BlockHash]) -> Vec<bool> {
        let (Some(window), Some(pool)) = (self.window, &self.windows) else {
            return vec![true; hashes.len() + 1];
        };
        let mut known = vec![true];
        let mut run = 0;
        for (blocks, hash) in (1..).zip(hashes) {
            run = if pool.contains(window_hash(*hash)) {
                run + 1
            } else {
                0
            };
            let first = window.first_block(blocks * window.block_tokens);
            known.push(run >= blocks - first);
        }
        known
    }

    /// A prefix can be continued here only if the pool has the window before its end, and with
    /// states only from a snapshot after it, with a slot for the copy beside it.
    fn reusable(&self, hashes: &[BlockHash], need: PrefixNeed) -> ReusablePrefix {
        let hits = self.blocks.prefix_hits(hashes);
        let whole = ReusablePrefix {
            blocks: hits.blocks,
            cached: hits.cached,
            snapshot: None,
            known_blocks: hits.blocks,
        };
        let one_plane = self.states.is_none() && self.windows.is_none();
        if one_plane || need == PrefixNeed::Blocks {
            return whole;
        }
        let none = ReusablePrefix {
            known_blocks: hits.blocks,
            ..ReusablePrefix::default()
        };
        let hashes = &hashes[..hits.blocks as usize];
        let windows = self.known_windows(hashes);
        let snapshot = |blocks: usize| snapshot_hash(hashes[blocks - 1]);
        let has_state = |blocks: usize| {
            let states = self.states.as_ref();
            states.is_none_or(|states| states.contains(snapshot(blocks)))
        };
        let mut ends = (1..=hashes.len()).rev();
        let Some(blocks) = ends.find(|blocks| windows[*blocks] && has_state(*blocks)) else {
            return none;
        };
        let snapshot = self.states.as_ref().map(|_| snapshot(blocks));
        if let (Some(states), Some(snapshot)) = (&self.states, snapshot) {
            // Holding a snapshot that is only cached takes a slot, and the live one takes another.
            let only_cached = states.prefix_hits(&[snapshot]).cached;
            if states.blocks_available() < 1 + only_cached {
                return none;
            }
        }
        let prefix = self.blocks.prefix_hits(&hashes[..blocks]);
        ReusablePrefix {
            blocks: prefix.blocks,
            cached: prefix.cached,
            snapshot,
            known_blocks: hits.blocks,
        }
    }

    /// Changes of all indexes since the last call, as [`PlanePool::take_changes`].
    pub fn take_changes(&mut self) -> PrefixChanges {
        let mut changes = self.blocks.take_changes();
        for pool in self.states.iter_mut().chain(&mut self.windows) {
            let PrefixChanges { stored, evicted } = pool.take_changes();
            changes.stored.extend(stored);
            changes.evicted.extend(evicted);
        }
        changes
    }

    /// Whether a content of any plane can be found.
    pub fn contains(&self, hash: BlockHash) -> bool {
        let mut others = self.states.iter().chain(&self.windows);
        self.blocks.contains(hash) || others.any(|pool| pool.contains(hash))
    }

    /// The window of the layers in the window plane, if there is one.
    pub fn window(&self) -> Option<KvWindow> {
        self.window
    }

    /// The pool of a plane; `None` if the model has no such plane.
    pub fn plane(&self, plane: KvPlane) -> Option<&PlanePool> {
        match plane {
            KvPlane::Blocks => Some(&self.blocks),
            KvPlane::State => self.states.as_ref(),
            KvPlane::Window => self.windows.as_ref(),
        }
    }

    /// The pool of a plane, as [`KvPools::plane`].
    pub fn plane_mut(&mut self, plane: KvPlane) -> Option<&mut PlanePool> {
        match plane {
            KvPlane::Blocks => Some(&mut self.blocks),
            KvPlane::State => self.states.as_mut(),
            KvPlane::Window => self.windows.as_mut(),
        }
    }

    /// All contents that can be found, of every plane.
    pub fn contents(&self) -> impl Iterator<Item = BlockHash> + '_ {
        let others = self.states.iter().chain(&self.windows);
        self.blocks
            .contents()
            .chain(others.flat_map(PlanePool::contents))
    }

    /// Hashes the state that decides the behaviour, as [`PlanePool::fingerprint`].
    pub fn fingerprint(&self, hasher: &mut impl Hasher) {
        let Self {
            blocks,
            states,
            windows,
            window: _,
        } = self;
        blocks.fingerprint(hasher);
        for pool in states.iter().chain(windows) {
            pool.fingerprint(hasher);
        }
    }
}

/// The blocks of the window plane that a new holding takes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct WindowRoom {
    /// The ordinal of the first.
    first: u32,
    /// Blocks of the reused prefix.
    held: u32,
    /// Blocks held and reserved.
    count: u32,
}

impl WindowRoom {
    /// For a sequence of `blocks` blocks that reuses the first `prefix`.
    fn new(window: KvWindow, need: WindowNeed, prefix: u32, blocks: u32) -> Self {
        let begins = need.position.unwrap_or(prefix * window.block_tokens);
        let first = window.first_block(begins).min(blocks);
        let held = match need.position {
            Some(_) => 0,
            None => prefix - first,
        };
        let most = window.blocks_max(need.tokens).max(held);
        Self {
            first,
            held,
            count: most.min(blocks - first),
        }
    }

    /// Itself if the pool has room for it.
    fn filter_available(self, pool: Option<&PlanePool>) -> Option<Self> {
        let available = pool.map_or(0, PlanePool::blocks_available);
        (self.count <= available).then_some(self)
    }
}

#[cfg(test)]
mod tests {
    use super::{KvPools, PrefixNeed, SecuredKv, WindowNeed};
    use crate::hash::{snapshot_hash, window_hash};
    use cleave_domain::{BlockHash, BlockRef, Capacity, StateCapacity, WindowCapacity};

    /// A prompt that runs here, up to eight tokens at once.
    const RUN: WindowNeed = WindowNeed {
        position: None,
        tokens: 8,
    };

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
            windows: None,
        })
    }

    /// Blocks of four tokens, and windows of ten.
    fn windowed(blocks_count: u32, windows: u32) -> KvPools {
        KvPools::new(&Capacity {
            block_tokens: 4,
            block_bytes: 8,
            blocks_count,
            slots_count: 2,
            step_tokens_max: 8,
            context_tokens_max: 64,
            states: None,
            windows: Some(WindowCapacity {
                tokens: 10,
                bytes: 12,
                count: windows,
            }),
        })
    }

    /// Caches the leading blocks, and the windows' blocks with these ordinals.
    fn cached_windows(pools: &mut KvPools, blocks: u8, ordinals: &[u8]) {
        let mut cache = |of: u8, is_window: bool| {
            let hash = BlockHash([of; 16]);
            let (pool, content) = if is_window {
                (pools.windows.as_mut().unwrap(), window_hash(hash))
            } else {
                (&mut pools.blocks, hash)
            };
            let held = pool.take().unwrap();
            pool.set_content(held, content);
            pool.release(held);
        };
        (1..=blocks).for_each(|of| cache(of, false));
        ordinals.iter().for_each(|ordinal| cache(ordinal + 1, true));
    }

    // Invariant: I58.
    #[test]
    fn a_prefix_ends_where_its_whole_window_is_known() {
        // The token at 4 n reads ten positions, itself included: three blocks before it, or those
        // that exist.
        let every = PrefixNeed::EveryPlane;
        for (ordinals, expected) in [
            (&[0_u8, 1, 2, 3, 4, 5][..], 6),
            (&[3, 4, 5], 6),
            (&[2, 3, 4], 5),
            (&[4, 5], 0),
            (&[0, 3, 4], 1),
            (&[0, 1, 3, 4], 2),
            (&[], 0),
        ] {
            let mut pools = windowed(20, 20);
            cached_windows(&mut pools, 6, ordinals);
            assert_eq!(
                pools.prefix_blocks(&hashes(6), every),
                expected,
                "{ordinals:?}"
            );
            assert_eq!(pools.prefix_blocks(&hashes(6), PrefixNeed::Blocks), 6);
        }
    }

    // Invariant: I57.
    #[test]
    fn a_window_is_held_with_its_prefix_and_a_chunk_reserved() {
        let mut pools = windowed(20, 12);
        cached_windows(&mut pools, 6, &[2, 3, 4]);
        let secured = pools
            .secure(&hashes(6), PrefixNeed::EveryPlane, 8, RUN)
            .unwrap();
        let window = secured.window.unwrap();
        assert_eq!(secured.table.len(), 5);
        assert_eq!((window.first, window.table.len()), (2, 3));
        // Seventeen positions touch up to five blocks.
        assert_eq!(window.reservation.count(), 2);
        let pool = pools.windows.as_ref().unwrap();
        pool.check(window.table.iter().copied(), 2);
        // A second holder pays for the shared blocks; a third does not find room.
        let second = pools
            .secure(&hashes(6), PrefixNeed::EveryPlane, 6, RUN)
            .unwrap();
        let second = second.window.unwrap();
        assert_eq!(second.table, window.table);
        assert_eq!(second.reservation.count(), 1, "the sequence ends with it");
        let pool = pools.windows.as_ref().unwrap();
        assert_eq!(pool.blocks_available(), 12 - 5 - 4);
        let before = pools.clone();
        assert_eq!(
            pools.secure(&hashes(6), PrefixNeed::EveryPlane, 7, RUN),
            None
        );
        assert_eq!(pools, before);
    }

    #[test]
    fn a_window_that_is_sent_begins_at_its_position() {
        let mut pools = windowed(20, 12);
        cached_windows(&mut pools, 6, &[0, 1, 2, 3, 4, 5]);
        let need = WindowNeed {
            position: Some(22),
            tokens: 6,
        };
        let secured = pools
            .secure(&hashes(5), PrefixNeed::Blocks, 7, need)
            .unwrap();
        let window = secured.window.unwrap();
        assert_eq!((secured.table.len(), window.table.len()), (5, 0));
        // Positions 13 to 27.
        assert_eq!((window.first, window.reservation.count()), (3, 4));
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
        let secured = pools.secure(&hashes(6), need, 7, RUN).unwrap();
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
        let secured = pools
            .secure(&hashes(2), PrefixNeed::Blocks, 3, RUN)
            .unwrap();
        assert_eq!(secured.table.len(), 2);
        assert_eq!(secured.state.unwrap().restore, None);
        check(&pools, &secured);
    }

    #[test]
    fn without_room_for_the_copy_a_snapshot_is_not_reused() {
        let mut pools = pools(8, 2);
        cached(&mut pools, 2, &[2]);
        let need = PrefixNeed::EveryPlane;
        let other = pools.secure(&[], need, 1, RUN).unwrap();
        assert_eq!(pools.prefix_blocks(&hashes(2), need), 0);
        // The live slot takes the place of the snapshot, which is of no use without it.
        let secured = pools.secure(&hashes(2), need, 2, RUN).unwrap();
        let state = secured.state.unwrap();
        assert_eq!((state.restore, state.known_blocks), (None, 2));
        assert_eq!(
            pools.secure(&hashes(2), need, 2, RUN),
            None,
            "no slot is left"
        );
        assert_ne!(other.state.unwrap().live, secured.state.unwrap().live);
    }

    #[test]
    fn a_snapshot_in_use_is_shared() {
        let mut pools = pools(8, 3);
        cached(&mut pools, 2, &[2]);
        let need = PrefixNeed::EveryPlane;
        let first = pools.secure(&hashes(2), need, 2, RUN).unwrap();
        let second = pools.secure(&hashes(2), need, 2, RUN).unwrap();
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
            assert_eq!(
                pools.secure(&hashes(2), PrefixNeed::EveryPlane, 4, RUN),
                None
            );
            assert_eq!(pools, before, "with {held:?}");
        }
    }

    #[test]
    fn without_states_the_blocks_decide_alone() {
        let mut pools = pools(4, 0);
        let held = pools.blocks.take().unwrap();
        pools.blocks.set_content(held, hashes(1)[0]);
        pools.blocks.release(held);
        let secured = pools
            .secure(&hashes(2), PrefixNeed::EveryPlane, 3, RUN)
            .unwrap();
        assert_eq!((secured.table.len(), secured.state), (1, None));
        assert_eq!(pools.secure(&[], PrefixNeed::EveryPlane, 2, RUN), None);
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
