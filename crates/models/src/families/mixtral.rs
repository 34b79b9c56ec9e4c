//! Mixtral: Mistral whose MLPs are mixtures of experts in every layer.

use super::decoder::{self, Decoder, DecoderFactors, DecoderMlp, DecoderNorms, DecoderRopes};
use super::expert_names;
use super::experts::{self, COUNT_KEYS, DecoderExperts, ExpertsReader, SOFTMAX_ROUTER};
use super::names::{self, ATTENTION_MODULE, UNUSED_TENSORS};
use crate::error::ConfigError;
use crate::fields::ConfigFields;
use crate::registry::Family;
use crate::rope::RopeReader;
use crate::spec::{AttentionBiases, ChosenWeights, ModelSpec, RouterSpec};

pub(crate) static FAMILY: Family = Family {
    name: "mixtral",
    models: "Mixtral (8x7B, 8x22B)",
    classes: &["MixtralForCausalLM"],
    spec,
    tensors: &[
        names::ENDS,
        names::NORMS,
        names::ATTENTION,
        expert_names::EXPERTS_MIXTRAL,
    ],
    attention_module: ATTENTION_MODULE,
    unused_tensors: UNUSED_TENSORS,
    mtp_layers_key: None,
    // Noise of routers is added in training alone.
    unused_keys: &["router_aux_loss_coef", "router_jitter_noise"],
};

/// The class's own defaults.
const THETA: f64 = 1e6;
const EPSILON: f64 = 1e-5;

fn spec(fields: &ConfigFields) -> Result<ModelSpec, ConfigError> {
    let heads = decoder::heads(fields, None)?;
    let rope = RopeReader {
        theta: THETA,
        ..RopeReader::new(heads.head_dim)
    };
    let router = RouterSpec {
        weights: ChosenWeights::Normalized { epsilon: 0.0 },
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
        biases: AttentionBiases::default(),
        mlp: DecoderMlp::with_experts(experts),
        norms: DecoderNorms {
            epsilon: EPSILON,
            ..DecoderNorms::default()
        },
        factors: DecoderFactors::default(),
        windows: decoder::stated_windows(fields)?,
        ropes: DecoderRopes::one(rope.read(fields)?),
    }
    .spec(fields)
}
