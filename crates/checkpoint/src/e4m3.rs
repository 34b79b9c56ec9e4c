//! The eight-bit float e4m3: a sign, four bits of exponent, three of fraction.
//!
//! Owns: both conversions. Never: scales.
//! Invariant: widening is exact; narrowing rounds halves to even, saturates at ±448, and keeps NaN.
//! The format has no infinities.
//!
//! Source: Micikevicius and others, "FP8 Formats for Deep Learning" (2022), which NVIDIA's hardware
//! and safetensors' `F8_E4M3` follow: exponent bias 7; all bits but the sign set is NaN.

/// Largest finite number of the format.
pub const MAX: f32 = 448.0;

/// Bits of NaN, without the sign.
const NAN: u8 = 0x7f;

const F32_OF_BITS: [f32; 256] = {
    let mut wide = [0.0; 256];
    let mut bits = 0;
    while bits < 256 {
        wide[bits] = widened(bits as u8);
        bits += 1;
    }
    wide
};

const fn widened(bits: u8) -> f32 {
    let (exponent, fraction) = ((bits >> 3 & 15) as u32, (bits & 7) as u32);
    let size = match (exponent, bits & NAN) {
        (_, NAN) => f32::NAN,
        // Subnormal numbers are multiples of 2^-9.
        (0, _) => fraction as f32 / 512.0,
        _ => f32::from_bits((exponent + 120) << 23 | fraction << 20),
    };
    match bits >> 7 {
        0 => size,
        _ => -size,
    }
}

/// Widens eight bits to f32, exactly.
pub const fn to_f32(bits: u8) -> f32 {
    F32_OF_BITS[bits as usize]
}

/// Rounds to the nearest number of the format; returns its bits.
pub fn from_f32(x: f32) -> u8 {
    // At 2^14 an f32's last bit is 2^-9: adding this number rounds a small one to multiples of
    // 2^-9.
    const STEPS: f32 = 16_384.0;
    // Smallest normal number of the format.
    const NORMAL_MIN: f32 = 1.0 / 64.0;
    let sign = (x.to_bits() >> 24) as u8 & 0x80;
    let size = x.abs().min(MAX);
    let bits = if x.is_nan() {
        u32::from(NAN)
    } else if size < NORMAL_MIN {
        (size + STEPS).to_bits() - STEPS.to_bits()
    } else {
        let wide = size.to_bits();
        // Drops 20 bits of the fraction, rounding halves to even, and changes the exponent's bias
        // from 127 to 7.
        ((wide + 0x7_ffff + (wide >> 20 & 1)) >> 20) - (120 << 3)
    };
    sign | bits as u8
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Compares with the definition: sign, 2^(exponent − 7), 1 and eighths.
    #[test]
    fn every_e4m3_value_follows_the_format() {
        for bits in 0..=255u8 {
            let exponent = i32::from(bits >> 3 & 15);
            let eighths = f64::from(bits & 7) / 8.0;
            let size = match exponent {
                0 => eighths * 2f64.powi(-6),
                _ => (1.0 + eighths) * 2f64.powi(exponent - 7),
            };
            let wide = f64::from(to_f32(bits));
            match bits & 0x7f {
                0x7f => assert!(wide.is_nan()),
                _ => assert_eq!(wide, if bits < 128 { size } else { -size }, "{bits:#x}"),
            }
        }
        assert_eq!(to_f32(0x7e), MAX);
    }

    /// Compares with a search through all numbers.
    #[test]
    fn e4m3_rounds_to_nearest_even() {
        let nearest = |x: f32| {
            let error = |bits: u8| (f64::from(to_f32(bits)) - f64::from(x)).abs();
            let half = if x.is_sign_negative() { 128u8 } else { 0 };
            let best = (half..half + 127).min_by(|a, b| {
                let order = error(*a).total_cmp(&error(*b));
                order.then((a & 1).cmp(&(b & 1)))
            });
            best.unwrap_or_default()
        };
        for bits in 0..=255u8 {
            if bits & NAN == NAN {
                continue;
            }
            let x = to_f32(bits);
            let next = to_f32(if bits & NAN == 0x7e { bits } else { bits + 1 });
            let middle = f32::midpoint(x, next);
            for x in [x, middle, middle.next_up(), middle.next_down(), x * 1.01] {
                assert_eq!(from_f32(x), nearest(x), "{x}");
            }
        }
        assert_eq!(from_f32(1e9), 0x7e);
        assert_eq!(from_f32(f32::NEG_INFINITY), 0xfe);
        assert_eq!(from_f32(f32::NAN) & NAN, NAN);
        assert_eq!(from_f32(-0.0), 0x80);
    }
}
