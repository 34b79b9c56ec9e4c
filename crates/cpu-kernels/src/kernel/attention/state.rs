//! The running softmax of query rows.
//!
//! Owns: the state of the keys processed so far, and merging of two states.
//! Invariant: states are merged span by span, in order, whichever task computed them.

use crate::memory::PageMemory;
use crate::simd::{LANES, Simd};
use cleave_engine::EngineError;

/// Largest score before any key: below every score, and finite, so that the difference of two is 0
/// and not NaN.
const SCORE_BEFORE_ANY_KEY: f32 = -1e30;

/// The running softmax of the rows of a task.
pub(super) struct SoftmaxState {
    /// Largest score of each row so far, `(rows)`.
    pub(super) score_max: PageMemory<f32>,
    /// Sums of weights, lane by lane, `(rows, LANES)`.
    pub(super) sum: PageMemory<f32>,
    /// Sums of weighted values, `(rows, width)`.
    pub(super) weighted_values: PageMemory<f32>,
}

impl SoftmaxState {
    pub(super) fn new(rows: usize, width: usize) -> Result<Self, EngineError> {
        Ok(Self {
            score_max: PageMemory::zeroed(rows)?,
            sum: PageMemory::zeroed(rows * LANES)?,
            weighted_values: PageMemory::zeroed(rows * width)?,
        })
    }

    pub(super) fn clear(&mut self, rows: usize, width: usize) {
        self.score_max[..rows].fill(SCORE_BEFORE_ANY_KEY);
        self.sum[..rows * LANES].fill(0.0);
        self.weighted_values[..rows * width].fill(0.0);
    }
}

pub(super) fn row_state(state: &SoftmaxState, row: usize, width: usize) -> (f32, &[f32], &[f32]) {
    (
        state.score_max[row],
        &state.sum[row * LANES..(row + 1) * LANES],
        &state.weighted_values[row * width..(row + 1) * width],
    )
}

/// Merges a span's state of one row into the total.
#[inline(always)]
pub(super) fn merge<S: Simd>(
    s: S,
    total: &mut SoftmaxState,
    row: usize,
    score_max: f32,
    sum: &[f32],
    weighted_values: &[f32],
) {
    let width = weighted_values.len();
    let new_top = total.score_max[row].max(score_max);
    let old = s.exp2(s.splat(total.score_max[row] - new_top));
    let new = s.exp2(s.splat(score_max - new_top));
    total.score_max[row] = new_top;
    let sums = &mut total.sum[row * LANES..(row + 1) * LANES];
    merge_part(s, sums, old, sum, new);
    let outs = &mut total.weighted_values[row * width..(row + 1) * width];
    merge_part(s, outs, old, weighted_values, new);
}

/// `total · old + part · new`, in whole vectors.
#[inline(always)]
fn merge_part<S: Simd>(s: S, total: &mut [f32], old: S::V, part: &[f32], new: S::V) {
    let (total, part) = (total.as_chunks_mut().0, part.as_chunks().0);
    for i in 0..total.len().min(part.len()) {
        let scaled = s.mul(s.load(&total[i]), old);
        s.store(s.fma(s.load(&part[i]), new, scaled), &mut total[i]);
    }
}
