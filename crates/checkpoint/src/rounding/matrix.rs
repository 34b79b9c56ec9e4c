//! Dense matrices rounded to codes and scales, in memory.
//!
//! Owns: the forms of a rounded matrix, and the division of its rows among threads.
//! Never: chooses a scale.
//! Invariant: the number of threads changes no code.

use super::{
    INT4_ZERO, MX_GROUP, NV_GROUP, fp8, int4, int8, magnitude_max, mxfp4, nvfp4, nvfp4_factor,
};
use crate::map::FileSpan;
use crate::packed_numbers::{ALONG_COLUMNS, PackedNumbers};
use crate::quantized::{
    QuantizedCodes, QuantizedTensor, QuantizedType, ScaleGroups, StoredMatrix, ZeroPoints,
};
use crate::scales::{GlobalScale, QuantizedScales, ScaleType};
use crate::tensor::StoredType;
use std::ops::Range;
use std::thread;

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

/// Bytes of a matrix's rows, so many for each.
struct RowBytes<'a> {
    bytes: &'a mut [u8],
    each: usize,
}

impl RowBytes<'_> {
    /// Parts of so many rows.
    fn parts(&mut self, rows: usize) -> impl Iterator<Item = RowBytes<'_>> {
        let each = self.each;
        let parts = self.bytes.chunks_mut(rows * each);
        parts.map(move |bytes| RowBytes { bytes, each })
    }

    fn rows(&mut self) -> impl Iterator<Item = &mut [u8]> {
        self.bytes.chunks_exact_mut(self.each)
    }
}

impl StoredMatrix {
    /// Largest magnitude of the elements, found by so many threads.
    pub fn magnitude_max(&self, threads: usize) -> f32 {
        let each = self.rows().div_ceil(threads.max(1)).max(1);
        let of = |rows: Range<usize>| {
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
        let round_part = |first: usize, mut codes: RowBytes<'_>, mut scales: RowBytes<'_>| {
            let mut rounder = RowRounder {
                form,
                group,
                factor: factor.unwrap_or(1.0),
                values: vec![0.0; columns],
                codes: vec![0; columns],
            };
            for (row, (codes, scales)) in codes.rows().zip(scales.rows()).enumerate() {
                self.read_row(first + row, &mut rounder.values);
                rounder.round(codes, scales);
            }
        };
        let rows_each = rows.div_ceil(threads.max(1));
        let mut all_codes = RowBytes {
            bytes: &mut codes,
            each: codes_each,
        };
        let mut all_scales = RowBytes {
            bytes: &mut scales,
            each: scales_each,
        };
        thread::scope(|scope| {
            let parts = all_codes.parts(rows_each).zip(all_scales.parts(rows_each));
            for (part, (codes, scales)) in parts.enumerate() {
                let round_part = &round_part;
                scope.spawn(move || round_part(part * rows_each, codes, scales));
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
            order: None,
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
    fn rows_that_are_not_finite_have_scales_of_nan() {
        let values = [f32::INFINITY; 32];
        let dense: StoredMatrix = StoredTensor::from_f32("w", 1, 32, &values).into();
        for form in FORMS {
            let rounded = dense.rounded(form, 1);
            assert!(rounded.scale(0, 0).is_nan(), "{form:?}");
        }
    }
}
