//! The prefix cache below the pool, in host memory and on disk.
//!
//! Owns: which cached blocks are copied out before they are evicted, which contents a tier keeps,
//! and which sequences fetch contents instead of computing them. Never: waits for a copy when it
//! needs a block: a content that was not copied out in time is lost. Never fails a sequence:
//! content that cannot be fetched is computed. Invariant: a block that is being copied out is held
//! by the pool under [`OffloadTiers::offloading`] until the answer; a sequence with a [`TierFetch`]
//! is active and in no step, and the contents that it fetches stay in their tier until the answer.
//!
//! A snapshot of a state, or a block of the window plane, is kept in pieces as long as a block,
//! each a content of its own, so that one index and one store serve all planes.

mod fetch;

pub(crate) use fetch::TierFetch;

use super::KvMemory;
use crate::batch::StepPipeline;
use crate::context::WorkerContext;
use crate::deadline::Deadlines;
use crate::sequences::{SequenceStage, WorkerSequence};
use crate::{OffloadOutcome, SnapshotPiece, WorkerNote, WorkerOutput};
use cleave_domain::{BlockHash, Capacity, HandoffId, KvPlane, Time};
use cleave_kv::{EvictableContents, ReadPin, TierIndex, TierLevel, piece_hash};
use std::collections::BTreeMap;
use std::hash::{Hash, Hasher};
use std::time::Duration;

/// At most one in this many available blocks is being copied out, because it cannot be taken
/// meanwhile.
const OFFLOADING_PARTS: u32 = 4;
/// Upper limit of the same: as many blocks as a step of a few hundred tokens takes.
const OFFLOADING_MAX: u32 = 64;
/// While steps run, the free blocks and those already copied out should make up one part in this
/// many of the pool, plus all reserved blocks: a sequence with both legs here takes all its blocks
/// at once. While no step runs, copies cost nothing, so the target is the whole cache.
const FREE_TARGET_PARTS: u32 = 2;
/// Contents that are also in the pool take at most one part in this many of the tiers: they must
/// not displace contents that are nowhere else.
const DUPLICATE_PARTS: u32 = 2;
/// Blocks written to disk at a time: enough to keep one disk busy.
const WRITES_MAX: u32 = 4;
/// A disk that has completed no write for this long does not keep up; its queue then no longer
/// holds back eviction from host memory.
const WRITE_MAX: Duration = Duration::from_secs(1);
/// A fetch price that is too high to be used is lowered by one part in this many, each time that a
/// sequence (first) or a block (second) would have used it: a tier that was slow once may be faster
/// now, and is tried again.
const PRICE_DECAY_PARTS: [u32; 2] = [16, 1024];

/// State of the tiers below the pool.
#[derive(Clone, Debug)]
pub(super) struct OffloadTiers {
    index: TierIndex,
    host_blocks_max: u32,
    /// Blocks and snapshots being copied to host memory, by content.
    offloading: BTreeMap<BlockHash, OffloadUnderWay>,
    /// Pieces of a snapshot; 0 without states.
    state_pieces: u32,
    /// Pieces of a block of the window plane; 0 without it.
    window_pieces: u32,
    /// Contents being written to disk.
    writing: u32,
    /// When a write last began or ended.
    last_write_at: Time,
    /// Time to fetch one block from host memory, and from disk; `None` before the first
    /// measurement.
    from_host: Option<Duration>,
    from_disk: Option<Duration>,
    /// Deadlines of the fetches under way.
    fetch_deadlines: Deadlines,
    last_noted: (u32, u32),
}

/// A copy to host memory.
#[derive(Clone, Debug)]
struct OffloadUnderWay {
    plane: KvPlane,
    pin: ReadPin,
    /// The contents that it stores: that of the block, or those of pieces of the snapshot.
    contents: Vec<BlockHash>,
}

impl OffloadTiers {
    /// Tiers of so many blocks, for the pieces of this capacity.
    pub(crate) fn new(host_blocks_max: u32, disk_blocks_max: u32, capacity: &Capacity) -> Self {
        Self {
            index: TierIndex::new(host_blocks_max, disk_blocks_max),
            host_blocks_max,
            offloading: BTreeMap::new(),
            state_pieces: capacity.state_pieces(),
            window_pieces: capacity.window_pieces(),
            writing: 0,
            last_write_at: Time::ZERO,
            from_host: None,
            from_disk: None,
            fetch_deadlines: Deadlines::default(),
            last_noted: (0, 0),
        }
    }

    /// Whether there is neither host memory nor disk for contents.
    fn is_empty(&self) -> bool {
        self.host_blocks_max == 0
    }

    /// Blocks or slots being copied out, each held once.
    pub(super) fn offloading(&self, plane: KvPlane) -> impl Iterator<Item = ReadPin> + '_ {
        let copies = self.offloading.values();
        copies
            .filter(move |copy| copy.plane == plane)
            .map(|copy| copy.pin)
    }

    fn offloading_count(&self, plane: KvPlane) -> u32 {
        u32::try_from(self.offloading(plane).count()).expect("no more than there are blocks")
    }

    /// The pieces of a content of the pool, as the tiers keep them: a block is one piece.
    fn pieces(
        &self,
        plane: KvPlane,
        content: BlockHash,
    ) -> impl Iterator<Item = SnapshotPiece> + use<> {
        let count = match plane {
            KvPlane::Blocks => 1,
            KvPlane::State => self.state_pieces,
            KvPlane::Window => self.window_pieces,
        };
        (0..count).map(move |ordinal| SnapshotPiece {
            ordinal,
            content: piece_hash(content, ordinal),
        })
    }

    /// Whether every piece of a content is in a tier, or being copied to one.
    fn contains(&self, plane: KvPlane, content: BlockHash) -> bool {
        let mut pieces = self.pieces(plane, content);
        pieces.all(|piece| self.index.contains(piece.content))
    }

    /// Lowers the prices by one part in `parts`, after fetching was dearer than computing.
    fn lower_prices(&mut self, parts: u32) {
        for price in [&mut self.from_host, &mut self.from_disk] {
            *price = price.map(|price| price - price / parts);
        }
    }

    /// Hashes the state that decides the future; `older` counts the cached blocks older than a
    /// time.
    pub(crate) fn fingerprint(
        &self,
        now: Time,
        older: impl Fn(KvPlane, u64) -> usize,
        hasher: &mut impl Hasher,
    ) {
        self.index.fingerprint(hasher);
        for (content, copy) in &self.offloading {
            let OffloadUnderWay {
                plane,
                pin,
                contents,
            } = copy;
            (content, pin.held, older(*plane, pin.touched), contents).hash(hasher);
        }
        let wrote = (self.writing > 0).then(|| now.since(self.last_write_at).min(WRITE_MAX));
        (self.writing, wrote, self.from_host, self.from_disk).hash(hasher);
    }
}

impl KvMemory {
    // === out ===

    /// Copies the blocks and snapshots that will be evicted next to host memory, some at a time.
    pub(crate) fn offload(&mut self, context: &mut WorkerContext, steps: &StepPipeline) {
        if context.limits().host_blocks == 0 {
            return;
        }
        // An idle engine copies the whole cache; a busy one only as deep as eviction may soon
        // reach.
        let is_idle = steps.is_empty();
        for plane in [KvPlane::Blocks, KvPlane::State, KvPlane::Window] {
            self.offload_plane(context, plane, is_idle);
        }
    }

    fn offload_plane(&mut self, context: &mut WorkerContext, plane: KvPlane, is_idle: bool) {
        let Some(pool) = self.pools.plane(plane) else {
            return;
        };
        let water = pool.blocks_count() / FREE_TARGET_PARTS + pool.blocks_reserved();
        let depth = if is_idle {
            u32::MAX
        } else {
            water.saturating_sub(pool.blocks_free())
        };
        let limits = context.limits();
        let tier_blocks = limits.host_blocks.saturating_add(limits.disk_blocks);
        let depth = depth.min(tier_blocks.div_ceil(DUPLICATE_PARTS));
        let offloading = self.tiers.offloading_count(plane);
        // A block being copied out cannot be taken, so only a part of the available blocks leaves
        // at a time.
        let available = pool.blocks_available() + offloading;
        let most = available / OFFLOADING_PARTS;
        let most = match plane {
            KvPlane::Blocks | KvPlane::Window => most,
            // There are few slots; one stays for a new sequence.
            KvPlane::State => most.max(u32::from(available > 1)),
        };
        let offloads_max = most.min(OFFLOADING_MAX).saturating_sub(offloading);
        if offloads_max == 0 {
            return;
        }
        let next = pool.next_to_evict(depth);
        // Blocks that a tier has already cost no copy and do not count towards the limit.
        let mut unknown = 0;
        let next: Vec<_> = next
            .map(|(touched, content)| (touched, content, self.tiers.contains(plane, content)))
            .take_while(|(.., in_tier)| {
                unknown += u32::from(!in_tier);
                unknown <= offloads_max
            })
            .collect();
        for (touched, content, in_tier) in next {
            // Where the tiers are full, the block is considered again later.
            if !in_tier && self.worth_keeping(plane) && !self.offload_one(context, plane, content) {
                return;
            }
            if let Some(pool) = self.pools.plane_mut(plane) {
                pool.mark_inspected(touched);
            }
        }
    }

    /// False if no more can be stored.
    fn offload_one(
        &mut self,
        context: &mut WorkerContext,
        plane: KvPlane,
        content: BlockHash,
    ) -> bool {
        // While the disk keeps up, host memory drops only blocks that are also on disk.
        let writes = self.tiers.writing > 0 && context.now() < self.tiers.last_write_at + WRITE_MAX;
        let evictable = if writes {
            EvictableContents::WrittenOnly
        } else {
            EvictableContents::Any
        };
        let place = TierLevel::Host;
        let missing = |piece: &SnapshotPiece| !self.tiers.index.contains(piece.content);
        let pieces: Vec<SnapshotPiece> =
            self.tiers.pieces(plane, content).filter(missing).collect();
        let mut contents = Vec::with_capacity(pieces.len());
        for piece in &pieces {
            let Ok(dropped) = self.tiers.index.begin_copy(piece.content, place, evictable) else {
                break;
            };
            contents.push(piece.content);
            if let Some(content) = dropped {
                context.emit(WorkerOutput::TierDrop { content, place });
            }
        }
        let is_room = contents.len() == pieces.len();
        let pool = self.pools.plane_mut(plane).filter(|_| is_room);
        let Some(pin) = pool.and_then(|pool| pool.pin_for_read(content)) else {
            for content in contents {
                self.tiers.index.abort_copy(content, place);
            }
            return false;
        };
        let block = pin.held.block;
        let copy = OffloadUnderWay {
            plane,
            pin,
            contents,
        };
        self.tiers.offloading.insert(content, copy);
        context.emit(WorkerOutput::Offload {
            content,
            plane,
            block,
            pieces: match plane {
                KvPlane::Blocks => Vec::new(),
                KvPlane::State | KvPlane::Window => pieces,
            },
        });
        true
    }

    /// Whether fetching a block from host memory costs less than computing it. A snapshot or a
    /// window stands for its whole prefix, and is kept always.
    fn worth_keeping(&mut self, plane: KvPlane) -> bool {
        if plane != KvPlane::Blocks {
            return true;
        }
        let (Some(back), Some(token)) = (self.tiers.from_host, self.swap_prices.recompute_token())
        else {
            return true;
        };
        let worth = back <= token * self.block_tokens;
        if !worth {
            self.tiers.lower_prices(PRICE_DECAY_PARTS[1]);
        }
        worth
    }

    pub(crate) fn offloaded(
        &mut self,
        context: &mut WorkerContext,
        content: BlockHash,
        outcome: OffloadOutcome,
        took: Duration,
    ) {
        let Some(copy) = self.tiers.offloading.remove(&content) else {
            return;
        };
        let pool = self.pools.plane_mut(copy.plane);
        pool.expect("the plane of the copy").unpin(copy.pin);
        let place = TierLevel::Host;
        for content in copy.contents {
            match outcome {
                OffloadOutcome::Copied => self.tiers.index.finish_copy(content, place),
                OffloadOutcome::Broken => self.tiers.index.abort_copy(content, place),
            }
        }
        context.note(WorkerNote::Offloaded {
            place,
            outcome,
            took,
        });
        self.write_on(context);
    }

    /// Writes contents of host memory to disk, the oldest first.
    fn write_on(&mut self, context: &mut WorkerContext) {
        while self.tiers.writing < WRITES_MAX
            && let Some(content) = self.tiers.index.next_unwritten()
        {
            let place = TierLevel::Disk;
            let Ok(dropped) = self
                .tiers
                .index
                .begin_copy(content, place, EvictableContents::Any)
            else {
                continue;
            };
            if let Some(content) = dropped {
                context.emit(WorkerOutput::TierDrop { content, place });
            }
            if self.tiers.writing == 0 {
                self.tiers.last_write_at = context.now();
            }
            self.tiers.writing += 1;
            context.emit(WorkerOutput::SpillToDisk { content });
        }
    }

    pub(crate) fn written_on(
        &mut self,
        context: &mut WorkerContext,
        content: BlockHash,
        outcome: OffloadOutcome,
        took: Duration,
    ) {
        self.tiers.writing -= 1;
        self.tiers.last_write_at = context.now();
        match outcome {
            OffloadOutcome::Copied => self.tiers.index.finish_copy(content, TierLevel::Disk),
            OffloadOutcome::Broken => self.tiers.index.abort_copy(content, TierLevel::Disk),
        }
        let place = TierLevel::Disk;
        context.note(WorkerNote::Offloaded {
            place,
            outcome,
            took,
        });
        self.write_on(context);
    }

    /// Registers the contents of an earlier incarnation on disk; drops those for which there is no
    /// room.
    pub(crate) fn found_on_disk(&mut self, context: &mut WorkerContext, contents: Vec<BlockHash>) {
        for content in contents {
            if !self.tiers.index.add_from_disk(content) {
                let place = TierLevel::Disk;
                context.emit(WorkerOutput::TierDrop { content, place });
            }
        }
    }

    // === reports and notes ===

    /// Contents gained and lost since the last call, over pool and tiers together.
    pub(crate) fn cache_changes(&mut self) -> (Vec<BlockHash>, Vec<BlockHash>) {
        let cleave_kv::PrefixChanges {
            mut stored,
            mut evicted,
        } = self.pools.take_changes();
        let (gained, lost) = self.tiers.index.take_changes();
        evicted.retain(|hash| self.tiers.index.level_of(*hash).is_none());
        let not_in_pool = |hash: &BlockHash| !self.pools.contains(*hash);
        evicted.extend(lost.into_iter().filter(not_in_pool));
        stored.extend(gained.into_iter().filter(not_in_pool));
        (stored, evicted)
    }

    /// All contents that can be reused.
    pub(crate) fn cache_contents(&self) -> Vec<BlockHash> {
        let below = self.tiers.index.contents();
        let below = below.filter(|hash| !self.pools.contains(*hash));
        self.pools.contents().chain(below).collect()
    }

    pub(crate) fn note_tiers(&mut self, context: &mut WorkerContext) {
        let blocks = |place| self.tiers.index.blocks_in(place);
        let blocks_now = (blocks(TierLevel::Host), blocks(TierLevel::Disk));
        if std::mem::replace(&mut self.tiers.last_noted, blocks_now) != blocks_now {
            let (host_blocks, disk_blocks) = blocks_now;
            context.note(WorkerNote::Tiers {
                host_blocks,
                disk_blocks,
            });
        }
    }

    /// Whether a block is being copied to a tier.
    pub(crate) fn is_offloading(&self) -> bool {
        !self.tiers.offloading.is_empty()
    }

    /// Blocks or slots being copied to a tier.
    pub(crate) fn offloading_count(&self, plane: KvPlane) -> u32 {
        self.tiers.offloading_count(plane)
    }

    /// The earliest time at which a fetch is stopped.
    pub(crate) fn fetch_end(&self) -> Option<Time> {
        self.tiers.fetch_deadlines.next()
    }

    /// Time left of each fetch.
    pub(crate) fn fetches(&self, now: Time) -> impl Iterator<Item = (HandoffId, Duration)> + '_ {
        let fetches = self.tiers.fetch_deadlines.iter();
        fetches.map(move |(handoff, until)| (handoff, until.since(now)))
    }

    /// Hashes the state of the tiers that decides the future.
    pub(crate) fn hash_tiers(&self, now: Time, hasher: &mut impl Hasher) {
        let older = |plane, touched| {
            let pool = self.pools.plane(plane);
            pool.map_or(0, |pool| pool.count_older(touched))
        };
        self.tiers.fingerprint(now, older, hasher);
    }

    /// Blocks that only a copy to a tier holds, and that will be cached once it ends.
    pub(super) fn blocks_pinned(&self) -> u64 {
        let alone = |pin: &ReadPin| self.pools.blocks.has_one_holder(pin.held);
        self.tiers.offloading(KvPlane::Blocks).filter(alone).count() as u64
    }

    /// Asserts this module's invariant.
    pub(super) fn check_tiers<'a>(
        &self,
        sequences: impl Iterator<Item = &'a WorkerSequence> + Clone,
    ) {
        let fetches = sequences.clone().filter_map(|s| s.kv.fetch);
        let readers = fetches.map(|fetch| u64::from(fetch.units())).sum();
        self.tiers.index.check(readers);
        let waits = |s: &WorkerSequence| s.kv.fetch.is_some_and(|fetch| !fetch.stopped);
        let waiting = sequences.clone().filter(|s| waits(s));
        self.tiers
            .fetch_deadlines
            .check(waiting.map(WorkerSequence::handoff));
        for sequence in sequences {
            let Some(fetch) = sequence.kv.fetch else {
                continue;
            };
            let stands = matches!(
                sequence.stage(),
                SequenceStage::Active | SequenceStage::Closing { .. }
            ) && sequence.slot().is_none()
                && !sequence.stepping()
                && sequence.kv.swap.is_none();
            assert!(
                stands,
                "a sequence with a fetch has a slot, a step or a swap: {sequence:?}"
            );
            let covered =
                sequence.kv.table.len() >= (sequence.kv.published + fetch.blocks) as usize;
            assert!(
                covered,
                "a fetch exceeds the sequence's blocks: {sequence:?}"
            );
        }
    }
}

#[cfg(test)]
mod tests {
    use super::fetch::TierMatch;
    use super::*;
    use crate::test_worker::limits;
    use cleave_domain::StateCapacity;
    use cleave_kv::snapshot_hash;

    #[test]
    fn a_snapshot_is_in_a_tier_once_all_its_pieces_are() {
        let snapshot = BlockHash([7; 16]);
        let mut capacity = limits().capacity;
        let (bytes, count) = (3 * capacity.block_bytes, 2);
        capacity.states = Some(StateCapacity { bytes, count });
        let mut tiers = OffloadTiers::new(8, 8, &capacity);
        let pieces: Vec<SnapshotPiece> = tiers.pieces(KvPlane::State, snapshot).collect();
        assert_eq!(pieces[0].content, snapshot);
        for (number, piece) in pieces.iter().enumerate() {
            assert_eq!(piece.ordinal as usize, number);
            assert!(!tiers.contains(KvPlane::State, snapshot));
            let any = EvictableContents::Any;
            let begun = tiers.index.begin_copy(piece.content, TierLevel::Host, any);
            assert_eq!(begun, Ok(None));
        }
        assert!(tiers.contains(KvPlane::State, snapshot));
        assert!(!tiers.contains(KvPlane::State, BlockHash([8; 16])));
    }

    #[test]
    fn a_prefix_with_its_state_is_found_on_disk() {
        let mut limits = limits();
        let (bytes, count) = (3 * limits.capacity.block_bytes, 2);
        limits.capacity.states = Some(StateCapacity { bytes, count });
        (limits.host_blocks, limits.disk_blocks) = (8, 8);
        let mut memory = KvMemory::new(&limits);
        let hashes = [1, 2, 3].map(|of| BlockHash([of; 16]));
        let snapshot = snapshot_hash(hashes[1]);
        let pieces = memory.tiers.pieces(KvPlane::State, snapshot);
        let contents: Vec<BlockHash> = pieces.map(|piece| piece.content).chain(hashes).collect();
        for content in contents {
            assert!(memory.tiers.index.add_from_disk(content));
        }
        let found = memory.prefix_with_rest(&hashes, 0);
        assert_eq!((found.adopted, found.blocks), (0, 2));
        let one = memory.prefix_with_rest(&hashes[..1], 0);
        assert_eq!(one, TierMatch::default());
        // All of them are on disk alone: three pieces and two blocks.
        memory.tiers.from_disk = Some(Duration::from_millis(1));
        assert_eq!(found.price(&memory.tiers), Some(Duration::from_millis(5)));
    }
}
