//! The lanes as an array: the reference for all other instruction sets.

use super::bytes::{IntegerSimd, LeftBytes};
use super::{LANES, Simd};

#[derive(Clone, Copy)]
pub struct PlainSimd(());

impl PlainSimd {
    /// `unsafe` like the other sets' constructors, so that one macro compiles the kernels for all
    /// sets.
    ///
    /// # Safety
    /// No condition.
    #[inline(always)]
    pub const unsafe fn new() -> Self {
        Self(())
    }
}

type V = [f32; LANES];

#[inline(always)]
fn each(a: V, b: V, f: impl Fn(f32, f32) -> f32) -> V {
    let mut out = a;
    for i in 0..LANES {
        out[i] = f(a[i], b[i]);
    }
    out
}

/// Rounds to bf16, halves to even; NaN stays NaN.
#[inline(always)]
fn bf16_bits(x: f32) -> u32 {
    let bits = x.to_bits();
    if x.is_nan() {
        return (bits | 0x0040_0000) & 0xffff_0000;
    }
    bits.wrapping_add(0x7fff + ((bits >> 16) & 1)) & 0xffff_0000
}

/// Widens an f16 to f32; NaN becomes quiet.
#[inline(always)]
pub fn f16(bits: u16) -> f32 {
    /// 2^112: the difference of the exponents' biases.
    const SCALE: f32 = f32::from_bits((127 + 112) << 23);
    let sign = u32::from(bits & 0x8000) << 16;
    let rest = bits & 0x7fff;
    let magnitude = match rest {
        // The scaling is exact for subnormal numbers, too.
        ..0x7c00 => (f32::from_bits(u32::from(rest) << 13) * SCALE).to_bits(),
        0x7c00 => f32::INFINITY.to_bits(),
        _ => 0x7fc0_0000 | u32::from(rest) << 13,
    };
    f32::from_bits(sign | magnitude)
}

impl Simd for PlainSimd {
    type V = V;
    const ROWS: usize = 4;
    const COLUMNS: usize = 1;
    const PHASES: usize = 2;

    #[inline(always)]
    fn splat(self, x: f32) -> V {
        [x; LANES]
    }

    #[inline(always)]
    fn load(self, x: &[f32; LANES]) -> V {
        *x
    }

    #[inline(always)]
    fn store(self, x: V, to: &mut [f32; LANES]) {
        *to = x;
    }

    #[inline(always)]
    fn add(self, a: V, b: V) -> V {
        each(a, b, |a, b| a + b)
    }

    #[inline(always)]
    fn sub(self, a: V, b: V) -> V {
        each(a, b, |a, b| a - b)
    }

    #[inline(always)]
    fn mul(self, a: V, b: V) -> V {
        each(a, b, |a, b| a * b)
    }

    #[inline(always)]
    fn div(self, a: V, b: V) -> V {
        each(a, b, |a, b| a / b)
    }

    /// Rounds twice: without the instruction, a fused multiply-add is a library call per lane.
    #[inline(always)]
    fn fma(self, a: V, b: V, c: V) -> V {
        let mut out = c;
        for i in 0..LANES {
            out[i] += a[i] * b[i];
        }
        out
    }

    #[inline(always)]
    fn min(self, a: V, b: V) -> V {
        each(a, b, |a, b| if a < b { a } else { b })
    }

    #[inline(always)]
    fn max(self, a: V, b: V) -> V {
        each(a, b, |a, b| if a > b { a } else { b })
    }

    #[inline(always)]
    fn round(self, x: V) -> V {
        each(x, x, |x, _| x.round_ties_even())
    }

    #[inline(always)]
    fn power_of_two(self, x: V) -> V {
        each(x, x, |x, _| f32::from_bits(((x as i32 + 127) as u32) << 23))
    }

    #[inline(always)]
    fn mask_outside(self, x: V, from: usize, to: usize) -> V {
        let mut out = [f32::NEG_INFINITY; LANES];
        for i in 0..LANES {
            if from <= i && i < to {
                out[i] = x[i];
            }
        }
        out
    }

    #[inline(always)]
    fn largest(self, x: V) -> f32 {
        let mut top = x[0];
        for &lane in &x[1..] {
            if lane > top {
                top = lane;
            }
        }
        top
    }

    #[inline(always)]
    fn round_bf16(self, x: V) -> V {
        each(x, x, |x, _| f32::from_bits(bf16_bits(x)))
    }

    #[inline(always)]
    fn store_upper_halves(self, x: V, to: &mut [u16; LANES]) {
        for i in 0..LANES {
            to[i] = (x[i].to_bits() >> 16) as u16;
        }
    }

    #[inline(always)]
    fn widen_bf16(self, x: &[u16; LANES]) -> V {
        let mut out = [0.0; LANES];
        for i in 0..LANES {
            out[i] = f32::from_bits(u32::from(x[i]) << 16);
        }
        out
    }

    #[inline(always)]
    fn widen_f16(self, x: &[u16; LANES]) -> V {
        x.map(f16)
    }

    #[inline(always)]
    fn zip_bf16(self, low: &[u16; LANES], high: &[u16; LANES]) -> V {
        let mut out = [0.0; LANES];
        for i in 0..LANES {
            out[i] = f32::from_bits(u32::from(low[i]) | u32::from(high[i]) << 16);
        }
        out
    }

    #[inline(always)]
    fn pair_phase(self, pairs: V, phase: usize) -> V {
        if phase == 0 {
            each(pairs, pairs, |x, _| {
                f32::from_bits(x.to_bits() & 0xffff_0000)
            })
        } else {
            each(pairs, pairs, |x, _| f32::from_bits(x.to_bits() << 16))
        }
    }

    #[inline(always)]
    fn pair_dot(self, acc: V, a: V, b: V) -> V {
        self.fma(a, b, acc)
    }

    #[inline(always)]
    fn pair_words(self, x: V, to: &mut [u32; LANES]) -> usize {
        for pair in 0..LANES / 2 {
            to[2 * pair] = bf16_bits(x[2 * pair + 1]);
            to[2 * pair + 1] = bf16_bits(x[2 * pair]);
        }
        LANES
    }
}

/// acc + the sum of four products of bytes, in every lane; `widened` converts the right side's
/// bytes.
#[inline(always)]
fn dot(acc: V, left: V, right: V, widened: impl Fn(u8) -> i32) -> V {
    let mut out = acc;
    for i in 0..LANES {
        let (left, right) = (left[i].to_bits(), right[i].to_bits());
        let mut sum = acc[i].to_bits().cast_signed();
        for byte in 0..4 {
            let of = |word: u32| (word >> (8 * byte)) as u8;
            let left = i32::from(of(left).cast_signed());
            sum = sum.wrapping_add(left * widened(of(right)));
        }
        out[i] = f32::from_bits(sum.cast_unsigned());
    }
    out
}

impl IntegerSimd for PlainSimd {
    const LEFT: LeftBytes = LeftBytes::Signed;

    #[inline(always)]
    fn byte_dot(self, acc: V, left: V, right: V) -> V {
        dot(acc, left, right, |byte| i32::from(byte.cast_signed()))
    }

    #[inline(always)]
    fn code_dot(self, acc: V, left: V, codes: V) -> V {
        dot(acc, left, codes, i32::from)
    }

    #[inline(always)]
    fn nibbles(self, x: V) -> [V; 2] {
        const MASK: u32 = 0x0f0f_0f0f;
        [
            each(x, x, |x, _| f32::from_bits(x.to_bits() & MASK)),
            each(x, x, |x, _| f32::from_bits(x.to_bits() >> 4 & MASK)),
        ]
    }

    #[inline(always)]
    fn lookup(self, x: V, table: &[u8; 16]) -> V {
        each(x, x, |x, _| {
            let bytes = x.to_bits().to_le_bytes();
            f32::from_le_bytes(bytes.map(|byte| table[usize::from(byte)]))
        })
    }

    #[inline(always)]
    fn short_mul(self, a: V, b: V) -> V {
        each(a, b, |a, b| {
            f32::from_bits(a.to_bits().wrapping_mul(b.to_bits()))
        })
    }

    #[inline(always)]
    fn to_float(self, x: V) -> V {
        each(x, x, |x, _| x.to_bits().cast_signed() as f32)
    }

    #[inline(always)]
    fn widen_bytes(self, x: &[u8; LANES]) -> V {
        x.map(|x| f32::from_bits(u32::from(x)))
    }

    /// Calls are few, so the library's function is fast enough.
    #[inline(always)]
    fn fma_rounded_once(self, a: V, b: V, c: V) -> V {
        let mut out = c;
        for i in 0..LANES {
            out[i] = a[i].mul_add(b[i], c[i]);
        }
        out
    }
}
