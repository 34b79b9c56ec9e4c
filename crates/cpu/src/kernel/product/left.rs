//! The left side of a product, packed once for all panels.
//!
//! Owns: rounding rows to what weights are multiplied with: floats, or bytes with a scale.
//! Invariant: a row's words depend on nothing but the row, and are the same on every instruction set but for the form
//! that its dot product takes them in.

use super::{BLOCK_STEPS, runs};
use crate::kernel::rounding::{LEAST, SHIFT, most};
use crate::kernel::tile::{Format, Tiles};
use crate::memory::Parts;
use crate::simd::bytes::{Bytes, LeftBytes};
use crate::simd::{LANES, Simd};
use std::ops::Range;

/// Rows to be packed.
#[derive(Clone, Copy)]
pub(crate) struct Left<'a> {
    /// Rows from number `first` on, `(…, width)`.
    pub x: &'a [f32],
    pub first: usize,
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
        &self.x[(row - self.first) * self.width..][..self.width]
    }
}

/// Rows of a tile, at most.
const ROWS_MAX: usize = LANES;
/// Words from one row to the next where a block's rows are put together: those of two phases, and room so that rows do
/// not meet in the first cache.
const ROW_WORDS: usize = 2 * BLOCK_STEPS + LANES;

/// A block of a tile before its rows are turned: words of a row lie one after the other, as they are made.
struct Bench([u32; ROWS_MAX * ROW_WORDS]);

impl Bench {
    fn new() -> Self {
        Self([0; ROWS_MAX * ROW_WORDS])
    }

    #[inline(always)]
    fn row(&mut self, row: usize) -> &mut [u32] {
        &mut self.0[row * ROW_WORDS..(row + 1) * ROW_WORDS]
    }

    /// To the order of a tile of so many rows.
    #[inline(always)]
    fn turn<S: Simd>(&self, s: S, rows: usize, to: &mut [u32]) {
        let words = to.len() / rows;
        s.turn(&self.0, [rows, words, ROW_WORDS], (to, rows));
    }
}

/// Packs the rows of these tiles as floats.
#[inline(always)]
pub(crate) fn pack<S: Simd, F: Format<S>>(s: S, left: &Left<'_>, tiles: Range<usize>) {
    let cut = Tiles::new(left.rows, S::ROWS);
    let mut bench = Bench::new();
    for tile in tiles {
        let tile = cut.start(tile)..cut.start(tile + 1);
        for block in runs(0..left.steps, BLOCK_STEPS) {
            let elements = left.elements(&block, F::PER_STEP);
            for row in tile.clone() {
                let words = bench.row(row - tile.start);
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
            // SAFETY: each tile is packed by one task.
            let words = unsafe { left.block(&tile, &block, F::PHASES) };
            bench.turn(s, tile.len(), words);
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
    let mut bench = Bench::new();
    for tile in tiles {
        let tile = cut.start(tile)..cut.start(tile + 1);
        // Of the group at hand of each row, which is many blocks or a part of one.
        let mut groups = [(Rounding::default(), s.splat(0.0)); ROWS_MAX];
        for block in runs(0..left.steps, BLOCK_STEPS) {
            for row in tile.clone() {
                let words = bench.row(row - tile.start);
                let (rounding, sums) = &mut groups[row - tile.start];
                for run in runs(block.clone(), left.group_steps.min(BLOCK_STEPS)) {
                    let index = run.start / left.group_steps;
                    if run.start % left.group_steps == 0 {
                        let end = left.steps.min(run.start + left.group_steps);
                        let group = left.elements(&(run.start..end), PER_STEP);
                        *rounding = Rounding::of(&left.row(row)[group]);
                        *sums = s.splat(0.0);
                    }
                    let x = &left.row(row)[left.elements(&run, PER_STEP)];
                    let words = &mut words[(run.start - block.start) * form.phases()..];
                    *sums = round(s, x, (*rounding, form), words, *sums);
                    if run.end == left.steps || run.end % left.group_steps == 0 {
                        let at = index * left.rows + row;
                        // SAFETY: each row is packed by one task.
                        unsafe {
                            left.scales.part(at..at + 1)[0] = rounding.scale;
                            // Sums of whole numbers far below 2^24: exact, whatever their order.
                            let sum = s.sum(*sums) as i32;
                            left.sums.part(at..at + 1)[0] = sum.wrapping_neg().cast_unsigned();
                        }
                    }
                }
            }
            // SAFETY: each tile is packed by one task.
            let words = unsafe { left.block(&tile, &block, form.phases()) };
            bench.turn(s, tile.len(), words);
        }
    }
}

/// Rounds a run of a row's elements, all of one group; adds their bytes to the sums.
#[inline(always)]
fn round<S: Bytes>(
    s: S,
    x: &[f32],
    (rounding, form): (Rounding, LeftBytes),
    words: &mut [u32],
    mut sums: S::V,
) -> S::V {
    let (inverse, shift) = (s.splat(rounding.inverse), s.splat(SHIFT));
    let mut to = words.chunks_exact_mut(form.phases());
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

/// How numbers become bytes: the largest becomes ±127.
#[derive(Clone, Copy, Default)]
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
