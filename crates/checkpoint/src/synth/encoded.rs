//! Rounding a matrix to codes and scales.
//!
//! Owns: rounding to nearest. Never: knows the layout of a file.

use crate::e8m0;
use crate::rounding::MX_GROUP;
use half::f16;

/// Bytes of scales that are powers of two.
pub(super) fn powers(scales: &[f32]) -> Vec<u8> {
    scales.iter().map(|scale| e8m0::at_least(*scale)).collect()
}

/// Scale that maps the largest value to the largest code; 1 if all values are zero.
pub(super) fn scale(most: f32, code_max: f32) -> f32 {
    if most > 0.0 { most / code_max } else { 1.0 }
}

/// A quantised matrix: codes, and scales and zero points `(rows, groups)`.
pub(super) struct EncodedMatrix {
    pub(super) codes: Vec<u8>,
    pub(super) scales: Vec<f32>,
    pub(super) zeros: Vec<u8>,
    pub(super) groups: usize,
}

impl EncodedMatrix {
    pub(super) fn scale(&self, row: usize, group: usize) -> f32 {
        self.scales[row * self.groups + group]
    }

    /// Quantises without zero points; `stored` rounds a scale to its stored type.
    pub(super) fn symmetric(
        values: &[f32],
        columns: usize,
        group_columns: usize,
        code_max: f32,
        stored: fn(f32) -> f32,
        code: impl Fn(f32) -> u8,
    ) -> Self {
        let mut coded = Self::empty(columns, group_columns);
        let rows = values.chunks(columns);
        for group in rows.flat_map(|row| row.chunks(group_columns)) {
            let most = group.iter().fold(0.0f32, |most, x| most.max(x.abs()));
            let scale = stored(scale(most, code_max));
            coded.scales.push(scale);
            coded.codes.extend(group.iter().map(|x| code(x / scale)));
        }
        coded
    }

    /// Quantises in groups of 32, with the smallest power of two as a scale that keeps every value
    /// within the codes.
    pub(super) fn in_powers_of_two(
        values: &[f32],
        columns: usize,
        code_max: f32,
        code: impl Fn(f32) -> u8,
    ) -> Self {
        let stored = |scale: f32| e8m0::to_f32(e8m0::at_least(scale));
        Self::symmetric(values, columns, MX_GROUP, code_max, stored, code)
    }

    /// Quantises with zero points: code 0 is the smallest value or 0, whichever is less. Scales are
    /// rounded to f16; zero points are at least 1, since gptq cannot store 0.
    pub(super) fn with_zeros(
        values: &[f32],
        columns: usize,
        group_columns: usize,
        code_max: f32,
    ) -> Self {
        let mut coded = Self::empty(columns, group_columns);
        let rows = values.chunks(columns);
        for group in rows.flat_map(|row| row.chunks(group_columns)) {
            let least = group.iter().fold(0.0f32, |least, x| least.min(*x));
            let most = group.iter().fold(0.0f32, |most, x| most.max(*x));
            let scale = f16::from_f32(scale(most - least, code_max)).to_f32();
            let zero = (-least / scale).round_ties_even().clamp(1.0, code_max);
            coded.scales.push(scale);
            coded.zeros.push(zero as u8);
            let code = |x: &f32| ((x / scale).round_ties_even() + zero).clamp(0.0, code_max) as u8;
            coded.codes.extend(group.iter().map(code));
        }
        coded
    }

    fn empty(columns: usize, each: usize) -> Self {
        Self {
            codes: Vec::new(),
            scales: Vec::new(),
            zeros: Vec::new(),
            groups: columns.div_ceil(each),
        }
    }
}
