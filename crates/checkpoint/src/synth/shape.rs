//! A shape: sizes and constants of a model.
//!
//! Owns: the config.json that is made of one, and the choice by name.
//! Never: draws a weight.
//! Invariant: every shape loads.

use super::SynthError;
use super::shapes::SHAPES;
use super::tokenizer::SpecialTokenIds;
use cleave_models::families;
use serde_json::{Map, Value, json};

/// Name and description of a shape.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct ShapeSummary {
    /// Name, as passed to [`synth`](super::synth).
    pub name: &'static str,
    /// Number of parameters and size, for people.
    pub about: &'static str,
}

/// Sizes and constants of a model.
#[derive(Clone, Copy, Debug)]
pub(super) struct ModelShape {
    pub(super) name: &'static str,
    pub(super) about: &'static str,
    /// Name of the family.
    pub(super) family: &'static str,
    pub(super) hidden: usize,
    pub(super) layers: usize,
    pub(super) query_heads: usize,
    pub(super) kv_heads: usize,
    pub(super) head_dim: usize,
    pub(super) intermediate: usize,
    pub(super) vocab: usize,
    pub(super) context: usize,
    pub(super) tied: bool,
    pub(super) theta: f64,
    /// Llama 3's scaling factor of the rotary embedding.
    pub(super) rope_factor: Option<f64>,
    pub(super) window: Option<usize>,
    pub(super) epsilon: f64,
    /// Whether config.json has `max_window_layers`, which other readers of this family may require
    /// even without a window.
    pub(super) has_window_layers: bool,
    /// Keys that only this family has, as a JSON object; a null takes a common key out.
    pub(super) own_keys: &'static str,
}

/// Every shape there is, small ones first.
pub fn shapes() -> impl Iterator<Item = ShapeSummary> {
    SHAPES.iter().map(|shape| ShapeSummary {
        name: shape.name,
        about: shape.about,
    })
}

pub(super) fn find(name: &str) -> Result<&'static ModelShape, SynthError> {
    SHAPES
        .iter()
        .find(|shape| shape.name == name)
        .ok_or_else(|| SynthError::UnknownShape {
            name: name.to_owned(),
            available: SHAPES.map(|shape| shape.name).join(", "),
        })
}

impl ModelShape {
    /// Content of config.json for this shape.
    pub(super) fn config(&self) -> Map<String, Value> {
        let special = SpecialTokenIds::of(self.vocab);
        let family = families().find(|family| family.name == self.family);
        let family = family.expect("every shape is of a family in the registry");
        let scaling = self.rope_factor.map(|factor| {
            json!({
                "rope_type": "llama3",
                "factor": factor,
                "low_freq_factor": 1.0,
                "high_freq_factor": 4.0,
                "original_max_position_embeddings": self.context.min(8192),
            })
        });
        let fields = [
            ("architectures", json!([family.classes[0]])),
            ("model_type", json!(family.name)),
            ("torch_dtype", json!("bfloat16")),
            ("vocab_size", json!(self.vocab)),
            ("hidden_size", json!(self.hidden)),
            ("intermediate_size", json!(self.intermediate)),
            ("num_hidden_layers", json!(self.layers)),
            ("num_attention_heads", json!(self.query_heads)),
            ("num_key_value_heads", json!(self.kv_heads)),
            ("head_dim", json!(self.head_dim)),
            ("hidden_act", json!("silu")),
            ("max_position_embeddings", json!(self.context)),
            ("rms_norm_eps", json!(self.epsilon)),
            ("rope_theta", json!(self.theta)),
            ("rope_scaling", json!(scaling)),
            ("sliding_window", json!(self.window)),
            ("use_sliding_window", json!(false)),
            ("attention_bias", json!(false)),
            ("tie_word_embeddings", json!(self.tied)),
            ("bos_token_id", json!(special.begin)),
            ("eos_token_id", json!(special.end)),
        ];
        let window_layers = [("max_window_layers", json!(self.layers))];
        let more = window_layers.into_iter().filter(|_| self.has_window_layers);
        let mut config: Map<String, Value> = fields
            .into_iter()
            .chain(more)
            .map(|(name, value)| (name.to_owned(), value))
            .collect();
        let own: Map<String, Value> =
            serde_json::from_str(self.own_keys).expect("keys of a shape are a JSON object");
        for (name, value) in own {
            match value {
                Value::Null => config.remove(&name),
                value => config.insert(name, value),
            };
        }
        config
    }
}
