//! Qwen2 and Qwen2.5 models.

use super::decoder::{self, Decoder, DecoderFactors, DecoderMlp, DecoderNorms, DecoderRopes};
use super::names::{self, ATTENTION_MODULE, UNUSED_TENSORS};
use crate::error::ConfigError;
use crate::fields::ConfigFields;
use crate::registry::Family;
use crate::spec::{AttentionBiases, ModelSpec};

pub(crate) static FAMILY: Family = Family {
    name: "qwen2",
    models: "Qwen2, Qwen2.5",
    classes: &["Qwen2ForCausalLM"],
    spec,
    tensors: names::LLAMA,
    attention_module: ATTENTION_MODULE,
    unused_tensors: UNUSED_TENSORS,
    mtp_layers_key: None,
    // The class has its biases whatever these say.
    unused_keys: &[
        "attention_bias",
        "max_window_layers",
        "qkv_bias",
        "sliding_window",
    ],
};

fn spec(fields: &ConfigFields) -> Result<ModelSpec, ConfigError> {
    let heads = decoder::heads(fields, None)?;
    Decoder {
        family: FAMILY.name,
        heads,
        // Not in config.json: the class has these biases always.
        biases: AttentionBiases {
            qkv: true,
            output: false,
        },
        mlp: DecoderMlp::default(),
        norms: DecoderNorms::default(),
        factors: DecoderFactors::default(),
        windows: decoder::optional_windows(fields)?,
        ropes: DecoderRopes::read(fields, &heads)?,
    }
    .spec(fields)
}
