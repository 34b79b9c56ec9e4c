//! Weights of four bits in groups of the inner dimension, scale and zero point for each group of a column.
//!
//! Owns: the layout `[panel][group][unit]`, see [`Units`], and both ways to read it: few rows take codes apart on the
//! way, many have a block of a panel spread out into the first cache.
//! Invariant: a group's sum is a whole number, exact whatever the order; groups are added in order, each rounded twice:
//! times the row's scale of the group, then, fused, times the column's and added. Both ways do the same.

use super::{BLOCK_STEPS, Form, PANEL, Product, Sides};
use crate::simd::LANES;
use crate::simd::bytes::Bytes;

/// Codes as they are packed.
#[derive(Clone, Copy)]
pub(crate) struct Nibble;

/// The same codes, a block of a panel at a time as bytes, `[step of four][PANEL]`.
#[derive(Clone, Copy)]
pub(crate) struct Spread;

/// How a group of a panel is laid out: `[step of four][16]` words of codes, where byte `b` of a step has in its lower
/// half element `b % 4` of column `b / 4`, and in its upper half that of column `16 + b / 4`; then [`PANEL`] scales;
/// then, where zero points differ, as many bytes of those, and as many more to end with a cache line.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) struct Units {
    /// Steps of a group: a quarter of its elements. Divides [`BLOCK_STEPS`].
    pub steps: usize,
    /// Whether scales are bf16, or f32.
    pub scales: Scales,
    /// Whether zero points are stored; where not, they are [`ZERO`].
    pub has_zeros: bool,
}

/// How scales are stored.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) enum Scales {
    /// Two bytes.
    #[default]
    Brain,
    /// Four.
    Single,
}

/// The zero point of groups that store none.
pub(crate) const ZERO: u8 = 8;

impl Units {
    /// Words of a step's codes.
    pub(crate) const STEP_WORDS: usize = PANEL / 2;

    /// Where scales begin.
    pub(crate) const fn scales_at(self) -> usize {
        self.steps * Self::STEP_WORDS
    }

    /// Where zero points begin.
    pub(crate) const fn zeros_at(self) -> usize {
        self.scales_at()
            + match self.scales {
                Scales::Brain => PANEL / 2,
                Scales::Single => PANEL,
            }
    }

    /// Words of a group.
    pub(crate) const fn words(self) -> usize {
        self.zeros_at()
            + match self.has_zeros {
                true => PANEL / 2,
                false => 0,
            }
    }

    /// Words of groups that have so many steps together.
    pub(crate) const fn words_of(self, steps: usize) -> usize {
        steps / self.steps * self.words()
    }
}

impl<S: Bytes> Form<S> for Nibble {
    const PHASES: usize = 1;

    #[inline(always)]
    fn words(product: &Product<'_>, steps: usize) -> usize {
        product.whole.units.words_of(steps)
    }

    #[inline(always)]
    unsafe fn add<const R: usize, const C: usize>(
        s: S,
        product: &Product<'_>,
        sides: Sides,
        kept: *mut f32,
    ) {
        let units = product.whole.units;
        for group in 0..sides.steps / units.steps {
            // SAFETY: within the sides and the sums, as the caller promises; this is how units are laid out.
            unsafe {
                let unit = sides.packed.add(group * units.words());
                let mut sums = start::<S, R, C>(s, product, (sides, group), unit);
                for step in 0..units.steps {
                    sides.ahead.ask(s, group * units.words() / LANES + step);
                    let codes = s.load(&*unit.add(step * Units::STEP_WORDS).cast());
                    let both = s.nibbles(codes);
                    let left = sides.left.add((group * units.steps + step) * R);
                    for r in 0..R {
                        let row = s.splat_word(*left.add(r));
                        for c in 0..C {
                            sums[r][c] = s.code_dot(sums[r][c], row, both[sides.vector + c]);
                        }
                    }
                }
                finish::<S, R, C>(s, product, (sides, group), sums, (unit, kept));
            }
        }
    }
}

impl<S: Bytes> Form<S> for Spread {
    const PHASES: usize = 1;
    /// One of several that share more rows than one could have.
    const ROWS_MIN: usize = S::ROWS / 2;

    #[inline(always)]
    fn words(product: &Product<'_>, steps: usize) -> usize {
        product.whole.units.words_of(steps)
    }

    #[inline(always)]
    fn prepare(s: S, product: &Product<'_>, right: &[u32], spread: &mut [f32]) -> *const u32 {
        let units = product.whole.units;
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
        kept: *mut f32,
    ) {
        let units = product.whole.units;
        for group in 0..sides.steps / units.steps {
            // SAFETY: as above, and `prepare` left a block of bytes.
            unsafe {
                let unit = sides.packed.add(group * units.words());
                let mut sums = start::<S, R, C>(s, product, (sides, group), unit);
                let right = sides.right.add(sides.vector * LANES);
                for step in group * units.steps..(group + 1) * units.steps {
                    sides.ahead.ask(s, step);
                    let left = sides.left.add(step * R);
                    let mut columns = [s.splat(0.0); C];
                    for c in 0..C {
                        columns[c] = s.load(&*right.add(step * PANEL + LANES * c).cast());
                    }
                    for r in 0..R {
                        let row = s.splat_word(*left.add(r));
                        for c in 0..C {
                            sums[r][c] = s.code_dot(sums[r][c], row, columns[c]);
                        }
                    }
                }
                finish::<S, R, C>(s, product, (sides, group), sums, (unit, kept));
            }
        }
    }
}

/// Place of a tile's rows in what the left side has of a group.
#[inline(always)]
fn of_group(product: &Product<'_>, (sides, group): (Sides, usize)) -> usize {
    (sides.first / product.whole.units.steps + group) * product.rows + sides.row
}

/// A group's sums before its first step: the zero points times what is multiplied with them.
///
/// # Safety
/// `unit` is a group of the units' layout, and the left side has R rows from the sides' on.
#[inline(always)]
unsafe fn start<S: Bytes, const R: usize, const C: usize>(
    s: S,
    product: &Product<'_>,
    place: (Sides, usize),
    unit: *const u32,
) -> [[S::V; C]; R] {
    let units = product.whole.units;
    let mut zeros = [s.splat_word(u32::from(ZERO)); C];
    if units.has_zeros {
        for c in 0..C {
            // SAFETY: the unit has a byte for each column of the panel there.
            zeros[c] = unsafe {
                let bytes = unit.add(units.zeros_at()).cast::<[u8; LANES]>();
                s.widen_bytes(&*bytes.add(place.0.vector + c))
            };
        }
    }
    let negated = &product.left_sums[of_group(product, place)..][..R];
    let mut sums = [[s.splat(0.0); C]; R];
    for r in 0..R {
        let row = s.splat_word(negated[r]);
        for c in 0..C {
            sums[r][c] = s.short_mul(zeros[c], row);
        }
    }
    sums
}

/// Adds a group's sums, scaled, to those of all.
///
/// # Safety
/// As [`start`], and the sums as [`Form::add`] has them.
#[inline(always)]
unsafe fn finish<S: Bytes, const R: usize, const C: usize>(
    s: S,
    product: &Product<'_>,
    place: (Sides, usize),
    sums: [[S::V; C]; R],
    (unit, kept): (*const u32, *mut f32),
) {
    let units = product.whole.units;
    let mut scales = [s.splat(0.0); C];
    for c in 0..C {
        // SAFETY: the unit has a scale for each column of the panel there.
        scales[c] = unsafe {
            let at = unit.add(units.scales_at());
            match units.scales {
                Scales::Brain => s.widen(&*at.cast::<[u16; LANES]>().add(place.0.vector + c)),
                Scales::Single => s.load(&*at.cast::<[f32; LANES]>().add(place.0.vector + c)),
            }
        };
    }
    let rows = &product.left_scales[of_group(product, place)..][..R];
    for r in 0..R {
        let row = s.splat(rows[r]);
        for c in 0..C {
            let sum = s.mul(s.float(sums[r][c]), row);
            // SAFETY: as the caller promises.
            unsafe {
                let kept = &mut *kept.add(r * PANEL + c * LANES).cast();
                let all = s.fused(sum, scales[c], s.load(kept));
                s.store(all, kept);
            }
        }
    }
}
