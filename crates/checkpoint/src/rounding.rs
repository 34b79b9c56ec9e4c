//! Rounding floats to codes and scales.
//!
//! Owns: the choice of scales, one rule for each format.
//! Never: knows the layout of a file or of a device.
//! Invariant: every instruction set gives the same codes and scales: no multiply-add is fused, and
//! sums have one order.
//!
//! Sources: for [`mxfp4`], Open Compute Project, "OCP Microscaling Formats (MX) Specification",
//! version 1.0 (2023), section 6.3; for [`nvfp4`], NVIDIA, "Introducing NVFP4 for Efficient and
//! Accurate Low-Precision Inference" (2025): a float 8 for each 16 elements, and one float of 32
//! bits for the matrix.

mod matrix;

pub use matrix::RoundedForm;

use crate::{e2m1, e4m3, e8m0};

/// Four-bit code of the number zero in [`int4`].
pub const INT4_ZERO: u8 = 8;
/// Elements of a group of MXFP4, whose scale is a power of two.
pub const MX_GROUP: usize = 32;
/// Elements of a group of NVFP4, whose scale is e4m3.
pub const NV_GROUP: usize = 16;

/// 1.5 · 2^23: adding it to a small number leaves the nearest integer, halves to even, in the
/// lowest bits.
pub const ROUND_SHIFT: f32 = 12_582_912.0;
/// Magnitudes below this are zero: their inverse would overflow.
pub const MAGNITUDE_MIN: f32 = 1e-30;

/// Largest magnitude; NaN counts as larger than any number.
#[inline(always)]
pub fn magnitude_max(x: &[f32]) -> f32 {
    let bits = x
        .iter()
        .fold(0, |most, x| (x.to_bits() & 0x7fff_ffff).max(most));
    f32::from_bits(bits)
}

/// Rounds a row to −127..=127; returns the scale, NaN if the row is not finite.
#[inline(always)]
pub fn int8(x: &[f32], codes: &mut [u8]) -> f32 {
    let most = magnitude_max(x);
    if !most.is_finite() {
        codes.fill(0);
        return f32::NAN;
    }
    let scale = if most > MAGNITUDE_MIN {
        most / 127.0
    } else {
        1.0
    };
    let inverse = 1.0 / scale;
    for (code, x) in codes.iter_mut().zip(x) {
        *code = (x * inverse + ROUND_SHIFT).to_bits() as u8;
    }
    scale
}

/// Fractions of a group's largest magnitude that are tried as the largest code's value: clipping a
/// few numbers often reduces the total error.
const CLIP_SHARES: [f32; 5] = [1.0, 0.95, 0.9, 0.85, 0.8];
/// Largest codes that are tried: 8 below zero and 7 above.
const LARGEST_CODES: [f32; 2] = [8.0, 7.0];

/// Rounds a group to 0..=15 around [`INT4_ZERO`]; returns the scale with the least squared error,
/// rounded to bf16. There is one code more below zero than above, so the scale gets a sign that
/// puts the largest number below zero.
#[inline(always)]
pub fn int4(x: &[f32], codes: &mut [u8]) -> f32 {
    let most = magnitude_max(x);
    if !most.is_finite() || most <= MAGNITUDE_MIN {
        codes.fill(INT4_ZERO);
        return if most.is_finite() { 0.0 } else { f32::NAN };
    }
    let sign = if x.iter().any(|x| *x == -most) {
        1.0
    } else {
        -1.0
    };
    let mut best = (f32::INFINITY, 0.0);
    for cut in CLIP_SHARES {
        for code in LARGEST_CODES {
            let scale = bf16_half_up(most * cut / (code * sign));
            let inverse = 1.0 / scale;
            let error = squared_error(x, |x| nearest_code(x, inverse) * scale);
            if error < best.0 {
                best = (error, scale);
            }
        }
    }
    let inverse = 1.0 / best.1;
    for (code, x) in codes.iter_mut().zip(x) {
        *code = (nearest_code(*x, inverse) + f32::from(INT4_ZERO)) as u8;
    }
    best.1
}

/// Rounds a finite number to bf16, halves away from zero.
#[inline(always)]
fn bf16_half_up(x: f32) -> f32 {
    f32::from_bits(x.to_bits().wrapping_add(0x8000) & 0xffff_0000)
}

/// Nearest integer from −8 to 7.
#[inline(always)]
fn nearest_code(x: f32, inverse: f32) -> f32 {
    ((x * inverse + ROUND_SHIFT) - ROUND_SHIFT).clamp(-8.0, 7.0)
}

/// Squared error of rounding. Sixteen partial sums fix the order of additions.
#[inline(always)]
fn squared_error(x: &[f32], rounded: impl Fn(f32) -> f32) -> f32 {
    let mut sums = [0.0_f32; 16];
    for part in x.as_chunks::<16>().0 {
        for (sum, x) in sums.iter_mut().zip(part) {
            let error = x - rounded(*x);
            *sum += error * error;
        }
    }
    sums.iter().sum()
}

/// Rounds a row to e4m3; returns the scale, NaN if the row is not finite.
pub fn fp8(x: &[f32], codes: &mut [u8]) -> f32 {
    let most = magnitude_max(x);
    if !most.is_finite() {
        codes.fill(0);
        return f32::NAN;
    }
    let scale = if most > MAGNITUDE_MIN {
        most / e4m3::MAX
    } else {
        1.0
    };
    for (code, x) in codes.iter_mut().zip(x) {
        *code = e4m3::from_f32(x / scale);
    }
    scale
}

/// Rounds a group of [`MX_GROUP`] elements to e2m1; returns the scale, an [`e8m0`]. The
/// specification's exponent is that of the largest element less that of the largest code, which
/// clips elements above six times the scale; the next larger power of two is taken where its
/// squared error is less.
pub fn mxfp4(x: &[f32], codes: &mut [u8]) -> u8 {
    /// Exponent of the largest code, 6.
    const CODE_EXPONENT: u32 = 2;
    let most = magnitude_max(x);
    if !most.is_finite() || most <= MAGNITUDE_MIN {
        codes.fill(0);
        return if most.is_finite() { 127 } else { e8m0::NAN };
    }
    let least = (most.to_bits() >> 23).saturating_sub(CODE_EXPONENT) as u8;
    let error_of = |byte: u8| {
        let (scale, inverse) = (e8m0::to_f32(byte), e8m0::to_f32(254 - byte));
        squared_error(x, |x| e2m1::to_f32(e2m1::from_f32(x * inverse)) * scale)
    };
    let byte = if error_of(least + 1) < error_of(least) {
        least + 1
    } else {
        least
    };
    let inverse = e8m0::to_f32(254 - byte);
    for (code, x) in codes.iter_mut().zip(x) {
        *code = e2m1::from_f32(x * inverse);
    }
    byte
}

/// Factor of all scales of a matrix in NVFP4 whose largest magnitude is `most`: with it the largest
/// group's scale is the largest e4m3.
pub fn nvfp4_factor(most: f32) -> f32 {
    if most > MAGNITUDE_MIN {
        most / (e2m1::MAX * e4m3::MAX)
    } else {
        1.0
    }
}

/// Rounds a group of [`NV_GROUP`] elements to e2m1; returns the scale, an e4m3, which `factor`
/// multiplies.
pub fn nvfp4(x: &[f32], factor: f32, codes: &mut [u8]) -> u8 {
    let most = magnitude_max(x);
    // A scale of zero would lose the group.
    let byte = e4m3::from_f32(most / e2m1::MAX / factor).max(1);
    let scale = e4m3::to_f32(byte) * factor;
    for (code, x) in codes.iter_mut().zip(x) {
        *code = e2m1::from_f32(x / scale);
    }
    byte
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn mx_scales_follow_the_specification_or_err_less() {
        let mut codes = [0; MX_GROUP];
        // Elements that are codes times a power of two are kept.
        for power in [-100, -3, 0, 5, 100] {
            let scale = 2f32.powi(power);
            let x: Vec<f32> = (0..32u8)
                .map(|code| e2m1::to_f32(code & 15) * scale)
                .collect();
            assert_eq!(i32::from(mxfp4(&x, &mut codes)) - 127, power);
            let expected: Vec<u8> = (0..32u8).map(|code| code & 15).collect();
            assert_eq!(codes.as_slice(), expected);
        }
        // The exponent of 7 is 2: the scale is 1, and 7 becomes 6, which errs as much as the 8
        // of a scale of 2.
        let mut x = [6.0; MX_GROUP];
        x[3] = 7.0;
        assert_eq!(mxfp4(&x, &mut codes), 127);
        // Many of 7.9 err less as 8.
        assert_eq!(mxfp4(&[7.9; MX_GROUP], &mut codes), 128);
        assert_eq!(codes, [6; MX_GROUP]);
    }

    #[test]
    fn the_largest_group_of_nvfp4_has_the_largest_scale() {
        let mut codes = [0; NV_GROUP];
        let x: Vec<f32> = (0..16u8).map(|at| f32::from(at) / 15.0).collect();
        let factor = nvfp4_factor(1.0);
        assert_eq!(nvfp4(&x, factor, &mut codes), 0x7e);
        assert_eq!((codes[15], codes[0]), (7, 0));
        // A group of zeros keeps a scale above zero.
        assert_eq!(nvfp4(&[0.0; NV_GROUP], factor, &mut codes), 1);
        assert_eq!(codes, [0; NV_GROUP]);
    }
}
