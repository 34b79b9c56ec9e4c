//! The blocks of one worker's KV pool: who holds each, how often it was freed, what it contains.
//!
//! Owns: the life of every block (free, held by so many sequences, cached for reuse), the count of
//! blocks promised to sequences that will grow, and the index from content to block.
//! Never: knows a sequence; holders are counted, and the brain that owns them proves the count.
//! Invariant: every block is in exactly one state, `promised <= free + cached`, and the index names
//! exactly the blocks that carry a content. [`Pool::check`] proves it.

use cleave_domain::{BlockHash, BlockIndex, BlockRef, Generation};
use std::collections::BTreeMap;
use std::hash::{Hash, Hasher};

/// A KV pool's book.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub struct Pool {
    blocks: Vec<Block>,
    /// Free blocks; the one freed last is taken first, so that stale writers are met early.
    free: Vec<BlockIndex>,
    /// Cached blocks, the one untouched for longest first.
    cached: BTreeMap<u64, BlockIndex>,
    /// Of those, the ones touched no later than this were looked at, and so many they are.
    looked: u64,
    looked_count: u32,
    /// Where to find a content.
    index: BTreeMap<BlockHash, BlockIndex>,
    /// Blocks set aside for growth, out of the free and cached ones.
    promised: u32,
    /// Entries in all tables: a block counts once for each of its holders.
    holdings: u64,
    /// Counts touches; orders `cached`.
    clock: u64,
    /// What the index gained and lost since it was last asked.
    changes: BTreeMap<BlockHash, Change>,
}

#[derive(Clone, Debug, PartialEq, Eq, Hash)]
struct Block {
    generation: Generation,
    life: Life,
}

/// Every state a block can be in.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
enum Life {
    /// Nobody's; its content means nothing.
    Free,
    /// In the tables of `holders` sequences, at least one. `content` once it is full, computed and
    /// the block by which that content is found.
    Held {
        holders: u32,
        content: Option<BlockHash>,
    },
    /// In no table; kept for its content until the room is needed.
    Cached { content: BlockHash, touched: u64 },
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
enum Change {
    Stored,
    Evicted,
}

/// Blocks set aside for one sequence to grow into. Give it back with [`Pool::forgive`]; it is
/// cloned only as part of a whole cloned world.
#[derive(Clone, Debug, Default, PartialEq, Eq, Hash)]
pub struct Promise(u32);

impl Promise {
    /// Blocks still promised.
    pub fn count(&self) -> u32 {
        self.0
    }
}

/// A cached block that is being read; it goes back with [`Pool::take_back`].
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct Lent {
    /// Which block.
    pub held: BlockRef,
    /// Its place among the cached ones, to which it returns.
    pub touched: u64,
}

/// What a pool has of a sequence's beginning.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Hits {
    /// Leading blocks that are here.
    pub blocks: u32,
    /// How many of those nobody holds: holding them takes room.
    pub cached: u32,
}

/// What the prefix index gained and lost.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Changes {
    /// Contents that can now be found.
    pub stored: Vec<BlockHash>,
    /// Contents that are gone.
    pub evicted: Vec<BlockHash>,
}

impl Pool {
    /// A pool of free blocks, all of generation 0.
    pub fn new(blocks_count: u32) -> Self {
        let block = Block {
            generation: Generation(0),
            life: Life::Free,
        };
        Self {
            blocks: vec![block; blocks_count as usize],
            free: (0..blocks_count).rev().map(BlockIndex).collect(),
            cached: BTreeMap::new(),
            looked: 0,
            looked_count: 0,
            index: BTreeMap::new(),
            promised: 0,
            holdings: 0,
            clock: 0,
            changes: BTreeMap::new(),
        }
    }

    /// Blocks in all.
    pub fn blocks_count(&self) -> u32 {
        count(self.blocks.len())
    }

    /// Blocks that can be taken or promised: free or only cached, and not promised.
    pub fn blocks_available(&self) -> u32 {
        count(self.free.len() + self.cached.len()) - self.promised
    }

    /// Blocks in sequences' tables.
    pub fn blocks_held(&self) -> u32 {
        count(self.blocks.len() - self.free.len() - self.cached.len())
    }

    /// Entries that all tables together must have: a block counts once for each of its holders.
    pub fn holdings(&self) -> u64 {
        self.holdings
    }

    /// Blocks kept only for their content.
    pub fn blocks_cached(&self) -> u32 {
        count(self.cached.len())
    }

    /// Blocks promised and not yet taken.
    pub fn blocks_promised(&self) -> u32 {
        self.promised
    }

    /// Blocks that hold nothing and are nobody's; some of them may be promised.
    pub fn blocks_free(&self) -> u32 {
        count(self.free.len())
    }

    /// Whether a content can be found here.
    pub fn contains(&self, hash: BlockHash) -> bool {
        self.index.contains_key(&hash)
    }

    /// Of the `depth` cached blocks that would be evicted first those that were not looked at yet, each as
    /// when it was touched and what it contains; the oldest first.
    pub fn next_evicted(&self, depth: u32) -> impl Iterator<Item = (u64, BlockHash)> + '_ {
        let rest = depth.saturating_sub(self.looked_count) as usize;
        let cached = self
            .cached
            .range(self.looked.saturating_add(1)..)
            .take(rest);
        cached.map(|(touched, block)| (*touched, self.content(*block)))
    }

    /// [`Pool::next_evicted`] gives only those touched later from now on.
    pub fn looked_at(&mut self, touched: u64) {
        let looked = self.looked.saturating_add(1)..=touched;
        self.looked_count += count(self.cached.range(looked).count());
        self.looked = touched;
    }

    /// Cached blocks that are older than one touched then.
    pub fn older(&self, touched: u64) -> usize {
        self.cached.range(..touched).count()
    }

    /// Sets `blocks` aside, all or none.
    pub fn promise(&mut self, blocks: u32) -> Option<Promise> {
        if blocks > self.blocks_available() {
            return None;
        }
        self.promised += blocks;
        Some(Promise(blocks))
    }

    /// Takes a promise back; nothing is left of it.
    pub fn forgive(&mut self, promise: &mut Promise) {
        let Promise(blocks) = std::mem::take(promise);
        assert!(
            blocks <= self.promised,
            "more forgiven than was promised: {blocks} of {}",
            self.promised
        );
        self.promised -= blocks;
    }

    /// Gives up one promised block; false if none was left.
    pub fn forgive_one(&mut self, promise: &mut Promise) -> bool {
        let some = promise.0 > 0;
        if some {
            promise.0 -= 1;
            self.forgive(&mut Promise(1));
        }
        some
    }

    /// Hands out a block that nobody was promised.
    pub fn take(&mut self) -> Option<BlockRef> {
        if self.blocks_available() == 0 {
            return None;
        }
        let block = self.free.pop().or_else(|| self.evict_oldest())?;
        self.holdings += 1;
        let entry = &mut self.blocks[block.0 as usize];
        entry.life = Life::Held {
            holders: 1,
            content: None,
        };
        Some(BlockRef {
            block,
            generation: entry.generation,
        })
    }

    /// Hands out a block of a promise; `None` when nothing of it is left.
    pub fn take_promised(&mut self, promise: &mut Promise) -> Option<BlockRef> {
        if !self.forgive_one(promise) {
            return None;
        }
        let held = self.take();
        assert!(held.is_some(), "a promised block was not there");
        held
    }

    /// How much of a sequence with these block hashes is here.
    pub fn leading(&self, hashes: &[BlockHash]) -> Hits {
        let mut hits = Hits::default();
        for hash in hashes {
            let Some(block) = self.index.get(hash) else {
                break;
            };
            hits.blocks += 1;
            if matches!(self.blocks[block.0 as usize].life, Life::Cached { .. }) {
                hits.cached += 1;
            }
        }
        hits
    }

    /// Becomes one more holder of the block with this content. `None` if there is none, or if it is
    /// only cached and its room is promised to others.
    pub fn hold(&mut self, hash: BlockHash) -> Option<BlockRef> {
        let block = *self.index.get(&hash)?;
        let room = self.blocks_available();
        let entry = &mut self.blocks[block.0 as usize];
        match &mut entry.life {
            Life::Held { holders, .. } => *holders += 1,
            Life::Cached { touched, content } => {
                if room == 0 {
                    return None;
                }
                self.cached.remove(touched);
                self.looked_count -= u32::from(*touched <= self.looked);
                entry.life = Life::Held {
                    holders: 1,
                    content: Some(*content),
                };
            }
            Life::Free => unreachable!("the index names a free block"),
        }
        self.holdings += 1;
        Some(BlockRef {
            block,
            generation: entry.generation,
        })
    }

    /// Holds a block that is only cached while somebody reads it, without making it younger. `None` if
    /// there is none, or if its room is promised.
    pub fn lend(&mut self, hash: BlockHash) -> Option<Lent> {
        let block = *self.index.get(&hash)?;
        let Life::Cached { touched, .. } = self.blocks[block.0 as usize].life else {
            return None;
        };
        let held = self.hold(hash)?;
        Some(Lent { held, touched })
    }

    /// Whoever read it has done so. If nobody else holds it, it is cached as it was.
    pub fn take_back(&mut self, lent: Lent) {
        let Lent { held, touched } = lent;
        let entry = self.current(held);
        let Life::Held {
            holders: 1,
            content: Some(content),
        } = entry.life
        else {
            return self.release(held);
        };
        entry.life = Life::Cached { content, touched };
        self.cached.insert(touched, held.block);
        self.looked_count += u32::from(touched <= self.looked);
        self.holdings -= 1;
    }

    /// Whether a held block has one holder, and would be free or cached without it.
    pub fn has_one_holder(&self, held: BlockRef) -> bool {
        let life = &self.blocks[held.block.0 as usize].life;
        matches!(life, Life::Held { holders: 1, .. })
    }

    /// Says that a held block is full and computed. If another block has that content already, this
    /// one stays without a name and is freed, not cached, in the end.
    pub fn complete(&mut self, held: BlockRef, hash: BlockHash) {
        if self.index.contains_key(&hash) {
            return;
        }
        let Life::Held { content, .. } = &mut self.current(held).life else {
            unreachable!("current() returns held blocks")
        };
        assert!(content.is_none(), "{} has a content already", held.block);
        *content = Some(hash);
        self.index.insert(hash, held.block);
        self.note(hash, Change::Stored);
    }

    /// One holder less. The last one leaves the block cached if it has a content, free if not.
    pub fn release(&mut self, held: BlockRef) {
        self.clock += 1;
        let touched = self.clock;
        let entry = self.current(held);
        let Life::Held { holders, content } = &mut entry.life else {
            unreachable!("current() returns held blocks")
        };
        *holders -= 1;
        let (holders, content) = (*holders, *content);
        self.holdings -= 1;
        if holders > 0 {
            return;
        }
        match content {
            Some(content) => {
                self.current(held).life = Life::Cached { content, touched };
                self.cached.insert(touched, held.block);
            }
            None => self.set_free(held.block),
        }
    }

    /// What the index gained and lost since the last call; what came and went in between is not
    /// mentioned.
    pub fn changes(&mut self) -> Changes {
        let mut changes = Changes::default();
        for (hash, change) in std::mem::take(&mut self.changes) {
            match change {
                Change::Stored => changes.stored.push(hash),
                Change::Evicted => changes.evicted.push(hash),
            }
        }
        changes
    }

    /// Hashes what decides how the pool will behave: equal for two pools that no series of calls
    /// could tell apart, whenever and however often their blocks were touched.
    pub fn fingerprint(&self, hasher: &mut impl Hasher) {
        let Self {
            blocks,
            free,
            cached,
            looked: _,
            looked_count,
            // Follows from the blocks.
            index: _,
            promised,
            holdings: _,
            clock: _,
            changes,
        } = self;
        for Block { generation, life } in blocks {
            generation.hash(hasher);
            match life {
                Life::Free => 0_u8.hash(hasher),
                Life::Held { holders, content } => (1_u8, holders, content).hash(hasher),
                Life::Cached {
                    content,
                    touched: _,
                } => (2_u8, content).hash(hasher),
            }
        }
        free.hash(hasher);
        for block in cached.values() {
            block.hash(hasher);
        }
        (promised, looked_count, changes).hash(hasher);
    }

    /// Every content that can be found.
    pub fn contents(&self) -> impl Iterator<Item = BlockHash> + '_ {
        self.index.keys().copied()
    }

    /// Asserts the invariant, and that `held` (each table's blocks, one after the other) and
    /// `promised` are exactly what the pool believes. Walks the whole pool: for tests.
    pub fn check(&self, held: impl IntoIterator<Item = BlockRef>, promised: u32) {
        let mut holders = vec![0; self.blocks.len()];
        let mut holdings = 0;
        for held in held {
            holdings += 1;
            let entry = &self.blocks[held.block.0 as usize];
            assert_eq!(
                entry.generation, held.generation,
                "a table names a past life of {}",
                held.block
            );
            holders[held.block.0 as usize] += 1;
        }
        for (entry, expected) in self.blocks.iter().zip(&holders) {
            let counted = match entry.life {
                Life::Held { holders, .. } => holders,
                Life::Free | Life::Cached { .. } => 0,
            };
            assert_eq!(counted, *expected, "holders of a block: {entry:?}");
        }
        assert_eq!(self.holdings, holdings, "entries in tables");
        assert_eq!(self.promised, promised, "promises");
        self.check_lists();
    }

    fn check_lists(&self) {
        let free = |entry: &&Block| entry.life == Life::Free;
        assert_eq!(self.blocks.iter().filter(free).count(), self.free.len());
        for block in &self.free {
            assert_eq!(self.blocks[block.0 as usize].life, Life::Free);
        }
        let mut named = 0;
        let mut cached = 0;
        for (i, entry) in self.blocks.iter().enumerate() {
            let content = match &entry.life {
                Life::Free => None,
                Life::Held { holders, content } => {
                    assert!(*holders > 0, "held by nobody: {entry:?}");
                    *content
                }
                Life::Cached { content, touched } => {
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
        let looked = self.cached.range(..=self.looked).count();
        assert_eq!(looked, self.looked_count as usize, "looked at");
        assert!(self.promised as usize <= self.free.len() + self.cached.len());
    }

    /// The entry of a block that is held, in the life that `held` names.
    fn current(&mut self, held: BlockRef) -> &mut Block {
        let entry = &mut self.blocks[held.block.0 as usize];
        assert!(
            entry.generation == held.generation && matches!(entry.life, Life::Held { .. }),
            "{} of generation {} is not held: {entry:?}",
            held.block,
            held.generation
        );
        entry
    }

    /// What a cached block contains.
    fn content(&self, block: BlockIndex) -> BlockHash {
        let Life::Cached { content, .. } = self.blocks[block.0 as usize].life else {
            unreachable!("the list of cached blocks names another")
        };
        content
    }

    fn evict_oldest(&mut self) -> Option<BlockIndex> {
        let (touched, block) = self.cached.pop_first()?;
        self.looked_count -= u32::from(touched <= self.looked);
        let content = self.content(block);
        self.index.remove(&content);
        self.note(content, Change::Evicted);
        self.set_free(block);
        self.free.pop()
    }

    fn set_free(&mut self, block: BlockIndex) {
        let entry = &mut self.blocks[block.0 as usize];
        entry.life = Life::Free;
        // Only equality is ever asked, so wrapping is harmless until a writer is 2^32 lives late.
        entry.generation = Generation(entry.generation.0.wrapping_add(1));
        self.free.push(block);
    }

    /// Opposite changes between two questions cancel out.
    fn note(&mut self, hash: BlockHash, change: Change) {
        match self.changes.get(&hash) {
            Some(earlier) if *earlier != change => self.changes.remove(&hash),
            _ => self.changes.insert(hash, change),
        };
    }
}

/// Lengths of lists of blocks fit, because block indices do.
fn count(length: usize) -> u32 {
    u32::try_from(length).expect("block indices are 32 bits")
}

#[cfg(test)]
mod tests {
    use super::{Hits, Pool, Promise};
    use cleave_domain::{BlockHash, Generation};
    use std::hash::Hasher;

    fn hash(of: u8) -> BlockHash {
        BlockHash([of; 16])
    }

    #[test]
    fn a_block_freed_is_of_another_generation() {
        let mut pool = Pool::new(1);
        let first = pool.take().unwrap();
        pool.release(first);
        let second = pool.take().unwrap();
        assert_eq!(first.block, second.block);
        assert_eq!(second.generation, Generation(1));
        pool.check([second], 0);
    }

    #[test]
    #[should_panic(expected = "is not held")]
    fn a_block_is_not_given_back_twice() {
        let mut pool = Pool::new(2);
        let held = pool.take().unwrap();
        pool.release(held);
        pool.release(held);
    }

    #[test]
    fn generations_wrap() {
        let mut pool = Pool::new(1);
        pool.blocks[0].generation = Generation(u32::MAX);
        let last = pool.take().unwrap();
        pool.release(last);
        assert_eq!(pool.take().unwrap().generation, Generation(0));
    }

    #[test]
    fn lesson_10_promised_blocks_are_nobody_elses() {
        let mut pool = Pool::new(3);
        let mut promise = pool.promise(2).unwrap();
        let taken = pool.take().unwrap();
        assert_eq!(pool.take(), None);
        assert_eq!(pool.promise(1), None);
        let grown = pool.take_promised(&mut promise).unwrap();
        pool.check([taken, grown], 1);
        pool.forgive(&mut promise);
        assert_eq!(pool.blocks_available(), 1);
        let mut spent = Promise::default();
        assert_eq!(pool.take_promised(&mut spent), None);
    }

    #[test]
    fn a_cached_block_that_is_promised_away_cannot_be_held() {
        let mut pool = Pool::new(1);
        let held = pool.take().unwrap();
        pool.complete(held, hash(1));
        pool.release(held);
        let mut promise = pool.promise(1).unwrap();
        assert_eq!(pool.hold(hash(1)), None);
        pool.forgive(&mut promise);
        assert_eq!(pool.hold(hash(1)), Some(held));
    }

    #[test]
    fn shared_blocks_outlive_their_first_holder_and_the_oldest_is_evicted() {
        let mut pool = Pool::new(2);
        let (a, b) = (pool.take().unwrap(), pool.take().unwrap());
        pool.complete(a, hash(1));
        pool.complete(b, hash(2));
        let hits = |blocks, cached| Hits { blocks, cached };
        assert_eq!(pool.leading(&[hash(1), hash(2), hash(3)]), hits(2, 0));
        assert_eq!(pool.hold(hash(1)), Some(a));
        pool.release(a);
        pool.release(b);
        pool.check([a], 0);
        pool.release(a);
        assert_eq!(pool.leading(&[hash(1), hash(2)]), hits(2, 2));
        assert_eq!(pool.changes().stored, [hash(1), hash(2)]);
        let again = pool.take().unwrap();
        assert_eq!(again.block, b.block);
        assert_ne!(again.generation, b.generation);
        assert_eq!(pool.changes().evicted, [hash(2)]);
        pool.check([again], 0);
    }

    #[test]
    fn a_second_block_of_the_same_content_is_freed_not_cached() {
        let mut pool = Pool::new(2);
        let (a, b) = (pool.take().unwrap(), pool.take().unwrap());
        pool.complete(a, hash(1));
        pool.complete(b, hash(1));
        pool.release(b);
        assert_eq!(pool.blocks_cached(), 0);
        pool.release(a);
        assert_eq!(pool.blocks_cached(), 1);
        pool.check([], 0);
    }

    #[test]
    fn what_was_read_is_evicted_when_it_would_have_been() {
        let mut pool = Pool::new(3);
        let held = [1, 2, 3].map(|content| {
            let held = pool.take().unwrap();
            pool.complete(held, hash(content));
            held
        });
        held.into_iter().for_each(|held| pool.release(held));
        let next: Vec<_> = pool.next_evicted(2).map(|(_, hash)| hash).collect();
        assert_eq!(next, [hash(1), hash(2)]);
        let lent = pool.lend(hash(1)).unwrap();
        assert_eq!(pool.lend(hash(1)), None, "it is read already");
        pool.looked_at(lent.touched);
        pool.check([lent.held], 0);
        assert_eq!(pool.blocks_available(), 2);
        // Whoever needs a block meanwhile is given another.
        let second = pool.take().unwrap();
        assert!(!pool.contains(hash(2)) && pool.contains(hash(1)));
        pool.take_back(lent);
        assert_eq!(pool.next_evicted(1).count(), 0, "it was looked at");
        let next: Vec<_> = pool.next_evicted(9).map(|(_, hash)| hash).collect();
        assert_eq!(next, [hash(3)]);
        pool.check([second], 0);
        // One that has been held by others meanwhile is theirs.
        let lent = pool.lend(hash(1)).unwrap();
        let shared = pool.hold(hash(1)).unwrap();
        pool.take_back(lent);
        pool.check([second, shared], 0);
    }

    fn print(pool: &Pool) -> u64 {
        let mut hasher = std::hash::DefaultHasher::new();
        pool.fingerprint(&mut hasher);
        hasher.finish()
    }

    #[test]
    fn a_fingerprint_tells_what_matters_and_nothing_else() {
        let made = |touches: u8| {
            let mut pool = Pool::new(3);
            let (a, b) = (pool.take().unwrap(), pool.take().unwrap());
            pool.complete(a, hash(1));
            pool.complete(b, hash(2));
            pool.changes();
            for _ in 0..touches {
                let again = pool.hold(hash(1)).unwrap();
                pool.release(again);
            }
            pool.release(a);
            pool.release(b);
            pool
        };
        let pool = made(0);
        assert_eq!(print(&pool), print(&made(5)), "only touched more often");
        let mut other = made(0);
        let first = other.hold(hash(1)).unwrap();
        assert_ne!(print(&pool), print(&other), "held");
        other.release(first);
        assert_ne!(print(&pool), print(&other), "evicted in another order");
        let second = other.hold(hash(2)).unwrap();
        other.release(second);
        assert_eq!(print(&pool), print(&other));
        let free = other.take().unwrap();
        other.release(free);
        assert_ne!(print(&pool), print(&other), "of another generation");
    }

    #[test]
    fn what_came_and_went_is_not_reported() {
        let mut pool = Pool::new(1);
        let held = pool.take().unwrap();
        pool.complete(held, hash(1));
        pool.release(held);
        pool.take().unwrap();
        let changes = pool.changes();
        assert!(changes.stored.is_empty() && changes.evicted.is_empty());
    }
}
