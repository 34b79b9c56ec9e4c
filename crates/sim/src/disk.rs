//! Workers' disks, and what a world has below its pools.
//!
//! Owns: how long disks take, and what they break. Never: copies a block: bodies do.
//! Invariant: everything asked of a disk is answered once, unless its worker died.

use crate::body::Luck;
use crate::dice::Dice;
use crate::run::{Event, Run, index};
use crate::words;
use cleave_domain::{BlockHash, HandoffId, WorkerRef};
use cleave_sched::{FetchOutcome, KeepOutcome, Note, Place};
use std::time::Duration;

/// Tells these dice from the others of a seed.
const BELOW: u64 = 0x1405_7b7e_f767_814f;

/// What a world's workers keep below their pools.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Below {
    /// In memory, and on disk; none on disk without any in memory.
    pub(crate) blocks: (u32, u32),
    /// How long a disk takes for a block, and for some.
    pub(crate) takes: (Duration, Duration),
}

impl Below {
    /// Drawn apart, so that the rest of a seed's world is the same either way.
    pub(crate) fn draw(seed: u64) -> Self {
        let dice = &mut Dice::new(seed ^ BELOW);
        let blocks = match dice.chance(500) {
            true => (dice.count(1, 60), *dice.pick(&[0, 0, 8, 100])),
            false => (0, 0),
        };
        let takes = (dice.micros(50, 20_000), dice.micros(100, 3_000_000));
        Self { blocks, takes }
    }
}

impl Run<'_> {
    pub(crate) fn write_on(&mut self, who: WorkerRef, content: BlockHash) {
        let at = self.now + self.disk_takes(content);
        self.plan(at, Event::DiskWrote(who, content));
    }

    pub(crate) fn read_disk(
        &mut self,
        who: WorkerRef,
        (handoff, first): (HandoffId, Option<BlockHash>),
    ) {
        let at = self.now + self.disk_takes(first.unwrap_or_default());
        self.plan(at, Event::DiskRead(who, handoff));
    }

    /// Some of what is on a disk takes long; as long as the world says.
    fn disk_takes(&self, content: BlockHash) -> Duration {
        let slow = content.0[0].is_multiple_of(8);
        match slow {
            true => self.world.below.takes.1,
            false => self.world.below.takes.0,
        }
    }

    /// What a disk was to write is there, or is not.
    pub(crate) fn disk_wrote(
        &mut self,
        who: WorkerRef,
        content: BlockHash,
    ) -> Result<Option<String>, String> {
        let broken = match self.healed {
            true => 0,
            false => self.world.wire.broken,
        };
        let breaks = broken > 0 && self.dice.chance(10 * broken);
        let took = self.disk_takes(content);
        let Some(body) = self.seats[index(who)].body.as_mut().filter(|b| b.me == who) else {
            return Ok(None);
        };
        let luck = if breaks { Luck::Broken } else { Luck::Well };
        let outcome = body.disk_wrote(content, luck);
        body.check_below()?;
        let input = cleave_sched::Input::WrittenOn {
            content,
            outcome,
            took,
        };
        let words = words::input(&input);
        self.worker_hears(index(who), input)?;
        Ok(Some(format!("{} {words}", who.worker)))
    }

    /// A disk has what was asked of it.
    pub(crate) fn disk_read(
        &mut self,
        who: WorkerRef,
        handoff: HandoffId,
    ) -> Result<Option<String>, String> {
        let Some(body) = self.seats[index(who)].body.as_mut().filter(|b| b.me == who) else {
            return Ok(None);
        };
        body.disk_read(self.now, handoff);
        self.next_op(who);
        Ok(Some(format!("{} disk read   {handoff}", who.worker)))
    }

    pub(crate) fn note_below(&mut self, note: &Note) {
        match note {
            Note::Kept {
                place,
                outcome: KeepOutcome::Copied,
                ..
            } => self.count(match place {
                Place::Host => "kept in memory",
                Place::Disk => "kept on disk",
            }),
            Note::Fetched { came, outcome, .. } => {
                self.count(match outcome {
                    FetchOutcome::Copied => "fetched",
                    FetchOutcome::Stopped => "fetches stopped",
                    FetchOutcome::Missing
                    | FetchOutcome::Corrupt
                    | FetchOutcome::Unreadable
                    | FetchOutcome::Broken => "fetches failed",
                });
                if *came > 0 && *outcome != FetchOutcome::Copied {
                    self.count("fetched in part");
                }
            }
            _ => {}
        }
    }
}
