//! Weights of four or eight bits an element, packed in words of 32: AWQ, GPTQ and compressed-tensors.
//!
//! Owns: which packing each has. Never: reads a weight; reads lists of groups, which decide a layout.

use super::Module;
use super::compressed::{Scheme, Strategy};
use crate::checkpoint::CheckpointError;
use crate::checkpoint::folder::{Folder, Found};
use crate::checkpoint::narrow::{Codes, Groups, NarrowTensor, NarrowType, Scales, Zeros};
use crate::checkpoint::numbers::{
    ALONG_COLUMNS, ALONG_ROWS, AWQ, GPTQ_CODES, GPTQ_ZEROS, Numbers, Packing,
};

const NEEDED: &str = "its module has packed weights, which need it";

/// What a method stores, by name and packing.
#[derive(Clone, Copy, Debug)]
struct Method {
    name: &'static str,
    /// Int4 or Int8.
    element: NarrowType,
    codes: (&'static str, Packing),
    /// Packing of zero points `(rows, groups)`, and what is added to them.
    zeros: Option<(&'static str, Packing, u8)>,
    /// Name, and whether they lie as `(groups, rows)`.
    scales: (&'static str, bool),
    /// The list of groups, if there is one.
    index: Option<&'static str>,
    /// Columns of a group.
    group: usize,
}

pub(super) fn awq(
    group: Option<usize>,
    folder: &Folder,
    module: Module<'_>,
) -> Result<NarrowTensor, CheckpointError> {
    let method = Method {
        name: "awq",
        element: NarrowType::Int4,
        codes: ("qweight", AWQ),
        zeros: Some(("qzeros", AWQ, 0)),
        scales: ("scales", true),
        index: None,
        group: group.unwrap_or(module.columns),
    };
    tensor(method, folder, module)
}

pub(super) fn gptq(
    (element, group, plus): (NarrowType, Option<usize>, u8),
    folder: &Folder,
    module: Module<'_>,
) -> Result<NarrowTensor, CheckpointError> {
    let method = Method {
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
    schemes: &[Scheme],
    folder: &Folder,
    module: Module<'_>,
) -> Result<NarrowTensor, CheckpointError> {
    check_shape(folder, module)?;
    let scale_name = module.tensor("weight_scale");
    let scale = need(folder, &scale_name)?;
    let has_zeros = folder.contains(&module.tensor("weight_zero_point"));
    let packed_name = module.tensor("weight_packed");
    let packed = need(folder, &packed_name)?;
    let of_words = schemes
        .iter()
        .filter(|scheme| scheme.element != NarrowType::E4m3 && scheme.has_zeros == has_zeros);
    let mut layouts = of_words.map(|scheme| match scheme.strategy {
        Strategy::Group(columns) => (scheme.element, columns),
        Strategy::Tensor | Strategy::Channel | Strategy::Block(..) => {
            (scheme.element, module.columns)
        }
    });
    let shape = (module.rows, module.columns);
    // Schemes of other groups, or of other bits.
    let fits = |(element, each): &(NarrowType, usize)| {
        scale.shape == [module.rows, module.columns.div_ceil(*each)]
            && packed.shape == of_element(ALONG_COLUMNS, *element).words_shape(shape)
    };
    let Some((element, group)) = layouts.find(fits) else {
        return Err(scale.damaged(format!(
            "shape {:?}, beside weight_packed of {:?} {} zero points: of no group that config.json's config_groups tell of",
            scale.shape,
            packed.shape,
            if has_zeros { "with" } else { "without" }
        )));
    };
    let method = Method {
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

/// `weight_shape` says what `weight_packed` is without padding.
fn check_shape(folder: &Folder, module: Module<'_>) -> Result<(), CheckpointError> {
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
    match shape == [module.rows as u64, module.columns as u64] {
        true => Ok(()),
        false => Err(found.damaged(format!(
            "says {shape:?}, config.json calls for [{}, {}]",
            module.rows, module.columns
        ))),
    }
}

/// The same packing, of as many bits as codes have.
fn of_element(packing: Packing, element: NarrowType) -> Packing {
    match element {
        NarrowType::Int8 => packing.of_bytes(),
        NarrowType::Int4 | NarrowType::E4m3 => packing,
    }
}

fn need<'a>(folder: &'a Folder, name: &'a str) -> Result<Found<'a>, CheckpointError> {
    folder.need(name, || NEEDED.to_owned())
}

fn tensor(
    method: Method,
    folder: &Folder,
    module: Module<'_>,
) -> Result<NarrowTensor, CheckpointError> {
    let Module { rows, columns, .. } = module;
    let group = method.group.min(columns);
    let groups_count = columns.div_ceil(group.max(1));
    let numbers = |kind: &str, packing: Packing, shape: (usize, usize)| {
        let packing = of_element(packing, method.element);
        let name = module.tensor(kind);
        let found = need(folder, &name)?;
        found.of_type("I32")?;
        found.of_shape(&packing.words_shape(shape))?;
        let numbers = Numbers::new(found.span.clone(), packing, shape);
        numbers.ok_or_else(|| found.damaged("does not fill its range"))
    };
    let codes = numbers(method.codes.0, method.codes.1, (rows, columns))?;
    let zeros = match method.zeros {
        // Stored with half the range added, as codes are; those of eight bits are read without it.
        None => Zeros::Same(match method.element {
            NarrowType::Int8 => 0,
            NarrowType::Int4 | NarrowType::E4m3 => 8,
        }),
        Some((kind, packing, plus)) => Zeros::Each {
            numbers: numbers(kind, packing, (rows, groups_count))?,
            plus,
        },
    };
    let (kind, is_turned) = method.scales;
    let name = module.tensor(kind);
    let scale = need(folder, &name)?;
    let (shape, strides) = match is_turned {
        true => ([groups_count, rows], (1, rows)),
        false => ([rows, groups_count], (groups_count, 1)),
    };
    scale.of_shape(&shape)?;
    let groups = match method.index {
        Some(kind) => groups(folder, &module.tensor(kind), (columns, group))?,
        None => Groups::Neighbours(group),
    };
    let plus = method.zeros.map_or(0, |(_, _, plus)| plus);
    Ok(NarrowTensor {
        name: module.tensor("weight").into(),
        element: method.element,
        rows,
        columns,
        codes: Codes::Numbers(codes),
        scales: Scales {
            span: scale.span.clone(),
            stored: scale.stored_type()?,
            rows_each: 1,
            strides,
        },
        zeros,
        groups,
        layout: match method.element {
            NarrowType::Int8 => format!("{} 8 +{plus} {group}", method.name).into(),
            NarrowType::Int4 | NarrowType::E4m3 => {
                format!("{} +{plus} {group}", method.name).into()
            }
        },
    })
}

/// The list of columns' groups. One that lists neighbours in order says nothing new.
fn groups(
    folder: &Folder,
    name: &str,
    (columns, group): (usize, usize),
) -> Result<Groups, CheckpointError> {
    let Some(found) = folder.find(name) else {
        return Ok(Groups::Neighbours(group));
    };
    found.of_type("I32")?.of_shape(&[columns])?;
    let (words, _) = found.span.bytes().as_chunks::<4>();
    let listed: Vec<u32> = words.iter().map(|word| u32::from_le_bytes(*word)).collect();
    let groups_count = columns.div_ceil(group);
    // -1 everywhere says that the list was not made use of.
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
    Ok(match is_in_order || is_unused {
        true => Groups::Neighbours(group),
        false => Groups::Listed {
            of_columns: listed.into(),
            span: found.span.clone(),
        },
    })
}
