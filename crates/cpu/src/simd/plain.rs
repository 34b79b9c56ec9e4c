//! The lanes as an array: what every other instruction set is compared with.

use super::bytes::{Bytes, LeftBytes};
use super::{LANES, Simd};

/// Works everywhere.
#[derive(Clone, Copy)]
pub(crate) struct Plain(());

impl Plain {
    /// Like the other sets' tokens, so that one macro compiles the kernels for all of them.
    ///
    /// # Safety
    /// None is needed.
    #[inline(always)]
    pub(crate) const unsafe fn new() -> Self {
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

/// Rounds to bf16, halves to even; a NaN stays one.
#[inline(always)]
fn bf16_bits(x: f32) -> u32 {
    let bits = x.to_bits();
    if x.is_nan() {
        return (bits | 0x0040_0000) & 0xffff_0000;
    }
    bits.wrapping_add(0x7fff + ((bits >> 16) & 1)) & 0xffff_0000
}

/// An f16 as f32; a NaN becomes a quiet one.
#[inline(always)]
fn f16(bits: u16) -> f32 {
    /// 2^112, what the exponents' biases differ by.
    const SCALE: f32 = f32::from_bits((127 + 112) << 23);
    let sign = u32::from(bits & 0x8000) << 16;
    let rest = bits & 0x7fff;
    let magnitude = match rest {
        // Numbers that f16 has without a first bit are scaled exactly, too.
        ..0x7c00 => (f32::from_bits(u32::from(rest) << 13) * SCALE).to_bits(),
        0x7c00 => f32::INFINITY.to_bits(),
        _ => 0x7fc0_0000 | u32::from(rest) << 13,
    };
    f32::from_bits(sign | magnitude)
}

impl Simd for Plain {
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

    /// Two roundings: a fused one without the instruction is a library call per lane.
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
    fn keep(self, x: V, from: usize, to: usize) -> V {
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
    fn narrow(self, x: V, to: &mut [u16; LANES]) {
        for i in 0..LANES {
            to[i] = (x[i].to_bits() >> 16) as u16;
        }
    }

    #[inline(always)]
    fn widen(self, x: &[u16; LANES]) -> V {
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
    fn zip(self, low: &[u16; LANES], high: &[u16; LANES]) -> V {
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

/// acc + the sum of four products of bytes, in every lane; `widened` says what those of the right are.
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

impl Bytes for Plain {
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
    fn short_mul(self, a: V, b: V) -> V {
        each(a, b, |a, b| {
            f32::from_bits(a.to_bits().wrapping_mul(b.to_bits()))
        })
    }

    #[inline(always)]
    fn float(self, x: V) -> V {
        each(x, x, |x, _| x.to_bits().cast_signed() as f32)
    }

    #[inline(always)]
    fn widen_bytes(self, x: &[u8; LANES]) -> V {
        x.map(|x| f32::from_bits(u32::from(x)))
    }

    /// Few of these: the library's function will do.
    #[inline(always)]
    fn fused(self, a: V, b: V, c: V) -> V {
        let mut out = c;
        for i in 0..LANES {
            out[i] = a[i].mul_add(b[i], c[i]);
        }
        out
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use half::f16 as Expected;

    #[test]
    fn every_f16_is_widened_as_the_library_does() {
        for bits in 0..=u16::MAX {
            let (found, expected) = (f16(bits), Expected::from_bits(bits).to_f32());
            assert!(
                found.to_bits() == expected.to_bits() || found.is_nan() && expected.is_nan(),
                "{bits:#x}: {found} is not {expected}"
            );
        }
    }
}
