//! The eight-bit power of two e8m0, which scales groups of the microscaling formats.
//!
//! Owns: both conversions. Never: codes.
//! Invariant: widening is exact; the highest byte is NaN.
//!
//! Source: Open Compute Project, "OCP Microscaling Formats (MX) Specification", version 1.0 (2023),
//! section 5.4.1.

/// The byte of NaN.
pub const NAN: u8 = u8::MAX;

/// `2^(byte − 127)`, exactly; NaN for the highest byte.
pub const fn to_f32(byte: u8) -> f32 {
    match byte {
        // 2^-127 is subnormal.
        0 => f32::from_bits(1 << 22),
        NAN => f32::NAN,
        _ => f32::from_bits((byte as u32) << 23),
    }
}

/// The byte of the smallest power of two that is at least `x`, a positive number.
pub fn at_least(x: f32) -> u8 {
    let bits = x.to_bits();
    let has_fraction = bits & 0x7f_ffff != 0;
    ((bits >> 23) + u32::from(has_fraction)).min(254) as u8
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn powers_of_two_are_exact() {
        for byte in 0..NAN {
            let exact = 2f64.powi(i32::from(byte) - 127);
            assert_eq!(f64::from(to_f32(byte)), exact, "{byte}");
        }
        assert!(to_f32(NAN).is_nan());
        assert_eq!(to_f32(at_least(1.0)), 1.0);
        assert_eq!(to_f32(at_least(1.001)), 2.0);
        assert_eq!(to_f32(at_least(0.37)), 0.5);
        assert_eq!(at_least(f32::MAX), 254);
    }
}
