//! Vectors of sixteen lanes of f32, for each instruction set.
//!
//! Owns: the operations with which every kernel is written once, and functions built of them (the
//! exponential, sums over lanes).
//! Never: chooses the instruction set; see `Isa`.
//! Invariant: a lane never depends on another lane except in `sum` and `largest`, and `sum` adds in
//! the same order everywhere. With the products of bf16 being exact in f32, the sets that fuse
//! multiply and add agree with those that do not, to the bit, wherever only bf16 meets bf16.
//!
//! A value that implements [`Simd`] proves that the processor has the instructions: it is only
//! created (`unsafe`) inside functions compiled for them, which `Isa::available` guards. Kernels
//! are `#[inline(always)]`, so they are compiled anew inside each of those functions.

#[cfg(target_arch = "x86_64")]
pub mod avx2;
#[cfg(target_arch = "x86_64")]
pub mod avx512;
pub mod bytes;
#[cfg(target_arch = "aarch64")]
pub mod neon;
pub mod plain;

/// Lanes of a vector.
pub const LANES: usize = 16;

/// Destination of a transposition.
pub struct TransposeTarget<'a> {
    pub words: &'a mut [u32],
    /// Distance in words between two words of a row.
    pub stride: usize,
}

/// Operations on vectors of sixteen lanes.
pub trait Simd: Copy + Send + Sync + 'static {
    type V: Copy;
    /// Rows of a products' register tile, which is [`Simd::COLUMNS`] vectors wide.
    const ROWS: usize;
    /// Vectors across a register tile, 1 or 2.
    const COLUMNS: usize;
    /// Multiply-adds per dot product of two bf16 pairs: 1 if one instruction does both.
    const PHASES: usize;

    /// The same number in every lane.
    fn splat(self, x: f32) -> Self::V;
    /// The same bits in every lane.
    #[inline(always)]
    fn splat_word(self, x: u32) -> Self::V {
        self.splat(f32::from_bits(x))
    }
    fn load(self, x: &[f32; LANES]) -> Self::V;
    fn store(self, x: Self::V, to: &mut [f32; LANES]);
    fn add(self, a: Self::V, b: Self::V) -> Self::V;
    fn sub(self, a: Self::V, b: Self::V) -> Self::V;
    fn mul(self, a: Self::V, b: Self::V) -> Self::V;
    fn div(self, a: Self::V, b: Self::V) -> Self::V;
    /// a · b + c, fused if the instruction set can.
    fn fma(self, a: Self::V, b: Self::V, c: Self::V) -> Self::V;
    fn min(self, a: Self::V, b: Self::V) -> Self::V;
    fn max(self, a: Self::V, b: Self::V) -> Self::V;
    /// Rounds to the nearest integer, halves to even.
    fn round(self, x: Self::V) -> Self::V;
    /// 2^x for whole x in −127..=128; −127 gives 0 and 128 infinity.
    fn power_of_two(self, x: Self::V) -> Self::V;
    /// Lanes `from..to` of x, −∞ in the others.
    fn mask_outside(self, x: Self::V, from: usize, to: usize) -> Self::V;
    fn largest(self, x: Self::V) -> f32;
    /// Rounds to bf16, halves to even; the bits are in the upper half of each lane, the lower half
    /// is zero.
    fn round_bf16(self, x: Self::V) -> Self::V;
    /// Stores the upper half of each lane.
    fn store_upper_halves(self, x: Self::V, to: &mut [u16; LANES]);
    /// Widens bf16 to f32.
    fn widen_bf16(self, x: &[u16; LANES]) -> Self::V;
    /// Widens f16 to f32, exactly.
    fn widen_f16(self, x: &[u16; LANES]) -> Self::V;
    /// Pairs of bf16 `(low[i], high[i])`, the first one in the lower half of the lane.
    fn zip_bf16(self, low: &[u16; LANES], high: &[u16; LANES]) -> Self::V;
    /// Converts signed bytes to floats.
    #[inline(always)]
    fn widen_codes(self, x: &[u8; LANES]) -> Self::V {
        let mut lanes = [0.0; LANES];
        for i in 0..LANES {
            lanes[i] = f32::from(x[i].cast_signed());
        }
        self.load(&lanes)
    }
    /// Converts pairs of signed bytes to pairs of bf16, exactly.
    #[inline(always)]
    fn widen_code_pairs(self, x: &[u8; 2 * LANES]) -> Self::V {
        let mut lanes = [0.0; LANES];
        for i in 0..LANES {
            let low = f32::from(x[2 * i].cast_signed()).to_bits() >> 16;
            let high = f32::from(x[2 * i + 1].cast_signed()).to_bits();
            lanes[i] = f32::from_bits(low | high);
        }
        self.load(&lanes)
    }
    /// Part of each bf16 pair that [`Simd::pair_dot`] multiplies in `phase`: the odd element first,
    /// then the even one, the order of the dot-product instruction.
    fn pair_phase(self, pairs: Self::V, phase: usize) -> Self::V;
    /// One phase of acc + a.odd · b.odd + a.even · b.even.
    fn pair_dot(self, acc: Self::V, a: Self::V, b: Self::V) -> Self::V;
    /// Rounds to bf16 and arranges as the left side of [`Simd::pair_dot`], pair by pair and within
    /// a pair by phase. Returns the number of words, `8 × PHASES`.
    fn pair_words(self, x: Self::V, to: &mut [u32; LANES]) -> usize;

    /// Prefetches memory that will be read soon.
    #[inline(always)]
    fn prefetch(self, _address: *const u32) {}

    /// `to[c][r] = from[r][c]` for 16 × 16 words; `to`'s rows are `stride` words apart.
    ///
    /// # Safety
    /// Sixteen words are readable at each of `from`, and writable at `to + i × stride`, `i < 16`.
    #[inline(always)]
    unsafe fn transpose(self, from: &[*const u32; LANES], to: *mut u32, stride: usize) {
        for (row, &source) in from.iter().enumerate() {
            for column in 0..LANES {
                // SAFETY: as the caller promises.
                unsafe {
                    *to.add(column * stride + row) = source.add(column).read_unaligned();
                }
            }
        }
    }

    /// Transposes rows of words to columns:
    /// `to[word × to_stride + row] = from[row × stride + word]`, for `[rows, words, stride]`. At
    /// most sixteen rows, and no more than `to_stride`.
    #[inline(always)]
    fn transpose_rows(
        self,
        from: &[u32],
        [rows, words, stride]: [usize; 3],
        to: TransposeTarget<'_>,
    ) {
        let (to, to_stride) = (to.words, to.stride);
        for row in 0..rows {
            let to = to[row..].iter_mut().step_by(to_stride);
            for (to, word) in to.zip(&from[row * stride..row * stride + words]) {
                *to = *word;
            }
        }
    }

    /// The sum of the lanes, as a tree: 16 to 8, 4, 2, 1.
    #[inline(always)]
    fn sum(self, x: Self::V) -> f32 {
        let mut lanes = [0.0; LANES];
        self.store(x, &mut lanes);
        let mut half = LANES / 2;
        while half > 0 {
            for i in 0..half {
                lanes[i] += lanes[i + half];
            }
            half /= 2;
        }
        lanes[0]
    }

    /// 2^x to within two units in the last place; exactly 1 at 0, exactly 0 below −126.5 and at −∞.
    #[inline(always)]
    fn exp2(self, x: Self::V) -> Self::V {
        let x = self.min(self.max(x, self.splat(-127.0)), self.splat(128.0));
        let whole = self.round(x);
        let rest = self.sub(x, whole);
        // Taylor series; at |rest| ≤ 1/2 the next term is below 6e-9.
        let mut sum = self.splat(EXP2_TERMS[0]);
        for &term in &EXP2_TERMS[1..] {
            sum = self.fma(sum, rest, self.splat(term));
        }
        self.mul(sum, self.power_of_two(whole))
    }

    /// Loads a slice shorter than a vector; the other lanes are zero.
    #[inline(always)]
    fn load_part(self, x: &[f32]) -> Self::V {
        let mut lanes = [0.0; LANES];
        lanes[..x.len()].copy_from_slice(x);
        self.load(&lanes)
    }

    /// Stores the first lanes into a slice shorter than a vector.
    #[inline(always)]
    fn store_part(self, x: Self::V, to: &mut [f32]) {
        let mut lanes = [0.0; LANES];
        self.store(x, &mut lanes);
        to.copy_from_slice(&lanes[..to.len()]);
    }
}

/// ln(2)^k / k! from k = 7 down to 0.
#[allow(clippy::excessive_precision, clippy::approx_constant)]
const EXP2_TERMS: [f32; 8] = [
    1.525_273_4e-5,
    1.540_353e-4,
    1.333_355_8e-3,
    9.618_129e-3,
    5.550_411e-2,
    2.402_265_1e-1,
    6.931_472e-1,
    1.0,
];
