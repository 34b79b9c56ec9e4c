//! Gemma 3, its text part: Gemma 2 without caps, with norms of heads, and windows in five of six
//! layers, with a rotary embedding of their own.

use super::decoder::{self, Decoder, DecoderFactors, DecoderNorms, DecoderRopes};
use super::gemma2;
use super::names::{self, ATTENTION_MODULE, UNUSED_TENSORS};
use crate::error::ConfigError;
use crate::fields::ConfigFields;
use crate::registry::Family;
use crate::rope::{RopeReader, SlidingRope};
use crate::spec::{ModelSpec, QkNormScope};

pub(crate) static FAMILY: Family = Family {
    name: "gemma3_text",
    models: "Gemma 3 without images (1B, 270M)",
    classes: &["Gemma3ForCausalLM"],
    spec,
    tensors: &[
        names::ENDS,
        names::NORMS_GEMMA,
        names::ATTENTION,
        names::MLP,
        names::HEAD_NORMS,
    ],
    attention_module: ATTENTION_MODULE,
    unused_tensors: UNUSED_TENSORS,
    mtp_layers_key: None,
    unused_keys: &[],
};

/// The class's own defaults, which files of wrapped models leave out.
const DEFAULTS: [(&str, usize); 4] = [
    ("vocab_size", 262_208),
    ("max_position_embeddings", 131_072),
    ("num_attention_heads", 8),
    ("num_key_value_heads", 4),
];
const HEAD_DIM: usize = 256;

fn spec(fields: &ConfigFields) -> Result<ModelSpec, ConfigError> {
    let fields = &fields.with_defaults(&DEFAULTS);
    let heads = decoder::heads(fields, Some(HEAD_DIM))?;
    let windows = decoder::periodic_windows(fields, 6)?;
    let rope = RopeReader {
        theta: 1_000_000.0,
        sliding: SlidingRope::Unscaled(Some(sliding_theta(fields)?)),
        ..RopeReader::new(heads.head_dim)
    };
    Decoder {
        family: FAMILY.name,
        heads,
        biases: decoder::attention_biases(fields)?,
        mlp: gemma2::mlp(),
        norms: DecoderNorms {
            qk: Some(QkNormScope::Head),
            ..gemma2::norms()
        },
        factors: DecoderFactors {
            scores: Some(gemma2::scores_factor(fields)?),
            scalars: gemma2::embedding_factor(fields)?,
            ..DecoderFactors::default()
        },
        ropes: DecoderRopes::by_window(rope.read_by_layer(fields)?, &windows),
        windows,
    }
    .spec(fields)
}

/// Base of the embedding of layers with a window, in the older spelling.
fn sliding_theta(fields: &ConfigFields) -> Result<f64, ConfigError> {
    Ok(fields.number("rope_local_base_freq")?.unwrap_or(10_000.0))
}
