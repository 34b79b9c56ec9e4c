//! GLM-4 (9B and 32B of April 2025): norms of inputs and outputs, a rotary embedding of neighbours
//! over half of each head, and a fused gate.

use super::decoder::{
    self, Decoder, DecoderFactors, DecoderMlp, DecoderNorms, DecoderRopes, NormPlacement,
};
use super::names::{self, ATTENTION_MODULE, UNUSED_TENSORS};
use crate::error::ConfigError;
use crate::fields::ConfigFields;
use crate::registry::Family;
use crate::rope::{RopePairs, RopeReader};
use crate::spec::{AttentionBiases, ModelSpec};

pub(crate) static FAMILY: Family = Family {
    name: "glm4",
    models: "GLM-4 of April 2025 (9B, 32B)",
    classes: &["Glm4ForCausalLM"],
    spec,
    tensors: &[
        names::ENDS,
        names::NORMS_GLM,
        names::ATTENTION,
        names::MLP_FUSED,
    ],
    attention_module: ATTENTION_MODULE,
    unused_tensors: UNUSED_TENSORS,
    mtp_layers_key: None,
    unused_keys: &[],
};

/// The class's own default.
const HEAD_DIM: usize = 128;

fn spec(fields: &ConfigFields) -> Result<ModelSpec, ConfigError> {
    let heads = decoder::heads(fields, Some(HEAD_DIM))?;
    let rope = RopeReader {
        share: Some(0.5),
        pairs: RopePairs::Neighbours,
        ..RopeReader::new(heads.head_dim)
    };
    Decoder {
        family: FAMILY.name,
        heads,
        biases: AttentionBiases {
            qkv: fields.flag("attention_bias")?.unwrap_or(true),
            output: false,
        },
        mlp: DecoderMlp::default(),
        norms: DecoderNorms {
            placement: NormPlacement::Both,
            epsilon: 1.5625e-7,
            ..DecoderNorms::default()
        },
        factors: DecoderFactors::default(),
        windows: decoder::no_windows(fields)?,
        ropes: DecoderRopes::one(rope.read(fields)?),
    }
    .spec(fields)
}
