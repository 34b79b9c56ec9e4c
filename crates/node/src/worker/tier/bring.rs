//! The engine's part of a tier: a block out of the pool, a block back into it.
//!
//! Owns: how far each fetch has come. Never: looks for a block, or checks one. Lives on the engine's thread.
//! Invariant: blocks of a fetch are written in the sequence's order, and none after it was answered.

use super::{Copy, Found, Shelves};
use crate::worker::engine::{Bench, EngineHost, Work};
use cleave_domain::{BlockHash, BlockIndex, HandoffId};
use cleave_engine::BlockSpan;
use cleave_sched::{FetchOutcome, Input, KeepOutcome, Place};
use std::collections::BTreeMap;
use std::sync::Arc;
use std::time::{Duration, Instant};
use tracing::error;

/// A block to be copied to host memory.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Shelving {
    pub(crate) content: BlockHash,
    pub(crate) block: BlockIndex,
    pub(crate) bytes: u32,
}

/// Names a fetch: a sequence that lost its blocks asks again, and what comes late of the fetch before is not
/// of this one.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct FetchId {
    pub(super) handoff: HandoffId,
    pub(super) number: u64,
}

/// A block that comes back, or why it does not.
#[derive(Debug)]
pub(crate) struct Brought {
    pub(super) fetch: FetchId,
    /// Which of the fetch's blocks.
    pub(super) ordinal: u32,
    pub(super) block: BlockIndex,
    pub(super) content: Found,
    /// How long it was looked for and checked.
    pub(super) took: Duration,
}

impl Brought {
    pub(crate) fn handoff(&self) -> HandoffId {
        self.fetch.handoff
    }

    pub(crate) fn bytes(&self) -> u64 {
        let copy = self.content.as_ref().ok();
        copy.map_or(0, |(copy, _)| copy.bytes.len() as u64)
    }
}

/// A fetch that begins.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Incoming {
    pub(crate) fetch: FetchId,
    pub(crate) blocks: u32,
    pub(crate) since: Instant,
}

/// How far a fetch is.
#[derive(Clone, Copy, Debug)]
struct Progress {
    incoming: Incoming,
    came: u32,
    /// What those that came cost, and the one that is amiss; no waiting is in it.
    worked: Duration,
}

/// Fetches under way, and what is kept.
#[derive(Debug)]
pub(crate) struct Incomings {
    shelves: Arc<Shelves>,
    fetches: BTreeMap<HandoffId, Progress>,
}

impl Incomings {
    pub(crate) fn new(shelves: Arc<Shelves>) -> Self {
        Self {
            shelves,
            fetches: BTreeMap::new(),
        }
    }

    pub(crate) fn begin(&mut self, incoming: Incoming) {
        let progress = Progress {
            incoming,
            came: 0,
            worked: Duration::ZERO,
        };
        self.fetches.insert(incoming.fetch.handoff, progress);
    }

    /// The one answer to a fetch, unless it was given.
    pub(crate) fn end(&mut self, handoff: HandoffId, outcome: FetchOutcome) -> Option<Input> {
        let progress = self.fetches.remove(&handoff)?;
        let mut worked = progress.worked;
        if outcome != FetchOutcome::Copied {
            worked += self.shelves.stop(handoff);
        }
        Some(Input::Fetched {
            handoff,
            came: progress.came,
            outcome,
            took: progress.incoming.since.elapsed(),
            worked,
        })
    }
}

impl EngineHost {
    /// Has what is kept of a sequence's beginning brought back.
    pub(crate) fn fetch(&self, handoff: HandoffId, blocks: Vec<(BlockHash, BlockIndex)>) {
        let Some(keeper) = &self.keeper else {
            return;
        };
        let fetch = keeper.want(handoff);
        self.push(Work::Fetch(Incoming {
            fetch,
            blocks: u32::try_from(blocks.len()).expect("blocks of a sequence are few"),
            since: Instant::now(),
        }));
        keeper.fetch(fetch, blocks);
    }

    /// What has not come of it yet is not waited for.
    pub(crate) fn stop_fetch(&self, handoff: HandoffId) {
        if let Some(keeper) = &self.keeper {
            keeper.stop(handoff);
        }
        self.queue.stop_fetch(handoff);
        self.wake();
    }

    /// Has a content written from host memory to disk.
    pub(crate) fn write_on(&self, content: BlockHash) {
        if let Some(keeper) = &self.keeper {
            keeper.write_on(content);
        }
    }

    /// A content is kept in this place no longer.
    pub(crate) fn drop_kept(&self, content: BlockHash, place: Place) {
        if let Some(keeper) = &self.keeper {
            keeper.drop_kept(content, place);
        }
    }
}

impl Bench {
    /// Copies a block of the pool to host memory.
    pub(crate) fn shelve(&mut self, shelving: Shelving) -> Input {
        let began = Instant::now();
        let Shelving { content, block, .. } = shelving;
        let outcome = match self.copy_to_host(content, block) {
            Ok(()) => KeepOutcome::Copied,
            Err(reason) => {
                error!(%block, %reason, "cannot copy a block to host memory");
                KeepOutcome::Broken
            }
        };
        let took = began.elapsed();
        Input::Shelved {
            content,
            outcome,
            took,
        }
    }

    fn copy_to_host(&mut self, content: BlockHash, block: BlockIndex) -> Result<(), String> {
        let shelves = Arc::clone(&self.incomings.as_ref().ok_or("nothing is kept")?.shelves);
        let mut bytes = shelves.room().ok_or("there is no host memory left")?;
        let blocks = self.blocks.clone();
        let read = self.guarded(|engine| match blocks {
            Some(blocks) => blocks
                .read(&mut [(whole(block, bytes.len()), &mut bytes[..])])
                .map(drop),
            None => engine.read_block(block, 0, &mut bytes),
        });
        read?.map_err(|error| self.failed(&error))?;
        shelves.keep(content, bytes);
        Ok(())
    }

    /// Writes a block that came back; gives the fetch's answer if it was the last.
    pub(crate) fn bring(&mut self, brought: Brought) -> Option<Input> {
        let Brought {
            fetch,
            ordinal,
            block,
            content,
            took,
        } = brought;
        let handoff = fetch.handoff;
        let progress = self.incomings.as_ref()?.fetches.get(&handoff)?;
        if progress.incoming.fetch != fetch {
            return None;
        }
        assert_eq!(progress.came, ordinal, "blocks come in order");
        let began = Instant::now();
        let outcome = match content {
            Ok((copy, _seat)) => match self.copy_back(block, &copy) {
                Ok(()) => FetchOutcome::Copied,
                Err(reason) => {
                    error!(%block, %reason, "cannot write a block that was kept");
                    FetchOutcome::Broken
                }
            },
            Err(outcome) => outcome,
        };
        let incomings = self.incomings.as_mut()?;
        let progress = incomings.fetches.get_mut(&handoff)?;
        progress.worked += took + began.elapsed();
        if outcome == FetchOutcome::Copied {
            progress.came += 1;
            if progress.came < progress.incoming.blocks {
                return None;
            }
        }
        incomings.end(handoff, outcome)
    }

    fn copy_back(&mut self, block: BlockIndex, copy: &Copy) -> Result<(), String> {
        let blocks = self.blocks.clone();
        let bytes = &copy.bytes[..];
        let written = self.guarded(|engine| match blocks {
            Some(blocks) => blocks.write(&[(whole(block, bytes.len()), bytes)]),
            None => engine.write_block(block, 0, bytes),
        });
        written?.map_err(|error| self.failed(&error))
    }
}

fn whole(block: BlockIndex, len: usize) -> BlockSpan {
    BlockSpan {
        block,
        offset: 0,
        len,
    }
}
