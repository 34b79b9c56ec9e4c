//! Contents of the tiers that are fetched into the pool instead of being computed.
//!
//! Owns: the fetches of the sequences, their deadlines and their measured prices.
//! Never: begins a fetch that leaves a sequence with blocks but without the state after them, where
//! the model has states. If such a fetch fails, the sequence computes its tokens.

use super::{OffloadTiers, PRICE_DECAY_PARTS};
use crate::batch::StepPipeline;
use crate::context::WorkerContext;
use crate::forecast::WorkForecast;
use crate::memory::KvMemory;
use crate::sequences::{SequenceTable, WorkerSequence};
use crate::{FetchOutcome, StateFetch, WorkerNote, WorkerOutput};
use cleave_domain::{BlockHash, KvPlane};
use cleave_kv::{TierLevel, snapshot_hash};
use std::time::Duration;

/// Shortest time allowed for a fetch, otherwise limited by the time to compute the same tokens: a
/// disk may have to spin up.
const FETCH_LEAST: Duration = Duration::from_millis(250);

/// A fetch of leading blocks for a sequence.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(crate) struct TierFetch {
    /// Number of blocks, from the first unpublished one on.
    pub(crate) blocks: u32,
    /// Number of pieces of the state after them; 0 without states.
    pieces: u32,
    /// Number of blocks and pieces on disk.
    on_disk: u32,
    /// A `FetchStop` was emitted for it.
    pub(super) stopped: bool,
    /// The first step emitted since is included in its deadline: a later one is not, or a disk that
    /// hangs would never end it.
    counts_step: bool,
}

impl TierFetch {
    /// Blocks and pieces together.
    pub(super) fn units(&self) -> u32 {
        self.blocks + self.pieces
    }
}

/// Leading blocks that the tiers have, and the predicted time to fetch them.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) struct TierMatch {
    /// Blocks in the pool that are of use only with a state from the tiers; before the others.
    pub(crate) adopted: u32,
    /// Blocks that follow those in the pool.
    pub(crate) blocks: u32,
    /// Pieces of the state after all of them.
    pieces: u32,
    on_disk: u32,
    /// Zero before anything was measured.
    pub(crate) takes: Duration,
    /// Time to compute the same tokens; `None` before anything was measured.
    recompute: Option<Duration>,
}

impl TierMatch {
    /// Predicted time to fetch it, if that was ever measured.
    pub(super) fn price(&self, tiers: &OffloadTiers) -> Option<Duration> {
        tiers.price(self.blocks + self.pieces, self.on_disk)
    }

    /// Whether fetching is cheaper than computing. True before both were measured, or they never
    /// would be.
    fn is_cheaper(&self) -> bool {
        self.recompute
            .is_none_or(|computing| self.takes <= computing)
    }

    /// Itself if fetching is cheaper, or nothing.
    pub(crate) fn if_cheaper(self) -> Self {
        if self.is_cheaper() {
            self
        } else {
            Self::default()
        }
    }
}

impl OffloadTiers {
    /// Predicted time to fetch so many blocks and pieces, if it was ever measured.
    fn price(&self, units: u32, on_disk: u32) -> Option<Duration> {
        let of = |each: Option<Duration>, count: u32| match count {
            0 => Some(Duration::ZERO),
            _ => Some(each?.saturating_mul(count)),
        };
        Some(of(self.from_host, units - on_disk)? + of(self.from_disk, on_disk)?)
    }

    /// The number of pieces of a snapshot on disk alone; `None` unless the tiers have all pieces.
    fn pieces_on_disk(&self, snapshot: BlockHash) -> Option<u32> {
        let pieces = self.pieces(KvPlane::State, snapshot);
        pieces
            .map(|piece| {
                Some(u32::from(
                    self.index.level_of(piece.content)? == TierLevel::Disk,
                ))
            })
            .sum()
    }

    /// Learns the price of a fetch of which `units_fetched` units arrived, from the time worked
    /// on it. Time spent waiting for steps and for other fetches does not count: otherwise a busy
    /// engine would make tiers look too dear to use.
    fn measure(&mut self, units_fetched: u32, fetch: TierFetch, worked: Duration) {
        if units_fetched == 0 && worked.is_zero() {
            return;
        }
        // A fetch without result still took the time of one block at least.
        let (from_host, count) = (fetch.units() - fetch.on_disk, units_fetched.max(1));
        if fetch.on_disk == 0 {
            return mean(&mut self.from_host, worked / count);
        }
        let host = self.from_host.unwrap_or_default() * from_host.min(units_fetched);
        let count = units_fetched.saturating_sub(from_host).max(1);
        mean(&mut self.from_disk, worked.saturating_sub(host) / count);
    }
}

impl KvMemory {
    /// Contents in the tiers that follow a sequence's first `blocks_known` blocks.
    pub(crate) fn tier_match(
        &self,
        sequence: &mut WorkerSequence,
        blocks_known: u32,
        forecast: &WorkForecast,
    ) -> TierMatch {
        let size = self.block_tokens;
        if self.tiers.is_empty() || !self.prefix_cache {
            return TierMatch::default();
        }
        let able = !sequence.kv.state_fetch_failed;
        let hashes = sequence.reusable(size);
        let hashes = &hashes[hashes.len().min(blocks_known as usize)..];
        let mut found = if self.pools.states.is_none() {
            self.blocks_in_tiers(hashes)
        } else if able {
            self.prefix_with_state(hashes)
        } else {
            TierMatch::default()
        };
        found.takes = found.price(&self.tiers).unwrap_or_default();
        let tokens = (found.adopted + found.blocks) * size;
        found.recompute = self.compute_price(blocks_known * size, tokens, forecast);
        found
    }

    /// The leading contents that the tiers have and the pool has not.
    fn blocks_in_tiers(&self, hashes: &[BlockHash]) -> TierMatch {
        let mut found = TierMatch::default();
        for hash in hashes {
            let place = self.tiers.index.level_of(*hash);
            let Some(place) = place.filter(|_| !self.pools.blocks.contains(*hash)) else {
                break;
            };
            found.blocks += 1;
            found.on_disk += u32::from(place == TierLevel::Disk);
        }
        found
    }

    /// The longest beginning of contents whose first blocks are in the pool, the others in the
    /// tiers, and the state after them in the tiers.
    pub(super) fn prefix_with_state(&self, hashes: &[BlockHash]) -> TierMatch {
        let in_pool = self.pools.blocks.prefix_hits(hashes).blocks;
        let (pooled, others) = hashes.split_at(in_pool as usize);
        let in_tiers = self.blocks_in_tiers(others).blocks as usize;
        let ends = pooled.len() + in_tiers;
        let snapshot = |end: &usize| self.tiers.pieces_on_disk(snapshot_hash(hashes[end - 1]));
        let longest = (1..=ends)
            .rev()
            .find_map(|end| Some((end, snapshot(&end)?)));
        let Some((end, pieces_on_disk)) = longest else {
            return TierMatch::default();
        };
        let adopted = end.min(pooled.len());
        let fetched = self.blocks_in_tiers(&hashes[adopted..end]);
        TierMatch {
            adopted: u32::try_from(adopted).expect("blocks of a sequence are few"),
            pieces: self.tiers.state_pieces,
            on_disk: fetched.on_disk + pieces_on_disk,
            ..fetched
        }
    }

    /// Time to compute so many tokens after the first `tokens_known`; `None` before anything was
    /// measured.
    fn compute_price(
        &self,
        tokens_known: u32,
        tokens: u32,
        forecast: &WorkForecast,
    ) -> Option<Duration> {
        if forecast.has_prices() {
            Some(forecast.prefill(tokens_known, tokens))
        } else {
            Some(self.swap_prices.recompute_token()?.saturating_mul(tokens))
        }
    }

    /// Fetches a sequence's leading blocks from the tiers, if that is cheaper than to compute them.
    /// All other sequences go on meanwhile. Called when it becomes active, and again whenever it
    /// has new blocks for lost ones.
    pub(crate) fn fetch(
        &mut self,
        context: &mut WorkerContext,
        sequence: &mut WorkerSequence,
        steps: &StepPipeline,
        forecast: &WorkForecast,
    ) {
        let blocks_known = sequence.kv.published;
        let found = if sequence.kv.computed == blocks_known * self.block_tokens {
            self.tier_match(sequence, blocks_known, forecast)
        } else {
            TierMatch::default()
        };
        if !found.is_cheaper() {
            self.tiers.lower_prices(PRICE_DECAY_PARTS[0]);
        } else if found.blocks + found.pieces > 0 {
            let wait_max = found.recompute.unwrap_or(context.limits().step_max);
            let wait_max = wait_max.max(FETCH_LEAST);
            let until = context.now() + steps.left(context.now()) + wait_max;
            self.tiers.fetch_deadlines.set(sequence.handoff(), until);
            self.begin_fetch(context, sequence, found);
        }
    }

    /// Extends each fetch's deadline by the first step emitted after it began, since its copies may
    /// run only after that step.
    pub(crate) fn fetches_wait_for_step(
        &mut self,
        sequences: &mut SequenceTable,
        steps: &StepPipeline,
    ) {
        let step = steps.last().map_or(Duration::ZERO, |step| step.predicted);
        let fetches = self.tiers.fetch_deadlines.iter();
        let fetching: Vec<_> = fetches.map(|(of, _)| of).collect();
        for handoff in fetching {
            let sequence = sequences.get_mut(handoff);
            let fetch = sequence.and_then(|sequence| sequence.kv.fetch.as_mut());
            if fetch.is_some_and(|fetch| !std::mem::replace(&mut fetch.counts_step, true)) {
                self.tiers.fetch_deadlines.postpone(handoff, step);
            }
        }
    }

    fn begin_fetch(
        &mut self,
        context: &mut WorkerContext,
        sequence: &mut WorkerSequence,
        found: TierMatch,
    ) {
        if found.adopted > 0 {
            self.adopt_blocks(sequence, found.adopted);
            // The state comes from the tiers, for more tokens than that of the snapshot.
            self.drop_restore(sequence);
        }
        let (from, to) = (sequence.kv.published, sequence.kv.published + found.blocks);
        self.take_reserved(sequence, to);
        let range = from as usize..to as usize;
        let hashes = sequence.kv.hashes[range.clone()].iter().copied();
        let table = sequence.kv.table[range].iter().map(|held| held.block);
        let blocks: Vec<_> = hashes.zip(table).collect();
        let state = self.state_fetch(sequence, to).filter(|_| found.pieces > 0);
        let pieces = state.iter().flat_map(|state| &state.pieces);
        for content in blocks.iter().map(|(content, _)| content).chain(pieces) {
            self.tiers.index.begin_read(*content);
        }
        sequence.kv.fetch = Some(TierFetch {
            blocks: found.blocks,
            pieces: found.pieces,
            on_disk: found.on_disk,
            stopped: false,
            counts_step: false,
        });
        let handoff = sequence.handoff();
        context.emit(WorkerOutput::Fetch {
            handoff,
            blocks,
            state,
        });
    }

    /// The pieces of the state after a sequence's first `blocks` blocks, and its live slot.
    fn state_fetch(&self, sequence: &WorkerSequence, blocks: u32) -> Option<StateFetch> {
        let state = sequence.kv.state?;
        let prefix = sequence.kv.hashes[(blocks as usize).checked_sub(1)?];
        let pieces = self.tiers.pieces(KvPlane::State, snapshot_hash(prefix));
        Some(StateFetch {
            pieces: pieces.map(|piece| piece.content).collect(),
            slot: state.live.block,
        })
    }

    /// Stops a fetch: the blocks that are not here yet are computed instead.
    pub(crate) fn stop_fetch(
        &mut self,
        context: &mut WorkerContext,
        sequence: &mut WorkerSequence,
    ) {
        let handoff = sequence.handoff();
        self.tiers.fetch_deadlines.remove(handoff);
        let Some(fetch) = &mut sequence.kv.fetch else {
            return;
        };
        if !std::mem::replace(&mut fetch.stopped, true) {
            context.emit(WorkerOutput::FetchStop { handoff });
        }
    }

    /// Stops fetches that take longer than their deadline.
    pub(crate) fn stop_late_fetches(
        &mut self,
        context: &mut WorkerContext,
        sequences: &mut SequenceTable,
    ) {
        while let Some(handoff) = self.tiers.fetch_deadlines.pop_passed(context.now()) {
            if let Some(sequence) = sequences.get_mut(handoff) {
                self.stop_fetch(context, sequence);
            }
        }
    }

    /// Handles the end of a fetch: its first `units` blocks and pieces of the state are in the
    /// pool; the rest is computed. The caller releases the sequence if it is over.
    pub(crate) fn fetched(
        &mut self,
        context: &mut WorkerContext,
        sequence: &mut WorkerSequence,
        units: u32,
        outcome: FetchOutcome,
        took: Duration,
        worked: Duration,
    ) {
        let Some(fetch) = sequence.kv.fetch.take() else {
            return;
        };
        let handoff = sequence.handoff();
        let units_fetched = units.min(fetch.units());
        let from = sequence.kv.published as usize;
        let mut contents = sequence.kv.hashes[from..from + fetch.blocks as usize].to_vec();
        if fetch.pieces > 0 {
            let state = self.state_fetch(sequence, sequence.kv.published + fetch.blocks);
            contents.extend(state.into_iter().flat_map(|state| state.pieces));
        }
        let closing = sequence.closing();
        if !closing {
            self.reached_by_fetch(sequence, fetch, units_fetched);
        }
        self.tiers.fetch_deadlines.remove(handoff);
        self.forget_spoiled(context, contents.get(units_fetched as usize), outcome);
        for content in contents {
            self.tiers.index.end_read(content);
        }
        context.note(WorkerNote::Fetched {
            handoff,
            asked: fetch.units(),
            came: units_fetched,
            outcome,
            took,
        });
        if !closing {
            self.tiers.measure(units_fetched, fetch, worked);
            self.publish(sequence);
        }
    }

    /// Counts the tokens that a fetch brought. Blocks without the state after them bring none: the
    /// sequence goes on from where it was, or, if it took blocks of the pool for the fetch, begins
    /// again, see [`WorkerSequence::lacks_state`].
    fn reached_by_fetch(
        &mut self,
        sequence: &mut WorkerSequence,
        fetch: TierFetch,
        units_fetched: u32,
    ) {
        if fetch.pieces == 0 {
            sequence.kv.computed += units_fetched * self.block_tokens;
        } else if units_fetched == fetch.units() {
            sequence.kv.computed += fetch.blocks * self.block_tokens;
            self.state_reached(sequence);
        } else {
            sequence.kv.state_fetch_failed = true;
        }
    }

    /// Drops the content that stopped a fetch, if the content was at fault, so that it is not tried
    /// again.
    fn forget_spoiled(
        &mut self,
        context: &mut WorkerContext,
        stopped_at: Option<&BlockHash>,
        outcome: FetchOutcome,
    ) {
        let Some(content) = stopped_at.copied().filter(|_| outcome.is_contents_fault()) else {
            return;
        };
        for place in self.tiers.index.forget(content) {
            context.emit(WorkerOutput::TierDrop { content, place });
        }
    }
}

/// Running mean over about four measurements: fetches are few.
fn mean(mean: &mut Option<Duration>, each: Duration) {
    *mean = Some(mean.map_or(each, |mean| (mean * 3 + each) / 4));
}
