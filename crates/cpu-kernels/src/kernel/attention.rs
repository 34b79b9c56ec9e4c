//! Attention of a few query rows over the pool.
//!
//! Owns: the loop over keys, the online softmax, and the scratch space of both. A task with few
//! rows computes several KV heads: heads are adjacent in a block, so that memory is read in long
//! runs.
//! Invariant: a query row's result does not depend on the rows, segments and chunks computed beside
//! it, nor on the division of its keys among tasks. Keys go in tiles of [`TILE`] positions, tiles
//! in spans of [`SPAN`]; every span starts from an empty state, and spans are merged in order. A
//! masked key does not change a row's state, to the bit: the largest score stays, so that the scale
//! is exactly 1, and the weight is exactly 0.

mod state;
mod task;

use super::SoftCap;
use super::kv_sources::{GROUPS, GatheredKv, LocatedKv, locate_kv, sources_in_pool};
use super::rows::capped;
use super::tile::{
    ElementFormat, TileSides, accumulate, pack_row, rows_compiled, wide, with_filled,
};
use crate::layout::{KEYS_ACROSS, KvLayout};
use crate::memory::{PageMemory, SliceParts};
use crate::simd::{LANES, Simd};
use cleave_domain::BlockIndex;
use cleave_engine::EngineError;
use cleave_engine::ops::HeadShape;
use state::{SoftmaxState, merge, row_state};
use std::ops::Range;
pub(super) use task::AttentionTask;

/// Keys per tile; a span is computed tile by tile.
pub const TILE: usize = 64;
/// Keys per span; spans of a long sequence are computed in parallel.
pub const SPAN: usize = 512;
/// Query rows (tokens times query heads per KV head) that share a pass over the keys.
pub const ROWS: usize = 56;

/// Contents of a pool, as attention reads them.
#[derive(Clone, Copy)]
pub enum PoolContents<'a, T> {
    /// Elements in the format of the products.
    Elements(&'a [T]),
    /// Signed bytes; the scales of a head's tokens follow its bytes.
    Codes(&'a [u8]),
}

/// One layer's attention, seen by all its tasks.
pub struct LayerAttention<'a, T> {
    pub heads: HeadShape,
    pub block_tokens: usize,
    pub layout: KvLayout,
    pub pool: PoolContents<'a, T>,
    /// Size of a head in a block, and of a block, in elements or bytes.
    pub head_elements: usize,
    pub block_elements: usize,
    /// Offsets in a block of the layer's first key head and first value head, in elements or bytes.
    pub layer_offsets: (usize, usize),
    /// `(rows, q | k | v)`.
    pub qkv: &'a [f32],
    /// Factor of the scores; includes log2(e), because weights are computed with exp2.
    pub scale: f32,
    /// Cap of the scores, which are multiplied by log2(e).
    pub soft_cap: Option<SoftCap>,
    /// Sliding window: position `p` attends to `p - window + 1 ..= p`.
    pub window: usize,
    /// Sink of each query head, if there are any: one more score, not multiplied by
    /// `scale`, without a value.
    pub sinks: Option<&'a [f32]>,
    /// `(rows, query_heads × head_dim)`.
    pub out: SliceParts<'a, f32>,
    /// States of tasks that cover a single span, for the later merge; see [`state_len`].
    pub partials: SliceParts<'a, f32>,
}

/// Query rows of a task: consecutive tokens of one segment, with some KV heads.
#[derive(Clone)]
pub struct Queries<'a> {
    pub table: &'a [BlockIndex],
    /// Row of the first token in the batch.
    pub row: usize,
    /// Position of the first token.
    pub position: usize,
    pub tokens: usize,
    pub kv_heads: Range<usize>,
}

/// Spans that a task covers, and the destination of its result.
#[derive(Clone, Debug)]
pub enum SpanShare {
    /// All spans; the result is written to the output.
    AllSpans,
    /// One span; the rows' states are written to the partials from this element on.
    OneSpan { span: usize, partial: usize },
}

impl Queries<'_> {
    fn keys(&self) -> usize {
        self.position + self.tokens
    }

    pub fn spans_count(&self) -> usize {
        self.keys().div_ceil(SPAN)
    }
}

/// Scratch memory of one worker.
pub struct AttentionScratch {
    /// Packed queries: of each head and register tile `[step][phase][row]`.
    queries: PageMemory<u32>,
    gathered: GatheredKv,
    /// `(rows of a register tile, TILE)`.
    scores: PageMemory<f32>,
    /// Packed weights: `(rows of a register tile, TILE)`, a word per step and phase.
    weights: PageMemory<u32>,
    span: SoftmaxState,
    total: SoftmaxState,
}

/// Elements of a head, rounded up to whole vectors.
pub const fn head_width(heads: HeadShape) -> usize {
    heads.head_dim.next_multiple_of(LANES)
}

const fn query_heads_per_kv_head(heads: HeadShape) -> usize {
    heads.query_heads / heads.kv_heads
}

/// Tokens whose rows share a pass over the keys.
pub const fn tokens_per_task_max(heads: HeadShape) -> usize {
    let tokens = ROWS / query_heads_per_kv_head(heads);
    if tokens == 0 { 1 } else { tokens }
}

/// Limit of KV heads of a task with so many tokens.
pub fn kv_heads_per_task_max(heads: HeadShape, tokens: usize) -> usize {
    (ROWS / (tokens * query_heads_per_kv_head(heads))).clamp(1, heads.kv_heads)
}

/// Elements of a row's state in the partials: largest score (padded), lanes of the sum, values.
const fn row_state_len(heads: HeadShape) -> usize {
    2 * LANES + head_width(heads)
}

/// Elements of the states of `tokens` tokens and `kv_heads` KV heads in the partials.
pub const fn state_len(heads: HeadShape, tokens: usize, kv_heads: usize) -> usize {
    kv_heads * tokens * query_heads_per_kv_head(heads) * row_state_len(heads)
}

impl AttentionScratch {
    /// # Errors
    /// `Device` if memory is short.
    pub fn new(heads: HeadShape) -> Result<Self, EngineError> {
        let rows = ROWS.max(query_heads_per_kv_head(heads));
        let width = head_width(heads);
        // Sized for the format with the most words, one step per element and two phases; rounding
        // rows up to compiled sizes less than doubles them.
        Ok(Self {
            queries: PageMemory::zeroed(2 * (2 * rows + LANES) * width)?,
            gathered: GatheredKv::new(width)?,
            scores: PageMemory::zeroed(LANES * TILE)?,
            weights: PageMemory::zeroed(LANES * TILE)?,
            span: SoftmaxState::new(rows, width)?,
            total: SoftmaxState::new(rows, width)?,
        })
    }
}

/// Computes attention of every row of the task over the keys of its share.
#[inline(always)]
pub fn attend<S: Simd, F: ElementFormat<S>>(
    s: S,
    attend: &LayerAttention<'_, F::Stored>,
    queries: Queries<'_>,
    share: &SpanShare,
    scratch: &mut AttentionScratch,
) {
    let task = AttentionTask::new(attend, queries, S::ROWS);
    let rows = task.rows_count();
    // Queries are packed once: every tile of keys multiplies with them.
    pack_queries::<S, F>(s, &task, &mut scratch.queries);
    // One loop for both kinds of shares: its body has every register tile, and is compiled once.
    let (spans, partial) = match *share {
        SpanShare::AllSpans => (0..task.queries.spans_count(), None),
        SpanShare::OneSpan { span, partial } => (span..span + 1, Some(partial)),
    };
    if partial.is_none() {
        scratch.total.clear(rows, task.width);
    }
    for span in spans {
        attend_span::<S, F>(s, &task, span, scratch);
        match partial {
            None => merge_span(s, &mut scratch.total, &scratch.span, rows, task.width),
            Some(partial) => write_partial(&task, partial, &scratch.span),
        }
    }
    if partial.is_none() {
        for row in 0..rows {
            write_output_row(s, &task, &scratch.total, row);
        }
    }
}

/// Merges the states of a span's rows into the total.
#[inline(always)]
fn merge_span<S: Simd>(
    s: S,
    total: &mut SoftmaxState,
    span: &SoftmaxState,
    rows: usize,
    width: usize,
) {
    for row in 0..rows {
        let (top, sum, out) = row_state(span, row, width);
        merge(s, total, row, top, sum, out);
    }
}

/// Writes the states of a span's rows to the partials, from element `partial` on.
fn write_partial<T>(task: &AttentionTask<'_, T>, partial: usize, span: &SoftmaxState) {
    let rows = task.rows_count();
    let len = row_state_len(task.attend.heads);
    // SAFETY: every task has its own part of the partials.
    let to = unsafe { task.attend.partials.part(partial..partial + rows * len) };
    for (row, to) in to.chunks_exact_mut(len).enumerate() {
        let (top, sum, out) = row_state(span, row, task.width);
        to[0] = top;
        to[LANES..2 * LANES].copy_from_slice(sum);
        to[2 * LANES..].copy_from_slice(out);
    }
}

/// Merges the states that tasks of single spans wrote from `partial` on, in the order of spans.
#[inline(always)]
pub fn merge_spans<S: Simd, T>(
    s: S,
    attend: &LayerAttention<'_, T>,
    queries: Queries<'_>,
    partial: usize,
    scratch: &mut AttentionScratch,
) {
    let task = AttentionTask::new(attend, queries, S::ROWS);
    let rows = task.rows_count();
    let len = row_state_len(attend.heads);
    scratch.total.clear(rows, task.width);
    let spans = task.queries.spans_count();
    // SAFETY: only this task reads these states, and the tasks that wrote them have ended.
    let states = unsafe { attend.partials.part(partial..partial + spans * rows * len) };
    for state in states.chunks_exact(rows * len) {
        for (row, state) in state.chunks_exact(len).enumerate() {
            let (sum, out) = state[LANES..].split_at(LANES);
            merge(s, &mut scratch.total, row, state[0], sum, out);
        }
    }
    for row in 0..rows {
        write_output_row(s, &task, &scratch.total, row);
    }
}

/// Divides by the sum of weights and writes the row to the output.
#[inline(always)]
fn write_output_row<S: Simd, T>(
    s: S,
    task: &AttentionTask<'_, T>,
    total: &SoftmaxState,
    row: usize,
) {
    let heads = task.attend.heads;
    let (top, sum, out) = row_state(total, row, task.width);
    // The sum was kept lane by lane; it is reduced once, at the end.
    let mut lanes = [0.0; LANES];
    lanes.copy_from_slice(sum);
    let mut weight = s.splat(s.sum(s.load(&lanes)));
    let (token, head) = task.token_and_head(row);
    // After all spans, so that a row's sink counts once, however its keys were divided.
    if let Some(sinks) = task.attend.sinks {
        let sink = sinks[head] * std::f32::consts::LOG2_E;
        weight = s.add(weight, s.exp2(s.splat(sink - top)));
    }
    let start = token * heads.query_width() + head * heads.head_dim;
    // SAFETY: each row and head of the output belongs to one task.
    let to = unsafe { task.attend.out.part(start..start + heads.head_dim) };
    let (chunks, tail) = to.as_chunks_mut::<LANES>();
    let whole = chunks.len() * LANES;
    let vectors = out.as_chunks().0;
    for i in 0..chunks.len() {
        s.store(s.div(s.load(&vectors[i]), weight), &mut chunks[i]);
    }
    if !tail.is_empty() {
        s.store_part(
            s.div(s.load_part(&out[whole..whole + tail.len()]), weight),
            tail,
        );
    }
}

#[inline(always)]
fn pack_queries<S: Simd, F: ElementFormat<S>>(
    s: S,
    task: &AttentionTask<'_, F::Stored>,
    to: &mut [u32],
) {
    let heads = task.attend.heads;
    let row_words = heads.head_dim.div_ceil(F::PER_STEP) * F::PHASES;
    for head in 0..task.heads_count() {
        for tile in 0..task.cut.count() {
            let (start, end) = (task.cut.start(tile), task.cut.start(tile + 1));
            let filled = rows_compiled(end - start, S::ROWS);
            let first = (head * task.packed_rows + tile * S::ROWS) * row_words;
            let words = &mut to[first..first + filled * row_words];
            for row in start..end {
                let (token, head) = task.token_and_head(head * task.rows + row);
                let from = token * heads.qkv_width() + head * heads.head_dim;
                let x = &task.attend.qkv[from..from + heads.head_dim];
                pack_row::<S, F>(s, x, row - start, filled, words);
            }
        }
    }
}

/// Computes one span's state of every row.
#[inline(always)]
fn attend_span<S: Simd, F: ElementFormat<S>>(
    s: S,
    task: &AttentionTask<'_, F::Stored>,
    span: usize,
    scratch: &mut AttentionScratch,
) {
    scratch.span.clear(task.rows_count(), task.width);
    let Queries {
        position, tokens, ..
    } = task.queries;
    let end = ((span + 1) * SPAN).min(position + tokens);
    let tile = |first: usize| first..(first + TILE).min(end);
    for first in (span * SPAN..end).step_by(TILE) {
        let keys = tile(first);
        // The whole tile lies before the first row's window, and so before all rows' windows.
        if keys.end <= task.first_visible_key(position) {
            continue;
        }
        for head in 0..task.heads_count() {
            // Prefetch the next head or tile: scattered blocks defeat the hardware prefetcher.
            let (next_head, next_keys) = if head + 1 == task.heads_count() {
                (0, tile(if keys.end < end { keys.end } else { first }))
            } else {
                (head + 1, keys.clone())
            };
            let ahead = sources_in_pool::<S, F>(task, next_head, &next_keys);
            let located =
                locate_kv::<S, F>(s, task, head, keys.clone(), ahead, &mut scratch.gathered);
            attend_head::<S, F>(s, task, head, keys.clone(), located, scratch);
        }
    }
}

/// Computes one head over one tile of keys.
#[inline(always)]
fn attend_head<S: Simd, F: ElementFormat<S>>(
    s: S,
    task: &AttentionTask<'_, F::Stored>,
    head: usize,
    keys: Range<usize>,
    located: LocatedKv,
    scratch: &mut AttentionScratch,
) {
    let position = task.queries.position;
    let mut located = located;
    for tile in 0..task.cut.count() {
        let rows = task.cut.start(tile)..task.cut.start(tile + 1);
        let last = position + (rows.end - 1) / task.group;
        let earliest = task.first_visible_key(position + rows.start / task.group);
        if keys.start > last || keys.end <= earliest {
            continue;
        }
        // Skip groups of keys behind the last row's position: they are masked for all rows.
        let visible_count = (last + 1 - keys.start).next_multiple_of(KEYS_ACROSS);
        let keys = keys.start..keys.end.min(keys.start + visible_count);
        // SAFETY: the scratch space was made for these heads, and these are the tile's keys and
        // values.
        with_filled!(rows_compiled(rows.len(), S::ROWS), R => unsafe {
            // Decided at compile time: a set has no code for another's tile sizes.
            if const { R <= S::ROWS } {
                attend_tile::<S, F, R>(s, task, head, tile, keys.clone(), located, scratch);
            }
        });
        // The first register tile has prefetched everything.
        located.ahead = located.sources;
    }
}

/// One register tile over one tile of keys. R is the number of rows, rounded up to a compiled size.
///
/// # Safety
/// The scratch space was made for these heads and holds the queries, and the sources are these keys
/// and values.
#[inline(always)]
unsafe fn attend_tile<S: Simd, F: ElementFormat<S>, const R: usize>(
    s: S,
    task: &AttentionTask<'_, F::Stored>,
    head: usize,
    tile: usize,
    keys: Range<usize>,
    located: LocatedKv,
    scratch: &mut AttentionScratch,
) {
    let LocatedKv { sources, ahead } = located;
    let steps = task.attend.heads.head_dim.div_ceil(F::PER_STEP);
    let columns = keys.len().next_multiple_of(LANES);
    let of_tile = (task.cut.start(tile), task.cut.start(tile + 1));
    let row = head * task.rows + of_tile.0;
    let first = (head * task.packed_rows + tile * S::ROWS) * steps * F::PHASES;
    let queries = &scratch.queries[first..];
    let mut column = 0;
    while column < columns {
        // SAFETY: R rows of queries and the columns of the tile are packed there.
        column += wide!(S, R, columns - column, C => unsafe {
            let group = column / KEYS_ACROSS;
            let sides = TileSides {
                left: queries.as_ptr(),
                right: groups_from::<C>(&sources.keys, group),
                right_stride: sources.keys_stride,
                steps,
                prefetch: groups_from::<C>(&ahead.keys, group),
            };
            let acc = accumulate::<S, F, R, C, 1, R>(s, sides, [[s.splat(0.0); C]; R]);
            for r in 0..R {
                let to = scratch.scores[r * TILE + column..][..LANES * C].as_chunks_mut().0;
                for c in 0..C {
                    s.store(acc[r][c], &mut to[c]);
                }
            }
        });
    }
    let rows = R.min(of_tile.1 - of_tile.0);
    for r in 0..rows {
        weights_from_scores::<S, F>(s, task, row, of_tile.0 + r, r, keys.clone(), scratch);
    }
    let mut column = 0;
    while column < task.width {
        // SAFETY: R rows of weights and the columns of the values are packed there.
        column += wide!(S, R, task.width - column, C => unsafe {
            // Add weights times values to the span's sums, in the order of keys.
            let mut acc = [[s.splat(0.0); C]; R];
            let out = &mut scratch.span.weighted_values[row * task.width..];
            // All R rows, so that sums stay in registers; padding rows are not stored.
            for r in 0..R {
                let at = r.min(rows - 1) * task.width + column;
                let out = out[at..at + LANES * C].as_chunks().0;
                for c in 0..C {
                    acc[r][c] = s.load(&out[c]);
                }
            }
            let across = |start: *const u32| {
                std::array::from_fn::<_, C, _>(|c| start.wrapping_add(column + c * LANES))
            };
            const { assert!(KEYS_ACROSS.is_multiple_of(2)) };
            for group in 0..keys.len().div_ceil(KEYS_ACROSS) {
                let count = KEYS_ACROSS.min(keys.len() - group * KEYS_ACROSS);
                let left = group * KEYS_ACROSS / F::PER_STEP * F::PHASES;
                let sides = TileSides {
                    left: scratch.weights[left..].as_ptr(),
                    right: across(sources.values[group]),
                    right_stride: sources.values_stride,
                    steps: count / F::PER_STEP,
                    prefetch: across(ahead.values[group]),
                };
                acc = accumulate::<S, F, R, C, TILE, 1>(s, sides, acc);
            }
            // An odd number of keys leaves a step's second half empty: see `values_last`.
            if !keys.len().is_multiple_of(F::PER_STEP)
                && let Some(last) = sources.values_last
            {
                let left = keys.len() / F::PER_STEP * F::PHASES;
                let sides = TileSides {
                    left: scratch.weights[left..].as_ptr(),
                    right: across(last),
                    right_stride: 0,
                    steps: 1,
                    prefetch: across(last),
                };
                acc = accumulate::<S, F, R, C, TILE, 1>(s, sides, acc);
            }
            for r in 0..R {
                if r < rows {
                    let at = r * task.width + column;
                    let out = out[at..at + LANES * C].as_chunks_mut().0;
                    for c in 0..C {
                        s.store(acc[r][c], &mut out[c]);
                    }
                }
            }
        });
    }
}

/// The pointers of C groups from `first` on.
#[inline(always)]
fn groups_from<const C: usize>(groups: &[*const u32; GROUPS], first: usize) -> [*const u32; C] {
    let mut some = [std::ptr::null(); C];
    some.copy_from_slice(&groups[first..first + C]);
    some
}

/// Converts the scores of a tile's row `r` into weights; rescales its state if the largest score
/// grows. `first_row` is the task's row of the tile's first, `row_in_head` the head's row of `r`.
#[inline(always)]
fn weights_from_scores<S: Simd, F: ElementFormat<S>>(
    s: S,
    task: &AttentionTask<'_, F::Stored>,
    first_row: usize,
    row_in_head: usize,
    r: usize,
    keys: Range<usize>,
    scratch: &mut AttentionScratch,
) {
    let position = task.queries.position + row_in_head / task.group;
    let visible_end = (position + 1).min(keys.end).saturating_sub(keys.start);
    let visible_start = task.first_visible_key(position).saturating_sub(keys.start);
    let columns = keys.len().next_multiple_of(LANES);
    let scale = s.splat(task.attend.scale);
    let scales = match task.attend.pool {
        PoolContents::Elements(_) => None,
        PoolContents::Codes(_) => Some(scratch.gathered.scales()),
    };
    let scores = scratch.scores[r * TILE..r * TILE + columns]
        .as_chunks_mut()
        .0;
    let mut largest = s.splat(f32::NEG_INFINITY);
    for chunk in 0..scores.len() {
        let first = chunk * LANES;
        let from = visible_start.saturating_sub(first);
        let to = visible_end.saturating_sub(first);
        let mut v = s.load(&scores[chunk]);
        if let Some((keys, _)) = scales {
            v = s.mul(v, s.load(&keys[chunk]));
        }
        v = s.mul(v, scale);
        if let Some(cap) = task.attend.soft_cap {
            v = capped(s, v, cap);
        }
        // Masked keys and keys beyond the tile get a score of −∞, and so a weight of 0.
        if from > 0 || to < LANES {
            v = s.mask_outside(v, from, to);
        }
        s.store(v, &mut scores[chunk]);
        largest = s.max(largest, v);
    }
    let state = &mut scratch.span;
    let old_top = state.score_max[first_row + r];
    let top = old_top.max(s.largest(largest));
    let (sum, _) =
        state.sum[(first_row + r) * LANES..(first_row + r + 1) * LANES].as_chunks_mut::<LANES>();
    let mut total = s.load(&sum[0]);
    if top > old_top {
        // A larger score than before: sums so far were relative to the old one.
        let shrink = s.exp2(s.splat(old_top - top));
        total = s.mul(total, shrink);
        let start = (first_row + r) * task.width;
        let out = state.weighted_values[start..start + task.width]
            .as_chunks_mut()
            .0;
        for i in 0..out.len() {
            s.store(s.mul(s.load(&out[i]), shrink), &mut out[i]);
        }
        state.score_max[first_row + r] = top;
    }
    let top = s.splat(top);
    let to = &mut scratch.weights[r * TILE..(r + 1) * TILE];
    for chunk in 0..scores.len() {
        // The sum of weights is that of the unrounded ones, lane by lane.
        let weight = s.exp2(s.sub(s.load(&scores[chunk]), top));
        total = s.add(total, weight);
        // Before rounding, so that the relative error does not depend on the value's scale.
        let weight = match scales {
            Some((_, values)) => s.mul(weight, s.load(&values[chunk])),
            None => weight,
        };
        let mut words = [0; LANES];
        let count = F::words(s, weight, &mut words);
        to[chunk * count..(chunk + 1) * count].copy_from_slice(&words[..count]);
    }
    s.store(total, &mut sum[0]);
}
