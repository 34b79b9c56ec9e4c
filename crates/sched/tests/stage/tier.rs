//! What a machine keeps below its pool: in host memory, and on disk, which outlives it.
//!
//! Owns: the copies out and back. Never: forgives a block that was given away while it was read or
//! written, or a content asked for that was dropped.

use super::{
    BlockHash, BlockIndex, Duration, Fate, FetchOutcome, HandoffId, Input, KeepOutcome, Pending,
    Place, World, whole,
};
use std::collections::BTreeMap;

type Kept = BTreeMap<(BlockHash, Place), Vec<u64>>;

fn count(kept: &Kept, place: Place) -> usize {
    kept.keys().filter(|(_, at)| *at == place).count()
}

/// Disks are slower, and some of what is on one is read after a long while only.
fn takes(content: BlockHash, place: Place) -> Duration {
    match place {
        Place::Host => Duration::from_millis(1),
        Place::Disk if content.0[1].is_multiple_of(8) => Duration::from_millis(400),
        Place::Disk => Duration::from_millis(5),
    }
}

impl World {
    pub fn shelve(&mut self, at: usize, content: BlockHash, block: BlockIndex) {
        let cells = self.machines[at].engine.read(block, whole(0));
        self.later(
            Duration::from_millis(2),
            Pending::Shelve {
                at,
                content,
                block,
                cells,
            },
        );
    }

    pub fn fetch(&mut self, at: usize, handoff: HandoffId, blocks: Vec<(BlockHash, BlockIndex)>) {
        let kept = &self.machines[at].kept;
        let place = |content: &BlockHash| match kept.contains_key(&(*content, Place::Host)) {
            true => Place::Host,
            false => Place::Disk,
        };
        let took = blocks
            .iter()
            .map(|(content, _)| takes(*content, place(content)));
        let work: Duration = took.sum();
        self.later(
            work,
            Pending::Fetch {
                at,
                handoff,
                blocks,
                since: self.now,
                work,
            },
        );
    }

    /// It is answered when it would have been.
    pub fn stop_fetch(&mut self, at: usize, of: HandoffId) {
        assert!(self.stopped.insert((at, of)), "stopped twice");
    }

    pub fn drop_kept(&mut self, at: usize, content: BlockHash, place: Place) {
        let dropped = self.machines[at].kept.remove(&(content, place));
        assert!(dropped.is_some(), "{content} is not kept in {place:?}");
    }

    pub fn perform_shelve(&mut self, at: usize, what: Pending, fate: Fate) {
        let Pending::Shelve {
            content,
            block,
            cells,
            ..
        } = what
        else {
            panic!("a copy out")
        };
        let machine = &mut self.machines[at];
        let now = machine.engine.read(block, whole(0));
        assert_eq!(now, cells, "given away while it was to be copied out");
        let outcome = match fate {
            Fate::Damaged => KeepOutcome::Broken,
            Fate::Well => {
                let before = machine.kept.insert((content, Place::Host), cells);
                assert_eq!(before, None, "kept twice");
                KeepOutcome::Copied
            }
        };
        let most = machine.brain.limits().host_blocks as usize;
        assert!(count(&machine.kept, Place::Host) <= most, "host memory");
        let took = takes(content, Place::Host);
        self.feed(
            at,
            Input::Shelved {
                content,
                outcome,
                took,
            },
        );
    }

    pub fn perform_write_on(&mut self, at: usize, content: BlockHash, fate: Fate) {
        let machine = &mut self.machines[at];
        let cells = machine.kept.get(&(content, Place::Host)).cloned();
        let outcome = match (fate, cells) {
            (Fate::Well, Some(cells)) => {
                machine.kept.insert((content, Place::Disk), cells);
                KeepOutcome::Copied
            }
            // It was found to be damaged meanwhile, or the disk is full.
            _ => KeepOutcome::Broken,
        };
        let most = machine.brain.limits().disk_blocks as usize;
        assert!(count(&machine.kept, Place::Disk) <= most, "disk");
        let took = takes(content, Place::Disk);
        self.feed(
            at,
            Input::WrittenOn {
                content,
                outcome,
                took,
            },
        );
    }

    pub fn perform_fetch(&mut self, at: usize, what: Pending, fate: Fate) {
        let Pending::Fetch {
            handoff,
            blocks,
            since,
            work,
            ..
        } = what
        else {
            panic!("a fetch")
        };
        let stopped = self.stopped.remove(&(at, handoff));
        let half = blocks.len() / 2;
        let (came, outcome) = match (stopped, fate) {
            (true, _) => (half, FetchOutcome::Stopped),
            (false, Fate::Well) => (blocks.len(), FetchOutcome::Copied),
            (false, Fate::Damaged) => match blocks[half].0.0[0] % 4 {
                0 => (half, FetchOutcome::Missing),
                1 => (half, FetchOutcome::Corrupt),
                2 => (half, FetchOutcome::Unreadable),
                _ => (half, FetchOutcome::Broken),
            },
        };
        let machine = &mut self.machines[at];
        for (content, block) in &blocks[..came] {
            let places = [Place::Host, Place::Disk].into_iter();
            let mut found = places.filter_map(|place| machine.kept.get(&(*content, place)));
            let cells = found.next();
            let cells = cells.expect("what is brought back was not dropped");
            machine.engine.write(*block, whole(0), &cells.clone());
        }
        let took = self.now.since(since);
        // A fetch that was told to stop did nothing else until then; others may have waited for steps.
        let worked = if stopped { took } else { took.min(work) };
        let came = u32::try_from(came).expect("few");
        self.feed(
            at,
            Input::Fetched {
                handoff,
                came,
                outcome,
                took,
                worked,
            },
        );
    }

    /// What outlives a machine.
    pub fn on_disk(&self, at: usize) -> Kept {
        let kept = self.machines[at].kept.iter();
        let on_disk = kept.filter(|((_, place), _)| *place == Place::Disk);
        on_disk.map(|(key, cells)| (*key, cells.clone())).collect()
    }
}
