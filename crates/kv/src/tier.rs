//! What is kept below the pool: contents in host memory and on disk.
//!
//! Owns: which content is where, which one makes room for another, and who reads one.
//! Never: knows a block of the pool, a sequence or a price. Never drops what is being read or copied on.
//! Invariant: no place keeps more than it may, what is on its way there included; a content can be found
//! exactly if some place keeps it whole. [`Tier::check`] proves it.

use cleave_domain::BlockHash;
use serde::{Deserialize, Serialize};
use std::collections::BTreeMap;
use std::hash::{Hash, Hasher};

/// Where a content is kept.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
pub enum Place {
    /// In the host's memory; gone with the process.
    Host,
    /// In a file; found again by the next life.
    Disk,
}

/// Everything that a place has is being read or copied, or it may keep nothing.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct NoRoom;

/// Which contents may make room in host memory.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Gives {
    /// Those that are on disk too, or never will be.
    Written,
    /// All: the disk does not keep up.
    Any,
}

/// The book of both places.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Tier {
    host: Shelf,
    disk: Shelf,
    contents: BTreeMap<BlockHash, Content>,
    /// In host memory, not on disk, and not tried yet; the oldest first.
    unwritten: BTreeMap<u64, BlockHash>,
    /// Counts touches.
    clock: u64,
    /// Contents that can be found since it was last asked, or can no longer.
    changes: BTreeMap<BlockHash, Change>,
}

/// One place.
#[derive(Clone, Debug, PartialEq, Eq)]
struct Shelf {
    blocks_max: u32,
    /// What is there whole, the one untouched for longest first.
    by_age: BTreeMap<u64, BlockHash>,
    /// Copies that are on their way there.
    coming: u32,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct Content {
    touched: u64,
    host: Copied,
    disk: Copied,
    /// Who is bringing it back to the pool.
    readers: u32,
}

/// How far a copy has come.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
enum Copied {
    No,
    Coming,
    Whole,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
enum Change {
    Gained,
    Lost,
}

impl Content {
    fn at(&self, place: Place) -> Copied {
        match place {
            Place::Host => self.host,
            Place::Disk => self.disk,
        }
    }

    fn set(&mut self, place: Place, copied: Copied) {
        match place {
            Place::Host => self.host = copied,
            Place::Disk => self.disk = copied,
        }
    }

    fn found(&self) -> bool {
        self.host == Copied::Whole || self.disk == Copied::Whole
    }

    fn moves(&self) -> bool {
        self.host == Copied::Coming || self.disk == Copied::Coming
    }
}

impl Shelf {
    fn new(blocks_max: u32) -> Self {
        Self {
            blocks_max,
            by_age: BTreeMap::new(),
            coming: 0,
        }
    }

    fn blocks(&self) -> u32 {
        let whole = u32::try_from(self.by_age.len()).expect("no more than may be kept");
        whole + self.coming
    }
}

impl Tier {
    /// Keeps nothing yet, and so many blocks in each place at most.
    pub fn new(host_blocks_max: u32, disk_blocks_max: u32) -> Self {
        Self {
            host: Shelf::new(host_blocks_max),
            disk: Shelf::new(disk_blocks_max),
            contents: BTreeMap::new(),
            unwritten: BTreeMap::new(),
            clock: 0,
            changes: BTreeMap::new(),
        }
    }

    // === looking ===

    /// Where a content can be read, host memory first.
    pub fn place(&self, hash: BlockHash) -> Option<Place> {
        let content = self.contents.get(&hash)?;
        let places = [Place::Host, Place::Disk];
        let mut whole = places
            .into_iter()
            .filter(|place| content.at(*place) == Copied::Whole);
        whole.next()
    }

    /// Whether a content is here, or on its way.
    pub fn knows(&self, hash: BlockHash) -> bool {
        let content = self.contents.get(&hash);
        content.is_some_and(|content| content.found() || content.moves())
    }

    /// Blocks in a place, and on their way there.
    pub fn blocks_in(&self, place: Place) -> u32 {
        self.shelf(place).blocks()
    }

    /// The oldest content in host memory that was not yet to be written to disk.
    pub fn next_unwritten(&self) -> Option<BlockHash> {
        self.unwritten.first_key_value().map(|(_, hash)| *hash)
    }

    /// Every content that can be found.
    pub fn contents(&self) -> impl Iterator<Item = BlockHash> + '_ {
        let found = self.contents.iter().filter(|(_, content)| content.found());
        found.map(|(hash, _)| *hash)
    }

    // === copies ===

    /// A copy to a place begins; `gives` says what makes room in host memory. Gives what that place must drop
    /// for it, if anything.
    ///
    /// # Errors
    /// [`NoRoom`], and nothing has changed but that it is not offered to the disk again.
    pub fn begin(
        &mut self,
        hash: BlockHash,
        place: Place,
        gives: Gives,
    ) -> Result<Option<BlockHash>, NoRoom> {
        self.offered(hash);
        let full = self.shelf(place).blocks() >= self.shelf(place).blocks_max;
        let oldest = match full {
            true => Some(self.oldest_idle(place, gives).ok_or(NoRoom)?),
            false => None,
        };
        if let Some(oldest) = oldest {
            self.remove(oldest, place);
        }
        self.clock += 1;
        let content = self.contents.entry(hash).or_insert(Content {
            touched: self.clock,
            host: Copied::No,
            disk: Copied::No,
            readers: 0,
        });
        assert_eq!(content.at(place), Copied::No, "copied twice");
        content.set(place, Copied::Coming);
        self.shelf_mut(place).coming += 1;
        Ok(oldest)
    }

    /// The copy is there.
    pub fn kept(&mut self, hash: BlockHash, place: Place) {
        let found = self.is_found(hash);
        let content = self.coming(hash, place);
        content.set(place, Copied::Whole);
        let (touched, on_disk) = (content.touched, content.disk != Copied::No);
        self.shelf_mut(place).coming -= 1;
        self.shelf_mut(place).by_age.insert(touched, hash);
        if place == Place::Host && !on_disk && self.disk.blocks_max > 0 {
            self.unwritten.insert(touched, hash);
        }
        self.note(hash, found);
    }

    /// The copy came to nothing.
    pub fn failed(&mut self, hash: BlockHash, place: Place) {
        self.coming(hash, place).set(place, Copied::No);
        self.shelf_mut(place).coming -= 1;
        self.sweep(hash);
    }

    /// An earlier life left it on disk. False if there is no room for it, or it is known.
    pub fn found_on_disk(&mut self, hash: BlockHash) -> bool {
        let able = self.disk.blocks() < self.disk.blocks_max && !self.contents.contains_key(&hash);
        if able {
            let begun = self.begin(hash, Place::Disk, Gives::Any);
            assert_eq!(begun, Ok(None), "there is room");
            self.kept(hash, Place::Disk);
        }
        able
    }

    // === readers ===

    /// Somebody brings it back: it stays where it is until then, and is the youngest.
    pub fn read(&mut self, hash: BlockHash) {
        self.clock += 1;
        let clock = self.clock;
        let content = self.contents.get_mut(&hash);
        let content = content.expect("what is read can be found");
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

    /// Whoever read it has done so.
    pub fn read_over(&mut self, hash: BlockHash) {
        let content = self.contents.get_mut(&hash);
        content.expect("what is read stays known").readers -= 1;
        self.sweep(hash);
    }

    /// What is kept of a content is of no use. Gives the places that kept it.
    pub fn forget(&mut self, hash: BlockHash) -> Vec<Place> {
        let Some(content) = self.contents.get(&hash).copied() else {
            return Vec::new();
        };
        let whole = |place: &Place| content.at(*place) == Copied::Whole;
        let places = [Place::Host, Place::Disk].into_iter().filter(whole);
        let places: Vec<Place> = places.collect();
        for place in &places {
            self.remove(hash, *place);
        }
        places
    }

    /// Contents that can be found since it was last asked, and those that no longer can.
    pub fn changes(&mut self) -> (Vec<BlockHash>, Vec<BlockHash>) {
        let (mut gained, mut lost) = (Vec::new(), Vec::new());
        for (hash, change) in std::mem::take(&mut self.changes) {
            match change {
                Change::Gained => gained.push(hash),
                Change::Lost => lost.push(hash),
            }
        }
        (gained, lost)
    }

    /// Hashes what decides how it will behave; touches count by their order alone.
    pub fn fingerprint(&self, hasher: &mut impl Hasher) {
        for (hash, content) in &self.contents {
            (hash, content.host, content.disk, content.readers).hash(hasher);
        }
        for shelf in [&self.host, &self.disk] {
            shelf.coming.hash(hasher);
            shelf.by_age.values().for_each(|hash| hash.hash(hasher));
        }
        self.unwritten.values().for_each(|hash| hash.hash(hasher));
        self.changes.hash(hasher);
    }

    /// Asserts the invariant, and that there are so many readers. Walks everything: for tests.
    pub fn check(&self, readers: u64) {
        let mut counted = 0;
        let mut kept = [0_u32; 2];
        for (hash, content) in &self.contents {
            let stays = content.found() || content.moves() || content.readers > 0;
            assert!(stays, "nothing is left of {hash}");
            counted += u64::from(content.readers);
            for (place, kept) in [Place::Host, Place::Disk].into_iter().zip(&mut kept) {
                let named = self.shelf(place).by_age.get(&content.touched) == Some(hash);
                assert_eq!(named, content.at(place) == Copied::Whole, "{place:?}");
                *kept += u32::from(content.at(place) != Copied::No);
            }
        }
        for (place, kept) in [Place::Host, Place::Disk].into_iter().zip(kept) {
            let shelf = self.shelf(place);
            assert_eq!(shelf.blocks(), kept, "{place:?}");
            assert!(kept <= shelf.blocks_max, "too much in {place:?}");
        }
        for hash in self.unwritten.values() {
            let content = &self.contents[hash];
            assert_eq!((content.host, content.disk), (Copied::Whole, Copied::No));
        }
        assert_eq!(counted, readers, "readers");
    }

    // === inside ===

    fn shelf(&self, place: Place) -> &Shelf {
        match place {
            Place::Host => &self.host,
            Place::Disk => &self.disk,
        }
    }

    fn shelf_mut(&mut self, place: Place) -> &mut Shelf {
        match place {
            Place::Host => &mut self.host,
            Place::Disk => &mut self.disk,
        }
    }

    /// The oldest content of a place that nobody reads, there or on its way to the other place.
    fn oldest_idle(&self, place: Place, gives: Gives) -> Option<BlockHash> {
        let spared = |touched: &u64| {
            place == Place::Host && gives == Gives::Written && self.unwritten.contains_key(touched)
        };
        let idle = |hash: &&BlockHash| {
            let content = &self.contents[*hash];
            content.readers == 0 && !content.moves() && !spared(&content.touched)
        };
        self.shelf(place).by_age.values().find(idle).copied()
    }

    fn coming(&mut self, hash: BlockHash, place: Place) -> &mut Content {
        let content = self.contents.get_mut(&hash).expect("what comes is known");
        assert_eq!(content.at(place), Copied::Coming, "nothing was to come");
        content
    }

    /// Takes a whole copy from a place.
    fn remove(&mut self, hash: BlockHash, place: Place) {
        let found = self.is_found(hash);
        let content = self.contents.get_mut(&hash).expect("what is kept is known");
        content.set(place, Copied::No);
        let touched = content.touched;
        self.shelf_mut(place).by_age.remove(&touched);
        if place == Place::Host {
            self.unwritten.remove(&touched);
        }
        self.note(hash, found);
        self.sweep(hash);
    }

    /// It is not offered to the disk again.
    fn offered(&mut self, hash: BlockHash) {
        if let Some(content) = self.contents.get(&hash) {
            self.unwritten.remove(&content.touched);
        }
    }

    fn sweep(&mut self, hash: BlockHash) {
        let left = |content: &Content| content.found() || content.moves() || content.readers > 0;
        if self
            .contents
            .get(&hash)
            .is_some_and(|content| !left(content))
        {
            self.contents.remove(&hash);
        }
    }

    fn is_found(&self, hash: BlockHash) -> bool {
        self.contents.get(&hash).is_some_and(Content::found)
    }

    /// Opposite changes between two questions cancel out.
    fn note(&mut self, hash: BlockHash, before: bool) {
        let change = match (before, self.is_found(hash)) {
            (false, true) => Change::Gained,
            (true, false) => Change::Lost,
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
    use super::{Gives, NoRoom, Place, Tier};
    use cleave_domain::BlockHash;
    use proptest::prelude::*;

    fn hash(of: u8) -> BlockHash {
        BlockHash([of; 16])
    }

    fn keep(tier: &mut Tier, of: u8, place: Place) -> Result<Option<BlockHash>, NoRoom> {
        let dropped = tier.begin(hash(of), place, Gives::Any)?;
        tier.kept(hash(of), place);
        Ok(dropped)
    }

    #[test]
    fn the_content_untouched_for_longest_makes_room() {
        let mut tier = Tier::new(2, 0);
        assert_eq!(keep(&mut tier, 1, Place::Host), Ok(None));
        assert_eq!(keep(&mut tier, 2, Place::Host), Ok(None));
        tier.read(hash(1));
        tier.read_over(hash(1));
        assert_eq!(keep(&mut tier, 3, Place::Host), Ok(Some(hash(2))));
        assert_eq!(tier.changes(), (vec![hash(1), hash(3)], vec![]));
        assert_eq!(tier.contents().collect::<Vec<_>>(), [hash(1), hash(3)]);
        assert_eq!(tier.next_unwritten(), None, "there is no disk");
        tier.check(0);
    }

    #[test]
    fn what_is_read_or_written_on_makes_no_room() {
        let mut tier = Tier::new(2, 2);
        keep(&mut tier, 1, Place::Host).unwrap();
        keep(&mut tier, 2, Place::Host).unwrap();
        tier.read(hash(2));
        assert_eq!(tier.next_unwritten(), Some(hash(1)));
        let begin = |tier: &mut Tier, of, place| tier.begin(hash(of), place, Gives::Any);
        assert_eq!(begin(&mut tier, 1, Place::Disk), Ok(None));
        assert_eq!(begin(&mut tier, 3, Place::Host), Err(NoRoom));
        tier.check(1);
        tier.kept(hash(1), Place::Disk);
        assert_eq!(keep(&mut tier, 3, Place::Host), Ok(Some(hash(1))));
        assert_eq!(tier.place(hash(1)), Some(Place::Disk), "it is on disk");
        tier.read_over(hash(2));
        tier.check(0);
        // What the disk has yet to get is spared while that keeps up.
        let spared = tier.begin(hash(4), Place::Host, Gives::Written);
        assert_eq!(spared, Err(NoRoom));
        assert!(tier.begin(hash(4), Place::Host, Gives::Any).is_ok());
        tier.check(0);
    }

    #[test]
    fn what_failed_or_was_forgotten_is_not_found() {
        let mut tier = Tier::new(2, 2);
        tier.begin(hash(1), Place::Host, Gives::Any).unwrap();
        assert!(tier.knows(hash(1)) && tier.place(hash(1)).is_none());
        tier.failed(hash(1), Place::Host);
        assert!(!tier.knows(hash(1)));
        keep(&mut tier, 2, Place::Host).unwrap();
        tier.begin(hash(2), Place::Disk, Gives::Any).unwrap();
        tier.failed(hash(2), Place::Disk);
        assert_eq!(tier.next_unwritten(), None, "it is tried once");
        tier.read(hash(2));
        assert_eq!(tier.forget(hash(2)), [Place::Host]);
        assert!(!tier.knows(hash(2)));
        tier.check(1);
        tier.read_over(hash(2));
        tier.check(0);
        assert_eq!(tier.changes(), (vec![], vec![]));
        assert!(tier.found_on_disk(hash(3)) && tier.found_on_disk(hash(4)));
        assert!(!tier.found_on_disk(hash(5)), "there is no room");
        assert!(!tier.found_on_disk(hash(3)), "it is there");
    }

    proptest! {
        /// Whatever is asked in whatever order, the book's two directions agree and no place overflows.
        #[test]
        fn no_order_of_things_breaks_the_book(
            sizes in (0..4_u32, 0..4_u32),
            acts in prop::collection::vec((0..7_u8, 0..6_u8, any::<bool>()), 0..200),
        ) {
            let mut tier = Tier::new(sizes.0, sizes.1);
            let mut coming = Vec::new();
            let mut reading = Vec::new();
            for (act, of, on_disk) in acts {
                let hash = hash(of);
                match act {
                    0 | 1 if !tier.knows(hash) => {
                        let place = Place::Host;
                        let gives = if on_disk { Gives::Written } else { Gives::Any };
                        let begun = tier.begin(hash, place, gives).is_ok();
                        coming.extend(begun.then_some((hash, place)));
                    }
                    2 => if let Some(next) = tier.next_unwritten() {
                        let begun = tier.begin(next, Place::Disk, Gives::Any).is_ok();
                        coming.extend(begun.then_some((next, Place::Disk)));
                    },
                    3 if !coming.is_empty() => {
                        let (hash, place) = coming.remove(usize::from(of) % coming.len());
                        match on_disk {
                            true => tier.kept(hash, place),
                            false => tier.failed(hash, place),
                        }
                    }
                    4 if tier.place(hash).is_some() => {
                        tier.read(hash);
                        reading.push(hash);
                    }
                    5 if !reading.is_empty() => {
                        tier.read_over(reading.remove(usize::from(of) % reading.len()));
                    }
                    6 => drop(tier.forget(hash)),
                    _ => {}
                }
                tier.check(reading.len() as u64);
            }
        }
    }
}
