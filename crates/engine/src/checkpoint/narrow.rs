//! A weight stored in eight or four bits an element.
//!
//! Owns: one view of every quantised layout: codes, scales, zero points, and which columns share them.
//! Never: copies a tensor as a whole, or knows what wrote it; `quantization` does.
//! Invariant: element `(row, column)` is `(code − zero) × scale`, with zero and scale of the row and the column's
//! group; every index of the shape is within the file, checked when it is made.

use super::map::Span;
use super::numbers::{ALONG_COLUMNS, ALONG_ROWS, Numbers, Packing};
use super::tensor::{StoredTensor, StoredType};
use crate::e4m3;
use std::sync::Arc;

/// What a code is.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum NarrowType {
    /// Eight-bit floats, see [`crate::e4m3`]. They have no zero points.
    E4m3,
    /// Two's complement of eight bits, and so are zero points.
    Int8,
    /// 0 to 15, and so are zero points.
    Int4,
}

impl NarrowType {
    /// For people.
    pub const fn name(self) -> &'static str {
        match self {
            Self::E4m3 => "fp8",
            Self::Int8 => "int8",
            Self::Int4 => "int4",
        }
    }
}

/// The highest bit of a byte: added to two's complement of eight bits, or taken off again, it makes a number without sign.
const ABOVE: u8 = 0x80;

/// A weight `(rows, columns)`, columns being what a product sums over. Its bytes stay in the mapped file.
#[derive(Debug)]
pub struct NarrowTensor {
    pub(super) name: Arc<str>,
    pub(super) element: NarrowType,
    pub(super) rows: usize,
    pub(super) columns: usize,
    pub(super) codes: Codes,
    pub(super) scales: Scales,
    pub(super) zeros: Zeros,
    pub(super) groups: Groups,
    /// Names everything that decides what the bytes mean, for the revision.
    pub(super) layout: Arc<str>,
}

/// Where codes are.
#[derive(Clone, Debug)]
pub(super) enum Codes {
    /// `(rows, columns)`.
    Bytes(Span),
    /// Those of eight bits with 128 added.
    Numbers(Numbers),
}

/// Where scales are: of a row and a group at `row / rows_each × strides.0 + group × strides.1`.
#[derive(Clone, Debug)]
pub(super) struct Scales {
    pub(super) span: Span,
    pub(super) stored: StoredType,
    pub(super) rows_each: usize,
    pub(super) strides: (usize, usize),
}

/// What is taken off codes.
#[derive(Clone, Debug)]
pub(super) enum Zeros {
    Same(u8),
    /// `(rows, groups)`, each with `plus` added, without carry out of its bits; those of eight bits with 128 added.
    Each {
        numbers: Numbers,
        plus: u8,
    },
}

/// Which columns share a scale.
#[derive(Clone, Debug)]
pub(super) enum Groups {
    /// So many neighbours.
    Neighbours(usize),
    /// Column `i` is of group `[i]`.
    Listed { of_columns: Arc<[u32]>, span: Span },
}

/// A quantised weight, a byte for each code.
#[derive(Clone, Debug)]
pub struct ByteCodes<'a> {
    /// What a code is.
    pub element: NarrowType,
    /// `(rows, columns)`.
    pub codes: &'a [u8],
    /// Columns of a group.
    pub group: usize,
    /// `(rows, groups)`.
    pub scales: &'a [f32],
    /// `(rows, groups)`; zeros for fp8.
    pub zeros: &'a [u8],
}

impl NarrowTensor {
    /// A tensor made in memory, for tests and measurements.
    ///
    /// # Panics
    /// If a part has not the shape's size.
    pub fn from_codes(name: &str, (rows, columns): (usize, usize), coded: &ByteCodes<'_>) -> Self {
        let ByteCodes {
            element,
            codes,
            group,
            scales,
            zeros,
        } = *coded;
        let groups = columns.div_ceil(group);
        let sizes = [codes.len(), scales.len(), zeros.len()];
        let wanted = [rows * columns, rows * groups, rows * groups];
        assert_eq!(sizes, wanted, "{name}: codes, scales and zero points");
        let packed = |packing: Packing, numbers: &[u8], width: usize| {
            let shape = (rows, width);
            let bytes = packing.pack(shape, |row, column| numbers[row * width + column]);
            let packed = Numbers::new(Span::owned(bytes), packing, shape);
            packed.expect("packed in this shape")
        };
        let (codes, zeros) = match element {
            NarrowType::E4m3 => (Codes::Bytes(Span::owned(codes.to_vec())), Zeros::Same(0)),
            NarrowType::Int8 => {
                let above: Vec<u8> = zeros.iter().map(|zero| zero ^ ABOVE).collect();
                let numbers = packed(ALONG_ROWS.of_bytes(), &above, groups);
                let codes = Codes::Bytes(Span::owned(codes.to_vec()));
                (codes, Zeros::Each { numbers, plus: 0 })
            }
            NarrowType::Int4 => {
                let numbers = packed(ALONG_ROWS, zeros, groups);
                let codes = packed(ALONG_COLUMNS, codes, columns);
                (Codes::Numbers(codes), Zeros::Each { numbers, plus: 0 })
            }
        };
        let scales: Vec<u8> = scales.iter().flat_map(|s| s.to_le_bytes()).collect();
        Self {
            name: name.into(),
            element,
            rows,
            columns,
            codes,
            scales: Scales {
                span: Span::owned(scales),
                stored: StoredType::F32,
                rows_each: 1,
                strides: (groups, 1),
            },
            zeros,
            groups: Groups::Neighbours(group),
            layout: "in memory".into(),
        }
    }

    /// As the checkpoint would call it if it were dense.
    pub fn name(&self) -> &str {
        &self.name
    }

    /// What a code is.
    pub fn element(&self) -> NarrowType {
        self.element
    }

    /// Rows, the elements of a product's result.
    pub fn rows(&self) -> usize {
        self.rows
    }

    /// Columns.
    pub fn columns(&self) -> usize {
        self.columns
    }

    /// How many neighbouring columns share a scale; `None` where columns of one group are anywhere.
    pub fn group_columns(&self) -> Option<usize> {
        match self.groups {
            Groups::Neighbours(columns) => Some(columns),
            Groups::Listed { .. } => None,
        }
    }

    /// Codes of a row from column `first` on, a byte each.
    ///
    /// # Panics
    /// If there are not so many.
    pub fn read_codes(&self, row: usize, first: usize, out: &mut [u8]) {
        assert!(first + out.len() <= self.columns, "{}: columns", self.name);
        match &self.codes {
            Codes::Bytes(span) => {
                let start = row * self.columns + first;
                out.copy_from_slice(&span.bytes()[start..start + out.len()]);
            }
            Codes::Numbers(numbers) => {
                numbers.read(row, first, out);
                if self.element == NarrowType::Int8 {
                    out.iter_mut().for_each(|code| *code ^= ABOVE);
                }
            }
        }
    }

    /// What codes of a row and group are multiplied with, widened exactly.
    pub fn scale(&self, row: usize, group: usize) -> f32 {
        let Scales {
            span,
            stored,
            rows_each,
            strides,
        } = &self.scales;
        let at = row / rows_each * strides.0 + group * strides.1;
        let width = stored.element_bytes();
        stored.widen(&span.bytes()[at * width..(at + 1) * width])
    }

    /// What is taken off codes of a row and group.
    pub fn zero(&self, row: usize, group: usize) -> u8 {
        match &self.zeros {
            Zeros::Same(zero) => *zero,
            Zeros::Each { numbers, plus } => {
                let zero = numbers.get(row, group).wrapping_add(*plus);
                match self.element {
                    NarrowType::Int8 => zero ^ ABOVE,
                    NarrowType::Int4 | NarrowType::E4m3 => zero & 15,
                }
            }
        }
    }

    /// Whether every zero point of a row is this.
    pub fn is_about(&self, middle: u8) -> bool {
        match &self.zeros {
            Zeros::Same(zero) => *zero == middle,
            Zeros::Each { .. } => {
                let groups = self.groups_count();
                let mut all = (0..self.rows).flat_map(|row| (0..groups).map(move |g| (row, g)));
                all.all(|(row, group)| self.zero(row, group) == middle)
            }
        }
    }

    fn groups_count(&self) -> usize {
        match &self.groups {
            Groups::Neighbours(each) => self.columns.div_ceil(*each),
            Groups::Listed { of_columns, .. } => {
                of_columns.iter().max().map_or(0, |of| *of as usize + 1)
            }
        }
    }

    /// One row in f32, each element rounded once. `out.len() == columns`.
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
                    *value = self.number(*code, zero) * scale;
                }
            }
        };
        match &self.groups {
            Groups::Neighbours(each) => {
                for (group, out) in out.chunks_mut(*each).enumerate() {
                    let scale = (self.scale(row, group), self.zero(row, group));
                    read(group * each, out, &|_| scale);
                }
            }
            Groups::Listed { of_columns, .. } => read(0, out, &|column| {
                let group = of_columns[column] as usize;
                (self.scale(row, group), self.zero(row, group))
            }),
        }
    }

    fn number(&self, code: u8, zero: u8) -> f32 {
        match self.element {
            NarrowType::E4m3 => e4m3::to_f32(code),
            NarrowType::Int8 => f32::from(code.cast_signed()) - f32::from(zero.cast_signed()),
            NarrowType::Int4 => f32::from(code) - f32::from(zero),
        }
    }

    /// Everything it is made of.
    pub(super) fn parts(&self) -> impl Iterator<Item = &[u8]> {
        self.spans().map(Span::bytes)
    }

    /// See [`StoredMatrix::release`].
    pub(super) fn release(&self) {
        self.spans().for_each(Span::release);
    }

    fn spans(&self) -> impl Iterator<Item = &Span> {
        let codes = match &self.codes {
            Codes::Bytes(span) => span,
            Codes::Numbers(numbers) => numbers.span(),
        };
        let zeros = match &self.zeros {
            Zeros::Same(_) => None,
            Zeros::Each { numbers, .. } => Some(numbers.span()),
        };
        let groups = match &self.groups {
            Groups::Neighbours(_) => None,
            Groups::Listed { span, .. } => Some(span),
        };
        [codes, &self.scales.span]
            .into_iter()
            .chain(zeros)
            .chain(groups)
    }
}

/// A weight in whichever form a checkpoint has it.
#[derive(Clone, Debug)]
pub enum StoredMatrix {
    /// Floats of at least 16 bits.
    Dense(StoredTensor),
    /// Quantised.
    Narrow(Arc<NarrowTensor>),
}

impl From<StoredTensor> for StoredMatrix {
    fn from(tensor: StoredTensor) -> Self {
        Self::Dense(tensor)
    }
}

impl From<NarrowTensor> for StoredMatrix {
    fn from(tensor: NarrowTensor) -> Self {
        Self::Narrow(Arc::new(tensor))
    }
}

impl StoredMatrix {
    /// As the checkpoint calls it, or would if it were dense.
    pub fn name(&self) -> &str {
        match self {
            Self::Dense(tensor) => tensor.name(),
            Self::Narrow(tensor) => tensor.name(),
        }
    }

    /// Rows, the elements of a product's result.
    pub fn rows(&self) -> usize {
        match self {
            Self::Dense(tensor) => tensor.rows(),
            Self::Narrow(tensor) => tensor.rows(),
        }
    }

    /// Columns.
    pub fn columns(&self) -> usize {
        match self {
            Self::Dense(tensor) => tensor.columns(),
            Self::Narrow(tensor) => tensor.columns(),
        }
    }

    /// One row in f32. `out.len() == columns`.
    ///
    /// # Panics
    /// If there is no such row, or `out` has another length.
    pub fn read_row(&self, row: usize, out: &mut [f32]) {
        match self {
            Self::Dense(tensor) => tensor.read_row(row, out),
            Self::Narrow(tensor) => tensor.read_row(row, out),
        }
    }

    /// Every element in f32.
    pub fn to_f32(&self) -> Vec<f32> {
        let mut out = vec![0.0; self.rows() * self.columns()];
        if self.columns() > 0 {
            for (row, values) in out.chunks_exact_mut(self.columns()).enumerate() {
                self.read_row(row, values);
            }
        }
        out
    }

    /// Takes what is mapped of it out of this process's memory, once it is not needed for a while: it stays where the
    /// system caches files, and comes back when it is read.
    pub fn release(&self) {
        match self {
            Self::Dense(tensor) => tensor.release(),
            Self::Narrow(tensor) => tensor.release(),
        }
    }

    /// Bytes that it takes in its file.
    pub fn stored_bytes(&self) -> usize {
        match self {
            Self::Dense(tensor) => tensor.bytes().len(),
            Self::Narrow(tensor) => tensor.parts().map(<[u8]>::len).sum(),
        }
    }
}
