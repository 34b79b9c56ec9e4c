//! Numbers of four bits, eight to a little-endian word of 32 bits.
//!
//! Owns: where in a file the number of some row and column is.
//! Never: knows what the numbers are for.
//! Invariant: every number of the shape is within the bytes, checked when it is made.

use super::map::Span;

/// Which index runs within a word.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Along {
    /// Eight rows of one column.
    Rows,
    /// Eight columns of one row.
    Columns,
}

/// Which of the eight lies at which bits.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Arrangement {
    /// The first lies lowest.
    Straight,
    /// From the lowest bits on: 0, 2, 4, 6, 1, 3, 5, 7.
    Awq,
}

impl Arrangement {
    /// Where number `i` of the eight begins.
    fn shifts(self) -> [u32; 8] {
        match self {
            Self::Straight => [0, 4, 8, 12, 16, 20, 24, 28],
            Self::Awq => [0, 16, 4, 20, 8, 24, 12, 28],
        }
    }
}

/// A matrix `(rows, columns)` of such numbers. The words are a matrix too, row-major, of the shape that is left
/// when one index is divided by eight, and may be turned: then its rows are the numbers' columns.
#[derive(Clone, Debug)]
pub(super) struct Nibbles {
    words: Span,
    along: Along,
    shifts: [u32; 8],
    /// Words from one row to the next, and from one column (or eight) to the next.
    strides: (usize, usize),
    shape: (usize, usize),
}

/// How the words lie.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Packing {
    pub(crate) along: Along,
    pub(crate) order: Arrangement,
    /// Whether the words' rows are the numbers' columns.
    pub(crate) is_turned: bool,
}

impl Packing {
    /// Shape of the words of so many numbers.
    pub(crate) fn words_shape(self, (rows, columns): (usize, usize)) -> [usize; 2] {
        let (rows, columns) = match self.along {
            Along::Rows => (rows.div_ceil(8), columns),
            Along::Columns => (rows, columns.div_ceil(8)),
        };
        match self.is_turned {
            true => [columns, rows],
            false => [rows, columns],
        }
    }

    /// The words of so many numbers; what is missing in the last ones is zero.
    pub(crate) fn pack(
        self,
        (rows, columns): (usize, usize),
        number: impl Fn(usize, usize) -> u8,
    ) -> Vec<u8> {
        let [outer, inner] = self.words_shape((rows, columns));
        let shifts = self.order.shifts();
        let mut words = vec![0u32; outer * inner];
        for row in 0..rows {
            for column in 0..columns {
                let (at_row, at_column, i) = match self.along {
                    Along::Rows => (row / 8, column, row % 8),
                    Along::Columns => (row, column / 8, column % 8),
                };
                let at = match self.is_turned {
                    true => at_column * inner + at_row,
                    false => at_row * inner + at_column,
                };
                words[at] |= u32::from(number(row, column) & 15) << shifts[i];
            }
        }
        words.into_iter().flat_map(u32::to_le_bytes).collect()
    }
}

/// Eight columns of a row, straight.
pub(crate) const ALONG_COLUMNS: Packing = Packing {
    along: Along::Columns,
    order: Arrangement::Straight,
    is_turned: false,
};
/// Eight rows of a column, straight.
pub(crate) const ALONG_ROWS: Packing = Packing {
    along: Along::Rows,
    order: Arrangement::Straight,
    is_turned: false,
};
/// As AWQ packs codes, and zero points.
pub(crate) const AWQ: Packing = Packing {
    along: Along::Rows,
    order: Arrangement::Awq,
    is_turned: true,
};
/// As GPTQ packs codes.
pub(crate) const GPTQ_CODES: Packing = Packing {
    is_turned: true,
    ..ALONG_COLUMNS
};
/// As GPTQ packs zero points.
pub(crate) const GPTQ_ZEROS: Packing = Packing {
    is_turned: true,
    ..ALONG_ROWS
};

impl Nibbles {
    /// `None` if the words have not the shape's size.
    pub(super) fn new(words: Span, packing: Packing, shape: (usize, usize)) -> Option<Self> {
        let [outer, inner] = packing.words_shape(shape);
        let is_whole = outer.checked_mul(inner)?.checked_mul(4)? == words.bytes().len();
        is_whole.then_some(Self {
            words,
            along: packing.along,
            shifts: packing.order.shifts(),
            strides: match packing.is_turned {
                true => (1, inner),
                false => (inner, 1),
            },
            shape,
        })
    }

    pub(super) fn span(&self) -> &Span {
        &self.words
    }

    /// One number.
    pub(super) fn get(&self, row: usize, column: usize) -> u8 {
        let mut number = [0];
        self.read(row, column, &mut number);
        number[0]
    }

    /// A row's numbers from `first` on.
    ///
    /// # Panics
    /// If there are not so many.
    pub(super) fn read(&self, row: usize, first: usize, out: &mut [u8]) {
        let (rows, columns) = self.shape;
        assert!(
            row < rows && first + out.len() <= columns,
            "numbers of {rows} × {columns}"
        );
        let (words, _) = self.words.bytes().as_chunks::<4>();
        let word = |at: usize| u32::from_le_bytes(words[at]);
        match self.along {
            Along::Rows => {
                let (start, shift) = (row / 8 * self.strides.0, self.shifts[row % 8]);
                for (number, column) in out.iter_mut().zip(first..) {
                    *number = (word(start + column * self.strides.1) >> shift & 15) as u8;
                }
            }
            Along::Columns => {
                let start = row * self.strides.0;
                for (number, column) in out.iter_mut().zip(first..) {
                    let eight = word(start + column / 8 * self.strides.1);
                    *number = (eight >> self.shifts[column % 8] & 15) as u8;
                }
            }
        }
    }
}
