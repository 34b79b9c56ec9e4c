//! Granite 4 without experts and without layers of a state: Granite 3 with a fused gate.

use super::decoder::{self, Decoder, DecoderMlp, DecoderNorms, DecoderRopes};
use super::granite;
use super::names::{self, ATTENTION_MODULE, UNUSED_TENSORS};
use crate::error::ConfigError;
use crate::fields::ConfigFields;
use crate::registry::Family;
use crate::rope::{Rope, RopeReader};
use crate::spec::ModelSpec;

pub(crate) static FAMILY: Family = Family {
    name: "granitemoehybrid",
    models: "Granite 4 without experts and states (micro, 350M, 1B)",
    classes: &["GraniteMoeHybridForCausalLM"],
    spec,
    tensors: &[
        names::ENDS,
        names::NORMS,
        names::ATTENTION,
        names::MLP_SHARED,
    ],
    attention_module: ATTENTION_MODULE,
    unused_tensors: UNUSED_TENSORS,
    unused_keys: &[
        "init_method",
        "intermediate_size",
        "layers_block_type",
        "mamba_chunk_size",
        "mamba_conv_bias",
        "mamba_d_conv",
        "mamba_d_head",
        "mamba_d_state",
        "mamba_expand",
        "mamba_n_groups",
        "mamba_n_heads",
        "mamba_proj_bias",
        "normalization_function",
        "num_experts_per_tok",
        "router_aux_loss_coef",
        "time_step_limit",
        "time_step_max",
        "time_step_min",
    ],
};

fn spec(fields: &ConfigFields) -> Result<ModelSpec, ConfigError> {
    if fields.count("num_local_experts", usize::MAX)?.unwrap_or(8) > 0 {
        let problem = "experts are not supported; 0, a dense model, is";
        return Err(fields.unsupported("num_local_experts", problem));
    }
    let heads = decoder::heads(fields, None)?;
    let layers_count = fields.size("num_hidden_layers", decoder::LAYERS_MAX)?;
    let types = fields.texts("layer_types")?.unwrap_or_default();
    let is_attention = |kind: &&str| ["attention", "full_attention"].contains(kind);
    if types.len() != layers_count || !types.iter().all(is_attention) {
        let problem = "layers with a state are not supported; attention in every layer is";
        return Err(fields.unsupported("layer_types", problem));
    }
    let rope = RopeReader::new(heads.head_dim).read(fields)?;
    let rope = match fields.text("position_embedding_type")? {
        Some("rope") => rope,
        None | Some("nope") => Rope::absent(),
        Some(other) => {
            let problem = format!("{other} is not supported; rope, nope and null are");
            return Err(fields.unsupported("position_embedding_type", problem));
        }
    };
    Decoder {
        family: FAMILY.name,
        heads,
        biases: decoder::attention_biases(fields)?,
        mlp: DecoderMlp {
            width: "shared_intermediate_size",
            ..DecoderMlp::default()
        },
        norms: DecoderNorms::default(),
        factors: granite::factors(fields)?,
        windows: vec![None; layers_count],
        ropes: DecoderRopes::one(rope),
    }
    .spec(fields)
}
