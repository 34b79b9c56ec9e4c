//! The index of the tiers below the pool: contents in host memory and on disk.
//!
//! Owns: the tier of each content, the choice of the content to drop for another, and the readers
//! of each.
//! Never: knows a block of the pool, a sequence or a price. Never drops a content that is being
//! read or copied.
//! Invariant: no tier keeps more than its limit, copies in progress included; a content can be
//! found exactly if some tier has a complete copy. [`TierIndex::check`] proves it.

use cleave_domain::BlockHash;
use serde::{Deserialize, Serialize};
use std::collections::BTreeMap;
use std::hash::{Hash, Hasher};

/// A tier that keeps contents.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
pub enum TierLevel {
    /// Host memory; lost with the process.
    Host,
    /// A file; found again by the next incarnation.
    Disk,
}

/// Every content of the tier is being read or copied, or its limit is 0.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct NoTierRoom;

/// The contents that may be dropped from host memory for another.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum EvictableContents {
    /// Contents that are on disk too, or never will be.
    WrittenOnly,
    /// All contents: the disk is too slow to write them first.
    Any,
}

/// The index of both tiers.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct TierIndex {
    host: TierLevelState,
    disk: TierLevelState,
    contents: BTreeMap<BlockHash, TierContent>,
    /// Contents in host memory that are not on disk and were not offered to it; the oldest first.
    unwritten: BTreeMap<u64, BlockHash>,
    /// Counts touches; orders contents by last use.
    clock: u64,
    /// Changes since the last call of [`TierIndex::changes`].
    changes: BTreeMap<BlockHash, TierChange>,
}

/// The state of one tier.
#[derive(Clone, Debug, PartialEq, Eq)]
struct TierLevelState {
    blocks_max: u32,
    /// Complete contents, the least recently used first.
    by_age: BTreeMap<u64, BlockHash>,
    /// The number of copies in progress to this tier.
    copies_in_progress: u32,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct TierContent {
    touched: u64,
    host: CopyState,
    disk: CopyState,
    /// The number of loads into the pool that read it.
    readers: u32,
}

/// The progress of a copy.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
enum CopyState {
    Absent,
    InProgress,
    Complete,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
enum TierChange {
    Gained,
    Lost,
}

impl TierContent {
    fn state_at(&self, place: TierLevel) -> CopyState {
        match place {
            TierLevel::Host => self.host,
            TierLevel::Disk => self.disk,
        }
    }

    fn set(&mut self, place: TierLevel, copied: CopyState) {
        match place {
            TierLevel::Host => self.host = copied,
            TierLevel::Disk => self.disk = copied,
        }
    }

    fn is_found(&self) -> bool {
        self.host == CopyState::Complete || self.disk == CopyState::Complete
    }

    fn is_being_copied(&self) -> bool {
        self.host == CopyState::InProgress || self.disk == CopyState::InProgress
    }
}

impl TierLevelState {
    fn new(blocks_max: u32) -> Self {
        Self {
            blocks_max,
            by_age: BTreeMap::new(),
            copies_in_progress: 0,
        }
    }

    fn blocks(&self) -> u32 {
        let whole = u32::try_from(self.by_age.len()).expect("no more than may be kept");
        whole + self.copies_in_progress
    }
}

impl TierIndex {
    /// Creates an empty index with these limits in blocks.
    pub fn new(host_blocks_max: u32, disk_blocks_max: u32) -> Self {
        Self {
            host: TierLevelState::new(host_blocks_max),
            disk: TierLevelState::new(disk_blocks_max),
            contents: BTreeMap::new(),
            unwritten: BTreeMap::new(),
            clock: 0,
            changes: BTreeMap::new(),
        }
    }

    // === looking ===

    /// The tier from which a content is read, host memory first.
    pub fn level_of(&self, hash: BlockHash) -> Option<TierLevel> {
        let content = self.contents.get(&hash)?;
        let places = [TierLevel::Host, TierLevel::Disk];
        let mut whole = places
            .into_iter()
            .filter(|place| content.state_at(*place) == CopyState::Complete);
        whole.next()
    }

    /// Whether a content is in a tier, or being copied to one.
    pub fn contains(&self, hash: BlockHash) -> bool {
        let content = self.contents.get(&hash);
        content.is_some_and(|content| content.is_found() || content.is_being_copied())
    }

    /// The number of blocks in a tier, copies in progress included.
    pub fn blocks_in(&self, place: TierLevel) -> u32 {
        self.level(place).blocks()
    }

    /// The oldest content in host memory that was not yet offered to the disk.
    pub fn next_unwritten(&self) -> Option<BlockHash> {
        self.unwritten.first_key_value().map(|(_, hash)| *hash)
    }

    /// All contents that can be found.
    pub fn contents(&self) -> impl Iterator<Item = BlockHash> + '_ {
        let found = self
            .contents
            .iter()
            .filter(|(_, content)| content.is_found());
        found.map(|(hash, _)| *hash)
    }

    // === copies ===

    /// Begins a copy to a tier; `evictable` limits the contents that may be dropped for it from
    /// host memory. Returns the content that the tier must drop, if any.
    ///
    /// # Errors
    /// [`NoTierRoom`]; then nothing has changed, except that the content is not offered to the disk
    /// again.
    pub fn begin_copy(
        &mut self,
        hash: BlockHash,
        place: TierLevel,
        evictable: EvictableContents,
    ) -> Result<Option<BlockHash>, NoTierRoom> {
        self.remove_from_unwritten(hash);
        let full = self.level(place).blocks() >= self.level(place).blocks_max;
        let oldest = if full {
            Some(self.oldest_idle(place, evictable).ok_or(NoTierRoom)?)
        } else {
            None
        };
        if let Some(oldest) = oldest {
            self.remove(oldest, place);
        }
        self.clock += 1;
        let content = self.contents.entry(hash).or_insert(TierContent {
            touched: self.clock,
            host: CopyState::Absent,
            disk: CopyState::Absent,
            readers: 0,
        });
        assert_eq!(content.state_at(place), CopyState::Absent, "copied twice");
        content.set(place, CopyState::InProgress);
        self.level_mut(place).copies_in_progress += 1;
        Ok(oldest)
    }

    /// Records a copy that succeeded.
    pub fn finish_copy(&mut self, hash: BlockHash, place: TierLevel) {
        let found = self.is_found(hash);
        let content = self.copy_in_progress(hash, place);
        content.set(place, CopyState::Complete);
        let (touched, on_disk) = (content.touched, content.disk != CopyState::Absent);
        self.level_mut(place).copies_in_progress -= 1;
        self.level_mut(place).by_age.insert(touched, hash);
        if place == TierLevel::Host && !on_disk && self.disk.blocks_max > 0 {
            self.unwritten.insert(touched, hash);
        }
        self.record_change(hash, found);
    }

    /// Records a failed copy.
    pub fn abort_copy(&mut self, hash: BlockHash, place: TierLevel) {
        self.copy_in_progress(hash, place)
            .set(place, CopyState::Absent);
        self.level_mut(place).copies_in_progress -= 1;
        self.remove_if_unused(hash);
    }

    /// Adds a content that an earlier incarnation left on disk. `false` if there is no room for it,
    /// or it is known.
    pub fn add_from_disk(&mut self, hash: BlockHash) -> bool {
        let able = self.disk.blocks() < self.disk.blocks_max && !self.contents.contains_key(&hash);
        if able {
            let begun = self.begin_copy(hash, TierLevel::Disk, EvictableContents::Any);
            assert_eq!(begun, Ok(None), "there is room");
            self.finish_copy(hash, TierLevel::Disk);
        }
        able
    }

    // === readers ===

    /// Begins a read: the content stays until the read ends, and becomes the most recently used.
    pub fn begin_read(&mut self, hash: BlockHash) {
        self.clock += 1;
        let clock = self.clock;
        let content = self.contents.get_mut(&hash);
        let content = content.expect("only contents that can be found are read");
        content.readers += 1;
        let before = std::mem::replace(&mut content.touched, clock);
        let tables = [
            &mut self.host.by_age,
            &mut self.disk.by_age,
            &mut self.unwritten,
        ];
        for table in tables {
            if table.remove(&before).is_some() {
                table.insert(clock, hash);
            }
        }
    }

    /// Ends a read, and removes the content if no tier has it any more.
    pub fn end_read(&mut self, hash: BlockHash) {
        let content = self.contents.get_mut(&hash);
        content
            .expect("a content stays in the index while it is read")
            .readers -= 1;
        self.remove_if_unused(hash);
    }

    /// Removes a content that is unusable from all tiers. Returns the tiers that had it.
    pub fn forget(&mut self, hash: BlockHash) -> Vec<TierLevel> {
        let Some(content) = self.contents.get(&hash).copied() else {
            return Vec::new();
        };
        let whole = |place: &TierLevel| content.state_at(*place) == CopyState::Complete;
        let places = [TierLevel::Host, TierLevel::Disk].into_iter().filter(whole);
        let places: Vec<TierLevel> = places.collect();
        for place in &places {
            self.remove(hash, *place);
        }
        places
    }

    /// The contents that became available since the last call, and those that became unavailable.
    pub fn take_changes(&mut self) -> (Vec<BlockHash>, Vec<BlockHash>) {
        let (mut gained, mut lost) = (Vec::new(), Vec::new());
        for (hash, change) in std::mem::take(&mut self.changes) {
            match change {
                TierChange::Gained => gained.push(hash),
                TierChange::Lost => lost.push(hash),
            }
        }
        (gained, lost)
    }

    /// Hashes the state that decides the behaviour; touches count by their order alone.
    pub fn fingerprint(&self, hasher: &mut impl Hasher) {
        for (hash, content) in &self.contents {
            (hash, content.host, content.disk, content.readers).hash(hasher);
        }
        for level in [&self.host, &self.disk] {
            level.copies_in_progress.hash(hasher);
            level.by_age.values().for_each(|hash| hash.hash(hasher));
        }
        self.unwritten.values().for_each(|hash| hash.hash(hasher));
        self.changes.hash(hasher);
    }

    /// Asserts the invariant, and the number of readers. Walks everything: for tests.
    pub fn check(&self, readers: u64) {
        let mut counted = 0;
        let mut copies = [0_u32; 2];
        for (hash, content) in &self.contents {
            let in_use = content.is_found() || content.is_being_copied() || content.readers > 0;
            assert!(in_use, "nothing is left of {hash}");
            counted += u64::from(content.readers);
            for (place, copies) in [TierLevel::Host, TierLevel::Disk]
                .into_iter()
                .zip(&mut copies)
            {
                let named = self.level(place).by_age.get(&content.touched) == Some(hash);
                assert_eq!(
                    named,
                    content.state_at(place) == CopyState::Complete,
                    "{place:?}"
                );
                *copies += u32::from(content.state_at(place) != CopyState::Absent);
            }
        }
        for (place, copies) in [TierLevel::Host, TierLevel::Disk].into_iter().zip(copies) {
            let level = self.level(place);
            assert_eq!(level.blocks(), copies, "{place:?}");
            assert!(copies <= level.blocks_max, "too much in {place:?}");
        }
        for hash in self.unwritten.values() {
            let content = &self.contents[hash];
            assert_eq!(
                (content.host, content.disk),
                (CopyState::Complete, CopyState::Absent)
            );
        }
        assert_eq!(counted, readers, "readers");
    }

    // === inside ===

    fn level(&self, place: TierLevel) -> &TierLevelState {
        match place {
            TierLevel::Host => &self.host,
            TierLevel::Disk => &self.disk,
        }
    }

    fn level_mut(&mut self, place: TierLevel) -> &mut TierLevelState {
        match place {
            TierLevel::Host => &mut self.host,
            TierLevel::Disk => &mut self.disk,
        }
    }

    /// The oldest content of a tier that is neither read nor copied to the other tier.
    fn oldest_idle(&self, place: TierLevel, evictable: EvictableContents) -> Option<BlockHash> {
        let spared = |touched: &u64| {
            place == TierLevel::Host
                && evictable == EvictableContents::WrittenOnly
                && self.unwritten.contains_key(touched)
        };
        let idle = |hash: &&BlockHash| {
            let content = &self.contents[*hash];
            content.readers == 0 && !content.is_being_copied() && !spared(&content.touched)
        };
        self.level(place).by_age.values().find(idle).copied()
    }

    fn copy_in_progress(&mut self, hash: BlockHash, place: TierLevel) -> &mut TierContent {
        let content = self
            .contents
            .get_mut(&hash)
            .expect("a content stays in the index while it is copied");
        assert_eq!(
            content.state_at(place),
            CopyState::InProgress,
            "no copy to this tier is in progress"
        );
        content
    }

    /// Removes a complete copy from a tier.
    fn remove(&mut self, hash: BlockHash, place: TierLevel) {
        let found = self.is_found(hash);
        let content = self
            .contents
            .get_mut(&hash)
            .expect("only contents in the index are removed");
        content.set(place, CopyState::Absent);
        let touched = content.touched;
        self.level_mut(place).by_age.remove(&touched);
        if place == TierLevel::Host {
            self.unwritten.remove(&touched);
        }
        self.record_change(hash, found);
        self.remove_if_unused(hash);
    }

    /// Marks a content so that it is not offered to the disk again.
    fn remove_from_unwritten(&mut self, hash: BlockHash) {
        if let Some(content) = self.contents.get(&hash) {
            self.unwritten.remove(&content.touched);
        }
    }

    fn remove_if_unused(&mut self, hash: BlockHash) {
        let left = |content: &TierContent| {
            content.is_found() || content.is_being_copied() || content.readers > 0
        };
        if self
            .contents
            .get(&hash)
            .is_some_and(|content| !left(content))
        {
            self.contents.remove(&hash);
        }
    }

    fn is_found(&self, hash: BlockHash) -> bool {
        self.contents.get(&hash).is_some_and(TierContent::is_found)
    }

    /// Opposite changes between two calls of [`TierIndex::changes`] cancel out.
    fn record_change(&mut self, hash: BlockHash, before: bool) {
        let change = match (before, self.is_found(hash)) {
            (false, true) => TierChange::Gained,
            (true, false) => TierChange::Lost,
            _ => return,
        };
        match self.changes.get(&hash) {
            Some(earlier) if *earlier != change => self.changes.remove(&hash),
            _ => self.changes.insert(hash, change),
        };
    }
}

#[cfg(test)]
mod tests {
    use super::{EvictableContents, NoTierRoom, TierIndex, TierLevel};
    use cleave_domain::BlockHash;
    use proptest::prelude::*;

    fn hash(of: u8) -> BlockHash {
        BlockHash([of; 16])
    }

    fn copy_to(
        tier: &mut TierIndex,
        of: u8,
        place: TierLevel,
    ) -> Result<Option<BlockHash>, NoTierRoom> {
        let dropped = tier.begin_copy(hash(of), place, EvictableContents::Any)?;
        tier.finish_copy(hash(of), place);
        Ok(dropped)
    }

    #[test]
    fn the_least_recently_used_content_is_dropped() {
        let mut tier = TierIndex::new(2, 0);
        assert_eq!(copy_to(&mut tier, 1, TierLevel::Host), Ok(None));
        assert_eq!(copy_to(&mut tier, 2, TierLevel::Host), Ok(None));
        tier.begin_read(hash(1));
        tier.end_read(hash(1));
        assert_eq!(copy_to(&mut tier, 3, TierLevel::Host), Ok(Some(hash(2))));
        assert_eq!(tier.take_changes(), (vec![hash(1), hash(3)], vec![]));
        assert_eq!(tier.contents().collect::<Vec<_>>(), [hash(1), hash(3)]);
        assert_eq!(tier.next_unwritten(), None, "there is no disk");
        tier.check(0);
    }

    #[test]
    fn contents_in_use_are_not_dropped() {
        let mut tier = TierIndex::new(2, 2);
        copy_to(&mut tier, 1, TierLevel::Host).unwrap();
        copy_to(&mut tier, 2, TierLevel::Host).unwrap();
        tier.begin_read(hash(2));
        assert_eq!(tier.next_unwritten(), Some(hash(1)));
        let begin = |tier: &mut TierIndex, of, place| {
            tier.begin_copy(hash(of), place, EvictableContents::Any)
        };
        assert_eq!(begin(&mut tier, 1, TierLevel::Disk), Ok(None));
        assert_eq!(begin(&mut tier, 3, TierLevel::Host), Err(NoTierRoom));
        tier.check(1);
        tier.finish_copy(hash(1), TierLevel::Disk);
        assert_eq!(copy_to(&mut tier, 3, TierLevel::Host), Ok(Some(hash(1))));
        assert_eq!(
            tier.level_of(hash(1)),
            Some(TierLevel::Disk),
            "it is on disk"
        );
        tier.end_read(hash(2));
        tier.check(0);
        // Contents that are not on disk yet are spared while the disk keeps up.
        let spared = tier.begin_copy(hash(4), TierLevel::Host, EvictableContents::WrittenOnly);
        assert_eq!(spared, Err(NoTierRoom));
        assert!(
            tier.begin_copy(hash(4), TierLevel::Host, EvictableContents::Any)
                .is_ok()
        );
        tier.check(0);
    }

    #[test]
    fn failed_and_forgotten_contents_are_not_found() {
        let mut tier = TierIndex::new(2, 2);
        tier.begin_copy(hash(1), TierLevel::Host, EvictableContents::Any)
            .unwrap();
        assert!(tier.contains(hash(1)) && tier.level_of(hash(1)).is_none());
        tier.abort_copy(hash(1), TierLevel::Host);
        assert!(!tier.contains(hash(1)));
        copy_to(&mut tier, 2, TierLevel::Host).unwrap();
        tier.begin_copy(hash(2), TierLevel::Disk, EvictableContents::Any)
            .unwrap();
        tier.abort_copy(hash(2), TierLevel::Disk);
        assert_eq!(tier.next_unwritten(), None, "it is tried once");
        tier.begin_read(hash(2));
        assert_eq!(tier.forget(hash(2)), [TierLevel::Host]);
        assert!(!tier.contains(hash(2)));
        tier.check(1);
        tier.end_read(hash(2));
        tier.check(0);
        assert_eq!(tier.take_changes(), (vec![], vec![]));
        assert!(tier.add_from_disk(hash(3)) && tier.add_from_disk(hash(4)));
        assert!(!tier.add_from_disk(hash(5)), "there is no room");
        assert!(!tier.add_from_disk(hash(3)), "it is there");
    }

    proptest! {
            /// After any series of operations the index is consistent and no tier exceeds its
            /// limit.
            #[test]
            fn any_order_of_operations_keeps_the_index_consistent(
                sizes in (0..4_u32, 0..4_u32),
                acts in prop::collection::vec((0..7_u8, 0..6_u8, any::<bool>()), 0..200),
            ) {
                let mut tier = TierIndex::new(sizes.0, sizes.1);
                let mut coming = Vec::new();
                let mut reading = Vec::new();
                for (act, of, on_disk) in acts {
                    let hash = hash(of);
                    match act {
                        0 | 1 if !tier.contains(hash) => {
                            let place = TierLevel::Host;
                            let evictable = if on_disk { EvictableContents::WrittenOnly } else { EvictableContents::Any };
                            let begun = tier.begin_copy(hash, place, evictable).is_ok();
                            coming.extend(begun.then_some((hash, place)));
                        }
                        2 => if let Some(next) = tier.next_unwritten() {
                            let begun = tier.begin_copy(next, TierLevel::Disk, EvictableContents::Any).is_ok();
                            coming.extend(begun.then_some((next, TierLevel::Disk)));
                        },
                        3 if !coming.is_empty() => {
                            let (hash, place) = coming.remove(usize::from(of) % coming.len());
                            if on_disk {
    tier.finish_copy(hash, place)
    } else {
    tier.abort_copy(hash, place)
    }
                        }
                        4 if tier.level_of(hash).is_some() => {
                            tier.begin_read(hash);
                            reading.push(hash);
                        }
                        5 if !reading.is_empty() => {
                            tier.end_read(reading.remove(usize::from(of) % reading.len()));
                        }
                        6 => drop(tier.forget(hash)),
                        _ => {}
                    }
                    tier.check(reading.len() as u64);
                }
            }
        }
}
