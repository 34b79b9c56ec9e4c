//! Quantised weights in the layout that the kernels of `kernels/matmul/narrow.cu` read.
//!
//! Owns: the check whether a stack of them fits a kernel, and the layout of codes and scales
//! (`WeightLayout` of `kernels/matmul/matmul.cuh`).
//! Never: rounds a code. Only the scales of int4 groups are rounded, to 16 bits of fraction.
//! Invariant: a column's elements stay in order, so the kernel alone decides the order of sums.

use cleave_checkpoint::rounding::RoundedForm;
use cleave_checkpoint::{QuantizedTensor, QuantizedType, StoredMatrix};
use cleave_engine::ops::InnerSlices;
use std::sync::Arc;

/// The group sizes that kernels take, in columns, the widest first because it reads the fewest
/// scales.
const GROUPS: [usize; 3] = [128, 64, 32];
/// The group size of NVFP4, in columns.
const NARROW_GROUP: usize = 16;
/// Elements of one 16-byte load of eight-bit codes.
const BYTE_CODES_PER_LOAD: usize = 16;
/// Elements of one 16-byte load of four-bit codes.
const NIBBLE_CODES_PER_LOAD: usize = 32;

/// The formats of weights that kernels multiply with.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum QuantizedFormat {
    /// e4m3 with a scale for each column of the result.
    Fp8,
    /// e4m3 with a scale for each group.
    Fp8Groups,
    /// Two's complement with a scale for each column of the result.
    Int8,
    /// Four bits with a scale and a zero point for each group.
    Int4,
    /// e2m1 with a scale for each group.
    Fp4,
    /// e2m1 with a scale for each group of 16 elements.
    Nvfp4,
}

impl QuantizedFormat {
    pub(crate) const ALL: [Self; 6] = [
        Self::Fp8,
        Self::Fp8Groups,
        Self::Int8,
        Self::Int4,
        Self::Fp4,
        Self::Nvfp4,
    ];

    /// Returns the ending of the kernels' names.
    pub(crate) const fn name(self) -> &'static str {
        match self {
            Self::Fp8 => "fp8",
            Self::Fp8Groups => "fp8_groups",
            Self::Int8 => "int8",
            Self::Int4 => "int4",
            Self::Fp4 => "fp4",
            Self::Nvfp4 => "nvfp4",
        }
    }

    /// Returns the elements of one 16-byte load.
    const fn codes_per_load(self) -> usize {
        match self {
            Self::Fp8 | Self::Fp8Groups | Self::Int8 => BYTE_CODES_PER_LOAD,
            Self::Int4 | Self::Fp4 | Self::Nvfp4 => NIBBLE_CODES_PER_LOAD,
        }
    }

    /// Returns a group's scale, and its zero point in a format that has them, as kernels take it.
    fn group_word(self, scale: f32, zero: u8) -> u32 {
        match self {
            Self::Int4 => ((scale.to_bits() + 0x80) & !0xff) | u32::from(zero),
            Self::Fp8 | Self::Fp8Groups | Self::Int8 | Self::Fp4 | Self::Nvfp4 => scale.to_bits(),
        }
    }
}

/// A stack of quantised tensors as one matrix.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct QuantizedStack {
    pub(crate) format: QuantizedFormat,
    /// Rows of the stack.
    pub(crate) columns: usize,
    pub(crate) width: usize,
    /// Elements of a column that share a scale, in formats with groups.
    pub(crate) group: Option<usize>,
}

/// Properties of a stack of quantised tensors that decide its layout.
struct StackFacts {
    element: QuantizedType,
    /// Columns that share a scale, of each tensor.
    groups: Vec<usize>,
    /// Rows of all tensors.
    rows: usize,
    /// Whether codes of whole rows have zero points.
    has_zero_points: bool,
}

impl QuantizedStack {
    /// Returns the layout in which kernels take a stack, whose slices are whole groups.
    ///
    /// # Errors
    /// If no kernel takes the stack; the text gives the reason.
    pub(crate) fn of(stack: &[StoredMatrix], slices: &InnerSlices) -> Result<Self, String> {
        let mut tensors = Vec::new();
        for matrix in stack {
            match matrix {
                StoredMatrix::Quantized(tensor) => tensors.push(tensor),
                StoredMatrix::Dense(tensor) => {
                    return Err(format!(
                        "{}, in the same stack, is not quantised",
                        tensor.name()
                    ));
                }
            }
        }
        let Some(first) = tensors.first() else {
            return Err("the stack is empty".to_owned());
        };
        let (element, width) = (first.element(), first.columns());
        if tensors.iter().any(|tensor| tensor.element() != element) {
            return Err("the tensors of its stack are quantised in different formats".to_owned());
        }
        let groups: Option<Vec<usize>> = tensors.iter().map(|t| t.group_columns()).collect();
        let Some(groups) = groups else {
            return Err("the columns of its groups are not contiguous".to_owned());
        };
        let is_whole = groups.iter().all(|group| *group >= width);
        Self::of_facts(
            &StackFacts {
                element,
                groups,
                rows: tensors.iter().map(|tensor| tensor.rows()).sum(),
                has_zero_points: element == QuantizedType::Int8
                    && is_whole
                    && !tensors.iter().all(|tensor| tensor.has_zero_point(0)),
            },
            slices,
        )
    }

    /// Returns the layout of a dense stack of so many rows that is rounded to a format.
    ///
    /// # Errors
    /// As [`QuantizedStack::of`].
    pub(crate) fn rounded(
        form: RoundedForm,
        rows: usize,
        slices: &InnerSlices,
    ) -> Result<Self, String> {
        let facts = StackFacts {
            element: form.element(),
            groups: vec![form.group(slices.elements().len())],
            rows,
            has_zero_points: false,
        };
        Self::of_facts(&facts, slices)
    }

    fn of_facts(facts: &StackFacts, slices: &InnerSlices) -> Result<Self, String> {
        let StackFacts {
            element,
            groups,
            rows,
            has_zero_points,
        } = facts;
        let width = slices.elements().len();
        let is_whole = groups.iter().all(|group| *group >= width);
        let format = match (element, is_whole) {
            (QuantizedType::E4m3, true) => QuantizedFormat::Fp8,
            (QuantizedType::E4m3, false) => QuantizedFormat::Fp8Groups,
            (QuantizedType::Int8, true) if *has_zero_points => {
                return Err("no kernel has int8 with zero points".to_owned());
            }
            (QuantizedType::Int8, true) => QuantizedFormat::Int8,
            (QuantizedType::Int4, _) => QuantizedFormat::Int4,
            (QuantizedType::Int8, false) => return Err("no kernel has int8 in groups".to_owned()),
            (QuantizedType::E2m1, _) => {
                let are_wide = kernel_group(groups, width, slices).is_ok();
                if are_wide {
                    QuantizedFormat::Fp4
                } else {
                    QuantizedFormat::Nvfp4
                }
            }
        };
        let group = match format {
            QuantizedFormat::Fp8 | QuantizedFormat::Int8
                if width.is_multiple_of(BYTE_CODES_PER_LOAD) =>
            {
                None
            }
            QuantizedFormat::Fp8 | QuantizedFormat::Int8 => {
                return Err(format!(
                    "{width} columns are no multiple of {BYTE_CODES_PER_LOAD}"
                ));
            }
            QuantizedFormat::Fp8Groups | QuantizedFormat::Int4 | QuantizedFormat::Fp4 => {
                Some(kernel_group(groups, width, slices)?)
            }
            QuantizedFormat::Nvfp4 => Some(narrow_group(groups, width, slices)?),
        };
        Ok(Self {
            format,
            columns: *rows,
            width,
            group,
        })
    }

    /// Returns the size of a row of codes in bytes.
    pub(crate) fn row_bytes(&self) -> usize {
        self.width * 16 / self.format.codes_per_load()
    }

    /// Returns the size of all codes in bytes.
    pub(crate) fn weight_bytes(&self) -> usize {
        self.columns * self.row_bytes()
    }

    /// Returns the size of codes and scales in bytes.
    pub(crate) fn bytes(&self) -> usize {
        self.weight_bytes() + self.scales_count() * size_of::<u32>()
    }

    /// Returns the number of words that all scales take.
    pub(crate) fn scales_count(&self) -> usize {
        match self.group {
            None => self.columns,
            Some(group) => self.width / group * self.columns.next_multiple_of(4),
        }
    }

    /// Returns the scales of the stack: `(columns)`, or `(groups, columns rounded up to 4)` with
    /// zero points.
    pub(crate) fn scales(&self, stack: &[StoredMatrix]) -> Vec<u32> {
        let mut words = vec![0; self.scales_count()];
        let stride = self.columns.next_multiple_of(4);
        let mut column = 0;
        for matrix in stack {
            let StoredMatrix::Quantized(tensor) = matrix else {
                continue;
            };
            for row in 0..tensor.rows() {
                match self.group {
                    None => words[column] = tensor.scale(row, 0).to_bits(),
                    Some(group) => {
                        let each = tensor.group_columns().unwrap_or(group);
                        for index in 0..self.width / group {
                            let of = index * group / each;
                            let (scale, zero) = (tensor.scale(row, of), tensor.zero(row, of));
                            words[index * stride + column] = self.format.group_word(scale, zero);
                        }
                    }
                }
                column += 1;
            }
        }
        words
    }

    /// Writes one row's codes in the kernels' order.
    pub(crate) fn pack_row(&self, tensor: &QuantizedTensor, row: usize, out: &mut [u8]) {
        let each = self.format.codes_per_load();
        let mut codes = [0; NIBBLE_CODES_PER_LOAD];
        for (index, to) in out.as_chunks_mut::<16>().0.iter_mut().enumerate() {
            let codes = &mut codes[..each];
            tensor.read_codes(row, index * each, codes);
            for (c, four) in to.as_chunks_mut::<4>().0.iter_mut().enumerate() {
                *four = if each == BYTE_CODES_PER_LOAD {
                    // Thread `c` of four finds the elements of its mma fragment in one word.
                    [2 * c, 2 * c + 1, 2 * c + 8, 2 * c + 9].map(|at| codes[at])
                } else {
                    nibbles_word(codes, c).to_le_bytes()
                };
            }
        }
    }
}

/// Returns word `c` of 32 four-bit codes: the even elements in its lower half, the odd ones in its
/// upper half.
fn nibbles_word(codes: &[u8], c: usize) -> u32 {
    let shifted = |at: usize, i: usize| u32::from(codes[at]) << (4 * i);
    let even = (0..4).map(|i| shifted(2 * c + 8 * i, i));
    let odd = (0..4).map(|i| shifted(2 * c + 1 + 8 * i, i + 4));
    even.chain(odd).fold(0, |word, code| word | code)
}

/// Returns the widest group that divides every slice and every group of the tensors.
fn kernel_group(groups: &[usize], width: usize, slices: &InnerSlices) -> Result<usize, String> {
    let divides = |group: &usize| {
        let divides_all = |each: &usize| *each >= width || each.is_multiple_of(*group);
        slices.are_multiples_of(*group) && groups.iter().all(divides_all)
    };
    GROUPS.into_iter().find(divides).ok_or_else(|| {
        format!("{width} columns in groups of {groups:?} cannot be cut into groups of 32")
    })
}

/// Returns the group of NVFP4 if it divides every group of the tensors, and a load divides every
/// slice.
fn narrow_group(groups: &[usize], width: usize, slices: &InnerSlices) -> Result<usize, String> {
    let are_groups = groups.iter().all(|each| each.is_multiple_of(NARROW_GROUP));
    if are_groups && slices.are_multiples_of(NIBBLE_CODES_PER_LOAD) {
        return Ok(NARROW_GROUP);
    }
    Err(format!(
        "{width} columns in groups of {groups:?} cannot be cut into groups of 16 and loads of {NIBBLE_CODES_PER_LOAD}"
    ))
}

/// A tensor to be packed in this layout.
#[derive(Clone, Debug)]
pub(crate) struct RowPacking {
    pub(crate) tensor: Arc<QuantizedTensor>,
    pub(crate) stack: QuantizedStack,
}
