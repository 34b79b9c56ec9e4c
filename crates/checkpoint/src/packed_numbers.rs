//! Matrices of numbers of four or eight bits, packed eight or four to a little-endian word of 32
//! bits.
//!
//! Owns: the position in a file of each number.
//! Never: knows the purpose of the numbers.
//! Invariant: every number of the shape is within the bytes, checked on construction.

use super::map::FileSpan;
use std::ops::Range;

/// Index that runs within a word.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum PackedAxis {
    /// Rows of one column.
    Rows,
    /// Columns of one row.
    Columns,
}

/// Order of the numbers in a word's bits.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum PackedOrder {
    /// The first number has the lowest bits.
    Sequential,
    /// Numbers 0, 2, 4, 6, 1, 3, 5, 7 from the lowest bits on; four bits each.
    Awq,
}

impl PackedOrder {
    /// Lowest bit of a word's number `i`.
    fn shift(self, i: usize, bits: u32) -> u32 {
        match self {
            Self::Sequential => i as u32 * bits,
            Self::Awq => [0, 16, 4, 20, 8, 24, 12, 28][i],
        }
    }
}

/// A matrix `(rows, columns)` of packed numbers. Its words form a row-major matrix: the same shape
/// with one index divided by the numbers per word, possibly transposed.
#[derive(Clone, Debug)]
pub(super) struct PackedNumbers {
    words: FileSpan,
    packing: WordPacking,
    /// Distance in words between neighbouring rows (or groups of rows that share a word), and
    /// between neighbouring columns.
    strides: (usize, usize),
    shape: (usize, usize),
}

/// Packing of numbers into words.
#[derive(Clone, Copy, Debug)]
pub(crate) struct WordPacking {
    /// Bits of a number: 4 or 8.
    pub(crate) bits: u32,
    pub(crate) axis: PackedAxis,
    pub(crate) order: PackedOrder,
    /// Whether the matrix of words is transposed.
    pub(crate) is_transposed: bool,
}

impl WordPacking {
    /// The same packing with numbers of eight bits.
    pub(crate) const fn with_eight_bits(self) -> Self {
        Self { bits: 8, ..self }
    }

    /// Numbers that one word holds.
    const fn numbers_per_word(self) -> usize {
        (u32::BITS / self.bits) as usize
    }

    /// Mask of a number in the lowest bits.
    const fn mask(self) -> u32 {
        (1 << self.bits) - 1
    }

    /// Lowest bit of a word's number `i`.
    fn shift(self, i: usize) -> u32 {
        self.order.shift(i, self.bits)
    }

    /// Shape of the matrix of words for this shape of numbers.
    pub(crate) fn words_shape(self, rows: usize, columns: usize) -> [usize; 2] {
        let each = self.numbers_per_word();
        let (rows, columns) = match self.axis {
            PackedAxis::Rows => (rows.div_ceil(each), columns),
            PackedAxis::Columns => (rows, columns.div_ceil(each)),
        };
        if self.is_transposed {
            [columns, rows]
        } else {
            [rows, columns]
        }
    }

    /// Packs numbers into words; missing numbers of the last words are zero.
    pub(crate) fn pack(
        self,
        rows: usize,
        columns: usize,
        number: impl Fn(usize, usize) -> u8,
    ) -> Vec<u8> {
        let [outer, inner] = self.words_shape(rows, columns);
        let each = self.numbers_per_word();
        let mut words = vec![0u32; outer * inner];
        for row in 0..rows {
            for column in 0..columns {
                let (at_row, at_column, i) = match self.axis {
                    PackedAxis::Rows => (row / each, column, row % each),
                    PackedAxis::Columns => (row, column / each, column % each),
                };
                let at = if self.is_transposed {
                    at_column * inner + at_row
                } else {
                    at_row * inner + at_column
                };
                words[at] |= (u32::from(number(row, column)) & self.mask()) << self.shift(i);
            }
        }
        words.into_iter().flat_map(u32::to_le_bytes).collect()
    }
}

/// Four bits; a word has neighbours of a row, in order.
pub(crate) const ALONG_COLUMNS: WordPacking = WordPacking {
    bits: 4,
    axis: PackedAxis::Columns,
    order: PackedOrder::Sequential,
    is_transposed: false,
};
/// Four bits; a word has neighbours of a column, in order.
pub(crate) const ALONG_ROWS: WordPacking = WordPacking {
    axis: PackedAxis::Rows,
    ..ALONG_COLUMNS
};
/// AWQ's packing of codes and of zero points.
pub(crate) const AWQ: WordPacking = WordPacking {
    bits: 4,
    axis: PackedAxis::Rows,
    order: PackedOrder::Awq,
    is_transposed: true,
};
/// GPTQ's packing of codes.
pub(crate) const GPTQ_CODES: WordPacking = WordPacking {
    is_transposed: true,
    ..ALONG_COLUMNS
};
/// GPTQ's packing of zero points.
pub(crate) const GPTQ_ZEROS: WordPacking = WordPacking {
    is_transposed: true,
    ..ALONG_ROWS
};

impl PackedNumbers {
    /// `None` if the words do not have the shape's size.
    pub(super) fn new(
        words: FileSpan,
        packing: WordPacking,
        shape: (usize, usize),
    ) -> Option<Self> {
        let [outer, inner] = packing.words_shape(shape.0, shape.1);
        let is_whole = outer.checked_mul(inner)?.checked_mul(4)? == words.bytes().len();
        is_whole.then_some(Self {
            words,
            packing,
            strides: if packing.is_transposed {
                (1, inner)
            } else {
                (inner, 1)
            },
            shape,
        })
    }

    /// Every `step`th of these rows; `None` if a word has numbers of several rows, or there are no
    /// such rows.
    pub(super) fn rows(&self, rows: Range<usize>, step: usize) -> Option<Self> {
        let along_rows = self.packing.axis == PackedAxis::Columns && !self.packing.is_transposed;
        let width = 4 * self.strides.0;
        Some(Self {
            words: self.words.part(rows.start * width..rows.end * width)?,
            packing: self.packing,
            strides: (self.strides.0 * step, self.strides.1),
            shape: (rows.len().div_ceil(step), self.shape.1),
        })
        .filter(|_| along_rows)
    }

    /// Bytes from a row to the next, where words have numbers of one row.
    pub(super) fn row_bytes(&self) -> usize {
        4 * self.strides.0
    }

    pub(super) fn span(&self) -> &FileSpan {
        &self.words
    }

    /// The number at this row and column.
    pub(super) fn get(&self, row: usize, column: usize) -> u8 {
        let mut number = [0];
        self.read(row, column, &mut number);
        number[0]
    }

    /// A row's numbers from `first` on.
    ///
    /// # Panics
    /// If the row has fewer numbers.
    pub(super) fn read(&self, row: usize, first: usize, out: &mut [u8]) {
        let (rows, columns) = self.shape;
        assert!(
            row < rows && first + out.len() <= columns,
            "numbers of {rows} × {columns}"
        );
        let (words, _) = self.words.bytes().as_chunks::<4>();
        let word = |at: usize| u32::from_le_bytes(words[at]);
        let packing = self.packing;
        let (each, mask) = (packing.numbers_per_word(), packing.mask());
        match packing.axis {
            PackedAxis::Rows => {
                let start = row / each * self.strides.0;
                let shift = packing.shift(row % each);
                for (number, column) in out.iter_mut().zip(first..) {
                    *number = (word(start + column * self.strides.1) >> shift & mask) as u8;
                }
            }
            PackedAxis::Columns => {
                let start = row * self.strides.0;
                for (number, column) in out.iter_mut().zip(first..) {
                    let all = word(start + column / each * self.strides.1);
                    *number = (all >> packing.shift(column % each) & mask) as u8;
                }
            }
        }
    }
}
