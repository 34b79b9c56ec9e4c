//! Phi-3, Phi-4 and Phi-4-mini: Llama with fused projections, and with LongRoPE over parts of
//! heads.

use super::decoder::{self, Decoder, DecoderFactors, DecoderMlp, DecoderNorms, DecoderRopes};
use super::names::{self, ATTENTION_MODULE, UNUSED_TENSORS};
use crate::error::ConfigError;
use crate::fields::ConfigFields;
use crate::registry::Family;
use crate::rope::RopeReader;
use crate::spec::{AttentionBiases, ModelSpec};

pub(crate) static FAMILY: Family = Family {
    name: "phi3",
    models: "Phi-3, Phi-4, Phi-4-mini",
    classes: &["Phi3ForCausalLM"],
    spec,
    tensors: &[
        names::ENDS,
        names::NORMS,
        names::ATTENTION_FUSED,
        names::MLP_FUSED,
    ],
    attention_module: ATTENTION_MODULE,
    unused_tensors: UNUSED_TENSORS,
    mtp_layers_key: None,
    unused_keys: &[
        "full_attn_mod",
        "interpolate_factor",
        "original_max_position_embeddings",
    ],
};

fn spec(fields: &ConfigFields) -> Result<ModelSpec, ConfigError> {
    let heads = decoder::heads(fields, None)?;
    let rope = RopeReader {
        share: Some(1.0),
        ..RopeReader::new(heads.head_dim)
    };
    Decoder {
        family: FAMILY.name,
        heads,
        biases: AttentionBiases::default(),
        mlp: DecoderMlp::default(),
        norms: DecoderNorms {
            epsilon: 1e-5,
            ..DecoderNorms::default()
        },
        factors: DecoderFactors::default(),
        windows: decoder::stated_windows(fields)?,
        ropes: DecoderRopes::one(rope.read(fields)?),
    }
    .spec(fields)
}
