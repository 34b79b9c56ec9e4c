//! Llama 2, 3, 3.1, 3.2, 3.3 and models with their architecture.

use super::decoder::{self, Decoder, DecoderFactors, DecoderMlp, DecoderNorms, DecoderRopes};
use super::names::{self, ATTENTION_MODULE, UNUSED_TENSORS};
use crate::error::ConfigError;
use crate::fields::ConfigFields;
use crate::registry::Family;
use crate::spec::ModelSpec;

pub(crate) static FAMILY: Family = Family {
    name: "llama",
    models: "Llama 2, Llama 3.x",
    classes: &["LlamaForCausalLM"],
    spec,
    tensors: names::LLAMA,
    attention_module: ATTENTION_MODULE,
    unused_tensors: UNUSED_TENSORS,
    mtp_layers_key: None,
    // The class reads no window; some finetunes state one.
    unused_keys: &["sliding_window", "max_window_layers", "use_sliding_window"],
};

fn spec(fields: &ConfigFields) -> Result<ModelSpec, ConfigError> {
    let heads = decoder::heads(fields, None)?;
    Decoder {
        family: FAMILY.name,
        heads,
        biases: decoder::attention_biases(fields)?,
        mlp: DecoderMlp::read(fields)?,
        norms: DecoderNorms::default(),
        factors: DecoderFactors::default(),
        windows: decoder::no_windows(fields)?,
        ropes: DecoderRopes::read(fields, &heads)?,
    }
    .spec(fields)
}
