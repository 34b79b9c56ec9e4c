//! Weights of one byte per element: fp8 and int8.
//!
//! Owns: the accepted shapes of their scales. Never: reads a weight.

use super::ProjectionModule;
use super::compressed::{CompressedScheme, ScaleStrategy};
use crate::CheckpointError;
use crate::folder::{FoundTensor, TensorFolder};
use crate::quantized::{QuantizedCodes, QuantizedTensor, QuantizedType, ScaleGroups, ZeroPoints};
use crate::scales::{GlobalScale, QuantizedScales, ScaleType};

/// Reads the layout of a weight of compressed-tensors.
pub(super) fn compressed(
    schemes: &[CompressedScheme],
    folder: &TensorFolder,
    module: ProjectionModule<'_>,
) -> Result<QuantizedTensor, CheckpointError> {
    let name = module.tensor("weight");
    let weight = codes(folder, &name)?;
    let element = match weight.dtype {
        "F8_E4M3" => QuantizedType::E4m3,
        "I8" => QuantizedType::Int8,
        other => {
            return Err(weight.unsupported(format!(
                "stored as {other}, which is not supported; F8_E4M3, I8, BF16, F16 and F32 are"
            )));
        }
    };
    let of_element = schemes.iter().filter(|scheme| scheme.element == element);
    if let Some(scheme) = of_element.clone().find(|scheme| scheme.has_zeros) {
        return Err(weight.unsupported(format!(
            "asymmetric {} is supported in pack-quantized alone",
            scheme.element.name()
        )));
    }
    let strategies: Vec<ScaleStrategy> = of_element.map(|scheme| scheme.strategy).collect();
    let scale_name = module.tensor("weight_scale");
    let scale = folder.require(&scale_name, || needed(&weight))?;
    let fits =
        |strategy: &&ScaleStrategy| shapes(module, **strategy).iter().any(|s| s == scale.shape);
    match (strategies.iter().find(fits), strategies.first()) {
        (Some(strategy), _) => tensor(module, element, &weight, *strategy, &scale),
        (None, Some(first)) => Err(scale.damaged(format!(
            "shape {:?}, weights of {} × {} with this strategy have {:?}",
            scale.shape,
            module.rows,
            module.columns,
            shapes(module, *first)
        ))),
        (None, None) => Err(weight.damaged(format!(
            "stored as {}, which no group of config.json's config_groups describes",
            weight.dtype
        ))),
    }
}

/// Reads the layout of a weight of `quant_method` fp8.
pub(super) fn fp8(
    block: Option<(usize, usize)>,
    folder: &TensorFolder,
    module: ProjectionModule<'_>,
) -> Result<QuantizedTensor, CheckpointError> {
    let name = module.tensor("weight");
    let weight = codes(folder, &name)?;
    weight.require_type("F8_E4M3")?;
    let (kind, strategy) = match block {
        Some((rows, columns)) => ("weight_scale_inv", ScaleStrategy::Block(rows, columns)),
        None => ("weight_scale", ScaleStrategy::Tensor),
    };
    let scale_name = module.tensor(kind);
    let scale = folder.require(&scale_name, || needed(&weight))?;
    let shapes = shapes(module, strategy);
    if !shapes.iter().any(|shape| shape == scale.shape) {
        return Err(scale.damaged(format!(
            "shape {:?}, its matrix calls for {:?}",
            scale.shape, shapes[0]
        )));
    }
    tensor(module, QuantizedType::E4m3, &weight, strategy, &scale)
}

/// Reads the layout of a weight of `quant_method` modelopt: the scales' type and shape tell it.
pub(super) fn modelopt(
    folder: &TensorFolder,
    module: ProjectionModule<'_>,
) -> Result<QuantizedTensor, CheckpointError> {
    /// Columns of a group whose scale is a power of two.
    const MX_GROUP: usize = 32;
    const BLOCK: usize = 128;
    let ProjectionModule { rows, columns, .. } = module;
    let name = module.tensor("weight");
    let weight = codes(folder, &name)?;
    weight.require_type("F8_E4M3")?;
    let scale_name = module.tensor("weight_scale");
    let scale = folder.require(&scale_name, || needed(&weight))?;
    let strategy = match (scale.scale_type()?, scale.shape) {
        (ScaleType::E8m0, shape) if shape == [rows, columns.div_ceil(MX_GROUP)] => {
            ScaleStrategy::Group(MX_GROUP)
        }
        (ScaleType::Float(_), [] | [1]) => ScaleStrategy::Tensor,
        (ScaleType::Float(_), &[count] | &[count, 1]) if count == rows => ScaleStrategy::Channel,
        (ScaleType::Float(_), &[down, 1, across, 1] | &[down, across])
            if (down, across) == (rows.div_ceil(BLOCK), columns.div_ceil(BLOCK)) =>
        {
            ScaleStrategy::Block(BLOCK, BLOCK)
        }
        _ => {
            return Err(scale.damaged(format!(
                "{} of shape {:?}; a matrix of {rows} × {columns} has one, one for each row, one \
                 for each block of {BLOCK} × {BLOCK}, or U8 for each {MX_GROUP} columns",
                scale.dtype, scale.shape
            )));
        }
    };
    tensor(module, QuantizedType::E4m3, &weight, strategy, &scale)
}

fn codes<'a>(folder: &'a TensorFolder, name: &'a str) -> Result<FoundTensor<'a>, CheckpointError> {
    folder.require(name, || "its module is quantised".to_owned())
}

fn needed(weight: &FoundTensor<'_>) -> String {
    format!("`weight` is stored as {}, which needs scales", weight.dtype)
}

/// Shapes that the scales of a strategy may have; the first is the usual one.
fn shapes(module: ProjectionModule<'_>, strategy: ScaleStrategy) -> Vec<Vec<usize>> {
    let ProjectionModule { rows, columns, .. } = module;
    match strategy {
        ScaleStrategy::Tensor => vec![vec![1], vec![], vec![1, 1]],
        ScaleStrategy::Channel => vec![vec![rows, 1], vec![rows]],
        ScaleStrategy::Group(each) => vec![vec![rows, columns.div_ceil(each)]],
        ScaleStrategy::Block(r, c) => vec![vec![rows.div_ceil(r), columns.div_ceil(c)]],
    }
}

/// Builds the tensor. The shape of the scales was checked; that of the codes is checked here.
fn tensor(
    module: ProjectionModule<'_>,
    element: QuantizedType,
    weight: &FoundTensor<'_>,
    strategy: ScaleStrategy,
    scale: &FoundTensor<'_>,
) -> Result<QuantizedTensor, CheckpointError> {
    let ProjectionModule { rows, columns, .. } = module;
    weight.require_shape(&[rows, columns])?;
    let stored = scale.scale_type()?;
    let (rows_each, columns_each) = match strategy {
        ScaleStrategy::Tensor => (rows, columns),
        ScaleStrategy::Channel => (1, columns),
        ScaleStrategy::Group(each) => (1, each),
        ScaleStrategy::Block(r, c) => (r, c),
    };
    Ok(QuantizedTensor {
        name: module.tensor("weight").into(),
        element,
        rows,
        columns,
        codes: QuantizedCodes::Bytes(weight.span.clone()),
        scales: QuantizedScales {
            span: scale.span.clone(),
            stored,
            rows_per_scale: rows_each.max(1),
            strides: (columns.div_ceil(columns_each.max(1)), 1),
            global: GlobalScale::None,
        },
        zeros: ZeroPoints::Uniform(0),
        groups: ScaleGroups::Contiguous(columns_each.max(1)),
        turns: 1,
        order: None,
        layout: match stored {
            ScaleType::Float(_) => format!("{} {rows_each}x{columns_each}", element.name()),
            ScaleType::E4m3 | ScaleType::E8m0 => format!(
                "{} {rows_each}x{columns_each} {}",
                element.name(),
                stored.name()
            ),
        }
        .into(),
    })
}
