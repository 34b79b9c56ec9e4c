//! Gemma 2: norms of inputs and outputs whose weights are stored less one, a scaled embedding,
//! windows in every second layer, and caps of scores and logits.

use super::decoder::{
    self, Decoder, DecoderFactors, DecoderMlp, DecoderNorms, DecoderRopes, NormPlacement,
};
use super::names::{self, ATTENTION_MODULE, UNUSED_TENSORS};
use crate::error::ConfigError;
use crate::fields::ConfigFields;
use crate::registry::Family;
use crate::spec::{Activation, ModelSpec, NormWeight, Scalars};

pub(crate) static FAMILY: Family = Family {
    name: "gemma2",
    models: "Gemma 2",
    classes: &["Gemma2ForCausalLM"],
    spec,
    tensors: &[
        names::ENDS,
        names::NORMS_GEMMA,
        names::ATTENTION,
        names::MLP,
    ],
    attention_module: ATTENTION_MODULE,
    unused_tensors: UNUSED_TENSORS,
    mtp_layers_key: None,
    // The class reads `hidden_activation`; published files have both.
    unused_keys: &["hidden_act"],
};

/// The class's own defaults.
const HEAD_DIM: usize = 256;
const SCORES_CAP: f32 = 50.0;
const LOGITS_CAP: f32 = 30.0;

fn spec(fields: &ConfigFields) -> Result<ModelSpec, ConfigError> {
    let heads = decoder::heads(fields, Some(HEAD_DIM))?;
    Decoder {
        family: FAMILY.name,
        heads,
        biases: decoder::attention_biases(fields)?,
        mlp: mlp(),
        norms: norms(),
        factors: DecoderFactors {
            scores: Some(scores_factor(fields)?),
            scores_cap: decoder::cap(fields, "attn_logit_softcapping", SCORES_CAP)?,
            scalars: Scalars {
                logits_cap: decoder::cap(fields, "final_logit_softcapping", LOGITS_CAP)?,
                ..embedding_factor(fields)?
            },
            ..DecoderFactors::default()
        },
        windows: decoder::periodic_windows(fields, 2)?,
        ropes: DecoderRopes::read(fields, &heads)?,
    }
    .spec(fields)
}

/// The MLP of a Gemma of any generation.
pub(super) fn mlp() -> DecoderMlp {
    DecoderMlp {
        activation: "hidden_activation",
        activation_default: Activation::GeluTanh,
        ..DecoderMlp::default()
    }
}

/// The norms of a Gemma of any generation.
pub(super) fn norms() -> DecoderNorms {
    DecoderNorms {
        placement: NormPlacement::Both,
        weight: NormWeight::PlusOne,
        ..DecoderNorms::default()
    }
}

/// Reads the factor of the scores of a Gemma of any generation.
pub(super) fn scores_factor(fields: &ConfigFields) -> Result<f32, ConfigError> {
    let scalar = fields.number("query_pre_attn_scalar")?.unwrap_or(256.0);
    if !(1e-3..=1e9).contains(&scalar) {
        let problem = format!("{scalar} is not from 0.001 to 1000000000");
        return Err(fields.damaged("query_pre_attn_scalar", problem));
    }
    Ok((1.0 / scalar.sqrt()) as f32)
}

/// Reads the factor of the embedding of a Gemma of any generation.
pub(super) fn embedding_factor(fields: &ConfigFields) -> Result<Scalars, ConfigError> {
    Ok(Scalars {
        embedding: (fields.size("hidden_size", decoder::WIDTH_MAX)? as f32).sqrt(),
        is_embedding_rounded: true,
        ..Scalars::default()
    })
}
