//! Qwen3 models with experts: Qwen3 whose MLPs are mixtures, in every layer or in some.

use super::decoder::{self, Decoder, DecoderFactors, DecoderMlp, DecoderNorms, DecoderRopes};
use super::expert_names;
use super::experts::{self, COUNT_KEYS, DecoderExperts, ExpertsReader, SOFTMAX_ROUTER};
use super::names::{self, ATTENTION_MODULE, UNUSED_TENSORS};
use crate::error::ConfigError;
use crate::fields::ConfigFields;
use crate::registry::Family;
use crate::spec::{ModelSpec, QkNormScope, RouterSpec};

pub(crate) static FAMILY: Family = Family {
    name: "qwen3_moe",
    models: "Qwen3 with experts (30B-A3B, 235B-A22B, Coder)",
    classes: &["Qwen3MoeForCausalLM"],
    spec,
    tensors: &[
        names::ENDS,
        names::NORMS,
        names::ATTENTION,
        names::HEAD_NORMS,
        names::MLP,
        expert_names::EXPERTS_QWEN,
    ],
    attention_module: ATTENTION_MODULE,
    unused_tensors: UNUSED_TENSORS,
    mtp_layers_key: None,
    // The class takes no notice of the layers that windows begin with.
    unused_keys: &["max_window_layers", "router_aux_loss_coef"],
};

/// The keys of experts in their own right: `intermediate_size` is the dense MLP's.
pub(super) const EXPERTS: ExpertsReader = ExpertsReader {
    count: COUNT_KEYS,
    width: "moe_intermediate_size",
};

fn spec(fields: &ConfigFields) -> Result<ModelSpec, ConfigError> {
    let heads = decoder::heads(fields, None)?;
    refuse_other_options(fields)?;
    let router = RouterSpec {
        weights: experts::weights(fields, false, 0.0)?,
        ..SOFTMAX_ROUTER
    };
    let experts = DecoderExperts {
        spec: EXPERTS.read(fields, router)?,
        has_experts: experts::in_sparse_steps(fields)?,
    };
    Decoder {
        family: FAMILY.name,
        heads,
        biases: decoder::attention_biases(fields)?,
        mlp: DecoderMlp::with_experts(experts),
        norms: DecoderNorms {
            qk: Some(QkNormScope::Head),
            ..DecoderNorms::default()
        },
        factors: DecoderFactors::default(),
        windows: decoder::switched_windows(fields, |_| true)?,
        ropes: DecoderRopes::read(fields, &heads)?,
    }
    .spec(fields)
}

/// Refuses options of other classes, which some files state as turned off.
fn refuse_other_options(fields: &ConfigFields) -> Result<(), ConfigError> {
    if fields.flag("use_qk_norm")? == Some(false) {
        let problem = "false is not supported; the class normalises queries and keys always";
        return Err(fields.unsupported("use_qk_norm", problem));
    }
    const SHARED: &str = "shared_expert_intermediate_size";
    match fields.count(SHARED, decoder::WIDTH_MAX)? {
        None | Some(0) => Ok(()),
        Some(width) => {
            let problem = format!("{width} is not supported; the class has no shared expert");
            Err(fields.unsupported(SHARED, problem))
        }
    }
}
