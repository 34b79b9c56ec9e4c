//! The left side of a product, packed once for all panels.
//!
//! Owns: rounding rows to the type that weights are multiplied with: floats, or bytes with a scale.
//! Invariant: a row's words depend only on the row, and are the same on every instruction set
//! except for the byte format of its dot product.

use super::slices::{SliceBlock, SliceBlocks};
use super::{BLOCK_STEPS, runs};
use crate::kernel::tile::{ElementFormat, Tiles};
use crate::memory::SliceParts;
use crate::simd::bytes::{IntegerSimd, LeftBytes};
use crate::simd::{LANES, Simd, TransposeTarget};
use cleave_checkpoint::rounding::{MAGNITUDE_MIN, ROUND_SHIFT, magnitude_max};
use std::ops::Range;

/// Rows to be packed, and the memory that they are packed into.
#[derive(Clone, Copy)]
pub struct LeftSide<'a> {
    /// Rows from number `first` on, `(…, width)`.
    pub x: &'a [f32],
    pub first: usize,
    pub width: usize,
    pub rows: usize,
    /// End of each slice in steps of the inner dimension.
    pub slices: &'a [usize],
    /// Steps per group of bytes with its own scale; `None` if a slice is a group.
    pub group_steps: Option<usize>,
    /// Words of the packed rows, `[block][tile][step][phase][row]`, where blocks are those of
    /// [`SliceBlocks`].
    pub words: SliceParts<'a, u32>,
    /// Scales of the bytes, `(groups, rows)`.
    pub scales: SliceParts<'a, f32>,
    /// Sums of a group's bytes, negated, `(groups, rows)`; of a slice's, times what
    /// [`IntegerSimd::byte_phase`] adds to each weight.
    pub sums: SliceParts<'a, u32>,
}

impl<'a> LeftSide<'a> {
    /// Words of a block's steps in a tile.
    ///
    /// # Safety
    /// Only one task packs the tile.
    #[inline(always)]
    pub(super) unsafe fn block(
        &self,
        tile: &Range<usize>,
        block: &Range<usize>,
        phases: usize,
    ) -> &'a mut [u32] {
        let start = (block.start * self.rows + tile.start * block.len()) * phases;
        let words = tile.len() * block.len() * phases;
        // SAFETY: tiles do not overlap.
        unsafe { self.words.part(start..start + words) }
    }

    /// Elements of these steps.
    fn elements(&self, steps: &Range<usize>, per_step: usize) -> Range<usize> {
        steps.start * per_step..self.width.min(steps.end * per_step)
    }

    pub(super) fn row(&self, row: usize) -> &'a [f32] {
        &self.x[(row - self.first) * self.width..][..self.width]
    }

    /// Number and steps of the group that a step of a block is part of.
    #[inline(always)]
    fn group_of(&self, block: &SliceBlock, step: usize) -> (usize, Range<usize>) {
        match self.group_steps {
            Some(each) => {
                let index = step / each;
                (index, index * each..(index + 1) * each)
            }
            None => (block.slice, block.slice_steps.clone()),
        }
    }
}

/// Limit of rows of a tile.
const ROWS_MAX: usize = LANES;
/// Distance in words between rows of the staging memory: words of two phases, and padding so that
/// rows do not share sets of the L1 cache.
const ROW_WORDS: usize = 2 * BLOCK_STEPS + LANES;

/// Staging memory of a tile's block before it is transposed: a row's words are consecutive.
struct LeftStaging([u32; ROWS_MAX * ROW_WORDS]);

impl LeftStaging {
    fn new() -> Self {
        Self([0; ROWS_MAX * ROW_WORDS])
    }

    #[inline(always)]
    fn row(&mut self, row: usize) -> &mut [u32] {
        &mut self.0[row * ROW_WORDS..(row + 1) * ROW_WORDS]
    }

    /// Transposes to the layout of a tile of so many rows.
    #[inline(always)]
    fn transpose_to_tile<S: Simd>(&self, s: S, rows: usize, to: &mut [u32]) {
        let words = to.len() / rows;
        let target = TransposeTarget {
            words: to,
            stride: rows,
        };
        s.transpose_rows(&self.0, [rows, words, ROW_WORDS], target);
    }
}

/// Packs the rows of these tiles as floats.
#[inline(always)]
pub fn pack<S: Simd, F: ElementFormat<S>>(s: S, left: &LeftSide<'_>, tiles: Range<usize>) {
    let cut = Tiles::new(left.rows, S::ROWS);
    let mut staging = LeftStaging::new();
    for tile in tiles {
        let tile = cut.start(tile)..cut.start(tile + 1);
        for block in SliceBlocks::new(left.slices) {
            let elements = left.elements(&block.steps, F::PER_STEP);
            for row in tile.clone() {
                let words = staging.row(row - tile.start);
                let mut at = 0;
                for x in left.row(row)[elements.clone()].chunks(LANES) {
                    let x = match x.first_chunk() {
                        Some(x) => s.load(x),
                        None => s.load_part(x),
                    };
                    let to = words[at..].first_chunk_mut();
                    at += F::words(s, x, to.expect("a row has room for a vector more"));
                }
            }
            // SAFETY: only one task packs a tile.
            let words = unsafe { left.block(&tile, &block.steps, F::PHASES) };
            staging.transpose_to_tile(s, tile.len(), words);
        }
    }
}

/// Elements per step of bytes.
const PER_STEP: usize = 4;

/// Packs the rows of these tiles as bytes, with a scale and a sum per slice of a row.
#[inline(always)]
pub fn pack_bytes<S: IntegerSimd>(s: S, left: &LeftSide<'_>, tiles: Range<usize>) {
    pack_groups(s, left, tiles, S::LEFT, S::BYTE_OFFSET);
}

/// Packs the rows of these tiles as bytes for eight-bit codes, with a scale and a sum per group of
/// a row.
#[inline(always)]
pub fn pack_grouped_bytes<S: IntegerSimd>(s: S, left: &LeftSide<'_>, tiles: Range<usize>) {
    pack_groups(s, left, tiles, S::LEFT, 1);
}

/// Packs the rows of these tiles as signed bytes for four-bit codes.
#[inline(always)]
pub fn pack_for_nibbles<S: IntegerSimd>(s: S, left: &LeftSide<'_>, tiles: Range<usize>) {
    pack_groups(s, left, tiles, LeftBytes::Signed, 1);
}

#[inline(always)]
fn pack_groups<S: IntegerSimd>(
    s: S,
    left: &LeftSide<'_>,
    tiles: Range<usize>,
    form: LeftBytes,
    sum_factor: u32,
) {
    let cut = Tiles::new(left.rows, S::ROWS);
    let mut staging = LeftStaging::new();
    for tile in tiles {
        let tile = cut.start(tile)..cut.start(tile + 1);
        // Rounding and sums of each row's current group, which spans several blocks or a part of
        // one.
        let mut groups = [(ByteRounding::default(), s.splat(0.0)); ROWS_MAX];
        for block in SliceBlocks::new(left.slices) {
            let run_steps = left
                .group_steps
                .map_or(BLOCK_STEPS, |each| each.min(BLOCK_STEPS));
            for row in tile.clone() {
                let words = staging.row(row - tile.start);
                let (rounding, sums) = &mut groups[row - tile.start];
                for run in runs(block.steps.clone(), run_steps) {
                    let (index, group) = left.group_of(&block, run.start);
                    // A group begins: find its largest magnitude, which may lie in later blocks.
                    if run.start == group.start {
                        *rounding =
                            ByteRounding::of(&left.row(row)[left.elements(&group, PER_STEP)]);
                        *sums = s.splat(0.0);
                    }
                    let x = &left.row(row)[left.elements(&run, PER_STEP)];
                    let words = &mut words[(run.start - block.steps.start) * form.phases()..];
                    *sums = round_run(s, x, *rounding, form, words, *sums);
                    // A group ends: store its scale and its negated sum.
                    if run.end == group.end {
                        let at = index * left.rows + row;
                        // SAFETY: only one task packs a row.
                        unsafe {
                            left.scales.part(at..at + 1)[0] = rounding.scale;
                            // Sums of integers below 2^24 are exact in f32, in any order: those of
                            // 132,104 bytes are, more than an inner dimension has.
                            let sum = s.sum(*sums) as i32;
                            let negated = sum.wrapping_neg().cast_unsigned();
                            left.sums.part(at..at + 1)[0] = negated.wrapping_mul(sum_factor);
                        }
                    }
                }
            }
            // SAFETY: only one task packs a tile.
            let words = unsafe { left.block(&tile, &block.steps, form.phases()) };
            staging.transpose_to_tile(s, tile.len(), words);
        }
    }
}

/// Rounds a run of a row's elements of one group to bytes; returns the sums with the bytes added.
#[inline(always)]
fn round_run<S: IntegerSimd>(
    s: S,
    x: &[f32],
    rounding: ByteRounding,
    form: LeftBytes,
    words: &mut [u32],
    mut sums: S::V,
) -> S::V {
    let (inverse, shift) = (s.splat(rounding.inverse), s.splat(ROUND_SHIFT));
    let mut to = words.chunks_exact_mut(form.phases());
    for x in x.chunks(LANES) {
        let x = match x.first_chunk() {
            Some(x) => s.load(x),
            None => s.load_part(x),
        };
        // No closures around these calls: a closure is compiled without the instruction set's
        // features.
        let shifted = s.add(s.mul(x, inverse), shift);
        for (four, to) in s
            .low_bytes(shifted)
            .as_chunks::<PER_STEP>()
            .0
            .iter()
            .zip(&mut to)
        {
            match form {
                LeftBytes::Signed => to[0] = u32::from_le_bytes(*four),
                LeftBytes::Widened16 => {
                    to[0] = halves(four[1], four[3]);
                    to[1] = halves(four[0], four[2]);
                }
            }
        }
        sums = s.add(sums, s.sub(shifted, shift));
    }
    sums
}

#[inline(always)]
fn halves(low: u8, high: u8) -> u32 {
    let of = |byte: u8| u32::from(i16::from(byte.cast_signed()).cast_unsigned());
    of(low) | of(high) << 16
}

/// Scale of a group's rounding to bytes: the largest magnitude becomes 127.
#[derive(Clone, Copy, Default)]
struct ByteRounding {
    scale: f32,
    inverse: f32,
}

impl ByteRounding {
    /// Infinities and NaN make the scale infinite or NaN, and with it the result.
    #[inline(always)]
    fn of(x: &[f32]) -> Self {
        let most = magnitude_max(x);
        if most < MAGNITUDE_MIN {
            Self {
                scale: 0.0,
                inverse: 0.0,
            }
        } else {
            Self {
                scale: most / 127.0,
                inverse: 127.0 / most,
            }
        }
    }
}
