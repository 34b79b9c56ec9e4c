//! Weights of eight and four bits: from a quantised checkpoint, or rounded from floats at load.
//!
//! Owns: the choice of each stack's format, and rounding.
//! Never: requantises a quantised weight: its codes, scales and zero points are kept as they are,
//! or the stack is dequantised to floats.
//! Invariant: every instruction set gives the same codes, since weights of the same fingerprint
//! must be equal.

use super::groups::{StoredGroup, column_factor, group_layout_of};
use super::{ColumnSource, CpuWeightLoader, PANEL, PanelPacker, SourceRow};
use cleave_checkpoint::rounding::{self, RoundedForm};
use cleave_checkpoint::{QuantizedTensor, QuantizedType, StoredMatrix};
use cleave_cpu_kernels::kernel::IntegerKernels;
use cleave_cpu_kernels::kernel::product::groups::{GroupCodes, GroupLayout, ScaleFormat};
use cleave_cpu_kernels::kernel::product::halves::ELEMENT_WORDS;
use cleave_engine::ops::{InnerSlices, Precision, Quantize};
use std::sync::atomic::Ordering;

/// Group sizes that kernels support, the largest first: it reads the fewest scales.
const GROUPS: [usize; 3] = [128, 64, 32];
/// Group sizes of four-bit floats: those of MXFP4 and NVFP4.
const FLOAT_GROUPS: [usize; 2] = [32, 16];
/// Elements of the inner dimension per step.
pub(crate) const PER_STEP: usize = 4;

/// Group sizes that kernels support with these codes.
pub(crate) const fn groups_of(codes: GroupCodes) -> &'static [usize] {
    match codes {
        GroupCodes::Four | GroupCodes::Eight => &GROUPS,
        GroupCodes::Float4 => &FLOAT_GROUPS,
    }
}

/// Format of a packed stack.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum StackForm {
    F32,
    Bf16,
    F16,
    /// A scale per column.
    Int8,
    Groups(GroupLayout),
}

impl CpuWeightLoader {
    /// Warns once if weights take more memory than their checkpoint's format or `--quantize` would.
    pub(super) fn warn_if_wider(&self, stack_form: StackForm, stack: &[StoredMatrix]) {
        let quantized = stack.iter().find_map(|matrix| match matrix {
            StoredMatrix::Quantized(tensor) => Some(tensor),
            StoredMatrix::Dense(_) => None,
        });
        let wider = match (stack_form, quantized, stack.first()) {
            (StackForm::F32 | StackForm::Bf16 | StackForm::F16, Some(tensor), _)
                if self.precision == Precision::Bf16 =>
            {
                WiderThanRequested {
                    name: tensor.name(),
                    columns: tensor.columns(),
                    requested: tensor.element().name(),
                    packed_as: self.precision.name(),
                }
            }
            (StackForm::Int8, None, Some(first)) if self.quantize != Some(Quantize::Int8) => {
                WiderThanRequested {
                    name: first.name(),
                    columns: first.columns(),
                    requested: self.quantize.map_or("int8", Quantize::name),
                    packed_as: "int8",
                }
            }
            _ => return,
        };
        if !self.warned_wider.swap(true, Ordering::Relaxed) {
            let WiderThanRequested {
                name,
                columns,
                requested,
                packed_as,
            } = wider;
            tracing::warn!(
                "{name} ({columns} columns) is kept in {packed_as} rather than {requested}, and so are others like it, which takes more \
                 memory: products take int8, and int8 or int4 in groups of 32, 64 or 128, and fp4 in groups of 16 or 32, that divide the columns, \
                 alike in all projections of a layer that read the same; eight-bit floats never"
            );
        }
    }
}

/// The first matrix that takes more memory than requested.
struct WiderThanRequested<'a> {
    name: &'a str,
    columns: usize,
    requested: &'static str,
    packed_as: &'static str,
}

impl StackForm {
    /// Format of a dense stack that is rounded at load.
    pub(super) fn rounded_at_load(form: RoundedForm) -> Self {
        let groups = |codes, group, scales| {
            Self::Groups(GroupLayout {
                codes,
                steps: group / PER_STEP,
                scales,
                has_zeros: false,
            })
        };
        match form {
            RoundedForm::Int8 => Self::Int8,
            RoundedForm::Int4 { group } => groups(GroupCodes::Four, group, ScaleFormat::Bf16),
            RoundedForm::Mxfp4 => groups(GroupCodes::Float4, rounding::MX_GROUP, ScaleFormat::Bf16),
            RoundedForm::Nvfp4 => groups(GroupCodes::Float4, rounding::NV_GROUP, ScaleFormat::E4m3),
            RoundedForm::Fp8 => unreachable!("`supports` refuses fp8"),
        }
    }

    /// Format of a quantised stack as its checkpoint has it; `None` if kernels cannot multiply with
    /// it. Slices are whole groups.
    pub(super) fn of_checkpoint(stack: &[StoredMatrix], slices: &InnerSlices) -> Option<Self> {
        let tensors: Vec<&QuantizedTensor> = stack
            .iter()
            .map(|matrix| match matrix {
                StoredMatrix::Quantized(tensor) => Some(&**tensor),
                StoredMatrix::Dense(_) => None,
            })
            .collect::<Option<_>>()?;
        let first = tensors.first()?;
        let (element, width) = (first.element(), first.columns());
        let group = first.group_columns()?;
        let is_alike = |tensor: &&QuantizedTensor| {
            tensor.element() == element
                && tensor.group_columns().map(|group| group.min(width)) == Some(group.min(width))
        };
        if !tensors.iter().all(is_alike) {
            return None;
        }
        match element {
            QuantizedType::Int8
                if group >= width && tensors.iter().all(|tensor| tensor.has_zero_point(0)) =>
            {
                Some(Self::Int8)
            }
            QuantizedType::Int8 => {
                // A larger group is split into several with the same scale.
                let fits = |each: &usize| {
                    group.min(width).is_multiple_of(*each) && slices.are_multiples_of(*each)
                };
                let each = GROUPS.into_iter().find(fits)?;
                Some(Self::Groups(group_layout_of(
                    &tensors,
                    GroupCodes::Eight,
                    each,
                )))
            }
            QuantizedType::Int4 if GROUPS.contains(&group) && slices.are_multiples_of(group) => {
                let units = group_layout_of(&tensors, GroupCodes::Four, group);
                Some(Self::Groups(units))
            }
            QuantizedType::E2m1
                if FLOAT_GROUPS.contains(&group) && slices.are_multiples_of(group) =>
            {
                let units = group_layout_of(&tensors, GroupCodes::Float4, group);
                Some(Self::Groups(units))
            }
            QuantizedType::Int4 | QuantizedType::E4m3 | QuantizedType::E2m1 => None,
        }
    }

    /// Steps of a row of so many elements.
    pub(super) const fn steps(self, width: usize) -> usize {
        match self {
            Self::F32 | Self::F16 => width,
            Self::Bf16 => width.div_ceil(2),
            Self::Int8 | Self::Groups(_) => width.div_ceil(PER_STEP),
        }
    }

    /// Words of [`CpuMatrix::column_scales`](super::CpuMatrix::column_scales) for each column.
    pub(crate) const fn column_words(self) -> usize {
        match self {
            Self::Int8
            | Self::Groups(GroupLayout {
                scales: ScaleFormat::E4m3,
                ..
            }) => 1,
            Self::F32 | Self::Bf16 | Self::F16 | Self::Groups(_) => 0,
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

impl PanelPacker {
    /// Packs a panel of eight-bit codes with a scale per column.
    pub(super) fn pack_bytes(
        &mut self,
        columns: &[ColumnSource<'_>],
        to: &mut [u32],
        scales: &mut [f32],
    ) {
        let mut codes = vec![0; self.row.len()];
        let stride = self.stride;
        for (i, column) in columns.iter().enumerate() {
            let words = &mut self.words[i * stride..(i + 1) * stride];
            let Some(SourceRow { matrix, row, .. }) = *column else {
                words.fill(0);
                continue;
            };
            scales[i] = match matrix {
                StoredMatrix::Quantized(tensor) if tensor.element() == QuantizedType::Int8 => {
                    tensor.read_codes(row, 0, &mut codes);
                    tensor.scale(row, 0)
                }
                _ => {
                    matrix.read_row(row, &mut self.row);
                    // SAFETY: `IntegerKernels::best` checked the instructions.
                    unsafe { (IntegerKernels::best().round_int8)(&self.row, &mut codes) }
                }
            };
            put_codes(&codes, words);
        }
        self.interleave(to);
    }

    /// Packs a panel of codes in groups; `factors` are those of columns, for scales in e4m3.
    pub(super) fn pack_groups(
        &mut self,
        columns: &[ColumnSource<'_>],
        units: GroupLayout,
        to: &mut [u32],
        mut factors: Option<&mut [f32]>,
    ) {
        let (width, stride) = (self.row.len(), self.stride);
        let group = units.steps * PER_STEP;
        let mut codes = vec![0; width];
        for (i, column) in columns.iter().enumerate() {
            let words = &mut self.words[i * stride..(i + 1) * stride];
            let Some(SourceRow {
                matrix,
                row,
                factor,
            }) = *column
            else {
                words.fill(0);
                continue;
            };
            if let Some(factors) = &mut factors {
                factors[i] = column_factor(units.codes, factor);
            }
            match matrix {
                StoredMatrix::Quantized(tensor) if tensor.element() != QuantizedType::E4m3 => {
                    tensor.read_codes(row, 0, &mut codes);
                    if units.codes == GroupCodes::Eight {
                        // From two's complement to unsigned.
                        let middle = GroupCodes::Eight.implied_zero_point();
                        codes.iter_mut().for_each(|code| *code ^= middle);
                    }
                    for (g, unit) in to.chunks_exact_mut(units.words()).enumerate() {
                        StoredGroup::of(tensor, row, g * group).put(units, unit, i);
                    }
                }
                _ => {
                    matrix.read_row(row, &mut self.row);
                    let parts = self
                        .row
                        .chunks_exact(group)
                        .zip(codes.chunks_exact_mut(group));
                    for ((x, codes), unit) in parts.zip(to.chunks_exact_mut(units.words())) {
                        let factor = factor.unwrap_or(1.0);
                        StoredGroup::rounded(units, x, factor, codes).put(units, unit, i);
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
            if units.codes == GroupCodes::Eight {
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

/// Packs codes into words, padded with zeros.
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
