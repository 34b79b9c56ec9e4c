//! Quantised checkpoints: config.json's `quantization_config` and the supported layouts.
//!
//! Owns: the supported methods, and the tensors of a module that belong to each.
//! Never: computes with a weight; reads only data that decides a layout.
//! Invariant: a weight reads exactly as the method's own software would multiply with it; a layout
//! that would be read wrongly is refused, with the field or tensor and the supported values. A
//! module's tensors show whether it is quantised, so that lists of excluded modules (`ignore`,
//! `modules_to_not_convert`, `ignored_layers`) are not read.
//!
//! A module's weight is `W (out, in)`, `o` counts rows, `i` columns; `g = i / group`. `W[o, i] =
//! (code − zero) × scale`.
//!
//! - compressed-tensors, float 8. Codes: `weight` F8_E4M3 `(out, in)`. Scales: `weight_scale`: one,
//!   `(out, 1)`, or `(⌈out/r⌉, ⌈in/c⌉)` with blocks of r × c. No zero points.
//! - compressed-tensors, float 8 with powers of two (MXFP8). Codes: `weight` F8_E4M3 `(out, in)`.
//!   Scales: `weight_scale` U8 `(out, in/32)`. No zero points.
//! - compressed-tensors, float 4. Codes: `weight_packed` U8 `(out, in/2)`: the lower four bits of
//!   byte `[o, i/2]` for even `i`. Scales: `weight_scale` U8 `(out, in/32)` (MXFP4), or F8_E4M3
//!   `(out, in/16)` divided by `weight_global_scale` (NVFP4). No zero points.
//! - mxfp4 (gpt-oss), for `W` of all experts of a layer. Codes: `…_blocks` U8 `(experts, out,
//!   in/32, 16)`, as float 4 above. Scales: `…_scales` U8 `(experts, out, in/32)`. No zero points.
//! - modelopt, float 8. Codes: `weight` F8_E4M3 `(out, in)`. Scales: `weight_scale`: one, `(out)`,
//!   `(⌈out/128⌉, 1, ⌈in/128⌉, 1)`, or U8 `(out, in/32)`. No zero points.
//! - modelopt, float 4. Codes: `weight`, as float 4 above. Scales: `weight_scale` U8 `(out,
//!   in/32)`, or F8_E4M3 `(out, in/16)` multiplied with `weight_scale_2`. No zero points.
//! - compressed-tensors, int 8. Codes: `weight` I8 `(out, in)`. Scales: `weight_scale`: one, `(out,
//!   1)` or `(out, in/group)`. No zero points.
//! - compressed-tensors, int 4. Codes: `weight_packed` I32 `(out, ⌈in/8⌉)`: bits `4(i mod 8)` of
//!   word `[o, i/8]`, plus 8. Scales: `weight_scale (out, in/group)`. Zero points: 8, or
//!   `weight_zero_point` I32 `(⌈out/8⌉, in/group)`: bits `4(o mod 8)` of word `[o/8, g]`.
//! - fp8. Codes: `weight` F8_E4M3 `(out, in)`. Scales: `weight_scale_inv (⌈out/r⌉, ⌈in/c⌉)`, a
//!   factor in spite of its name; or `weight_scale`, one. No zero points.
//! - awq (gemm). Codes: `qweight` I32 `(in, out/8)`: of word `[i, o/8]` the bits from `4p` on,
//!   where `[0, 2, 4, 6, 1, 3, 5, 7][p] = o mod 8`. Scales: `scales (in/group, out)`. Zero points:
//!   `qzeros` I32 `(in/group, out/8)`, in the same order.
//! - gptq. Codes: `qweight` I32 `(in/8, out)`: bits `4(i mod 8)` of word `[i/8, o]`. Scales:
//!   `scales (⌈in/group⌉, out)`. Zero points: `qzeros` I32 `(⌈in/group⌉, out/8)`: bits `4(o mod 8)`
//!   of word `[g, o/8]`, plus 1 without carry (`gptq_v2`: as stored).
//!
//! GPTQ and compressed-tensors pack eight bits in the same way, four to a word, plus 128 where four
//! bits have 8 added. In gptq `g = g_idx[i]` where there is one, and so in compressed-tensors with
//! `weight_g_idx`.
//!
//! Scales of activations are not used: activations stay in bf16 or f32, which is more exact. Scales
//! of keys and values are not used either: the KV cache stores none.

mod byte_weights;
mod compressed;
mod four_bit_floats;
mod modelopt;
mod packed_weights;

use super::CheckpointError;
use super::folder::TensorFolder;
use super::quantized::{QuantizedTensor, QuantizedType};
use cleave_models::{ConfigError, ConfigFields};
use compressed::CompressedScheme;
pub(super) use four_bit_floats::EXPERT_ENDINGS;

/// Upper limit of groups, blocks and widths.
const COUNT_MAX: usize = 1 << 20;

/// Storage layout of a checkpoint's quantised modules.
#[derive(Clone, Debug, PartialEq)]
pub(super) enum Quantization {
    /// `compressed-tensors`, with the schemes of its groups of modules.
    Compressed(Vec<CompressedScheme>),
    /// `fp8`: scales for blocks of `(rows, columns)`, or one for each matrix.
    Fp8 { block: Option<(usize, usize)> },
    /// `awq`, with the columns per group; `None` means a whole row.
    Awq { group: Option<usize> },
    /// `gptq`, with the format of codes, the columns per group, and the number added to stored zero
    /// points.
    Gptq {
        element: QuantizedType,
        group: Option<usize>,
        plus: u8,
    },
    /// `modelopt`; the tensors of a module tell its layout.
    ModelOpt,
    /// `mxfp4` of gpt-oss: tensors of all experts of a layer alone.
    Mxfp4,
}

/// A module that may be quantised.
#[derive(Clone, Copy, Debug)]
pub(super) struct ProjectionModule<'a> {
    /// Name, for example `model.layers.0.mlp.up_proj`.
    pub(super) name: &'a str,
    pub(super) rows: usize,
    pub(super) columns: usize,
}

impl ProjectionModule<'_> {
    fn tensor(&self, kind: &str) -> String {
        format!("{}.{kind}", self.name)
    }
}

/// Keys of `quantization_config` that change no weight: how its writer worked, what another
/// program should do with it, and what a module's tensors tell themselves.
const HARMLESS: [&str; 56] = [
    "act_dynamic",
    "act_group_size",
    "act_sym",
    "activation_scheme",
    "amp",
    "autoround_version",
    "backend",
    "batch_size",
    "block_name_to_quantize",
    "cache_block_outputs",
    "damp_auto_increment",
    "damp_percent",
    "dataset",
    "dequantize",
    "desc_act",
    "disable_exllama",
    "do_fuse",
    "enable_minmax_tuning",
    "enable_norm_bias_tuning",
    "enable_quanted_input",
    "exllama_config",
    "fuse_max_seq_len",
    "global_compression_ratio",
    "gradient_accumulate_steps",
    "ignore",
    "ignored_layers",
    "is_marlin_format",
    "iters",
    "kv_cache_scheme",
    "lm_head",
    "low_gpu_mem_usage",
    "lr",
    "max_input_length",
    "meta",
    "method",
    "minmax_lr",
    "model_file_base_name",
    "model_name_or_path",
    "model_seqlen",
    "module_name_preceding_first_block",
    "modules_in_block_to_quantize",
    "modules_to_fuse",
    "modules_to_not_convert",
    "nsamples",
    "pad_token_id",
    "quantization_status",
    "quantizer",
    "scale_dtype",
    "seqlen",
    "static_groups",
    "sym",
    "tokenizer",
    "true_sequential",
    "use_cuda_fp16",
    "use_exllama",
    "version",
];

const METHODS: &str = "compressed-tensors, modelopt, mxfp4, fp8, awq and gptq are";

impl Quantization {
    /// Reads config.json; `None` if nothing is quantised.
    pub(super) fn read(config: &ConfigFields) -> Result<Option<Self>, ConfigError> {
        let Some(fields) = config.object("quantization_config")? else {
            return Ok(None);
        };
        fields.ignore(&HARMLESS);
        match fields.text("quant_method")? {
            Some("compressed-tensors") => compressed::schemes(&fields).map(Self::Compressed),
            Some("fp8") => fp8(&fields),
            Some("awq") => awq(&fields),
            Some("gptq") => gptq(&fields),
            Some("mxfp4") => Ok(Self::Mxfp4),
            Some("modelopt" | "modelopt_fp4" | "modelopt_mixed") => modelopt::read(&fields),
            Some(other) => {
                let problem = format!("{other} is not supported; {METHODS}");
                Err(fields.unsupported("quant_method", problem))
            }
            None => {
                let problem = format!("is missing, so the layout is unknown; {METHODS} known");
                Err(fields.damaged("quant_method", problem))
            }
        }
        .map(Some)
    }

    /// Reads modelopt's own file.
    pub(super) fn read_own_file(fields: &ConfigFields) -> Result<Self, ConfigError> {
        modelopt::read_own_file(fields)
    }

    /// Reads the weights of all experts of a layer, `(experts × out, in)`; `None` if they are
    /// dense.
    pub(super) fn experts(
        &self,
        folder: &TensorFolder,
        experts: ProjectionModule<'_>,
        count: usize,
    ) -> Result<Option<QuantizedTensor>, CheckpointError> {
        match self {
            Self::Mxfp4 if !folder.contains(experts.name) => {
                four_bit_floats::experts(folder, experts, count).map(Some)
            }
            Self::Mxfp4
            | Self::ModelOpt
            | Self::Compressed(_)
            | Self::Fp8 { .. }
            | Self::Awq { .. }
            | Self::Gptq { .. } => Ok(None),
        }
    }

    /// Reads the module's weight; `None` if it is dense.
    pub(super) fn weight(
        &self,
        folder: &TensorFolder,
        module: ProjectionModule<'_>,
    ) -> Result<Option<QuantizedTensor>, CheckpointError> {
        let (codes, is_bytes) = match self {
            Self::Compressed(_) if folder.contains(&module.tensor("weight_packed")) => {
                ("weight_packed", false)
            }
            Self::Compressed(_) | Self::Fp8 { .. } | Self::ModelOpt => ("weight", true),
            Self::Awq { .. } | Self::Gptq { .. } => ("qweight", false),
            Self::Mxfp4 => return Ok(None),
        };
        let name = module.tensor(codes);
        let found = folder.find(&name).filter(|found| {
            // A dense weight has the same name; its element type tells.
            !is_bytes || !matches!(found.dtype, "BF16" | "F16" | "F32")
        });
        let Some(found) = found else {
            return Ok(None);
        };
        let has_bytes = found.dtype == "U8";
        match self {
            Self::Compressed(schemes) if is_bytes => {
                byte_weights::compressed(schemes, folder, module)
            }
            Self::Compressed(schemes) if has_bytes => {
                four_bit_floats::compressed(schemes, folder, module)
            }
            Self::ModelOpt if has_bytes => four_bit_floats::modelopt(folder, module),
            Self::ModelOpt => byte_weights::modelopt(folder, module),
            Self::Mxfp4 => return Ok(None),
            Self::Compressed(schemes) => packed_weights::compressed(schemes, folder, module),
            Self::Fp8 { block } => byte_weights::fp8(*block, folder, module),
            Self::Awq { group } => packed_weights::awq(*group, folder, module),
            Self::Gptq {
                element,
                group,
                plus,
            } => packed_weights::gptq(*element, *group, *plus, folder, module),
        }
        .map(Some)
    }

    /// Whether a tensor of a module belongs to its weight, or may be ignored.
    pub(super) fn is_known(&self, kind: &str) -> bool {
        let weight: &[&str] = match self {
            Self::Compressed(_) => &[
                "weight_packed",
                "weight_scale",
                "weight_shape",
                "weight_zero_point",
                "weight_g_idx",
                "weight_global_scale",
            ],
            Self::ModelOpt => &["weight_scale", "weight_scale_2"],
            Self::Mxfp4 => &[],
            Self::Fp8 { .. } => &["weight_scale", "weight_scale_inv"],
            Self::Awq { .. } => &["qweight", "qzeros", "scales"],
            Self::Gptq { .. } => &["qweight", "qzeros", "scales", "g_idx"],
        };
        weight.contains(&kind) || UNUSED.contains(&kind)
    }

    /// Whether a tensor of a module is a scale of all its groups.
    pub(super) fn is_global_scale(&self, kind: &str) -> bool {
        match self {
            Self::Compressed(_) => kind == "weight_global_scale",
            Self::ModelOpt => kind == "weight_scale_2",
            Self::Fp8 { .. } | Self::Awq { .. } | Self::Gptq { .. } | Self::Mxfp4 => false,
        }
    }

    /// Name for logs and descriptions.
    pub(super) fn name(&self) -> &'static str {
        match self {
            Self::Compressed(_) => "compressed-tensors",
            Self::Fp8 { .. } => "fp8",
            Self::Awq { .. } => "awq",
            Self::Gptq { .. } => "gptq",
            Self::ModelOpt => "modelopt",
            Self::Mxfp4 => "mxfp4",
        }
    }
}

/// Scales of activations, keys and values. The engine ignores them: it quantises none of these, or
/// uses a scale of 1.
const UNUSED: [&str; 8] = [
    "input_global_scale",
    "input_scale",
    "input_zero_point",
    "output_scale",
    "output_zero_point",
    "q_scale",
    "k_scale",
    "v_scale",
];

/// Reads `quant_method` fp8: DeepSeek and Qwen have a scale per block, others one per matrix.
fn fp8(fields: &ConfigFields) -> Result<Quantization, ConfigError> {
    if let Some(format) = fields.text("fmt")?
        && format != "e4m3"
    {
        return Err(fields.unsupported("fmt", format!("{format} is not supported; e4m3 is")));
    }
    Ok(Quantization::Fp8 {
        block: block(fields, "weight_block_size")?,
    })
}

fn awq(fields: &ConfigFields) -> Result<Quantization, ConfigError> {
    let bits = fields.size("bits", COUNT_MAX)?;
    if bits != 4 {
        let problem = format!("{bits} bits are not supported; 4 are");
        return Err(fields.unsupported("bits", problem));
    }
    if let Some(version) = fields.text("version")?
        && !version.eq_ignore_ascii_case("gemm")
    {
        let problem = format!("{version} is not supported; gemm is");
        return Err(fields.unsupported("version", problem));
    }
    if fields.flag("zero_point")? == Some(false) {
        let problem = "false is not supported; weights with zero points are";
        return Err(fields.unsupported("zero_point", problem));
    }
    Ok(Quantization::Awq {
        group: group(fields, "group_size")?,
    })
}

fn gptq(fields: &ConfigFields) -> Result<Quantization, ConfigError> {
    let element = match fields.size("bits", COUNT_MAX)? {
        4 => QuantizedType::Int4,
        8 => QuantizedType::Int8,
        bits => {
            let problem = format!("{bits} bits are not supported; 4 and 8 are");
            return Err(fields.unsupported("bits", problem));
        }
    };
    check_gptq_words(fields)?;
    let format = match fields.text("checkpoint_format")? {
        None => fields.text("format")?,
        format => {
            fields.ignore(&["format"]);
            format
        }
    };
    let plus = match format {
        None | Some("gptq") => 1,
        Some("gptq_v2") => 0,
        Some(other) => {
            let problem = format!("{other} is not supported; gptq and gptq_v2 are");
            return Err(fields.unsupported("checkpoint_format", problem));
        }
    };
    Ok(Quantization::Gptq {
        element,
        group: group(fields, "group_size")?,
        plus,
    })
}

/// Refuses words of other widths than 32 bits, codes that are no whole numbers, and quantised
/// activations, all of which some writers state.
fn check_gptq_words(fields: &ConfigFields) -> Result<(), ConfigError> {
    for (name, supported) in [("pack_dtype", "int32"), ("data_type", "int")] {
        if let Some(value) = fields.text(name)?
            && value != supported
        {
            let problem = format!("{value} is not supported; {supported} is");
            return Err(fields.unsupported(name, problem));
        }
    }
    match fields.count("act_bits", COUNT_MAX)? {
        Some(bits) if bits < 16 => {
            let problem = format!("activations of {bits} bits are not supported; 16 and 32 are");
            Err(fields.unsupported("act_bits", problem))
        }
        _ => Ok(()),
    }
}

fn block(fields: &ConfigFields, name: &str) -> Result<Option<(usize, usize)>, ConfigError> {
    match fields.counts(name, COUNT_MAX)?.as_deref() {
        None => Ok(None),
        Some(&[rows, columns]) if rows > 0 && columns > 0 => Ok(Some((rows, columns))),
        Some(_) => Err(fields.damaged(name, "should be two numbers from 1")),
    }
}

/// Reads the columns per group; −1 or an absent field means a whole row.
fn group(fields: &ConfigFields, name: &str) -> Result<Option<usize>, ConfigError> {
    match fields.number(name)? {
        None | Some(-1.0) => Ok(None),
        Some(_) => fields.size(name, COUNT_MAX).map(Some),
    }
}
