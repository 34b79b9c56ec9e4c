//! Which worker has which prefix, as a router believes it.
//!
//! Owns: for each worker the contents it said it stored and did not say it evicted.
//! Never: is certain; a worker is asked again when it reserves. Never mixes two lives of a worker.
//! Invariant: what one life of a worker stored is found only until that life is lost or a later
//! one speaks.

use cleave_domain::{BlockHash, Incarnation, WorkerId, WorkerRef};
use std::collections::{BTreeMap, BTreeSet};

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

impl FleetIndex {
    /// `worker` said that these can be reused. News of an earlier life is ignored; of a later one,
    /// it makes everything the earlier life had forgotten.
    pub fn stored(&mut self, worker: WorkerRef, hashes: &[BlockHash]) {
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
    pub fn longest(&self, hashes: &[BlockHash]) -> Vec<(WorkerRef, u32)> {
        let Some(first) = hashes.first().and_then(|hash| self.holders.get(hash)) else {
            return Vec::new();
        };
        let leading = |worker: &WorkerId| {
            let cache = &self.workers[worker];
            let has = |hash: &&BlockHash| cache.contents.contains(*hash);
            let blocks = hashes.iter().take_while(has).count();
            let worker = WorkerRef {
                worker: *worker,
                incarnation: cache.incarnation,
            };
            (worker, u32::try_from(blocks).unwrap_or(u32::MAX))
        };
        first.iter().map(leading).collect()
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

    #[test]
    fn leading_blocks_are_counted_per_worker() {
        let mut index = FleetIndex::default();
        index.stored(worker(1, 1), &hashes(&[1, 2, 3]));
        index.stored(worker(2, 1), &hashes(&[1, 3]));
        index.stored(worker(3, 1), &hashes(&[2, 3]));
        index.check();
        assert_eq!(
            index.longest(&hashes(&[1, 2, 3, 4])),
            [(worker(1, 1), 3), (worker(2, 1), 1)]
        );
        index.evicted(worker(1, 1), &hashes(&[2]));
        index.check();
        assert_eq!(index.longest(&hashes(&[1, 2, 3]))[0], (worker(1, 1), 1));
        assert_eq!(index.longest(&[]), []);
    }

    #[test]
    fn lesson_06_a_restarted_workers_earlier_blocks_are_gone() {
        let mut index = FleetIndex::default();
        index.stored(worker(1, 1), &hashes(&[1, 2]));
        index.stored(worker(1, 2), &hashes(&[9]));
        assert_eq!(index.longest(&hashes(&[1])), []);
        // News that the earlier life sent before it ended comes late.
        index.stored(worker(1, 1), &hashes(&[1]));
        index.evicted(worker(1, 1), &hashes(&[9]));
        index.lost(worker(1, 1));
        index.check();
        assert_eq!(index.longest(&hashes(&[9])), [(worker(1, 2), 1)]);
        index.lost(worker(1, 2));
        index.check();
        assert_eq!(index, FleetIndex::default());
    }
}
