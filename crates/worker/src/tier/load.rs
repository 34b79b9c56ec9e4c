//! Copies blocks between the pool and the tiers, on the engine's thread.
//!
//! Owns: the progress of each fetch. Never looks a block up, or verifies one.
//! Invariant: blocks of a fetch are written in the sequence's order, and none after the fetch was
//! answered.

use super::{FetchedBlock, TierStore};
use crate::engine::{EngineHost, EngineThread, EngineWork};
use cleave_domain::{BlockHash, BlockIndex, HandoffId};
use cleave_engine::BlockSpan;
use cleave_sched::{FetchOutcome, OffloadOutcome, TierLevel, WorkerInput};
use std::collections::BTreeMap;
use std::sync::Arc;
use std::time::{Duration, Instant};
use tracing::error;

/// A block to be copied to host memory.
#[derive(Clone, Copy, Debug)]
pub(crate) struct OffloadJob {
    pub(crate) content: BlockHash,
    pub(crate) block: BlockIndex,
    pub(crate) bytes: u32,
}

/// Identifies a fetch: a sequence that loses its blocks fetches again, and late blocks of the
/// earlier fetch must not count for the new one.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct FetchId {
    pub(super) handoff: HandoffId,
    pub(super) number: u64,
}

/// A block that was fetched, or why it was not.
#[derive(Debug)]
pub(crate) struct LoadedBlock {
    pub(super) fetch: FetchId,
    /// The index of the block within the fetch.
    pub(super) ordinal: u32,
    pub(super) block: BlockIndex,
    pub(super) content: FetchedBlock,
    /// The time it took to find and verify the block.
    pub(super) took: Duration,
}

impl LoadedBlock {
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
pub(crate) struct PendingLoad {
    pub(crate) fetch: FetchId,
    pub(crate) blocks: u32,
    pub(crate) since: Instant,
}

/// The progress of a fetch.
#[derive(Clone, Copy, Debug)]
struct LoadProgress {
    incoming: PendingLoad,
    blocks_loaded: u32,
    /// The time spent on its blocks, with the one that failed; waiting does not count.
    worked: Duration,
}

/// Fetches under way, and the store that they read from.
#[derive(Debug)]
pub(crate) struct PendingLoads {
    host_tier: Arc<TierStore>,
    fetches: BTreeMap<HandoffId, LoadProgress>,
}

impl PendingLoads {
    pub(crate) fn new(tier_store: Arc<TierStore>) -> Self {
        Self {
            host_tier: tier_store,
            fetches: BTreeMap::new(),
        }
    }

    pub(crate) fn begin(&mut self, incoming: PendingLoad) {
        let progress = LoadProgress {
            incoming,
            blocks_loaded: 0,
            worked: Duration::ZERO,
        };
        self.fetches.insert(incoming.fetch.handoff, progress);
    }

    /// The one answer to a fetch, unless it was given already.
    pub(crate) fn end(&mut self, handoff: HandoffId, outcome: FetchOutcome) -> Option<WorkerInput> {
        let progress = self.fetches.remove(&handoff)?;
        let mut worked = progress.worked;
        if outcome != FetchOutcome::Copied {
            worked += self.host_tier.stop(handoff);
        }
        Some(WorkerInput::Fetched {
            handoff,
            came: progress.blocks_loaded,
            outcome,
            took: progress.incoming.since.elapsed(),
            worked,
        })
    }
}

impl EngineHost {
    /// Fetches the kept blocks of a sequence's beginning.
    pub(crate) fn fetch(&self, handoff: HandoffId, blocks: Vec<(BlockHash, BlockIndex)>) {
        let Some(tier_io) = &self.tier_io else {
            return;
        };
        let fetch = tier_io.register_fetch(handoff);
        self.push(EngineWork::Fetch(PendingLoad {
            fetch,
            blocks: u32::try_from(blocks.len()).expect("blocks of a sequence are few"),
            since: Instant::now(),
        }));
        tier_io.fetch(fetch, blocks);
    }

    /// Stops waiting for blocks that have not come yet.
    pub(crate) fn stop_fetch(&self, handoff: HandoffId) {
        if let Some(tier_io) = &self.tier_io {
            tier_io.stop(handoff);
        }
        self.queue.stop_fetch(handoff);
        self.wake();
    }

    /// Writes a block from host memory to disk.
    pub(crate) fn spill_to_disk(&self, content: BlockHash) {
        if let Some(tier_io) = &self.tier_io {
            tier_io.spill_to_disk(content);
        }
    }

    /// A content is no longer kept in this place.
    pub(crate) fn drop_tier_block(&self, content: BlockHash, place: TierLevel) {
        if let Some(tier_io) = &self.tier_io {
            tier_io.drop_block(content, place);
        }
    }
}

impl EngineThread {
    /// Copies a block of the pool to host memory.
    pub(crate) fn offload_block(&mut self, job: OffloadJob) -> WorkerInput {
        let began = Instant::now();
        let OffloadJob { content, block, .. } = job;
        let outcome = match self.copy_to_host(content, block) {
            Ok(()) => OffloadOutcome::Copied,
            Err(reason) => {
                error!(%block, %reason, "cannot copy a block to host memory");
                OffloadOutcome::Broken
            }
        };
        let took = began.elapsed();
        WorkerInput::Offloaded {
            content,
            outcome,
            took,
        }
    }

    fn copy_to_host(&mut self, content: BlockHash, block: BlockIndex) -> Result<(), String> {
        let tier_store = Arc::clone(
            &self
                .pending_loads
                .as_ref()
                .ok_or("this worker has no KV tier")?
                .host_tier,
        );
        let mut bytes = tier_store
            .block_buffer()
            .ok_or("there is no host memory left")?;
        self.read_span(BlockSpan::of_block(block, 0, bytes.len()), &mut bytes)?;
        tier_store.keep(content, bytes);
        Ok(())
    }

    /// Writes a fetched block; gives the fetch's answer if it was the last.
    pub(crate) fn load_block(&mut self, loaded: LoadedBlock) -> Option<WorkerInput> {
        let LoadedBlock {
            fetch,
            ordinal,
            block,
            content,
            took,
        } = loaded;
        let handoff = fetch.handoff;
        let progress = self.pending_loads.as_ref()?.fetches.get(&handoff)?;
        if progress.incoming.fetch != fetch {
            return None;
        }
        assert_eq!(progress.blocks_loaded, ordinal, "blocks come in order");
        let began = Instant::now();
        let outcome = match content {
            Ok((copy, _permit)) => match self
                .write_span(BlockSpan::of_block(block, 0, copy.bytes.len()), &copy.bytes)
            {
                Ok(()) => FetchOutcome::Copied,
                Err(reason) => {
                    error!(%block, %reason, "cannot write a fetched block into the pool");
                    FetchOutcome::Broken
                }
            },
            Err(outcome) => outcome,
        };
        let pending_loads = self.pending_loads.as_mut()?;
        let progress = pending_loads.fetches.get_mut(&handoff)?;
        progress.worked += took + began.elapsed();
        if outcome == FetchOutcome::Copied {
            progress.blocks_loaded += 1;
            if progress.blocks_loaded < progress.incoming.blocks {
                return None;
            }
        }
        pending_loads.end(handoff, outcome)
    }
}
