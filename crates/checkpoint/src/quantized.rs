//! A weight stored in eight or four bits an element.
//!
//! Owns: one view of every quantised layout: codes, scales, zero points, and the groups of columns
//! that share them.
//! Never: copies a tensor as a whole, or knows its file format; `quantization` does.
//! Invariant: element `(row, column)` is `(code − zero) × scale`, with zero and scale of the row
//! and the column's group; every index of the shape is within the file, checked when it is made.

use super::map::FileSpan;
use super::packed_numbers::{ALONG_COLUMNS, ALONG_ROWS, PackedNumbers, WordPacking};
use super::scales::{GlobalScale, QuantizedScales, ScaleType};
use super::tensor::{StoredTensor, StoredType};
use crate::{e2m1, e4m3};
use std::ops::Range;
use std::sync::Arc;

/// Number format of the codes.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum QuantizedType {
    /// Eight-bit floats, see [`crate::e4m3`], without zero points.
    E4m3,
    /// Two's complement of eight bits, as are zero points.
    Int8,
    /// Numbers from 0 to 15, as are zero points.
    Int4,
    /// Four-bit floats, see [`crate::e2m1`], without zero points.
    E2m1,
}

impl QuantizedType {
    /// Whether codes are whole numbers, with zero points.
    pub(super) const fn is_integer(self) -> bool {
        match self {
            Self::Int8 | Self::Int4 => true,
            Self::E4m3 | Self::E2m1 => false,
        }
    }

    /// Name for logs and descriptions.
    pub const fn name(self) -> &'static str {
        match self {
            Self::E4m3 => "fp8",
            Self::Int8 => "int8",
            Self::Int4 => "int4",
            Self::E2m1 => "fp4",
        }
    }
}

/// The highest bit of a byte. Flipping it converts between two's complement and the same number
/// plus 128.
const SIGN_BIT: u8 = 0x80;

/// A quantised weight `(rows, columns)`; a product sums over columns. Its bytes stay in the mapped
/// file.
#[derive(Debug)]
pub struct QuantizedTensor {
    pub(super) name: Arc<str>,
    pub(super) element: QuantizedType,
    pub(super) rows: usize,
    pub(super) columns: usize,
    pub(super) codes: QuantizedCodes,
    pub(super) scales: QuantizedScales,
    pub(super) zeros: ZeroPoints,
    pub(super) groups: ScaleGroups,
    /// Tensors whose rows take turns in these bytes; 1 for most.
    pub(super) turns: usize,
    /// Stored row of each row; `None` if all are where they are stored.
    pub(super) order: Option<Arc<[u32]>>,
    /// Text that covers everything that decides the bytes' meaning; part of the revision's hash.
    pub(super) layout: Arc<str>,
}

/// Storage of the codes.
#[derive(Clone, Debug)]
pub(super) enum QuantizedCodes {
    /// One byte per code, `(rows, columns)`, row by row.
    Bytes(FileSpan),
    /// Packed words; codes of eight bits have 128 added.
    Packed(PackedNumbers),
}

/// Zero points, which are subtracted from codes.
#[derive(Clone, Debug)]
pub(super) enum ZeroPoints {
    Uniform(u8),
    /// `(rows, groups)`. `plus` is added to each stored number without carry out of its bits;
    /// numbers of eight bits are stored with 128 added.
    PerGroup {
        numbers: PackedNumbers,
        offset: u8,
    },
}

/// Groups of columns that share a scale.
#[derive(Clone, Debug)]
pub(super) enum ScaleGroups {
    /// Groups of so many consecutive columns.
    Contiguous(usize),
    /// Column `i` belongs to group `of_columns[i]`.
    Indexed {
        group_of_column: Arc<[u32]>,
        span: FileSpan,
    },
}

/// A quantised weight in memory, with one byte per code.
#[derive(Clone, Debug)]
pub struct ByteCodes<'a> {
    /// Number format of the codes.
    pub element: QuantizedType,
    /// Shape: `(rows, columns)`, row by row.
    pub codes: &'a [u8],
    /// Number of columns per group.
    pub group: usize,
    /// Shape: `(rows, groups)`, row by row.
    pub scales: &'a [f32],
    /// `(rows, groups)`; zeros for floats.
    pub zeros: &'a [u8],
}

impl QuantizedTensor {
    /// A tensor made in memory, for tests and measurements.
    ///
    /// # Panics
    /// If a part does not have the shape's size.
    pub fn from_codes(name: &str, rows: usize, columns: usize, coded: &ByteCodes<'_>) -> Self {
        let ByteCodes {
            element,
            codes,
            group,
            scales,
            zeros,
        } = *coded;
        let groups = columns.div_ceil(group);
        let sizes = [codes.len(), scales.len(), zeros.len()];
        let expected = [rows * columns, rows * groups, rows * groups];
        assert_eq!(sizes, expected, "{name}: codes, scales and zero points");
        let packed = |packing: WordPacking, numbers: &[u8], width: usize| {
            let bytes = packing.pack(rows, width, |row, column| numbers[row * width + column]);
            let packed = PackedNumbers::new(FileSpan::owned(bytes), packing, (rows, width));
            packed.expect("packed in this shape")
        };
        let (codes, zeros) = match element {
            QuantizedType::E4m3 => (
                QuantizedCodes::Bytes(FileSpan::owned(codes.to_vec())),
                ZeroPoints::Uniform(0),
            ),
            QuantizedType::Int8 => {
                let above: Vec<u8> = zeros.iter().map(|zero| zero ^ SIGN_BIT).collect();
                let numbers = packed(ALONG_ROWS.with_eight_bits(), &above, groups);
                let codes = QuantizedCodes::Bytes(FileSpan::owned(codes.to_vec()));
                (codes, ZeroPoints::PerGroup { numbers, offset: 0 })
            }
            QuantizedType::E2m1 => {
                let codes = packed(ALONG_COLUMNS, codes, columns);
                (QuantizedCodes::Packed(codes), ZeroPoints::Uniform(0))
            }
            QuantizedType::Int4 => {
                let numbers = packed(ALONG_ROWS, zeros, groups);
                let codes = packed(ALONG_COLUMNS, codes, columns);
                (
                    QuantizedCodes::Packed(codes),
                    ZeroPoints::PerGroup { numbers, offset: 0 },
                )
            }
        };
        let scales: Vec<u8> = scales.iter().flat_map(|s| s.to_le_bytes()).collect();
        Self {
            name: name.into(),
            element,
            rows,
            columns,
            codes,
            scales: QuantizedScales {
                span: FileSpan::owned(scales),
                stored: ScaleType::Float(StoredType::F32),
                rows_per_scale: 1,
                strides: (groups, 1),
                global: GlobalScale::None,
            },
            zeros,
            groups: ScaleGroups::Contiguous(group),
            turns: 1,
            order: None,
            layout: "in memory".into(),
        }
    }

    /// Every `turns.1`th of these rows from the `turns.0`th on, under another name; `None` if codes
    /// and scales do not lie row by row, each with scales of its own.
    pub(super) fn rows_in_turn(
        &self,
        name: &str,
        rows: Range<usize>,
        turns: (usize, usize),
    ) -> Option<Self> {
        let (QuantizedCodes::Packed(codes), None) = (&self.codes, &self.order) else {
            return None;
        };
        let (first, step) = turns;
        let of_rows = QuantizedScales {
            span: self.scales.rows(rows.start + first..rows.end)?,
            strides: (self.scales.strides.0 * step, 1),
            ..self.scales.clone()
        };
        Some(Self {
            name: name.into(),
            element: self.element,
            rows: rows.len() / step,
            columns: self.columns,
            codes: QuantizedCodes::Packed(codes.rows(rows.start + first..rows.end, step)?),
            scales: of_rows,
            zeros: match self.zeros {
                ZeroPoints::Uniform(zero) => ZeroPoints::Uniform(zero),
                ZeroPoints::PerGroup { .. } => return None,
            },
            groups: self.groups.clone(),
            turns: step,
            order: None,
            layout: Arc::clone(&self.layout),
        })
    }

    /// These rows in this order. Copies no code.
    ///
    /// # Panics
    /// If there is no such row.
    pub fn with_rows(&self, rows: &[usize]) -> Self {
        let stored = rows.iter().map(|row| self.stored_row(*row) as u32);
        Self {
            name: Arc::clone(&self.name),
            rows: rows.len(),
            codes: self.codes.clone(),
            scales: self.scales.clone(),
            zeros: self.zeros.clone(),
            groups: self.groups.clone(),
            order: Some(stored.collect()),
            layout: Arc::clone(&self.layout),
            ..*self
        }
    }

    /// Where a row's codes, scales and zero points are stored.
    fn stored_row(&self, row: usize) -> usize {
        assert!(row < self.rows, "{}: row {row}", self.name);
        match &self.order {
            Some(order) => order[row] as usize,
            None => row,
        }
    }

    /// The weight's name in the dense model.
    pub fn name(&self) -> &str {
        &self.name
    }

    /// Number format of the codes.
    pub fn element(&self) -> QuantizedType {
        self.element
    }

    /// Number of rows: the elements of a product's result.
    pub fn rows(&self) -> usize {
        self.rows
    }

    /// Number of columns: the elements that a product sums.
    pub fn columns(&self) -> usize {
        self.columns
    }

    /// Number of consecutive columns that share a scale; `None` if groups are not consecutive
    /// columns.
    pub fn group_columns(&self) -> Option<usize> {
        match self.groups {
            ScaleGroups::Contiguous(columns) => Some(columns),
            ScaleGroups::Indexed { .. } => None,
        }
    }

    /// Copies a row's codes from column `first` on, one byte each.
    ///
    /// # Panics
    /// If the row has fewer.
    pub fn read_codes(&self, row: usize, first: usize, out: &mut [u8]) {
        assert!(first + out.len() <= self.columns, "{}: columns", self.name);
        let row = self.stored_row(row);
        match &self.codes {
            QuantizedCodes::Bytes(span) => {
                let start = row * self.columns + first;
                out.copy_from_slice(&span.bytes()[start..start + out.len()]);
            }
            QuantizedCodes::Packed(numbers) => {
                numbers.read(row, first, out);
                if self.element == QuantizedType::Int8 {
                    out.iter_mut().for_each(|code| *code ^= SIGN_BIT);
                }
            }
        }
    }

    /// Number with which all stored scales are multiplied, if there is one; rounded if a file has
    /// its reciprocal.
    pub fn scale_factor(&self) -> Option<f32> {
        self.scales.global.factor()
    }

    /// Stored scale of a row and group, an e4m3 before any global one; `None` if the weight has
    /// scales of another type.
    pub fn scale_byte(&self, row: usize, group: usize) -> Option<u8> {
        let row = self.stored_row(row);
        match (self.scales.stored, self.scales.stored_scale(row, group)) {
            (ScaleType::E4m3, &[byte]) => Some(byte),
            _ => None,
        }
    }

    /// Scale of a row and group, widened exactly; rounded once if there is a global one.
    pub fn scale(&self, row: usize, group: usize) -> f32 {
        self.scales.scale(self.stored_row(row), group)
    }

    /// Zero point of a row and group.
    pub fn zero(&self, row: usize, group: usize) -> u8 {
        match &self.zeros {
            ZeroPoints::Uniform(zero) => *zero,
            ZeroPoints::PerGroup {
                numbers,
                offset: plus,
            } => {
                let zero = numbers.get(self.stored_row(row), group);
                let zero = zero.wrapping_add(*plus);
                match self.element {
                    QuantizedType::Int8 => zero ^ SIGN_BIT,
                    QuantizedType::Int4 | QuantizedType::E4m3 | QuantizedType::E2m1 => zero & 15,
                }
            }
        }
    }

    /// Whether every zero point equals `middle`.
    pub fn has_zero_point(&self, middle: u8) -> bool {
        match &self.zeros {
            ZeroPoints::Uniform(zero) => *zero == middle,
            ZeroPoints::PerGroup { .. } => {
                let groups = self.groups_count();
                let mut all = (0..self.rows).flat_map(|row| (0..groups).map(move |g| (row, g)));
                all.all(|(row, group)| self.zero(row, group) == middle)
            }
        }
    }

    fn groups_count(&self) -> usize {
        match &self.groups {
            ScaleGroups::Contiguous(each) => self.columns.div_ceil(*each),
            ScaleGroups::Indexed {
                group_of_column: of_columns,
                ..
            } => of_columns.iter().max().map_or(0, |of| *of as usize + 1),
        }
    }

    /// Dequantises one row to f32; each element is rounded once. `out.len() == columns`.
    ///
    /// # Panics
    /// If there is no such row, or `out` has another length.
    pub fn read_row(&self, row: usize, out: &mut [f32]) {
        const CODES: usize = 256;
        assert_eq!(out.len(), self.columns, "{}: columns", self.name);
        let mut codes = [0; CODES];
        let mut read = |first: usize, out: &mut [f32], scale_of: &dyn Fn(usize) -> (f32, u8)| {
            for (part, out) in out.chunks_mut(CODES).enumerate() {
                let first = first + part * CODES;
                let codes = &mut codes[..out.len()];
                self.read_codes(row, first, codes);
                for ((value, code), column) in out.iter_mut().zip(codes).zip(first..) {
                    let (scale, zero) = scale_of(column);
                    *value = self.code_minus_zero(*code, zero) * scale;
                }
            }
        };
        match &self.groups {
            ScaleGroups::Contiguous(each) => {
                for (group, out) in out.chunks_mut(*each).enumerate() {
                    let scale = (self.scale(row, group), self.zero(row, group));
                    read(group * each, out, &|_| scale);
                }
            }
            ScaleGroups::Indexed {
                group_of_column: of_columns,
                ..
            } => read(0, out, &|column| {
                let group = of_columns[column] as usize;
                (self.scale(row, group), self.zero(row, group))
            }),
        }
    }

    /// Every element in f32.
    pub fn to_f32(&self) -> Vec<f32> {
        let mut out = vec![0.0; self.rows * self.columns];
        if self.columns > 0 {
            for (row, values) in out.chunks_exact_mut(self.columns).enumerate() {
                self.read_row(row, values);
            }
        }
        out
    }

    fn code_minus_zero(&self, code: u8, zero: u8) -> f32 {
        match self.element {
            QuantizedType::E4m3 => e4m3::to_f32(code),
            QuantizedType::Int8 => f32::from(code.cast_signed()) - f32::from(zero.cast_signed()),
            QuantizedType::Int4 => f32::from(code) - f32::from(zero),
            QuantizedType::E2m1 => e2m1::to_f32(code),
        }
    }

    /// All stored bytes: codes, scales, zero points and the list of groups.
    pub(super) fn part_bytes(&self) -> impl Iterator<Item = &[u8]> {
        self.spans().map(FileSpan::bytes)
    }

    /// Bytes that the weight takes in its file.
    fn stored_bytes(&self) -> usize {
        match &self.codes {
            QuantizedCodes::Packed(codes) if self.turns > 1 => {
                let row_bytes = codes.row_bytes() + self.scales.row_bytes();
                self.rows * row_bytes / self.turns
            }
            _ => self.part_bytes().map(<[u8]>::len).sum(),
        }
    }

    /// Releases the mapped pages, see [`StoredMatrix::release`].
    pub(super) fn release(&self) {
        self.spans().for_each(FileSpan::release);
    }

    fn spans(&self) -> impl Iterator<Item = &FileSpan> {
        let codes = match &self.codes {
            QuantizedCodes::Bytes(span) => span,
            QuantizedCodes::Packed(numbers) => numbers.span(),
        };
        let zeros = match &self.zeros {
            ZeroPoints::Uniform(_) => None,
            ZeroPoints::PerGroup { numbers, .. } => Some(numbers.span()),
        };
        let groups = match &self.groups {
            ScaleGroups::Contiguous(_) => None,
            ScaleGroups::Indexed { span, .. } => Some(span),
        };
        [codes, &self.scales.span]
            .into_iter()
            .chain(zeros)
            .chain(groups)
    }
}

/// A weight as a checkpoint stores it.
#[derive(Clone, Debug)]
pub enum StoredMatrix {
    /// Floats of at least 16 bits.
    Dense(StoredTensor),
    /// Codes of eight or four bits, with scales.
    Quantized(Arc<QuantizedTensor>),
}

impl From<StoredTensor> for StoredMatrix {
    fn from(tensor: StoredTensor) -> Self {
        Self::Dense(tensor)
    }
}

impl From<QuantizedTensor> for StoredMatrix {
    fn from(tensor: QuantizedTensor) -> Self {
        Self::Quantized(Arc::new(tensor))
    }
}

impl StoredMatrix {
    /// The weight's name in the dense model.
    pub fn name(&self) -> &str {
        match self {
            Self::Dense(tensor) => tensor.name(),
            Self::Quantized(tensor) => tensor.name(),
        }
    }

    /// Number of rows: the elements of a product's result.
    pub fn rows(&self) -> usize {
        match self {
            Self::Dense(tensor) => tensor.rows(),
            Self::Quantized(tensor) => tensor.rows(),
        }
    }

    /// Number of columns: the elements that a product sums.
    pub fn columns(&self) -> usize {
        match self {
            Self::Dense(tensor) => tensor.columns(),
            Self::Quantized(tensor) => tensor.columns(),
        }
    }

    /// These rows in this order. Dense rows are copied.
    ///
    /// # Panics
    /// If there is no such row.
    pub fn with_rows(&self, rows: &[usize]) -> Self {
        match self {
            Self::Dense(tensor) => tensor.with_rows(rows).into(),
            Self::Quantized(tensor) => tensor.with_rows(rows).into(),
        }
    }

    /// One row in f32. `out.len() == columns`.
    ///
    /// # Panics
    /// If there is no such row, or `out` has another length.
    pub fn read_row(&self, row: usize, out: &mut [f32]) {
        match self {
            Self::Dense(tensor) => tensor.read_row(row, out),
            Self::Quantized(tensor) => tensor.read_row(row, out),
        }
    }

    /// Every element in f32.
    pub fn to_f32(&self) -> Vec<f32> {
        match self {
            Self::Dense(tensor) => tensor.to_f32(),
            Self::Quantized(tensor) => tensor.to_f32(),
        }
    }

    /// Releases the weight's mapped pages from this process's memory. The system's page cache may
    /// keep them; the next read maps them again.
    pub fn release(&self) {
        match self {
            Self::Dense(tensor) => tensor.release(),
            Self::Quantized(tensor) => tensor.release(),
        }
    }

    /// Bytes that the weight takes in its file.
    pub fn stored_bytes(&self) -> usize {
        match self {
            Self::Dense(tensor) => tensor.bytes().len(),
            Self::Quantized(tensor) => tensor.stored_bytes(),
        }
    }
}
