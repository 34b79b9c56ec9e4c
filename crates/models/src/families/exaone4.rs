//! EXAONE 4: norms of outputs and heads; layers without a window do not rotate beside others.

use super::decoder::{
    self, Decoder, DecoderFactors, DecoderMlp, DecoderNorms, DecoderRopes, NormPlacement,
};
use super::names::{self, ATTENTION_MODULE, UNUSED_TENSORS};
use crate::error::ConfigError;
use crate::fields::ConfigFields;
use crate::registry::Family;
use crate::rope::{Rope, RopeReader};
use crate::spec::{AttentionBiases, ModelSpec, QkNormScope};

pub(crate) static FAMILY: Family = Family {
    name: "exaone4",
    models: "EXAONE 4",
    classes: &["Exaone4ForCausalLM"],
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
    let rope = RopeReader::new(heads.head_dim).read(fields)?;
    let ropes = if windows.iter().any(Option::is_some) {
        let is_absent = windows.iter().map(Option::is_none);
        DecoderRopes::two(rope, Rope::absent(), is_absent)
    } else {
        DecoderRopes::one(rope)
    };
    Decoder {
        family: FAMILY.name,
        heads,
        biases: AttentionBiases::default(),
        mlp: DecoderMlp::default(),
        norms: DecoderNorms {
            placement: NormPlacement::Output,
            qk: Some(QkNormScope::Head),
            epsilon: 1e-5,
            ..DecoderNorms::default()
        },
        factors: DecoderFactors::default(),
        windows,
        ropes,
    }
    .spec(fields)
}
