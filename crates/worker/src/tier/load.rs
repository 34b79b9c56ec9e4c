//! Copies blocks between the pool and the tiers, on the engine's thread.
//!
//! Owns: the progress of each fetch. Never looks a block up, or verifies one.
//! Invariant: blocks of a fetch are written in the sequence's order, and none after the fetch was
//! answered.

use super::{FetchedBlock, TierStore};
use crate::engine::{EngineHost, EngineThread, EngineWork};
use crate::queue::EngineQueue;
use cleave_domain::{BlockHash, HandoffId};
use cleave_engine::BlockSpan;
use cleave_sched::{FetchOutcome, OffloadOutcome, TierLevel, WorkerInput};
use std::collections::BTreeMap;
use std::sync::Arc;
use std::time::{Duration, Instant};
use tracing::error;

/// A block, or pieces of a snapshot, to be copied to host memory.
#[derive(Clone, Debug)]
pub(crate) struct OffloadJob {
    /// The block's or snapshot's content, under which the copy is answered.
    content: BlockHash,
    /// The parts left to copy, each under a content of its own; the next one last.
    parts: Vec<(BlockHash, BlockSpan)>,
    /// Time spent on copies so far.
    took: Duration,
}

impl OffloadJob {
    /// An offload of these parts, in order.
    pub(crate) fn new(content: BlockHash, mut parts: Vec<(BlockHash, BlockSpan)>) -> Self {
        parts.reverse();
        Self {
            content,
            parts,
            took: Duration::ZERO,
        }
    }

    /// Bytes of the next copy.
    pub(crate) fn next_bytes(&self) -> u64 {
        self.parts.last().map_or(0, |(_, span)| span.len as u64)
    }
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
    /// Where it goes to.
    pub(super) span: BlockSpan,
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
    pub(crate) fn fetch(&self, handoff: HandoffId, parts: Vec<(BlockHash, BlockSpan)>) {
        let Some(tier_io) = &self.tier_io else {
            return;
        };
        let fetch = tier_io.register_fetch(handoff);
        self.push(EngineWork::Fetch(PendingLoad {
            fetch,
            blocks: u32::try_from(parts.len()).expect("blocks of a sequence are few"),
            since: Instant::now(),
        }));
        tier_io.fetch(fetch, parts);
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
    /// Copies the next part of an offload to host memory, and queues the rest; gives the answer
    /// after the last part.
    pub(crate) fn offload_part(
        &mut self,
        mut job: OffloadJob,
        queue: &EngineQueue,
    ) -> Option<WorkerInput> {
        let began = Instant::now();
        let copied = match job.parts.pop() {
            Some((content, span)) => self.copy_to_host(content, span).map_err(|reason| {
                error!(block = %span.block, %reason, "cannot copy a block to host memory");
            }),
            None => Ok(()),
        };
        job.took += began.elapsed();
        if copied.is_ok() && !job.parts.is_empty() {
            queue.requeue_offload(job);
            return None;
        }
        Some(WorkerInput::Offloaded {
            content: job.content,
            outcome: match copied {
                Ok(()) => OffloadOutcome::Copied,
                Err(()) => OffloadOutcome::Broken,
            },
            took: job.took,
        })
    }

    fn copy_to_host(&mut self, content: BlockHash, span: BlockSpan) -> Result<(), String> {
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
        // The last piece of a snapshot may be shorter than a block.
        let (used, rest) = bytes.split_at_mut(span.len);
        self.read_span(span, used)?;
        rest.fill(0);
        tier_store.keep(content, bytes);
        Ok(())
    }

    /// Writes a fetched block; gives the fetch's answer if it was the last.
    pub(crate) fn load_block(&mut self, loaded: LoadedBlock) -> Option<WorkerInput> {
        let LoadedBlock {
            fetch,
            ordinal,
            span,
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
            Ok((copy, _permit)) => match self.write_span(span, &copy.bytes[..span.len]) {
                Ok(()) => FetchOutcome::Copied,
                Err(reason) => {
                    error!(block = %span.block, %reason, "cannot write a fetched block into the pool");
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
