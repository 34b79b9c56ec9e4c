//! gpt-oss: experts with biases and a clamped gate, sinks of attention, and windows in every
//! second layer.

use super::decoder::{self, Decoder, DecoderFactors, DecoderMlp, DecoderNorms, DecoderRopes};
use super::expert_names;
use super::experts::{self, COUNT_KEYS, DecoderExperts, ExpertsReader, LOGITS_ROUTER};
use super::names::{self, ATTENTION_MODULE, UNUSED_TENSORS};
use crate::error::ConfigError;
use crate::fields::ConfigFields;
use crate::registry::Family;
use crate::rope::RopeReader;
use crate::spec::{Activation, ExpertsSpec, GatedMlpSpec, ModelSpec, RouterSpec};

pub(crate) static FAMILY: Family = Family {
    name: "gpt_oss",
    models: "gpt-oss (20b, 120b)",
    classes: &["GptOssForCausalLM"],
    spec,
    tensors: &[
        names::ENDS,
        names::NORMS,
        names::ATTENTION,
        expert_names::SINKS,
        expert_names::EXPERTS_GPT_OSS,
    ],
    attention_module: ATTENTION_MODULE,
    unused_tensors: UNUSED_TENSORS,
    mtp_layers_key: None,
    // The class has its own activation whatever `hidden_act` says. The first context is stated
    // by the rotary embedding too.
    unused_keys: &[
        "hidden_act",
        "initial_context_length",
        "router_aux_loss_coef",
    ],
};

/// The class's own defaults.
const HEAD_DIM: usize = 64;
const WINDOW: usize = 128;
const THETA: f64 = 150_000.0;
const EPSILON: f64 = 1e-5;
const LIMIT: f32 = 7.0;
/// Gain of the gate's sigmoid, which the class lets a file change and no file does.
const ALPHA: f64 = 1.702;

fn spec(fields: &ConfigFields) -> Result<ModelSpec, ConfigError> {
    let heads = decoder::heads(fields, Some(HEAD_DIM))?;
    if fields.get("rope_parameters").is_none() && fields.get("rope_scaling").is_none() {
        let problem = "is missing; config.json should have the rotary embedding's scaling";
        return Err(fields.damaged("rope_scaling", problem));
    }
    let rope = RopeReader {
        theta: THETA,
        ..RopeReader::new(heads.head_dim)
    };
    let attention = decoder::attention_biases_or(fields, true)?;
    let experts = DecoderExperts {
        spec: experts(fields)?,
        has_experts: experts::in_every_layer(fields)?,
    };
    Decoder {
        family: FAMILY.name,
        heads,
        biases: attention,
        mlp: DecoderMlp::with_experts(experts),
        norms: DecoderNorms {
            epsilon: EPSILON,
            ..DecoderNorms::default()
        },
        factors: DecoderFactors {
            has_sinks: true,
            ..DecoderFactors::default()
        },
        windows: decoder::windows_where(fields, WINDOW, |layer| layer.is_multiple_of(2))?,
        ropes: DecoderRopes::one(rope.read(fields)?),
    }
    .spec(fields)
}

fn experts(fields: &ConfigFields) -> Result<ExpertsSpec, ConfigError> {
    let router = RouterSpec {
        has_bias: true,
        ..LOGITS_ROUTER
    };
    let reader = ExpertsReader {
        count: COUNT_KEYS,
        width: "intermediate_size",
    };
    let spec = reader.read(fields, router)?;
    const CHOSEN: &str = "experts_per_token";
    if let Some(other) = fields.count(CHOSEN, decoder::WIDTH_MAX)?
        && other != spec.chosen
    {
        let chosen = spec.chosen;
        let problem = format!("{other} differs from num_experts_per_tok, {chosen}");
        return Err(fields.damaged(CHOSEN, problem));
    }
    const GAIN: &str = "swiglu_alpha";
    if let Some(alpha) = fields.number(GAIN)?
        && alpha != ALPHA
    {
        let problem = format!("{alpha} is not supported; {ALPHA} is");
        return Err(fields.unsupported(GAIN, problem));
    }
    let limit = decoder::factor_or(fields, "swiglu_limit", LIMIT)?;
    Ok(ExpertsSpec {
        expert: GatedMlpSpec {
            activation: Activation::ClampedSwiGlu { limit },
            bias: true,
            ..spec.expert
        },
        ..spec
    })
}
