//! One register tile of query rows over one tile of keys: scores, weights, and weighted values.
//!
//! Owns: the only code of attention that is compiled for each number of rows. What lies between
//! the two products goes row by row, outside, and so is compiled once.
//! Invariant: see [`attention`](super): a row's result does not depend on the rows beside it.

use super::{AttentionScratch, AttentionTask, PoolContents, TILE};
use crate::kernel::kv_sources::{GROUPS, LocatedKv};
use crate::kernel::rows::capped;
use crate::kernel::tile::{ElementFormat, TileSides, accumulate, rows_compiled, wide, with_filled};
use crate::layout::KEYS_ACROSS;
use crate::simd::{LANES, Simd};
use std::ops::Range;

/// One register tile over one tile of keys.
///
/// # Safety
/// The scratch space was made for these heads and holds the queries, and the sources are these keys
/// and values.
#[inline(always)]
pub(super) unsafe fn attend_tile<S: Simd, F: ElementFormat<S>>(
    s: S,
    task: &AttentionTask<'_, F::Stored>,
    head: usize,
    tile: usize,
    keys: Range<usize>,
    located: LocatedKv,
    scratch: &mut AttentionScratch,
) {
    let of_head = task.cut.start(tile)..task.cut.start(tile + 1);
    let first = head * task.rows + of_head.start;
    let rows = first..first + of_head.len();
    let filled = rows_compiled(rows.len(), S::ROWS);
    let steps = task.attend.heads.head_dim.div_ceil(F::PER_STEP);
    let packed = (head * task.packed_rows + tile * S::ROWS) * steps * F::PHASES;
    // SAFETY: as the caller promises; the scratch space has room for R rows.
    with_filled!(filled, R => unsafe {
        // Decided at compile time: a set has no code for another's tile sizes.
        if const { R <= S::ROWS } {
            let queries = scratch.queries[packed..].as_ptr();
            score::<S, F, R>(s, queries, steps, keys.len(), &located, &mut scratch.scores);
        }
    });
    for r in 0..rows.len() {
        weights_from_scores::<S, F>(s, task, first, of_head.start + r, r, keys.clone(), scratch);
    }
    // SAFETY: as above.
    with_filled!(filled, R => unsafe {
        if const { R <= S::ROWS } {
            add_values::<S, F, R>(s, task.width, rows.clone(), keys.len(), &located, scratch);
        }
    });
}

/// Scores of R rows of queries and `keys` keys, `(R, TILE)`.
///
/// # Safety
/// `queries` holds `steps` steps of R rows, and the sources are so many keys.
#[inline(always)]
unsafe fn score<S: Simd, F: ElementFormat<S>, const R: usize>(
    s: S,
    queries: *const u32,
    steps: usize,
    keys: usize,
    located: &LocatedKv,
    scores: &mut [f32],
) {
    let LocatedKv { sources, ahead } = located;
    let columns = keys.next_multiple_of(LANES);
    let mut column = 0;
    while column < columns {
        // SAFETY: R rows of queries and the columns of the tile are packed there.
        column += wide!(S, R, columns - column, C => unsafe {
            let group = column / KEYS_ACROSS;
            let sides = TileSides {
                left: queries,
                right: groups_from::<C>(&sources.keys, group),
                right_stride: sources.keys_stride,
                steps,
                prefetch: groups_from::<C>(&ahead.keys, group),
            };
            let acc = accumulate::<S, F, R, C, 1, R>(s, sides, [[s.splat(0.0); C]; R]);
            for r in 0..R {
                let to = scores[r * TILE + column..][..LANES * C].as_chunks_mut().0;
                for c in 0..C {
                    s.store(acc[r][c], &mut to[c]);
                }
            }
        });
    }
}

/// Adds weights times values to the span's sums of these rows, in the order of keys.
///
/// # Safety
/// R rows of weights are packed in the scratch space, and the sources are `keys` values of `width`.
#[inline(always)]
unsafe fn add_values<S: Simd, F: ElementFormat<S>, const R: usize>(
    s: S,
    width: usize,
    rows: Range<usize>,
    keys: usize,
    located: &LocatedKv,
    scratch: &mut AttentionScratch,
) {
    let LocatedKv { sources, ahead } = located;
    let groups = keys.div_ceil(KEYS_ACROSS);
    const { assert!(KEYS_ACROSS.is_multiple_of(2)) };
    // An odd number of keys leaves a step's second half empty: see `values_last`.
    let odd_last = sources
        .values_last
        .filter(|_| !keys.is_multiple_of(F::PER_STEP));
    let parts = groups + usize::from(odd_last.is_some());
    let mut column = 0;
    while column < width {
        // SAFETY: R rows of weights and the columns of the values are packed there.
        column += wide!(S, R, width - column, C => unsafe {
            let mut acc = [[s.splat(0.0); C]; R];
            let out = &mut scratch.span.weighted_values[rows.start * width..];
            // All R rows, so that sums stay in registers; padding rows are not stored.
            for r in 0..R {
                let at = r.min(rows.len() - 1) * width + column;
                let out = out[at..at + LANES * C].as_chunks().0;
                for c in 0..C {
                    acc[r][c] = s.load(&out[c]);
                }
            }
            let across = |start: *const u32| {
                std::array::from_fn::<_, C, _>(|c| start.wrapping_add(column + c * LANES))
            };
            // The odd last key is one more part, so that the product is compiled once.
            for part in 0..parts {
                let first = (part * KEYS_ACROSS).min(keys);
                let (right, next, steps) = match odd_last {
                    Some(last) if part == groups => (last, last, 1),
                    Some(_) | None => {
                        let count = KEYS_ACROSS.min(keys - first);
                        (sources.values[part], ahead.values[part], count / F::PER_STEP)
                    }
                };
                let sides = TileSides {
                    left: scratch.weights[first / F::PER_STEP * F::PHASES..].as_ptr(),
                    right: across(right),
                    right_stride: sources.values_stride,
                    steps,
                    prefetch: across(next),
                };
                acc = accumulate::<S, F, R, C, TILE, 1>(s, sides, acc);
            }
            for r in 0..R {
                if r < rows.len() {
                    let at = r * width + column;
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
