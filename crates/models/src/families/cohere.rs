//! Cohere (Command R, Aya Expanse): attention and MLP read one LayerNorm of the layer's input, and
//! neighbours of heads are rotated.

use super::decoder::{
    self, Decoder, DecoderFactors, DecoderMlp, DecoderNorms, DecoderRopes, NormPlacement,
};
use super::names::{self, ATTENTION_MODULE, UNUSED_TENSORS};
use crate::error::ConfigError;
use crate::fields::ConfigFields;
use crate::registry::Family;
use crate::rope::{RopePairs, RopeReader};
use crate::spec::{HeadShape, ModelSpec, NormFormula, Scalars};

pub(crate) static FAMILY: Family = Family {
    name: "cohere",
    models: "Command R without norms of heads, Aya Expanse",
    classes: &["CohereForCausalLM"],
    spec,
    tensors: names::LLAMA,
    attention_module: ATTENTION_MODULE,
    unused_tensors: UNUSED_TENSORS,
    mtp_layers_key: None,
    unused_keys: &[],
};

/// The class's own defaults.
const THETA: f64 = 500_000.0;
const LOGIT_SCALE: f32 = 0.0625;

fn spec(fields: &ConfigFields) -> Result<ModelSpec, ConfigError> {
    let heads = decoder::heads(fields, None)?;
    let rope = RopeReader {
        theta: THETA,
        ..rope(&heads)
    };
    let windows = decoder::no_windows(fields)?;
    let ropes = DecoderRopes::one(rope.read(fields)?);
    decoder(fields, FAMILY.name, heads, windows, ropes)?.spec(fields)
}

/// The rotary embedding of a Cohere of any generation, but for its base.
pub(super) fn rope(heads: &HeadShape) -> RopeReader {
    RopeReader {
        pairs: RopePairs::Neighbours,
        ..RopeReader::new(heads.head_dim)
    }
}

/// Reads a Cohere of any generation, whose layers have these windows and rotary embeddings.
pub(super) fn decoder(
    fields: &ConfigFields,
    family: &'static str,
    heads: HeadShape,
    windows: Vec<Option<usize>>,
    ropes: DecoderRopes,
) -> Result<Decoder, ConfigError> {
    Ok(Decoder {
        family,
        heads,
        biases: decoder::attention_biases(fields)?,
        mlp: DecoderMlp::default(),
        norms: DecoderNorms {
            placement: NormPlacement::Shared,
            formula: NormFormula::LayerNorm,
            epsilon_key: "layer_norm_eps",
            epsilon: 1e-5,
            ..DecoderNorms::default()
        },
        factors: DecoderFactors {
            scalars: Scalars {
                logits: decoder::factor_or(fields, "logit_scale", LOGIT_SCALE)?,
                ..Scalars::default()
            },
            ..DecoderFactors::default()
        },
        windows,
        ropes,
    })
}
