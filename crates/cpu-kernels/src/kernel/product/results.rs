//! From the sums of slices to a product's results.
//!
//! Owns: the tree of slices, and what comes after it: bias, addends, gate, and the stores.
//! Invariant: the sums of slices are added as a balanced binary tree; the bias is added last.

use super::scratch::{LEVEL_WORDS, WAITING_LEVELS};
use super::{PANEL, PackedProduct, WeightForm};
use crate::kernel::rows::{clamped_swiglu, gelu_tanh, silu};
use crate::simd::{LANES, Simd};
use cleave_engine::ops::Activation;
use std::ops::Range;

/// A slice whose last block was added to a tile's sums.
pub(super) struct EndedSlice {
    pub(super) slice: usize,
    /// Rows of the tile.
    pub(super) rows: Range<usize>,
    pub(super) panel: usize,
    /// First word of the tile's rows in a level of waiting sums.
    pub(super) waiting_at: usize,
}

/// Finishes a slice's sums (scales), adds the sums of earlier slices that waited for them, and lets
/// the result wait or, after the last slice, finishes (bias, gate) and writes it.
///
/// Sums wait in levels: level i has the sum of 2^i slices, and level 0 that of an even slice, not
/// yet finished. After slice n, whose number ends in k ones, sums of the k lowest levels are added,
/// the latest first: the order of a binary tree. Even slices end here only if they are the only
/// one.
///
/// # Safety
/// No other task writes these rows of this panel.
#[inline(always)]
pub(super) unsafe fn end_slice<S: Simd, F: WeightForm<S>>(
    s: S,
    product: &PackedProduct<'_>,
    ended: &EndedSlice,
    sums: &[f32],
    waiting: &mut [f32],
) {
    // SAFETY: as the caller promises.
    unsafe {
        match ended.slice.trailing_ones() {
            0 => add_waiting::<S, F, 0>(s, product, ended, sums, waiting),
            1 => add_waiting::<S, F, 1>(s, product, ended, sums, waiting),
            2 => add_waiting::<S, F, 2>(s, product, ended, sums, waiting),
            _ => add_waiting::<S, F, 3>(s, product, ended, sums, waiting),
        }
    }
}

/// [`end_slice`] after a slice whose number ends in L ones.
///
/// # Safety
/// As [`end_slice`].
#[inline(always)]
unsafe fn add_waiting<S: Simd, F: WeightForm<S>, const L: usize>(
    s: S,
    product: &PackedProduct<'_>,
    ended: &EndedSlice,
    sums: &[f32],
    waiting: &mut [f32],
) {
    let EndedSlice {
        slice,
        rows,
        panel,
        waiting_at,
    } = ended;
    let column = panel * PANEL;
    let scales = [
        F::column_scales(s, product, column),
        F::column_scales(s, product, column + LANES),
    ];
    let is_last = slice + 1 == product.slices.len();
    // One check for all rows, without which each vector would have its own.
    let end = waiting_at + sums.len();
    assert!(is_last || L < WAITING_LEVELS, "more than eight slices");
    assert!(is_last && L == 0 || end <= LEVEL_WORDS);
    assert!(waiting.len() >= WAITING_LEVELS * LEVEL_WORDS);
    for (index, sums) in sums.as_chunks::<LANES>().0.chunks_exact(2).enumerate() {
        let row = rows.start + index;
        let row_scale = F::row_scale(s, product, *slice, row);
        let even_scale = F::row_scale(s, product, slice.saturating_sub(1), row);
        let mut values = [s.splat(0.0); 2];
        for vector in 0..2 {
            let mut value = F::finish(s, s.load(&sums[vector]), scales[vector], row_scale);
            let word = waiting_at + index * PANEL + vector * LANES;
            for level in 0..L {
                // SAFETY: a row's words are within each level, as was checked.
                let waited = unsafe { &*waiting.as_ptr().add(level * LEVEL_WORDS + word).cast() };
                let waited = s.load(waited);
                let waited = match level {
                    0 => F::finish(s, waited, scales[vector], even_scale),
                    _ => waited,
                };
                value = s.add(waited, value);
            }
            if !is_last {
                // SAFETY: as above; a slice that is not the last leaves a level free.
                let place =
                    unsafe { &mut *waiting.as_mut_ptr().add(L * LEVEL_WORDS + word).cast() };
                s.store(value, place);
            } else if let Some(bias) = product.bias {
                let bias = whole_vector(bias, column + vector * LANES);
                value = s.add(value, s.load(bias));
            }
            values[vector] = value;
        }
        if is_last {
            // SAFETY: as the caller promises.
            unsafe { write_results(s, product, row, *panel, values) };
        }
    }
}

/// Applies the gate and writes a row's results of a panel.
///
/// # Safety
/// No other task writes this row of this panel.
#[inline(always)]
unsafe fn write_results<S: Simd>(
    s: S,
    product: &PackedProduct<'_>,
    row: usize,
    panel: usize,
    values: [S::V; 2],
) {
    let whole = product.panel_columns();
    let columns = (panel * whole).min(product.columns)..product.columns;
    let start = row * product.columns + columns.start;
    // SAFETY: as the caller promises.
    let out = unsafe { product.out.part(start..start + columns.len().min(whole)) };
    let [gate, up] = match product.addends {
        Some(addends) if addends.is_adapted[row] => {
            let first = 2 * row * product.columns + columns.start;
            let count = out.len().min(LANES);
            let add = |value, first: usize| {
                s.add(value, s.load_part(&addends.values[first..first + count]))
            };
            [
                add(values[0], first),
                add(values[1], first + product.columns),
            ]
        }
        Some(_) | None => values,
    };
    match product.gate {
        Some(Activation::Silu) => write_vector(s, silu(s, gate, up), out),
        Some(Activation::GeluTanh) => write_vector(s, gelu_tanh(s, gate, up), out),
        Some(Activation::ClampedSwiGlu { limit }) => {
            write_vector(s, clamped_swiglu(s, gate, up, limit), out);
        }
        None => {
            let (first, second) = out.split_at_mut(out.len().min(LANES));
            write_vector(s, values[0], first);
            write_vector(s, values[1], second);
        }
    }
}

/// Writes sixteen columns of a row, or the remaining ones.
#[inline(always)]
fn write_vector<S: Simd>(s: S, value: S::V, out: &mut [f32]) {
    if let Some(out) = out.first_chunk_mut::<LANES>() {
        s.store(value, out);
    } else if !out.is_empty() {
        s.store_part(value, out);
    }
}

/// Sixteen elements from `at` on.
#[inline(always)]
pub(super) fn whole_vector(x: &[f32], at: usize) -> &[f32; LANES] {
    x[at..].first_chunk().expect("columns are whole vectors")
}
