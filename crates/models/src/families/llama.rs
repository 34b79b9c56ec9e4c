//! Llama 2, 3, 3.1, 3.2, 3.3 and models with their architecture.

use super::decoder::{self, ATTENTION_MODULE, Decoder, DecoderNorms, NAMES, UNUSED_TENSORS};
use crate::error::ConfigError;
use crate::fields::ConfigFields;
use crate::registry::Family;
use crate::spec::{AttentionBiases, ModelSpec};

pub(crate) static FAMILY: Family = Family {
    name: "llama",
    classes: &["LlamaForCausalLM"],
    spec,
    tensors: NAMES,
    attention_module: ATTENTION_MODULE,
    unused_tensors: UNUSED_TENSORS,
    // The class reads no window; some finetunes state one.
    unused_keys: &["sliding_window", "max_window_layers", "use_sliding_window"],
};

fn spec(fields: &ConfigFields) -> Result<ModelSpec, ConfigError> {
    let attention = fields.flag("attention_bias")?.unwrap_or(false);
    Decoder {
        family: FAMILY.name,
        heads: decoder::heads(fields, None)?,
        biases: AttentionBiases {
            qkv: attention,
            output: attention,
        },
        mlp_bias: fields.flag("mlp_bias")?.unwrap_or(false),
        norms: DecoderNorms::default(),
        windows: decoder::no_windows(fields)?,
    }
    .spec(fields)
}
