//! The running softmax of query rows.
//!
//! Owns: what is kept of the keys that a row has seen, and adding what was kept of others.
//! Invariant: what is added is added span by span, in order, whoever computed it.

use crate::memory::Memory;
use crate::simd::{LANES, Simd};
use cleave_engine::EngineError;

/// The largest score before any key: below every score, and finite, so that it cancels.
const NOTHING: f32 = -1e30;

/// The running softmax of the rows of a task.
pub(super) struct State {
    /// Largest score, `(rows)`.
    pub(super) top: Memory<f32>,
    /// Sum of weights, lane by lane, `(rows, LANES)`.
    pub(super) sum: Memory<f32>,
    /// Weighted values, `(rows, width)`.
    pub(super) out: Memory<f32>,
}

impl State {
    pub(super) fn new(rows: usize, width: usize) -> Result<Self, EngineError> {
        Ok(Self {
            top: Memory::zeroed(rows)?,
            sum: Memory::zeroed(rows * LANES)?,
            out: Memory::zeroed(rows * width)?,
        })
    }

    pub(super) fn clear(&mut self, rows: usize, width: usize) {
        self.top[..rows].fill(NOTHING);
        self.sum[..rows * LANES].fill(0.0);
        self.out[..rows * width].fill(0.0);
    }
}

pub(super) fn row_state(state: &State, row: usize, width: usize) -> (f32, &[f32], &[f32]) {
    (
        state.top[row],
        &state.sum[row * LANES..(row + 1) * LANES],
        &state.out[row * width..(row + 1) * width],
    )
}

/// Adds a span's state of one row to the total.
#[inline(always)]
pub(super) fn merge<S: Simd>(
    s: S,
    total: &mut State,
    row: usize,
    (top, sum, out): (f32, &[f32], &[f32]),
) {
    let width = out.len();
    let new_top = total.top[row].max(top);
    let old = s.exp2(s.splat(total.top[row] - new_top));
    let new = s.exp2(s.splat(top - new_top));
    total.top[row] = new_top;
    let sums = &mut total.sum[row * LANES..(row + 1) * LANES];
    merge_part(s, (sums, old), (sum, new));
    let outs = &mut total.out[row * width..(row + 1) * width];
    merge_part(s, (outs, old), (out, new));
}

/// `mine · old + theirs · new`, in whole vectors.
#[inline(always)]
fn merge_part<S: Simd>(s: S, (mine, old): (&mut [f32], S::V), (theirs, new): (&[f32], S::V)) {
    let (mine, theirs) = (mine.as_chunks_mut().0, theirs.as_chunks().0);
    for i in 0..mine.len().min(theirs.len()) {
        let kept = s.mul(s.load(&mine[i]), old);
        s.store(s.fma(s.load(&theirs[i]), new, kept), &mut mine[i]);
    }
}
