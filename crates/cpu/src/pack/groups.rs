//! Groups of columns of a packed panel: their scales and zero points.
//!
//! Owns: the type that a stack's scales are stored in, and rounding of groups at load.
//! Invariant: a scale of a checkpoint is stored exactly.

use super::{PER_STEP, bf16_bits};
use cleave_checkpoint::{QuantizedTensor, QuantizedType, e8m0, rounding};
use cleave_cpu_kernels::kernel::IntegerKernels;
use cleave_cpu_kernels::kernel::product::groups::{
    E4M3_FACTOR, GroupCodes, GroupLayout, ScaleFormat,
};
use half::f16;

/// Layout of a stack's groups, with the smallest type that has every scale exactly, and zero points
/// if any differs from the middle.
pub(super) fn group_layout_of(
    tensors: &[&QuantizedTensor],
    codes: GroupCodes,
    group: usize,
) -> GroupLayout {
    let (mut is_e4m3, mut is_bf16, mut is_f16) = (true, true, true);
    let mut has_zeros = false;
    for tensor in tensors {
        is_e4m3 &= column_factor(codes, tensor.scale_factor()).is_finite();
        for row in 0..tensor.rows() {
            for index in 0..tensor.columns() / group {
                let stored = StoredGroup::of(tensor, row, index * group);
                let scale = stored.scale * codes.scale_factor();
                is_e4m3 &= stored.byte.is_some_and(|byte| byte <= E4M3_MAX);
                is_bf16 &= scale.to_bits() & 0xffff == 0;
                is_f16 &= f16::from_f32(scale).to_f32().to_bits() == scale.to_bits();
                has_zeros |= stored.zero != codes.implied_zero_point();
            }
        }
    }
    GroupLayout {
        codes,
        steps: group / PER_STEP,
        scales: match (is_e4m3, is_bf16, is_f16) {
            (true, ..) => ScaleFormat::E4m3,
            (_, true, _) => ScaleFormat::Bf16,
            (_, _, true) => ScaleFormat::F16,
            (false, false, false) => ScaleFormat::F32,
        },
        has_zeros,
    }
}

/// Bits of the largest e4m3; those above have a sign, or are NaN.
const E4M3_MAX: u8 = 0x7e;

/// Factor of a column whose groups have scales in e4m3.
pub(super) fn column_factor(codes: GroupCodes, of_matrix: Option<f32>) -> f32 {
    of_matrix.unwrap_or(1.0) * codes.scale_factor() * E4M3_FACTOR
}

/// Scale and zero point of a column's group.
pub(super) struct StoredGroup {
    scale: f32,
    /// The scale as it is stored, without the matrix's factor, if it is an e4m3.
    byte: Option<u8>,
    /// The zero point as an unsigned number, as products take it.
    zero: u8,
}

impl StoredGroup {
    pub(super) fn of(tensor: &QuantizedTensor, row: usize, column: usize) -> Self {
        let index = tensor.group_columns().map_or(0, |each| column / each);
        let zero = tensor.zero(row, index);
        Self {
            scale: tensor.scale(row, index),
            byte: tensor.scale_byte(row, index),
            zero: match tensor.element() {
                QuantizedType::Int8 => zero ^ GroupCodes::Eight.implied_zero_point(),
                QuantizedType::Int4 | QuantizedType::E4m3 => zero,
                QuantizedType::E2m1 => GroupCodes::Float4.implied_zero_point(),
            },
        }
    }

    /// A group of a dense matrix, rounded to four bits.
    pub(super) fn rounded(units: GroupLayout, x: &[f32], factor: f32, codes: &mut [u8]) -> Self {
        let (scale, byte) = match (units.codes, units.scales) {
            (GroupCodes::Float4, ScaleFormat::E4m3) => {
                (0.0, Some(rounding::nvfp4(x, factor, codes)))
            }
            (GroupCodes::Float4, _) => (e8m0::to_f32(rounding::mxfp4(x, codes)), None),
            // SAFETY: `IntegerKernels::best` checked the instructions.
            (GroupCodes::Four | GroupCodes::Eight, _) => unsafe {
                ((IntegerKernels::best().round_int4)(x, codes), None)
            },
        };
        Self {
            scale,
            byte,
            zero: units.codes.implied_zero_point(),
        }
    }

    /// Writes scale and zero point of a panel's column.
    pub(super) fn put(&self, units: GroupLayout, unit: &mut [u32], column: usize) {
        let scale = self.scale * units.codes.scale_factor();
        let scales = &mut unit[units.scales_at()..units.zeros_at()];
        match units.scales {
            ScaleFormat::F32 => scales[column] = scale.to_bits(),
            ScaleFormat::Bf16 => scales[column / 2] |= bf16_bits(scale) << (16 * (column % 2)),
            ScaleFormat::F16 => {
                let bits = f16::from_f32(scale).to_bits();
                scales[column / 2] |= u32::from(bits) << (16 * (column % 2));
            }
            ScaleFormat::E4m3 => {
                let byte = self.byte.expect("every scale of this form is an e4m3");
                scales[column / 4] |= u32::from(byte) << (8 * (column % 4));
            }
        }
        if units.has_zeros {
            unit[units.zeros_at() + column / 4] |= u32::from(self.zero) << (8 * (column % 4));
        }
    }
}
