//! The left side of a product, packed once for all panels.
//!
//! Owns: rounding rows to what weights are multiplied with: floats, or bytes with a scale.
//! Invariant: a row's words depend on nothing but the row, and are the same on every instruction set but for the form
//! that its dot product takes them in.

use super::{BLOCK_STEPS, runs};
use crate::kernel::rounding::{LEAST, SHIFT, most};
use crate::kernel::tile::{Format, Tiles, pack_row};
use crate::memory::Parts;
use crate::simd::bytes::{Bytes, LeftBytes};
use crate::simd::{LANES, Simd};
use std::ops::Range;

/// Rows to be packed.
pub(crate) struct Left<'a> {
    /// `(rows, width)`.
    pub x: &'a [f32],
    pub width: usize,
    pub rows: usize,
    /// Steps of the inner dimension.
    pub steps: usize,
    /// Steps of a group of bytes that has a scale of its own; all for a scale for each row.
    pub group_steps: usize,
    /// `[block][tile][step][phase][row]`.
    pub words: Parts<'a, u32>,
    /// What bytes are multiplied with, `(groups, rows)`.
    pub scales: Parts<'a, f32>,
    /// Sums of a group's bytes, negated, `(groups, rows)`.
    pub sums: Parts<'a, u32>,
}

impl<'a> Left<'a> {
    /// Words of a block's steps in a tile.
    ///
    /// # Safety
    /// The tile is packed by one task.
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
        &self.x[row * self.width..(row + 1) * self.width]
    }
}

/// Packs the rows of these tiles as floats.
#[inline(always)]
pub(crate) fn pack<S: Simd, F: Format<S>>(s: S, left: &Left<'_>, tiles: Range<usize>) {
    let cut = Tiles::new(left.rows, S::ROWS);
    for tile in tiles {
        let tile = cut.start(tile)..cut.start(tile + 1);
        for block in runs(0..left.steps, BLOCK_STEPS) {
            // SAFETY: each tile is packed by one task.
            let words = unsafe { left.block(&tile, &block, F::PHASES) };
            let elements = left.elements(&block, F::PER_STEP);
            for row in tile.clone() {
                let x = &left.row(row)[elements.clone()];
                pack_row::<S, F>(s, x, (row - tile.start, tile.len()), words);
            }
        }
    }
}

/// Elements of a step of bytes.
const PER_STEP: usize = 4;

/// Packs the rows of these tiles as bytes, a scale for each row.
#[inline(always)]
pub(crate) fn pack_bytes<S: Bytes>(s: S, left: &Left<'_>, tiles: Range<usize>) {
    pack_groups(s, left, tiles, S::LEFT);
}

/// Packs the rows of these tiles as bytes for codes of eight bits, scale and sum for each group of a row.
#[inline(always)]
pub(crate) fn pack_octets<S: Bytes>(s: S, left: &Left<'_>, tiles: Range<usize>) {
    pack_groups(s, left, tiles, S::LEFT_OCTETS);
}

/// The same for codes of four bits: bytes with a sign.
#[inline(always)]
pub(crate) fn pack_codes<S: Bytes>(s: S, left: &Left<'_>, tiles: Range<usize>) {
    pack_groups(s, left, tiles, LeftBytes::Signed);
}

#[inline(always)]
fn pack_groups<S: Bytes>(s: S, left: &Left<'_>, tiles: Range<usize>, form: LeftBytes) {
    let cut = Tiles::new(left.rows, S::ROWS);
    for tile in tiles {
        let tile = cut.start(tile)..cut.start(tile + 1);
        for row in tile.clone() {
            for (index, group) in runs(0..left.steps, left.group_steps).enumerate() {
                let x = &left.row(row)[left.elements(&group, PER_STEP)];
                let rounding = Rounding::of(x);
                let mut sums = s.splat(0.0);
                // A group is many blocks or a part of one.
                for run in runs(group, BLOCK_STEPS) {
                    sums = pack_run(s, left, (&tile, row), (run, form), (rounding, sums));
                }
                let at = index * left.rows + row;
                // SAFETY: each row is packed by one task.
                unsafe {
                    left.scales.part(at..at + 1)[0] = rounding.scale;
                    // Sums of whole numbers far below 2^24: exact, whatever their order.
                    let sum = s.sum(sums) as i32;
                    left.sums.part(at..at + 1)[0] = sum.wrapping_neg().cast_unsigned();
                }
            }
        }
    }
}

/// Packs some steps of a row, which are of one group and of one block; adds their bytes to the sums.
#[inline(always)]
fn pack_run<S: Bytes>(
    s: S,
    left: &Left<'_>,
    (tile, row): (&Range<usize>, usize),
    (run, form): (Range<usize>, LeftBytes),
    (rounding, mut sums): (Rounding, S::V),
) -> S::V {
    let first = run.start / BLOCK_STEPS * BLOCK_STEPS;
    let block = first..left.steps.min(first + BLOCK_STEPS);
    let stride = tile.len() * form.phases();
    // SAFETY: each tile is packed by one task.
    let words = unsafe { left.block(tile, &block, form.phases()) };
    let words = &mut words[(run.start - first) * stride + row - tile.start..];
    let x = &left.row(row)[left.elements(&run, PER_STEP)];
    let (inverse, shift) = (s.splat(rounding.inverse), s.splat(SHIFT));
    let mut to = words.chunks_mut(stride);
    for x in x.chunks(LANES) {
        let x = match x.first_chunk() {
            Some(x) => s.load(x),
            None => s.load_part(x),
        };
        // No closures around these: what is compiled apart has not the instructions.
        let shifted = s.add(s.mul(x, inverse), shift);
        for (four, to) in s
            .low_bytes(shifted)
            .as_chunks::<PER_STEP>()
            .0
            .iter()
            .zip(&mut to)
        {
            match form {
                LeftBytes::Offset => to[0] = u32::from_le_bytes(*four) ^ 0x8080_8080,
                LeftBytes::Signed => to[0] = u32::from_le_bytes(*four),
                LeftBytes::Halves => {
                    to[0] = halves(four[1], four[3]);
                    to[tile.len()] = halves(four[0], four[2]);
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

/// How numbers become bytes: the largest becomes ±127.
#[derive(Clone, Copy)]
struct Rounding {
    scale: f32,
    inverse: f32,
}

impl Rounding {
    /// Infinities and what is not a number make the scale so, and with it the result.
    #[inline(always)]
    fn of(x: &[f32]) -> Self {
        let most = most(x);
        match most < LEAST {
            true => Self {
                scale: 0.0,
                inverse: 0.0,
            },
            false => Self {
                scale: most / 127.0,
                inverse: 127.0 / most,
            },
        }
    }
}
