//! Quantised weights as the kernels of `kernels/matmul/narrow.cu` take them.
//!
//! Owns: which stacks of them fit a kernel, and how codes and scales are laid out (`WeightLayout` of
//! `kernels/matmul/matmul.cuh`).
//! Never: rounds a code: only scales of groups are, to 16 bits of fraction, where they have more.
//! Invariant: a column's elements stay in order, so what is summed with what is the kernel's business alone.

use cleave_engine::checkpoint::{NarrowTensor, NarrowType, StoredMatrix};
use std::sync::Arc;

/// Columns of a group that kernels know, the widest first: fewer scales are read.
const GROUPS: [usize; 3] = [128, 64, 32];
/// Elements of the narrowest load of eight-bit codes.
const BYTES_EACH: usize = 16;
/// Elements of the narrowest load of four-bit codes.
const NIBBLES_EACH: usize = 32;

/// What a kernel multiplies with.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Format {
    /// e4m3, a scale for each column of the result.
    Fp8,
    /// e4m3, a scale for each group.
    Fp8Groups,
    /// Two's complement, a scale for each column of the result.
    Int8,
    /// Scales and zero points for groups.
    Int4,
}

impl Format {
    pub(crate) const ALL: [Self; 4] = [Self::Fp8, Self::Fp8Groups, Self::Int8, Self::Int4];

    /// As kernels' names end.
    pub(crate) const fn name(self) -> &'static str {
        match self {
            Self::Fp8 => "fp8",
            Self::Fp8Groups => "fp8_groups",
            Self::Int8 => "int8",
            Self::Int4 => "int4",
        }
    }
}

/// A stack of quantised tensors as one matrix.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Narrow {
    pub(crate) format: Format,
    /// Rows of the stack.
    pub(crate) columns: usize,
    pub(crate) width: usize,
    /// Elements that share a scale, for formats of groups.
    pub(crate) group: Option<usize>,
}

impl Narrow {
    /// How kernels take a stack.
    ///
    /// # Errors
    /// Why they do not.
    pub(crate) fn of(stack: &[StoredMatrix]) -> Result<Self, String> {
        let mut tensors = Vec::new();
        for matrix in stack {
            match matrix {
                StoredMatrix::Narrow(tensor) => tensors.push(tensor),
                StoredMatrix::Dense(tensor) => {
                    return Err(format!("{} beside it is not quantised", tensor.name()));
                }
            }
        }
        let Some(first) = tensors.first() else {
            return Err("nothing to multiply with".to_owned());
        };
        let (element, width) = (first.element(), first.columns());
        if tensors.iter().any(|tensor| tensor.element() != element) {
            return Err("the tensors beside it are quantised otherwise".to_owned());
        }
        let groups: Option<Vec<usize>> = tensors.iter().map(|t| t.group_columns()).collect();
        let Some(groups) = groups else {
            return Err("its groups are of columns that do not follow one another".to_owned());
        };
        let is_whole = groups.iter().all(|group| *group >= width);
        let format = match (element, is_whole) {
            (NarrowType::E4m3, true) => Format::Fp8,
            (NarrowType::E4m3, false) => Format::Fp8Groups,
            (NarrowType::Int8, true) if !tensors.iter().all(|tensor| tensor.is_about(0)) => {
                return Err("no kernel has int8 with zero points".to_owned());
            }
            (NarrowType::Int8, true) => Format::Int8,
            (NarrowType::Int4, _) => Format::Int4,
            (NarrowType::Int8, false) => return Err("no kernel has int8 in groups".to_owned()),
        };
        let group = match format {
            Format::Fp8 | Format::Int8 if width.is_multiple_of(BYTES_EACH) => None,
            Format::Fp8 | Format::Int8 => {
                return Err(format!("{width} columns are no multiple of {BYTES_EACH}"));
            }
            Format::Fp8Groups | Format::Int4 => Some(kernel_group(&groups, width)?),
        };
        Ok(Self {
            format,
            columns: tensors.iter().map(|tensor| tensor.rows()).sum(),
            width,
            group,
        })
    }

    /// Bytes of a row of codes.
    pub(crate) fn row_bytes(&self) -> usize {
        match self.format {
            Format::Fp8 | Format::Fp8Groups | Format::Int8 => self.width,
            Format::Int4 => self.width / 2,
        }
    }

    /// Bytes of all codes.
    pub(crate) fn weight_bytes(&self) -> usize {
        self.columns * self.row_bytes()
    }

    /// Words of all scales.
    pub(crate) fn scales_count(&self) -> usize {
        match self.group {
            None => self.columns,
            Some(group) => self.width / group * self.columns.next_multiple_of(4),
        }
    }

    /// Scales of the stack: `(columns)`, or `(groups, columns rounded up to 4)` with zero points.
    pub(crate) fn scales(&self, stack: &[StoredMatrix]) -> Vec<u32> {
        let mut words = vec![0; self.scales_count()];
        let stride = self.columns.next_multiple_of(4);
        let mut column = 0;
        for matrix in stack {
            let StoredMatrix::Narrow(tensor) = matrix else {
                continue;
            };
            for row in 0..tensor.rows() {
                match self.group {
                    None => words[column] = tensor.scale(row, 0).to_bits(),
                    Some(group) => {
                        let each = tensor.group_columns().unwrap_or(group);
                        for index in 0..self.width / group {
                            let of = index * group / each;
                            words[index * stride + column] =
                                group_word(tensor.scale(row, of), tensor.zero(row, of));
                        }
                    }
                }
                column += 1;
            }
        }
        words
    }

    /// One row's codes in the kernels' order.
    pub(crate) fn pack_row(&self, tensor: &NarrowTensor, row: usize, out: &mut [u8]) {
        let each = match self.format {
            Format::Fp8 | Format::Fp8Groups | Format::Int8 => BYTES_EACH,
            Format::Int4 => NIBBLES_EACH,
        };
        let mut codes = [0; NIBBLES_EACH];
        for (index, to) in out.as_chunks_mut::<16>().0.iter_mut().enumerate() {
            let codes = &mut codes[..each];
            tensor.read_codes(row, index * each, codes);
            for (c, four) in to.as_chunks_mut::<4>().0.iter_mut().enumerate() {
                *four = match self.format {
                    Format::Fp8 | Format::Fp8Groups | Format::Int8 => {
                        [2 * c, 2 * c + 1, 2 * c + 8, 2 * c + 9].map(|at| codes[at])
                    }
                    Format::Int4 => nibbles_word(codes, c).to_le_bytes(),
                };
            }
        }
    }
}

/// Word `c` of 32 four-bit codes.
fn nibbles_word(codes: &[u8], c: usize) -> u32 {
    let shifted = |at: usize, i: usize| u32::from(codes[at]) << (4 * i);
    let even = (0..4).map(|i| shifted(2 * c + 8 * i, i));
    let odd = (0..4).map(|i| shifted(2 * c + 1 + 8 * i, i + 4));
    even.chain(odd).fold(0, |word, code| word | code)
}

/// The widest group that divides the row and every group of the tensors.
fn kernel_group(groups: &[usize], width: usize) -> Result<usize, String> {
    let divides = |group: &usize| {
        let divides_all = |each: &usize| *each >= width || each.is_multiple_of(*group);
        width.is_multiple_of(*group) && groups.iter().all(divides_all)
    };
    GROUPS.into_iter().find(divides).ok_or_else(|| {
        format!("{width} columns in groups of {groups:?} cannot be cut into groups of 32")
    })
}

/// A scale with its zero point in the lowest byte, which costs a scale of f32 what it had there.
fn group_word(scale: f32, zero: u8) -> u32 {
    ((scale.to_bits() + 0x80) & !0xff) | u32::from(zero)
}

/// A tensor to be packed so.
#[derive(Clone, Debug)]
pub(crate) struct Packing {
    pub(crate) tensor: Arc<NarrowTensor>,
    pub(crate) narrow: Narrow,
}
