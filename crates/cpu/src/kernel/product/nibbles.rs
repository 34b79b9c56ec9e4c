//! Weights of four bits in groups, see [`groups`].
//!
//! Owns: both ways to read them: few rows take codes apart on the way, many have a block of a panel spread out into the
//! first cache.
//! Invariant: both ways add the same numbers in the same order.

use super::groups::{self, Bits, Codes, finish, start, units};
use super::{BLOCK_STEPS, Form, PANEL, Product, Sides, Sums};
use crate::simd::LANES;
use crate::simd::bytes::Bytes;

/// Codes as they are packed.
#[derive(Clone, Copy)]
pub(crate) struct Nibble;

/// The same codes, a block of a panel at a time as bytes, `[step of four][PANEL]`.
#[derive(Clone, Copy)]
pub(crate) struct Spread;

impl<S: Bytes> Form<S> for Nibble {
    const PHASES: usize = 1;
    /// Sums of groups are added to those of all.
    const IS_CHAIN: bool = false;

    #[inline(always)]
    fn words(product: &Product<'_>, steps: usize) -> usize {
        product.whole.units.words_of(steps)
    }

    #[inline(always)]
    unsafe fn add<const R: usize, const C: usize>(
        s: S,
        product: &Product<'_>,
        sides: Sides,
        Sums { to: kept, .. }: Sums,
    ) {
        let units = units::<S, Spread>(product);
        for group in 0..sides.steps / units.steps {
            // SAFETY: within the sides and the sums, as the caller promises; this is how units are laid out.
            unsafe {
                let unit = sides.packed.add(group * units.words());
                let mut sums = start::<S, Spread, R, C>(s, product, (sides, group), unit);
                for step in 0..units.steps {
                    sides.ahead.ask(s, group * units.words() / LANES + step);
                    let codes = s.load(&*unit.add(step * units.step_words()).cast());
                    let both = s.nibbles(codes);
                    let left = sides.left.add((group * units.steps + step) * R);
                    for r in 0..R {
                        let row = s.splat_word(*left.add(r));
                        for c in 0..C {
                            sums[r][c] = s.code_dot(sums[r][c], row, both[sides.vector + c]);
                        }
                    }
                }
                finish::<S, Spread, R, C>(s, product, (sides, group), sums, (unit, kept));
            }
        }
    }
}

impl<S: Bytes> Codes<S> for Spread {
    const BITS: Bits = Bits::Four;
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

impl<S: Bytes> Form<S> for Spread {
    const PHASES: usize = 1;
    /// Sums of groups are added to those of all.
    const IS_CHAIN: bool = false;
    /// One of several that share more rows than one could have.
    const ROWS_MIN: usize = S::ROWS / 2;

    #[inline(always)]
    fn words(product: &Product<'_>, steps: usize) -> usize {
        product.whole.units.words_of(steps)
    }

    #[inline(always)]
    fn prepare(s: S, product: &Product<'_>, right: &[u32], spread: &mut [f32]) -> *const u32 {
        let units = units::<S, Self>(product);
        let (to, _) = spread[..BLOCK_STEPS * PANEL].as_chunks_mut::<LANES>();
        let mut pairs = to.chunks_exact_mut(2);
        for unit in right.chunks_exact(units.words()) {
            let (codes, _) = unit[..units.scales_at()].as_chunks::<LANES>();
            for (codes, to) in codes.iter().zip(pairs.by_ref()) {
                // SAFETY: sixteen words, whatever they mean.
                let [low, high] = s.nibbles(s.load(unsafe { &*codes.as_ptr().cast() }));
                s.store(low, &mut to[0]);
                s.store(high, &mut to[1]);
            }
        }
        spread.as_ptr().cast()
    }

    #[inline(always)]
    unsafe fn add<const R: usize, const C: usize>(
        s: S,
        product: &Product<'_>,
        sides: Sides,
        Sums { to: kept, .. }: Sums,
    ) {
        let group_words = product.whole.units.steps * PANEL;
        // SAFETY: as the caller promises; `prepare` left a block of bytes.
        unsafe { groups::add::<S, Self, R, C>(s, product, (sides, group_words), kept) }
    }
}
