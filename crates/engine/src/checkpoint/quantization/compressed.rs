//! `quantization_config` of compressed-tensors: groups of modules, each with a scheme.
//!
//! Owns: which schemes are known. Never: matches modules to groups by name: a module's tensors have one scheme's
//! format and shapes.

use super::{COUNT_MAX, block, group};
use crate::checkpoint::CheckpointError;
use crate::checkpoint::fields::Fields;
use crate::checkpoint::narrow::NarrowType;

/// How a module's weight is quantised.
#[derive(Clone, Debug, PartialEq)]
pub(in crate::checkpoint) struct Scheme {
    pub(super) element: NarrowType,
    pub(super) strategy: Strategy,
    /// Whether zero points are stored.
    pub(super) has_zeros: bool,
}

/// What has a scale of its own.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Strategy {
    Tensor,
    Channel,
    /// So many columns of a row.
    Group(usize),
    /// So many rows and columns.
    Block(usize, usize),
}

const FORMATS: [&str; 6] = [
    "float-quantized",
    "int-quantized",
    "naive-quantized",
    "pack-quantized",
    "mixed-precision",
    "dense",
];
const SUPPORTED: &str = "float of 8 bits with strategy tensor, channel or block, symmetric int of 8 bits with tensor, \
                         and int of 8 or 4 bits with group or channel are";

/// Every scheme of the configuration.
pub(super) fn schemes(fields: &Fields) -> Result<Vec<Scheme>, CheckpointError> {
    check_format(fields)?;
    refuse(fields)?;
    let Some(groups) = fields.object("config_groups")? else {
        return Err(fields.damaged("config_groups", "is missing"));
    };
    let mut schemes = Vec::new();
    for name in groups.names() {
        let Some(members) = groups.object(name)? else {
            continue;
        };
        check_format(&members)?;
        // A group may be about activations alone.
        if let Some(weights) = members.object("weights")? {
            schemes.push(scheme(&weights)?);
        }
    }
    match schemes.is_empty() {
        true => Err(fields.damaged("config_groups", "tells of no weights")),
        false => Ok(schemes),
    }
}

fn check_format(fields: &Fields) -> Result<(), CheckpointError> {
    match fields.text("format")? {
        Some(format) if !FORMATS.contains(&format) => {
            let problem = format!("{format} is not supported; {} are", FORMATS.join(", "));
            Err(fields.unsupported("format", problem))
        }
        _ => Ok(()),
    }
}

/// Refuses what changes weights or activations beyond scales.
fn refuse(fields: &Fields) -> Result<(), CheckpointError> {
    if let Some(sparsity) = fields.object("sparsity_config")?
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

fn scheme(fields: &Fields) -> Result<Scheme, CheckpointError> {
    let kind = fields.text("type")?.unwrap_or("int");
    let bits = fields.size("num_bits", COUNT_MAX)?;
    let is_symmetric = fields.flag("symmetric")?.unwrap_or(true);
    let named = fields.text("strategy")?;
    let strategy = match (named, group(fields, "group_size")?) {
        (Some("tensor"), _) => Strategy::Tensor,
        (Some("channel"), _) | (None, None) => Strategy::Channel,
        (Some("group") | None, Some(columns)) => Strategy::Group(columns),
        (Some("group"), None) => return Err(fields.damaged("group_size", "is missing")),
        (Some("block"), _) => match block(fields, "block_structure")? {
            Some((rows, columns)) => Strategy::Block(rows, columns),
            None => return Err(fields.damaged("block_structure", "is missing")),
        },
        (Some(other), _) => {
            let problem = format!("{other} is not supported; {SUPPORTED}");
            return Err(fields.unsupported("strategy", problem));
        }
    };
    let element = match (kind, bits, strategy) {
        ("float", 8, Strategy::Tensor | Strategy::Channel | Strategy::Block(..))
            if is_symmetric =>
        {
            NarrowType::E4m3
        }
        ("int", 8, Strategy::Tensor) if is_symmetric => NarrowType::Int8,
        ("int", 8, Strategy::Channel | Strategy::Group(_)) => NarrowType::Int8,
        ("int", 4, Strategy::Channel | Strategy::Group(_)) => NarrowType::Int4,
        _ => {
            let symmetric = if is_symmetric { "" } else { "asymmetric " };
            let strategy = named.unwrap_or("none");
            let problem = format!(
                "{symmetric}{kind} of {bits} bits with strategy {strategy} is not supported; {SUPPORTED}"
            );
            return Err(fields.unsupported("num_bits", problem));
        }
    };
    Ok(Scheme {
        element,
        strategy,
        has_zeros: !is_symmetric,
    })
}
