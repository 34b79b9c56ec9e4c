//! Rows times a packed matrix.
//!
//! Owns: the layout of packed weights and the walk over them.
//! Invariant: see [`tile`](super::tile); the bias is added after the sum.

use super::tile::{Format, Sides, Tiles, accumulate, pack_row, with_rows};
use crate::memory::Parts;
use crate::simd::{LANES, Simd};
use std::ops::Range;

/// Columns of a panel of packed weights.
pub(crate) const PANEL: usize = 2 * LANES;

/// One product, seen by all its tasks.
pub(crate) struct Product<'a> {
    /// `[panel][step][PANEL]`.
    pub right: &'a [u32],
    /// Steps of the inner dimension.
    pub steps: usize,
    /// Columns of the result.
    pub columns: usize,
    /// `(panels × PANEL)`.
    pub bias: Option<&'a [f32]>,
    /// Each tile's `[step][phase][row]`, one after the other.
    pub left: &'a [u32],
    /// Rows of the result.
    pub rows: usize,
    /// `(rows, columns)`.
    pub out: Parts<'a, f32>,
}

/// A task: these panels of these tiles.
#[derive(Clone)]
pub(crate) struct Piece {
    pub panels: Range<usize>,
    pub tiles: Range<usize>,
}

/// Rows to be packed.
pub(crate) struct Left<'a> {
    /// `(rows, width)`.
    pub x: &'a [f32],
    pub width: usize,
    pub rows: usize,
    /// Steps of the inner dimension.
    pub steps: usize,
    /// As [`Product::left`].
    pub words: Parts<'a, u32>,
}

/// Packs the rows of these tiles.
#[inline(always)]
pub(crate) fn pack<S: Simd, F: Format<S>>(s: S, left: &Left<'_>, tiles: Range<usize>) {
    let cut = Tiles::new(left.rows, S::ROWS);
    let row_words = left.steps * F::PHASES;
    for tile in tiles {
        let (start, end) = (cut.start(tile), cut.start(tile + 1));
        // SAFETY: tiles do not overlap, and each is packed by one task.
        let words = unsafe { left.words.part(start * row_words..end * row_words) };
        for row in start..end {
            let x = &left.x[row * left.width..(row + 1) * left.width];
            pack_row::<S, F>(s, x, (row - start, end - start), words);
        }
    }
}

/// Puts a panel of weights together from its columns: `[PANEL][stride]` words to `[step][PANEL]`.
#[inline(always)]
pub(crate) fn interleave<S: Simd>(s: S, columns: &[u32], stride: usize, panel: &mut [u32]) {
    let steps = panel.len() / PANEL;
    assert!(steps <= stride && columns.len() >= PANEL * stride);
    let whole = steps / LANES * LANES;
    for step in (0..whole).step_by(LANES) {
        for first in [0, LANES] {
            let mut from = [columns.as_ptr(); LANES];
            for i in 0..LANES {
                from[i] = from[i].wrapping_add((first + i) * stride + step);
            }
            // SAFETY: sixteen steps of sixteen columns are there on both sides.
            unsafe {
                let to = panel.as_mut_ptr().add(step * PANEL + first);
                s.transpose(&from, to, PANEL);
            }
        }
    }
    for step in whole..steps {
        for column in 0..PANEL {
            panel[step * PANEL + column] = columns[column * stride + step];
        }
    }
}

/// Computes one piece.
#[inline(always)]
pub(crate) fn multiply<S: Simd, F: Format<S>>(s: S, product: &Product<'_>, piece: &Piece) {
    let cut = Tiles::new(product.rows, S::ROWS);
    let panel_words = product.steps * PANEL;
    for panel in piece.panels.clone() {
        let right = &product.right[panel * panel_words..(panel + 1) * panel_words];
        for tile in piece.tiles.clone() {
            let (start, end) = (cut.start(tile), cut.start(tile + 1));
            let row_words = product.steps * F::PHASES;
            let sides = Sides {
                left: product.left[start * row_words..end * row_words].as_ptr(),
                right: right.as_ptr(),
                right_stride: PANEL,
                steps: product.steps,
            };
            let corner = (start, panel * PANEL);
            // SAFETY: the slices above hold exactly what the sides claim.
            with_rows!(end - start, R => unsafe {
                // Decided when compiled: no set carries another's tiles.
                if const { R > S::ROWS } {
                    unreachable!("tiles are cut for this set");
                } else if const { S::COLUMNS == 2 || 2 * R <= S::ROWS } {
                    tile_out::<S, F, R, 2>(s, product, sides, corner);
                } else {
                    tile_out::<S, F, R, 1>(s, product, sides, corner);
                    let sides = Sides { right: sides.right.add(LANES), ..sides };
                    tile_out::<S, F, R, 1>(s, product, sides, (corner.0, corner.1 + LANES));
                }
            });
        }
    }
}

/// One register tile, bias added, written out.
///
/// # Safety
/// As [`accumulate`]; no other task writes the rows and columns from `corner`.
#[inline(always)]
unsafe fn tile_out<S: Simd, F: Format<S>, const R: usize, const C: usize>(
    s: S,
    product: &Product<'_>,
    sides: Sides,
    corner: (usize, usize),
) {
    let (row, column) = corner;
    // SAFETY: as the caller promises.
    let acc = unsafe { accumulate::<S, F, R, C>(s, sides, [[s.splat(0.0); C]; R]) };
    for c in 0..C {
        let first = column + c * LANES;
        if first >= product.columns {
            break;
        }
        let width = LANES.min(product.columns - first);
        for r in 0..R {
            let mut sum = acc[r][c];
            if let Some(bias) = product.bias {
                sum = s.add(sum, s.load_part(&bias[first..first + LANES]));
            }
            let start = (row + r) * product.columns + first;
            // SAFETY: only this task writes here.
            let out = unsafe { product.out.part(start..start + width) };
            match out.first_chunk_mut::<LANES>() {
                Some(out) => s.store(sum, out),
                None => s.store_part(sum, out),
            }
        }
    }
}
