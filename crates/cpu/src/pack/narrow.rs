//! Weights of eight and four bits: as a checkpoint has them, or rounded from floats.
//!
//! Owns: which stacks are kept how, and rounding.
//! Never: rounds what a checkpoint has rounded already: its codes, scales and zero points are kept as they are, or the
//! stack is kept in floats.
//! Invariant: every instruction set makes the same codes, since weights of equal names must be equal.

use super::{Bench, CpuPack, PANEL, Source, brain};
use crate::kernel::BytesKernels;
use crate::kernel::product::groups::{Bits, Scales, Units};
use crate::kernel::product::halves::ELEMENT_WORDS;
use crate::memory::Parts;
use crate::options::Quantize;
use cleave_engine::checkpoint::{NarrowTensor, NarrowType, StoredMatrix};
use cleave_engine::ops::Precision;
use std::sync::atomic::Ordering;

/// Elements of groups that kernels know, the widest first: fewer scales are read.
pub(crate) const GROUPS: [usize; 3] = [128, 64, 32];
/// Elements of a step.
pub(crate) const PER_STEP: usize = 4;

/// How a stack is kept.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Kept {
    F32,
    Bf16,
    F16,
    /// A scale for each column.
    Int8,
    Groups(Units),
}

/// What eight-bit weights have for each column, `(panels × PANEL)`.
#[derive(Clone, Debug)]
pub(crate) struct Columns {
    /// What sums are multiplied with.
    pub(crate) scales: Vec<f32>,
    /// −128 × the sum of the codes, as bits of a whole number.
    pub(crate) starts: Vec<u32>,
}

/// The same, in parts.
pub(super) struct ColumnsParts<'a> {
    scales: Parts<'a, f32>,
    starts: Parts<'a, u32>,
}

impl Columns {
    pub(super) fn new(count: usize) -> Self {
        Self {
            scales: vec![0.0; count],
            starts: vec![0; count],
        }
    }

    pub(super) fn parts(&mut self) -> ColumnsParts<'_> {
        ColumnsParts {
            scales: Parts::new(&mut self.scales),
            starts: Parts::new(&mut self.starts),
        }
    }
}

impl<'a> ColumnsParts<'a> {
    /// # Safety
    /// As [`Parts::part`].
    pub(super) unsafe fn part(
        &self,
        range: std::ops::Range<usize>,
    ) -> (&'a mut [f32], &'a mut [u32]) {
        // SAFETY: as the caller promises.
        unsafe { (self.scales.part(range.clone()), self.starts.part(range)) }
    }
}

impl CpuPack {
    /// Says once that weights take more memory than their checkpoint or `--quantize` would have it.
    pub(super) fn tell_wider(&self, kept: Kept, stack: &[StoredMatrix]) {
        let narrow = stack.iter().find_map(|matrix| match matrix {
            StoredMatrix::Narrow(tensor) => Some(tensor),
            StoredMatrix::Dense(_) => None,
        });
        let wider = match (kept, narrow, stack.first()) {
            (Kept::F32 | Kept::Bf16 | Kept::F16, Some(tensor), _)
                if self.precision == Precision::Bf16 =>
            {
                Wider {
                    name: tensor.name(),
                    columns: tensor.columns(),
                    wanted: tensor.element().name(),
                    kept: self.precision.name(),
                }
            }
            (Kept::Int8, None, Some(first)) if self.quantize == Some(Quantize::Int4) => Wider {
                name: first.name(),
                columns: first.columns(),
                wanted: "int4",
                kept: "int8",
            },
            _ => return,
        };
        if !self.told_wider.swap(true, Ordering::Relaxed) {
            let Wider {
                name,
                columns,
                wanted,
                kept,
            } = wider;
            tracing::warn!(
                "{name} ({columns} columns) is kept in {kept} rather than {wanted}, and so are others like it, which takes more \
                 memory: products take int8, and int8 or int4 in groups of 32, 64 or 128 that divide the columns, \
                 alike in all projections of a layer that read the same; eight-bit floats never"
            );
        }
    }
}

/// The first matrix that takes more memory than was asked for.
struct Wider<'a> {
    name: &'a str,
    columns: usize,
    wanted: &'static str,
    kept: &'static str,
}

impl Kept {
    /// A stack of floats, rounded here.
    pub(super) fn quantized(quantize: Quantize, stack: &[StoredMatrix]) -> Self {
        let width = stack.first().map_or(0, StoredMatrix::columns);
        let group = GROUPS
            .into_iter()
            .find(|group| width.is_multiple_of(*group));
        match (quantize, group) {
            (Quantize::Int4, Some(group)) if width > 0 => Self::Groups(Units {
                bits: Bits::Four,
                steps: group / PER_STEP,
                scales: Scales::Brain,
                has_zeros: false,
            }),
            (Quantize::Int4 | Quantize::Int8, _) => Self::Int8,
        }
    }

    /// A stack as its checkpoint has it, if kernels can multiply with it.
    pub(super) fn narrow(stack: &[StoredMatrix]) -> Option<Self> {
        let tensors: Vec<&NarrowTensor> = stack
            .iter()
            .map(|matrix| match matrix {
                StoredMatrix::Narrow(tensor) => Some(&**tensor),
                StoredMatrix::Dense(_) => None,
            })
            .collect::<Option<_>>()?;
        let first = tensors.first()?;
        let (element, width) = (first.element(), first.columns());
        let group = first.group_columns()?;
        let is_alike = |tensor: &&NarrowTensor| {
            tensor.element() == element
                && tensor.group_columns().map(|group| group.min(width)) == Some(group.min(width))
        };
        if !tensors.iter().all(is_alike) {
            return None;
        }
        match element {
            NarrowType::Int8
                if group >= width && tensors.iter().all(|tensor| tensor.is_about(0)) =>
            {
                Some(Self::Int8)
            }
            NarrowType::Int8 => {
                // Wider groups are several that have the same scale.
                let fits = |each: &usize| group.min(width).is_multiple_of(*each);
                let each = GROUPS.into_iter().find(fits)?;
                let is_whole = width.is_multiple_of(each);
                is_whole.then(|| Self::Groups(units(&tensors, (Bits::Eight, each))))
            }
            NarrowType::Int4 if GROUPS.contains(&group) && width.is_multiple_of(group) => {
                Some(Self::Groups(units(&tensors, (Bits::Four, group))))
            }
            NarrowType::Int4 | NarrowType::E4m3 => None,
        }
    }

    /// Steps of so many elements.
    pub(super) const fn steps(self, width: usize) -> usize {
        match self {
            Self::F32 | Self::F16 => width,
            Self::Bf16 => width.div_ceil(2),
            Self::Int8 | Self::Groups(_) => width.div_ceil(PER_STEP),
        }
    }

    /// Words of a panel.
    pub(crate) const fn panel_words(self, width: usize) -> usize {
        let steps = self.steps(width);
        match self {
            Self::F32 | Self::Bf16 | Self::Int8 => steps * PANEL,
            Self::F16 => steps * ELEMENT_WORDS,
            Self::Groups(units) => units.words_of(steps),
        }
    }
}

/// What a stack's groups need: scales in full where bf16 has not all of them, zero points where any is another.
fn units(tensors: &[&NarrowTensor], (bits, group): (Bits, usize)) -> Units {
    let mut units = Units {
        bits,
        steps: group / PER_STEP,
        scales: Scales::Brain,
        has_zeros: false,
    };
    for tensor in tensors {
        for row in 0..tensor.rows() {
            for index in 0..tensor.columns() / group {
                let (scale, zero) = of_group(tensor, row, index * group);
                if scale.to_bits() & 0xffff != 0 {
                    units.scales = Scales::Single;
                }
                units.has_zeros |= zero != bits.middle();
            }
        }
    }
    units
}

/// Scale and zero point of the group that a column is in; the latter without sign, as codes are packed.
fn of_group(tensor: &NarrowTensor, row: usize, column: usize) -> (f32, u8) {
    let index = tensor.group_columns().map_or(0, |each| column / each);
    let zero = tensor.zero(row, index);
    let zero = match tensor.element() {
        NarrowType::Int8 => zero ^ Bits::Eight.middle(),
        NarrowType::Int4 | NarrowType::E4m3 => zero,
    };
    (tensor.scale(row, index), zero)
}

impl Bench {
    /// A panel of eight bits.
    pub(super) fn pack_bytes(
        &mut self,
        columns: &[Source<'_>],
        to: &mut [u32],
        (scales, starts): (&mut [f32], &mut [u32]),
    ) {
        let mut codes = vec![0; self.row.len()];
        let stride = self.stride;
        for (i, column) in columns.iter().enumerate() {
            let words = &mut self.words[i * stride..(i + 1) * stride];
            let Some((matrix, row)) = *column else {
                words.fill(0);
                continue;
            };
            scales[i] = match matrix {
                StoredMatrix::Narrow(tensor) if tensor.element() == NarrowType::Int8 => {
                    tensor.read_codes(row, 0, &mut codes);
                    tensor.scale(row, 0)
                }
                _ => {
                    matrix.read_row(row, &mut self.row);
                    // SAFETY: `BytesKernels::best` checked the instructions.
                    unsafe { (BytesKernels::best().round_int8)(&self.row, &mut codes) }
                }
            };
            let sum: i32 = codes.iter().map(|code| i32::from(code.cast_signed())).sum();
            starts[i] = sum.wrapping_mul(-128).cast_unsigned();
            put_codes(&codes, words);
        }
        self.interleave(to);
    }

    /// A panel of groups.
    pub(super) fn pack_groups(&mut self, columns: &[Source<'_>], units: Units, to: &mut [u32]) {
        let (width, stride) = (self.row.len(), self.stride);
        let group = units.steps * PER_STEP;
        let mut codes = vec![0; width];
        for (i, column) in columns.iter().enumerate() {
            let words = &mut self.words[i * stride..(i + 1) * stride];
            let Some((matrix, row)) = *column else {
                words.fill(0);
                continue;
            };
            match matrix {
                StoredMatrix::Narrow(tensor) if tensor.element() != NarrowType::E4m3 => {
                    tensor.read_codes(row, 0, &mut codes);
                    if units.bits == Bits::Eight {
                        // Two's complement to numbers without sign.
                        let middle = Bits::Eight.middle();
                        codes.iter_mut().for_each(|code| *code ^= middle);
                    }
                    for (g, unit) in to.chunks_exact_mut(units.words()).enumerate() {
                        let (scale, zero) = of_group(tensor, row, g * group);
                        put_scale(units, unit, i, scale);
                        put_zero(units, unit, i, zero);
                    }
                }
                _ => {
                    matrix.read_row(row, &mut self.row);
                    let parts = self
                        .row
                        .chunks_exact(group)
                        .zip(codes.chunks_exact_mut(group));
                    for ((x, codes), unit) in parts.zip(to.chunks_exact_mut(units.words())) {
                        // SAFETY: as above.
                        let scale = unsafe { (BytesKernels::best().round_int4)(x, codes) };
                        put_scale(units, unit, i, scale);
                        put_zero(units, unit, i, units.bits.middle());
                    }
                }
            }
            put_codes(&codes, words);
        }
        let mut spread = vec![0; width / PER_STEP * PANEL];
        self.interleave(&mut spread);
        let steps = to
            .chunks_exact_mut(units.words())
            .flat_map(|unit| unit[..units.scales_at()].chunks_exact_mut(units.step_words()));
        for (to, from) in steps.zip(spread.chunks_exact(PANEL)) {
            if units.bits == Bits::Eight {
                to.copy_from_slice(from);
                continue;
            }
            let (low, high) = from.split_at(units.step_words());
            for ((to, low), high) in to.iter_mut().zip(low).zip(high) {
                *to = low | high << 4;
            }
        }
    }
}

/// Codes as words, zeros after them.
fn put_codes(codes: &[u8], to: &mut [u32]) {
    to.fill(0);
    let (fours, rest) = codes.as_chunks::<PER_STEP>();
    for (to, four) in to.iter_mut().zip(fours) {
        *to = u32::from_le_bytes(*four);
    }
    if !rest.is_empty() {
        let mut last = [0; PER_STEP];
        last[..rest.len()].copy_from_slice(rest);
        to[fours.len()] = u32::from_le_bytes(last);
    }
}

fn put_scale(units: Units, unit: &mut [u32], column: usize, scale: f32) {
    let scales = &mut unit[units.scales_at()..units.zeros_at()];
    match units.scales {
        Scales::Single => scales[column] = scale.to_bits(),
        Scales::Brain => scales[column / 2] |= brain(scale) << (16 * (column % 2)),
    }
}

fn put_zero(units: Units, unit: &mut [u32], column: usize, zero: u8) {
    if units.has_zeros {
        unit[units.zeros_at() + column / 4] |= u32::from(zero) << (8 * (column % 4));
    }
}
