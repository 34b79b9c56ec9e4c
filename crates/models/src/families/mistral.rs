//! Mistral 7B and its finetunes.

use super::decoder::{self, Decoder, DecoderFactors, DecoderMlp, DecoderNorms, DecoderRopes};
use super::names::{self, ATTENTION_MODULE, UNUSED_TENSORS};
use crate::error::ConfigError;
use crate::fields::ConfigFields;
use crate::registry::Family;
use crate::spec::{AttentionBiases, ModelSpec};

pub(crate) static FAMILY: Family = Family {
    name: "mistral",
    models: "Mistral 7B and its finetunes",
    classes: &["MistralForCausalLM"],
    spec,
    tensors: names::LLAMA,
    attention_module: ATTENTION_MODULE,
    unused_tensors: UNUSED_TENSORS,
    mtp_layers_key: None,
    unused_keys: &["max_window_layers", "use_sliding_window"],
};

fn spec(fields: &ConfigFields) -> Result<ModelSpec, ConfigError> {
    let heads = decoder::heads(fields, None)?;
    Decoder {
        family: FAMILY.name,
        heads,
        biases: AttentionBiases::default(),
        mlp: DecoderMlp::default(),
        norms: DecoderNorms::default(),
        factors: DecoderFactors::default(),
        windows: decoder::windows(fields, 0)?,
        ropes: DecoderRopes::read(fields, &heads)?,
    }
    .spec(fields)
}
