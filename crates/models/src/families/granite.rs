//! Granite 3: Llama with factors of embedding, outputs, scores and logits.

use super::decoder::{self, Decoder, DecoderFactors, DecoderMlp, DecoderNorms, DecoderRopes};
use super::names::{self, ATTENTION_MODULE, UNUSED_TENSORS};
use crate::error::ConfigError;
use crate::fields::ConfigFields;
use crate::registry::Family;
use crate::spec::{ModelSpec, Scalars};

pub(crate) static FAMILY: Family = Family {
    name: "granite",
    models: "Granite 3",
    classes: &["GraniteForCausalLM"],
    spec,
    tensors: names::LLAMA,
    attention_module: ATTENTION_MODULE,
    unused_tensors: UNUSED_TENSORS,
    mtp_layers_key: None,
    unused_keys: &[],
};

fn spec(fields: &ConfigFields) -> Result<ModelSpec, ConfigError> {
    let heads = decoder::heads(fields, None)?;
    Decoder {
        family: FAMILY.name,
        heads,
        biases: decoder::attention_biases(fields)?,
        mlp: DecoderMlp::read(fields)?,
        norms: DecoderNorms::default(),
        factors: factors(fields)?,
        windows: decoder::no_windows(fields)?,
        ropes: DecoderRopes::read(fields, &heads)?,
    }
    .spec(fields)
}

/// Reads the factors of a Granite model of any generation.
pub(super) fn factors(fields: &ConfigFields) -> Result<DecoderFactors, ConfigError> {
    Ok(DecoderFactors {
        scores: Some(decoder::factor(fields, "attention_multiplier")?),
        scalars: Scalars {
            embedding: decoder::factor(fields, "embedding_multiplier")?,
            residual: decoder::factor(fields, "residual_multiplier")?,
            logits: 1.0 / decoder::factor(fields, "logits_scaling")?,
            ..Scalars::default()
        },
        ..DecoderFactors::default()
    })
}
