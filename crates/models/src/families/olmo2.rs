//! OLMo 2 models. Their norms multiply by the weight before they round, as devices do for every
//! family.

use super::decoder::{
    self, Decoder, DecoderFactors, DecoderMlp, DecoderNorms, DecoderRopes, NormPlacement,
};
use super::names::{self, ATTENTION_MODULE, UNUSED_TENSORS};
use crate::error::ConfigError;
use crate::fields::ConfigFields;
use crate::registry::Family;
use crate::spec::{ModelSpec, QkNormScope};

pub(crate) static FAMILY: Family = Family {
    name: "olmo2",
    models: "OLMo 2",
    classes: &["Olmo2ForCausalLM"],
    spec,
    tensors: names::LLAMA,
    attention_module: ATTENTION_MODULE,
    unused_tensors: UNUSED_TENSORS,
    mtp_layers_key: None,
    unused_keys: &[],
};

/// The class's own default, ten times that of other decoders.
const EPSILON: f64 = 1e-5;

fn spec(fields: &ConfigFields) -> Result<ModelSpec, ConfigError> {
    let heads = decoder::heads(fields, None)?;
    Decoder {
        family: FAMILY.name,
        heads,
        biases: decoder::attention_biases(fields)?,
        mlp: DecoderMlp::default(),
        norms: DecoderNorms {
            placement: NormPlacement::Output,
            qk: Some(QkNormScope::Projection),
            epsilon: EPSILON,
            ..DecoderNorms::default()
        },
        factors: DecoderFactors::default(),
        windows: decoder::no_windows(fields)?,
        ropes: DecoderRopes::read(fields, &heads)?,
    }
    .spec(fields)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::TensorPlace;
    use crate::registry::read_model;
    use crate::spec::{
        HeadShape, LayerNorms, Mixer, NormFormula, NormSpec, NormWeight, QkNormSpec,
    };
    use serde_json::{Value, json};
    use std::path::Path;

    /// The keys of config.json of allenai/OLMo-2-0425-1B, which are also those of
    /// allenai/OLMo-2-1124-7B.
    fn published() -> Value {
        json!({
            "architectures": ["Olmo2ForCausalLM"],
            "attention_bias": false,
            "attention_dropout": 0.0,
            "eos_token_id": 100257,
            "hidden_act": "silu",
            "hidden_size": 2048,
            "initializer_range": 0.02,
            "intermediate_size": 8192,
            "max_position_embeddings": 4096,
            "model_type": "olmo2",
            "num_attention_heads": 16,
            "num_hidden_layers": 16,
            "num_key_value_heads": 16,
            "pad_token_id": 100277,
            "rms_norm_eps": 1e-06,
            "rope_scaling": null,
            "rope_theta": 500000,
            "tie_word_embeddings": false,
            "torch_dtype": "float32",
            "transformers_version": "4.47.0.dev0",
            "use_cache": true,
            "vocab_size": 100352,
        })
    }

    /// The published config.json with these fields instead of its own.
    fn changed(changes: &Value) -> Value {
        let mut config = published();
        for (name, value) in changes.as_object().unwrap() {
            config[name] = value.clone();
        }
        config
    }

    fn read(config: &Value) -> Result<ModelSpec, ConfigError> {
        let map = config.as_object().cloned().unwrap();
        let fields = ConfigFields::new(Path::new("config.json"), map);
        read_model(&fields, |_| Ok::<_, ConfigError>(())).map(|(model, ())| model.spec)
    }

    /// Shapes of a layer's tensors other than matrices, by their names without the layer's.
    fn vectors(spec: &ModelSpec) -> Vec<(String, Vec<usize>)> {
        let tensors = spec.tensors(FAMILY.tensors, false).into_iter();
        let of_layer = tensors
            .filter(|tensor| tensor.place == TensorPlace::Layer(1) && tensor.shape.len() == 1);
        of_layer
            .map(|tensor| {
                let name = tensor.name.strip_prefix("model.layers.1.").unwrap();
                (name.to_owned(), tensor.shape)
            })
            .collect()
    }

    #[test]
    fn published_configs_are_read() {
        let one = read(&published()).unwrap();
        let norm = NormSpec {
            formula: NormFormula::RmsNorm,
            epsilon: 1e-6,
            weight: NormWeight::AsStored,
        };
        let after = LayerNorms {
            mixer_input: None,
            mixer_output: Some(norm),
            mlp_input: None,
            mlp_output: Some(norm),
        };
        assert_eq!(one.layers.len(), 16);
        for layer in &one.layers {
            let Mixer::Attention(attention) = &layer.mixer;
            let scope = QkNormScope::Projection;
            assert_eq!(attention.qk_norm, Some(QkNormSpec { norm, scope }));
            assert_eq!(layer.norms, after);
        }
        assert_eq!((one.ropes[0].theta, one.tied), (5e5, Some(false)));
        assert_eq!((one.eos, one.bos), (vec![100_257], None));
        let seven = read(&changed(&json!({
            "hidden_size": 4096,
            "intermediate_size": 11008,
            "num_attention_heads": 32,
            "num_hidden_layers": 32,
            "num_key_value_heads": 32,
        })));
        let heads = HeadShape {
            query_heads: 32,
            kv_heads: 32,
            head_dim: 128,
        };
        assert_eq!(seven.unwrap().uniform_heads(), Some(heads));
    }

    #[test]
    fn norms_cover_outputs_and_whole_projections() {
        let heads = json!({"num_key_value_heads": 4, "attention_bias": true});
        let spec = read(&changed(&heads)).unwrap();
        let named = [
            ("post_attention_layernorm.weight", 2048),
            ("post_feedforward_layernorm.weight", 2048),
            ("self_attn.q_proj.bias", 2048),
            ("self_attn.k_proj.bias", 512),
            ("self_attn.v_proj.bias", 512),
            ("self_attn.o_proj.bias", 2048),
            ("self_attn.q_norm.weight", 2048),
            ("self_attn.k_norm.weight", 512),
        ];
        let named = named.map(|(name, width)| (name.to_owned(), vec![width]));
        assert_eq!(vectors(&spec), named);
        let without_bias = vectors(&read(&published()).unwrap());
        assert!(without_bias.iter().all(|(name, _)| !name.ends_with("bias")));
        assert_eq!(without_bias.len(), 4);
    }

    #[test]
    fn absent_keys_have_the_defaults_of_the_class() {
        let absent = json!({"rms_norm_eps": null, "num_key_value_heads": null, "rope_theta": null});
        let spec = read(&changed(&absent)).unwrap();
        assert_eq!(spec.final_norm.epsilon, 1e-5);
        assert_eq!(spec.uniform_heads().unwrap().kv_heads, 16);
        assert_eq!(spec.ropes[0].theta, 1e4);
    }

    /// The first OLMo clips queries, keys and values; a later one has windows.
    #[test]
    fn a_key_of_another_olmo_is_refused() {
        for (key, value) in [
            ("clip_qkv", json!(8.0)),
            ("sliding_window", json!(4096)),
            ("mlp_bias", json!(true)),
        ] {
            let error = read(&changed(&json!({ key: value }))).unwrap_err();
            let error = error.to_string();
            assert!(error.contains(key) && error.contains("olmo2"), "{error}");
            read(&changed(&json!({ key: null }))).unwrap();
        }
    }
}
