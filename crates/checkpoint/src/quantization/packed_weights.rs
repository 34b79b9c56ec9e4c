//! Weights of four or eight bits an element, packed in words of 32: AWQ, GPTQ and
//! compressed-tensors.
//!
//! Owns: the packing of each method. Never: reads a weight; reads lists of groups, which decide a
//! layout.

use super::ProjectionModule;
use super::compressed::{CompressedScheme, ScaleStrategy};
use crate::CheckpointError;
use crate::folder::{FoundTensor, TensorFolder};
use crate::packed_numbers::{
    ALONG_COLUMNS, ALONG_ROWS, AWQ, GPTQ_CODES, GPTQ_ZEROS, PackedNumbers, WordPacking,
};
use crate::quantized::{QuantizedCodes, QuantizedTensor, QuantizedType, ScaleGroups, ZeroPoints};
use crate::scales::{GlobalScale, QuantizedScales, ScaleType};

const NEEDED: &str = "its module has packed weights, which need it";

/// Tensors of a method, by name and packing.
#[derive(Clone, Copy, Debug)]
struct PackedMethod {
    name: &'static str,
    /// Number format: `Int4` or `Int8`.
    element: QuantizedType,
    codes: (&'static str, WordPacking),
    /// Name and packing of zero points `(rows, groups)`, and the number added to them.
    zeros: Option<(&'static str, WordPacking, u8)>,
    /// Name, and whether the shape is `(groups, rows)`.
    scales: (&'static str, bool),
    /// Name of the list of groups, if the method has one.
    index: Option<&'static str>,
    /// Number of columns per group.
    group: usize,
}

pub(super) fn awq(
    group: Option<usize>,
    folder: &TensorFolder,
    module: ProjectionModule<'_>,
) -> Result<QuantizedTensor, CheckpointError> {
    let method = PackedMethod {
        name: "awq",
        element: QuantizedType::Int4,
        codes: ("qweight", AWQ),
        zeros: Some(("qzeros", AWQ, 0)),
        scales: ("scales", true),
        index: None,
        group: group.unwrap_or(module.columns),
    };
    tensor(method, folder, module)
}

pub(super) fn gptq(
    element: QuantizedType,
    group: Option<usize>,
    plus: u8,
    folder: &TensorFolder,
    module: ProjectionModule<'_>,
) -> Result<QuantizedTensor, CheckpointError> {
    let method = PackedMethod {
        name: "gptq",
        element,
        codes: ("qweight", GPTQ_CODES),
        zeros: Some(("qzeros", GPTQ_ZEROS, plus)),
        scales: ("scales", true),
        index: Some("g_idx"),
        group: group.unwrap_or(module.columns),
    };
    tensor(method, folder, module)
}

pub(super) fn compressed(
    schemes: &[CompressedScheme],
    folder: &TensorFolder,
    module: ProjectionModule<'_>,
) -> Result<QuantizedTensor, CheckpointError> {
    check_shape(folder, module)?;
    let scale_name = module.tensor("weight_scale");
    let scale = need(folder, &scale_name)?;
    let has_zeros = folder.contains(&module.tensor("weight_zero_point"));
    let packed_name = module.tensor("weight_packed");
    let packed = need(folder, &packed_name)?;
    let of_words = schemes
        .iter()
        .filter(|scheme| scheme.element.is_integer() && scheme.has_zeros == has_zeros);
    let mut layouts = of_words.map(|scheme| match scheme.strategy {
        ScaleStrategy::Group(columns) => (scheme.element, columns),
        ScaleStrategy::Tensor | ScaleStrategy::Channel | ScaleStrategy::Block(..) => {
            (scheme.element, module.columns)
        }
    });
    let (rows, columns) = (module.rows, module.columns);
    // The configuration may have several schemes; this module's is the one whose shapes fit.
    let fits = |(element, each): &(QuantizedType, usize)| {
        scale.shape == [rows, columns.div_ceil(*each)]
            && packed.shape == packing_of(ALONG_COLUMNS, *element).words_shape(rows, columns)
    };
    let Some((element, group)) = layouts.find(fits) else {
        return Err(scale.damaged(format!(
            "shape {:?}, beside weight_packed of {:?} {} zero points: no group of config.json's config_groups has these shapes",
            scale.shape,
            packed.shape,
            if has_zeros { "with" } else { "without" }
        )));
    };
    let method = PackedMethod {
        name: "pack-quantized",
        element,
        codes: ("weight_packed", ALONG_COLUMNS),
        zeros: has_zeros.then_some(("weight_zero_point", ALONG_ROWS, 0)),
        scales: ("weight_scale", false),
        index: Some("weight_g_idx"),
        group,
    };
    tensor(method, folder, module)
}

/// Checks `weight_shape`, the shape of `weight_packed` without padding.
fn check_shape(folder: &TensorFolder, module: ProjectionModule<'_>) -> Result<(), CheckpointError> {
    let name = module.tensor("weight_shape");
    let found = need(folder, &name)?;
    let of = |bytes: &[u8]| {
        let mut number = [0; 8];
        number[..bytes.len()].copy_from_slice(bytes);
        u64::from_le_bytes(number)
    };
    let width = match found.dtype {
        "I64" | "U64" => 8,
        "I32" | "U32" => 4,
        other => return Err(found.damaged(format!("stored as {other}, not as I64"))),
    };
    let shape: Vec<u64> = found.span.bytes().chunks(width).map(of).collect();
    if shape == [module.rows as u64, module.columns as u64] {
        Ok(())
    } else {
        Err(found.damaged(format!(
            "says {shape:?}, config.json calls for [{}, {}]",
            module.rows, module.columns
        )))
    }
}

/// The packing with the bits of this format's codes.
fn packing_of(packing: WordPacking, element: QuantizedType) -> WordPacking {
    match element {
        QuantizedType::Int8 => packing.with_eight_bits(),
        QuantizedType::Int4 | QuantizedType::E4m3 | QuantizedType::E2m1 => packing,
    }
}

fn need<'a>(folder: &'a TensorFolder, name: &'a str) -> Result<FoundTensor<'a>, CheckpointError> {
    folder.require(name, || NEEDED.to_owned())
}

fn tensor(
    method: PackedMethod,
    folder: &TensorFolder,
    module: ProjectionModule<'_>,
) -> Result<QuantizedTensor, CheckpointError> {
    let ProjectionModule { rows, columns, .. } = module;
    let group = method.group.min(columns);
    let groups_count = columns.div_ceil(group.max(1));
    let numbers = |kind: &str, packing: WordPacking, shape: (usize, usize)| {
        let packing = packing_of(packing, method.element);
        let name = module.tensor(kind);
        let found = need(folder, &name)?;
        found.require_type("I32")?;
        found.require_shape(&packing.words_shape(shape.0, shape.1))?;
        let numbers = PackedNumbers::new(found.span.clone(), packing, shape);
        numbers.ok_or_else(|| found.damaged("does not fill its range"))
    };
    let codes = numbers(method.codes.0, method.codes.1, (rows, columns))?;
    let zeros = match method.zeros {
        // Symmetric codes are stored with half the range added: 8 for four bits. The reader already
        // subtracts it from codes of eight bits.
        None => ZeroPoints::Uniform(match method.element {
            QuantizedType::Int8 => 0,
            QuantizedType::Int4 | QuantizedType::E4m3 | QuantizedType::E2m1 => 8,
        }),
        Some((kind, packing, plus)) => ZeroPoints::PerGroup {
            numbers: numbers(kind, packing, (rows, groups_count))?,
            offset: plus,
        },
    };
    let (kind, is_turned) = method.scales;
    let name = module.tensor(kind);
    let scale = need(folder, &name)?;
    let (shape, strides) = if is_turned {
        ([groups_count, rows], (1, rows))
    } else {
        ([rows, groups_count], (groups_count, 1))
    };
    scale.require_shape(&shape)?;
    let groups = match method.index {
        Some(kind) => groups(folder, &module.tensor(kind), columns, group)?,
        None => ScaleGroups::Contiguous(group),
    };
    let plus = method.zeros.map_or(0, |(_, _, plus)| plus);
    Ok(QuantizedTensor {
        name: module.tensor("weight").into(),
        element: method.element,
        rows,
        columns,
        codes: QuantizedCodes::Packed(codes),
        scales: QuantizedScales {
            span: scale.span.clone(),
            stored: ScaleType::Float(scale.stored_type()?),
            rows_per_scale: 1,
            strides,
            global: GlobalScale::None,
        },
        zeros,
        groups,
        turns: 1,
        order: None,
        layout: match method.element {
            QuantizedType::Int8 => format!("{} 8 +{plus} {group}", method.name).into(),
            QuantizedType::Int4 | QuantizedType::E4m3 | QuantizedType::E2m1 => {
                format!("{} +{plus} {group}", method.name).into()
            }
        },
    })
}

/// Reads the list of columns' groups. A list of consecutive groups in order is equal to no list.
fn groups(
    folder: &TensorFolder,
    name: &str,
    columns: usize,
    group: usize,
) -> Result<ScaleGroups, CheckpointError> {
    let Some(found) = folder.find(name) else {
        return Ok(ScaleGroups::Contiguous(group));
    };
    found.require_type("I32")?.require_shape(&[columns])?;
    let (words, _) = found.span.bytes().as_chunks::<4>();
    let listed: Vec<u32> = words.iter().map(|word| u32::from_le_bytes(*word)).collect();
    let groups_count = columns.div_ceil(group);
    // A list of -1 everywhere is unused.
    let is_unused = listed.iter().all(|of| *of == u32::MAX);
    let is_beyond = |of: &u32| !is_unused && *of as usize >= groups_count;
    if let Some(column) = listed.iter().position(is_beyond) {
        return Err(found.damaged(format!(
            "column {column} is of group {}, there are {groups_count}",
            listed[column].cast_signed()
        )));
    }
    let is_in_order = listed
        .iter()
        .enumerate()
        .all(|(column, of)| *of as usize == column / group);
    Ok(if is_in_order || is_unused {
        ScaleGroups::Contiguous(group)
    } else {
        ScaleGroups::Indexed {
            group_of_column: listed.into(),
            span: found.span.clone(),
        }
    })
}
