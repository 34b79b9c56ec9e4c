//! A router's index of the prefix caches of the fleet.
//!
//! Owns: for each worker the contents that it reported as stored and not as evicted.
//! Never: guarantees a hit; a worker checks again when it reserves. Never mixes two incarnations of
//! a worker.
//! Invariant: contents stored by one incarnation are found only until that incarnation is lost or a
//! later one reports; for each worker at most the number of contents that the caller allows is
//! kept.

use crate::{snapshot_hash, window_hash};
use cleave_domain::{BlockHash, Incarnation, KvWindow, WorkerId, WorkerRef};
use std::collections::{BTreeMap, BTreeSet};
use std::ops::Bound;

/// The prefix caches of the fleet, by worker and incarnation.
#[derive(Clone, Debug, Default, PartialEq, Eq, Hash)]
pub struct FleetPrefixIndex {
    holders: BTreeMap<BlockHash, BTreeSet<WorkerId>>,
    workers: BTreeMap<WorkerId, WorkerContents>,
}

#[derive(Clone, Debug, PartialEq, Eq, Hash)]
struct WorkerContents {
    incarnation: Incarnation,
    contents: BTreeSet<BlockHash>,
}

impl WorkerContents {
    /// The content to drop for this one: the next in the order of hashes, which is arbitrary,
    /// because the index does not know which contents are older.
    fn next_content(&self, of: BlockHash) -> Option<BlockHash> {
        let behind = (Bound::Excluded(of), Bound::Unbounded);
        let next = self.contents.range(behind).next();
        next.or_else(|| self.contents.first()).copied()
    }
}

impl FleetPrefixIndex {
    /// Adds contents that `worker` reports as reusable; at most `contents_max` of a worker are
    /// kept. Returns the number of contents dropped for that. A report of an earlier incarnation is
    /// ignored; a report of a later one drops all contents of the earlier one.
    pub fn stored(
        &mut self,
        worker: WorkerRef,
        hashes: &[BlockHash],
        contents_max: usize,
    ) -> usize {
        let known_incarnation = self.workers.get(&worker.worker).map(|c| c.incarnation);
        if known_incarnation.is_some_and(|known| known > worker.incarnation) {
            return 0;
        }
        if known_incarnation.is_some_and(|known| known < worker.incarnation) {
            self.remove_worker(worker.worker);
        }
        let mut dropped_count = 0;
        let cache = self
            .workers
            .entry(worker.worker)
            .or_insert_with(|| WorkerContents {
                incarnation: worker.incarnation,
                contents: BTreeSet::new(),
            });
        for hash in hashes {
            cache.contents.insert(*hash);
            self.holders.entry(*hash).or_default().insert(worker.worker);
            if cache.contents.len() > contents_max
                && let Some(dropped) = cache.next_content(*hash)
            {
                cache.contents.remove(&dropped);
                remove_holder(&mut self.holders, dropped, worker.worker);
                dropped_count += 1;
            }
        }
        dropped_count
    }

    /// Removes contents that `worker` reports as evicted.
    pub fn evicted(&mut self, worker: WorkerRef, hashes: &[BlockHash]) {
        let Some(cache) = self.workers.get_mut(&worker.worker) else {
            return;
        };
        if cache.incarnation != worker.incarnation {
            return;
        }
        for hash in hashes {
            if cache.contents.remove(hash) {
                remove_holder(&mut self.holders, *hash, worker.worker);
            }
        }
    }

    /// Removes an incarnation of a worker that has ended, with its contents.
    pub fn worker_lost(&mut self, worker: WorkerRef) {
        let known_incarnation = self.workers.get(&worker.worker).map(|c| c.incarnation);
        if known_incarnation.is_some_and(|known| known <= worker.incarnation) {
            self.remove_worker(worker.worker);
        }
    }

    /// For each worker that has the first of these blocks: the number of leading blocks that it
    /// has. In the order of worker ids.
    ///
    /// Bisects for all workers together: a fleet in which every worker has a long system prompt
    /// costs workers × log(blocks). A pool evicts a sequence from its end, so its blocks are a
    /// prefix; if that fails, the result is too large by the blocks after the gap, and the worker
    /// corrects it when it reserves.
    pub fn longest_prefixes(&self, hashes: &[BlockHash]) -> Vec<(WorkerRef, u32)> {
        let Some(first) = hashes.first().and_then(|hash| self.holders.get(hash)) else {
            return Vec::new();
        };
        let mut found = Vec::with_capacity(first.len());
        // Invariant of the loop: each group has the first `low` blocks and lacks block `high`.
        let mut groups = vec![(first.iter().copied().collect::<Vec<_>>(), 1, hashes.len())];
        while let Some((workers, low, high)) = groups.pop() {
            if workers.is_empty() {
                continue;
            }
            if low == high {
                let blocks = u32::try_from(low).unwrap_or(u32::MAX);
                found.extend(workers.into_iter().map(|worker| (worker, blocks)));
                continue;
            }
            let middle = low + (high - low) / 2;
            let (have, lack) = self.split(workers, &hashes[middle]);
            groups.push((have, middle + 1, high));
            groups.push((lack, low, middle));
        }
        found.sort_unstable();
        let worker_ref = |(worker, blocks): (WorkerId, u32)| {
            let incarnation = self.workers[&worker].incarnation;
            let worker = WorkerRef {
                worker,
                incarnation,
            };
            (worker, blocks)
        };
        found.into_iter().map(worker_ref).collect()
    }

    /// For each of these workers, with its leading blocks from
    /// [`FleetPrefixIndex::longest_prefixes`]: the leading blocks before its last snapshot of a
    /// state, 0 without one. In the order of `prefixes`.
    ///
    /// Costs a lookup for each block behind the last snapshots, for all workers together.
    pub fn snapshot_prefixes(
        &self,
        hashes: &[BlockHash],
        prefixes: &[(WorkerRef, u32)],
    ) -> Vec<u32> {
        let mut found = vec![0; prefixes.len()];
        let longest = prefixes.iter().map(|(_, blocks)| *blocks).max();
        for blocks in (1..=longest.unwrap_or(0)).rev() {
            let content = snapshot_hash(hashes[blocks as usize - 1]);
            let Some(holders) = self.holders.get(&content) else {
                continue;
            };
            for (found, (worker, leading)) in found.iter_mut().zip(prefixes) {
                if *found == 0 && *leading >= blocks && holders.contains(&worker.worker) {
                    *found = blocks;
                }
            }
            if found.iter().all(|found| *found > 0) {
                break;
            }
        }
        found
    }

    /// For each of these workers, with leading blocks that it has: the most of them that it can
    /// continue, because it has the whole window before their end. In the order of `prefixes`.
    ///
    /// Costs a lookup for each block of the window, and for each block behind a gap in it.
    pub fn window_prefixes(
        &self,
        hashes: &[BlockHash],
        window: KvWindow,
        prefixes: &[(WorkerRef, u32)],
    ) -> Vec<u32> {
        let has = |worker: WorkerId, ordinal: u32| {
            let content = window_hash(hashes[ordinal as usize]);
            let holders = self.holders.get(&content);
            holders.is_some_and(|holders| holders.contains(&worker))
        };
        let longest = |(worker, leading): &(WorkerRef, u32)| {
            let mut blocks = *leading;
            // Every prefix whose window begins before the gap and that ends behind it fails.
            while let Some(gap) = (window.first_block(blocks * window.block_tokens)..blocks)
                .rev()
                .find(|ordinal| !has(worker.worker, *ordinal))
            {
                blocks = gap;
            }
            blocks
        };
        prefixes.iter().map(longest).collect()
    }

    /// Splits `workers` into those that have the block, and the others.
    fn split(&self, workers: Vec<WorkerId>, hash: &BlockHash) -> (Vec<WorkerId>, Vec<WorkerId>) {
        match self.holders.get(hash) {
            None => (Vec::new(), workers),
            Some(holders) => workers.into_iter().partition(|w| holders.contains(w)),
        }
    }

    /// The number of contents recorded for `worker`.
    pub fn blocks_count(&self, worker: WorkerRef) -> usize {
        self.workers
            .get(&worker.worker)
            .filter(|cache| cache.incarnation == worker.incarnation)
            .map_or(0, |cache| cache.contents.len())
    }

    /// Asserts that both directions agree.
    pub fn check(&self) {
        let pairs: usize = self.holders.values().map(BTreeSet::len).sum();
        let contents: usize = self.workers.values().map(|c| c.contents.len()).sum();
        assert_eq!(pairs, contents, "holders and caches differ");
        for (worker, cache) in &self.workers {
            for hash in &cache.contents {
                assert!(self.holders[hash].contains(worker), "{worker} has {hash}");
            }
        }
        assert!(self.holders.values().all(|holders| !holders.is_empty()));
    }

    fn remove_worker(&mut self, worker: WorkerId) {
        if let Some(cache) = self.workers.remove(&worker) {
            for hash in cache.contents {
                remove_holder(&mut self.holders, hash, worker);
            }
        }
    }
}

fn remove_holder(
    holders: &mut BTreeMap<BlockHash, BTreeSet<WorkerId>>,
    hash: BlockHash,
    worker: WorkerId,
) {
    if let Some(workers) = holders.get_mut(&hash) {
        workers.remove(&worker);
        if workers.is_empty() {
            holders.remove(&hash);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::FleetPrefixIndex;
    use crate::{snapshot_hash, window_hash};
    use cleave_domain::{BlockHash, Incarnation, KvWindow, WorkerId, WorkerRef};

    fn worker(id: u64, incarnation: u64) -> WorkerRef {
        WorkerRef {
            worker: WorkerId(id),
            incarnation: Incarnation(incarnation),
        }
    }

    fn hashes(of: &[u8]) -> Vec<BlockHash> {
        of.iter().map(|of| BlockHash([*of; 16])).collect()
    }

    const MANY: usize = 1 << 20;

    /// Reports of a rogue worker must not fill the memory of the router.
    #[test]
    fn contents_per_worker_are_limited() {
        let mut index = FleetPrefixIndex::default();
        for byte in 0..=255_u8 {
            index.stored(worker(1, 1), &[BlockHash([byte; 16])], 10);
            index.check();
            let newest = index.longest_prefixes(&[BlockHash([byte; 16])]);
            assert_eq!(newest, [(worker(1, 1), 1)], "what came last is kept");
            assert!(index.blocks_count(worker(1, 1)) <= 10);
        }
        assert_eq!(index.blocks_count(worker(1, 1)), 10);
        // Repeating a report drops nothing.
        index.stored(worker(1, 1), &[BlockHash([255; 16])], 10);
        assert_eq!(index.blocks_count(worker(1, 1)), 10);
        let all: Vec<_> = (0..=255).map(|byte| BlockHash([byte; 16])).collect();
        index.stored(worker(2, 1), &all, 0);
        assert_eq!(index.blocks_count(worker(2, 1)), 0);
    }

    #[test]
    fn leading_blocks_are_counted_per_worker() {
        let mut index = FleetPrefixIndex::default();
        index.stored(worker(1, 1), &hashes(&[1, 2, 3]), MANY);
        index.stored(worker(2, 1), &hashes(&[1]), MANY);
        index.stored(worker(3, 1), &hashes(&[2, 3]), MANY);
        index.check();
        assert_eq!(
            index.longest_prefixes(&hashes(&[1, 2, 3, 4])),
            [(worker(1, 1), 3), (worker(2, 1), 1)]
        );
        index.evicted(worker(1, 1), &hashes(&[2, 3]));
        index.check();
        assert_eq!(
            index.longest_prefixes(&hashes(&[1, 2, 3]))[0],
            (worker(1, 1), 1)
        );
        assert_eq!(index.longest_prefixes(&[]), []);
    }

    // Invariant: I58.
    #[test]
    fn a_prefix_ends_where_the_worker_has_its_window() {
        let blocks: Vec<BlockHash> = (1..=6).map(|of| BlockHash([of; 16])).collect();
        let window = KvWindow {
            tokens: 10,
            block_tokens: 4,
        };
        // As for the pool: the token at 4 n reads three blocks before it, or those that exist.
        for (ordinals, expected) in [
            (&[0_usize, 1, 2, 3, 4, 5][..], 6),
            (&[3, 4, 5], 6),
            (&[2, 3, 4], 5),
            (&[4, 5], 0),
            (&[0, 3, 4], 1),
            (&[0, 1, 3, 4], 2),
            (&[], 0),
        ] {
            let worker = WorkerRef {
                worker: WorkerId(1),
                incarnation: Incarnation(1),
            };
            let mut index = FleetPrefixIndex::default();
            index.stored(worker, &blocks, 100);
            let windows: Vec<_> = ordinals.iter().map(|at| window_hash(blocks[*at])).collect();
            index.stored(worker, &windows, 100);
            let found = index.window_prefixes(&blocks, window, &[(worker, 6)]);
            assert_eq!(found, [expected], "{ordinals:?}");
            let one = index.window_prefixes(&blocks, window, &[(worker, 1)]);
            assert_eq!(one, [u32::from(ordinals.contains(&0))]);
        }
    }

    #[test]
    fn a_prefix_ends_at_the_workers_last_snapshot() {
        let mut index = FleetPrefixIndex::default();
        let blocks = hashes(&[1, 2, 3, 4]);
        let snapshots: Vec<_> = blocks.iter().map(|hash| snapshot_hash(*hash)).collect();
        for (id, leading, kept) in [
            (1, 4, &[1, 3][..]),
            (2, 4, &[]),
            (3, 2, &[0, 3]),
            (4, 3, &[2]),
        ] {
            index.stored(worker(id, 1), &blocks[..leading], MANY);
            for snapshot in kept {
                index.stored(worker(id, 1), &[snapshots[*snapshot]], MANY);
            }
        }
        let prefixes = index.longest_prefixes(&blocks);
        let leading: Vec<u32> = prefixes.iter().map(|(_, blocks)| *blocks).collect();
        assert_eq!(leading, [4, 4, 2, 3], "snapshots are no blocks");
        assert_eq!(index.snapshot_prefixes(&blocks, &prefixes), [4, 0, 1, 3]);
        index.evicted(worker(1, 1), &[snapshots[3]]);
        assert_eq!(index.snapshot_prefixes(&blocks, &prefixes), [2, 0, 1, 3]);
        assert_eq!(index.snapshot_prefixes(&blocks, &[]), [0; 0]);
    }

    #[test]
    fn bisection_finds_every_prefix_length() {
        let all: Vec<u8> = (1..=13).collect();
        let mut index = FleetPrefixIndex::default();
        for length in 1..=13 {
            index.stored(worker(length, 1), &hashes(&all[..length as usize]), MANY);
        }
        for query_blocks in 1..=13 {
            let expected: Vec<_> = (1..=13)
                .map(|length| (worker(length, 1), length.min(query_blocks) as u32))
                .collect();
            assert_eq!(
                index.longest_prefixes(&hashes(&all[..query_blocks as usize])),
                expected
            );
        }
    }

    // Invariant: I9.
    // Lesson: 6.
    #[test]
    fn a_restarted_workers_earlier_blocks_are_gone() {
        let mut index = FleetPrefixIndex::default();
        index.stored(worker(1, 1), &hashes(&[1, 2]), MANY);
        index.stored(worker(1, 2), &hashes(&[9]), MANY);
        assert_eq!(index.longest_prefixes(&hashes(&[1])), []);
        // A report that the earlier incarnation sent before its end arrives late.
        index.stored(worker(1, 1), &hashes(&[1]), MANY);
        index.evicted(worker(1, 1), &hashes(&[9]));
        index.worker_lost(worker(1, 1));
        index.check();
        assert_eq!(index.longest_prefixes(&hashes(&[9])), [(worker(1, 2), 1)]);
        index.worker_lost(worker(1, 2));
        index.check();
        assert_eq!(index, FleetPrefixIndex::default());
    }
}
