//! Rounding floats to codes and scales.
//!
//! Owns: the choice of scales, one rule for each format, and dense matrices rounded in memory.
//! Never: knows the layout of a file or of a device.
//! Invariant: every instruction set gives the same codes and scales: no multiply-add is fused, and
//! sums have one order.
//!
//! Sources: for [`mxfp4`], Open Compute Project, "OCP Microscaling Formats (MX) Specification",
//! version 1.0 (2023), section 6.3; for [`nvfp4`], NVIDIA, "Introducing NVFP4 for Efficient and
//! Accurate Low-Precision Inference" (2025): a float 8 for each 16 elements, and one float of 32
//! bits for the matrix.

use crate::packed_numbers::{ALONG_COLUMNS, PackedNumbers};
use crate::quantized::{
    QuantizedCodes, QuantizedTensor, QuantizedType, ScaleGroups, StoredMatrix, ZeroPoints,
};
use crate::scales::{GlobalScale, QuantizedScales, ScaleType};
use crate::tensor::StoredType;
use crate::{e2m1, e4m3, e8m0, map::FileSpan};
use std::thread;

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

/// Format to which a dense matrix is rounded.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum RoundedForm {
    /// Int 8 with a scale for each row, see [`int8`].
    Int8,
    /// Int 4 in groups of so many elements, see [`int4`].
    Int4 {
        /// Elements of a group, a multiple of 16.
        group: usize,
    },
    /// Float 8 with a scale for each row, see [`fp8`].
    Fp8,
    /// Float 4 in groups of [`MX_GROUP`], see [`mxfp4`].
    Mxfp4,
    /// Float 4 in groups of [`NV_GROUP`], see [`nvfp4`].
    Nvfp4,
}

impl RoundedForm {
    /// Number format of the codes.
    pub const fn element(self) -> QuantizedType {
        match self {
            Self::Int8 => QuantizedType::Int8,
            Self::Int4 { .. } => QuantizedType::Int4,
            Self::Fp8 => QuantizedType::E4m3,
            Self::Mxfp4 | Self::Nvfp4 => QuantizedType::E2m1,
        }
    }

    /// Elements of a row that share a scale, in rows of so many.
    pub const fn group(self, columns: usize) -> usize {
        match self {
            Self::Int8 | Self::Fp8 => columns,
            Self::Int4 { group } => group,
            Self::Mxfp4 => MX_GROUP,
            Self::Nvfp4 => NV_GROUP,
        }
    }

    const fn scale_type(self) -> ScaleType {
        match self {
            Self::Int8 | Self::Int4 { .. } | Self::Fp8 => ScaleType::Float(StoredType::F32),
            Self::Mxfp4 => ScaleType::E8m0,
            Self::Nvfp4 => ScaleType::E4m3,
        }
    }

    /// Bytes of the codes of a row.
    const fn codes_bytes(self, columns: usize) -> usize {
        match self.element() {
            QuantizedType::E4m3 | QuantizedType::Int8 => columns,
            // Whole words of eight codes.
            QuantizedType::Int4 | QuantizedType::E2m1 => columns.div_ceil(8) * 4,
        }
    }
}

/// Rounds rows of one matrix.
struct RowRounder {
    form: RoundedForm,
    group: usize,
    /// Factor of all scales.
    factor: f32,
    values: Vec<f32>,
    codes: Vec<u8>,
}

impl RowRounder {
    /// Rounds the row in `values`.
    fn round(&mut self, codes: &mut [u8], scales: &mut [u8]) {
        let (form, factor) = (self.form, self.factor);
        let width = form.scale_type().bytes();
        let groups = self
            .values
            .chunks(self.group)
            .zip(self.codes.chunks_mut(self.group));
        for ((x, codes), scale) in groups.zip(scales.chunks_exact_mut(width)) {
            match form {
                RoundedForm::Int8 => scale.copy_from_slice(&int8(x, codes).to_le_bytes()),
                RoundedForm::Int4 { .. } => scale.copy_from_slice(&int4(x, codes).to_le_bytes()),
                RoundedForm::Fp8 => scale.copy_from_slice(&fp8(x, codes).to_le_bytes()),
                RoundedForm::Mxfp4 => scale[0] = mxfp4(x, codes),
                RoundedForm::Nvfp4 => scale[0] = nvfp4(x, factor, codes),
            }
        }
        match form.element() {
            QuantizedType::E4m3 | QuantizedType::Int8 => codes.copy_from_slice(&self.codes),
            QuantizedType::Int4 | QuantizedType::E2m1 => {
                for (to, pair) in codes.iter_mut().zip(self.codes.chunks(2)) {
                    *to = pair[0] | pair.get(1).map_or(0, |high| high << 4);
                }
            }
        }
    }
}

/// Calls `body` for parts of a matrix's rows, each on a thread of its own: the first row, and a
/// part of `bytes` and of `more`, which have so many bytes for each row.
fn each_part(
    threads: usize,
    rows: usize,
    [(codes, codes_each), (scales, scales_each)]: [(&mut [u8], usize); 2],
    body: &(dyn Fn(usize, &mut [u8], &mut [u8]) + Sync),
) {
    let each = rows.div_ceil(threads.max(1)).max(1);
    thread::scope(|scope| {
        let parts = codes.chunks_mut(each * codes_each);
        let parts = parts.zip(scales.chunks_mut(each * scales_each));
        for (part, (codes, scales)) in parts.enumerate() {
            scope.spawn(move || body(part * each, codes, scales));
        }
    });
}

impl StoredMatrix {
    /// Largest magnitude of the elements, found by so many threads.
    pub fn magnitude_max(&self, threads: usize) -> f32 {
        let each = self.rows().div_ceil(threads.max(1)).max(1);
        let of = |rows: std::ops::Range<usize>| {
            let mut row = vec![0.0; self.columns()];
            rows.fold(0.0, |most: f32, index| {
                self.read_row(index, &mut row);
                magnitude_max(&[most, magnitude_max(&row)])
            })
        };
        thread::scope(|scope| {
            let parts = (0..self.rows()).step_by(each);
            let parts: Vec<_> = parts
                .map(|first| first..self.rows().min(first + each))
                .map(|rows| scope.spawn(|| of(rows)))
                .collect();
            parts.into_iter().fold(0.0, |most: f32, part| {
                let part = part.join().expect("reading a weight does not panic");
                magnitude_max(&[most, part])
            })
        })
    }

    /// The matrix rounded to a format, in memory, by so many threads.
    ///
    /// # Panics
    /// If the format's groups do not divide the columns, or there is no element.
    #[must_use]
    pub fn rounded(&self, form: RoundedForm, threads: usize) -> QuantizedTensor {
        let (rows, columns) = (self.rows(), self.columns());
        let group = form.group(columns);
        assert!(rows > 0 && columns > 0, "{}: no element", self.name());
        assert!(columns.is_multiple_of(group), "{}: groups", self.name());
        let groups = columns / group;
        let factor =
            (form == RoundedForm::Nvfp4).then(|| nvfp4_factor(self.magnitude_max(threads)));
        let (codes_each, scales_each) = (
            form.codes_bytes(columns),
            groups * form.scale_type().bytes(),
        );
        let (mut codes, mut scales) = (vec![0; rows * codes_each], vec![0; rows * scales_each]);
        let parts = [
            (codes.as_mut_slice(), codes_each),
            (scales.as_mut_slice(), scales_each),
        ];
        each_part(threads, rows, parts, &|first, codes, scales| {
            let mut rounder = RowRounder {
                form,
                group,
                factor: factor.unwrap_or(1.0),
                values: vec![0.0; columns],
                codes: vec![0; columns],
            };
            let codes = codes.chunks_exact_mut(codes_each);
            for (row, (codes, scales)) in
                codes.zip(scales.chunks_exact_mut(scales_each)).enumerate()
            {
                self.read_row(first + row, &mut rounder.values);
                rounder.round(codes, scales);
            }
        });
        let codes = FileSpan::owned(codes);
        QuantizedTensor {
            name: self.name().into(),
            element: form.element(),
            rows,
            columns,
            codes: match form.element() {
                QuantizedType::E4m3 | QuantizedType::Int8 => QuantizedCodes::Bytes(codes),
                QuantizedType::Int4 | QuantizedType::E2m1 => {
                    let packed = PackedNumbers::new(codes, ALONG_COLUMNS, (rows, columns));
                    QuantizedCodes::Packed(packed.expect("rows are whole words"))
                }
            },
            scales: QuantizedScales {
                span: FileSpan::owned(scales),
                stored: form.scale_type(),
                rows_per_scale: 1,
                strides: (groups, 1),
                global: factor.map_or(GlobalScale::None, GlobalScale::Factor),
            },
            zeros: ZeroPoints::Uniform(match form {
                RoundedForm::Int4 { .. } => INT4_ZERO,
                _ => 0,
            }),
            groups: ScaleGroups::Contiguous(group),
            turns: 1,
            layout: "rounded at load".into(),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::StoredTensor;

    /// A matrix whose rows differ in size by powers of two.
    fn matrix(rows: usize, columns: usize) -> StoredMatrix {
        let value = |at: usize| {
            let size = 2f32.powi((at / columns % 7) as i32 - 3);
            size * ((at * 7919 % 997) as f32 / 498.5 - 1.0)
        };
        let values: Vec<f32> = (0..rows * columns).map(value).collect();
        StoredTensor::from_f32("w", rows, columns, &values).into()
    }

    const FORMS: [RoundedForm; 5] = [
        RoundedForm::Int8,
        RoundedForm::Int4 { group: 32 },
        RoundedForm::Fp8,
        RoundedForm::Mxfp4,
        RoundedForm::Nvfp4,
    ];

    /// Relative error of a row in the Euclidean norm, by the format's bits of fraction.
    #[test]
    fn a_rounded_matrix_is_near_the_dense_one() {
        let dense = matrix(14, 96);
        for (form, error_max) in FORMS.into_iter().zip([0.006, 0.08, 0.03, 0.12, 0.11]) {
            let rounded = dense.rounded(form, 3);
            let (mut x, mut y) = ([0.0; 96], [0.0; 96]);
            for row in 0..14 {
                dense.read_row(row, &mut x);
                rounded.read_row(row, &mut y);
                let norm = |v: &[f32]| v.iter().map(|v| v * v).sum::<f32>().sqrt();
                let error: Vec<f32> = x.iter().zip(&y).map(|(x, y)| x - y).collect();
                let share = norm(&error) / norm(&x);
                assert!(share < error_max, "{form:?}: row {row}: {share}");
            }
        }
    }

    #[test]
    fn the_number_of_threads_changes_no_code() {
        let dense = matrix(7, 64);
        for form in FORMS {
            let of = |threads| {
                let rounded = dense.rounded(form, threads);
                let parts: Vec<Vec<u8>> = rounded.part_bytes().map(<[u8]>::to_vec).collect();
                (parts, StoredMatrix::from(rounded).to_f32())
            };
            assert_eq!(of(1), of(4), "{form:?}");
            assert_eq!(of(1), of(64), "{form:?}");
        }
    }

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
        // The exponent of 7 is 2: the scale is 1, and 7 becomes 6; alone among sixes, that errs
        // less than a scale of 2 does.
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

    #[test]
    fn rows_that_are_not_finite_have_scales_of_nan() {
        let values = [f32::INFINITY; 32];
        let dense: StoredMatrix = StoredTensor::from_f32("w", 1, 32, &values).into();
        for form in FORMS {
            let rounded = dense.rounded(form, 1);
            assert!(rounded.scale(0, 0).is_nan(), "{form:?}");
        }
    }
}
