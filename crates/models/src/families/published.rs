//! Published models: the keys of their config.json, which become specs of the published size.

mod cohere;
mod experts;
mod gemma;
mod usual;
mod windows;

use crate::cost::StoredSizes;
use crate::error::ConfigError;
use crate::fields::ConfigFields;
use crate::registry::{DescribedModel, read_model};
use crate::rope::{RopePairs, RopeScaling};
use crate::spec::{AttentionSpec, Mixer, ModelSpec};
use serde_json::{Value, json};
use std::path::Path;

fn read(config: &Value) -> Result<DescribedModel, ConfigError> {
    let map = config.as_object().cloned().unwrap();
    let fields = ConfigFields::new(Path::new("config.json"), map);
    read_model(&fields, |_| Ok::<_, ConfigError>(())).map(|(model, ())| model)
}

/// Keys that most writers add, with these of a model.
fn config(keys: &Value) -> Value {
    let mut config = json!({
        "attention_dropout": 0.0,
        "bos_token_id": 1,
        "eos_token_id": 2,
        "initializer_range": 0.02,
        "torch_dtype": "bfloat16",
        "transformers_version": "4.51.0",
        "use_cache": true,
    });
    for (name, value) in keys.as_object().unwrap() {
        config[name] = value.clone();
    }
    config
}

/// Reads a model that has this many billions of parameters.
fn published(billions: f64, keys: &Value) -> ModelSpec {
    let model = read(&config(keys)).unwrap();
    let tied = model.spec.tied.unwrap_or(true);
    let tensors = model.spec.tensors(model.family.tensors, tied).into_iter();
    let sizes = tensors.map(|tensor| tensor.shape.iter().product::<usize>());
    let found = sizes.sum::<usize>() as f64 / 1e9;
    let name = model.family.name;
    assert!((found / billions - 1.0).abs() < 0.01, "{name}: {found} B");
    assert_eq!(model.spec.kv_spec(16, 2, 0).check(), Ok(()), "{name}");
    assert!(model.spec.cost(&StoredSizes::default()).layer_weights > 0);
    model.spec
}

fn attention(spec: &ModelSpec, layer: usize) -> &AttentionSpec {
    let Mixer::Attention(attention) = &spec.layers[layer].mixer;
    attention
}

/// Elements of a head that a layer rotates.
fn rotated(spec: &ModelSpec, layer: usize) -> usize {
    spec.ropes[attention(spec, layer).rope.0].rotated_dim
}

fn three_of_four_sliding(layers_count: usize) -> Vec<&'static str> {
    let kinds = ["sliding_attention"; 3]
        .into_iter()
        .chain(["full_attention"]);
    kinds.cycle().take(layers_count).collect()
}

#[test]
fn smollm3_rotates_three_of_four_layers() {
    let marks: Vec<u8> = (1..=36).map(|layer| u8::from(layer % 4 != 0)).collect();
    let mut keys = json!({
        "architectures": ["SmolLM3ForCausalLM"],
        "attention_bias": false,
        "hidden_act": "silu",
        "hidden_size": 2048,
        "intermediate_size": 11008,
        "layer_types": vec!["full_attention"; 36],
        "max_position_embeddings": 65536,
        "max_window_layers": 28,
        "mlp_bias": false,
        "model_type": "smollm3",
        "no_rope_layer_interval": 4,
        "no_rope_layers": marks,
        "num_attention_heads": 16,
        "num_hidden_layers": 36,
        "num_key_value_heads": 4,
        "pretraining_tp": 2,
        "rms_norm_eps": 1e-06,
        "rope_scaling": null,
        "rope_theta": 5000000.0,
        "sliding_window": null,
        "use_sliding_window": false,
        "tie_word_embeddings": true,
        "vocab_size": 128256,
    });
    let spec = published(3.08, &keys);
    let layers: Vec<usize> = (0..4).map(|layer| rotated(&spec, layer)).collect();
    assert_eq!(layers, [128, 128, 128, 0]);
    keys["no_rope_layers"] = Value::Null;
    assert_eq!(published(3.08, &keys), spec);
}

#[test]
fn seed_oss_is_read() {
    let spec = published(
        36.15,
        &json!({
            "architectures": ["SeedOssForCausalLM"],
            "attention_bias": true,
            "attention_dropout": 0.1,
            "attention_out_bias": false,
            "head_dim": 128,
            "hidden_act": "silu",
            "hidden_size": 5120,
            "intermediate_size": 27648,
            "max_position_embeddings": 524288,
            "mlp_bias": false,
            "model_type": "seed_oss",
            "num_attention_heads": 80,
            "num_hidden_layers": 64,
            "num_key_value_heads": 8,
            "pretraining_tp": 1,
            "residual_dropout": 0.1,
            "rms_norm_eps": 1e-06,
            "rope_scaling": {"rope_type": "default"},
            "rope_theta": 10000000.0,
            "tie_word_embeddings": false,
            "vocab_size": 155136,
        }),
    );
    let biases = attention(&spec, 0).biases;
    assert!(biases.qkv && !biases.output);
}

fn granite() -> Value {
    json!({
        "architectures": ["GraniteForCausalLM"],
        "attention_bias": false,
        "attention_multiplier": 0.015625,
        "embedding_multiplier": 12.0,
        "hidden_act": "silu",
        "hidden_size": 2048,
        "intermediate_size": 8192,
        "logits_scaling": 8.0,
        "max_position_embeddings": 131072,
        "mlp_bias": false,
        "model_type": "granite",
        "num_attention_heads": 32,
        "num_hidden_layers": 40,
        "num_key_value_heads": 8,
        "residual_multiplier": 0.22,
        "rms_norm_eps": 1e-05,
        "rope_scaling": null,
        "rope_theta": 10000000.0,
        "tie_word_embeddings": true,
        "vocab_size": 49159,
    })
}

#[test]
fn factors_of_granite_are_read() {
    let spec = published(2.53, &granite());
    let scalars = spec.scalars;
    let factors = (scalars.embedding, scalars.residual, scalars.logits);
    assert_eq!(factors, (12.0, 0.22, 0.125));
    assert_eq!(attention(&spec, 7).scale, 0.015625);
}

/// The keys of Granite 4 micro, whose family has states and experts too.
fn granite4() -> Value {
    let mut keys = granite();
    let own = json!({
        "architectures": ["GraniteMoeHybridForCausalLM"],
        "embedding_multiplier": 12,
        "hidden_size": 2560,
        "init_method": "mup",
        "layer_types": vec!["attention"; 40],
        "logits_scaling": 10,
        "mamba_chunk_size": 256,
        "mamba_conv_bias": true,
        "mamba_d_conv": 4,
        "mamba_d_head": 64,
        "mamba_d_state": 256,
        "mamba_expand": 2,
        "mamba_n_groups": 1,
        "mamba_n_heads": 80,
        "mamba_proj_bias": false,
        "model_type": "granitemoehybrid",
        "normalization_function": "rmsnorm",
        "num_attention_heads": 40,
        "num_experts_per_tok": 0,
        "num_local_experts": 0,
        "output_router_logits": false,
        "position_embedding_type": "rope",
        "router_aux_loss_coef": 0.01,
        "shared_intermediate_size": 8192,
        "vocab_size": 100352,
    });
    for (name, value) in own.as_object().unwrap() {
        keys[name] = value.clone();
    }
    keys
}

#[test]
fn granite4_without_states_is_read() {
    let spec = published(3.4, &granite4());
    assert_eq!(rotated(&spec, 0), 64);
    let without = |key: &str, value: Value| {
        let mut keys = granite4();
        keys[key] = value;
        read(&config(&keys))
    };
    let unrotated = without("position_embedding_type", Value::Null).unwrap();
    assert_eq!(rotated(&unrotated.spec, 0), 0);
    let mut types = vec!["attention"; 40];
    types[3] = "mamba";
    let error = without("layer_types", json!(types))
        .unwrap_err()
        .to_string();
    assert!(error.contains("layer_types"), "{error}");
    // With experts it has to say how many of them each token uses.
    let error = without("num_local_experts", json!(62)).unwrap_err();
    assert!(error.to_string().contains("num_experts_per_tok"), "{error}");
}

#[test]
fn ministral3_stretches_and_grows() {
    let spec = published(
        8.5,
        &json!({
            "architectures": ["Ministral3ForCausalLM"],
            "head_dim": 128,
            "hidden_act": "silu",
            "hidden_size": 4096,
            "intermediate_size": 14336,
            "max_position_embeddings": 262144,
            "model_type": "ministral3",
            "num_attention_heads": 32,
            "num_hidden_layers": 34,
            "num_key_value_heads": 8,
            "rms_norm_eps": 1e-05,
            "rope_parameters": {
                "beta_fast": 32.0,
                "beta_slow": 1.0,
                "factor": 16.0,
                "llama_4_scaling_beta": 0.1,
                "mscale": 1.0,
                "mscale_all_dim": 1.0,
                "original_max_position_embeddings": 16384,
                "rope_theta": 1000000.0,
                "rope_type": "yarn",
                "type": "yarn",
            },
            "sliding_window": null,
            "tie_word_embeddings": false,
            "vocab_size": 131072,
        }),
    );
    let rope = &spec.ropes[0];
    assert_eq!(
        (rope.attention_factor(), spec.context_tokens_max),
        (1.0, 262_144)
    );
    let growth = rope.query_growth.unwrap();
    assert_eq!((growth.beta, growth.original_context), (0.1, 16384.0));
}

/// The keys of OLMo 3 7B.
fn olmo3() -> Value {
    json!({
        "architectures": ["Olmo3ForCausalLM"],
        "attention_bias": false,
        "hidden_act": "silu",
        "hidden_size": 4096,
        "intermediate_size": 11008,
        "layer_types": three_of_four_sliding(32),
        "max_position_embeddings": 65536,
        "model_type": "olmo3",
        "num_attention_heads": 32,
        "num_hidden_layers": 32,
        "num_key_value_heads": 32,
        "rms_norm_eps": 1e-06,
        "rope_scaling": {
            "attention_factor": 1.2079441541679836,
            "beta_fast": 32.0,
            "beta_slow": 1.0,
            "factor": 8.0,
            "original_max_position_embeddings": 8192,
            "rope_type": "yarn",
        },
        "rope_theta": 500000,
        "sliding_window": 4096,
        "tie_word_embeddings": false,
        "vocab_size": 100278,
    })
}

#[test]
fn olmo3_stretches_layers_without_a_window() {
    let spec = published(7.3, &olmo3());
    for layer in 0..32 {
        let attention = attention(&spec, layer);
        let rope = &spec.ropes[attention.rope.0];
        let has_window = layer % 4 != 3;
        assert_eq!(attention.window, has_window.then_some(4096));
        assert_eq!(rope.scaling == RopeScaling::None, has_window);
    }
}

fn exaone4() -> Value {
    json!({
        "architectures": ["Exaone4ForCausalLM"],
        "head_dim": 128,
        "hidden_act": "silu",
        "hidden_size": 5120,
        "intermediate_size": 27392,
        "layer_types": three_of_four_sliding(64),
        "max_position_embeddings": 131072,
        "model_type": "exaone4",
        "num_attention_heads": 40,
        "num_hidden_layers": 64,
        "num_key_value_heads": 8,
        "rms_norm_eps": 1e-05,
        "rope_scaling": {
            "factor": 16.0,
            "high_freq_factor": 4.0,
            "low_freq_factor": 1.0,
            "original_max_position_embeddings": 8192,
            "rope_type": "llama3",
        },
        "rope_theta": 1000000,
        "sliding_window": 4096,
        "sliding_window_pattern": "LLLG",
        "tie_word_embeddings": false,
        "vocab_size": 102400,
    })
}

#[test]
fn exaone4_rotates_layers_with_a_window() {
    let spec = published(32.0, &exaone4());
    let layers: Vec<usize> = (0..4).map(|layer| rotated(&spec, layer)).collect();
    assert_eq!(layers, [128, 128, 128, 0]);
    // The small model has no windows, and rotates in every layer.
    let mut small = exaone4();
    small["sliding_window"] = Value::Null;
    small["sliding_window_pattern"] = Value::Null;
    small["layer_types"] = json!(vec!["full_attention"; 64]);
    let spec = published(32.0, &small);
    assert!((0..64).all(|layer| rotated(&spec, layer) == 128));
}

fn phi4_mini() -> Value {
    json!({
        "architectures": ["Phi3ForCausalLM"],
        "attention_bias": false,
        "auto_map": {},
        "embd_pdrop": 0.0,
        "full_attn_mod": 1,
        "hidden_act": "silu",
        "hidden_size": 3072,
        "intermediate_size": 8192,
        "interpolate_factor": 1,
        "lm_head_bias": false,
        "max_position_embeddings": 131072,
        "mlp_bias": false,
        "model_type": "phi3",
        "num_attention_heads": 24,
        "num_hidden_layers": 32,
        "num_key_value_heads": 8,
        "original_max_position_embeddings": 4096,
        "partial_rotary_factor": 0.75,
        "resid_pdrop": 0.0,
        "rms_norm_eps": 1e-05,
        "rope_scaling": {
            "long_factor": vec![2.0; 48],
            "short_factor": vec![1.0; 48],
            "type": "longrope",
        },
        "rope_theta": 10000.0,
        "sliding_window": 262144,
        "tie_word_embeddings": true,
        "vocab_size": 200064,
    })
}

#[test]
fn the_context_chooses_factors_of_longrope() {
    let spec = published(3.84, &phi4_mini());
    let rope = &spec.ropes[0];
    assert_eq!((rope.rotated_dim, rope.is_long(4096)), (96, Some(false)));
    assert_eq!(rope.is_long(4097), Some(true));
    let (short, long) = (rope.frequencies(4096), rope.frequencies(131_072));
    assert!(
        short
            .iter()
            .zip(&long)
            .all(|(short, long)| *short == 2.0 * long)
    );
    let expected = (1.0 + 32f64.ln() / 4096f64.ln()).sqrt();
    assert!((f64::from(rope.attention_factor()) - expected).abs() < 1e-6);
    let mut fewer = phi4_mini();
    fewer["partial_rotary_factor"] = json!(1.0);
    let error = read(&config(&fewer)).unwrap_err().to_string();
    assert!(error.contains("48 factors for 64"), "{error}");
}

#[test]
fn phi4_is_read() {
    let mut keys = phi4_mini();
    let own = json!({
        "hidden_size": 5120,
        "intermediate_size": 17920,
        "max_position_embeddings": 16384,
        "num_attention_heads": 40,
        "num_hidden_layers": 40,
        "num_key_value_heads": 10,
        "original_max_position_embeddings": 16384,
        "partial_rotary_factor": null,
        "rope_scaling": null,
        "rope_theta": 250000,
        "sliding_window": null,
        "tie_word_embeddings": false,
        "vocab_size": 100352,
    });
    for (name, value) in own.as_object().unwrap() {
        keys[name] = value.clone();
    }
    let spec = published(14.66, &keys);
    assert_eq!((rotated(&spec, 0), spec.ropes[0].is_long(1)), (128, None));
}

#[test]
fn glm4_rotates_neighbours_of_half_a_head() {
    let spec = published(
        9.4,
        &json!({
            "architectures": ["Glm4ForCausalLM"],
            "attention_bias": true,
            "head_dim": 128,
            "hidden_act": "silu",
            "hidden_size": 4096,
            "intermediate_size": 13696,
            "max_position_embeddings": 32768,
            "model_type": "glm4",
            "num_attention_heads": 32,
            "num_hidden_layers": 40,
            "num_key_value_heads": 2,
            "partial_rotary_factor": 0.5,
            "rms_norm_eps": 1e-05,
            "rope_theta": 10000.0,
            "tie_word_embeddings": false,
            "vocab_size": 151552,
        }),
    );
    assert_eq!(rotated(&spec, 39), 64);
    assert_eq!(spec.ropes[0].pairs, RopePairs::Neighbours);
}

/// The keys of Gemma 3 4B.
fn gemma3_4b() -> Value {
    json!({
        "architectures": ["Gemma3ForConditionalGeneration"],
        "boi_token_index": 255999,
        "eoi_token_index": 256000,
        "eos_token_id": [1, 106],
        "image_token_index": 262144,
        "mm_tokens_per_image": 256,
        "model_type": "gemma3",
        "text_config": {
            "hidden_size": 2560,
            "intermediate_size": 10240,
            "model_type": "gemma3_text",
            "num_hidden_layers": 34,
            "rope_scaling": {"factor": 8.0, "rope_type": "linear"},
            "sliding_window": 1024,
        },
        "vision_config": {"hidden_size": 1152, "model_type": "siglip_vision_model"},
    })
}

#[test]
fn text_parts_of_wrapped_models_are_read() {
    let mut gemma = gemma3_4b();
    let spec = published(3.88, &gemma);
    assert_eq!(
        (spec.context_tokens_max, spec.vocab_size),
        (131_072, 262_208)
    );
    assert_eq!((spec.tied, &spec.eos[..]), (None, &[1, 106][..]));
    assert_eq!(attention(&spec, 0).window, Some(1024));
    let mistral = json!({
        "architectures": ["Mistral3ForConditionalGeneration"],
        "image_token_index": 10,
        "model_type": "mistral3",
        "multimodal_projector_bias": false,
        "projector_hidden_act": "gelu",
        "spatial_merge_size": 2,
        "text_config": {
            "attention_dropout": 0.0,
            "head_dim": 128,
            "hidden_act": "silu",
            "hidden_size": 5120,
            "initializer_range": 0.02,
            "intermediate_size": 32768,
            "max_position_embeddings": 131072,
            "model_type": "mistral",
            "num_attention_heads": 32,
            "num_hidden_layers": 40,
            "num_key_value_heads": 8,
            "rms_norm_eps": 1e-05,
            "rope_theta": 1000000000.0,
            "sliding_window": null,
            "use_cache": true,
            "vocab_size": 131072,
        },
        "vision_config": {"hidden_size": 1024, "model_type": "pixtral"},
        "vision_feature_layer": -1,
    });
    assert_eq!(
        attention(&published(22.9, &mistral), 0).heads.query_heads,
        32
    );
    gemma["text_config"]["query_scale_of_tomorrow"] = json!(2);
    let error = read(&config(&gemma)).unwrap_err().to_string();
    assert!(
        error.contains("`text_config.query_scale_of_tomorrow`"),
        "{error}"
    );
    gemma["text_config"] = mistral["text_config"].clone();
    let error = read(&config(&gemma)).unwrap_err().to_string();
    assert!(
        error.contains("mistral is not the text part of a Gemma3"),
        "{error}"
    );
    gemma["text_config"] = Value::Null;
    let error = read(&config(&gemma)).unwrap_err().to_string();
    assert!(
        error.contains("`text_config`") && error.contains("missing"),
        "{error}"
    );
}
