//! Mistral 7B and its finetunes.

use super::decoder::{self, ATTENTION_MODULE, Decoder, DecoderNorms, NAMES, UNUSED_TENSORS};
use crate::error::ConfigError;
use crate::fields::ConfigFields;
use crate::registry::Family;
use crate::spec::{AttentionBiases, ModelSpec};

pub(crate) static FAMILY: Family = Family {
    name: "mistral",
    classes: &["MistralForCausalLM"],
    spec,
    tensors: NAMES,
    attention_module: ATTENTION_MODULE,
    unused_tensors: UNUSED_TENSORS,
    unused_keys: &["max_window_layers", "use_sliding_window"],
};

fn spec(fields: &ConfigFields) -> Result<ModelSpec, ConfigError> {
    Decoder {
        family: FAMILY.name,
        heads: decoder::heads(fields, None)?,
        biases: AttentionBiases::default(),
        mlp_bias: false,
        norms: DecoderNorms::default(),
        windows: decoder::windows(fields, 0)?,
    }
    .spec(fields)
}
