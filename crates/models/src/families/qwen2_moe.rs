//! Qwen1.5 and Qwen2 models with experts, and a shared expert behind a gate.

use super::decoder::{self, Decoder, DecoderFactors, DecoderMlp, DecoderNorms, DecoderRopes};
use super::experts::{self, DecoderExperts, SOFTMAX_ROUTER};
use super::names::{self, ATTENTION_MODULE, UNUSED_TENSORS};
use super::{expert_names, qwen3_moe};
use crate::error::ConfigError;
use crate::fields::ConfigFields;
use crate::registry::Family;
use crate::spec::{AttentionBiases, ExpertsSpec, ModelSpec, RouterSpec, SharedExpertSpec};

pub(crate) static FAMILY: Family = Family {
    name: "qwen2_moe",
    models: "Qwen1.5-MoE, Qwen2 with experts (57B-A14B)",
    classes: &["Qwen2MoeForCausalLM"],
    spec,
    tensors: &[
        names::ENDS,
        names::NORMS,
        names::ATTENTION,
        names::MLP,
        expert_names::EXPERTS_QWEN,
        expert_names::SHARED_QWEN,
    ],
    attention_module: ATTENTION_MODULE,
    unused_tensors: UNUSED_TENSORS,
    mtp_layers_key: None,
    unused_keys: &[
        "max_window_layers",
        "router_aux_loss_coef",
        "sliding_window",
    ],
};

fn spec(fields: &ConfigFields) -> Result<ModelSpec, ConfigError> {
    let heads = decoder::heads(fields, None)?;
    let router = RouterSpec {
        weights: experts::weights(fields, false, 0.0)?,
        ..SOFTMAX_ROUTER
    };
    let spec = qwen3_moe::EXPERTS.read(fields, router)?;
    let shared = SharedExpertSpec {
        mlp: experts::mlp(fields, "shared_expert_intermediate_size")?,
        has_gate: true,
    };
    let experts = DecoderExperts {
        spec: ExpertsSpec {
            shared: Some(shared),
            ..spec
        },
        has_experts: experts::in_sparse_steps(fields)?,
    };
    let first_full = fields.count("max_window_layers", decoder::LAYERS_MAX)?;
    let first_full = first_full.unwrap_or(28);
    Decoder {
        family: FAMILY.name,
        heads,
        biases: AttentionBiases {
            qkv: fields.flag("qkv_bias")?.unwrap_or(true),
            output: false,
        },
        mlp: DecoderMlp::with_experts(experts),
        norms: DecoderNorms::default(),
        factors: DecoderFactors::default(),
        // Every second layer has a window, as in the class; Qwen2 without experts begins them late.
        windows: decoder::switched_windows(fields, |layer| {
            layer.is_multiple_of(2) && layer < first_full
        })?,
        ropes: DecoderRopes::read(fields, &heads)?,
    }
    .spec(fields)
}
