//! Workers' disks and tier sizes in a simulated world.
//!
//! Owns: how long disks take, and which disk operations fail. Never: copies a block; workers do.
//! Invariant: every disk operation is answered once, unless its worker died.

use crate::log_text;
use crate::run::{ChaosEvent, ChaosRun, worker_index};
use cleave_domain::{BlockHash, HandoffId, SplitMix64, WorkerRef};
use cleave_sched::{FetchOutcome, OffloadOutcome, TierLevel, WorkerNote};
use cleave_testkit::OpFault;
use std::time::Duration;

/// Separates the draws of tier settings from the seed's other draws.
const TIER_SEED_SALT: u64 = 0x1405_7b7e_f767_814f;

/// Tier sizes and disk times of a world's workers.
#[derive(Clone, Copy, Debug)]
pub(crate) struct TierSettings {
    /// Blocks in memory and on disk; a disk tier needs a memory tier.
    pub(crate) blocks: (u32, u32),
    /// Disk time of most blocks, and of one in eight.
    pub(crate) block_times: (Duration, Duration),
}

impl TierSettings {
    /// Drawn from its own generator, so that the rest of a seed's world stays the same.
    pub(crate) fn draw(seed: u64) -> Self {
        let rng = &mut SplitMix64::new(seed ^ TIER_SEED_SALT);
        let blocks = if rng.chance(500) {
            (rng.count(1, 60), *rng.pick(&[0, 0, 8, 100]))
        } else {
            (0, 0)
        };
        let takes = (rng.micros(50, 20_000), rng.micros(100, 3_000_000));
        Self {
            blocks,
            block_times: takes,
        }
    }
}

impl ChaosRun<'_> {
    pub(crate) fn spill(&mut self, worker: WorkerRef, content: BlockHash) {
        let at = self.now + self.disk_takes(content);
        self.schedule(at, ChaosEvent::DiskWrote(worker, content));
    }

    pub(crate) fn read_disk(
        &mut self,
        worker: WorkerRef,
        handoff: HandoffId,
        first: Option<BlockHash>,
    ) {
        let at = self.now + self.disk_takes(first.unwrap_or_default());
        self.schedule(at, ChaosEvent::DiskRead(worker, handoff));
    }

    /// One block in eight takes the world's long disk time.
    fn disk_takes(&self, content: BlockHash) -> Duration {
        let slow = content.0[0].is_multiple_of(8);
        if slow {
            self.world.tiers.block_times.1
        } else {
            self.world.tiers.block_times.0
        }
    }

    /// A disk write ends; the brain gets the outcome: whether the content is on disk.
    pub(crate) fn disk_wrote(
        &mut self,
        worker: WorkerRef,
        content: BlockHash,
    ) -> Result<Option<String>, String> {
        let broken = if self.faults_over {
            0
        } else {
            self.world.links.broken
        };
        let breaks = broken > 0 && self.rng.chance(10 * broken);
        let took = self.disk_takes(content);
        let Some(body) = self.workers[worker_index(worker)]
            .body
            .as_mut()
            .filter(|b| b.worker == worker)
        else {
            return Ok(None);
        };
        let fault = breaks.then_some(OpFault::Device);
        let outcome = body.disk_wrote(content, fault.as_ref())?;
        let input = cleave_sched::WorkerInput::SpilledToDisk {
            content,
            outcome,
            took,
        };
        let words = log_text::input(&input);
        self.feed_worker(worker_index(worker), input)?;
        Ok(Some(format!("{} {words}", worker.worker)))
    }

    /// A disk read ends; the engine copies the blocks next.
    pub(crate) fn disk_read(
        &mut self,
        worker: WorkerRef,
        handoff: HandoffId,
    ) -> Result<Option<String>, String> {
        let Some(body) = self.workers[worker_index(worker)]
            .body
            .as_mut()
            .filter(|b| b.worker == worker)
        else {
            return Ok(None);
        };
        body.disk_read(self.now, handoff);
        self.next_op(worker);
        Ok(Some(format!("{} disk read   {handoff}", worker.worker)))
    }

    pub(crate) fn note_below(&mut self, note: &WorkerNote) {
        match note {
            WorkerNote::Offloaded {
                place,
                outcome: OffloadOutcome::Copied,
                ..
            } => self.count(match place {
                TierLevel::Host => "kept in memory",
                TierLevel::Disk => "kept on disk",
            }),
            WorkerNote::Fetched {
                came: blocks_fetched,
                outcome,
                ..
            } => {
                self.count(match outcome {
                    FetchOutcome::Copied => "fetched",
                    FetchOutcome::Stopped => "fetches stopped",
                    FetchOutcome::Missing
                    | FetchOutcome::Corrupt
                    | FetchOutcome::Unreadable
                    | FetchOutcome::Broken => "fetches failed",
                });
                if *blocks_fetched > 0 && *outcome != FetchOutcome::Copied {
                    self.count("fetched in part");
                }
            }
            _ => {}
        }
    }
}
