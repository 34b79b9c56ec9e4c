//! The named shapes, as their makers published them.
//!
//! Owns: sizes and constants of each. Never: writes a file.
//! Invariant: the real ones have the published number of parameters.

use super::shape::ModelShape;

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

const MIXTRAL_KEYS: &str = r#"{"num_local_experts": 8, "num_experts_per_tok": 2}"#;
const OLMOE_KEYS: &str = r#"{
    "num_experts": 64, "num_experts_per_tok": 8, "norm_topk_prob": false
}"#;
const QWEN3_MOE_KEYS: &str = r#"{
    "num_experts": 128, "num_experts_per_tok": 8, "moe_intermediate_size": 768,
    "norm_topk_prob": true, "decoder_sparse_step": 1, "mlp_only_layers": []
}"#;
const WIDE_QWEN3_MOE_KEYS: &str = r#"{
    "num_experts": 16, "num_experts_per_tok": 4, "moe_intermediate_size": 256,
    "norm_topk_prob": true, "decoder_sparse_step": 1, "mlp_only_layers": []
}"#;
const TINY_QWEN3_MOE_KEYS: &str = r#"{
    "num_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 48,
    "norm_topk_prob": true, "decoder_sparse_step": 1, "mlp_only_layers": []
}"#;
/// Windows in every second layer, and a rotary embedding that is stretched 32 times.
const GPT_OSS_KEYS: &str = r#"{
    "num_local_experts": 32, "num_experts_per_tok": 4, "attention_bias": true, "swiglu_limit": 7.0,
    "rope_scaling": {"rope_type": "yarn", "factor": 32.0, "beta_fast": 32.0, "beta_slow": 1.0,
        "original_max_position_embeddings": 4096, "truncate": false}
}"#;
const TINY_GPT_OSS_KEYS: &str = r#"{
    "num_local_experts": 4, "num_experts_per_tok": 2, "attention_bias": true, "swiglu_limit": 7.0,
    "rope_scaling": {"rope_type": "yarn", "factor": 32.0, "beta_fast": 32.0, "beta_slow": 1.0,
        "original_max_position_embeddings": 64, "truncate": false}
}"#;

/// A small Llama 3, of which the other small shapes differ.
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

/// Constants that most real shapes have; each has sizes of its own.
const REAL: ModelShape = ModelShape {
    tied: false,
    theta: 10_000.0,
    rope_factor: None,
    ..TINY
};

/// Every shape, small ones first.
pub(super) const SHAPES: [ModelShape; 27] = [
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
        name: "tiny-qwen3-moe",
        about: "two layers, for tests: Qwen3 with two of eight experts for each token",
        family: "qwen3_moe",
        head_dim: 32,
        theta: 1e6,
        rope_factor: None,
        epsilon: 1e-6,
        has_window_layers: true,
        own_keys: TINY_QWEN3_MOE_KEYS,
        ..TINY
    },
    ModelShape {
        name: "tiny-qwen3-moe-256",
        about: "two layers, for tests: sixteen experts, whose slices are groups of 32",
        family: "qwen3_moe",
        hidden: 128,
        head_dim: 32,
        intermediate: 384,
        theta: 1e6,
        rope_factor: None,
        epsilon: 1e-6,
        has_window_layers: true,
        own_keys: WIDE_QWEN3_MOE_KEYS,
        ..TINY
    },
    ModelShape {
        name: "tiny-gpt-oss",
        about: "two layers, for tests: gpt-oss with sinks, windows of 64 and four experts",
        family: "gpt_oss",
        intermediate: 96,
        tied: false,
        theta: 150_000.0,
        rope_factor: None,
        window: Some(64),
        own_keys: TINY_GPT_OSS_KEYS,
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
        ..REAL
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
        epsilon: 1e-6,
        has_window_layers: true,
        ..REAL
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
        window: Some(512),
        epsilon: 1e-6,
        own_keys: GEMMA3_KEYS,
        ..REAL
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
        ..REAL
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
        theta: 500_000.0,
        epsilon: 1e-6,
        ..REAL
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
        window: Some(4096),
        epsilon: 1e-6,
        own_keys: GEMMA2_KEYS,
        ..REAL
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
        epsilon: 1e-6,
        ..REAL
    },
    ModelShape {
        name: "olmoe-1b-7b",
        about: "6.9 B parameters, 1.3 B for each token, 14 GB",
        family: "olmoe",
        hidden: 2048,
        layers: 16,
        query_heads: 16,
        kv_heads: 16,
        head_dim: 128,
        intermediate: 1024,
        vocab: 50_304,
        context: 4096,
        own_keys: OLMOE_KEYS,
        ..REAL
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
        theta: 500_000.0,
        rope_factor: Some(8.0),
        ..REAL
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
        window: Some(4096),
        own_keys: COHERE_KEYS,
        ..REAL
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
        own_keys: GLM4_KEYS,
        ..REAL
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
        theta: 250_000.0,
        own_keys: PHI3_KEYS,
        ..REAL
    },
    ModelShape {
        name: "gpt-oss-20b",
        about: "21 B parameters, 3.6 B for each token, 42 GB: 16 bits in place of the published 4",
        family: "gpt_oss",
        hidden: 2880,
        layers: 24,
        query_heads: 64,
        kv_heads: 8,
        head_dim: 64,
        intermediate: 2880,
        vocab: 201_088,
        context: 131_072,
        theta: 150_000.0,
        window: Some(128),
        own_keys: GPT_OSS_KEYS,
        ..REAL
    },
    ModelShape {
        name: "qwen3-30b-a3b",
        about: "31 B parameters, 3.3 B for each token, 61 GB",
        family: "qwen3_moe",
        hidden: 2048,
        layers: 48,
        query_heads: 32,
        kv_heads: 4,
        head_dim: 128,
        intermediate: 6144,
        vocab: 151_936,
        context: 40_960,
        theta: 1e6,
        epsilon: 1e-6,
        has_window_layers: true,
        own_keys: QWEN3_MOE_KEYS,
        ..REAL
    },
    ModelShape {
        name: "mixtral-8x7b",
        about: "47 B parameters, 13 B for each token, 93 GB",
        family: "mixtral",
        hidden: 4096,
        layers: 32,
        query_heads: 32,
        kv_heads: 8,
        head_dim: 128,
        intermediate: 14_336,
        vocab: 32_000,
        context: 32_768,
        theta: 1e6,
        own_keys: MIXTRAL_KEYS,
        ..REAL
    },
];
