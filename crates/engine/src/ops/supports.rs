//! The models that the forward pass runs.
//!
//! Owns: the refusal of all others. Never: knows a device.
//! Invariant: every part of a description is looked at: a new kind or field does not compile until
//! it is accepted or refused here.

use cleave_models::{
    Activation, AttentionSpec, ChosenWeights, ExpertGroups, ExpertsSpec, GatedMlpSpec, GroupScore,
    LayerNorms, LayerSpec, Mixer, Mlp, ModelSpec, NormFormula, NormSpec, NormWeight, PartOrder,
    QkNormScope, QkNormSpec, RouterScore, RouterSpec, Scalars, SharedExpertSpec, Unsupported,
};

/// Every norm that a device computes, of a stream at least.
macro_rules! any_norm {
    () => {
        NormSpec {
            formula: NormFormula::RmsNorm | NormFormula::LayerNorm,
            epsilon: _,
            weight: NormWeight::AsStored | NormWeight::PlusOne,
        }
    };
}

macro_rules! any_gated {
    () => {
        GatedMlpSpec {
            width: _,
            activation: Activation::Silu
                | Activation::GeluTanh
                | Activation::ClampedSwiGlu { limit: _ },
            bias: _,
        }
    };
}

/// Accepts decoders of attention and gated MLPs, or mixtures of them: heads of one shape in all
/// layers, norms of inputs or outputs, LayerNorm of inputs alone, a factor of outputs only where
/// every part has a norm of its input, and parallel parts only under one norm.
///
/// # Errors
/// The first part that differs.
pub fn supports_decoder(spec: &ModelSpec) -> Result<(), Unsupported> {
    let ModelSpec {
        family,
        vocab_size: _,
        hidden_size: _,
        context_tokens_max: _,
        scalars:
            Scalars {
                embedding: _,
                is_embedding_rounded: _,
                residual,
                logits: _,
                logits_cap: _,
            },
        ropes: _,
        layers,
        final_norm: any_norm!(),
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
    let reads_stream = |layer: &LayerSpec| {
        let reads_input = layer.order == PartOrder::Sequential && layer.norms.mlp_input.is_none();
        layer.norms.mixer_input.is_none() || reads_input
    };
    if *residual != 1.0 && layers.iter().any(reads_stream) {
        return refuse("it scales outputs, and a part has no norm of its input");
    }
    if spec.uniform_heads().is_none() {
        return refuse("its layers have heads of different shapes; one shape is supported");
    }
    if layers.iter().any(is_parallel_otherwise) {
        return refuse("its parallel parts have other norms than one of their common input");
    }
    if leaves_an_output_behind(layers) {
        return refuse(
            "a part without a norm of its input follows one without a norm of its output",
        );
    }
    let is_other_norm =
        |norm: Option<NormSpec>| norm.is_some_and(|norm| norm.formula != NormFormula::RmsNorm);
    let has_other_norm = |layer: &LayerSpec| {
        let LayerNorms {
            mixer_output,
            mlp_output,
            ..
        } = layer.norms;
        is_other_norm(mixer_output) || is_other_norm(mlp_output)
    };
    let of_heads = spec.attention().filter_map(|attention| attention.qk_norm);
    if layers.iter().any(has_other_norm)
        || of_heads.map(|heads| Some(heads.norm)).any(is_other_norm)
    {
        return refuse("LayerNorm is supported for inputs, not for outputs, queries or keys");
    }
    layers.iter().for_each(accept_layer);
    Ok(())
}

/// Whether the parts of a layer are parallel, and have other norms than one of the common input.
fn is_parallel_otherwise(layer: &LayerSpec) -> bool {
    let LayerNorms {
        mixer_input,
        mixer_output,
        mlp_input,
        mlp_output,
    } = layer.norms;
    let has_one = mixer_input.is_some() && mlp_input.is_none();
    let is_alone = has_one && mixer_output.is_none() && mlp_output.is_none();
    layer.order == PartOrder::Parallel && !is_alone
}

/// Whether a part reads the residual stream while the part before has not added its output, which a
/// norm does, of either.
fn leaves_an_output_behind(layers: &[LayerSpec]) -> bool {
    let parts = layers.iter().flat_map(|layer| {
        let norms = &layer.norms;
        let mixer = (norms.mixer_input, norms.mixer_output);
        match layer.order {
            PartOrder::Sequential => vec![mixer, (norms.mlp_input, norms.mlp_output)],
            PartOrder::Parallel => vec![mixer],
        }
    });
    let outputs = parts.clone().map(|(_, output)| output);
    let inputs = parts.skip(1).map(|(input, _)| input);
    outputs
        .zip(inputs)
        .any(|(output, input)| output.is_none() && input.is_none())
}

/// Names every part of a layer; there is none yet that the forward pass refuses.
fn accept_layer(layer: &LayerSpec) {
    let LayerSpec {
        order: PartOrder::Sequential | PartOrder::Parallel,
        norms:
            LayerNorms {
                mixer_input: None | Some(any_norm!()),
                mixer_output: None | Some(any_norm!()),
                mlp_input: None | Some(any_norm!()),
                mlp_output: None | Some(any_norm!()),
            },
        mixer:
            Mixer::Attention(AttentionSpec {
                heads: _,
                rope: _,
                qk_norm:
                    None
                    | Some(QkNormSpec {
                        norm: any_norm!(),
                        scope: QkNormScope::Head | QkNormScope::Projection,
                    }),
                window: _,
                scale: _,
                soft_cap: _,
                biases: _,
                has_sinks: _,
            }),
        mlp,
    } = layer;
    match mlp {
        Mlp::Gated(any_gated!())
        | Mlp::Experts(ExpertsSpec {
            count: _,
            chosen: _,
            expert: any_gated!(),
            router:
                RouterSpec {
                    score: RouterScore::Softmax | RouterScore::Sigmoid | RouterScore::Identity,
                    has_bias: _,
                    has_choice_bias: _,
                    groups:
                        None
                        | Some(ExpertGroups {
                            count: _,
                            chosen: _,
                            score: GroupScore::Max | GroupScore::TwoBestSum,
                        }),
                    weights:
                        ChosenWeights::Scores
                        | ChosenWeights::Normalized { epsilon: _ }
                        | ChosenWeights::Softmax,
                    scale: _,
                },
            shared:
                None
                | Some(SharedExpertSpec {
                    mlp: any_gated!(),
                    has_gate: _,
                }),
        }) => {}
    }
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
    fn scaled_outputs_need_norms_of_inputs() {
        let scalars = Scalars {
            embedding: 12.0,
            residual: 0.22,
            logits: 0.0625,
            ..Scalars::default()
        };
        let mut scaled = ModelSpec { scalars, ..spec() };
        supports_decoder(&scaled).unwrap();
        scaled.layers[1].norms.mixer_output = scaled.layers[1].norms.mlp_input.take();
        let error = supports_decoder(&scaled).unwrap_err().to_string();
        assert!(
            error.contains("llama") && error.contains("scales"),
            "{error}"
        );
    }

    #[test]
    fn heads_of_different_shapes_are_refused() {
        let mut mixed = spec();
        let Mixer::Attention(attention) = &mut mixed.layers[1].mixer;
        attention.heads.kv_heads = 2;
        let error = supports_decoder(&mixed).unwrap_err().to_string();
        assert!(error.contains("different shapes"), "{error}");
    }

    #[test]
    fn parallel_parts_have_one_norm() {
        let with_mlp_norm = |has_norm: bool| {
            let mut parallel = spec();
            for layer in &mut parallel.layers {
                layer.order = PartOrder::Parallel;
                layer.norms.mlp_input = layer.norms.mlp_input.filter(|_| has_norm);
            }
            supports_decoder(&parallel)
        };
        with_mlp_norm(false).unwrap();
        let error = with_mlp_norm(true).unwrap_err().to_string();
        assert!(error.contains("parallel"), "{error}");
    }

    #[test]
    fn only_inputs_have_a_layer_norm() {
        let mut norms = spec();
        norms.final_norm.formula = NormFormula::LayerNorm;
        for layer in &mut norms.layers {
            for norm in [&mut layer.norms.mixer_input, &mut layer.norms.mlp_input] {
                *norm = Some(norms.final_norm);
            }
        }
        supports_decoder(&norms).unwrap();
        let norm = norms.final_norm;
        norms.layers[1].norms.mlp_output = Some(norm);
        let error = supports_decoder(&norms).unwrap_err().to_string();
        assert!(error.contains("LayerNorm"), "{error}");
        norms.layers[1].norms.mlp_output = None;
        let Mixer::Attention(attention) = &mut norms.layers[0].mixer;
        let scope = QkNormScope::Head;
        attention.qk_norm = Some(QkNormSpec { norm, scope });
        let error = supports_decoder(&norms).unwrap_err().to_string();
        assert!(error.contains("LayerNorm"), "{error}");
    }

    #[test]
    fn a_part_between_no_norms_is_refused() {
        let refused = |change: fn(&mut LayerSpec)| {
            let mut changed = spec();
            change(&mut changed.layers[1]);
            let error = supports_decoder(&changed).err();
            error.is_some_and(|error| error.to_string().contains("without a norm"))
        };
        assert!(refused(|layer| layer.norms.mixer_input = None));
        assert!(refused(|layer| layer.norms.mlp_input = None));
        let moved = |layer: &mut LayerSpec| {
            layer.norms.mixer_output = layer.norms.mlp_input.take();
        };
        assert!(!refused(moved));
    }
}
