//! Which worker has which prefix, as a router believes it.
//!
//! Owns: for each worker the contents it said it stored and did not say it evicted.
//! Never: is certain; a worker is asked again when it reserves. Never mixes two lives of a worker.
//! Invariant: what one life of a worker stored is found only until that life is lost or a later
//! one speaks; of no worker are more contents kept than whoever asks allows.

use cleave_domain::{BlockHash, Incarnation, WorkerId, WorkerRef};
use std::collections::{BTreeMap, BTreeSet};
use std::ops::Bound;

/// The fleet's prefix caches, told apart by worker and life.
#[derive(Clone, Debug, Default, PartialEq, Eq, Hash)]
pub struct FleetIndex {
    holders: BTreeMap<BlockHash, BTreeSet<WorkerId>>,
    workers: BTreeMap<WorkerId, Cache>,
}

#[derive(Clone, Debug, PartialEq, Eq, Hash)]
struct Cache {
    incarnation: Incarnation,
    contents: BTreeSet<BlockHash>,
}

impl Cache {
    /// The content that makes room for this one. Contents are hashes, so the next in order is any of them:
    /// which are older is not known here.
    fn neighbour(&self, of: BlockHash) -> Option<BlockHash> {
        let behind = (Bound::Excluded(of), Bound::Unbounded);
        let next = self.contents.range(behind).next();
        next.or_else(|| self.contents.first()).copied()
    }
}

impl FleetIndex {
    /// `worker` reports that these can be reused; of all that it reports, `contents_max` are kept. News of an
    /// earlier life is ignored; of a later one, it makes everything the earlier life had forgotten.
    pub fn stored(&mut self, worker: WorkerRef, hashes: &[BlockHash], contents_max: usize) {
        let known = self.workers.get(&worker.worker).map(|c| c.incarnation);
        if known.is_some_and(|known| known > worker.incarnation) {
            return;
        }
        if known.is_some_and(|known| known < worker.incarnation) {
            self.forget(worker.worker);
        }
        let cache = self.workers.entry(worker.worker).or_insert_with(|| Cache {
            incarnation: worker.incarnation,
            contents: BTreeSet::new(),
        });
        for hash in hashes {
            cache.contents.insert(*hash);
            self.holders.entry(*hash).or_default().insert(worker.worker);
            if cache.contents.len() > contents_max
                && let Some(dropped) = cache.neighbour(*hash)
            {
                cache.contents.remove(&dropped);
                remove_holder(&mut self.holders, dropped, worker.worker);
            }
        }
    }

    /// `worker` said that these are gone.
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

    /// That life of the worker is over, and its cache with it.
    pub fn lost(&mut self, worker: WorkerRef) {
        let known = self.workers.get(&worker.worker).map(|c| c.incarnation);
        if known.is_some_and(|known| known <= worker.incarnation) {
            self.forget(worker.worker);
        }
    }

    /// For each worker that has the first of these blocks: how many of the leading ones it has.
    /// In the order of workers' ids.
    ///
    /// Bisects, for all workers together: a fleet in which everybody has a long system prompt costs
    /// workers × log(blocks). A pool evicts a sequence from its end, so what it has is a beginning;
    /// where that fails, the answer is too large by the blocks after the gap, and the worker will
    /// say so when it reserves.
    pub fn longest(&self, hashes: &[BlockHash]) -> Vec<(WorkerRef, u32)> {
        let Some(first) = hashes.first().and_then(|hash| self.holders.get(hash)) else {
            return Vec::new();
        };
        let mut found = Vec::with_capacity(first.len());
        // Each group has the first `low` blocks and lacks block `high`.
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
        let life = |(worker, blocks): (WorkerId, u32)| {
            let incarnation = self.workers[&worker].incarnation;
            let worker = WorkerRef {
                worker,
                incarnation,
            };
            (worker, blocks)
        };
        found.into_iter().map(life).collect()
    }

    /// Those of `workers` that have the block, and the others.
    fn split(&self, workers: Vec<WorkerId>, hash: &BlockHash) -> (Vec<WorkerId>, Vec<WorkerId>) {
        match self.holders.get(hash) {
            None => (Vec::new(), workers),
            Some(holders) => workers.into_iter().partition(|w| holders.contains(w)),
        }
    }

    /// Contents believed to be on `worker`.
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

    fn forget(&mut self, worker: WorkerId) {
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
    use super::FleetIndex;
    use cleave_domain::{BlockHash, Incarnation, WorkerId, WorkerRef};

    fn worker(id: u64, life: u64) -> WorkerRef {
        WorkerRef {
            worker: WorkerId(id),
            incarnation: Incarnation(life),
        }
    }

    fn hashes(of: &[u8]) -> Vec<BlockHash> {
        of.iter().map(|of| BlockHash([*of; 16])).collect()
    }

    const MANY: usize = 1 << 20;

    /// A rogue worker's reports would fill the router's memory.
    #[test]
    fn a_worker_is_believed_to_hold_no_more_than_it_can() {
        let mut index = FleetIndex::default();
        for byte in 0..=255_u8 {
            index.stored(worker(1, 1), &[BlockHash([byte; 16])], 10);
            index.check();
            let newest = index.longest(&[BlockHash([byte; 16])]);
            assert_eq!(newest, [(worker(1, 1), 1)], "what came last is kept");
            assert!(index.blocks_count(worker(1, 1)) <= 10);
        }
        assert_eq!(index.blocks_count(worker(1, 1)), 10);
        // The same report again makes no room for itself.
        index.stored(worker(1, 1), &[BlockHash([255; 16])], 10);
        assert_eq!(index.blocks_count(worker(1, 1)), 10);
        let all: Vec<_> = (0..=255).map(|byte| BlockHash([byte; 16])).collect();
        index.stored(worker(2, 1), &all, 0);
        assert_eq!(index.blocks_count(worker(2, 1)), 0);
    }

    #[test]
    fn leading_blocks_are_counted_per_worker() {
        let mut index = FleetIndex::default();
        index.stored(worker(1, 1), &hashes(&[1, 2, 3]), MANY);
        index.stored(worker(2, 1), &hashes(&[1]), MANY);
        index.stored(worker(3, 1), &hashes(&[2, 3]), MANY);
        index.check();
        assert_eq!(
            index.longest(&hashes(&[1, 2, 3, 4])),
            [(worker(1, 1), 3), (worker(2, 1), 1)]
        );
        index.evicted(worker(1, 1), &hashes(&[2, 3]));
        index.check();
        assert_eq!(index.longest(&hashes(&[1, 2, 3]))[0], (worker(1, 1), 1));
        assert_eq!(index.longest(&[]), []);
    }

    #[test]
    fn bisecting_counts_every_length() {
        let all: Vec<u8> = (1..=13).collect();
        let mut index = FleetIndex::default();
        for length in 1..=13 {
            index.stored(worker(length, 1), &hashes(&all[..length as usize]), MANY);
        }
        for asked in 1..=13 {
            let expected: Vec<_> = (1..=13)
                .map(|length| (worker(length, 1), length.min(asked) as u32))
                .collect();
            assert_eq!(index.longest(&hashes(&all[..asked as usize])), expected);
        }
    }

    #[test]
    fn lesson_06_a_restarted_workers_earlier_blocks_are_gone() {
        let mut index = FleetIndex::default();
        index.stored(worker(1, 1), &hashes(&[1, 2]), MANY);
        index.stored(worker(1, 2), &hashes(&[9]), MANY);
        assert_eq!(index.longest(&hashes(&[1])), []);
        // News that the earlier life sent before it ended comes late.
        index.stored(worker(1, 1), &hashes(&[1]), MANY);
        index.evicted(worker(1, 1), &hashes(&[9]));
        index.lost(worker(1, 1));
        index.check();
        assert_eq!(index.longest(&hashes(&[9])), [(worker(1, 2), 1)]);
        index.lost(worker(1, 2));
        index.check();
        assert_eq!(index, FleetIndex::default());
    }
}
