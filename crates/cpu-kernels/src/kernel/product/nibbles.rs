//! Weights of four bits in groups, see [`groups`].
//!
//! Owns: two ways to read them: with few rows, codes are unpacked in registers; with many, a block
//! of a panel is unpacked into the L1 cache first. Whole numbers and floats differ in the table
//! that gives a code's byte alone.
//! Invariant: both ways add the same numbers in the same order.

use super::bytes::ByteForm;
use super::groups::{
    self, CodeKind, CodeProduct, GroupCodes, add_scaled_group, group_sides, start_group_sums, units,
};
use super::pairs::{self, RightSide};
use super::{BLOCK_STEPS, BlockSides, PANEL, PackedProduct, TileSums, WeightForm};
use crate::simd::LANES;
use crate::simd::bytes::IntegerSimd;
use std::marker::PhantomData;

/// Kinds of four-bit codes.
pub trait NibbleCodes: Copy + 'static {
    /// The kind, for layouts.
    const CODES: GroupCodes;

    /// Bytes of the codes in the lower and in the upper four bits of every byte.
    fn bytes<S: IntegerSimd>(s: S, x: S::V) -> [S::V; 2];
}

/// Numbers from 0 to 15.
#[derive(Clone, Copy)]
pub struct WholeNibbles;

/// Four-bit floats as whole numbers, see [`GroupCodes::Float4`].
#[derive(Clone, Copy)]
pub struct FloatNibbles;

impl NibbleCodes for WholeNibbles {
    const CODES: GroupCodes = GroupCodes::Four;

    #[inline(always)]
    fn bytes<S: IntegerSimd>(s: S, x: S::V) -> [S::V; 2] {
        s.nibbles(x)
    }
}

impl NibbleCodes for FloatNibbles {
    const CODES: GroupCodes = GroupCodes::Float4;

    #[inline(always)]
    fn bytes<S: IntegerSimd>(s: S, x: S::V) -> [S::V; 2] {
        /// Twice the number of each e2m1 code, plus 12.
        const NUMBERS: [u8; 16] = [12, 13, 14, 15, 16, 18, 20, 24, 12, 11, 10, 9, 8, 6, 4, 0];
        let [lower, upper] = s.nibbles(x);
        [s.lookup(lower, &NUMBERS), s.lookup(upper, &NUMBERS)]
    }
}

/// Format of packed four-bit codes, unpacked in registers.
#[derive(Clone, Copy)]
pub struct NibbleForm<T>(PhantomData<T>);

/// Format of both kinds of codes with each block unpacked to bytes first, `[step of four][PANEL]`.
/// The kind is known at run time: it matters once per block and once per group.
#[derive(Clone, Copy)]
pub struct UnpackedNibbleForm;

impl<S: IntegerSimd, T: NibbleCodes> RightSide<S> for NibbleForm<T> {
    #[inline(always)]
    unsafe fn columns<const C: usize>(s: S, sides: BlockSides, step: usize) -> [S::V; C] {
        // SAFETY: as the caller promises; a step's codes are a vector.
        let both = T::bytes(s, s.load(unsafe { &*sides.right.add(step * LANES).cast() }));
        let mut columns = [both[0]; C];
        for c in 0..C {
            columns[c] = both[sides.vector + c];
        }
        columns
    }
}

impl<S: IntegerSimd, T: NibbleCodes> WeightForm<S> for NibbleForm<T> {
    const PHASES: usize = 1;
    /// Sums of groups are added to the total sums in memory.
    const IS_CHAIN: bool = false;

    #[inline(always)]
    fn words(product: &PackedProduct<'_>, steps: usize) -> usize {
        product.integer.units.words_of(steps)
    }

    #[inline(always)]
    unsafe fn add<const R: usize, const C: usize>(
        s: S,
        product: &PackedProduct<'_>,
        sides: BlockSides,
        TileSums { to, .. }: TileSums,
    ) {
        let units = units::<Self>(product);
        for group in 0..units.groups_of(sides.steps) {
            // SAFETY: within the sides and the sums, as the caller promises; the offsets follow the
            // layout of `GroupLayout`.
            unsafe {
                let unit = sides.packed.add(group * units.words());
                let sums = start_group_sums::<S, Self, R, C>(s, product, sides, group, unit);
                let of_group = group_sides::<R>(sides, group, units, unit);
                let (mut sums, done) = pairs::add::<S, Self, R, C>(s, of_group, sums);
                for step in done..units.steps {
                    sides
                        .prefetch
                        .prefetch_step::<S, R>(s, group * units.words() / LANES + step);
                    let codes = s.load(&*unit.add(step * units.step_words()).cast());
                    let both = T::bytes(s, codes);
                    let left = sides.left.add((group * units.steps + step) * R);
                    for r in 0..R {
                        let row = s.splat_word(*left.add(r));
                        for c in 0..C {
                            sums[r][c] = s.code_dot(sums[r][c], row, both[sides.vector + c]);
                        }
                    }
                }
                add_scaled_group::<S, Self, R, C>(s, product, sides, group, sums, unit, to);
            }
        }
    }
}

impl<T: NibbleCodes> CodeKind for NibbleForm<T> {
    #[inline(always)]
    fn codes(_: &PackedProduct<'_>) -> GroupCodes {
        T::CODES
    }
}

impl CodeKind for UnpackedNibbleForm {
    #[inline(always)]
    fn codes(product: &PackedProduct<'_>) -> GroupCodes {
        match product.integer.units.codes {
            GroupCodes::Float4 => GroupCodes::Float4,
            GroupCodes::Four | GroupCodes::Eight => GroupCodes::Four,
        }
    }
}

impl<S: IntegerSimd> CodeProduct<S> for UnpackedNibbleForm {
    const PHASES: usize = 1;

    #[inline(always)]
    fn phase(_: S, codes: S::V, _: usize) -> S::V {
        codes
    }

    #[inline(always)]
    fn dot(s: S, acc: S::V, left: S::V, codes: S::V) -> S::V {
        s.code_dot(acc, left, codes)
    }
}

impl<S: IntegerSimd> RightSide<S> for UnpackedNibbleForm {
    #[inline(always)]
    unsafe fn columns<const C: usize>(s: S, sides: BlockSides, step: usize) -> [S::V; C] {
        // SAFETY: as the caller promises; codes of four bits are bytes here.
        unsafe { ByteForm::columns::<C>(s, sides, step) }
    }
}

impl<S: IntegerSimd> WeightForm<S> for UnpackedNibbleForm {
    const PHASES: usize = 1;
    /// Sums of groups are added to the total sums in memory.
    const IS_CHAIN: bool = false;
    /// Only products with several tiles use this format, and several tiles are at least half full.
    const ROWS_MIN: usize = S::ROWS / 2;

    #[inline(always)]
    fn words(product: &PackedProduct<'_>, steps: usize) -> usize {
        product.integer.units.words_of(steps)
    }

    #[inline(always)]
    fn prepare(s: S, product: &PackedProduct<'_>, right: &[u32], spread: &mut [f32]) -> *const u32 {
        match Self::codes(product) {
            GroupCodes::Float4 => unpack::<S, FloatNibbles>(s, product, right, spread),
            GroupCodes::Four | GroupCodes::Eight => {
                unpack::<S, WholeNibbles>(s, product, right, spread);
            }
        }
        spread.as_ptr().cast()
    }

    #[inline(always)]
    unsafe fn add<const R: usize, const C: usize>(
        s: S,
        product: &PackedProduct<'_>,
        sides: BlockSides,
        TileSums { to, .. }: TileSums,
    ) {
        let group_words = product.integer.units.steps * PANEL;
        // SAFETY: as the caller promises; `prepare` left a block of bytes.
        unsafe { groups::add::<S, Self, R, C>(s, product, sides, group_words, to) }
    }
}

/// Unpacks a block's codes to bytes.
#[inline(always)]
fn unpack<S: IntegerSimd, T: NibbleCodes>(
    s: S,
    product: &PackedProduct<'_>,
    right: &[u32],
    spread: &mut [f32],
) {
    let units = units::<NibbleForm<T>>(product);
    let (to, _) = spread[..BLOCK_STEPS * PANEL].as_chunks_mut::<LANES>();
    let mut pairs = to.chunks_exact_mut(2);
    for unit in right.chunks_exact(units.words()) {
        let (codes, _) = unit[..units.scales_at()].as_chunks::<LANES>();
        for (codes, to) in codes.iter().zip(pairs.by_ref()) {
            // SAFETY: the chunk has sixteen words; only their bits matter.
            let [low, high] = T::bytes(s, s.load(unsafe { &*codes.as_ptr().cast() }));
            s.store(low, &mut to[0]);
            s.store(high, &mut to[1]);
        }
    }
}
