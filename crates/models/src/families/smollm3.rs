//! SmolLM3: Llama without a rotary embedding in every fourth layer.

use super::decoder::{self, Decoder, DecoderFactors, DecoderMlp, DecoderNorms, DecoderRopes};
use super::names::{self, ATTENTION_MODULE, UNUSED_TENSORS};
use crate::error::ConfigError;
use crate::fields::ConfigFields;
use crate::registry::Family;
use crate::rope::{Rope, RopeReader};
use crate::spec::ModelSpec;

pub(crate) static FAMILY: Family = Family {
    name: "smollm3",
    models: "SmolLM3",
    classes: &["SmolLM3ForCausalLM"],
    spec,
    tensors: names::LLAMA,
    attention_module: ATTENTION_MODULE,
    unused_tensors: UNUSED_TENSORS,
    mtp_layers_key: None,
    unused_keys: &["max_window_layers", "sliding_window"],
};

fn spec(fields: &ConfigFields) -> Result<ModelSpec, ConfigError> {
    let heads = decoder::heads(fields, None)?;
    let windows = match fields.flag("use_sliding_window")? {
        Some(true) => decoder::windows(fields, usize::MAX)?,
        Some(false) | None => decoder::no_windows(fields)?,
    };
    let rope = RopeReader {
        theta: 2_000_000.0,
        ..RopeReader::new(heads.head_dim)
    };
    let has_rope = layers_with_rope(fields, windows.len())?;
    let is_absent = has_rope.into_iter().map(|has_rope| !has_rope);
    Decoder {
        family: FAMILY.name,
        heads,
        biases: decoder::attention_biases(fields)?,
        mlp: DecoderMlp::read(fields)?,
        norms: DecoderNorms::default(),
        factors: DecoderFactors::default(),
        windows,
        ropes: DecoderRopes::two(rope.read(fields)?, Rope::absent(), is_absent),
    }
    .spec(fields)
}

/// Whether each layer has a rotary embedding: `no_rope_layers` has a 1 for each that has one, or
/// else every layer but each `no_rope_layer_interval`-th has one.
fn layers_with_rope(fields: &ConfigFields, layers_count: usize) -> Result<Vec<bool>, ConfigError> {
    let interval = fields.count("no_rope_layer_interval", usize::MAX)?;
    let Some(marks) = fields.counts("no_rope_layers", 1)? else {
        let interval = interval.unwrap_or(4).max(1);
        let has_rope = |layer: usize| !(layer + 1).is_multiple_of(interval);
        return Ok((0..layers_count).map(has_rope).collect());
    };
    if marks.len() < layers_count {
        let problem = format!("{} entries for {layers_count} layers", marks.len());
        return Err(fields.damaged("no_rope_layers", problem));
    }
    Ok(marks.into_iter().map(|mark| mark == 1).collect())
}
