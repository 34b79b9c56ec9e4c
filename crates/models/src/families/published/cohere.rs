//! Published models of the Cohere families.

use super::{attention, config, published, read, rotated, three_of_four_sliding};
use crate::rope::RopePairs;
use crate::spec::{LayerNorms, NormFormula, PartOrder};
use serde_json::{Value, json};

#[test]
fn command_r_rotates_every_layer() {
    let mut keys = json!({
        "architectures": ["CohereForCausalLM"],
        "attention_bias": false,
        "bos_token_id": 5,
        "eos_token_id": 255001,
        "hidden_act": "silu",
        "hidden_size": 8192,
        "intermediate_size": 24576,
        "layer_norm_eps": 1e-05,
        "logit_scale": 0.0625,
        "max_position_embeddings": 131072,
        "model_type": "cohere",
        "num_attention_heads": 64,
        "num_hidden_layers": 40,
        "num_key_value_heads": 8,
        "pad_token_id": 0,
        "rope_theta": 4000000.0,
        "use_qk_norm": false,
        "vocab_size": 256000,
    });
    let spec = published(32.3, &keys);
    assert!((0..40).all(|layer| rotated(&spec, layer) == 128));
    assert!(spec.attention().all(|attention| attention.window.is_none()));
    assert_eq!((spec.scalars.logits, spec.ropes[0].theta), (0.0625, 4e6));
    assert_eq!(spec.layers[0].order, PartOrder::Parallel);
    // Command R+ has a norm of heads with a weight for each head.
    keys["use_qk_norm"] = json!(true);
    let error = read(&config(&keys)).unwrap_err().to_string();
    assert!(error.contains("use_qk_norm"), "{error}");
}

/// The keys of Command R7B.
pub(super) fn cohere2() -> Value {
    json!({
        "architectures": ["Cohere2ForCausalLM"],
        "attention_bias": false,
        "bos_token_id": 5,
        "cache_implementation": "hybrid",
        "eos_token_id": 255001,
        "head_dim": 128,
        "hidden_act": "silu",
        "hidden_size": 4096,
        "intermediate_size": 14336,
        "layer_norm_eps": 1e-05,
        "layer_switch": 4,
        "logit_scale": 0.25,
        "max_position_embeddings": 8192,
        "model_type": "cohere2",
        "num_attention_heads": 32,
        "num_hidden_layers": 32,
        "num_key_value_heads": 8,
        "order_of_interleaved_layers": "local_attn_first",
        "pad_token_id": 0,
        "position_embedding_type": "rope_gptj",
        "rope_scaling": null,
        "rope_theta": 50000,
        "rotary_pct": 1.0,
        "sliding_window": 4096,
        "sliding_window_pattern": 4,
        "use_embedding_sharing": true,
        "use_gated_activation": true,
        "use_parallel_block": true,
        "use_parallel_embedding": false,
        "use_qk_norm": false,
        "vocab_size": 256000,
    })
}

#[test]
fn cohere2_reads_one_norm_in_both_parts() {
    let spec = published(8.03, &cohere2());
    assert_eq!(spec.scalars.logits, 0.25);
    let layers: Vec<usize> = (0..4).map(|layer| rotated(&spec, layer)).collect();
    assert_eq!(layers, [128, 128, 128, 0]);
    for (layer, of) in spec.layers.iter().enumerate() {
        let has_window = layer % 4 != 3;
        assert_eq!(attention(&spec, layer).window, has_window.then_some(4096));
        let LayerNorms {
            mixer_input,
            mixer_output,
            mlp_input,
            mlp_output,
        } = of.norms;
        let formula = mixer_input.map(|norm| (norm.formula, norm.epsilon));
        assert_eq!(formula, Some((NormFormula::LayerNorm, 1e-5)));
        assert_eq!((mixer_output, mlp_input, mlp_output), (None, None, None));
        assert_eq!(of.order, PartOrder::Parallel);
    }
    assert_eq!(spec.ropes[0].pairs, RopePairs::Neighbours);
    // The list of layers that newer writers store needs no period.
    let mut listed = cohere2();
    listed["layer_types"] = json!(three_of_four_sliding(32));
    listed["sliding_window_pattern"] = Value::Null;
    assert_eq!(published(8.03, &listed), spec);
}

#[test]
fn another_form_of_cohere2_is_refused() {
    for (key, value) in [
        ("layer_switch", json!(2)),
        ("order_of_interleaved_layers", json!("global_attn_first")),
        ("position_embedding_type", json!("alibi")),
        ("rotary_pct", json!(0.5)),
        ("use_gated_activation", json!(false)),
        ("use_parallel_block", json!(false)),
        ("use_qk_norm", json!(true)),
    ] {
        let mut keys = cohere2();
        keys[key] = value;
        let error = read(&config(&keys)).unwrap_err().to_string();
        assert!(error.contains(key), "{error}");
    }
}
