//! Weights of eight bits, `[panel][step of four][PANEL]`, with a scale per column.
//!
//! Invariant: a slice's sums are integers, exact in any order. They are rounded when they become
//! floats, when multiplied with the column's scale, and with the scale of the row's slice.
//!
//! Where the instruction takes weights unsigned, they are flipped in registers and sums begin lower
//! by the row's sum. Nothing is stored for each slice of a column: such numbers would be more to
//! read, in another place than the panel.

use super::pairs::{self, RightSide};
use super::results::whole_vector;
use super::{BlockSides, PANEL, PackedProduct, TileSums, WeightForm, load_sums, store_sums};
use crate::simd::LANES;
use crate::simd::bytes::IntegerSimd;

/// Format of eight-bit weights with a scale per column.
#[derive(Clone, Copy)]
pub struct ByteForm;

impl<S: IntegerSimd> RightSide<S> for ByteForm {
    #[inline(always)]
    unsafe fn columns<const C: usize>(s: S, sides: BlockSides, step: usize) -> [S::V; C] {
        let mut columns = [s.splat(0.0); C];
        for c in 0..C {
            let at = step * PANEL + (sides.vector + c) * LANES;
            // SAFETY: as the caller promises.
            columns[c] = s.load(unsafe { &*sides.right.add(at).cast() });
        }
        columns
    }
}

impl<S: IntegerSimd> WeightForm<S> for ByteForm {
    const PHASES: usize = S::LEFT.phases();

    #[inline(always)]
    fn starts<const R: usize>(
        s: S,
        product: &PackedProduct<'_>,
        slice: usize,
        row: usize,
    ) -> [S::V; R] {
        let mut starts = [s.splat(0.0); R];
        if const { S::BYTE_OFFSET > 0 } {
            let offsets = &product.left_sums[slice * product.rows + row..][..R];
            for r in 0..R {
                starts[r] = s.splat_word(offsets[r]);
            }
        }
        starts
    }

    #[inline(always)]
    unsafe fn add<const R: usize, const C: usize>(
        s: S,
        product: &PackedProduct<'_>,
        sides: BlockSides,
        tile_sums: TileSums,
    ) {
        let phases = S::LEFT.phases();
        // SAFETY: within the sides and the sums, as the caller promises.
        unsafe {
            let sums = load_sums::<S, Self, R, C>(s, product, sides, tile_sums.from);
            let (mut sums, done) = pairs::add::<S, Self, R, C>(s, sides, sums);
            let right = sides.right.add(sides.vector * LANES);
            for step in done..sides.steps {
                sides.prefetch.prefetch_step::<S, R>(s, step);
                for phase in 0..phases {
                    let left = sides.left.add((step * phases + phase) * R);
                    let mut columns = [s.splat(0.0); C];
                    for c in 0..C {
                        let words = &*right.add(step * PANEL + LANES * c).cast();
                        columns[c] = s.byte_phase(s.load(words), phase);
                    }
                    for r in 0..R {
                        let row = s.splat_word(*left.add(r));
                        for c in 0..C {
                            sums[r][c] = s.byte_dot(sums[r][c], row, columns[c]);
                        }
                    }
                }
            }
            store_sums(s, sums, tile_sums.to);
        }
    }

    #[inline(always)]
    fn column_scales(s: S, product: &PackedProduct<'_>, column: usize) -> S::V {
        s.load(whole_vector(product.integer.scales, column))
    }

    #[inline(always)]
    fn row_scale(s: S, product: &PackedProduct<'_>, slice: usize, row: usize) -> S::V {
        s.splat(product.left_scales[slice * product.rows + row])
    }

    #[inline(always)]
    fn finish(s: S, sum: S::V, column_scales: S::V, row_scale: S::V) -> S::V {
        s.mul(s.mul(s.to_float(sum), column_scales), row_scale)
    }
}
