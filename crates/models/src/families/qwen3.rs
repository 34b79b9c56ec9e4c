//! Qwen3 models without experts (dense).

use super::decoder::{self, Decoder, DecoderFactors, DecoderMlp, DecoderNorms, DecoderRopes};
use super::names::{self, ATTENTION_MODULE, UNUSED_TENSORS};
use crate::error::ConfigError;
use crate::fields::ConfigFields;
use crate::registry::Family;
use crate::spec::{ModelSpec, QkNormScope};

pub(crate) static FAMILY: Family = Family {
    name: "qwen3",
    models: "Qwen3, dense",
    classes: &["Qwen3ForCausalLM"],
    spec,
    tensors: names::LLAMA,
    attention_module: ATTENTION_MODULE,
    unused_tensors: UNUSED_TENSORS,
    mtp_layers_key: None,
    unused_keys: &["sliding_window", "max_window_layers"],
};

/// The class's own default, which does not depend on the width.
const HEAD_DIM: usize = 128;

fn spec(fields: &ConfigFields) -> Result<ModelSpec, ConfigError> {
    let heads = decoder::heads(fields, Some(HEAD_DIM))?;
    Decoder {
        family: FAMILY.name,
        heads,
        biases: decoder::attention_biases(fields)?,
        mlp: DecoderMlp::default(),
        norms: DecoderNorms {
            qk: Some(QkNormScope::Head),
            ..DecoderNorms::default()
        },
        factors: DecoderFactors::default(),
        windows: decoder::optional_windows(fields)?,
        ropes: DecoderRopes::read(fields, &heads)?,
    }
    .spec(fields)
}
