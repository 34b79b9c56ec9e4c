//! Weights in groups along the inner dimension, with a scale and a zero point per group and column.
//!
//! Owns: the layout `[panel][group][unit]`, see [`GroupLayout`]; products of eight bits, and the
//! code that they share with those of four. Invariant: a group's sum is an integer, exact in any
//! order; groups are added in order, each rounded twice: when multiplied with the row's scale of
//! the group, then in a fused multiply-add with the column's. Both widths do the same.

use super::bytes::ByteForm;
use super::pairs::{self, RightSide};
use super::{BlockSides, PANEL, PackedProduct, TileSums, WeightForm};
use crate::simd::LANES;
use crate::simd::bytes::{IntegerSimd, LeftBytes};

/// Format of eight-bit codes in groups.
#[derive(Clone, Copy)]
pub struct GroupedByteForm;

/// Layout of a group of a panel: its codes, `[step of four]`; then [`PANEL`] scales; then, if zero
/// points are stored, one byte per column, padded to a cache line.
///
/// A step of eight bits is [`PANEL`] words, each with four elements of a column. A step of four
/// bits is half as many, where byte `b` has in its lower half element `b % 4` of column `b / 4`,
/// and in its upper half that of column `16 + b / 4`.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct GroupLayout {
    /// Kind of codes, which decides how many bits they take.
    pub codes: GroupCodes,
    /// Steps per group, a quarter of its elements: a power of two that divides
    /// [`BLOCK_STEPS`](super::BLOCK_STEPS).
    pub steps: usize,
    /// Type of the scales.
    pub scales: ScaleFormat,
    /// Whether zero points are stored; otherwise all are [`GroupCodes::implied_zero_point`].
    pub has_zeros: bool,
}

/// Codes of groups. A code and its zero point are unsigned numbers in a product.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum GroupCodes {
    /// Codes from 0 to 15.
    #[default]
    Four,
    /// Codes from 0 to 255.
    Eight,
    /// Four-bit floats (e2m1). In a product a code is twice its number plus 12, a whole number from
    /// 0 to 24; stored scales are half as large.
    Float4,
}

impl GroupCodes {
    /// The zero point of groups that store none.
    pub const fn implied_zero_point(self) -> u8 {
        match self {
            Self::Four => 8,
            Self::Eight => 128,
            Self::Float4 => 12,
        }
    }

    /// Factor of a group's scale where it is stored.
    pub const fn scale_factor(self) -> f32 {
        match self {
            Self::Four | Self::Eight => 1.0,
            Self::Float4 => 0.5,
        }
    }
}

/// Type of stored scales.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum ScaleFormat {
    #[default]
    Bf16,
    F16,
    F32,
    /// Numbers of e4m3 that are not negative, times [`IntegerWeights::scales`] of the column, which
    /// has [`E4M3_FACTOR`] too.
    ///
    /// [`IntegerWeights::scales`]: super::IntegerWeights::scales
    E4m3,
}

/// Factor of the columns' scales beside scales of groups in e4m3, which are widened to numbers that
/// are so much smaller.
pub const E4M3_FACTOR: f32 = f32::from_bits((127 + 120) << 23);

impl GroupLayout {
    /// Words of a step's codes.
    pub const fn step_words(self) -> usize {
        match self.codes {
            GroupCodes::Four | GroupCodes::Float4 => PANEL / 2,
            GroupCodes::Eight => PANEL,
        }
    }

    /// First word of the scales.
    pub const fn scales_at(self) -> usize {
        self.steps * self.step_words()
    }

    /// First word of the zero points.
    pub const fn zeros_at(self) -> usize {
        self.scales_at()
            + match self.scales {
                ScaleFormat::E4m3 => PANEL / 4,
                ScaleFormat::Bf16 | ScaleFormat::F16 => PANEL / 2,
                ScaleFormat::F32 => PANEL,
            }
    }

    /// Words of a group.
    pub const fn words(self) -> usize {
        self.zeros_at() + if self.has_zeros { PANEL / 2 } else { 0 }
    }

    /// Number of groups in so many steps: shifted, because products ask for it in every group.
    pub const fn groups_of(self, steps: usize) -> usize {
        steps >> self.steps.trailing_zeros()
    }

    /// Words of all groups of so many steps.
    pub const fn words_of(self, steps: usize) -> usize {
        self.groups_of(steps) * self.words()
    }
}

/// A format's kind of codes.
pub(super) trait CodeKind {
    /// Kind of the packed codes; a constant, unless the format has several kinds.
    fn codes(product: &PackedProduct<'_>) -> GroupCodes;
}

/// Products of codes with bytes of rows.
pub(super) trait CodeProduct<S: IntegerSimd>: CodeKind {
    /// Words of the left side per step and row.
    const PHASES: usize;

    /// Part of four codes per column that one phase multiplies.
    fn phase(s: S, codes: S::V, phase: usize) -> S::V;

    /// Computes acc + Σ left · codes, one phase of a step.
    fn dot(s: S, acc: S::V, left: S::V, codes: S::V) -> S::V;
}

impl CodeKind for GroupedByteForm {
    #[inline(always)]
    fn codes(_: &PackedProduct<'_>) -> GroupCodes {
        GroupCodes::Eight
    }
}

impl<S: IntegerSimd> CodeProduct<S> for GroupedByteForm {
    const PHASES: usize = S::LEFT.phases();

    #[inline(always)]
    fn phase(s: S, codes: S::V, phase: usize) -> S::V {
        s.octet_phase(codes, phase)
    }

    #[inline(always)]
    fn dot(s: S, acc: S::V, left: S::V, codes: S::V) -> S::V {
        match S::LEFT {
            LeftBytes::Widened16 => s.byte_dot(acc, left, codes),
            LeftBytes::Signed => s.code_dot(acc, left, codes),
        }
    }
}

impl<S: IntegerSimd> RightSide<S> for GroupedByteForm {
    #[inline(always)]
    unsafe fn columns<const C: usize>(s: S, sides: BlockSides, step: usize) -> [S::V; C] {
        // SAFETY: as the caller promises.
        let mut columns = unsafe { ByteForm::columns::<C>(s, sides, step) };
        for c in 0..C {
            columns[c] = s.octet_phase(columns[c], 0);
        }
        columns
    }
}

impl<S: IntegerSimd> WeightForm<S> for GroupedByteForm {
    const PHASES: usize = S::LEFT.phases();
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
        let group_words = product.integer.units.words();
        // SAFETY: as the caller promises; the right side is the block as it is packed.
        unsafe { add::<S, Self, R, C>(s, product, sides, group_words, to) }
    }
}

/// Layout of groups, with the kind of codes as far as the format knows it at compile time.
#[inline(always)]
pub(super) fn units<K: CodeKind>(product: &PackedProduct<'_>) -> GroupLayout {
    GroupLayout {
        codes: K::codes(product),
        ..product.integer.units
    }
}

/// Adds a block whose right side has [`PANEL`] words per step, and `group_words` words from one
/// group to the next.
///
/// # Safety
/// As [`WeightForm::add`].
#[inline(always)]
pub(super) unsafe fn add<
    S: IntegerSimd,
    K: CodeProduct<S> + RightSide<S>,
    const R: usize,
    const C: usize,
>(
    s: S,
    product: &PackedProduct<'_>,
    sides: BlockSides,
    group_words: usize,
    totals: *mut f32,
) {
    let units = units::<K>(product);
    for group in 0..units.groups_of(sides.steps) {
        // SAFETY: within the sides and the sums, as the caller promises; the offsets follow the
        // layout of `GroupLayout`.
        unsafe {
            let unit = sides.packed.add(group * units.words());
            let sums = start_group_sums::<S, K, R, C>(s, product, sides, group, unit);
            let right = sides.right.add(group * group_words);
            let of_group = group_sides::<R>(sides, group, units, right);
            // Instruction sets with pair products do most steps there; the loop below does the
            // rest.
            let (mut sums, done) = pairs::add::<S, K, R, C>(s, of_group, sums);
            let right = right.add(sides.vector * LANES);
            for step in done..units.steps {
                sides
                    .prefetch
                    .prefetch_step::<S, R>(s, group * group_words / PANEL + step);
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
            add_scaled_group::<S, K, R, C>(s, product, sides, group, sums, unit, totals);
        }
    }
}

/// Operands of one group of a block, for left sides with one phase.
#[inline(always)]
pub(super) fn group_sides<const R: usize>(
    sides: BlockSides,
    group: usize,
    units: GroupLayout,
    right: *const u32,
) -> BlockSides {
    BlockSides {
        left: sides.left.wrapping_add(group * units.steps * R),
        right,
        steps: units.steps,
        ..sides
    }
}

/// Index of a tile's first row in the left side's scales and sums of a group.
#[inline(always)]
fn group_row_offset(product: &PackedProduct<'_>, sides: BlockSides, group: usize) -> usize {
    (product.integer.units.groups_of(sides.first) + group) * product.rows + sides.row
}

/// Initial sums of a group: −Σ(row's bytes) × zero point, so that the products need not subtract
/// zero points.
///
/// # Safety `unit` is a group in the layout of `GroupLayout`, and the left side has R rows from the
/// sides' row on.
#[inline(always)]
pub(super) unsafe fn start_group_sums<
    S: IntegerSimd,
    K: CodeKind,
    const R: usize,
    const C: usize,
>(
    s: S,
    product: &PackedProduct<'_>,
    sides: BlockSides,
    group: usize,
    unit: *const u32,
) -> [[S::V; C]; R] {
    let units = units::<K>(product);
    let negated = &product.left_sums[group_row_offset(product, sides, group)..][..R];
    let mut sums = [[s.splat(0.0); C]; R];
    let implied = u32::from(units.codes.implied_zero_point());
    // One zero point of all columns: a row's sums begin alike.
    if !units.has_zeros && units.codes != GroupCodes::Eight {
        for r in 0..R {
            sums[r] = [s.splat_word(negated[r].wrapping_mul(implied)); C];
        }
        return sums;
    }
    let mut zeros = [s.splat_word(implied); C];
    if units.has_zeros {
        for c in 0..C {
            // SAFETY: the unit has a byte per column of the panel there.
            zeros[c] = unsafe {
                let bytes = unit.add(units.zeros_at()).cast::<[u8; LANES]>();
                s.widen_bytes(&*bytes.add(sides.vector + c))
            };
        }
    }
    if units.codes == GroupCodes::Eight {
        for c in 0..C {
            zeros[c] = s.octet_zero(zeros[c]);
        }
    }
    for r in 0..R {
        let row = s.splat_word(negated[r]);
        for c in 0..C {
            sums[r][c] = s.short_mul(zeros[c], row);
        }
    }
    sums
}

/// Adds a group's sums, scaled, to the total sums.
///
/// # Safety
/// As [`start`]; the sums are as in [`WeightForm::add`].
#[inline(always)]
pub(super) unsafe fn add_scaled_group<
    S: IntegerSimd,
    K: CodeKind,
    const R: usize,
    const C: usize,
>(
    s: S,
    product: &PackedProduct<'_>,
    sides: BlockSides,
    group: usize,
    sums: [[S::V; C]; R],
    unit: *const u32,
    totals: *mut f32,
) {
    let units = units::<K>(product);
    let mut scales = [s.splat(0.0); C];
    for c in 0..C {
        // SAFETY: the unit has a scale per column of the panel there, and the product has one per
        // column of all panels beside scales in e4m3.
        scales[c] = unsafe {
            let at = unit.add(units.scales_at());
            match units.scales {
                ScaleFormat::Bf16 => {
                    s.widen_bf16(&*at.cast::<[u16; LANES]>().add(sides.vector + c))
                }
                ScaleFormat::F16 => s.widen_f16(&*at.cast::<[u16; LANES]>().add(sides.vector + c)),
                ScaleFormat::F32 => s.load(&*at.cast::<[f32; LANES]>().add(sides.vector + c)),
                ScaleFormat::E4m3 => {
                    let column = sides.column + (sides.vector + c) * LANES;
                    let factors = product.integer.scales[column..column + LANES].as_ptr();
                    let small = s.widen_e4m3(&*at.cast::<[u8; LANES]>().add(sides.vector + c));
                    s.mul(small, s.load(&*factors.cast::<[f32; LANES]>()))
                }
            }
        };
    }
    let rows = &product.left_scales[group_row_offset(product, sides, group)..][..R];
    for r in 0..R {
        let row = s.splat(rows[r]);
        for c in 0..C {
            let sum = s.mul(s.to_float(sums[r][c]), row);
            // SAFETY: as the caller promises.
            unsafe {
                let total = &mut *totals.add(r * PANEL + c * LANES).cast();
                let all = s.fma_rounded_once(sum, scales[c], s.load(total));
                s.store(all, total);
            }
        }
    }
}
