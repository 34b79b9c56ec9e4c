//! A machine's tiers: host memory, and the disk, which outlives the machine.
//!
//! Owns: the copies out and back. Never: accepts that a block was given away while it was read or
//! written, or that a dropped content is fetched.

use super::{
    BlockHash, BlockIndex, Duration, FetchOutcome, HandoffId, OffloadOutcome, StageEvent,
    StageEventOutcome, StageWorld, TierLevel, WorkerInput, whole,
};
use std::collections::BTreeMap;

type StoredBlocks = BTreeMap<(BlockHash, TierLevel), Vec<u64>>;

fn count(in_tiers: &StoredBlocks, place: TierLevel) -> usize {
    in_tiers.keys().filter(|(_, at)| *at == place).count()
}

/// Disks are slower, and some of their contents take very long to read.
fn takes(content: BlockHash, place: TierLevel) -> Duration {
    match place {
        TierLevel::Host => Duration::from_millis(1),
        TierLevel::Disk if content.0[1].is_multiple_of(8) => Duration::from_millis(400),
        TierLevel::Disk => Duration::from_millis(5),
    }
}

impl StageWorld {
    pub fn offload(&mut self, at: usize, content: BlockHash, block: BlockIndex) {
        let cells = self.machines[at].engine.read(block, whole(0));
        self.later(
            Duration::from_millis(2),
            StageEvent::Offload {
                at,
                content,
                block,
                cells,
            },
        );
    }

    pub fn fetch(&mut self, at: usize, handoff: HandoffId, blocks: Vec<(BlockHash, BlockIndex)>) {
        let in_tiers = &self.machines[at].in_tiers;
        let place = |content: &BlockHash| {
            if in_tiers.contains_key(&(*content, TierLevel::Host)) {
                TierLevel::Host
            } else {
                TierLevel::Disk
            }
        };
        let took = blocks
            .iter()
            .map(|(content, _)| takes(*content, place(content)));
        let work: Duration = took.sum();
        self.later(
            work,
            StageEvent::Fetch {
                at,
                handoff,
                blocks,
                since: self.now,
                work,
            },
        );
    }

    /// The fetch is still answered at its time.
    pub fn stop_fetch(&mut self, at: usize, of: HandoffId) {
        assert!(self.stopped.insert((at, of)), "stopped twice");
    }

    pub fn drop_from_tier(&mut self, at: usize, content: BlockHash, place: TierLevel) {
        let dropped = self.machines[at].in_tiers.remove(&(content, place));
        assert!(dropped.is_some(), "{content} is not kept in {place:?}");
    }

    pub fn perform_offload(
        &mut self,
        at: usize,
        event: StageEvent,
        event_outcome: StageEventOutcome,
    ) {
        let StageEvent::Offload {
            content,
            block,
            cells,
            ..
        } = event
        else {
            panic!("a copy out")
        };
        let machine = &mut self.machines[at];
        let now = machine.engine.read(block, whole(0));
        assert_eq!(now, cells, "given away while it was to be copied out");
        let outcome = match event_outcome {
            StageEventOutcome::Damaged => OffloadOutcome::Broken,
            StageEventOutcome::Well => {
                let before = machine.in_tiers.insert((content, TierLevel::Host), cells);
                assert_eq!(before, None, "kept twice");
                self.unusable.remove(&(at, content));
                OffloadOutcome::Copied
            }
        };
        let most = machine.brain.limits().host_blocks as usize;
        assert!(
            count(&machine.in_tiers, TierLevel::Host) <= most,
            "host memory"
        );
        let took = takes(content, TierLevel::Host);
        self.feed(
            at,
            WorkerInput::Offloaded {
                content,
                outcome,
                took,
            },
        );
    }

    pub fn perform_spill(
        &mut self,
        at: usize,
        content: BlockHash,
        event_outcome: StageEventOutcome,
    ) {
        let machine = &mut self.machines[at];
        let cells = machine.in_tiers.get(&(content, TierLevel::Host)).cloned();
        let outcome = match (event_outcome, cells) {
            (StageEventOutcome::Well, Some(cells)) => {
                machine.in_tiers.insert((content, TierLevel::Disk), cells);
                OffloadOutcome::Copied
            }
            // The copy was found to be damaged, or the disk is full.
            _ => OffloadOutcome::Broken,
        };
        let most = machine.brain.limits().disk_blocks as usize;
        assert!(count(&machine.in_tiers, TierLevel::Disk) <= most, "disk");
        let took = takes(content, TierLevel::Disk);
        self.feed(
            at,
            WorkerInput::SpilledToDisk {
                content,
                outcome,
                took,
            },
        );
    }

    pub fn perform_fetch(
        &mut self,
        at: usize,
        event: StageEvent,
        event_outcome: StageEventOutcome,
    ) {
        let StageEvent::Fetch {
            handoff,
            blocks,
            since,
            work,
            ..
        } = event
        else {
            panic!("a fetch")
        };
        let stopped = self.stopped.remove(&(at, handoff));
        let half = blocks.len() / 2;
        let is_unusable = |(content, _): &(BlockHash, BlockIndex)| {
            let in_tiers = &self.machines[at].in_tiers;
            let kept = |place| in_tiers.contains_key(&(*content, place));
            let is_kept = [TierLevel::Host, TierLevel::Disk].into_iter().any(kept);
            !is_kept && self.unusable.contains(&(at, *content))
        };
        let (end, outcome) = match (stopped, event_outcome) {
            (true, _) => (half, FetchOutcome::Stopped),
            (false, StageEventOutcome::Well) => (blocks.len(), FetchOutcome::Copied),
            (false, StageEventOutcome::Damaged) => match blocks[half].0.0[0] % 4 {
                0 => (half, FetchOutcome::Missing),
                1 => (half, FetchOutcome::Corrupt),
                2 => (half, FetchOutcome::Unreadable),
                _ => (half, FetchOutcome::Broken),
            },
        };
        // Another fetch may have found a content unusable meanwhile.
        let (blocks_fetched, outcome) = match blocks[..end].iter().position(is_unusable) {
            Some(gone) if !stopped => (gone, FetchOutcome::Missing),
            Some(gone) => (gone, outcome),
            None => (end, outcome),
        };
        let at_fault = blocks.get(blocks_fetched).filter(|_| {
            use FetchOutcome::{Corrupt, Missing, Unreadable};
            matches!(outcome, Missing | Corrupt | Unreadable)
        });
        if let Some((content, _)) = at_fault {
            self.unusable.insert((at, *content));
        }
        let machine = &mut self.machines[at];
        for (content, block) in &blocks[..blocks_fetched] {
            let places = [TierLevel::Host, TierLevel::Disk].into_iter();
            let mut found = places.filter_map(|place| machine.in_tiers.get(&(*content, place)));
            let cells = found.next();
            let cells = cells.expect("what is brought back was not dropped");
            machine.engine.write(*block, whole(0), &cells.clone());
        }
        let took = self.now.since(since);
        // A fetch that was ordered to stop did nothing else until then; others may have waited for
        // steps.
        let worked = if stopped { took } else { took.min(work) };
        let blocks_fetched = u32::try_from(blocks_fetched).expect("few");
        self.feed(
            at,
            WorkerInput::Fetched {
                handoff,
                came: blocks_fetched,
                outcome,
                took,
                worked,
            },
        );
    }

    /// The contents that outlive a machine.
    pub fn on_disk(&self, at: usize) -> StoredBlocks {
        let in_tiers = self.machines[at].in_tiers.iter();
        let on_disk = in_tiers.filter(|((_, place), _)| *place == TierLevel::Disk);
        on_disk.map(|(key, cells)| (*key, cells.clone())).collect()
    }
}
