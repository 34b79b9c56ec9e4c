//! Rounding floats to codes of eight and four bits.
//!
//! Invariant: every instruction set gives the same codes and scales: no multiply-add is fused, and
//! sums have one order.

use super::product::groups::GroupCodes;

/// Four-bit code of the number zero.
const ZERO: u8 = GroupCodes::Four.implied_zero_point();

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
pub(super) fn round_bytes(x: &[f32], codes: &mut [u8]) -> f32 {
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

/// Rounds a group to 0..=15 around [`ZERO`]; returns the scale with the least squared error,
/// rounded to bf16. There is one code more below zero than above, so the scale gets a sign that
/// puts the largest number below zero.
#[inline(always)]
pub(super) fn round_nibbles(x: &[f32], codes: &mut [u8]) -> f32 {
    let most = magnitude_max(x);
    if !most.is_finite() || most <= MAGNITUDE_MIN {
        codes.fill(ZERO);
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
            let error = squared_error(x, scale);
            if error < best.0 {
                best = (error, scale);
            }
        }
    }
    let inverse = 1.0 / best.1;
    for (code, x) in codes.iter_mut().zip(x) {
        *code = (nearest_code(*x, inverse) + f32::from(ZERO)) as u8;
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

/// Squared error of rounding with this scale. Sixteen partial sums fix the order of additions.
#[inline(always)]
fn squared_error(x: &[f32], scale: f32) -> f32 {
    let inverse = 1.0 / scale;
    let mut sums = [0.0_f32; 16];
    for part in x.as_chunks::<16>().0 {
        for (sum, x) in sums.iter_mut().zip(part) {
            let error = x - nearest_code(*x, inverse) * scale;
            *sum += error * error;
        }
    }
    sums.iter().sum()
}
