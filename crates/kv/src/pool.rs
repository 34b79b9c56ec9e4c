//! One plane of a worker's KV memory: the holders, generation and content of each block or slot.
//!
//! Owns: the state of every block (free, held by a number of sequences, cached for reuse), the
//! number of blocks reserved for sequences that will grow, and the index from content to block.
//! Never: knows a sequence; holders are counted, and the brain that owns them proves the count.
//! Invariant: every block is in exactly one state, `promised <= free + cached`, and the index names
//! exactly the blocks that carry a content. [`PlanePool::check`] proves it.

use cleave_domain::{BlockHash, BlockIndex, BlockRef, Generation};
use std::collections::BTreeMap;
use std::hash::{Hash, Hasher};

/// The records of one plane. A slot of the state plane is a block here: one that a sequence holds
/// is its state, and a cached one is a snapshot.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub struct PlanePool {
    blocks: Vec<PoolBlock>,
    /// Free blocks; the block freed last is taken first, so that late writers are detected early.
    free: Vec<BlockIndex>,
    /// Cached blocks in eviction order, the least recently used first.
    cached: BTreeMap<u64, BlockIndex>,
    /// Cached blocks touched no later than this were already given by [`PlanePool::next_to_evict`];
    /// the next field counts them.
    inspected_until: u64,
    inspected_count: u32,
    /// The block of each content.
    index: BTreeMap<BlockHash, BlockIndex>,
    /// Blocks reserved for growth, out of the free and cached blocks.
    reserved: u32,
    /// The price of holding a block that others hold.
    charge: HolderCharge,
    /// Blocks that further holders have paid with, out of the free and cached blocks.
    charged: u32,
    /// Holders of all blocks: a block counts once for each holder.
    holders_total: u64,
    /// Counts touches; orders `cached`.
    clock: u64,
    /// Changes of the index since the last call of [`PlanePool::changes`].
    changes: BTreeMap<BlockHash, PrefixChange>,
}

/// The price of holding a block that others hold.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum HolderCharge {
    /// Nothing: all holders keep it until they end, and need no block in its place.
    Nothing,
    /// A block: each holder gives it up at another time, and then needs one of its own.
    OneBlock,
}

#[derive(Clone, Debug, PartialEq, Eq, Hash)]
struct PoolBlock {
    generation: Generation,
    state: BlockState,
}

/// Every state of a block.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
enum BlockState {
    /// Held by no sequence; its content is undefined.
    Free,
    /// Held by `holders` sequences, at least one. `content` is set once the block is full and
    /// computed, on the one block by which that content is found.
    Held {
        holders: u32,
        content: Option<BlockHash>,
    },
    /// Held by no sequence; kept for its content until the room is needed.
    Cached { content: BlockHash, touched: u64 },
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
enum PrefixChange {
    Stored,
    Evicted,
}

/// Blocks reserved for the growth of one sequence. Return it with
/// [`PlanePool::release_all_reserved`]. It is cloned only with the whole simulated state.
#[derive(Clone, Debug, Default, PartialEq, Eq, Hash)]
pub struct BlockReservation(u32);

impl BlockReservation {
    /// The number of blocks still reserved.
    pub fn count(&self) -> u32 {
        self.0
    }
}

/// A cached block that is pinned while it is read; returned with [`PlanePool::unpin`].
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct ReadPin {
    pub held: BlockRef,
    /// Its place in eviction order, to which it returns.
    pub touched: u64,
}

/// The prefix of a sequence that a pool contains.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct PrefixHits {
    /// The number of leading blocks in the pool.
    pub blocks: u32,
    /// The number of those that are only cached: holding them takes room.
    pub cached: u32,
}

/// Changes of the prefix index.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct PrefixChanges {
    /// Contents that can be found now.
    pub stored: Vec<BlockHash>,
    /// Contents that can no longer be found.
    pub evicted: Vec<BlockHash>,
}

impl PlanePool {
    /// Creates a pool of free blocks, all of generation 0.
    pub fn new(blocks_count: u32, charge: HolderCharge) -> Self {
        let block = PoolBlock {
            generation: Generation(0),
            state: BlockState::Free,
        };
        Self {
            blocks: vec![block; blocks_count as usize],
            free: (0..blocks_count).rev().map(BlockIndex).collect(),
            cached: BTreeMap::new(),
            inspected_until: 0,
            inspected_count: 0,
            index: BTreeMap::new(),
            reserved: 0,
            charge,
            charged: 0,
            holders_total: 0,
            clock: 0,
            changes: BTreeMap::new(),
        }
    }

    /// The number of all blocks.
    pub fn blocks_count(&self) -> u32 {
        count(self.blocks.len())
    }

    /// The number of blocks that can be taken or reserved: free or only cached, and neither
    /// reserved nor paid for a shared one.
    pub fn blocks_available(&self) -> u32 {
        count(self.free.len() + self.cached.len()) - self.reserved - self.charged
    }

    /// The number of blocks held by sequences.
    pub fn blocks_held(&self) -> u32 {
        count(self.blocks.len() - self.free.len() - self.cached.len())
    }

    /// The number of holders of all blocks: a block counts once for each holder.
    pub fn holders_total(&self) -> u64 {
        self.holders_total
    }

    /// The number of blocks kept only for their content.
    pub fn blocks_cached(&self) -> u32 {
        count(self.cached.len())
    }

    /// The number of blocks reserved and not yet taken.
    pub fn blocks_reserved(&self) -> u32 {
        self.reserved
    }

    /// The number of free blocks; some of them may be reserved.
    pub fn blocks_free(&self) -> u32 {
        count(self.free.len())
    }

    /// Whether a content can be found here.
    pub fn contains(&self, hash: BlockHash) -> bool {
        self.index.contains_key(&hash)
    }

    /// Of the `depth` cached blocks that would be evicted first, those not marked by
    /// [`PlanePool::mark_inspected`], the oldest first: the time of the last touch, and the
    /// content.
    pub fn next_to_evict(&self, depth: u32) -> impl Iterator<Item = (u64, BlockHash)> + '_ {
        let rest = depth.saturating_sub(self.inspected_count) as usize;
        let cached = self
            .cached
            .range(self.inspected_until.saturating_add(1)..)
            .take(rest);
        cached.map(|(touched, block)| (*touched, self.content(*block)))
    }

    /// Marks the cached blocks touched up to then: [`PlanePool::next_to_evict`] gives only later
    /// ones from now on.
    pub fn mark_inspected(&mut self, touched: u64) {
        let looked = self.inspected_until.saturating_add(1)..=touched;
        self.inspected_count += count(self.cached.range(looked).count());
        self.inspected_until = touched;
    }

    /// The number of cached blocks touched before then.
    pub fn count_older(&self, touched: u64) -> usize {
        self.cached.range(..touched).count()
    }

    /// Reserves `blocks` blocks, all or none.
    pub fn reserve(&mut self, blocks: u32) -> Option<BlockReservation> {
        if blocks > self.blocks_available() {
            return None;
        }
        self.reserved += blocks;
        Some(BlockReservation(blocks))
    }

    /// Releases a reservation completely.
    pub fn release_all_reserved(&mut self, reservation: &mut BlockReservation) {
        let BlockReservation(blocks) = std::mem::take(reservation);
        assert!(
            blocks <= self.reserved,
            "more blocks released than reserved: {blocks} of {}",
            self.reserved
        );
        self.reserved -= blocks;
    }

    /// Releases one reserved block; `false` if none was left.
    pub fn release_reservation(&mut self, reservation: &mut BlockReservation) -> bool {
        let some = reservation.0 > 0;
        if some {
            reservation.0 -= 1;
            self.release_all_reserved(&mut BlockReservation(1));
        }
        some
    }

    /// Takes a block that is not reserved.
    pub fn take(&mut self) -> Option<BlockRef> {
        if self.blocks_available() == 0 {
            return None;
        }
        let block = self.free.pop().or_else(|| self.evict_oldest())?;
        self.holders_total += 1;
        let entry = &mut self.blocks[block.0 as usize];
        entry.state = BlockState::Held {
            holders: 1,
            content: None,
        };
        Some(BlockRef {
            block,
            generation: entry.generation,
        })
    }

    /// Takes a block of a reservation; `None` when it is used up.
    pub fn take_reserved(&mut self, reservation: &mut BlockReservation) -> Option<BlockRef> {
        if !self.release_reservation(reservation) {
            return None;
        }
        let held = self.take();
        assert!(held.is_some(), "no block was left for a reservation");
        held
    }

    /// The prefix of a sequence with these block hashes that is in the pool.
    pub fn prefix_hits(&self, hashes: &[BlockHash]) -> PrefixHits {
        let mut hits = PrefixHits::default();
        for hash in hashes {
            let Some(block) = self.index.get(hash) else {
                break;
            };
            hits.blocks += 1;
            if matches!(
                self.blocks[block.0 as usize].state,
                BlockState::Cached { .. }
            ) {
                hits.cached += 1;
            }
        }
        hits
    }

    /// Adds a holder to the block with this content. `None` if there is none, or if it is only
    /// cached, or has a price, and no room is left.
    pub fn hold(&mut self, hash: BlockHash) -> Option<BlockRef> {
        let block = *self.index.get(&hash)?;
        let available = self.blocks_available();
        let entry = &mut self.blocks[block.0 as usize];
        match &mut entry.state {
            BlockState::Held { holders, .. } => {
                if self.charge == HolderCharge::OneBlock {
                    if available == 0 {
                        return None;
                    }
                    self.charged += 1;
                }
                *holders += 1;
            }
            BlockState::Cached { touched, content } => {
                if available == 0 {
                    return None;
                }
                self.cached.remove(touched);
                self.inspected_count -= u32::from(*touched <= self.inspected_until);
                entry.state = BlockState::Held {
                    holders: 1,
                    content: Some(*content),
                };
            }
            BlockState::Free => unreachable!("the index names a free block"),
        }
        self.holders_total += 1;
        Some(BlockRef {
            block,
            generation: entry.generation,
        })
    }

    /// Pins a cached block while it is read, without changing its place in eviction order. `None`
    /// if there is none, or if its room is reserved.
    pub fn pin_for_read(&mut self, hash: BlockHash) -> Option<ReadPin> {
        let block = *self.index.get(&hash)?;
        let BlockState::Cached { touched, .. } = self.blocks[block.0 as usize].state else {
            return None;
        };
        let held = self.hold(hash)?;
        Some(ReadPin { held, touched })
    }

    /// Unpins a block. If it has no other holder, it is cached in its former place.
    pub fn unpin(&mut self, pin: ReadPin) {
        let ReadPin { held, touched } = pin;
        let entry = self.held_entry(held);
        let BlockState::Held {
            holders: 1,
            content: Some(content),
        } = entry.state
        else {
            return self.release(held);
        };
        entry.state = BlockState::Cached { content, touched };
        self.cached.insert(touched, held.block);
        self.inspected_count += u32::from(touched <= self.inspected_until);
        self.holders_total -= 1;
    }

    /// Whether a held block has one holder, and would be free or cached without it.
    pub fn has_one_holder(&self, held: BlockRef) -> bool {
        let state = &self.blocks[held.block.0 as usize].state;
        matches!(state, BlockState::Held { holders: 1, .. })
    }

    /// Marks a held block as full and computed. If others hold a block with that content, this
    /// block gets no entry in the index, and is freed, not cached, in the end. A cached block with
    /// it is freed: its content was used now, and its place in eviction order is that of its last
    /// use.
    pub fn set_content(&mut self, held: BlockRef, hash: BlockHash) {
        let known = self.index.get(&hash).copied();
        if let Some(block) = known {
            let BlockState::Cached { touched, .. } = self.blocks[block.0 as usize].state else {
                return;
            };
            self.cached.remove(&touched);
            self.inspected_count -= u32::from(touched <= self.inspected_until);
            self.set_free(block);
        }
        let BlockState::Held { content, .. } = &mut self.held_entry(held).state else {
            unreachable!("current() returns held blocks")
        };
        assert!(content.is_none(), "{} has a content already", held.block);
        *content = Some(hash);
        self.index.insert(hash, held.block);
        if known.is_none() {
            self.record_change(hash, PrefixChange::Stored);
        }
    }

    /// Removes a holder. Without a holder the block is cached if it has a content, and free if not.
    pub fn release(&mut self, held: BlockRef) {
        self.clock += 1;
        let touched = self.clock;
        let entry = self.held_entry(held);
        let BlockState::Held { holders, content } = &mut entry.state else {
            unreachable!("current() returns held blocks")
        };
        *holders -= 1;
        let (holders, content) = (*holders, *content);
        self.holders_total -= 1;
        if holders > 0 {
            if self.charge == HolderCharge::OneBlock {
                self.charged -= 1;
            }
            return;
        }
        match content {
            Some(content) => {
                self.held_entry(held).state = BlockState::Cached { content, touched };
                self.cached.insert(touched, held.block);
            }
            None => self.set_free(held.block),
        }
    }

    /// Removes a holder and reserves a block for it in place of that one. Only where holders pay
    /// for shared blocks is one certain to be left.
    pub fn exchange(&mut self, held: BlockRef, reservation: &mut BlockReservation) {
        self.release(held);
        let BlockReservation(one) = self.reserve(1).expect("the block that was given up pays");
        reservation.0 += one;
    }

    /// Returns the reserved blocks beyond the first `blocks`.
    pub fn reduce(&mut self, reservation: &mut BlockReservation, blocks: u32) {
        let excess = reservation.0.saturating_sub(blocks);
        reservation.0 -= excess;
        self.release_all_reserved(&mut BlockReservation(excess));
    }

    /// Changes of the index since the last call; a content that was stored and evicted since then
    /// is omitted.
    pub fn take_changes(&mut self) -> PrefixChanges {
        let mut changes = PrefixChanges::default();
        for (hash, change) in std::mem::take(&mut self.changes) {
            match change {
                PrefixChange::Stored => changes.stored.push(hash),
                PrefixChange::Evicted => changes.evicted.push(hash),
            }
        }
        changes
    }

    /// Hashes the state that decides the behaviour of the pool: equal for two pools that no series
    /// of calls could distinguish, whatever the times and number of touches.
    pub fn fingerprint(&self, hasher: &mut impl Hasher) {
        let Self {
            blocks,
            free,
            cached,
            inspected_until: _,
            inspected_count: looked_count,
            // Implied by the blocks.
            index: _,
            reserved,
            charge: _,
            // Implied by the holders.
            charged: _,
            holders_total: _,
            clock: _,
            changes,
        } = self;
        for PoolBlock { generation, state } in blocks {
            generation.hash(hasher);
            match state {
                BlockState::Free => 0_u8.hash(hasher),
                BlockState::Held { holders, content } => (1_u8, holders, content).hash(hasher),
                BlockState::Cached {
                    content,
                    touched: _,
                } => (2_u8, content).hash(hasher),
            }
        }
        free.hash(hasher);
        for block in cached.values() {
            block.hash(hasher);
        }
        (reserved, looked_count, changes).hash(hasher);
    }

    /// All contents that can be found.
    pub fn contents(&self) -> impl Iterator<Item = BlockHash> + '_ {
        self.index.keys().copied()
    }

    /// Asserts the invariant, and that `held` (the blocks of each table, one after the other) and
    /// `reserved` match the records of the pool. Walks the whole pool: for tests.
    pub fn check(&self, held: impl IntoIterator<Item = BlockRef>, reserved: u32) {
        let mut holders = vec![0; self.blocks.len()];
        let mut holdings = 0;
        for held in held {
            holdings += 1;
            let entry = &self.blocks[held.block.0 as usize];
            assert_eq!(
                entry.generation, held.generation,
                "a table names an old generation of {}",
                held.block
            );
            holders[held.block.0 as usize] += 1;
        }
        for (entry, expected) in self.blocks.iter().zip(&holders) {
            let counted = match entry.state {
                BlockState::Held { holders, .. } => holders,
                BlockState::Free | BlockState::Cached { .. } => 0,
            };
            assert_eq!(counted, *expected, "holders of a block: {entry:?}");
        }
        let further = holders.iter().map(|count| count.saturating_sub(1)).sum();
        let charged = match self.charge {
            HolderCharge::Nothing => 0,
            HolderCharge::OneBlock => further,
        };
        assert_eq!(self.charged, charged, "shared blocks that are paid for");
        assert_eq!(self.holders_total, holdings, "entries in tables");
        assert_eq!(self.reserved, reserved, "reservations");
        self.check_lists();
    }

    fn check_lists(&self) {
        let free = |entry: &&PoolBlock| entry.state == BlockState::Free;
        assert_eq!(self.blocks.iter().filter(free).count(), self.free.len());
        for block in &self.free {
            assert_eq!(self.blocks[block.0 as usize].state, BlockState::Free);
        }
        let mut named = 0;
        let mut cached = 0;
        for (i, entry) in self.blocks.iter().enumerate() {
            let content = match &entry.state {
                BlockState::Free => None,
                BlockState::Held { holders, content } => {
                    assert!(*holders > 0, "held by nobody: {entry:?}");
                    *content
                }
                BlockState::Cached { content, touched } => {
                    assert_eq!(self.cached.get(touched), Some(&BlockIndex(count(i))));
                    cached += 1;
                    Some(*content)
                }
            };
            if let Some(content) = content {
                assert_eq!(self.index.get(&content), Some(&BlockIndex(count(i))));
                named += 1;
            }
        }
        assert_eq!(named, self.index.len(), "contents without a block");
        assert_eq!(cached, self.cached.len(), "cached twice");
        let looked = self.cached.range(..=self.inspected_until).count();
        assert_eq!(looked, self.inspected_count as usize, "looked at");
        let spoken_for = (self.reserved + self.charged) as usize;
        assert!(spoken_for <= self.free.len() + self.cached.len());
    }

    /// The entry of a held block, in the generation that `held` names.
    fn held_entry(&mut self, held: BlockRef) -> &mut PoolBlock {
        let entry = &mut self.blocks[held.block.0 as usize];
        assert!(
            entry.generation == held.generation && matches!(entry.state, BlockState::Held { .. }),
            "{} of generation {} is not held: {entry:?}",
            held.block,
            held.generation
        );
        entry
    }

    /// The content of a cached block.
    fn content(&self, block: BlockIndex) -> BlockHash {
        let BlockState::Cached { content, .. } = self.blocks[block.0 as usize].state else {
            unreachable!("the list of cached blocks names a block that is not cached")
        };
        content
    }

    fn evict_oldest(&mut self) -> Option<BlockIndex> {
        let (touched, block) = self.cached.pop_first()?;
        self.inspected_count -= u32::from(touched <= self.inspected_until);
        let content = self.content(block);
        self.index.remove(&content);
        self.record_change(content, PrefixChange::Evicted);
        self.set_free(block);
        self.free.pop()
    }

    fn set_free(&mut self, block: BlockIndex) {
        let entry = &mut self.blocks[block.0 as usize];
        entry.state = BlockState::Free;
        // Generations are only compared for equality, so wrapping is harmless until a writer is
        // 2^32 generations late.
        entry.generation = Generation(entry.generation.0.wrapping_add(1));
        self.free.push(block);
    }

    /// Opposite changes between two calls of [`PlanePool::changes`] cancel out.
    fn record_change(&mut self, hash: BlockHash, change: PrefixChange) {
        match self.changes.get(&hash) {
            Some(earlier) if *earlier != change => self.changes.remove(&hash),
            _ => self.changes.insert(hash, change),
        };
    }
}

/// Lengths of lists of blocks fit into 32 bits, because block indices do.
fn count(length: usize) -> u32 {
    u32::try_from(length).expect("block indices are 32 bits")
}

#[cfg(test)]
mod tests;
