//! Scales of a quantised weight.
//!
//! Owns: their number formats and their positions in a file. Never: knows codes.
//! Invariant: every index of the weight's rows and groups is within the file, checked when the
//! weight is made.

use super::map::FileSpan;
use super::tensor::StoredType;
use crate::e4m3;
use std::ops::Range;

/// Storage of the scales: that of a row and group is at `row / rows_per_scale × strides.0 + group ×
/// strides.1`.
#[derive(Clone, Debug)]
pub(super) struct QuantizedScales {
    pub(super) span: FileSpan,
    pub(super) stored: ScaleType,
    pub(super) rows_per_scale: usize,
    pub(super) strides: (usize, usize),
    pub(super) global: GlobalScale,
}

/// Number format of a stored scale.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum ScaleType {
    Float(StoredType),
    /// Eight-bit floats, see [`crate::e4m3`].
    E4m3,
    /// Powers of two, `2^(byte − 127)`; the highest byte is NaN ("OCP Microscaling Formats",
    /// section 5.4.1).
    E8m0,
}

/// A number for all scales of a weight.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(super) enum GlobalScale {
    None,
    /// Scales are multiplied with it.
    Factor(f32),
    /// Scales are divided by it.
    Divisor(f32),
}

impl QuantizedScales {
    /// Bytes from a row to the next, where every row has scales of its own.
    pub(super) fn row_bytes(&self) -> usize {
        self.strides.0 * self.stored.bytes()
    }

    /// The bytes of these rows; `None` unless every row has scales of its own, one row after the
    /// other.
    pub(super) fn rows(&self, rows: Range<usize>) -> Option<FileSpan> {
        let (each, between) = self.strides;
        if self.rows_per_scale != 1 || between != 1 {
            return None;
        }
        let width = each * self.stored.bytes();
        self.span.part(rows.start * width..rows.end * width)
    }

    /// Scale of a row and group, rounded once if there is a global one.
    pub(super) fn scale(&self, row: usize, group: usize) -> f32 {
        let at = row / self.rows_per_scale * self.strides.0 + group * self.strides.1;
        let width = self.stored.bytes();
        let stored = self
            .stored
            .widen(&self.span.bytes()[at * width..(at + 1) * width]);
        match self.global {
            GlobalScale::None => stored,
            GlobalScale::Factor(factor) => stored * factor,
            GlobalScale::Divisor(divisor) => stored / divisor,
        }
    }
}

impl ScaleType {
    /// Bytes of a scale.
    const fn bytes(self) -> usize {
        match self {
            Self::Float(stored) => stored.element_bytes(),
            Self::E4m3 | Self::E8m0 => 1,
        }
    }

    fn widen(self, bytes: &[u8]) -> f32 {
        match self {
            Self::Float(stored) => stored.widen(bytes),
            Self::E4m3 => e4m3::to_f32(bytes[0]),
            Self::E8m0 => power_of_two(bytes[0]),
        }
    }

    /// Name for texts that describe a layout.
    pub(super) const fn name(self) -> &'static str {
        match self {
            Self::Float(_) => "float",
            Self::E4m3 => "e4m3",
            Self::E8m0 => "e8m0",
        }
    }
}

/// `2^(byte − 127)`, exactly; NaN for the highest byte.
fn power_of_two(byte: u8) -> f32 {
    match byte {
        // 2^-127 is subnormal.
        0 => f32::from_bits(1 << 22),
        u8::MAX => f32::NAN,
        _ => f32::from_bits(u32::from(byte) << 23),
    }
}

/// The byte of the smallest power of two that is at least `x`, a positive number.
pub(super) fn power_of_two_from(x: f32) -> u8 {
    let bits = x.to_bits();
    let has_fraction = bits & 0x7f_ffff != 0;
    ((bits >> 23) + u32::from(has_fraction)).min(254) as u8
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn powers_of_two_are_exact() {
        for byte in 0..u8::MAX {
            let exact = 2f64.powi(i32::from(byte) - 127);
            assert_eq!(f64::from(power_of_two(byte)), exact, "{byte}");
        }
        assert!(power_of_two(u8::MAX).is_nan());
        assert_eq!(power_of_two(power_of_two_from(1.0)), 1.0);
        assert_eq!(power_of_two(power_of_two_from(1.001)), 2.0);
        assert_eq!(power_of_two(power_of_two_from(0.37)), 0.5);
        assert_eq!(power_of_two_from(f32::MAX), 254);
    }
}
