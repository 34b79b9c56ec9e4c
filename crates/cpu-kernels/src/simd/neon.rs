//! NEON: four registers of four lanes, with or without the dot product of bytes (dotprod), products
//! of two rows with two columns of bytes (i8mm), and multiply-adds of bf16.
//!
//! Invariant: a value of this type exists only where the processor has the instructions.

use super::bytes::{IntegerSimd, LeftBytes};
use super::{LANES, Simd};
use std::arch::aarch64::{
    float32x4_t, uint16x4_t, uint32x4_t, vaddq_f32, vaddq_s32, vaddq_u32, vandq_u8, vandq_u32,
    vbslq_f32, vbslq_u32, vceqq_f32, vcgeq_u32, vcltq_u32, vcombine_u32, vcvtnq_s32_f32,
    vcvtq_f32_s32, vdivq_f32, vdupq_n_f32, vdupq_n_s32, vdupq_n_u8, vdupq_n_u32, veorq_u8,
    vfmaq_f32, vget_high_s8, vget_low_s8, vld1_u16, vld1_u32, vld1q_f32, vld1q_u8, vld1q_u32,
    vmaxq_f32, vmaxvq_f32, vminq_f32, vmovl_u16, vmull_s8, vmulq_f32, vmulq_s32, vorrq_u32,
    vpaddlq_s16, vpaddq_s32, vqtbl1q_u8, vreinterpretq_f32_f64, vreinterpretq_f32_s32,
    vreinterpretq_f32_u8, vreinterpretq_f32_u32, vreinterpretq_f64_f32, vreinterpretq_s8_f32,
    vreinterpretq_s32_f32, vreinterpretq_u8_f32, vreinterpretq_u32_f32, vrev64q_u32, vrndnq_f32,
    vshlq_n_s32, vshlq_n_u32, vshrn_n_u32, vshrq_n_u8, vshrq_n_u32, vst1_u16, vst1q_f32, vst1q_u32,
    vsubq_f32, vsubq_s32, vzip1_u32, vzip1q_f32, vzip1q_f64, vzip2_u32, vzip2q_f32, vzip2q_f64,
};

/// NEON, optionally with the dot product of bytes, products of two rows with two columns of bytes,
/// and multiply-adds of bf16. bf16's dot product is not used: it rounds differently.
#[derive(Clone, Copy)]
pub struct Neon<const DOT: bool, const PAIRS: bool, const BRAIN: bool>(());

/// Lanes 0..4, 4..8, 8..12 and 12..16.
type V = [float32x4_t; 4];

impl<const DOT: bool, const PAIRS: bool, const BRAIN: bool> Neon<DOT, PAIRS, BRAIN> {
    /// # Safety
    /// The processor has NEON, and the extensions that the constants name.
    #[inline(always)]
    pub unsafe fn new() -> Self {
        Self(())
    }
}

/// The same instruction on each quarter.
macro_rules! each {
    ($op:expr, $($x:expr),+) => {
        // SAFETY: the `Neon` at hand proves the instructions.
        unsafe { [$op($($x[0]),+), $op($($x[1]),+), $op($($x[2]),+), $op($($x[3]),+)] }
    };
}

impl<const DOT: bool, const PAIRS: bool, const BRAIN: bool> Simd for Neon<DOT, PAIRS, BRAIN> {
    type V = V;
    const ROWS: usize = 6;
    const COLUMNS: usize = 1;
    const PHASES: usize = if BRAIN { 1 } else { 2 };

    #[inline(always)]
    fn splat(self, x: f32) -> V {
        // SAFETY: `self` proves the instructions.
        [unsafe { vdupq_n_f32(x) }; 4]
    }

    #[inline(always)]
    fn load(self, x: &[f32; LANES]) -> V {
        let start = x.as_ptr();
        // SAFETY: `self` proves the instructions; sixteen lanes are there.
        unsafe {
            [
                vld1q_f32(start),
                vld1q_f32(start.add(4)),
                vld1q_f32(start.add(8)),
                vld1q_f32(start.add(12)),
            ]
        }
    }

    #[inline(always)]
    fn store(self, x: V, to: &mut [f32; LANES]) {
        let start = to.as_mut_ptr();
        // SAFETY: `self` proves the instructions; sixteen lanes fit.
        unsafe {
            vst1q_f32(start, x[0]);
            vst1q_f32(start.add(4), x[1]);
            vst1q_f32(start.add(8), x[2]);
            vst1q_f32(start.add(12), x[3]);
        }
    }

    #[inline(always)]
    fn add(self, a: V, b: V) -> V {
        each!(vaddq_f32, a, b)
    }

    #[inline(always)]
    fn sub(self, a: V, b: V) -> V {
        each!(vsubq_f32, a, b)
    }

    #[inline(always)]
    fn mul(self, a: V, b: V) -> V {
        each!(vmulq_f32, a, b)
    }

    #[inline(always)]
    fn div(self, a: V, b: V) -> V {
        each!(vdivq_f32, a, b)
    }

    #[inline(always)]
    fn fma(self, a: V, b: V, c: V) -> V {
        // The instruction takes the addend first.
        each!(vfmaq_f32, c, a, b)
    }

    #[inline(always)]
    fn min(self, a: V, b: V) -> V {
        each!(vminq_f32, a, b)
    }

    #[inline(always)]
    fn max(self, a: V, b: V) -> V {
        each!(vmaxq_f32, a, b)
    }

    #[inline(always)]
    fn round(self, x: V) -> V {
        each!(vrndnq_f32, x)
    }

    #[inline(always)]
    fn power_of_two(self, x: V) -> V {
        each!(power_of_two, x)
    }

    #[inline(always)]
    fn mask_outside(self, x: V, from: usize, to: usize) -> V {
        let mut out = x;
        for (quarter, lanes) in out.iter_mut().enumerate() {
            let first = 4 * quarter as u32;
            // SAFETY: `self` proves the instructions; four words are there.
            unsafe {
                let lane = vaddq_u32(vld1q_u32([0, 1, 2, 3].as_ptr()), vdupq_n_u32(first));
                let started = vcgeq_u32(lane, vdupq_n_u32(from.min(LANES) as u32));
                let before = vcltq_u32(lane, vdupq_n_u32(to.min(LANES) as u32));
                let none = vdupq_n_f32(f32::NEG_INFINITY);
                *lanes = vbslq_f32(vandq_u32(started, before), *lanes, none);
            }
        }
        out
    }

    #[inline(always)]
    fn largest(self, x: V) -> f32 {
        // SAFETY: `self` proves the instructions.
        unsafe { vmaxvq_f32(vmaxq_f32(vmaxq_f32(x[0], x[1]), vmaxq_f32(x[2], x[3]))) }
    }

    #[inline(always)]
    fn round_bf16(self, x: V) -> V {
        each!(round_bf16, x)
    }

    #[inline(always)]
    fn store_upper_halves(self, x: V, to: &mut [u16; LANES]) {
        for (quarter, lanes) in x.into_iter().enumerate() {
            // SAFETY: `self` proves the instructions; four halves fit at each quarter.
            unsafe {
                let upper: uint16x4_t = vshrn_n_u32::<16>(vreinterpretq_u32_f32(lanes));
                vst1_u16(to.as_mut_ptr().add(4 * quarter), upper);
            }
        }
    }

    #[inline(always)]
    fn widen_bf16(self, x: &[u16; LANES]) -> V {
        let words = words(x);
        each!(lower, words)
    }

    #[inline(always)]
    fn widen_f16(self, x: &[u16; LANES]) -> V {
        let start = x.as_ptr();
        // SAFETY: `self` proves the instructions; four halves are there at each quarter.
        unsafe {
            [
                widen_f16(vld1_u16(start)),
                widen_f16(vld1_u16(start.add(4))),
                widen_f16(vld1_u16(start.add(8))),
                widen_f16(vld1_u16(start.add(12))),
            ]
        }
    }

    #[inline(always)]
    fn zip_bf16(self, low: &[u16; LANES], high: &[u16; LANES]) -> V {
        let (low, high) = (words(low), self.widen_bf16(high));
        each!(or, low, high)
    }

    #[inline(always)]
    fn pair_phase(self, pairs: V, phase: usize) -> V {
        match (BRAIN, phase) {
            (true, _) => pairs,
            (false, 0) => each!(upper, pairs),
            (false, _) => each!(lower, pairs),
        }
    }

    #[inline(always)]
    fn pair_dot(self, acc: V, a: V, b: V) -> V {
        if BRAIN {
            each!(odd_then_even, acc, a, b)
        } else {
            self.fma(a, b, acc)
        }
    }

    #[inline(always)]
    fn pair_words(self, x: V, to: &mut [u32; LANES]) -> usize {
        if BRAIN {
            let mut halves = [0; LANES];
            self.store_upper_halves(self.round_bf16(x), &mut halves);
            for (to, [low, high]) in to.iter_mut().zip(halves.as_chunks::<2>().0) {
                *to = u32::from(*low) | u32::from(*high) << 16;
            }
            return LANES / 2;
        }
        for (quarter, lanes) in self.round_bf16(x).into_iter().enumerate() {
            // SAFETY: `self` proves the instructions; four words fit at each quarter.
            unsafe {
                // Odd before even: exchange the halves of each 64-bit pair.
                let swapped = vrev64q_u32(vreinterpretq_u32_f32(lanes));
                vst1q_u32(to.as_mut_ptr().add(4 * quarter), swapped);
            }
        }
        LANES
    }
}

impl<const DOT: bool, const PAIRS: bool, const BRAIN: bool> IntegerSimd
    for Neon<DOT, PAIRS, BRAIN>
{
    const LEFT: LeftBytes = LeftBytes::Signed;
    const PAIRS: bool = PAIRS;

    #[inline(always)]
    fn byte_dot(self, acc: V, left: V, right: V) -> V {
        if DOT {
            each!(dot, acc, left, right)
        } else {
            each!(dot_pairs, acc, left, right)
        }
    }

    #[inline(always)]
    fn code_dot(self, acc: V, left: V, codes: V) -> V {
        self.byte_dot(acc, left, codes)
    }

    #[inline(always)]
    unsafe fn left_pair(self, steps: [*const u32; 2]) -> V {
        // SAFETY: as the caller promises; `self` proves the instructions.
        unsafe {
            let (first, second) = (vld1_u32(steps[0]), vld1_u32(steps[1]));
            let rows = vcombine_u32(vzip1_u32(first, second), vzip2_u32(first, second));
            [vreinterpretq_f32_u32(rows); 4]
        }
    }

    #[inline(always)]
    fn right_pair(self, steps: [V; 2]) -> [V; 2] {
        let [first, second] = steps;
        [
            each!(vzip1q_f32, first, second),
            each!(vzip2q_f32, first, second),
        ]
    }

    #[inline(always)]
    fn pair_sums(self, rows: [V; 2]) -> [V; 2] {
        let [upper, lower] = rows;
        [
            each!(first_halves, upper, lower),
            each!(second_halves, upper, lower),
        ]
    }

    #[inline(always)]
    fn pair_dots(self, sums: [V; 2], left: V, right: [V; 2]) -> [V; 2] {
        [
            each!(products, sums[0], left, right[0]),
            each!(products, sums[1], left, right[1]),
        ]
    }

    /// Subtracts 128, because both sides of the dot product are signed.
    #[inline(always)]
    fn octet_phase(self, codes: V, _phase: usize) -> V {
        each!(flip_signs, codes)
    }

    #[inline(always)]
    fn octet_zero(self, zero: V) -> V {
        each!(less_128, zero)
    }

    #[inline(always)]
    fn nibbles(self, x: V) -> [V; 2] {
        [each!(lower_nibbles, x), each!(upper_nibbles, x)]
    }

    #[inline(always)]
    fn lookup(self, x: V, table: &[u8; 16]) -> V {
        // SAFETY: `self` proves the instructions; the table has sixteen bytes.
        let table = unsafe { vreinterpretq_f32_u8(vld1q_u8(table.as_ptr())) };
        each!(looked_up, x, [table; 4])
    }

    #[inline(always)]
    fn short_mul(self, a: V, b: V) -> V {
        each!(short_mul, a, b)
    }

    #[inline(always)]
    fn to_float(self, x: V) -> V {
        each!(float, x)
    }

    #[inline(always)]
    fn widen_bytes(self, x: &[u8; LANES]) -> V {
        words(&x.map(u16::from))
    }
}

/// # Safety
/// The processor has NEON.
#[inline(always)]
unsafe fn widen_f16(x: uint16x4_t) -> float32x4_t {
    let wide: float32x4_t;
    // SAFETY: as the caller promises; the instruction touches registers only. The compiler's own
    // name for it is not stable.
    unsafe {
        std::arch::asm!(
            "fcvtl {wide:v}.4s, {x:v}.4h",
            wide = lateout(vreg) wide,
            x = in(vreg) x,
            options(pure, nomem, nostack, preserves_flags),
        );
    }
    wide
}

/// acc + left.odd · right.odd, then + left.even · right.even, each fused and rounded as
/// multiply-adds of f32 are.
///
/// # Safety
/// The processor has bf16.
#[inline(always)]
unsafe fn odd_then_even(acc: float32x4_t, left: float32x4_t, right: float32x4_t) -> float32x4_t {
    let mut sum = acc;
    // SAFETY: as the caller promises; the instructions touch registers only. The compiler's own
    // names for them are not stable.
    unsafe {
        std::arch::asm!(
            ".arch_extension bf16",
            "bfmlalt {sum:v}.4s, {left:v}.8h, {right:v}.8h",
            "bfmlalb {sum:v}.4s, {left:v}.8h, {right:v}.8h",
            sum = inout(vreg) sum,
            left = in(vreg) left,
            right = in(vreg) right,
            options(pure, nomem, nostack, preserves_flags),
        );
    }
    sum
}

/// # Safety
/// The processor has the dot product.
#[inline(always)]
unsafe fn dot(acc: float32x4_t, left: float32x4_t, right: float32x4_t) -> float32x4_t {
    let mut sum = acc;
    // SAFETY: as the caller promises; the instruction touches registers only. The compiler's own
    // name for it is not stable.
    unsafe {
        std::arch::asm!(
            ".arch_extension dotprod",
            "sdot {sum:v}.4s, {left:v}.16b, {right:v}.16b",
            sum = inout(vreg) sum,
            left = in(vreg) left,
            right = in(vreg) right,
            options(pure, nomem, nostack, preserves_flags),
        );
    }
    sum
}

/// acc + left · right: two rows of eight bytes times two columns of eight.
///
/// # Safety
/// The processor has i8mm.
#[inline(always)]
unsafe fn products(acc: float32x4_t, left: float32x4_t, right: float32x4_t) -> float32x4_t {
    let mut sums = acc;
    // SAFETY: as the caller promises; the instruction touches registers only. The compiler's own
    // name for it is not stable.
    unsafe {
        std::arch::asm!(
            ".arch_extension i8mm",
            "smmla {sums:v}.4s, {left:v}.16b, {right:v}.16b",
            sums = inout(vreg) sums,
            left = in(vreg) left,
            right = in(vreg) right,
            options(pure, nomem, nostack, preserves_flags),
        );
    }
    sums
}

/// # Safety
/// The processor has NEON.
#[inline(always)]
unsafe fn first_halves(a: float32x4_t, b: float32x4_t) -> float32x4_t {
    // SAFETY: as the caller promises.
    unsafe {
        let (a, b) = (vreinterpretq_f64_f32(a), vreinterpretq_f64_f32(b));
        vreinterpretq_f32_f64(vzip1q_f64(a, b))
    }
}

/// # Safety
/// The processor has NEON.
#[inline(always)]
unsafe fn second_halves(a: float32x4_t, b: float32x4_t) -> float32x4_t {
    // SAFETY: as the caller promises.
    unsafe {
        let (a, b) = (vreinterpretq_f64_f32(a), vreinterpretq_f64_f32(b));
        vreinterpretq_f32_f64(vzip2q_f64(a, b))
    }
}

/// # Safety
/// The processor has NEON.
#[inline(always)]
unsafe fn dot_pairs(acc: float32x4_t, left: float32x4_t, right: float32x4_t) -> float32x4_t {
    // SAFETY: as the caller promises.
    unsafe {
        let (left, right) = (vreinterpretq_s8_f32(left), vreinterpretq_s8_f32(right));
        let low = vmull_s8(vget_low_s8(left), vget_low_s8(right));
        let high = vmull_s8(vget_high_s8(left), vget_high_s8(right));
        // Sums of two neighbours, then of four.
        let sums = vpaddq_s32(vpaddlq_s16(low), vpaddlq_s16(high));
        vreinterpretq_f32_s32(vaddq_s32(vreinterpretq_s32_f32(acc), sums))
    }
}

/// # Safety
/// The processor has NEON.
#[inline(always)]
unsafe fn flip_signs(x: float32x4_t) -> float32x4_t {
    // SAFETY: as the caller promises.
    unsafe { vreinterpretq_f32_u8(veorq_u8(vreinterpretq_u8_f32(x), vdupq_n_u8(0x80))) }
}

/// # Safety
/// The processor has NEON.
#[inline(always)]
unsafe fn less_128(x: float32x4_t) -> float32x4_t {
    // SAFETY: as the caller promises.
    unsafe { vreinterpretq_f32_s32(vsubq_s32(vreinterpretq_s32_f32(x), vdupq_n_s32(128))) }
}

/// # Safety
/// The processor has NEON.
#[inline(always)]
unsafe fn lower_nibbles(x: float32x4_t) -> float32x4_t {
    // SAFETY: as the caller promises.
    unsafe { vreinterpretq_f32_u8(vandq_u8(vreinterpretq_u8_f32(x), vdupq_n_u8(15))) }
}

/// # Safety
/// The processor has NEON.
#[inline(always)]
unsafe fn upper_nibbles(x: float32x4_t) -> float32x4_t {
    // SAFETY: as the caller promises.
    unsafe { vreinterpretq_f32_u8(vshrq_n_u8::<4>(vreinterpretq_u8_f32(x))) }
}

/// # Safety
/// The processor has NEON.
#[inline(always)]
unsafe fn looked_up(x: float32x4_t, table: float32x4_t) -> float32x4_t {
    // SAFETY: as the caller promises.
    unsafe {
        let (x, table) = (vreinterpretq_u8_f32(x), vreinterpretq_u8_f32(table));
        vreinterpretq_f32_u8(vqtbl1q_u8(table, x))
    }
}

/// # Safety
/// The processor has NEON.
#[inline(always)]
unsafe fn short_mul(a: float32x4_t, b: float32x4_t) -> float32x4_t {
    // SAFETY: as the caller promises.
    unsafe {
        let (a, b) = (vreinterpretq_s32_f32(a), vreinterpretq_s32_f32(b));
        vreinterpretq_f32_s32(vmulq_s32(a, b))
    }
}

/// # Safety
/// The processor has NEON.
#[inline(always)]
unsafe fn float(x: float32x4_t) -> float32x4_t {
    // SAFETY: as the caller promises.
    unsafe { vcvtq_f32_s32(vreinterpretq_s32_f32(x)) }
}

/// Widens sixteen 16-bit numbers to words.
#[inline(always)]
fn words(x: &[u16; LANES]) -> V {
    let start = x.as_ptr();
    // SAFETY: every 64-bit Arm has these instructions; four halves are there at each quarter.
    unsafe {
        [
            vreinterpretq_f32_u32(vmovl_u16(vld1_u16(start))),
            vreinterpretq_f32_u32(vmovl_u16(vld1_u16(start.add(4)))),
            vreinterpretq_f32_u32(vmovl_u16(vld1_u16(start.add(8)))),
            vreinterpretq_f32_u32(vmovl_u16(vld1_u16(start.add(12)))),
        ]
    }
}

/// # Safety
/// The processor has NEON.
#[inline(always)]
unsafe fn power_of_two(x: float32x4_t) -> float32x4_t {
    // SAFETY: as the caller promises.
    unsafe {
        let biased = vaddq_s32(vcvtnq_s32_f32(x), vdupq_n_s32(127));
        vreinterpretq_f32_s32(vshlq_n_s32::<23>(biased))
    }
}

/// # Safety
/// The processor has NEON.
#[inline(always)]
unsafe fn round_bf16(x: float32x4_t) -> float32x4_t {
    // SAFETY: as the caller promises.
    unsafe {
        let bits = vreinterpretq_u32_f32(x);
        let even = vandq_u32(vshrq_n_u32::<16>(bits), vdupq_n_u32(1));
        let rounded = vaddq_u32(bits, vaddq_u32(even, vdupq_n_u32(0x7fff)));
        let quiet = vorrq_u32(bits, vdupq_n_u32(0x0040_0000));
        // A number equals itself, a NaN does not.
        let chosen: uint32x4_t = vbslq_u32(vceqq_f32(x, x), rounded, quiet);
        upper(vreinterpretq_f32_u32(chosen))
    }
}

/// # Safety
/// The processor has NEON.
#[inline(always)]
unsafe fn upper(x: float32x4_t) -> float32x4_t {
    // SAFETY: as the caller promises.
    unsafe {
        let mask = vdupq_n_u32(0xffff_0000);
        vreinterpretq_f32_u32(vandq_u32(vreinterpretq_u32_f32(x), mask))
    }
}

/// # Safety
/// The processor has NEON.
#[inline(always)]
unsafe fn lower(x: float32x4_t) -> float32x4_t {
    // SAFETY: as the caller promises.
    unsafe { vreinterpretq_f32_u32(vshlq_n_u32::<16>(vreinterpretq_u32_f32(x))) }
}

/// # Safety
/// The processor has NEON.
#[inline(always)]
unsafe fn or(a: float32x4_t, b: float32x4_t) -> float32x4_t {
    // SAFETY: as the caller promises.
    unsafe {
        vreinterpretq_f32_u32(vorrq_u32(
            vreinterpretq_u32_f32(a),
            vreinterpretq_u32_f32(b),
        ))
    }
}
