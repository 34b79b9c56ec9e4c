//! Floats to codes of eight and four bits.
//!
//! Invariant: every instruction set makes the same codes and scales: nothing is fused, and sums have one order.

use super::product::groups::Bits;

/// The code of zero, of four bits.
const ZERO: u8 = Bits::Four.middle();

/// Added to a small number, this leaves its nearest whole number, halves to even, in the lowest bits.
pub(crate) const SHIFT: f32 = 12_582_912.0;
/// Below this all is zero: its inverse would not be a number.
pub(crate) const LEAST: f32 = 1e-30;

/// The largest magnitude; what is no number is larger than any.
#[inline(always)]
pub(crate) fn most(x: &[f32]) -> f32 {
    let bits = x
        .iter()
        .fold(0, |most, x| (x.to_bits() & 0x7fff_ffff).max(most));
    f32::from_bits(bits)
}

/// Rounds a row to −127..=127; gives the scale. A row that is not finite has a scale that is not.
#[inline(always)]
pub(super) fn round_bytes(x: &[f32], codes: &mut [u8]) -> f32 {
    let most = most(x);
    if !most.is_finite() {
        codes.fill(0);
        return f32::NAN;
    }
    let scale = match most > LEAST {
        true => most / 127.0,
        false => 1.0,
    };
    let inverse = 1.0 / scale;
    for (code, x) in codes.iter_mut().zip(x) {
        *code = (x * inverse + SHIFT).to_bits() as u8;
    }
    scale
}

/// Shares of a group's largest number that become the largest code: cutting a few short is often better for all.
const CUTS: [f32; 5] = [1.0, 0.95, 0.9, 0.85, 0.8];
/// Codes that it becomes, of 8 below zero and 7 above.
const CODES: [f32; 2] = [8.0, 7.0];

/// Rounds a group to 0..=15 about [`ZERO`]; gives the scale, as bf16 has it, of the least squared error. There is one
/// code more below zero than above, so that the largest number's sign decides the scale's.
#[inline(always)]
pub(super) fn round_nibbles(x: &[f32], codes: &mut [u8]) -> f32 {
    let most = most(x);
    if !most.is_finite() || most <= LEAST {
        codes.fill(ZERO);
        return if most.is_finite() { 0.0 } else { f32::NAN };
    }
    let sign = match x.iter().any(|x| *x == -most) {
        true => 1.0,
        false => -1.0,
    };
    let mut best = (f32::INFINITY, 0.0);
    for cut in CUTS {
        for code in CODES {
            let scale = half_up(most * cut / (code * sign));
            let error = squared_error(x, scale);
            if error < best.0 {
                best = (error, scale);
            }
        }
    }
    let inverse = 1.0 / best.1;
    for (code, x) in codes.iter_mut().zip(x) {
        *code = (whole(*x, inverse) + f32::from(ZERO)) as u8;
    }
    best.1
}

/// bf16 of a number that is one, halves away from zero.
#[inline(always)]
fn half_up(x: f32) -> f32 {
    f32::from_bits(x.to_bits().wrapping_add(0x8000) & 0xffff_0000)
}

/// A whole number, −8 to 7.
#[inline(always)]
fn whole(x: f32, inverse: f32) -> f32 {
    ((x * inverse + SHIFT) - SHIFT).clamp(-8.0, 7.0)
}

/// What rounding to this scale loses. Sixteen sums side by side, which have one order.
#[inline(always)]
fn squared_error(x: &[f32], scale: f32) -> f32 {
    let inverse = 1.0 / scale;
    let mut sums = [0.0_f32; 16];
    for part in x.as_chunks::<16>().0 {
        for (sum, x) in sums.iter_mut().zip(part) {
            let error = x - whole(*x, inverse) * scale;
            *sum += error * error;
        }
    }
    sums.iter().sum()
}
