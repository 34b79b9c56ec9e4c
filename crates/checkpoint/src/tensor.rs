//! A tensor as a checkpoint stores it.
//!
//! Owns: the supported element types, and their conversion to f32.
//! Never: copies a tensor as a whole.
//! Invariant: `bytes().len() == rows × columns × element_bytes`, checked on construction.

use super::map::{FileBytes, FileSpan};
use half::{bf16, f16};
use std::ops::Range;
use std::sync::Arc;

/// Element type of a stored tensor, little-endian.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum StoredType {
    /// 32-bit float of IEEE 754.
    F32,
    /// 16-bit float of IEEE 754 (half).
    F16,
    /// bfloat16: the upper 16 bits of an f32.
    Bf16,
}

/// A tensor that is in its file alone.
#[derive(Clone, Debug)]
pub(crate) struct TensorLayout {
    name: Arc<str>,
    /// Bytes within the whole file.
    range: Range<usize>,
    stored: StoredType,
    rows: usize,
    columns: usize,
}

impl TensorLayout {
    /// The tensor, with the bytes of its file; `None` if they end before it does.
    pub(crate) fn of_file(&self, bytes: &Arc<FileBytes>) -> Option<StoredTensor> {
        let span = FileSpan::new(Arc::clone(bytes), self.range.clone())?;
        let name = Arc::clone(&self.name);
        StoredTensor::new(name, span, self.stored, self.rows, self.columns)
    }
}

impl StoredType {
    /// Bytes of one element.
    pub const fn element_bytes(self) -> usize {
        match self {
            Self::F32 => 4,
            Self::F16 | Self::Bf16 => 2,
        }
    }

    /// Name of the type in config.json.
    pub(crate) const fn name(self) -> &'static str {
        match self {
            Self::F32 => "float32",
            Self::F16 => "float16",
            Self::Bf16 => "bfloat16",
        }
    }

    /// Converts one stored element to f32, exactly.
    ///
    /// # Panics
    /// If `element` is not [`StoredType::element_bytes`] long.
    pub fn widen(self, element: &[u8]) -> f32 {
        const LENGTH: &str = "an element of this type";
        match self {
            Self::F32 => f32::from_le_bytes(element.try_into().expect(LENGTH)),
            Self::F16 => f16::from_le_bytes(element.try_into().expect(LENGTH)).to_f32(),
            Self::Bf16 => bf16::from_le_bytes(element.try_into().expect(LENGTH)).to_f32(),
        }
    }
}

/// A two-dimensional tensor `(rows, columns)`, row-major; a vector is one row. Cheap to clone: the
/// bytes stay in the mapped file, which lives as long as any tensor of it.
#[derive(Clone, Debug)]
pub struct StoredTensor {
    name: Arc<str>,
    span: FileSpan,
    stored: StoredType,
    rows: usize,
    columns: usize,
}

impl StoredTensor {
    /// `None` if the bytes do not have the shape's size.
    pub(crate) fn new(
        name: Arc<str>,
        span: FileSpan,
        stored: StoredType,
        rows: usize,
        columns: usize,
    ) -> Option<Self> {
        let bytes = rows
            .checked_mul(columns)?
            .checked_mul(stored.element_bytes())?;
        (span.bytes().len() == bytes).then_some(Self {
            name,
            span,
            stored,
            rows,
            columns,
        })
    }

    /// Bytes made in memory.
    fn owned(name: &str, rows: usize, columns: usize, stored: StoredType, bytes: Vec<u8>) -> Self {
        let tensor = Self::new(name.into(), FileSpan::owned(bytes), stored, rows, columns);
        tensor.expect("the size was asserted")
    }

    /// A tensor made in memory, for tests and measurements.
    ///
    /// # Panics
    /// If `values` is not `rows × columns` long.
    pub fn from_f32(name: &str, rows: usize, columns: usize, values: &[f32]) -> Self {
        assert_eq!(
            values.len(),
            rows * columns,
            "{name}: size of {rows} × {columns}"
        );
        let bytes: Vec<u8> = values.iter().flat_map(|v| v.to_le_bytes()).collect();
        Self::owned(name, rows, columns, StoredType::F32, bytes)
    }

    /// As [`StoredTensor::from_f32`], in bfloat16.
    ///
    /// # Panics
    /// If `values` is not `rows × columns` long.
    pub fn from_bf16(name: &str, rows: usize, columns: usize, values: &[bf16]) -> Self {
        assert_eq!(
            values.len(),
            rows * columns,
            "{name}: size of {rows} × {columns}"
        );
        let bytes: Vec<u8> = values.iter().flat_map(|v| v.to_le_bytes()).collect();
        Self::owned(name, rows, columns, StoredType::Bf16, bytes)
    }

    /// As [`StoredTensor::from_f32`], in IEEE's 16 bits.
    ///
    /// # Panics
    /// If `values` is not `rows × columns` long.
    pub fn from_f16(name: &str, rows: usize, columns: usize, values: &[f16]) -> Self {
        // f16 and bf16 have equal sizes, so the constructor of one checks the other.
        let as_bf16: Vec<bf16> = values
            .iter()
            .map(|v| bf16::from_bits(v.to_bits()))
            .collect();
        Self {
            stored: StoredType::F16,
            ..Self::from_bf16(name, rows, columns, &as_bf16)
        }
    }

    /// Name of the tensor in the checkpoint.
    pub fn name(&self) -> &str {
        &self.name
    }

    /// Element type of the stored tensor.
    pub fn stored(&self) -> StoredType {
        self.stored
    }

    /// Number of rows; 1 for a vector.
    pub fn rows(&self) -> usize {
        self.rows
    }

    /// Number of columns; the length of a vector.
    pub fn columns(&self) -> usize {
        self.columns
    }

    /// The tensor without its bytes.
    pub(crate) fn layout(&self) -> TensorLayout {
        TensorLayout {
            name: Arc::clone(&self.name),
            range: self.span.range(),
            stored: self.stored,
            rows: self.rows,
            columns: self.columns,
        }
    }

    /// Every element, little-endian, row after row. Not necessarily aligned to an element.
    pub fn bytes(&self) -> &[u8] {
        self.span.bytes()
    }

    /// Releases the mapped pages, see [`StoredMatrix::release`](super::StoredMatrix::release).
    pub fn release(&self) {
        self.span.release();
    }

    /// One row, `columns × element_bytes`.
    pub fn row_bytes(&self, row: usize) -> &[u8] {
        let width = self.columns * self.stored.element_bytes();
        &self.bytes()[row * width..(row + 1) * width]
    }

    /// These rows under another name, in the same file.
    ///
    /// # Panics
    /// If there are no such rows.
    #[must_use]
    pub(crate) fn rows_named(&self, name: &str, rows: Range<usize>) -> Self {
        let width = self.columns * self.stored.element_bytes();
        let span = self.span.part(rows.start * width..rows.end * width);
        Self {
            name: name.into(),
            span: span.unwrap_or_else(|| panic!("{}: rows {rows:?} of {}", self.name, self.rows)),
            rows: rows.len(),
            ..self.clone()
        }
    }

    /// A copy in memory whose rows are these columns, in this order.
    ///
    /// # Panics
    /// If there is no such column.
    #[must_use]
    pub(crate) fn with_columns_as_rows(&self, columns: &[usize]) -> Self {
        let width = self.stored.element_bytes();
        let mut bytes = vec![0; columns.len() * self.rows * width];
        // Rows of the file are read in order, so that its pages are read once.
        for row in 0..self.rows {
            let from = self.row_bytes(row);
            for (index, column) in columns.iter().enumerate() {
                let to = (index * self.rows + row) * width;
                bytes[to..to + width].copy_from_slice(&from[column * width..][..width]);
            }
        }
        Self::owned(&self.name, columns.len(), self.rows, self.stored, bytes)
    }

    /// A copy in memory with these rows, in this order.
    ///
    /// # Panics
    /// If there is no such row.
    #[must_use]
    pub fn with_rows(&self, rows: &[usize]) -> Self {
        let bytes = rows.iter().flat_map(|row| self.row_bytes(*row));
        let bytes = bytes.copied().collect();
        Self::owned(&self.name, rows.len(), self.columns, self.stored, bytes)
    }

    /// Widens one row to f32, exactly. `out.len() == columns`.
    ///
    /// # Panics
    /// If there is no such row, or `out` has another length.
    pub fn read_row(&self, row: usize, out: &mut [f32]) {
        assert_eq!(out.len(), self.columns, "{}: columns", self.name);
        let bytes = self.row_bytes(row);
        match self.stored {
            StoredType::F32 => widen(bytes, out, f32::from_le_bytes),
            StoredType::F16 => widen(bytes, out, |b| f16::from_le_bytes(b).to_f32()),
            // Without a branch for NaN, so that the compiler vectorises the loop.
            StoredType::Bf16 => widen(bytes, out, |b| {
                f32::from_bits(u32::from(u16::from_le_bytes(b)) << 16)
            }),
        }
    }

    /// Widens elements of a row to f32: as many as `out` has, every `step`-th one from number
    /// `first` on.
    ///
    /// # Panics
    /// If the row or an element does not exist.
    pub(crate) fn read_columns(&self, row: usize, first: usize, step: usize, out: &mut [f32]) {
        let width = self.stored.element_bytes();
        let elements = self.row_bytes(row).chunks_exact(width).skip(first);
        let mut elements = elements.step_by(step);
        for value in out {
            let element = elements.next().expect("an element of the row");
            *value = self.stored.widen(element);
        }
    }

    /// Every element widened to f32.
    pub fn to_f32(&self) -> Vec<f32> {
        let mut out = vec![0.0; self.rows * self.columns];
        if self.columns > 0 {
            for (row, values) in out.chunks_exact_mut(self.columns).enumerate() {
                self.read_row(row, values);
            }
        }
        out
    }
}

fn widen<const N: usize>(bytes: &[u8], out: &mut [f32], from: impl Fn([u8; N]) -> f32) {
    let (elements, _) = bytes.as_chunks::<N>();
    for (value, element) in out.iter_mut().zip(elements) {
        *value = from(*element);
    }
}
