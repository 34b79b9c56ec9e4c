//! `quantization_config` of compressed-tensors: groups of modules, each with a scheme.
//!
//! Owns: the list of supported schemes. Never: matches modules to groups by name: the formats and
//! shapes of a module's tensors tell its scheme.

use super::{COUNT_MAX, block, group};
use crate::quantized::QuantizedType;
use cleave_models::{ConfigError, ConfigFields};

/// Quantisation of a group of modules.
#[derive(Clone, Debug, PartialEq)]
pub(crate) struct CompressedScheme {
    pub(super) element: QuantizedType,
    pub(super) strategy: ScaleStrategy,
    /// Whether zero points are stored.
    pub(super) has_zeros: bool,
}

/// Part of a weight that has its own scale.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum ScaleStrategy {
    Tensor,
    Channel,
    /// A group of so many columns of a row.
    Group(usize),
    /// A block of so many rows and columns.
    Block(usize, usize),
}

const FORMATS: [&str; 9] = [
    "float-quantized",
    "int-quantized",
    "mxfp4-pack-quantized",
    "mxfp8-quantized",
    "naive-quantized",
    "nvfp4-pack-quantized",
    "pack-quantized",
    "mixed-precision",
    "dense",
];
const SUPPORTED: &str = "float of 8 bits with strategy tensor, channel, block or group, float of 4 bits with group \
                         or tensor_group, symmetric int of 8 bits with tensor, and int of 8 or 4 bits with group \
                         or channel are";

/// Reads every scheme of the configuration.
pub(super) fn schemes(fields: &ConfigFields) -> Result<Vec<CompressedScheme>, ConfigError> {
    check_format(fields)?;
    refuse_unsupported(fields)?;
    let Some(groups) = fields.object("config_groups")? else {
        return Err(fields.damaged("config_groups", "is missing"));
    };
    let mut schemes = Vec::new();
    for name in groups.names() {
        let Some(members) = groups.object(name)? else {
            continue;
        };
        check_format(&members)?;
        members.ignore(&["targets", "input_activations", "output_activations"]);
        // A group may describe activations only.
        if let Some(weights) = members.object("weights")? {
            schemes.push(scheme(&weights)?);
        }
    }
    if schemes.is_empty() {
        Err(fields.damaged("config_groups", "describes no weights"))
    } else {
        Ok(schemes)
    }
}

fn check_format(fields: &ConfigFields) -> Result<(), ConfigError> {
    match fields.text("format")? {
        Some(format) if !FORMATS.contains(&format) => {
            let problem = format!("{format} is not supported; {} are", FORMATS.join(", "));
            Err(fields.unsupported("format", problem))
        }
        _ => Ok(()),
    }
}

/// Refuses sparsity and rotations, which change weights or activations by more than a scale.
fn refuse_unsupported(fields: &ConfigFields) -> Result<(), ConfigError> {
    let sparsity = fields.object("sparsity_config")?;
    if let Some(sparsity) = &sparsity {
        sparsity.ignore(&[
            "global_sparsity",
            "ignore",
            "registry_requires_subclass",
            "sparsity_structure",
            "targets",
        ]);
    }
    if let Some(sparsity) = sparsity
        && let Some(format) = sparsity.text("format")?
        && format != "dense"
    {
        let problem = format!("{format} is not supported; dense is");
        return Err(sparsity.unsupported("format", problem));
    }
    if let Some(transform) = fields.object("transform_config")?
        && let Some(groups) = transform.object("config_groups")?
        && groups.names().next().is_some()
    {
        let problem = "rotations of activations are not supported";
        return Err(transform.unsupported("config_groups", problem));
    }
    Ok(())
}

fn scheme(fields: &ConfigFields) -> Result<CompressedScheme, ConfigError> {
    fields.ignore(&[
        "actorder",
        "block_structure",
        "dynamic",
        "observer",
        "observer_kwargs",
        "scale_dtype",
        "zp_dtype",
    ]);
    let kind = fields.text("type")?.unwrap_or("int");
    let bits = fields.size("num_bits", COUNT_MAX)?;
    let is_symmetric = fields.flag("symmetric")?.unwrap_or(true);
    let named = fields.text("strategy")?;
    let strategy = match (named, group(fields, "group_size")?) {
        (Some("tensor"), _) => ScaleStrategy::Tensor,
        (Some("channel"), _) | (None, None) => ScaleStrategy::Channel,
        (Some("group") | None, Some(columns)) => ScaleStrategy::Group(columns),
        (Some("tensor_group"), Some(columns)) => ScaleStrategy::Group(columns),
        (Some("group" | "tensor_group"), None) => {
            return Err(fields.damaged("group_size", "is missing"));
        }
        (Some("block"), _) => match block(fields, "block_structure")? {
            Some((rows, columns)) => ScaleStrategy::Block(rows, columns),
            None => return Err(fields.damaged("block_structure", "is missing")),
        },
        (Some(other), _) => {
            let problem = format!("{other} is not supported; {SUPPORTED}");
            return Err(fields.unsupported("strategy", problem));
        }
    };
    let element = match (kind, bits, strategy) {
        ("float", 8, _) if is_symmetric => QuantizedType::E4m3,
        ("float", 4, ScaleStrategy::Group(_)) if is_symmetric => QuantizedType::E2m1,
        ("int", 8, ScaleStrategy::Tensor) if is_symmetric => QuantizedType::Int8,
        ("int", 8, ScaleStrategy::Channel | ScaleStrategy::Group(_)) => QuantizedType::Int8,
        ("int", 4, ScaleStrategy::Channel | ScaleStrategy::Group(_)) => QuantizedType::Int4,
        _ => {
            let symmetric = if is_symmetric { "" } else { "asymmetric " };
            let strategy = named.unwrap_or("none");
            let problem = format!(
                "{symmetric}{kind} of {bits} bits with strategy {strategy} is not supported; {SUPPORTED}"
            );
            return Err(fields.unsupported("num_bits", problem));
        }
    };
    Ok(CompressedScheme {
        element,
        strategy,
        has_zeros: !is_symmetric,
    })
}
