//! Gemma 3, its text part: norms of inputs and outputs whose weights are stored less one, a scaled
//! embedding, and windows in five of six layers, with a rotary embedding of their own.

use super::decoder::{
    self, Decoder, DecoderFactors, DecoderMlp, DecoderNorms, DecoderRopes, NormPlacement,
};
use super::names::{self, ATTENTION_MODULE, UNUSED_TENSORS};
use crate::error::ConfigError;
use crate::fields::ConfigFields;
use crate::registry::Family;
use crate::rope::{RopeReader, SlidingRope};
use crate::spec::{Activation, ModelSpec, NormWeight, QkNormScope, Scalars};

pub(crate) static FAMILY: Family = Family {
    name: "gemma3_text",
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
    let scalar = fields.number("query_pre_attn_scalar")?.unwrap_or(256.0);
    if !(1e-3..=1e9).contains(&scalar) {
        let problem = format!("{scalar} is not from 0.001 to 1000000000");
        return Err(fields.damaged("query_pre_attn_scalar", problem));
    }
    Decoder {
        family: FAMILY.name,
        heads,
        biases: decoder::attention_biases(fields)?,
        mlp: DecoderMlp {
            activation: "hidden_activation",
            activation_default: Activation::GeluTanh,
            ..DecoderMlp::default()
        },
        norms: DecoderNorms {
            placement: NormPlacement::Both,
            qk: Some(QkNormScope::Head),
            weight: NormWeight::PlusOne,
            ..DecoderNorms::default()
        },
        factors: DecoderFactors {
            scores: Some((1.0 / scalar.sqrt()) as f32),
            scalars: Scalars {
                embedding: (fields.size("hidden_size", decoder::WIDTH_MAX)? as f32).sqrt(),
                is_embedding_rounded: true,
                ..Scalars::default()
            },
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
