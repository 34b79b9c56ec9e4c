//! Weights of four-bit floats in groups of columns: MXFP4 and NVFP4.
//!
//! Owns: the accepted shapes of their codes and scales. Never: reads a weight.

use super::ProjectionModule;
use super::compressed::{CompressedScheme, ScaleStrategy};
use crate::CheckpointError;
use crate::folder::{FoundTensor, TensorFolder};
use crate::packed_numbers::{ALONG_COLUMNS, PackedNumbers};
use crate::quantized::{QuantizedCodes, QuantizedTensor, QuantizedType, ScaleGroups, ZeroPoints};
use crate::rounding::{MX_GROUP, NV_GROUP};
use crate::scales::{GlobalScale, QuantizedScales, ScaleType};

/// Reads the layout of a weight of compressed-tensors, whose global scale divides.
pub(super) fn compressed(
    schemes: &[CompressedScheme],
    folder: &TensorFolder,
    module: ProjectionModule<'_>,
) -> Result<QuantizedTensor, CheckpointError> {
    let name = module.tensor("weight_packed");
    let codes = need(folder, &name)?;
    let is_described = |group: usize| {
        let wanted = ScaleStrategy::Group(group);
        let mut all = schemes.iter();
        all.any(|scheme| scheme.element == QuantizedType::E2m1 && scheme.strategy == wanted)
    };
    let scale_name = module.tensor("weight_scale");
    let group = group_of(&need(folder, &scale_name)?)?;
    if !is_described(group) {
        return Err(codes.damaged(format!(
            "stored as U8 with groups of {group}, which no group of config.json's config_groups \
             describes"
        )));
    }
    let global_name = module.tensor("weight_global_scale");
    let global = match group {
        NV_GROUP => GlobalScale::Divisor(one_number(&need(folder, &global_name)?)?),
        _ => GlobalScale::None,
    };
    tensor(folder, module, &codes, global)
}

/// Reads the layout of a weight of modelopt, whose global scale multiplies.
pub(super) fn modelopt(
    folder: &TensorFolder,
    module: ProjectionModule<'_>,
) -> Result<QuantizedTensor, CheckpointError> {
    let name = module.tensor("weight");
    let codes = need(folder, &name)?;
    let scale_name = module.tensor("weight_scale");
    let global_name = module.tensor("weight_scale_2");
    let global = match group_of(&need(folder, &scale_name)?)? {
        NV_GROUP => GlobalScale::Factor(one_number(&need(folder, &global_name)?)?),
        _ => GlobalScale::None,
    };
    tensor(folder, module, &codes, global)
}

/// Endings of the names of codes and scales of all experts of a layer.
pub(crate) const EXPERT_ENDINGS: [&str; 2] = ["_blocks", "_scales"];

/// Reads the weights of all experts of a layer, `(experts × out, in)`, as gpt-oss has them.
pub(super) fn experts(
    folder: &TensorFolder,
    experts: ProjectionModule<'_>,
    count: usize,
) -> Result<QuantizedTensor, CheckpointError> {
    let ProjectionModule {
        name,
        rows,
        columns,
    } = experts;
    let [codes, scales] = EXPERT_ENDINGS.map(|ending| format!("{name}{ending}"));
    let (codes, scales) = (need(folder, &codes)?, need(folder, &scales)?);
    let (out, groups) = (rows / count, columns / MX_GROUP);
    if !columns.is_multiple_of(MX_GROUP) {
        return Err(codes.damaged(format!(
            "its matrices have {columns} columns, which groups of {MX_GROUP} do not divide"
        )));
    }
    codes
        .require_type("U8")?
        .require_shape(&[count, out, groups, MX_GROUP / 2])?;
    scales
        .require_type("U8")?
        .require_shape(&[count, out, groups])?;
    coded(name, (rows, columns), &codes, &scales, GlobalScale::None)
}

fn need<'a>(folder: &'a TensorFolder, name: &'a str) -> Result<FoundTensor<'a>, CheckpointError> {
    folder.require(name, || {
        "its module has weights of four-bit floats, which need it".to_owned()
    })
}

/// Columns of a group with scales of this type.
fn group_of(scale: &FoundTensor<'_>) -> Result<usize, CheckpointError> {
    match scale.scale_type()? {
        ScaleType::E8m0 => Ok(MX_GROUP),
        ScaleType::E4m3 => Ok(NV_GROUP),
        ScaleType::Float(_) => Err(scale.unsupported(format!(
            "stored as {}, which is not supported beside four-bit floats; F8_E4M3 (NVFP4) and U8 \
             (MXFP4) are",
            scale.dtype
        ))),
    }
}

/// Reads the number of a tensor that has one.
fn one_number(found: &FoundTensor<'_>) -> Result<f32, CheckpointError> {
    found.require_type("F32")?;
    let Ok(bytes) = <[u8; 4]>::try_from(found.span.bytes()) else {
        return Err(found.damaged(format!("shape {:?}, should be one number", found.shape)));
    };
    let number = f32::from_le_bytes(bytes);
    if number.is_finite() && number > 0.0 {
        Ok(number)
    } else {
        Err(found.damaged(format!("is {number}, should be a finite positive number")))
    }
}

fn tensor(
    folder: &TensorFolder,
    module: ProjectionModule<'_>,
    codes: &FoundTensor<'_>,
    global: GlobalScale,
) -> Result<QuantizedTensor, CheckpointError> {
    let ProjectionModule { rows, columns, .. } = module;
    let name = module.tensor("weight_scale");
    let scale = need(folder, &name)?;
    let group = group_of(&scale)?;
    if !columns.is_multiple_of(group) {
        return Err(codes.damaged(format!(
            "its matrix has {columns} columns, which groups of {group} do not divide"
        )));
    }
    codes
        .require_type("U8")?
        .require_shape(&[rows, columns / 2])?;
    scale.require_shape(&[rows, columns / group])?;
    let name = module.tensor("weight");
    coded(&name, (rows, columns), codes, &scale, global)
}

/// Builds the tensor, `(rows, columns)`. The shapes of codes and scales were checked.
fn coded(
    name: &str,
    shape: (usize, usize),
    codes: &FoundTensor<'_>,
    scale: &FoundTensor<'_>,
    global: GlobalScale,
) -> Result<QuantizedTensor, CheckpointError> {
    let (rows, columns) = shape;
    let (stored, group) = (scale.scale_type()?, group_of(scale)?);
    // Two codes to a byte, the first in the lower bits, are eight to a little-endian word.
    let numbers = PackedNumbers::new(codes.span.clone(), ALONG_COLUMNS, (rows, columns))
        .ok_or_else(|| codes.damaged("does not fill its range"))?;
    let factor = match global {
        GlobalScale::None => String::new(),
        GlobalScale::Factor(factor) => format!(" times {:08x}", factor.to_bits()),
        GlobalScale::Divisor(divisor) => format!(" by {:08x}", divisor.to_bits()),
    };
    Ok(QuantizedTensor {
        name: name.into(),
        element: QuantizedType::E2m1,
        rows,
        columns,
        codes: QuantizedCodes::Packed(numbers),
        scales: QuantizedScales {
            span: scale.span.clone(),
            stored,
            rows_per_scale: 1,
            strides: (columns / group, 1),
            global,
        },
        zeros: ZeroPoints::Uniform(0),
        groups: ScaleGroups::Contiguous(group),
        turns: 1,
        order: None,
        layout: format!("fp4 {group} {}{factor}", stored.name()).into(),
    })
}
