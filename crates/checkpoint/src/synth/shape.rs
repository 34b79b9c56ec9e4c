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
    /// Keys that only this family has, as a JSON object; a null takes a common key out.
    own_keys: &'static str,
}

const NO_KEYS: &str = "{}";
/// LayerNorm, and a window in three of four layers.
const COHERE_KEYS: &str = r#"{
    "rms_norm_eps": null, "layer_norm_eps": 1e-5, "logit_scale": 0.25, "sliding_window_pattern": 4
}"#;
const GEMMA2_KEYS: &str = r#"{
    "hidden_act": null, "hidden_activation": "gelu_pytorch_tanh", "query_pre_attn_scalar": 256,
    "attn_logit_softcapping": 50.0, "final_logit_softcapping": 30.0
}"#;
const GEMMA3_KEYS: &str = r#"{
    "hidden_act": null, "hidden_activation": "gelu_pytorch_tanh", "query_pre_attn_scalar": 256,
    "rope_local_base_freq": 10000.0, "sliding_window_pattern": 6
}"#;
const GLM4_KEYS: &str = r#"{"attention_bias": true, "partial_rotary_factor": 0.5}"#;
const PHI3_KEYS: &str = r#"{"head_dim": null, "original_max_position_embeddings": 4096}"#;

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
    own_keys: NO_KEYS,
};

const SHAPES: [ModelShape; 20] = [
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
        name: "tiny-cohere2",
        about: "four layers, for tests: Cohere 2 with parallel parts and windows of 64",
        family: "cohere2",
        layers: 4,
        theta: 50_000.0,
        rope_factor: None,
        window: Some(64),
        own_keys: COHERE_KEYS,
        ..TINY
    },
    ModelShape {
        name: "tiny-gemma2",
        about: "two layers, for tests: Gemma 2 with caps and heads of 64",
        family: "gemma2",
        hidden: 128,
        head_dim: 64,
        intermediate: 256,
        // The embedding is the larger part of the residual stream: a tied head would repeat the
        // last token.
        tied: false,
        theta: 10_000.0,
        rope_factor: None,
        window: Some(64),
        epsilon: 1e-6,
        own_keys: GEMMA2_KEYS,
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
        own_keys: NO_KEYS,
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
        own_keys: NO_KEYS,
    },
    ModelShape {
        name: "gemma-3-1b",
        about: "1 B parameters, 2 GB",
        family: "gemma3_text",
        hidden: 1152,
        layers: 26,
        query_heads: 4,
        kv_heads: 1,
        head_dim: 256,
        intermediate: 6912,
        vocab: 262_144,
        context: 32_768,
        tied: true,
        theta: 1e6,
        rope_factor: None,
        window: Some(512),
        epsilon: 1e-6,
        has_window_layers: false,
        own_keys: GEMMA3_KEYS,
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
        own_keys: NO_KEYS,
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
        own_keys: NO_KEYS,
    },
    ModelShape {
        name: "gemma-2-2b",
        about: "2.6 B parameters, 5.2 GB",
        family: "gemma2",
        hidden: 2304,
        layers: 26,
        query_heads: 8,
        kv_heads: 4,
        head_dim: 256,
        intermediate: 9216,
        vocab: 256_000,
        context: 8192,
        tied: true,
        theta: 10_000.0,
        rope_factor: None,
        window: Some(4096),
        epsilon: 1e-6,
        has_window_layers: false,
        own_keys: GEMMA2_KEYS,
    },
    ModelShape {
        name: "smollm3-3b",
        about: "3.1 B parameters, 6.2 GB",
        family: "smollm3",
        hidden: 2048,
        layers: 36,
        query_heads: 16,
        kv_heads: 4,
        head_dim: 128,
        intermediate: 11_008,
        vocab: 128_256,
        context: 65_536,
        tied: true,
        theta: 5e6,
        rope_factor: None,
        window: None,
        epsilon: 1e-6,
        has_window_layers: false,
        own_keys: NO_KEYS,
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
        own_keys: NO_KEYS,
    },
    ModelShape {
        name: "command-r7b",
        about: "8 B parameters, 16 GB",
        family: "cohere2",
        hidden: 4096,
        layers: 32,
        query_heads: 32,
        kv_heads: 8,
        head_dim: 128,
        intermediate: 14_336,
        vocab: 256_000,
        context: 8192,
        tied: true,
        theta: 50_000.0,
        rope_factor: None,
        window: Some(4096),
        epsilon: 1e-5,
        has_window_layers: false,
        own_keys: COHERE_KEYS,
    },
    ModelShape {
        name: "glm-4-9b",
        about: "9.4 B parameters, 19 GB",
        family: "glm4",
        hidden: 4096,
        layers: 40,
        query_heads: 32,
        kv_heads: 2,
        head_dim: 128,
        intermediate: 13_696,
        vocab: 151_552,
        context: 32_768,
        tied: false,
        theta: 10_000.0,
        rope_factor: None,
        window: None,
        epsilon: 1e-5,
        has_window_layers: false,
        own_keys: GLM4_KEYS,
    },
    ModelShape {
        name: "phi-4",
        about: "14.7 B parameters, 29 GB",
        family: "phi3",
        hidden: 5120,
        layers: 40,
        query_heads: 40,
        kv_heads: 10,
        head_dim: 128,
        intermediate: 17_920,
        vocab: 100_352,
        context: 16_384,
        tied: false,
        theta: 250_000.0,
        rope_factor: None,
        window: None,
        epsilon: 1e-5,
        has_window_layers: false,
        own_keys: PHI3_KEYS,
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
