//! Names of tensors of mixtures of experts, in groups of which each family has some.
//!
//! Owns: the groups. Never: knows a family.
//! Invariant: two groups of one family name no role of a layer twice.

use crate::tensors::Projection::{
    self, ExpertDown, ExpertGate, ExpertUp, SharedDown, SharedGate, SharedUp,
};
use crate::tensors::TensorRole::{
    ChoiceBias, ExpertBiases, Experts, Router, RouterBias, SharedExpertGate, Sinks, Stack, Weight,
};
use crate::tensors::{ExpertAxes, NamedRole, StackedRows};

/// Experts as Qwen2-MoE names them, each projection of each expert a tensor.
pub(super) const EXPERTS_QWEN: &[NamedRole] = &[
    ("model.layers.{layer}.mlp.gate.weight", Router),
    (
        "model.layers.{layer}.mlp.gate.e_score_correction_bias",
        ChoiceBias,
    ),
    (
        "model.layers.{layer}.mlp.experts.{expert}.gate_proj.weight",
        Weight(ExpertGate),
    ),
    (
        "model.layers.{layer}.mlp.experts.{expert}.up_proj.weight",
        Weight(ExpertUp),
    ),
    (
        "model.layers.{layer}.mlp.experts.{expert}.down_proj.weight",
        Weight(ExpertDown),
    ),
];

/// Shared expert as Qwen2-MoE names it, with its gate.
pub(super) const SHARED_QWEN: &[NamedRole] = &[
    (
        "model.layers.{layer}.mlp.shared_expert_gate.weight",
        SharedExpertGate,
    ),
    (
        "model.layers.{layer}.mlp.shared_expert.gate_proj.weight",
        Weight(SharedGate),
    ),
    (
        "model.layers.{layer}.mlp.shared_expert.up_proj.weight",
        Weight(SharedUp),
    ),
    (
        "model.layers.{layer}.mlp.shared_expert.down_proj.weight",
        Weight(SharedDown),
    ),
];

/// Shared experts as DeepSeek names them: several are one wide MLP.
pub(super) const SHARED_DEEPSEEK: &[NamedRole] = &[
    (
        "model.layers.{layer}.mlp.shared_experts.gate_proj.weight",
        Weight(SharedGate),
    ),
    (
        "model.layers.{layer}.mlp.shared_experts.up_proj.weight",
        Weight(SharedUp),
    ),
    (
        "model.layers.{layer}.mlp.shared_experts.down_proj.weight",
        Weight(SharedDown),
    ),
];

/// Experts as Mixtral names them, each projection of each expert a tensor: `w1` is the gate, `w3`
/// its factor, `w2` leads back.
pub(super) const EXPERTS_MIXTRAL: &[NamedRole] = &[
    ("model.layers.{layer}.block_sparse_moe.gate.weight", Router),
    (
        "model.layers.{layer}.block_sparse_moe.e_score_correction_bias",
        ChoiceBias,
    ),
    (
        "model.layers.{layer}.block_sparse_moe.experts.{expert}.w1.weight",
        Weight(ExpertGate),
    ),
    (
        "model.layers.{layer}.block_sparse_moe.experts.{expert}.w3.weight",
        Weight(ExpertUp),
    ),
    (
        "model.layers.{layer}.block_sparse_moe.experts.{expert}.w2.weight",
        Weight(ExpertDown),
    ),
];

/// Experts as Granite names them, all of a layer in one tensor.
pub(super) const EXPERTS_GRANITE: &[NamedRole] = &[
    (
        "model.layers.{layer}.block_sparse_moe.router.layer.weight",
        Router,
    ),
    (
        "model.layers.{layer}.block_sparse_moe.input_linear.weight",
        Experts {
            parts: Projection::EXPERT_GATE_UP,
            axes: ExpertAxes::OutIn,
            rows: StackedRows::Consecutive,
        },
    ),
    (
        "model.layers.{layer}.block_sparse_moe.output_linear.weight",
        Experts {
            parts: Projection::EXPERT_DOWN,
            axes: ExpertAxes::OutIn,
            rows: StackedRows::Consecutive,
        },
    ),
];

/// Shared expert as Granite names it.
pub(super) const SHARED_GRANITE: &[NamedRole] = &[
    (
        "model.layers.{layer}.shared_mlp.input_linear.weight",
        Stack(Projection::SHARED_GATE_UP),
    ),
    (
        "model.layers.{layer}.shared_mlp.output_linear.weight",
        Weight(SharedDown),
    ),
];

/// Experts as gpt-oss names them: all of a layer in one tensor, rows of gate and factor in turn.
pub(super) const EXPERTS_GPT_OSS: &[NamedRole] = &[
    ("model.layers.{layer}.mlp.router.weight", Router),
    ("model.layers.{layer}.mlp.router.bias", RouterBias),
    (
        "model.layers.{layer}.mlp.experts.gate_up_proj",
        Experts {
            parts: Projection::EXPERT_GATE_UP,
            axes: ExpertAxes::InOut,
            rows: StackedRows::Interleaved,
        },
    ),
    (
        "model.layers.{layer}.mlp.experts.gate_up_proj_bias",
        ExpertBiases {
            parts: Projection::EXPERT_GATE_UP,
            rows: StackedRows::Interleaved,
        },
    ),
    (
        "model.layers.{layer}.mlp.experts.down_proj",
        Experts {
            parts: Projection::EXPERT_DOWN,
            axes: ExpertAxes::InOut,
            rows: StackedRows::Consecutive,
        },
    ),
    (
        "model.layers.{layer}.mlp.experts.down_proj_bias",
        ExpertBiases {
            parts: Projection::EXPERT_DOWN,
            rows: StackedRows::Consecutive,
        },
    ),
];

/// Sinks of attention as gpt-oss names them.
pub(super) const SINKS: &[NamedRole] = &[("model.layers.{layer}.self_attn.sinks", Sinks)];
