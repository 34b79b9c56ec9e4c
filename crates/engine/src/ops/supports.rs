//! The models that every device computes.
//!
//! Owns: the refusal of all others. Never: knows a device.
//! Invariant: every part of a description is looked at: a new kind or field does not compile until
//! it is accepted or refused here.

use cleave_models::{
    Activation, AttentionSpec, GatedMlpSpec, LayerNorms, LayerSpec, Mixer, Mlp, ModelSpec,
    NormSpec, Scalars, Unsupported,
};

/// Accepts decoders of attention and gated MLPs: heads of one shape in all layers, RMS norms, no
/// [`Scalars`].
///
/// # Errors
/// The first part that differs.
pub fn supports_decoder(spec: &ModelSpec) -> Result<(), Unsupported> {
    let ModelSpec {
        family,
        vocab_size: _,
        hidden_size: _,
        context_tokens_max: _,
        scalars,
        ropes: _,
        layers,
        final_norm: NormSpec { epsilon: _ },
        tied: _,
        bos: _,
        eos: _,
    } = spec;
    let refuse = |problem: &str| {
        Err(Unsupported {
            family,
            problem: problem.to_owned(),
        })
    };
    if *scalars != Scalars::default() {
        return refuse("it scales its embedding, residual stream or logits");
    }
    if spec.uniform_heads().is_none() {
        return refuse("its layers have heads of different shapes; one shape is supported");
    }
    layers.iter().for_each(accept_layer);
    Ok(())
}

/// Names every part of a layer; there is none yet that a device refuses.
fn accept_layer(layer: &LayerSpec) {
    let LayerSpec {
        norms:
            LayerNorms {
                mixer_input: NormSpec { epsilon: _ },
                mlp_input: NormSpec { epsilon: _ },
            },
        mixer:
            Mixer::Attention(AttentionSpec {
                heads: _,
                rope: _,
                head_norms: _,
                window: _,
                scale: _,
                biases: _,
            }),
        mlp:
            Mlp::Gated(GatedMlpSpec {
                width: _,
                activation: Activation::Silu,
                bias: _,
            }),
    } = layer;
}

#[cfg(test)]
mod tests {
    use super::*;
    use cleave_models::{ConfigError, ConfigFields, read_model};
    use serde_json::json;
    use std::path::Path;

    fn spec() -> ModelSpec {
        let config = json!({
            "architectures": ["LlamaForCausalLM"],
            "num_hidden_layers": 2,
            "hidden_size": 64,
            "intermediate_size": 128,
            "num_attention_heads": 4,
            "vocab_size": 32,
            "max_position_embeddings": 64,
        });
        let map = config.as_object().cloned().unwrap();
        let fields = ConfigFields::new(Path::new("config.json"), map);
        let read = read_model(&fields, |_| Ok::<_, ConfigError>(()));
        read.unwrap().0.spec
    }

    #[test]
    fn a_decoder_is_supported() {
        supports_decoder(&spec()).unwrap();
    }

    #[test]
    fn scalars_are_refused_with_the_family_and_the_part() {
        for scalars in [
            Scalars {
                embedding: 12.0,
                ..Scalars::default()
            },
            Scalars {
                residual: 0.22,
                ..Scalars::default()
            },
            Scalars {
                logits: 0.0625,
                ..Scalars::default()
            },
        ] {
            let scaled = ModelSpec { scalars, ..spec() };
            let error = supports_decoder(&scaled).unwrap_err().to_string();
            assert!(
                error.contains("llama") && error.contains("scales"),
                "{error}"
            );
        }
    }

    #[test]
    fn heads_of_different_shapes_are_refused() {
        let mut mixed = spec();
        let Mixer::Attention(attention) = &mut mixed.layers[1].mixer;
        attention.heads.kv_heads = 2;
        let error = supports_decoder(&mixed).unwrap_err().to_string();
        assert!(error.contains("different shapes"), "{error}");
    }
}
