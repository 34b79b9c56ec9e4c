//! A worker's memory and disk tiers below its pool.
//!
//! Owns: the content of both tiers, and fetches that wait for the disk. Never: keeps more blocks
//! than the world gives it; gives content that the brain has dropped. Invariant: every copy that
//! the brain asks for is answered once.

use super::{AnswerTime, CellWorker, EngineOp, FetchPart, FrameCells, OpFault};
use cleave_domain::{BlockHash, BlockIndex, HandoffId, KvPlane, KvUnit, Time};
use cleave_sched::{FetchOutcome, OffloadOutcome, SnapshotPiece, TierLevel, WorkerInput};
use std::collections::{BTreeMap, BTreeSet};
use std::ops::Range;
use std::time::Duration;

/// The content of the tiers, and the fetches in progress.
#[derive(Clone, Debug, Default)]
pub(super) struct TierContents {
    host: BTreeMap<BlockHash, FrameCells>,
    disk: BTreeMap<BlockHash, FrameCells>,
    /// Fetches that wait for the disk.
    waiting_for_disk: BTreeMap<HandoffId, Vec<FetchPart>>,
    /// When each fetch was requested.
    requested_at: BTreeMap<HandoffId, Time>,
    /// How long the disk took for each fetch.
    disk_time: BTreeMap<HandoffId, Duration>,
    /// Fetches that the brain stopped and that end later.
    stop_requested: BTreeSet<HandoffId>,
    /// Contents that a fetch found unusable; the brain drops them, also while others fetch them.
    unusable: BTreeSet<BlockHash>,
}

/// The slowest tier that a fetch reads.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum FetchSource {
    Host,
    Disk,
}

impl CellWorker {
    pub(super) fn offload(
        &mut self,
        content: BlockHash,
        plane: KvPlane,
        block: BlockIndex,
        pieces: &[SnapshotPiece],
    ) -> Result<(), String> {
        let piece = |piece: &SnapshotPiece| {
            let ordinal = piece.ordinal;
            (piece.content, KvUnit { plane, ordinal })
        };
        let parts = if pieces.is_empty() {
            vec![(content, KvUnit::block(0))]
        } else {
            pieces.iter().map(piece).collect()
        };
        let planes = parts.iter().map(|(_, unit)| (unit.plane, block));
        self.check_no_step_writes(planes)?;
        self.ops.push_back(EngineOp::Offload {
            content,
            parts,
            block,
        });
        Ok(())
    }

    /// Begins a fetch; a fetch from disk waits for [`CellWorker::disk_read`].
    pub(super) fn fetch(
        &mut self,
        now: Time,
        handoff: HandoffId,
        parts: Vec<FetchPart>,
    ) -> Result<FetchSource, String> {
        let targets = parts.iter().map(|part| (part.unit.plane, part.block));
        self.check_no_step_writes(targets)?;
        self.tiers.requested_at.insert(handoff, now);
        let in_host = |part: &FetchPart| self.tiers.host.contains_key(&part.content);
        if self.answers == AnswerTime::AtItsEnd || parts.iter().all(in_host) {
            self.ops.push_back(EngineOp::Fetch { handoff, parts });
            return Ok(FetchSource::Host);
        }
        self.tiers.waiting_for_disk.insert(handoff, parts);
        Ok(FetchSource::Disk)
    }

    /// The disk has read the content of a fetch; the engine's copy comes next.
    pub fn disk_read(&mut self, now: Time, handoff: HandoffId) {
        if let Some(parts) = self.tiers.waiting_for_disk.remove(&handoff) {
            let since = self.tiers.requested_at.get(&handoff).copied();
            let read = now.since(since.unwrap_or(now));
            self.tiers.disk_time.insert(handoff, read);
            self.ops.push_back(EngineOp::Fetch { handoff, parts });
        }
    }

    /// Stops a fetch; gives the brain's answer, unless the engine is copying it already.
    pub(super) fn stop_fetch(&mut self, now: Time, handoff: HandoffId) -> Option<WorkerInput> {
        let is_it =
            |op: &EngineOp| matches!(op, EngineOp::Fetch { handoff: h, .. } if *h == handoff);
        if self.answers == AnswerTime::AtItsEnd
            || self.busy.as_ref().is_some_and(|(op, _)| is_it(op))
        {
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

    pub(super) fn drop_from_tier(
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
    ///
    /// # Errors
    /// If the disk has more blocks than its limit.
    pub fn disk_wrote(
        &mut self,
        content: BlockHash,
        fault: Option<&OpFault>,
    ) -> Result<OffloadOutcome, String> {
        let in_host = self.tiers.host.get(&content);
        let Some(cells) = in_host.filter(|_| fault.is_none()).cloned() else {
            return Ok(OffloadOutcome::Broken);
        };
        self.tiers.disk.insert(content, cells);
        self.check_below()?;
        Ok(OffloadOutcome::Copied)
    }

    /// The slowest tier that has a content, if any has it.
    pub fn tier_of(&self, content: BlockHash) -> Option<TierLevel> {
        if self.tiers.host.contains_key(&content) {
            Some(TierLevel::Host)
        } else {
            let on_disk = self.tiers.disk.contains_key(&content);
            on_disk.then_some(TierLevel::Disk)
        }
    }

    /// Ends this life; gives the content of its disk, which outlives it.
    pub fn take_disk(&mut self) -> BTreeMap<BlockHash, FrameCells> {
        std::mem::take(&mut self.tiers.disk)
    }

    /// Begins with the disk of an earlier life; gives its contents.
    pub fn find_disk(&mut self, disk: BTreeMap<BlockHash, FrameCells>) -> Vec<BlockHash> {
        self.tiers.disk = disk;
        self.tiers.disk.keys().copied().collect()
    }

    pub(super) fn offloaded(
        &mut self,
        parts: &[(BlockHash, KvUnit)],
        block: BlockIndex,
        fault: Option<&OpFault>,
    ) -> Result<OffloadOutcome, String> {
        if fault.is_some() {
            return Ok(OffloadOutcome::Broken);
        }
        for (content, unit) in parts {
            let cells = self.engine.read_unit(*unit, block).to_vec();
            if self.tiers.host.insert(*content, cells).is_some() {
                return Err(format!("{} keeps {content} twice", self.worker));
            }
            self.tiers.unusable.remove(content);
        }
        self.check_below()?;
        Ok(OffloadOutcome::Copied)
    }

    /// Ends a fetch, which the engine copied in this span.
    pub(super) fn finish_fetch(
        &mut self,
        span: &Range<Time>,
        handoff: HandoffId,
        parts: &[FetchPart],
        fault: Option<&OpFault>,
    ) -> Result<WorkerInput, String> {
        let half = parts.len() / 2;
        let (end, outcome) = match (self.tiers.stop_requested.remove(&handoff), fault) {
            (true, _) => (half, FetchOutcome::Stopped),
            (false, None) => (parts.len(), FetchOutcome::Copied),
            (false, Some(OpFault::Fetch(outcome))) => (half, *outcome),
            (false, Some(other)) => return Err(format!("{other:?} is no fault of a fetch")),
        };
        // Another fetch may have found a content unusable meanwhile.
        let is_unusable = |part: &FetchPart| {
            let content = &part.content;
            self.tier_of(*content).is_none() && self.tiers.unusable.contains(content)
        };
        let (end, outcome) = match (parts[..end].iter().position(is_unusable), outcome) {
            (Some(gone), FetchOutcome::Stopped) => (gone, FetchOutcome::Stopped),
            (Some(gone), _) => (gone, FetchOutcome::Missing),
            (None, outcome) => (end, outcome),
        };
        use FetchOutcome::{Corrupt, Missing, Unreadable};
        if let (Some(part), Missing | Corrupt | Unreadable) = (parts.get(end), outcome) {
            self.tiers.unusable.insert(part.content);
        }
        for FetchPart {
            content,
            unit,
            block,
        } in &parts[..end]
        {
            let tiers = &self.tiers;
            let cells = tiers.host.get(content).or_else(|| tiers.disk.get(content));
            let cells = cells.cloned();
            let cells = cells
                .ok_or_else(|| format!("{} has dropped {content} of {handoff}", self.worker))?;
            self.engine.write_unit(*unit, *block, 0, &cells);
        }
        let blocks_fetched = u32::try_from(end).map_err(|error| error.to_string())?;
        Ok(self.fetched(span.start, span.end, handoff, blocks_fetched, outcome))
    }

    /// Checks that no tier holds more blocks than its limit.
    fn check_below(&self) -> Result<(), String> {
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
