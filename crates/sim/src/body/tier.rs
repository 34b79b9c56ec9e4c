//! A worker's memory and disk tiers below its pool.
//!
//! Owns: the content of both tiers, and fetches that wait for the disk. Never: keeps more blocks
//! than the world gives it; gives content that the brain has dropped. Invariant: every copy that
//! the brain asks for is answered once.

use super::{DeviceFaults, EngineOp, FrameCells, SimWorker};
use cleave_domain::{BlockHash, BlockIndex, HandoffId, KvPlane, Time};
use cleave_sched::{FetchOutcome, OffloadOutcome, TierLevel, WorkerInput};
use std::collections::{BTreeMap, BTreeSet};
use std::time::Duration;

/// The content of the tiers, and the fetches in progress.
#[derive(Clone, Debug, Default)]
pub(crate) struct TierContents {
    pub(super) host: BTreeMap<BlockHash, FrameCells>,
    pub(crate) disk: BTreeMap<BlockHash, FrameCells>,
    /// Fetches that wait for the disk.
    waiting_for_disk: BTreeMap<HandoffId, Vec<(BlockHash, BlockIndex)>>,
    /// When each fetch was requested.
    requested_at: BTreeMap<HandoffId, Time>,
    /// How long the disk took for each fetch.
    disk_time: BTreeMap<HandoffId, Duration>,
    /// Fetches that the brain stopped while the engine was copying them.
    stop_requested: BTreeSet<HandoffId>,
}

/// The slowest tier that a fetch reads.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum FetchSource {
    Host,
    Disk,
}

impl SimWorker {
    pub(crate) fn offload(&mut self, content: BlockHash, block: BlockIndex) -> Result<(), String> {
        self.check_no_step_writes(std::iter::once((KvPlane::Blocks, block)))?;
        self.ops.push_back(EngineOp::Offload { content, block });
        Ok(())
    }

    /// Begins a fetch; a fetch from disk waits for [`SimWorker::disk_read`].
    pub(crate) fn fetch(
        &mut self,
        now: Time,
        handoff: HandoffId,
        blocks: Vec<(BlockHash, BlockIndex)>,
    ) -> Result<FetchSource, String> {
        let targets = blocks.iter().map(|(_, block)| (KvPlane::Blocks, *block));
        self.check_no_step_writes(targets)?;
        self.tiers.requested_at.insert(handoff, now);
        let in_host = |(content, _): &(BlockHash, _)| self.tiers.host.contains_key(content);
        if blocks.iter().all(in_host) {
            self.ops.push_back(EngineOp::Fetch { handoff, blocks });
            return Ok(FetchSource::Host);
        }
        self.tiers.waiting_for_disk.insert(handoff, blocks);
        Ok(FetchSource::Disk)
    }

    /// The disk has read the content of a fetch; the engine's copy comes next.
    pub(crate) fn disk_read(&mut self, now: Time, handoff: HandoffId) {
        if let Some(blocks) = self.tiers.waiting_for_disk.remove(&handoff) {
            let since = self.tiers.requested_at.get(&handoff).copied();
            let read = now.since(since.unwrap_or(now));
            self.tiers.disk_time.insert(handoff, read);
            self.ops.push_back(EngineOp::Fetch { handoff, blocks });
        }
    }

    /// Stops a fetch; gives the brain's answer, unless the engine is copying it already.
    pub(crate) fn stop_fetch(&mut self, now: Time, handoff: HandoffId) -> Option<WorkerInput> {
        let is_it =
            |op: &EngineOp| matches!(op, EngineOp::Fetch { handoff: h, .. } if *h == handoff);
        if self.busy.as_ref().is_some_and(|(op, _)| is_it(op)) {
            self.tiers.stop_requested.insert(handoff);
            return None;
        }
        let queued = self.ops.iter().any(is_it);
        self.ops.retain(|op| !is_it(op));
        if self.tiers.waiting_for_disk.contains_key(&handoff) {
            self.disk_read(now, handoff);
            self.ops.retain(|op| !is_it(op));
        } else if !queued {
            return None;
        }
        Some(self.fetched(now, now, handoff, 0, FetchOutcome::Stopped))
    }

    fn fetched(
        &mut self,
        begun: Time,
        now: Time,
        handoff: HandoffId,
        blocks_fetched: u32,
        outcome: FetchOutcome,
    ) -> WorkerInput {
        let since = self.tiers.requested_at.remove(&handoff).unwrap_or(now);
        let read = self.tiers.disk_time.remove(&handoff).unwrap_or_default();
        WorkerInput::Fetched {
            handoff,
            came: blocks_fetched,
            outcome,
            took: now.since(since),
            worked: read + now.since(begun),
        }
    }

    pub(crate) fn drop_from_tier(
        &mut self,
        content: BlockHash,
        place: TierLevel,
    ) -> Result<(), String> {
        let dropped = match place {
            TierLevel::Host => self.tiers.host.remove(&content),
            TierLevel::Disk => self.tiers.disk.remove(&content),
        };
        match dropped {
            Some(_) => Ok(()),
            None => Err(format!(
                "{} drops {content}, which is not in {place:?}",
                self.worker
            )),
        }
    }

    /// Ends a disk write: the content is on disk, or the device failed.
    pub(crate) fn disk_wrote(
        &mut self,
        content: BlockHash,
        device_faults: DeviceFaults,
    ) -> OffloadOutcome {
        let in_host = self
            .tiers
            .host
            .get(&content)
            .filter(|_| device_faults == DeviceFaults::None);
        let Some(cells) = in_host.cloned() else {
            return OffloadOutcome::Broken;
        };
        self.tiers.disk.insert(content, cells);
        OffloadOutcome::Copied
    }

    pub(super) fn offloaded(
        &mut self,
        content: BlockHash,
        block: BlockIndex,
        device_faults: DeviceFaults,
    ) -> Result<OffloadOutcome, String> {
        if device_faults == DeviceFaults::Failing {
            return Ok(OffloadOutcome::Broken);
        }
        let cells = self.engine.read(block).to_vec();
        self.tiers.host.insert(content, cells);
        self.check_below()?;
        Ok(OffloadOutcome::Copied)
    }

    /// Ends a fetch that the engine began to copy at `begun`.
    pub(super) fn finish_fetch(
        &mut self,
        begun: Time,
        now: Time,
        handoff: HandoffId,
        blocks: &[(BlockHash, BlockIndex)],
        device_faults: DeviceFaults,
    ) -> Result<WorkerInput, String> {
        let half = blocks.len() / 2;
        let (blocks_fetched, outcome) =
            match (self.tiers.stop_requested.remove(&handoff), device_faults) {
                (true, _) => (half, FetchOutcome::Stopped),
                (false, DeviceFaults::None) => (blocks.len(), FetchOutcome::Copied),
                (false, DeviceFaults::Failing) => {
                    let outcomes = [
                        FetchOutcome::Missing,
                        FetchOutcome::Corrupt,
                        FetchOutcome::Unreadable,
                        FetchOutcome::Broken,
                    ];
                    (half, outcomes[blocks.len() % outcomes.len()])
                }
            };
        for (content, block) in &blocks[..blocks_fetched] {
            let below = &self.tiers;
            let cells = below.host.get(content).or_else(|| below.disk.get(content));
            let cells = cells.cloned();
            let cells = cells
                .ok_or_else(|| format!("{} has dropped {content} of {handoff}", self.worker))?;
            self.engine.write(*block, 0, &cells);
        }
        let blocks_fetched = u32::try_from(blocks_fetched).map_err(|error| error.to_string())?;
        Ok(self.fetched(begun, now, handoff, blocks_fetched, outcome))
    }

    /// Checks that no tier holds more blocks than its limit.
    pub(crate) fn check_below(&self) -> Result<(), String> {
        let blocks_count = (self.tiers.host.len(), self.tiers.disk.len());
        let most = (self.limits.host_blocks, self.limits.disk_blocks);
        if blocks_count.0 > most.0 as usize || blocks_count.1 > most.1 as usize {
            return Err(format!(
                "{} keeps {blocks_count:?} blocks of {most:?}",
                self.worker
            ));
        }
        Ok(())
    }

    /// Whether no fetch waits for the disk.
    pub(super) fn disk_is_idle(&self) -> bool {
        self.tiers.waiting_for_disk.is_empty()
    }
}
