//! Attention of a few query rows over the pool.
//!
//! Owns: the walk over keys, the softmax that goes with it, and the scratch space of both. Where rows are few, a task
//! has several KV heads: they lie one after the other in a block, and memory is read in long runs.
//! Invariant: a query row's result is the same whatever rows, segments and chunks are computed
//! beside it, and however its keys are divided among tasks. Keys go in tiles of [`TILE`] positions,
//! tiles in spans of [`SPAN`]; every span starts from an empty state, and spans are merged in order.
//! A key that a row may not see changes nothing of its state, to the bit: the largest score stays,
//! so the scale is exactly 1, and the weight is exactly 0.

mod state;

use super::keys::{GROUPS, Gathered, Sources, find, where_they_lie};
use super::tile::{Format, Sides, Tiles, accumulate, filled, pack_row, wide, with_filled};
use crate::layout::{KEYS_ACROSS, Layout};
use crate::memory::{Memory, Parts};
use crate::simd::{LANES, Simd};
use cleave_domain::BlockIndex;
use cleave_engine::EngineError;
use cleave_engine::ops::HeadShape;
use state::{State, merge, row_state};
use std::ops::Range;

/// Keys per tile.
pub(crate) const TILE: usize = 64;
/// Keys per span; spans of a long sequence are computed side by side.
pub(crate) const SPAN: usize = 512;
/// Query rows (tokens times query heads per KV head) that share a pass over the keys.
pub(crate) const ROWS: usize = 56;

/// What a pool has.
#[derive(Clone, Copy)]
pub(crate) enum Pool<'a, T> {
    /// Elements, as products read them.
    Elements(&'a [T]),
    /// Bytes with a sign, and behind those of each head the scales of its tokens.
    Codes(&'a [u8]),
}

/// One layer's attention, seen by all its tasks.
pub(crate) struct Attend<'a, T> {
    pub heads: HeadShape,
    pub block_tokens: usize,
    pub layout: Layout,
    /// The whole pool.
    pub pool: Pool<'a, T>,
    /// Elements, or bytes, of a head in a block, and of a block.
    pub head_elements: usize,
    pub block_elements: usize,
    /// The same from a block's start to the layer's first key and first value head.
    pub layer_offsets: (usize, usize),
    /// `(rows, q | k | v)`.
    pub qkv: &'a [f32],
    /// Multiplies scores; includes log2(e), since weights are powers of two.
    pub scale: f32,
    /// Position `p` sees `p - window + 1 ..= p`.
    pub window: usize,
    /// `(rows, query_heads × head_dim)`.
    pub out: Parts<'a, f32>,
    /// Where tasks that see only some spans leave their states; see [`state_len`].
    pub partials: Parts<'a, f32>,
}

/// Consecutive tokens of one segment, with some KV heads.
#[derive(Clone)]
pub(crate) struct Queries<'a> {
    /// The sequence's blocks.
    pub table: &'a [BlockIndex],
    /// Row of the first token in the batch.
    pub row: usize,
    /// Its position.
    pub position: usize,
    /// How many tokens.
    pub tokens: usize,
    pub kv_heads: Range<usize>,
}

/// Which spans a task sees, and where its result goes.
#[derive(Clone, Debug)]
pub(crate) enum Share {
    /// All; the result goes to the output.
    Whole,
    /// One span; the states of the rows go to the partials from this element on.
    Span { span: usize, partial: usize },
}

impl Queries<'_> {
    /// Keys that the last token sees, from position 0.
    fn keys(&self) -> usize {
        self.position + self.tokens
    }

    pub(crate) fn spans_count(&self) -> usize {
        self.keys().div_ceil(SPAN)
    }
}

/// What one worker needs to attend.
pub(crate) struct Scratch {
    /// Of each head and register tile `[step][phase][row]`.
    queries: Memory<u32>,
    gathered: Gathered,
    /// `(rows of a register tile, TILE)`.
    scores: Memory<f32>,
    /// `(rows of a register tile, TILE)`, as many of each row's words as there are steps and phases.
    weights: Memory<u32>,
    span: State,
    total: State,
}

/// Elements of a head, rounded up to whole vectors.
pub(crate) const fn head_width(heads: HeadShape) -> usize {
    heads.head_dim.next_multiple_of(LANES)
}

/// Query heads per KV head.
const fn group(heads: HeadShape) -> usize {
    heads.query_heads / heads.kv_heads
}

/// Tokens whose rows share a pass over the keys.
pub(crate) const fn tokens_max(heads: HeadShape) -> usize {
    let tokens = ROWS / group(heads);
    if tokens == 0 { 1 } else { tokens }
}

/// KV heads of a task with so many tokens.
pub(crate) fn heads_max(heads: HeadShape, tokens: usize) -> usize {
    (ROWS / (tokens * group(heads))).clamp(1, heads.kv_heads)
}

/// Elements that one row's state takes among the partials.
const fn row_state_len(heads: HeadShape) -> usize {
    2 * LANES + head_width(heads)
}

/// Elements that the states of `tokens` tokens and `kv_heads` KV heads take among the partials.
pub(crate) const fn state_len(heads: HeadShape, tokens: usize, kv_heads: usize) -> usize {
    kv_heads * tokens * group(heads) * row_state_len(heads)
}

impl Scratch {
    /// For any task of these heads.
    ///
    /// # Errors
    /// `Device` if memory is short.
    pub(crate) fn new(heads: HeadShape) -> Result<Self, EngineError> {
        let rows = ROWS.max(group(heads));
        let width = head_width(heads);
        // Sized for the format with the most words, one step per element and two phases; tiles that are filled up
        // have less than twice as many rows.
        Ok(Self {
            queries: Memory::zeroed(2 * (2 * rows + LANES) * width)?,
            gathered: Gathered::new(width)?,
            scores: Memory::zeroed(LANES * TILE)?,
            weights: Memory::zeroed(LANES * TILE)?,
            span: State::new(rows, width)?,
            total: State::new(rows, width)?,
        })
    }
}

/// What every step of a task needs.
pub(super) struct Task<'a, T> {
    pub(super) attend: &'a Attend<'a, T>,
    pub(super) queries: Queries<'a>,
    group: usize,
    /// Of each head; those of the first head come first.
    rows: usize,
    pub(super) width: usize,
    /// Of a head's rows.
    cut: Tiles,
    /// Rows that the queries of a head are packed as.
    packed_rows: usize,
}

impl<'a, T> Task<'a, T> {
    fn new(attend: &'a Attend<'a, T>, queries: Queries<'a>, tile_rows: usize) -> Self {
        let group = group(attend.heads);
        let rows = queries.tokens * group;
        let cut = Tiles::new(rows, tile_rows);
        Self {
            attend,
            queries,
            group,
            rows,
            width: head_width(attend.heads),
            cut,
            packed_rows: match cut.count() {
                1 => filled(rows, tile_rows),
                count => count * tile_rows,
            },
        }
    }

    fn heads_count(&self) -> usize {
        self.queries.kv_heads.len()
    }

    /// Of all heads.
    fn rows_count(&self) -> usize {
        self.heads_count() * self.rows
    }
}

/// Attends: every row of the task over the keys of its share.
#[inline(always)]
pub(crate) fn attend<S: Simd, F: Format<S>>(
    s: S,
    attend: &Attend<'_, F::Stored>,
    (queries, share): (Queries<'_>, &Share),
    scratch: &mut Scratch,
) {
    let task = Task::new(attend, queries, S::ROWS);
    let rows = task.rows_count();
    pack_queries::<S, F>(s, &task, &mut scratch.queries);
    match *share {
        Share::Whole => {
            scratch.total.clear(rows, task.width);
            for span in 0..task.queries.spans_count() {
                attend_span::<S, F>(s, &task, span, scratch);
                for row in 0..rows {
                    let (top, sum, out) = row_state(&scratch.span, row, task.width);
                    merge(s, &mut scratch.total, row, (top, sum, out));
                }
            }
            for row in 0..rows {
                finish(s, &task, &scratch.total, row);
            }
        }
        Share::Span { span, partial } => {
            attend_span::<S, F>(s, &task, span, scratch);
            let len = row_state_len(attend.heads);
            // SAFETY: every task has its own part of the partials.
            let to = unsafe { attend.partials.part(partial..partial + rows * len) };
            for (row, to) in to.chunks_exact_mut(len).enumerate() {
                let (top, sum, out) = row_state(&scratch.span, row, task.width);
                to[0] = top;
                to[LANES..2 * LANES].copy_from_slice(sum);
                to[2 * LANES..].copy_from_slice(out);
            }
        }
    }
}

/// Merges what the tasks of single spans left from element `partial` on, one span after the other.
#[inline(always)]
pub(crate) fn combine<S: Simd, T>(
    s: S,
    attend: &Attend<'_, T>,
    (queries, partial): (Queries<'_>, usize),
    scratch: &mut Scratch,
) {
    let task = Task::new(attend, queries, S::ROWS);
    let rows = task.rows_count();
    let len = row_state_len(attend.heads);
    scratch.total.clear(rows, task.width);
    let spans = task.queries.spans_count();
    // SAFETY: this task alone reads these states, and those who wrote them are done.
    let states = unsafe { attend.partials.part(partial..partial + spans * rows * len) };
    for state in states.chunks_exact(rows * len) {
        for (row, state) in state.chunks_exact(len).enumerate() {
            let (sum, out) = state[LANES..].split_at(LANES);
            merge(s, &mut scratch.total, row, (state[0], sum, out));
        }
    }
    for row in 0..rows {
        finish(s, &task, &scratch.total, row);
    }
}

/// Divides by the sum of weights and writes the row out.
#[inline(always)]
fn finish<S: Simd, T>(s: S, task: &Task<'_, T>, total: &State, row: usize) {
    let heads = task.attend.heads;
    let (_, sum, out) = row_state(total, row, task.width);
    let mut lanes = [0.0; LANES];
    lanes.copy_from_slice(sum);
    let weight = s.splat(s.sum(s.load(&lanes)));
    let (token, head) = task.query(row);
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
fn pack_queries<S: Simd, F: Format<S>>(s: S, task: &Task<'_, F::Stored>, to: &mut [u32]) {
    let heads = task.attend.heads;
    let row_words = heads.head_dim.div_ceil(F::PER_STEP) * F::PHASES;
    for head in 0..task.heads_count() {
        for tile in 0..task.cut.count() {
            let (start, end) = (task.cut.start(tile), task.cut.start(tile + 1));
            let filled = filled(end - start, S::ROWS);
            let first = (head * task.packed_rows + tile * S::ROWS) * row_words;
            let words = &mut to[first..first + filled * row_words];
            for row in start..end {
                let (token, head) = task.query(head * task.rows + row);
                let from = token * heads.qkv_width() + head * heads.head_dim;
                let x = &task.attend.qkv[from..from + heads.head_dim];
                pack_row::<S, F>(s, x, (row - start, filled), words);
            }
        }
    }
}

/// Fills the span's state of every row.
#[inline(always)]
fn attend_span<S: Simd, F: Format<S>>(
    s: S,
    task: &Task<'_, F::Stored>,
    span: usize,
    scratch: &mut Scratch,
) {
    scratch.span.clear(task.rows_count(), task.width);
    let Queries {
        position, tokens, ..
    } = task.queries;
    let end = ((span + 1) * SPAN).min(position + tokens);
    let tile = |first: usize| first..(first + TILE).min(end);
    for first in (span * SPAN..end).step_by(TILE) {
        let keys = tile(first);
        if keys.end <= task.first_seen(position) {
            continue;
        }
        for head in 0..task.heads_count() {
            // What comes next is asked for while this is computed: blocks lie anywhere, so the processor cannot guess.
            let next = match head + 1 == task.heads_count() {
                false => (head + 1, keys.clone()),
                true => (0, tile(if keys.end < end { keys.end } else { first })),
            };
            let ahead = where_they_lie::<S, F>(task, next.0, &next.1);
            let place = (head, keys.clone());
            let both = find::<S, F>(s, task, place.clone(), ahead, &mut scratch.gathered);
            attend_head::<S, F>(s, task, place, both, scratch);
        }
    }
}

/// One head over one tile of keys.
#[inline(always)]
fn attend_head<S: Simd, F: Format<S>>(
    s: S,
    task: &Task<'_, F::Stored>,
    (head, keys): (usize, Range<usize>),
    (sources, ahead): (Sources, Sources),
    scratch: &mut Scratch,
) {
    let position = task.queries.position;
    let mut ahead = ahead;
    for tile in 0..task.cut.count() {
        let rows = task.cut.start(tile)..task.cut.start(tile + 1);
        let last = position + (rows.end - 1) / task.group;
        let earliest = task.first_seen(position + rows.start / task.group);
        if keys.start > last || keys.end <= earliest {
            continue;
        }
        // Groups of keys that none of these rows sees have no part in it.
        let seen = (last + 1 - keys.start).next_multiple_of(KEYS_ACROSS);
        let keys = keys.start..keys.end.min(keys.start + seen);
        // SAFETY: the scratch space was made for these heads, and these are the tile's keys and values.
        with_filled!(filled(rows.len(), S::ROWS), R => unsafe {
            // Decided when compiled: no set carries another's tiles.
            if const { R <= S::ROWS } {
                let place = (head, tile, keys.clone());
                attend_tile::<S, F, R>(s, task, place, (sources, ahead), scratch);
            }
        });
        // Once is enough.
        ahead = sources;
    }
}

impl<T> Task<'_, T> {
    /// The first key that a token at this position sees.
    fn first_seen(&self, position: usize) -> usize {
        (position + 1).saturating_sub(self.attend.window)
    }

    /// A row's token in the batch, and its query head.
    fn query(&self, row: usize) -> (usize, usize) {
        let (head, row) = (row / self.rows, row % self.rows);
        let kv_head = self.queries.kv_heads.start + head;
        (
            self.queries.row + row / self.group,
            kv_head * self.group + row % self.group,
        )
    }

    /// The first elements of a head's keys and of its values in a key's block, and the key's token there.
    #[inline(always)]
    pub(super) fn place(&self, head: usize, position: usize) -> ([usize; 2], usize) {
        let attend = self.attend;
        let block = self.queries.table[position / attend.block_tokens].0 as usize;
        let head = (self.queries.kv_heads.start + head) * attend.head_elements;
        let start = block * attend.block_elements + head;
        let (keys, values) = attend.layer_offsets;
        (
            [start + keys, start + values],
            position % attend.block_tokens,
        )
    }
}

/// One register tile over one tile of keys: scores, weights, sums. R is the tile's rows, filled.
///
/// # Safety
/// The scratch space was made for these heads and holds the queries, and the sources are these keys and values.
#[inline(always)]
unsafe fn attend_tile<S: Simd, F: Format<S>, const R: usize>(
    s: S,
    task: &Task<'_, F::Stored>,
    (head, tile, keys): (usize, usize, Range<usize>),
    (sources, ahead): (Sources, Sources),
    scratch: &mut Scratch,
) {
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
            let sides = Sides {
                left: queries.as_ptr(),
                right: some_of::<C>(&sources.keys, group),
                right_stride: sources.keys_stride,
                steps,
                ahead: some_of::<C>(&ahead.keys, group),
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
        weigh::<S, F>(s, task, (row, of_tile.0 + r, r, keys.clone()), scratch);
    }
    let mut column = 0;
    while column < task.width {
        // SAFETY: R rows of weights and the columns of the values are packed there.
        column += wide!(S, R, task.width - column, C => unsafe {
            let mut acc = [[s.splat(0.0); C]; R];
            let out = &mut scratch.span.out[row * task.width..];
            // All R, so that sums stay in registers; those that only fill the tile up are not kept.
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
                let sides = Sides {
                    left: scratch.weights[left..].as_ptr(),
                    right: across(sources.values[group]),
                    right_stride: sources.values_stride,
                    steps: count / F::PER_STEP,
                    ahead: across(ahead.values[group]),
                };
                acc = accumulate::<S, F, R, C, TILE, 1>(s, sides, acc);
            }
            // Whole groups have no such step.
            if !keys.len().is_multiple_of(F::PER_STEP)
                && let Some(last) = sources.values_last
            {
                let left = keys.len() / F::PER_STEP * F::PHASES;
                let sides = Sides {
                    left: scratch.weights[left..].as_ptr(),
                    right: across(last),
                    right_stride: 0,
                    steps: 1,
                    ahead: across(last),
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

/// C of the groups, from one on.
#[inline(always)]
fn some_of<const C: usize>(groups: &[*const u32; GROUPS], first: usize) -> [*const u32; C] {
    let mut some = [std::ptr::null(); C];
    some.copy_from_slice(&groups[first..first + C]);
    some
}

/// Turns the scores of row `r` of a register tile into weights, and rescales what the row has.
#[inline(always)]
fn weigh<S: Simd, F: Format<S>>(
    s: S,
    task: &Task<'_, F::Stored>,
    (row, of_head, r, keys): (usize, usize, usize, Range<usize>),
    scratch: &mut Scratch,
) {
    let position = task.queries.position + of_head / task.group;
    let seen_end = (position + 1).min(keys.end).saturating_sub(keys.start);
    let seen_start = task.first_seen(position).saturating_sub(keys.start);
    let columns = keys.len().next_multiple_of(LANES);
    let scale = s.splat(task.attend.scale);
    let scales = match task.attend.pool {
        Pool::Elements(_) => None,
        Pool::Codes(_) => Some(scratch.gathered.scales()),
    };
    let scores = scratch.scores[r * TILE..r * TILE + columns]
        .as_chunks_mut()
        .0;
    let mut largest = s.splat(f32::NEG_INFINITY);
    for chunk in 0..scores.len() {
        let first = chunk * LANES;
        let from = seen_start.saturating_sub(first);
        let to = seen_end.saturating_sub(first);
        let mut v = s.load(&scores[chunk]);
        if let Some((keys, _)) = scales {
            v = s.mul(v, s.load(&keys[chunk]));
        }
        v = s.mul(v, scale);
        if from > 0 || to < LANES {
            v = s.keep(v, from, to);
        }
        s.store(v, &mut scores[chunk]);
        largest = s.max(largest, v);
    }
    let state = &mut scratch.span;
    let old_top = state.top[row + r];
    let top = old_top.max(s.largest(largest));
    let (sum, _) = state.sum[(row + r) * LANES..(row + r + 1) * LANES].as_chunks_mut::<LANES>();
    let mut total = s.load(&sum[0]);
    if top > old_top {
        let shrink = s.exp2(s.splat(old_top - top));
        total = s.mul(total, shrink);
        let start = (row + r) * task.width;
        let out = state.out[start..start + task.width].as_chunks_mut().0;
        for i in 0..out.len() {
            s.store(s.mul(s.load(&out[i]), shrink), &mut out[i]);
        }
        state.top[row + r] = top;
    }
    let top = s.splat(top);
    let to = &mut scratch.weights[r * TILE..(r + 1) * TILE];
    for chunk in 0..scores.len() {
        let weight = s.exp2(s.sub(s.load(&scores[chunk]), top));
        total = s.add(total, weight);
        // Before it is rounded: that loses the same share of a weight, whatever its value's scale.
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
