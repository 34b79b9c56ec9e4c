//! The four-bit float e2m1: a sign, two bits of exponent, one of fraction.
//!
//! Owns: both conversions. Never: scales.
//! Invariant: widening is exact; narrowing rounds halves to even and saturates at ±6. The format
//! has neither infinities nor NaN.
//!
//! Source: Open Compute Project, "OCP Microscaling Formats (MX) Specification", version 1.0 (2023),
//! section 5.3.3.

/// Largest number of the format.
pub const MAX: f32 = 6.0;

/// Numbers of the codes without the sign bit, which is the highest of four.
const SIZES: [f32; 8] = [0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, MAX];

/// Widens the lower four bits to f32, exactly.
pub fn to_f32(code: u8) -> f32 {
    let size = SIZES[usize::from(code & 7)];
    if code & 8 == 0 { size } else { -size }
}

/// Rounds to the nearest number of the format, and returns its four bits. NaN becomes the largest
/// number.
pub fn from_f32(x: f32) -> u8 {
    // At 2^22 an f32's last bit is 1/2: adding this number rounds a small one to halves.
    const STEPS: f32 = 4_194_304.0;
    let sign = (x.to_bits() >> 28) as u8 & 8;
    let size = x.abs().min(MAX);
    let wide = size.to_bits();
    let code = if size < 1.0 {
        (size + STEPS).to_bits() - STEPS.to_bits()
    } else {
        // Drops 22 bits of the fraction, rounding halves to even, and changes the exponent's bias
        // from 127 to 1.
        ((wide + 0x1f_ffff + (wide >> 22 & 1)) >> 22) - (126 << 1)
    };
    sign | code as u8
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Compares with the definition: sign, 2^(exponent − 1), 1 and halves; subnormal without
    /// exponent.
    #[test]
    fn every_e2m1_value_follows_the_format() {
        for code in 0..16u8 {
            let (exponent, half) = (i32::from(code >> 1 & 3), f32::from(code & 1) / 2.0);
            let size = match exponent {
                0 => half,
                _ => (1.0 + half) * 2f32.powi(exponent - 1),
            };
            let expected = if code < 8 { size } else { -size };
            assert_eq!(to_f32(code), expected, "{code}");
            assert_eq!(from_f32(expected), code, "{code}");
        }
    }

    #[test]
    fn e2m1_rounds_halves_to_even_and_saturates() {
        let rounded = [
            (0.25, 0.0),
            (0.250_001, 0.5),
            (0.75, 1.0),
            (1.25, 1.0),
            (1.75, 2.0),
            (2.5, 2.0),
            (3.5, 4.0),
            (5.0, 4.0),
            (5.000_001, 6.0),
            (1e9, 6.0),
            (f32::INFINITY, 6.0),
        ];
        for (x, expected) in rounded {
            assert_eq!(to_f32(from_f32(x)), expected, "{x}");
            assert_eq!(to_f32(from_f32(-x)), -expected, "{x}");
        }
    }
}
