//! Seed-OSS: Llama's layers with biases of queries, keys and values.

use super::decoder::{self, Decoder, DecoderFactors, DecoderMlp, DecoderNorms, DecoderRopes};
use super::names::{self, ATTENTION_MODULE, UNUSED_TENSORS};
use crate::error::ConfigError;
use crate::fields::ConfigFields;
use crate::registry::Family;
use crate::spec::{AttentionBiases, ModelSpec};

pub(crate) static FAMILY: Family = Family {
    name: "seed_oss",
    models: "Seed-OSS",
    classes: &["SeedOssForCausalLM"],
    spec,
    tensors: names::LLAMA,
    attention_module: ATTENTION_MODULE,
    unused_tensors: UNUSED_TENSORS,
    mtp_layers_key: None,
    unused_keys: &["residual_dropout"],
};

/// The class's own default.
const HEAD_DIM: usize = 128;

fn spec(fields: &ConfigFields) -> Result<ModelSpec, ConfigError> {
    let heads = decoder::heads(fields, Some(HEAD_DIM))?;
    Decoder {
        family: FAMILY.name,
        heads,
        biases: AttentionBiases {
            qkv: fields.flag("attention_bias")?.unwrap_or(true),
            output: fields.flag("attention_out_bias")?.unwrap_or(false),
        },
        mlp: DecoderMlp::read(fields)?,
        norms: DecoderNorms::default(),
        factors: DecoderFactors::default(),
        windows: decoder::no_windows(fields)?,
        ropes: DecoderRopes::read(fields, &heads)?,
    }
    .spec(fields)
}
