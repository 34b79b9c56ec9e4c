//! OLMo 3: OLMo 2 with windows in three of four layers, whose rotary embedding is not scaled.

use super::decoder::{
    self, Decoder, DecoderFactors, DecoderMlp, DecoderNorms, DecoderRopes, NormPlacement,
};
use super::names::{self, ATTENTION_MODULE, UNUSED_TENSORS};
use crate::error::ConfigError;
use crate::fields::ConfigFields;
use crate::registry::Family;
use crate::rope::{RopeReader, SlidingRope};
use crate::spec::{ModelSpec, QkNormScope};

pub(crate) static FAMILY: Family = Family {
    name: "olmo3",
    models: "OLMo 3",
    classes: &["Olmo3ForCausalLM"],
    spec,
    tensors: names::LLAMA,
    attention_module: ATTENTION_MODULE,
    unused_tensors: UNUSED_TENSORS,
    mtp_layers_key: None,
    unused_keys: &[],
};

fn spec(fields: &ConfigFields) -> Result<ModelSpec, ConfigError> {
    let heads = decoder::heads(fields, None)?;
    let windows = decoder::periodic_windows(fields, 4)?;
    let rope = RopeReader {
        theta: 500_000.0,
        sliding: SlidingRope::Unscaled(None),
        ..RopeReader::new(heads.head_dim)
    };
    Decoder {
        family: FAMILY.name,
        heads,
        biases: decoder::attention_biases(fields)?,
        mlp: DecoderMlp::default(),
        norms: DecoderNorms {
            placement: NormPlacement::Output,
            qk: Some(QkNormScope::Projection),
            epsilon: 1e-5,
            ..DecoderNorms::default()
        },
        factors: DecoderFactors::default(),
        ropes: DecoderRopes::by_window(rope.read_by_layer(fields)?, &windows),
        windows,
    }
    .spec(fields)
}
