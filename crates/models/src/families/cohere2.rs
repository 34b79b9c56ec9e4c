//! Cohere2 (Command R7B, Command A): Cohere with windows in three of four layers, the only ones
//! with a rotary embedding.

use super::cohere;
use super::decoder::{self, DecoderRopes};
use super::names::{self, ATTENTION_MODULE, UNUSED_TENSORS};
use crate::error::ConfigError;
use crate::fields::ConfigFields;
use crate::registry::Family;
use crate::rope::Rope;
use crate::spec::ModelSpec;
use serde_json::{Value, json};

pub(crate) static FAMILY: Family = Family {
    name: "cohere2",
    models: "Command R7B, Command A",
    classes: &["Cohere2ForCausalLM"],
    spec,
    tensors: names::LLAMA,
    attention_module: ATTENTION_MODULE,
    unused_tensors: UNUSED_TENSORS,
    mtp_layers_key: None,
    // A way to split the embedding among devices.
    unused_keys: &["use_parallel_embedding"],
};

/// Layers from one without a window to the next, in the class.
const PERIOD: usize = 4;

fn spec(fields: &ConfigFields) -> Result<ModelSpec, ConfigError> {
    check_form(fields)?;
    let heads = decoder::heads(fields, None)?;
    let windows = decoder::periodic_windows(fields, PERIOD)?;
    let is_absent = windows.iter().map(Option::is_none);
    let ropes = DecoderRopes::two(
        cohere::rope(&heads).read(fields)?,
        Rope::absent(),
        is_absent,
    );
    cohere::decoder(fields, FAMILY.name, heads, windows, ropes)?.spec(fields)
}

/// Refuses a file that names another form than the class has, which reads none of these keys.
fn check_form(fields: &ConfigFields) -> Result<(), ConfigError> {
    let period = fields.get("sliding_window_pattern").cloned();
    let mut fixed = vec![
        ("order_of_interleaved_layers", json!("local_attn_first")),
        ("position_embedding_type", json!("rope_gptj")),
        ("rotary_pct", json!(1.0)),
        ("use_embedding_sharing", json!(true)),
        ("use_gated_activation", json!(true)),
        ("use_parallel_block", json!(true)),
    ];
    if fields.get("layer_types").is_some() {
        fields.ignore(&["layer_switch"]);
    } else {
        fixed.push(("layer_switch", period.unwrap_or_else(|| json!(PERIOD))));
    }
    for (name, only) in fixed {
        let is_same = |value: &Value| {
            // 1 and 1.0 are one number.
            *value == only || value.is_number() && value.as_f64() == only.as_f64()
        };
        if let Some(value) = fields.get(name).filter(|value| !is_same(value)) {
            let problem = format!("{value} is not supported; {only} is");
            return Err(fields.unsupported(name, problem));
        }
    }
    Ok(())
}
