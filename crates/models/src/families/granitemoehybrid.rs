//! Granite 4 without layers of a state: Granite 3 with a fused gate, which is the MLP, or an expert
//! that every token uses beside those that a router chooses.

use super::decoder::{self, Decoder, DecoderMlp, DecoderNorms, DecoderRopes};
use super::experts::{self, DecoderExperts};
use super::names::{self, ATTENTION_MODULE, UNUSED_TENSORS};
use super::{expert_names, granite, granitemoe};
use crate::error::ConfigError;
use crate::fields::ConfigFields;
use crate::registry::Family;
use crate::rope::{Rope, RopeReader};
use crate::spec::{ExpertsSpec, ModelSpec};

pub(crate) static FAMILY: Family = Family {
    name: "granitemoehybrid",
    models: "Granite 4 without states (micro, 350M, 1B)",
    classes: &["GraniteMoeHybridForCausalLM"],
    spec,
    tensors: &[
        names::ENDS,
        names::NORMS,
        names::ATTENTION,
        names::MLP_SHARED,
        expert_names::EXPERTS_GRANITE,
        expert_names::SHARED_GRANITE,
    ],
    attention_module: ATTENTION_MODULE,
    unused_tensors: UNUSED_TENSORS,
    mtp_layers_key: None,
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
        mlp: mlp(fields)?,
        norms: DecoderNorms::default(),
        factors: granite::factors(fields)?,
        windows: vec![None; layers_count],
        ropes: DecoderRopes::one(rope),
    }
    .spec(fields)
}

/// Reads the MLP: a dense one if there are no experts to choose from, which must be said.
fn mlp(fields: &ConfigFields) -> Result<DecoderMlp, ConfigError> {
    const WIDTH: &str = "shared_intermediate_size";
    if fields.count("num_local_experts", decoder::WIDTH_MAX)? == Some(0) {
        return Ok(DecoderMlp {
            width: WIDTH,
            ..DecoderMlp::default()
        });
    }
    Ok(DecoderMlp::with_experts(DecoderExperts {
        spec: ExpertsSpec {
            shared: experts::shared(fields, WIDTH)?,
            ..granitemoe::experts(fields)?
        },
        has_experts: experts::in_every_layer(fields)?,
    }))
}
