//! `quant_method` modelopt, which NVIDIA's Model Optimizer writes.
//!
//! Owns: the list of supported algorithms. Never: matches modules to algorithms by name: the types
//! and shapes of a module's tensors tell its layout.
//!
//! Older versions write no `quantization_config`, but the same facts into `hf_quant_config.json`.

use super::Quantization;
use cleave_models::{ConfigError, ConfigFields};

/// Algorithms whose weights are codes times scales. Others also scale activations per channel
/// (`NVFP4_AWQ`) or add matrices (`NVFP4_SVD`).
const ALGORITHMS: [&str; 9] = [
    "FP8",
    "FP8_PER_CHANNEL_PER_TOKEN",
    "FP8_PB_WO",
    "NVFP4",
    "W4A16_NVFP4",
    "W4A8_NVFP4_FP8",
    "W4A8_MXFP4_FP8",
    "MXFP8",
    MIXED,
];
/// Modules with different algorithms, listed in `quantized_layers`.
const MIXED: &str = "MIXED_PRECISION";

/// Keys of both files that change no weight, or that the tensors tell themselves.
const HARMLESS: [&str; 9] = [
    "config_groups",
    "exclude_modules",
    "group_size",
    "has_zero_point",
    "ignore",
    "kv_cache_quant_algo",
    "kv_cache_scheme",
    "pre_quant_scale",
    "producer",
];

pub(super) fn read(fields: &ConfigFields) -> Result<Quantization, ConfigError> {
    match fields.object("quantization")? {
        Some(nested) => {
            fields.ignore(&HARMLESS);
            algorithm(&nested)
        }
        None => algorithm(fields),
    }
}

pub(super) fn read_own_file(fields: &ConfigFields) -> Result<Quantization, ConfigError> {
    fields.ignore(&HARMLESS);
    match fields.object("quantization")? {
        Some(nested) => algorithm(&nested),
        None => Err(fields.damaged("quantization", "is missing")),
    }
}

fn algorithm(fields: &ConfigFields) -> Result<Quantization, ConfigError> {
    fields.ignore(&HARMLESS);
    let Some(name) = fields.text("quant_algo")? else {
        return Err(fields.damaged("quant_algo", "is missing, so the layout is unknown"));
    };
    check(fields, name)?;
    if name.eq_ignore_ascii_case(MIXED)
        && let Some(layers) = fields.object("quantized_layers")?
    {
        for layer in layers.names() {
            let Some(members) = layers.object(layer)? else {
                continue;
            };
            members.ignore(&HARMLESS);
            if let Some(name) = members.text("quant_algo")? {
                check(&members, name)?;
            }
        }
    }
    Ok(Quantization::ModelOpt)
}

fn check(fields: &ConfigFields, name: &str) -> Result<(), ConfigError> {
    let is_supported = ALGORITHMS.iter().any(|one| one.eq_ignore_ascii_case(name));
    if is_supported {
        return Ok(());
    }
    let problem = format!("{name} is not supported; {} are", ALGORITHMS.join(", "));
    Err(fields.unsupported("quant_algo", problem))
}
