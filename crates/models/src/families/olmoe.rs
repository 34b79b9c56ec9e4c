//! OLMoE: Llama with experts in every layer, whose probabilities are their weights, and norms of
//! whole projections of queries and keys.

use super::decoder::{self, Decoder, DecoderFactors, DecoderMlp, DecoderNorms, DecoderRopes};
use super::expert_names;
use super::experts::{self, COUNT_KEYS, DecoderExperts, ExpertsReader, SOFTMAX_ROUTER};
use super::names::{self, ATTENTION_MODULE, UNUSED_TENSORS};
use crate::error::ConfigError;
use crate::fields::ConfigFields;
use crate::registry::Family;
use crate::spec::{ModelSpec, QkNormScope, RouterSpec};

pub(crate) static FAMILY: Family = Family {
    name: "olmoe",
    models: "OLMoE (1B-7B)",
    classes: &["OlmoeForCausalLM"],
    spec,
    tensors: &[
        names::ENDS,
        names::NORMS,
        names::ATTENTION,
        names::HEAD_NORMS,
        expert_names::EXPERTS_QWEN,
    ],
    attention_module: ATTENTION_MODULE,
    unused_tensors: UNUSED_TENSORS,
    mtp_layers_key: None,
    unused_keys: &["router_aux_loss_coef"],
};

/// The class's own default.
const EPSILON: f64 = 1e-5;

fn spec(fields: &ConfigFields) -> Result<ModelSpec, ConfigError> {
    let heads = decoder::heads(fields, None)?;
    let hidden = fields.size("hidden_size", decoder::WIDTH_MAX)?;
    if heads.query_width() != hidden {
        let problem = format!(
            "{} times the heads is not hidden_size, {hidden}, which the class's norm of queries has",
            heads.head_dim
        );
        return Err(fields.damaged("head_dim", problem));
    }
    let router = RouterSpec {
        weights: experts::weights(fields, false, 0.0)?,
        ..SOFTMAX_ROUTER
    };
    let reader = ExpertsReader {
        count: COUNT_KEYS,
        width: "intermediate_size",
    };
    let experts = DecoderExperts {
        spec: reader.read(fields, router)?,
        has_experts: experts::in_every_layer(fields)?,
    };
    Decoder {
        family: FAMILY.name,
        heads,
        biases: decoder::attention_biases(fields)?,
        mlp: DecoderMlp::with_experts(experts),
        norms: DecoderNorms {
            qk: Some(QkNormScope::Projection),
            epsilon: EPSILON,
            ..DecoderNorms::default()
        },
        factors: DecoderFactors::default(),
        windows: decoder::no_windows(fields)?,
        ropes: DecoderRopes::read(fields, &heads)?,
    }
    .spec(fields)
}
