//! Contents of the tiers that are fetched into the pool instead of being computed.
//!
//! Owns: the fetches of the sequences, their deadlines and their measured prices.
//! Never: begins a fetch that leaves a sequence with blocks but without the state after them or the
//! window before their end, where the model has these. If such a fetch fails, the sequence computes
//! its tokens.

use super::{OffloadTiers, PRICE_DECAY_PARTS};
use crate::batch::StepPipeline;
use crate::context::WorkerContext;
use crate::forecast::WorkForecast;
use crate::memory::KvMemory;
use crate::sequences::{SequenceTable, WorkerSequence};
use crate::{FetchOutcome, StateFetch, WindowFetch, WorkerNote, WorkerOutput};
use cleave_domain::{BlockHash, KvPlane};
use cleave_kv::{TierLevel, snapshot_hash, window_hash};
use std::ops::Range;
use std::time::Duration;

/// Shortest time allowed for a fetch, otherwise limited by the time to compute the same tokens: a
/// disk may have to spin up.
const FETCH_LEAST: Duration = Duration::from_millis(250);

/// A fetch of leading blocks for a sequence.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(crate) struct TierFetch {
    /// Number of blocks, from the first unpublished one on.
    pub(crate) blocks: u32,
    /// Number of pieces of the state after them and of the window before their end.
    pieces: u32,
    /// Ordinal of the first block of the window, if the window is fetched.
    window_first: Option<u32>,
    /// The blocks are of use only all together, and with the pieces.
    is_whole: bool,
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
    /// Blocks in the pool that are of use only with a state or window from the tiers; before the
    /// others.
    pub(crate) adopted: u32,
    /// Blocks that follow those in the pool.
    pub(crate) blocks: u32,
    /// Pieces of the state after all of them, and of the window before their end.
    pieces: u32,
    /// Whether the window is in the tiers, not in the pool.
    fetches_window: bool,
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

    /// The number of pieces of a content on disk alone; `None` unless the tiers have all pieces.
    fn pieces_on_disk(&self, plane: KvPlane, content: BlockHash) -> Option<u32> {
        let pieces = self.pieces(plane, content);
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
        let one_plane = self.pools.states.is_none() && self.pools.windows.is_none();
        let mut found = if one_plane {
            self.blocks_in_tiers(&hashes[hashes.len().min(blocks_known as usize)..])
        } else if able {
            self.prefix_with_rest(hashes, blocks_known)
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

    /// The longest beginning of contents, past the first `known` that the sequence has, whose next
    /// blocks are in the pool, the others in the tiers, the state after them in the tiers, and the
    /// window before their end all in the pool or all in the tiers.
    pub(super) fn prefix_with_rest(&self, hashes: &[BlockHash], known: u32) -> TierMatch {
        let known = hashes.len().min(known as usize);
        let in_pool = self.pools.blocks.prefix_hits(&hashes[known..]).blocks as usize;
        let in_tiers = self.blocks_in_tiers(&hashes[known + in_pool..]).blocks as usize;
        let mut ends = (known + 1..=known + in_pool + in_tiers).rev();
        let Some((end, rest)) = ends.find_map(|end| Some((end, self.rest_in_tiers(hashes, end)?)))
        else {
            return TierMatch::default();
        };
        let adopted = (end - known).min(in_pool);
        let fetched = self.blocks_in_tiers(&hashes[known + adopted..end]);
        TierMatch {
            adopted: u32::try_from(adopted).expect("blocks of a sequence are few"),
            on_disk: fetched.on_disk + rest.on_disk,
            blocks: fetched.blocks,
            ..rest
        }
    }

    /// The state after the first `end` blocks and the window before their end; `None` if they
    /// cannot all be had.
    fn rest_in_tiers(&self, hashes: &[BlockHash], end: usize) -> Option<TierMatch> {
        let tiers = &self.tiers;
        let mut rest = TierMatch::default();
        if self.pools.states.is_some() {
            let snapshot = snapshot_hash(hashes[end - 1]);
            rest.pieces += tiers.state_pieces;
            rest.on_disk += tiers.pieces_on_disk(KvPlane::State, snapshot)?;
        }
        let Some(windows) = &self.pools.windows else {
            return Some(rest);
        };
        let end = u32::try_from(end).expect("blocks of a sequence are few");
        let window = self.window_before(end);
        let window = &hashes[window.start as usize..window.end as usize];
        let mut contents = window.iter().map(|hash| window_hash(*hash));
        if contents.clone().all(|content| windows.contains(content)) {
            return Some(rest);
        }
        let on_disk: Option<u32> = contents.try_fold(0, |sum, content| {
            Some(sum + tiers.pieces_on_disk(KvPlane::Window, content)?)
        });
        rest.on_disk += on_disk?;
        rest.pieces += window.len() as u32 * tiers.window_pieces;
        rest.fetches_window = true;
        Some(rest)
    }

    /// The ordinals of the window's blocks before the end of the first `blocks` blocks.
    fn window_before(&self, blocks: u32) -> Range<u32> {
        let window = self.pools.window();
        let first = window.map_or(blocks, |window| {
            window.first_block(blocks * self.block_tokens).min(blocks)
        });
        first..blocks
    }

    /// The contents of the pieces of a sequence's window before the end of its first `blocks`
    /// blocks, from `first` on.
    fn window_pieces(&self, sequence: &WorkerSequence, ordinals: Range<u32>) -> Vec<BlockHash> {
        let hashes = &sequence.kv.hashes[ordinals.start as usize..ordinals.end as usize];
        let pieces = hashes
            .iter()
            .flat_map(|hash| self.tiers.pieces(KvPlane::Window, window_hash(*hash)));
        pieces.map(|piece| piece.content).collect()
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
        let window = self.begin_window_fetch(sequence, to, &found);
        let range = from as usize..to as usize;
        let hashes = sequence.kv.hashes[range.clone()].iter().copied();
        let table = sequence.kv.table[range].iter().map(|held| held.block);
        let blocks: Vec<_> = hashes.zip(table).collect();
        let state = self.state_fetch(sequence, to);
        let pieces = window.iter().flat_map(|window| &window.pieces);
        let pieces = pieces.chain(state.iter().flat_map(|state| &state.pieces));
        for content in blocks.iter().map(|(content, _)| content).chain(pieces) {
            self.tiers.index.begin_read(*content);
        }
        sequence.kv.fetch = Some(TierFetch {
            blocks: found.blocks,
            pieces: found.pieces,
            window_first: window.as_ref().map(|window| window.table.first),
            is_whole: sequence.kv.state.is_some() || sequence.kv.window.is_some(),
            on_disk: found.on_disk,
            stopped: false,
            counts_step: false,
        });
        let handoff = sequence.handoff();
        context.emit(WorkerOutput::Fetch {
            handoff,
            blocks,
            window,
            state,
        });
    }

    /// Gives a sequence the window before the end of its first `blocks` blocks: that of the pool,
    /// or blocks for the one that is fetched.
    fn begin_window_fetch(
        &mut self,
        sequence: &mut WorkerSequence,
        blocks: u32,
        found: &TierMatch,
    ) -> Option<WindowFetch> {
        if !found.fetches_window {
            self.adopt_window(sequence, blocks);
            return None;
        }
        let ordinals = self.window_before(blocks);
        self.renew_window(sequence, ordinals.clone());
        Some(WindowFetch {
            pieces: self.window_pieces(sequence, ordinals),
            table: sequence.kv.window.as_ref()?.table(),
        })
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
        let to = sequence.kv.published + fetch.blocks;
        if let Some(first) = fetch.window_first {
            contents.extend(self.window_pieces(sequence, first..to));
        }
        let state = self.state_fetch(sequence, to);
        contents.extend(state.into_iter().flat_map(|state| state.pieces));
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

    /// Counts the tokens that a fetch brought. Blocks without the state after them, or the window
    /// before their end, bring none: the sequence goes on from where it was, or, if it gave up its
    /// window or took blocks of the pool for the fetch, begins again, see
    /// [`WorkerSequence::lacks_state`].
    fn reached_by_fetch(
        &mut self,
        sequence: &mut WorkerSequence,
        fetch: TierFetch,
        units_fetched: u32,
    ) {
        if !fetch.is_whole {
            sequence.kv.computed += units_fetched * self.block_tokens;
        } else if units_fetched == fetch.units() {
            sequence.kv.computed += fetch.blocks * self.block_tokens;
            self.state_reached(sequence);
        } else {
            sequence.kv.state_fetch_failed = true;
            self.window_lost(sequence);
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
