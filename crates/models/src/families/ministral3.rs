//! Ministral 3: Mistral with YaRN and queries that grow with their position.

use super::decoder::{self, Decoder, DecoderFactors, DecoderMlp, DecoderNorms, DecoderRopes};
use super::names::{self, ATTENTION_MODULE, UNUSED_TENSORS};
use crate::error::ConfigError;
use crate::fields::ConfigFields;
use crate::registry::Family;
use crate::rope::RopeReader;
use crate::spec::{AttentionBiases, ModelSpec};

pub(crate) static FAMILY: Family = Family {
    name: "ministral3",
    models: "Ministral 3",
    classes: &["Ministral3ForCausalLM"],
    spec,
    tensors: names::LLAMA,
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
        has_query_growth: true,
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
