//! Numbers of four or eight bits, eight or four to a little-endian word of 32 bits.
//!
//! Owns: where in a file the number of some row and column is.
//! Never: knows what the numbers are for.
//! Invariant: every number of the shape is within the bytes, checked when it is made.

use super::map::Span;

/// Which index runs within a word.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Along {
    /// Rows of one column.
    Rows,
    /// Columns of one row.
    Columns,
}

/// Which of a word's numbers lies at which bits.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Arrangement {
    /// The first lies lowest.
    Straight,
    /// From the lowest bits on: 0, 2, 4, 6, 1, 3, 5, 7. Of four bits.
    Awq,
}

impl Arrangement {
    /// Where number `i` of a word begins.
    fn shift(self, i: usize, bits: u32) -> u32 {
        match self {
            Self::Straight => i as u32 * bits,
            Self::Awq => [0, 16, 4, 20, 8, 24, 12, 28][i],
        }
    }
}

/// A matrix `(rows, columns)` of such numbers. The words are a matrix too, row-major, of the shape that is left
/// when one index is divided by how many a word has, and may be turned: then its rows are the numbers' columns.
#[derive(Clone, Debug)]
pub(super) struct Numbers {
    words: Span,
    packing: Packing,
    /// Words from one row (or a word's rows) to the next, and from one column to the next.
    strides: (usize, usize),
    shape: (usize, usize),
}

/// How the words lie.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Packing {
    /// 4 or 8.
    pub(crate) bits: u32,
    pub(crate) along: Along,
    pub(crate) order: Arrangement,
    /// Whether the words' rows are the numbers' columns.
    pub(crate) is_turned: bool,
}

impl Packing {
    /// The same with numbers of eight bits.
    pub(crate) const fn of_bytes(self) -> Self {
        Self { bits: 8, ..self }
    }

    /// Numbers of a word.
    const fn each(self) -> usize {
        (u32::BITS / self.bits) as usize
    }

    /// The lowest number of a word that begins there.
    const fn mask(self) -> u32 {
        (1 << self.bits) - 1
    }

    /// Where number `i` of a word begins.
    fn shift(self, i: usize) -> u32 {
        self.order.shift(i, self.bits)
    }

    /// Shape of the words of so many numbers.
    pub(crate) fn words_shape(self, (rows, columns): (usize, usize)) -> [usize; 2] {
        let each = self.each();
        let (rows, columns) = match self.along {
            Along::Rows => (rows.div_ceil(each), columns),
            Along::Columns => (rows, columns.div_ceil(each)),
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
        let each = self.each();
        let mut words = vec![0u32; outer * inner];
        for row in 0..rows {
            for column in 0..columns {
                let (at_row, at_column, i) = match self.along {
                    Along::Rows => (row / each, column, row % each),
                    Along::Columns => (row, column / each, column % each),
                };
                let at = match self.is_turned {
                    true => at_column * inner + at_row,
                    false => at_row * inner + at_column,
                };
                words[at] |= (u32::from(number(row, column)) & self.mask()) << self.shift(i);
            }
        }
        words.into_iter().flat_map(u32::to_le_bytes).collect()
    }
}

/// Four bits, neighbours of a row, straight.
pub(crate) const ALONG_COLUMNS: Packing = Packing {
    bits: 4,
    along: Along::Columns,
    order: Arrangement::Straight,
    is_turned: false,
};
/// Four bits, neighbours of a column, straight.
pub(crate) const ALONG_ROWS: Packing = Packing {
    along: Along::Rows,
    ..ALONG_COLUMNS
};
/// As AWQ packs codes, and zero points.
pub(crate) const AWQ: Packing = Packing {
    bits: 4,
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

impl Numbers {
    /// `None` if the words have not the shape's size.
    pub(super) fn new(words: Span, packing: Packing, shape: (usize, usize)) -> Option<Self> {
        let [outer, inner] = packing.words_shape(shape);
        let is_whole = outer.checked_mul(inner)?.checked_mul(4)? == words.bytes().len();
        is_whole.then_some(Self {
            words,
            packing,
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
        let packing = self.packing;
        let (each, mask) = (packing.each(), packing.mask());
        match packing.along {
            Along::Rows => {
                let start = row / each * self.strides.0;
                let shift = packing.shift(row % each);
                for (number, column) in out.iter_mut().zip(first..) {
                    *number = (word(start + column * self.strides.1) >> shift & mask) as u8;
                }
            }
            Along::Columns => {
                let start = row * self.strides.0;
                for (number, column) in out.iter_mut().zip(first..) {
                    let all = word(start + column / each * self.strides.1);
                    *number = (all >> packing.shift(column % each) & mask) as u8;
                }
            }
        }
    }
}
