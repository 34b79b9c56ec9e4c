//! Weights in groups of the inner dimension, scale and zero point for each group of a column.
//!
//! Owns: the layout `[panel][group][unit]`, see [`Units`]; products of eight bits, and what they share with those of four.
//! Invariant: a group's sum is a whole number, exact whatever the order; groups are added in order, each rounded twice:
//! times the row's scale of the group, then, fused, times the column's and added. Both widths do the same.

use super::{Form, PANEL, Product, Sides, Sums};
use crate::simd::LANES;
use crate::simd::bytes::{Bytes, LeftBytes};

/// Codes of eight bits as they are packed.
#[derive(Clone, Copy)]
pub(crate) struct Octet;

/// How a group of a panel is laid out: its codes, `[step of four]`; then [`PANEL`] scales; then, where zero points differ,
/// as many bytes of those, and as many more to end with a cache line.
///
/// A step of eight bits is [`PANEL`] words, each with four elements of a column. A step of four bits is half as many, where
/// byte `b` has in its lower half element `b % 4` of column `b / 4`, and in its upper half that of column `16 + b / 4`.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) struct Units {
    /// Of a code.
    pub bits: Bits,
    /// Steps of a group: a quarter of its elements. Divides [`BLOCK_STEPS`](super::BLOCK_STEPS).
    pub steps: usize,
    /// Whether scales are bf16, or f32.
    pub scales: Scales,
    /// Whether zero points are stored; where not, they are [`Bits::middle`].
    pub has_zeros: bool,
}

/// How wide a code is. Codes and zero points have no sign.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) enum Bits {
    /// 0 to 15.
    #[default]
    Four,
    /// 0 to 255.
    Eight,
}

impl Bits {
    /// The zero point of groups that store none.
    pub(crate) const fn middle(self) -> u8 {
        match self {
            Self::Four => 8,
            Self::Eight => 128,
        }
    }
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

impl Units {
    /// Words of a step's codes.
    pub(crate) const fn step_words(self) -> usize {
        match self.bits {
            Bits::Four => PANEL / 2,
            Bits::Eight => PANEL,
        }
    }

    /// Where scales begin.
    pub(crate) const fn scales_at(self) -> usize {
        self.steps * self.step_words()
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

/// How codes meet bytes of rows.
pub(super) trait Codes<S: Bytes> {
    /// How wide they are packed.
    const BITS: Bits;
    /// Words of the left side per step and row.
    const PHASES: usize;

    /// What one phase needs of four codes of each column.
    fn phase(s: S, codes: S::V, phase: usize) -> S::V;

    /// acc + Σ left · codes, one phase of a step.
    fn dot(s: S, acc: S::V, left: S::V, codes: S::V) -> S::V;
}

impl<S: Bytes> Codes<S> for Octet {
    const BITS: Bits = Bits::Eight;
    const PHASES: usize = S::LEFT_OCTETS.phases();

    #[inline(always)]
    fn phase(s: S, codes: S::V, phase: usize) -> S::V {
        s.octet_phase(codes, phase)
    }

    #[inline(always)]
    fn dot(s: S, acc: S::V, left: S::V, codes: S::V) -> S::V {
        match S::LEFT_OCTETS {
            LeftBytes::Halves => s.byte_dot(acc, left, codes),
            LeftBytes::Signed | LeftBytes::Offset => s.code_dot(acc, left, codes),
        }
    }
}

impl<S: Bytes> Form<S> for Octet {
    const PHASES: usize = S::LEFT_OCTETS.phases();
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
        let group_words = product.whole.units.words();
        // SAFETY: as the caller promises; the right side is the block as it is packed.
        unsafe { add::<S, Self, R, C>(s, product, (sides, group_words), kept) }
    }
}

/// How groups lie. Their width is known when this is compiled.
#[inline(always)]
pub(super) fn units<S: Bytes, K: Codes<S>>(product: &Product<'_>) -> Units {
    Units {
        bits: K::BITS,
        ..product.whole.units
    }
}

/// Adds a block whose right side has [`PANEL`] words a step, and so many words from one group to the next.
///
/// # Safety
/// As [`Form::add`].
#[inline(always)]
pub(super) unsafe fn add<S: Bytes, K: Codes<S>, const R: usize, const C: usize>(
    s: S,
    product: &Product<'_>,
    (sides, group_words): (Sides, usize),
    kept: *mut f32,
) {
    let units = units::<S, K>(product);
    for group in 0..sides.steps / units.steps {
        // SAFETY: within the sides and the sums, as the caller promises; this is how units are laid out.
        unsafe {
            let unit = sides.packed.add(group * units.words());
            let mut sums = start::<S, K, R, C>(s, product, (sides, group), unit);
            let right = sides.right.add(group * group_words + sides.vector * LANES);
            for step in 0..units.steps {
                sides.ahead.ask(s, group * group_words / PANEL + step);
                for phase in 0..K::PHASES {
                    let at = (group * units.steps + step) * K::PHASES + phase;
                    let left = sides.left.add(at * R);
                    let mut columns = [s.splat(0.0); C];
                    for c in 0..C {
                        let codes = s.load(&*right.add(step * PANEL + LANES * c).cast());
                        columns[c] = K::phase(s, codes, phase);
                    }
                    for r in 0..R {
                        let row = s.splat_word(*left.add(r));
                        for c in 0..C {
                            sums[r][c] = K::dot(s, sums[r][c], row, columns[c]);
                        }
                    }
                }
            }
            finish::<S, K, R, C>(s, product, (sides, group), sums, (unit, kept));
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
pub(super) unsafe fn start<S: Bytes, K: Codes<S>, const R: usize, const C: usize>(
    s: S,
    product: &Product<'_>,
    place: (Sides, usize),
    unit: *const u32,
) -> [[S::V; C]; R] {
    let units = units::<S, K>(product);
    let mut zeros = [s.splat_word(u32::from(K::BITS.middle())); C];
    if units.has_zeros {
        for c in 0..C {
            // SAFETY: the unit has a byte for each column of the panel there.
            zeros[c] = unsafe {
                let bytes = unit.add(units.zeros_at()).cast::<[u8; LANES]>();
                s.widen_bytes(&*bytes.add(place.0.vector + c))
            };
        }
    }
    if K::BITS == Bits::Eight {
        for c in 0..C {
            zeros[c] = s.octet_zero(zeros[c]);
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
pub(super) unsafe fn finish<S: Bytes, K: Codes<S>, const R: usize, const C: usize>(
    s: S,
    product: &Product<'_>,
    place: (Sides, usize),
    sums: [[S::V; C]; R],
    (unit, kept): (*const u32, *mut f32),
) {
    let units = units::<S, K>(product);
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
