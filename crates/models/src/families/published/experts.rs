//! Published models with experts. Their keys are those of the makers' config.json as the folder
//! `aic-core/src/aiconfigurator_core/model_configs` of ai-dynamo/aiconfigurator keeps them, but for
//! the models that name another repository.

use super::{attention, config, published, read, rotated};
use crate::rope::RopeScaling;
use crate::spec::{
    Activation, ChosenWeights, ExpertsSpec, Mlp, ModelSpec, QkNormScope, RouterScore,
};
use serde_json::{Value, json};

/// Keys of a model with these in place of its own; a null takes a key out.
fn with(mut keys: Value, changes: &Value) -> Value {
    for (name, value) in changes.as_object().unwrap() {
        match value {
            Value::Null => drop(keys.as_object_mut().unwrap().remove(name)),
            value => keys[name] = value.clone(),
        }
    }
    keys
}

/// The experts of every layer that has some, which are all alike, and the number of such layers.
fn experts(spec: &ModelSpec) -> (ExpertsSpec, usize) {
    let all: Vec<&ExpertsSpec> = spec
        .layers
        .iter()
        .filter_map(|layer| layer.experts())
        .collect();
    assert!(all.iter().all(|experts| *experts == all[0]));
    (*all[0], all.len())
}

fn qwen3_30b() -> Value {
    json!({
        "architectures": ["Qwen3MoeForCausalLM"],
        "attention_bias": false,
        "decoder_sparse_step": 1,
        "head_dim": 128,
        "hidden_act": "silu",
        "hidden_size": 2048,
        "intermediate_size": 6144,
        "max_position_embeddings": 40960,
        "max_window_layers": 48,
        "mlp_only_layers": [],
        "model_type": "qwen3_moe",
        "moe_intermediate_size": 768,
        "norm_topk_prob": true,
        "num_attention_heads": 32,
        "num_experts": 128,
        "num_experts_per_tok": 8,
        "num_hidden_layers": 48,
        "num_key_value_heads": 4,
        "output_router_logits": false,
        "rms_norm_eps": 1e-06,
        "rope_scaling": null,
        "rope_theta": 1000000.0,
        "router_aux_loss_coef": 0.001,
        "sliding_window": null,
        "tie_word_embeddings": false,
        "use_sliding_window": false,
        "vocab_size": 151936,
    })
}

#[test]
fn qwen3_weights_its_experts_by_their_share() {
    let spec = published(30.53, &qwen3_30b());
    let (experts, layers_count) = experts(&spec);
    assert_eq!((experts.count, experts.chosen), (128, 8));
    assert_eq!((experts.expert.width, layers_count), (768, 48));
    let router = experts.router;
    assert_eq!(router.weights, ChosenWeights::Normalized { epsilon: 0.0 });
    assert!(experts.shared.is_none() && router.groups.is_none());
    let first = attention(&spec, 0);
    assert!(first.qk_norm.is_some() && !first.biases.qkv);
    let larger = json!({
        "hidden_size": 4096,
        "intermediate_size": 12288,
        "max_window_layers": 94,
        "moe_intermediate_size": 1536,
        "num_attention_heads": 64,
        "num_hidden_layers": 94,
    });
    published(235.09, &with(qwen3_30b(), &larger));
    // Qwen3-Coder-480B-A35B says more of what it has and lacks.
    let coder = json!({
        "attention_bias": null,
        "hidden_size": 6144,
        "intermediate_size": 8192,
        "max_position_embeddings": 262144,
        "max_window_layers": 62,
        "moe_intermediate_size": 2560,
        "num_attention_heads": 96,
        "num_experts": 160,
        "num_hidden_layers": 62,
        "num_key_value_heads": 8,
        "qkv_bias": false,
        "rope_theta": 10000000,
        "router_aux_loss_coef": 0.0,
        "shared_expert_intermediate_size": 0,
        "use_qk_norm": true,
    });
    published(480.15, &with(qwen3_30b(), &coder));
}

#[test]
fn mixtral_has_experts_in_every_layer() {
    let keys = json!({
        "architectures": ["MixtralForCausalLM"],
        "hidden_act": "silu",
        "hidden_size": 4096,
        "intermediate_size": 14336,
        "max_position_embeddings": 32768,
        "model_type": "mixtral",
        "num_attention_heads": 32,
        "num_experts_per_tok": 2,
        "num_hidden_layers": 32,
        "num_key_value_heads": 8,
        "num_local_experts": 8,
        "output_router_logits": false,
        "rms_norm_eps": 1e-05,
        "rope_theta": 1000000.0,
        "router_aux_loss_coef": 0.02,
        "sliding_window": null,
        "tie_word_embeddings": false,
        "vocab_size": 32000,
    });
    let spec = published(46.7, &keys);
    let (experts, layers_count) = experts(&spec);
    assert_eq!((experts.count, experts.chosen, layers_count), (8, 2, 32));
    assert_eq!(attention(&spec, 0).window, None);
    let larger = json!({
        "hidden_size": 6144,
        "intermediate_size": 16384,
        "max_position_embeddings": 65536,
        "num_attention_heads": 48,
        "num_hidden_layers": 56,
        "router_aux_loss_coef": 0.001,
    });
    published(140.6, &with(keys, &larger));
}

/// Source: `crates/turbine-model/tests/fixtures/olmoe-1b-7b-0125-instruct/config.json` of
/// piwi3910/Turbine.
#[test]
fn olmoe_weights_its_experts_by_their_probability() {
    let keys = json!({
        "architectures": ["OlmoeForCausalLM"],
        "attention_bias": false,
        "clip_qkv": null,
        "eos_token_id": 50279,
        "hidden_act": "silu",
        "hidden_size": 2048,
        "intermediate_size": 1024,
        "max_position_embeddings": 4096,
        "model_type": "olmoe",
        "norm_topk_prob": false,
        "num_attention_heads": 16,
        "num_experts": 64,
        "num_experts_per_tok": 8,
        "num_hidden_layers": 16,
        "num_key_value_heads": 16,
        "output_router_logits": false,
        "pad_token_id": 1,
        "rms_norm_eps": 1e-05,
        "rope_scaling": null,
        "rope_theta": 10000.0,
        "router_aux_loss_coef": 0.01,
        "tie_word_embeddings": false,
        "vocab_size": 50304,
    });
    let spec = published(6.92, &keys);
    let (experts, _) = experts(&spec);
    assert_eq!(experts.router.weights, ChosenWeights::Scores);
    let norm = attention(&spec, 0).qk_norm.unwrap();
    assert_eq!(norm.scope, QkNormScope::Projection);
    let clipped = with(keys, &json!({"clip_qkv": 8.0}));
    let error = read(&config(&clipped)).unwrap_err().to_string();
    assert!(error.contains("clip_qkv"), "{error}");
}

/// Source: `tests/unittest/_torch/modeling/test_modeling_qwen_moe.py` of NVIDIA/TensorRT-LLM.
#[test]
fn qwen2_has_a_shared_expert_behind_a_gate() {
    let keys = json!({
        "architectures": ["Qwen2MoeForCausalLM"],
        "decoder_sparse_step": 1,
        "hidden_act": "silu",
        "hidden_size": 3584,
        "intermediate_size": 18944,
        "max_position_embeddings": 131072,
        "max_window_layers": 28,
        "model_type": "qwen2_moe",
        "moe_intermediate_size": 2560,
        "norm_topk_prob": false,
        "num_attention_heads": 28,
        "num_experts": 64,
        "num_experts_per_tok": 8,
        "num_hidden_layers": 28,
        "num_key_value_heads": 4,
        "output_router_logits": false,
        "rms_norm_eps": 1e-06,
        "rope_theta": 1000000.0,
        "router_aux_loss_coef": 0.001,
        "shared_expert_intermediate_size": 20480,
        "sliding_window": 131072,
        "tie_word_embeddings": false,
        "use_sliding_window": false,
        "vocab_size": 151936,
    });
    let spec = published(57.41, &keys);
    let (experts, _) = experts(&spec);
    let shared = experts.shared.unwrap();
    assert!(shared.has_gate && shared.mlp.width == 20480);
    assert_eq!(experts.router.weights, ChosenWeights::Scores);
    let first = attention(&spec, 27);
    assert!(first.biases.qkv && !first.biases.output && first.window.is_none());
    let windows = with(
        keys,
        &json!({"use_sliding_window": true, "max_window_layers": 3}),
    );
    let spec = read(&config(&windows)).unwrap().spec;
    let windows: Vec<bool> = spec.attention().map(|a| a.window.is_some()).collect();
    assert_eq!(windows[..5], [true, false, true, false, false]);
}

/// ibm-granite/granite-3.1-1b-a400m, whose values public tests of other readers repeat.
#[test]
fn granite_weights_experts_by_a_softmax_of_the_chosen() {
    let keys = json!({
        "architectures": ["GraniteMoeForCausalLM"],
        "attention_bias": false,
        "attention_multiplier": 0.015625,
        "embedding_multiplier": 12.0,
        "hidden_act": "silu",
        "hidden_size": 1024,
        "intermediate_size": 512,
        "logits_scaling": 6.0,
        "max_position_embeddings": 131072,
        "model_type": "granitemoe",
        "num_attention_heads": 16,
        "num_experts_per_tok": 8,
        "num_hidden_layers": 24,
        "num_key_value_heads": 8,
        "num_local_experts": 32,
        "output_router_logits": false,
        "residual_multiplier": 0.22,
        "rms_norm_eps": 1e-06,
        "rope_scaling": null,
        "rope_theta": 1500000.0,
        "router_aux_loss_coef": 0.001,
        "tie_word_embeddings": true,
        "vocab_size": 49155,
    });
    let spec = published(1.33, &keys);
    let (experts, _) = experts(&spec);
    let router = experts.router;
    assert_eq!(
        (router.score, router.weights),
        (RouterScore::Identity, ChosenWeights::Softmax)
    );
    assert_eq!(spec.scalars.residual, 0.22);
}

/// zai-org/GLM-4.5-Air, as a public log of ms-swift prints its config.json.
#[test]
fn glm_has_dense_layers_first_and_a_layer_too_many() {
    let keys = json!({
        "architectures": ["Glm4MoeForCausalLM"],
        "attention_bias": true,
        "eos_token_id": [151329, 151336, 151338],
        "first_k_dense_replace": 1,
        "head_dim": 128,
        "hidden_act": "silu",
        "hidden_size": 4096,
        "intermediate_size": 10944,
        "max_position_embeddings": 131072,
        "model_type": "glm4_moe",
        "moe_intermediate_size": 1408,
        "n_group": 1,
        "n_routed_experts": 128,
        "n_shared_experts": 1,
        "norm_topk_prob": true,
        "num_attention_heads": 96,
        "num_experts_per_tok": 8,
        "num_hidden_layers": 46,
        "num_key_value_heads": 8,
        "num_nextn_predict_layers": 1,
        "pad_token_id": 151329,
        "partial_rotary_factor": 0.5,
        "rms_norm_eps": 1e-05,
        "rope_scaling": null,
        "rope_theta": 1000000,
        "routed_scaling_factor": 1.0,
        "tie_word_embeddings": false,
        "topk_group": 1,
        "use_qk_norm": false,
        "vocab_size": 151552,
    });
    let spec = published(106.0, &keys);
    let (experts, layers_count) = experts(&spec);
    assert_eq!(layers_count, 45);
    assert!(matches!(spec.layers[0].mlp, Mlp::Gated(mlp) if mlp.width == 10944));
    let router = experts.router;
    assert!(router.has_choice_bias && router.score == RouterScore::Sigmoid);
    let shared = experts.shared.unwrap();
    assert!(!shared.has_gate && shared.mlp.width == 1408);
    assert_eq!(
        (rotated(&spec, 45), attention(&spec, 0).qk_norm),
        (64, None)
    );
    let mtp: Vec<String> = read(&config(&keys)).unwrap().mtp_tensors().collect();
    assert_eq!(mtp, ["model.layers.46."]);
}

fn minimax() -> Value {
    json!({
        "architectures": ["MiniMaxM2ForCausalLM"],
        "auto_map": {},
        "head_dim": 128,
        "hidden_act": "silu",
        "hidden_size": 3072,
        "intermediate_size": 1536,
        "max_position_embeddings": 196608,
        "model_type": "minimax_m2",
        "mtp_transformer_layers": 1,
        "num_attention_heads": 48,
        "num_experts_per_tok": 8,
        "num_hidden_layers": 62,
        "num_key_value_heads": 8,
        "num_local_experts": 256,
        "num_mtp_modules": 3,
        "qk_norm_type": "per_layer",
        "rms_norm_eps": 1e-06,
        "rope_theta": 5000000,
        "rotary_dim": 64,
        "scoring_func": "sigmoid",
        "shared_intermediate_size": 0,
        "tie_word_embeddings": false,
        "use_mtp": true,
        "use_qk_norm": true,
        "use_routing_bias": true,
        "vocab_size": 200064,
    })
}

#[test]
fn minimax_rotates_as_much_as_its_config_states() {
    let spec = published(228.7, &minimax());
    let (experts, layers_count) = experts(&spec);
    assert_eq!((experts.count, layers_count), (256, 62));
    assert!(experts.router.has_choice_bias && experts.shared.is_none());
    assert_eq!(rotated(&spec, 61), 64);
    let norm = attention(&spec, 0).qk_norm.unwrap();
    assert_eq!(norm.scope, QkNormScope::Projection);
    for (key, value) in [
        ("scoring_func", json!("softmax")),
        ("use_routing_bias", json!(false)),
        ("qk_norm_type", json!("per_head")),
        ("shared_intermediate_size", json!(64)),
        ("attn_type_list", json!([1, 0])),
        ("rotary_dim", json!(129)),
        ("partial_rotary_factor", json!(1.0)),
    ] {
        let changed = with(minimax(), &json!({ key: value }));
        let error = read(&config(&changed)).unwrap_err().to_string();
        assert!(error.contains(key), "{key}: {error}");
    }
}

fn every_second_sliding(layers_count: usize) -> Vec<&'static str> {
    let kinds = ["sliding_attention", "full_attention"];
    kinds.into_iter().cycle().take(layers_count).collect()
}

/// The keys of gpt-oss-20b.
pub(super) fn gpt_oss() -> Value {
    json!({
        "architectures": ["GptOssForCausalLM"],
        "attention_bias": true,
        "eos_token_id": 200002,
        "experts_per_token": 4,
        "head_dim": 64,
        "hidden_act": "silu",
        "hidden_size": 2880,
        "initial_context_length": 4096,
        "intermediate_size": 2880,
        "layer_types": every_second_sliding(24),
        "max_position_embeddings": 131072,
        "model_type": "gpt_oss",
        "num_attention_heads": 64,
        "num_experts_per_tok": 4,
        "num_hidden_layers": 24,
        "num_key_value_heads": 8,
        "num_local_experts": 32,
        "output_router_logits": false,
        "pad_token_id": 199999,
        "rms_norm_eps": 1e-05,
        "rope_scaling": {
            "beta_fast": 32.0,
            "beta_slow": 1.0,
            "factor": 32.0,
            "original_max_position_embeddings": 4096,
            "rope_type": "yarn",
            "truncate": false,
        },
        "rope_theta": 150000,
        "router_aux_loss_coef": 0.9,
        "sliding_window": 128,
        "swiglu_limit": 7.0,
        "tie_word_embeddings": false,
        "vocab_size": 201088,
    })
}

/// The weights are those of the published model after they were made 16 bits wide: `mxfp4` is a
/// format of its own.
#[test]
fn gpt_oss_has_sinks_biases_and_a_clamped_gate() {
    let keys = gpt_oss();
    let spec = published(20.91, &keys);
    let (experts, _) = experts(&spec);
    let limit = 7.0;
    assert_eq!(
        experts.expert.activation,
        Activation::ClampedSwiGlu { limit }
    );
    assert!(experts.expert.bias && experts.router.has_bias);
    assert_eq!(experts.router.weights, ChosenWeights::Softmax);
    for (layer, attention) in spec.attention().enumerate() {
        assert!(attention.has_sinks && attention.biases.output);
        assert_eq!(attention.window, (layer % 2 == 0).then_some(128));
    }
    let rope = &spec.ropes[0];
    assert!(matches!(&rope.scaling, RopeScaling::Yarn(yarn) if !yarn.truncate));
    assert!((rope.attention_factor() - (0.1 * 32f32.ln() + 1.0)).abs() < 1e-6);
    assert_eq!(spec.context_tokens_max, 131_072);
    let larger = json!({
        "layer_types": every_second_sliding(36),
        "num_hidden_layers": 36,
        "num_local_experts": 128,
    });
    published(116.83, &with(keys.clone(), &larger));
    // Absent keys have the class's own values.
    let absent = json!({
        "attention_bias": null,
        "layer_types": null,
        "rms_norm_eps": null,
        "rope_theta": null,
        "sliding_window": null,
        "swiglu_limit": null,
    });
    assert_eq!(published(20.91, &with(keys.clone(), &absent)), spec);
    let plain = with(keys, &json!({"rope_scaling": null}));
    let error = read(&config(&plain)).unwrap_err().to_string();
    assert!(error.contains("rope_scaling"), "{error}");
}
