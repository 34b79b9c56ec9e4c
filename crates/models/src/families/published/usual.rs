//! Published models of the families that Llama began. The keys of Llama 3.1 and Qwen3 are those of
//! the makers' files as ai-dynamo/aiconfigurator keeps them, in
//! `aic-core/src/aiconfigurator_core/model_configs`.

use super::{attention, published, rotated};
use crate::rope::RopeScaling;
use serde_json::{Value, json};

/// Keys that these models share, with their own.
fn keys(own: &Value) -> Value {
    let mut keys = json!({
        "hidden_act": "silu",
        "hidden_size": 4096,
        "num_attention_heads": 32,
        "num_hidden_layers": 32,
        "num_key_value_heads": 8,
        "rms_norm_eps": 1e-06,
        "tie_word_embeddings": false,
    });
    for (name, value) in own.as_object().unwrap() {
        keys[name] = value.clone();
    }
    keys
}

#[test]
fn llama_3_1_stretches_low_frequencies() {
    let spec = published(
        8.03,
        &keys(&json!({
            "architectures": ["LlamaForCausalLM"],
            "attention_bias": false,
            "intermediate_size": 14336,
            "max_position_embeddings": 131072,
            "mlp_bias": false,
            "model_type": "llama",
            "pretraining_tp": 1,
            "rms_norm_eps": 1e-05,
            "rope_scaling": {
                "factor": 8.0,
                "high_freq_factor": 4.0,
                "low_freq_factor": 1.0,
                "original_max_position_embeddings": 8192,
                "rope_type": "llama3",
            },
            "rope_theta": 500000.0,
            "vocab_size": 128256,
        })),
    );
    assert!(matches!(
        spec.ropes[0].scaling,
        RopeScaling::Llama3 { factor: 8.0, .. }
    ));
    assert_eq!(
        (rotated(&spec, 31), spec.context_tokens_max),
        (128, 131_072)
    );
}

/// The keys of Mistral 7B of version 0.1.
pub(super) fn mistral() -> Value {
    keys(&json!({
        "architectures": ["MistralForCausalLM"],
        "intermediate_size": 14336,
        "max_position_embeddings": 32768,
        "model_type": "mistral",
        "rms_norm_eps": 1e-05,
        "rope_theta": 10000.0,
        "sliding_window": 4096,
        "vocab_size": 32000,
    }))
}

#[test]
fn mistral_has_a_window_in_every_layer() {
    let spec = published(7.24, &mistral());
    assert!(
        spec.attention()
            .all(|attention| attention.window == Some(4096))
    );
}

#[test]
fn qwen2_5_has_biases_and_no_window() {
    let spec = published(
        7.62,
        &keys(&json!({
            "architectures": ["Qwen2ForCausalLM"],
            "hidden_size": 3584,
            "intermediate_size": 18944,
            "max_position_embeddings": 131072,
            "max_window_layers": 28,
            "model_type": "qwen2",
            "num_attention_heads": 28,
            "num_hidden_layers": 28,
            "num_key_value_heads": 4,
            "rope_theta": 1000000.0,
            "sliding_window": 131072,
            "use_mrope": false,
            "use_sliding_window": false,
            "vocab_size": 152064,
        })),
    );
    let first = attention(&spec, 0);
    assert_eq!((first.window, first.biases.qkv), (None, true));
    assert!(!first.biases.output);
}

#[test]
fn qwen3_normalises_heads() {
    let spec = published(
        8.19,
        &keys(&json!({
            "architectures": ["Qwen3ForCausalLM"],
            "attention_bias": false,
            "head_dim": 128,
            "intermediate_size": 12288,
            "max_position_embeddings": 40960,
            "max_window_layers": 36,
            "model_type": "qwen3",
            "num_hidden_layers": 36,
            "rope_scaling": null,
            "rope_theta": 1000000,
            "sliding_window": null,
            "use_sliding_window": false,
            "vocab_size": 151936,
        })),
    );
    let first = attention(&spec, 0);
    assert!(first.qk_norm.is_some() && first.window.is_none());
    assert!(!first.biases.qkv);
}
