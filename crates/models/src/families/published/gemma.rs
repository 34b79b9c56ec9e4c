//! Published models of the Gemma families.

use super::{attention, config, published, read};
use serde_json::{Value, json};

/// The keys of Gemma 2 2B.
pub(super) fn gemma2() -> Value {
    json!({
        "architectures": ["Gemma2ForCausalLM"],
        "attention_bias": false,
        "attn_logit_softcapping": 50.0,
        "cache_implementation": "hybrid",
        "eos_token_id": [1, 107],
        "final_logit_softcapping": 30.0,
        "head_dim": 256,
        "hidden_act": "gelu_pytorch_tanh",
        "hidden_activation": "gelu_pytorch_tanh",
        "hidden_size": 2304,
        "intermediate_size": 9216,
        "max_position_embeddings": 8192,
        "model_type": "gemma2",
        "num_attention_heads": 8,
        "num_hidden_layers": 26,
        "num_key_value_heads": 4,
        "pad_token_id": 0,
        "query_pre_attn_scalar": 256,
        "rms_norm_eps": 1e-06,
        "rope_theta": 10000.0,
        "sliding_window": 4096,
        "vocab_size": 256000,
    })
}

#[test]
fn gemma2_caps_scores_and_logits() {
    let spec = published(2.61, &gemma2());
    assert_eq!(spec.scalars.logits_cap, Some(30.0));
    for layer in 0..26 {
        let attention = attention(&spec, layer);
        assert_eq!((attention.soft_cap, attention.scale), (Some(50.0), 0.0625));
        assert_eq!(attention.window, (layer % 2 == 0).then_some(4096));
    }
    // Absent keys have the class's own caps, and a null turns one off.
    let mut changed = gemma2();
    let keys = changed.as_object_mut().unwrap();
    keys.remove("attn_logit_softcapping");
    keys.remove("final_logit_softcapping");
    assert_eq!(published(2.61, &changed), spec);
    changed["attn_logit_softcapping"] = Value::Null;
    changed["final_logit_softcapping"] = Value::Null;
    let spec = published(2.61, &changed);
    let caps = (attention(&spec, 1).soft_cap, spec.scalars.logits_cap);
    assert_eq!(caps, (None, None));
    changed["attn_logit_softcapping"] = json!(0);
    let error = read(&config(&changed)).unwrap_err().to_string();
    assert!(error.contains("attn_logit_softcapping"), "{error}");
}

/// The keys of Gemma 3 1B.
pub(super) fn gemma3_1b() -> Value {
    json!({
        "architectures": ["Gemma3ForCausalLM"],
        "attention_bias": false,
        "attn_logit_softcapping": null,
        "cache_implementation": "hybrid",
        "eos_token_id": [1, 106],
        "final_logit_softcapping": null,
        "head_dim": 256,
        "hidden_activation": "gelu_pytorch_tanh",
        "hidden_size": 1152,
        "intermediate_size": 6912,
        "max_position_embeddings": 32768,
        "model_type": "gemma3_text",
        "num_attention_heads": 4,
        "num_hidden_layers": 26,
        "num_key_value_heads": 1,
        "query_pre_attn_scalar": 256,
        "rms_norm_eps": 1e-06,
        "rope_local_base_freq": 10000,
        "rope_scaling": null,
        "rope_theta": 1000000,
        "sliding_window": 512,
        "sliding_window_pattern": 6,
        "vocab_size": 262144,
    })
}

#[test]
fn gemma3_has_a_rope_for_windows() {
    let spec = published(1.0, &gemma3_1b());
    let theta = |layer| spec.ropes[attention(&spec, layer).rope.0].theta;
    assert_eq!((theta(4), theta(5), theta(6)), (1e4, 1e6, 1e4));
    assert_eq!(attention(&spec, 5).window, None);
    assert_eq!(attention(&spec, 6).window, Some(512));
    assert_eq!(attention(&spec, 0).scale, 0.0625);
}

/// A cap of scores is another function of them.
#[test]
fn a_cap_of_scores_is_refused() {
    let error = read(&config(&json!({
        "architectures": ["Gemma3ForCausalLM"],
        "attn_logit_softcapping": 50.0,
        "hidden_size": 64,
        "intermediate_size": 64,
        "max_position_embeddings": 64,
        "num_attention_heads": 1,
        "num_hidden_layers": 1,
        "num_key_value_heads": 1,
        "vocab_size": 64,
    })));
    let error = error.unwrap_err().to_string();
    assert!(error.contains("attn_logit_softcapping"), "{error}");
}
