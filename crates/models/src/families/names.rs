//! Names of tensors in Hugging Face's layout of Llama, in groups of which each family has some.
//!
//! Owns: the groups. Never: knows a family.
//! Invariant: two groups of one family name no role of a layer twice.

use crate::tensors::NamedRole;
use crate::tensors::Projection::{self, Down, Gate, Key, Output, Query, Up, Value};
use crate::tensors::TensorRole::{
    Bias, Embedding, FinalNorm, Head, KeyNorm, MixerInputNorm, MixerOutputNorm, MlpInputNorm,
    MlpOutputNorm, QueryNorm, Stack, Weight,
};

/// The names of Llama, and of families that differ in norms only.
pub(super) const LLAMA: &[&[NamedRole]] = &[ENDS, NORMS, ATTENTION, MLP, HEAD_NORMS];

/// Tensors of no layer.
pub(super) const ENDS: &[NamedRole] = &[
    ("model.embed_tokens.weight", Embedding),
    ("model.norm.weight", FinalNorm),
    ("lm_head.weight", Head),
];

/// Norms of inputs or of outputs. `post_attention_layernorm` follows attention: it is the norm of
/// the MLP's input where a layer has one, or else of attention's output.
pub(super) const NORMS: &[NamedRole] = &[
    (
        "model.layers.{layer}.input_layernorm.weight",
        MixerInputNorm,
    ),
    (
        "model.layers.{layer}.post_attention_layernorm.weight",
        MlpInputNorm,
    ),
    (
        "model.layers.{layer}.post_attention_layernorm.weight",
        MixerOutputNorm,
    ),
    (
        "model.layers.{layer}.post_feedforward_layernorm.weight",
        MlpOutputNorm,
    ),
];

/// Norms of inputs and of outputs, as Gemma has them.
pub(super) const NORMS_GEMMA: &[NamedRole] = &[
    (
        "model.layers.{layer}.input_layernorm.weight",
        MixerInputNorm,
    ),
    (
        "model.layers.{layer}.post_attention_layernorm.weight",
        MixerOutputNorm,
    ),
    (
        "model.layers.{layer}.pre_feedforward_layernorm.weight",
        MlpInputNorm,
    ),
    (
        "model.layers.{layer}.post_feedforward_layernorm.weight",
        MlpOutputNorm,
    ),
];

/// Norms of inputs and of outputs, as GLM-4 has them.
pub(super) const NORMS_GLM: &[NamedRole] = &[
    (
        "model.layers.{layer}.input_layernorm.weight",
        MixerInputNorm,
    ),
    (
        "model.layers.{layer}.post_self_attn_layernorm.weight",
        MixerOutputNorm,
    ),
    (
        "model.layers.{layer}.post_attention_layernorm.weight",
        MlpInputNorm,
    ),
    (
        "model.layers.{layer}.post_mlp_layernorm.weight",
        MlpOutputNorm,
    ),
];

/// Projections of attention, and the norms of queries and keys.
pub(super) const ATTENTION: &[NamedRole] = &[
    (
        "model.layers.{layer}.self_attn.q_proj.weight",
        Weight(Query),
    ),
    ("model.layers.{layer}.self_attn.q_proj.bias", Bias(Query)),
    ("model.layers.{layer}.self_attn.k_proj.weight", Weight(Key)),
    ("model.layers.{layer}.self_attn.k_proj.bias", Bias(Key)),
    (
        "model.layers.{layer}.self_attn.v_proj.weight",
        Weight(Value),
    ),
    ("model.layers.{layer}.self_attn.v_proj.bias", Bias(Value)),
    (
        "model.layers.{layer}.self_attn.o_proj.weight",
        Weight(Output),
    ),
    ("model.layers.{layer}.self_attn.o_proj.bias", Bias(Output)),
];

/// Attention whose queries, keys and values are one tensor.
pub(super) const ATTENTION_FUSED: &[NamedRole] = &[
    (
        "model.layers.{layer}.self_attn.qkv_proj.weight",
        Stack(Projection::QKV),
    ),
    (
        "model.layers.{layer}.self_attn.o_proj.weight",
        Weight(Output),
    ),
];

/// Projections of a gated MLP, each a tensor of its own.
pub(super) const MLP: &[NamedRole] = &[
    ("model.layers.{layer}.mlp.gate_proj.weight", Weight(Gate)),
    ("model.layers.{layer}.mlp.gate_proj.bias", Bias(Gate)),
    ("model.layers.{layer}.mlp.up_proj.weight", Weight(Up)),
    ("model.layers.{layer}.mlp.up_proj.bias", Bias(Up)),
    ("model.layers.{layer}.mlp.down_proj.weight", Weight(Down)),
    ("model.layers.{layer}.mlp.down_proj.bias", Bias(Down)),
];

/// Gated MLP whose gate and up projection are one tensor.
pub(super) const MLP_FUSED: &[NamedRole] = &[
    (
        "model.layers.{layer}.mlp.gate_up_proj.weight",
        Stack(Projection::GATE_UP),
    ),
    ("model.layers.{layer}.mlp.down_proj.weight", Weight(Down)),
];

/// Gated MLP as Granite 4 names it, beside experts that a dense model lacks.
pub(super) const MLP_SHARED: &[NamedRole] = &[
    (
        "model.layers.{layer}.shared_mlp.input_linear.weight",
        Stack(Projection::GATE_UP),
    ),
    (
        "model.layers.{layer}.shared_mlp.output_linear.weight",
        Weight(Down),
    ),
];

/// Norms of query and key heads.
pub(super) const HEAD_NORMS: &[NamedRole] = &[
    ("model.layers.{layer}.self_attn.q_norm.weight", QueryNorm),
    ("model.layers.{layer}.self_attn.k_norm.weight", KeyNorm),
];

/// Name of a layer's attention, beside which some writers store scales of keys and values.
pub(super) const ATTENTION_MODULE: &str = "self_attn";

/// Old writers stored the rotary frequencies.
pub(super) const UNUSED_TENSORS: &[&str] = &[".rotary_emb.inv_freq"];
