//! What a worker keeps below its pool.
//!
//! Owns: the contents in host memory and on disk, and what waits for the disk. Never: keeps more blocks than the
//! world gives it; gives what the brain has dropped. Invariant: every copy asked for is answered once.

use super::{Body, Luck, Op, Payload};
use cleave_domain::{BlockHash, BlockIndex, HandoffId, Time};
use cleave_sched::{FetchOutcome, Input, KeepOutcome, Place};
use std::collections::{BTreeMap, BTreeSet};
use std::time::Duration;

/// What is kept, and by what else a life remembers it.
#[derive(Clone, Debug, Default)]
pub(crate) struct Below {
    pub(super) host: BTreeMap<BlockHash, Payload>,
    pub(crate) disk: BTreeMap<BlockHash, Payload>,
    /// Fetches that wait for the disk.
    asleep: BTreeMap<HandoffId, Vec<(BlockHash, BlockIndex)>>,
    /// When each fetch was asked for.
    since: BTreeMap<HandoffId, Time>,
    /// How long the disk was at it.
    read: BTreeMap<HandoffId, Duration>,
    /// Told to stop while the engine was at it.
    stopped: BTreeSet<HandoffId>,
}

/// What a fetch begins with.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum From {
    Host,
    Disk,
}

impl Body {
    pub(crate) fn shelve(&mut self, content: BlockHash, block: BlockIndex) -> Result<(), String> {
        self.check_copied(std::iter::once(block))?;
        self.ops.push_back(Op::Shelve { content, block });
        Ok(())
    }

    /// Begins a fetch; one from disk waits for [`Body::disk_read`].
    pub(crate) fn fetch(
        &mut self,
        now: Time,
        handoff: HandoffId,
        blocks: Vec<(BlockHash, BlockIndex)>,
    ) -> Result<From, String> {
        self.check_copied(blocks.iter().map(|(_, block)| *block))?;
        self.below.since.insert(handoff, now);
        let in_host = |(content, _): &(BlockHash, _)| self.below.host.contains_key(content);
        if blocks.iter().all(in_host) {
            self.ops.push_back(Op::Fetch { handoff, blocks });
            return Ok(From::Host);
        }
        self.below.asleep.insert(handoff, blocks);
        Ok(From::Disk)
    }

    /// The disk has what a fetch waits for.
    pub(crate) fn disk_read(&mut self, now: Time, handoff: HandoffId) {
        if let Some(blocks) = self.below.asleep.remove(&handoff) {
            let since = self.below.since.get(&handoff).copied();
            let read = now.since(since.unwrap_or(now));
            self.below.read.insert(handoff, read);
            self.ops.push_back(Op::Fetch { handoff, blocks });
        }
    }

    /// Gives the answer the brain is owed, if the engine is not at it.
    pub(crate) fn stop_fetch(&mut self, now: Time, handoff: HandoffId) -> Option<Input> {
        let is_it = |op: &Op| matches!(op, Op::Fetch { handoff: h, .. } if *h == handoff);
        if self.busy.as_ref().is_some_and(|(op, _)| is_it(op)) {
            self.below.stopped.insert(handoff);
            return None;
        }
        let queued = self.ops.iter().any(is_it);
        self.ops.retain(|op| !is_it(op));
        if self.below.asleep.contains_key(&handoff) {
            self.disk_read(now, handoff);
            self.ops.retain(|op| !is_it(op));
        } else if !queued {
            return None;
        }
        Some(self.fetched((now, now), handoff, (0, FetchOutcome::Stopped)))
    }

    fn fetched(
        &mut self,
        (begun, now): (Time, Time),
        handoff: HandoffId,
        (came, outcome): (u32, FetchOutcome),
    ) -> Input {
        let since = self.below.since.remove(&handoff).unwrap_or(now);
        let read = self.below.read.remove(&handoff).unwrap_or_default();
        Input::Fetched {
            handoff,
            came,
            outcome,
            took: now.since(since),
            worked: read + now.since(begun),
        }
    }

    pub(crate) fn drop_kept(&mut self, content: BlockHash, place: Place) -> Result<(), String> {
        let dropped = match place {
            Place::Host => self.below.host.remove(&content),
            Place::Disk => self.below.disk.remove(&content),
        };
        match dropped {
            Some(_) => Ok(()),
            None => Err(format!(
                "{} drops {content}, which is not in {place:?}",
                self.me
            )),
        }
    }

    /// The disk has written a content, or cannot.
    pub(crate) fn disk_wrote(&mut self, content: BlockHash, luck: Luck) -> KeepOutcome {
        let kept = self.below.host.get(&content).filter(|_| luck == Luck::Well);
        let Some(cells) = kept.cloned() else {
            return KeepOutcome::Broken;
        };
        self.below.disk.insert(content, cells);
        KeepOutcome::Copied
    }

    pub(super) fn shelved(
        &mut self,
        (content, block): (BlockHash, BlockIndex),
        luck: Luck,
    ) -> Result<KeepOutcome, String> {
        if luck == Luck::Broken {
            return Ok(KeepOutcome::Broken);
        }
        let cells = self.engine.read(block).to_vec();
        self.below.host.insert(content, cells);
        self.check_below()?;
        Ok(KeepOutcome::Copied)
    }

    /// The engine was at it from one time to the other.
    pub(super) fn finish_fetch(
        &mut self,
        when: (Time, Time),
        (handoff, blocks): (HandoffId, &[(BlockHash, BlockIndex)]),
        luck: Luck,
    ) -> Result<Input, String> {
        let half = blocks.len() / 2;
        let (came, outcome) = match (self.below.stopped.remove(&handoff), luck) {
            (true, _) => (half, FetchOutcome::Stopped),
            (false, Luck::Well) => (blocks.len(), FetchOutcome::Copied),
            (false, Luck::Broken) => {
                let outcomes = [
                    FetchOutcome::Missing,
                    FetchOutcome::Corrupt,
                    FetchOutcome::Unreadable,
                    FetchOutcome::Broken,
                ];
                (half, outcomes[blocks.len() % outcomes.len()])
            }
        };
        for (content, block) in &blocks[..came] {
            let below = &self.below;
            let cells = below.host.get(content).or_else(|| below.disk.get(content));
            let cells = cells.cloned();
            let cells =
                cells.ok_or_else(|| format!("{} has dropped {content} of {handoff}", self.me))?;
            self.engine.write(*block, 0, &cells);
        }
        let came = u32::try_from(came).map_err(|error| error.to_string())?;
        Ok(self.fetched(when, handoff, (came, outcome)))
    }

    /// No more is kept than may be.
    pub(crate) fn check_below(&self) -> Result<(), String> {
        let kept = (self.below.host.len(), self.below.disk.len());
        let most = (self.limits.host_blocks, self.limits.disk_blocks);
        if kept.0 > most.0 as usize || kept.1 > most.1 as usize {
            return Err(format!("{} keeps {kept:?} blocks of {most:?}", self.me));
        }
        Ok(())
    }

    /// Whether nothing waits for the disk.
    pub(super) fn disk_is_idle(&self) -> bool {
        self.below.asleep.is_empty()
    }
}
