//! Scales of a quantised weight.
//!
//! Owns: their number formats and their positions in a file. Never: knows codes.
//! Invariant: every index of the weight's rows and groups is within the file, checked when the
//! weight is made.

use super::map::FileSpan;
use super::tensor::StoredType;
use crate::{e4m3, e8m0};
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
    /// Powers of two, see [`crate::e8m0`].
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

impl GlobalScale {
    /// The number with which scales are multiplied, rounded for a divisor; `None` without one.
    pub(super) fn factor(self) -> Option<f32> {
        match self {
            Self::None => None,
            Self::Factor(factor) => Some(factor),
            Self::Divisor(divisor) => Some(divisor.recip()),
        }
    }
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
        let stored = self.stored.widen(self.stored_scale(row, group));
        match self.global {
            GlobalScale::None => stored,
            GlobalScale::Factor(factor) => stored * factor,
            GlobalScale::Divisor(divisor) => stored / divisor,
        }
    }

    /// Bytes of the scale of a row and group, before any global one.
    pub(super) fn stored_scale(&self, row: usize, group: usize) -> &[u8] {
        let at = row / self.rows_per_scale * self.strides.0 + group * self.strides.1;
        let width = self.stored.bytes();
        &self.span.bytes()[at * width..(at + 1) * width]
    }
}

impl ScaleType {
    /// Bytes of a scale.
    pub(super) const fn bytes(self) -> usize {
        match self {
            Self::Float(stored) => stored.element_bytes(),
            Self::E4m3 | Self::E8m0 => 1,
        }
    }

    fn widen(self, bytes: &[u8]) -> f32 {
        match self {
            Self::Float(stored) => stored.widen(bytes),
            Self::E4m3 => e4m3::to_f32(bytes[0]),
            Self::E8m0 => e8m0::to_f32(bytes[0]),
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
