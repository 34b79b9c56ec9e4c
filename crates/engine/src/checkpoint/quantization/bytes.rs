//! Weights of a byte an element: fp8 and int8.
//!
//! Owns: the shapes in which their scales come. Never: reads a weight.

use super::Module;
use super::compressed::{Scheme, Strategy};
use crate::checkpoint::CheckpointError;
use crate::checkpoint::folder::{Folder, Found};
use crate::checkpoint::narrow::{Codes, Groups, NarrowTensor, NarrowType, Scales, Zeros};

/// A weight of compressed-tensors.
pub(super) fn compressed(
    schemes: &[Scheme],
    folder: &Folder,
    module: Module<'_>,
) -> Result<NarrowTensor, CheckpointError> {
    let name = module.tensor("weight");
    let weight = codes(folder, &name)?;
    let element = match weight.dtype {
        "F8_E4M3" => NarrowType::E4m3,
        "I8" => NarrowType::Int8,
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
    let strategies: Vec<Strategy> = of_element.map(|scheme| scheme.strategy).collect();
    let scale_name = module.tensor("weight_scale");
    let scale = folder.need(&scale_name, || needed(&weight))?;
    let fits = |strategy: &&Strategy| shapes(module, **strategy).iter().any(|s| s == scale.shape);
    match (strategies.iter().find(fits), strategies.first()) {
        (Some(strategy), _) => tensor(module, (element, &weight), (*strategy, &scale)),
        (None, Some(first)) => Err(scale.damaged(format!(
            "shape {:?}, weights of {} × {} with this strategy have {:?}",
            scale.shape,
            module.rows,
            module.columns,
            shapes(module, *first)
        ))),
        (None, None) => Err(weight.damaged(format!(
            "stored as {}, of which config.json's config_groups tell nothing",
            weight.dtype
        ))),
    }
}

/// A weight of `quant_method` fp8.
pub(super) fn fp8(
    block: Option<(usize, usize)>,
    folder: &Folder,
    module: Module<'_>,
) -> Result<NarrowTensor, CheckpointError> {
    let name = module.tensor("weight");
    let weight = codes(folder, &name)?;
    weight.of_type("F8_E4M3")?;
    let (kind, strategy) = match block {
        Some((rows, columns)) => ("weight_scale_inv", Strategy::Block(rows, columns)),
        None => ("weight_scale", Strategy::Tensor),
    };
    let scale_name = module.tensor(kind);
    let scale = folder.need(&scale_name, || needed(&weight))?;
    let shapes = shapes(module, strategy);
    if !shapes.iter().any(|shape| shape == scale.shape) {
        return Err(scale.damaged(format!(
            "shape {:?}, its matrix calls for {:?}",
            scale.shape, shapes[0]
        )));
    }
    tensor(module, (NarrowType::E4m3, &weight), (strategy, &scale))
}

fn codes<'a>(folder: &'a Folder, name: &'a str) -> Result<Found<'a>, CheckpointError> {
    folder.need(name, || "its module is quantised".to_owned())
}

fn needed(weight: &Found<'_>) -> String {
    format!("`weight` is stored as {}, which needs scales", weight.dtype)
}

/// Shapes that scales of a strategy may have; the first is the usual one.
fn shapes(module: Module<'_>, strategy: Strategy) -> Vec<Vec<usize>> {
    let Module { rows, columns, .. } = module;
    match strategy {
        Strategy::Tensor => vec![vec![1], vec![], vec![1, 1]],
        Strategy::Channel => vec![vec![rows, 1], vec![rows]],
        Strategy::Group(each) => vec![vec![rows, columns.div_ceil(each)]],
        Strategy::Block(r, c) => vec![vec![rows.div_ceil(r), columns.div_ceil(c)]],
    }
}

/// Codes and scales whose shapes are known to fit each other, but for the codes' own.
fn tensor(
    module: Module<'_>,
    (element, weight): (NarrowType, &Found<'_>),
    (strategy, scale): (Strategy, &Found<'_>),
) -> Result<NarrowTensor, CheckpointError> {
    let Module { rows, columns, .. } = module;
    weight.of_shape(&[rows, columns])?;
    let (rows_each, columns_each) = match strategy {
        Strategy::Tensor => (rows, columns),
        Strategy::Channel => (1, columns),
        Strategy::Group(each) => (1, each),
        Strategy::Block(r, c) => (r, c),
    };
    Ok(NarrowTensor {
        name: module.tensor("weight").into(),
        element,
        rows,
        columns,
        codes: Codes::Bytes(weight.span.clone()),
        scales: Scales {
            span: scale.span.clone(),
            stored: scale.stored_type()?,
            rows_each: rows_each.max(1),
            strides: (columns.div_ceil(columns_each.max(1)), 1),
        },
        zeros: Zeros::Same(0),
        groups: Groups::Neighbours(columns_each.max(1)),
        layout: format!("{} {rows_each}x{columns_each}", element.name()).into(),
    })
}
