//! The named shapes, as their makers published them.
//!
//! Owns: sizes and constants, and the config.json made of them.
//! Never: draws a weight.
//! Invariant: every shape loads; the real ones have the published number of parameters.

use super::SynthError;
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
    name: &'static str,
    about: &'static str,
    /// Name of the family.
    family: &'static str,
    hidden: usize,
    layers: usize,
    query_heads: usize,
    kv_heads: usize,
    head_dim: usize,
    intermediate: usize,
    pub(super) vocab: usize,
    pub(super) context: usize,
    pub(super) tied: bool,
    theta: f64,
    /// Llama 3's scaling factor of the rotary embedding.
    rope_factor: Option<f64>,
    window: Option<usize>,
    epsilon: f64,
    /// Whether config.json has `max_window_layers`, which other readers of this family may require
    /// even without a window.
    has_window_layers: bool,
}

const TINY: ModelShape = ModelShape {
    name: "tiny-llama",
    about: "two layers, for tests: Llama 3 with tied embedding",
    family: "llama",
    hidden: 64,
    layers: 2,
    query_heads: 4,
    kv_heads: 2,
    head_dim: 16,
    intermediate: 176,
    vocab: 512,
    context: 2048,
    tied: true,
    theta: 500_000.0,
    rope_factor: Some(8.0),
    window: None,
    epsilon: 1e-5,
    has_window_layers: false,
};

const SHAPES: [ModelShape; 12] = [
    TINY,
    ModelShape {
        name: "tiny-qwen3",
        about: "two layers, for tests: Qwen3 with q/k norms",
        family: "qwen3",
        head_dim: 32,
        theta: 1e6,
        rope_factor: None,
        epsilon: 1e-6,
        has_window_layers: true,
        ..TINY
    },
    ModelShape {
        name: "tiny-mistral",
        about: "two layers, for tests: Mistral with a sliding window of 64",
        family: "mistral",
        tied: false,
        theta: 10_000.0,
        rope_factor: None,
        window: Some(64),
        epsilon: 1e-6,
        ..TINY
    },
    ModelShape {
        name: "tiny-qwen2",
        about: "two layers, for tests: Qwen2 with q/k/v biases",
        family: "qwen2",
        theta: 1e6,
        rope_factor: None,
        epsilon: 1e-6,
        has_window_layers: true,
        ..TINY
    },
    ModelShape {
        name: "tiny-olmo2",
        about: "two layers, for tests: OLMo 2 with norms of outputs and of whole projections",
        family: "olmo2",
        tied: false,
        rope_factor: None,
        epsilon: 1e-6,
        ..TINY
    },
    ModelShape {
        name: "tiny-llama-64",
        about: "two layers, for tests: heads of 64, which a GPU's tensor cores take",
        hidden: 128,
        head_dim: 64,
        intermediate: 256,
        ..TINY
    },
    ModelShape {
        name: "tiny-qwen3-128",
        about: "two layers, for tests: heads of 128, four to a KV head, with q/k norms",
        family: "qwen3",
        hidden: 128,
        kv_heads: 1,
        head_dim: 128,
        intermediate: 256,
        theta: 1e6,
        rope_factor: None,
        epsilon: 1e-6,
        has_window_layers: true,
        ..TINY
    },
    ModelShape {
        name: "llama-160m",
        about: "0.2 B parameters, 0.3 GB",
        family: "llama",
        hidden: 768,
        layers: 12,
        query_heads: 12,
        kv_heads: 12,
        head_dim: 64,
        intermediate: 3072,
        vocab: 32_000,
        context: 2048,
        tied: false,
        theta: 10_000.0,
        rope_factor: None,
        window: None,
        epsilon: 1e-5,
        has_window_layers: false,
    },
    ModelShape {
        name: "qwen3-0.6b",
        about: "0.6 B parameters, 1.2 GB",
        family: "qwen3",
        hidden: 1024,
        layers: 28,
        query_heads: 16,
        kv_heads: 8,
        head_dim: 128,
        intermediate: 3072,
        vocab: 151_936,
        context: 40_960,
        tied: true,
        theta: 1e6,
        rope_factor: None,
        window: None,
        epsilon: 1e-6,
        has_window_layers: true,
    },
    ModelShape {
        name: "llama-3.2-1b",
        about: "1.2 B parameters, 2.5 GB",
        family: "llama",
        hidden: 2048,
        layers: 16,
        query_heads: 32,
        kv_heads: 8,
        head_dim: 64,
        intermediate: 8192,
        vocab: 128_256,
        context: 131_072,
        tied: true,
        theta: 500_000.0,
        rope_factor: Some(32.0),
        window: None,
        epsilon: 1e-5,
        has_window_layers: false,
    },
    ModelShape {
        name: "olmo-2-1b",
        about: "1.5 B parameters, 3 GB",
        family: "olmo2",
        hidden: 2048,
        layers: 16,
        query_heads: 16,
        kv_heads: 16,
        head_dim: 128,
        intermediate: 8192,
        vocab: 100_352,
        context: 4096,
        tied: false,
        theta: 500_000.0,
        rope_factor: None,
        window: None,
        epsilon: 1e-6,
        has_window_layers: false,
    },
    ModelShape {
        name: "llama-3.1-8b",
        about: "8 B parameters, 16 GB",
        family: "llama",
        hidden: 4096,
        layers: 32,
        query_heads: 32,
        kv_heads: 8,
        head_dim: 128,
        intermediate: 14_336,
        vocab: 128_256,
        context: 131_072,
        tied: false,
        theta: 500_000.0,
        rope_factor: Some(8.0),
        window: None,
        epsilon: 1e-5,
        has_window_layers: false,
    },
];

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
        fields
            .into_iter()
            .chain(more)
            .map(|(name, value)| (name.to_owned(), value))
            .collect()
    }
}
