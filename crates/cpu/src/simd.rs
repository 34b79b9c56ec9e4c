//! Sixteen lanes of f32, as each instruction set spells them.
//!
//! Owns: the vocabulary in which every kernel is written once, and what follows from it (the
//! exponential, sums over lanes).
//! Never: decides which instruction set runs; see `Isa`.
//! Invariant: a lane never depends on another lane except in `sum` and `largest`, and `sum` adds in
//! the same order everywhere. With the products of bf16 being exact in f32, the sets that fuse
//! multiply and add agree with those that do not, to the bit, wherever only bf16 meets bf16.
//!
//! A value that implements [`Simd`] is a proof that the processor has the instructions: it is only
//! made (`unsafe`) inside functions compiled for them, which `Isa::available` guards. Kernels are
//! `#[inline(always)]`, so they are compiled anew inside each of those functions.

#[cfg(target_arch = "x86_64")]
pub(crate) mod avx2;
#[cfg(target_arch = "x86_64")]
pub(crate) mod avx512;
pub(crate) mod bytes;
#[cfg(target_arch = "aarch64")]
pub(crate) mod neon;
pub(crate) mod plain;

/// Lanes of a vector.
pub(crate) const LANES: usize = 16;

/// Where rows become columns, and how many words it is from one word of a row to the next.
pub(crate) type Turned<'a> = (&'a mut [u32], usize);

/// Sixteen lanes.
pub(crate) trait Simd: Copy + Send + Sync + 'static {
    /// A vector.
    type V: Copy;
    /// Rows of a register tile of products that is [`Simd::COLUMNS`] vectors wide.
    const ROWS: usize;
    /// Vectors across a register tile, 1 or 2.
    const COLUMNS: usize;
    /// Multiply-adds per dot product of two bf16 pairs: 1 where an instruction does both.
    const PHASES: usize;

    /// The same number in every lane.
    fn splat(self, x: f32) -> Self::V;
    /// The same bits in every lane.
    #[inline(always)]
    fn splat_word(self, x: u32) -> Self::V {
        self.splat(f32::from_bits(x))
    }
    /// From memory.
    fn load(self, x: &[f32; LANES]) -> Self::V;
    /// To memory.
    fn store(self, x: Self::V, to: &mut [f32; LANES]);
    /// a + b
    fn add(self, a: Self::V, b: Self::V) -> Self::V;
    /// a − b
    fn sub(self, a: Self::V, b: Self::V) -> Self::V;
    /// a · b
    fn mul(self, a: Self::V, b: Self::V) -> Self::V;
    /// a / b
    fn div(self, a: Self::V, b: Self::V) -> Self::V;
    /// a · b + c, fused where there is an instruction for it.
    fn fma(self, a: Self::V, b: Self::V, c: Self::V) -> Self::V;
    /// The smaller one.
    fn min(self, a: Self::V, b: Self::V) -> Self::V;
    /// The larger one.
    fn max(self, a: Self::V, b: Self::V) -> Self::V;
    /// To the nearest whole number, halves to the even one.
    fn round(self, x: Self::V) -> Self::V;
    /// 2^x for whole x in −127..=128; −127 gives 0 and 128 infinity.
    fn power_of_two(self, x: Self::V) -> Self::V;
    /// Lanes `from..to` of x, −∞ in the others.
    fn keep(self, x: Self::V, from: usize, to: usize) -> Self::V;
    /// The largest lane.
    fn largest(self, x: Self::V) -> f32;
    /// Rounded to bf16, halves to even, as bits in the upper half of each lane; the lower is zero.
    fn round_bf16(self, x: Self::V) -> Self::V;
    /// The upper half of each lane, narrowed.
    fn narrow(self, x: Self::V, to: &mut [u16; LANES]);
    /// bf16 widened to f32.
    fn widen(self, x: &[u16; LANES]) -> Self::V;
    /// f16 widened to f32, which is exact.
    fn widen_f16(self, x: &[u16; LANES]) -> Self::V;
    /// Pairs of bf16 `(low[i], high[i])`, the first one in the lower half of the lane.
    fn zip(self, low: &[u16; LANES], high: &[u16; LANES]) -> Self::V;
    /// Bytes with a sign as floats.
    #[inline(always)]
    fn widen_codes(self, x: &[u8; LANES]) -> Self::V {
        let mut lanes = [0.0; LANES];
        for i in 0..LANES {
            lanes[i] = f32::from(x[i].cast_signed());
        }
        self.load(&lanes)
    }
    /// Pairs of bytes with a sign as pairs of bf16, exactly.
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
    /// The part of a lane of bf16 pairs that [`Simd::pair_dot`] needs in `phase`: the odd element
    /// first, then the even one, as the dot-product instruction has it.
    fn pair_phase(self, pairs: Self::V, phase: usize) -> Self::V;
    /// One phase of acc + a.odd · b.odd + a.even · b.even.
    fn pair_dot(self, acc: Self::V, a: Self::V, b: Self::V) -> Self::V;
    /// Rounded to bf16 and laid out as the left side of [`Simd::pair_dot`], pair by pair and within
    /// a pair by phase. Returns how many words that is: `8 × PHASES`.
    fn pair_words(self, x: Self::V, to: &mut [u32; LANES]) -> usize;

    /// Asks for memory that will be read soon.
    #[inline(always)]
    fn prefetch(self, _address: *const u32) {}

    /// `to[c][r] = from[r][c]` for 16 × 16 words; `to`'s rows are `stride` words apart.
    ///
    /// # Safety
    /// Sixteen words may be read at each of `from`, and written at `to + i × stride`, `i < 16`.
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

    /// Rows of words to columns: `to[word × to_stride + row] = from[row × stride + word]`, for `[rows, words, stride]`. At most
    /// sixteen rows, and no more than `to_stride`.
    #[inline(always)]
    fn turn(self, from: &[u32], [rows, words, stride]: [usize; 3], (to, to_stride): Turned<'_>) {
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
        // Taylor's series; at |rest| ≤ 1/2 the next term is below 6e-9.
        let mut sum = self.splat(EXP2_TERMS[0]);
        for &term in &EXP2_TERMS[1..] {
            sum = self.fma(sum, rest, self.splat(term));
        }
        self.mul(sum, self.power_of_two(whole))
    }

    /// The first lanes from a slice shorter than a vector, zero in the others.
    #[inline(always)]
    fn load_part(self, x: &[f32]) -> Self::V {
        let mut lanes = [0.0; LANES];
        lanes[..x.len()].copy_from_slice(x);
        self.load(&lanes)
    }

    /// The first lanes into a slice shorter than a vector.
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
