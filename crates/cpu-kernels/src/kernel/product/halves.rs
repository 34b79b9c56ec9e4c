//! Weights of f16, `[panel][element][PANEL]`, two to a word.
//!
//! Invariant: rows are rounded to [`ROW_BITS`] bits, so that products with the 11 bits of an f16
//! are exact in f32, and instruction sets agree whether or not they fuse multiply and add. Each sum
//! is one chain of additions in the order of the inner dimension.

use super::left::LeftSide;
use super::slices::SliceBlocks;
use super::{BlockSides, PANEL, PackedProduct, TileSums, WeightForm, load_sums, store_sums};
use crate::kernel::tile::Tiles;
use crate::simd::{LANES, Simd};
use std::ops::Range;

/// Format of f16 weights.
#[derive(Clone, Copy)]
pub struct HalfForm;

/// Words per element of a panel.
pub const ELEMENT_WORDS: usize = PANEL / 2;

/// Significant bits of an activation, the leading one included: the 24 of f32 less the 11 of f16.
const ROW_BITS: u32 = 13;

impl<S: Simd> WeightForm<S> for HalfForm {
    const PHASES: usize = 1;

    #[inline(always)]
    fn words(_: &PackedProduct<'_>, steps: usize) -> usize {
        steps * ELEMENT_WORDS
    }

    #[inline(always)]
    unsafe fn add<const R: usize, const C: usize>(
        s: S,
        product: &PackedProduct<'_>,
        sides: BlockSides,
        tile_sums: TileSums,
    ) {
        // SAFETY: within the sides and the sums, as the caller promises.
        unsafe {
            let mut sums = load_sums::<S, Self, R, C>(s, product, sides, tile_sums.from);
            for step in 0..sides.steps {
                sides.prefetch.prefetch_step::<S, R>(s, step);
                let left = sides.left.add(step * R);
                let halves = sides.right.add(step * ELEMENT_WORDS).cast::<[u16; LANES]>();
                let mut columns = [s.splat(0.0); C];
                for c in 0..C {
                    columns[c] = s.widen_f16(&*halves.add(sides.vector + c));
                }
                for r in 0..R {
                    let row = s.splat_word(*left.add(r));
                    for c in 0..C {
                        sums[r][c] = s.fma(row, columns[c], sums[r][c]);
                    }
                }
            }
            store_sums(s, sums, tile_sums.to);
        }
    }
}

/// Packs the rows of these tiles, rounded to [`ROW_BITS`].
#[inline(always)]
pub fn pack<S: Simd>(_: S, left: &LeftSide<'_>, tiles: Range<usize>) {
    let cut = Tiles::new(left.rows, S::ROWS);
    for tile in tiles {
        let tile = cut.start(tile)..cut.start(tile + 1);
        for block in SliceBlocks::new(left.slices) {
            // SAFETY: each tile is packed by one task.
            let words = unsafe { left.block(&tile, &block.steps, 1) };
            for row in tile.clone() {
                let x = &left.row(row)[block.steps.clone()];
                let words = words[row - tile.start..].iter_mut().step_by(tile.len());
                for (to, x) in words.zip(x) {
                    *to = rounded(*x);
                }
            }
        }
    }
}

/// Rounds to `ROW_BITS`, halves to even; NaN stays NaN.
#[inline(always)]
fn rounded(x: f32) -> u32 {
    const LOST: u32 = f32::MANTISSA_DIGITS - ROW_BITS;
    let bits = x.to_bits();
    let half = (1 << (LOST - 1)) - 1 + (bits >> LOST & 1);
    let bits = if x.is_nan() {
        bits | 0x0040_0000
    } else {
        bits + half
    };
    bits >> LOST << LOST
}
