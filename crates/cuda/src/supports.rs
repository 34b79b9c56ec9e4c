//! Models that the kernels compute, of those that the forward pass runs.
//!
//! Owns: the refusal of norms without a kernel.
//! Never: knows a family.
//! Invariant: each norm of a description is looked at: a new place or scope does not compile until
//! it is accepted or refused here.

use cleave_models::{
    AttentionSpec, LayerNorms, Mixer, ModelSpec, QkNormScope, QkNormSpec, Unsupported,
};

/// Accepts norms of the inputs of attention and MLP, and of single query and key heads.
///
/// # Errors
/// The first other norm.
pub(crate) fn supports_norms(spec: &ModelSpec) -> Result<(), Unsupported> {
    let refuse = |problem: &str| {
        Err(Unsupported {
            family: spec.family,
            problem: format!("{problem}; a processor does (--device cpu)"),
        })
    };
    for layer in &spec.layers {
        match layer.norms {
            LayerNorms {
                mixer_input: Some(_),
                mixer_output: None,
                mlp_input: Some(_),
                mlp_output: None,
            } => {}
            _ => return refuse("a GPU computes norms of the inputs of attention and MLP alone"),
        }
        let Mixer::Attention(AttentionSpec { qk_norm, .. }) = &layer.mixer;
        match qk_norm {
            None
            | Some(QkNormSpec {
                scope: QkNormScope::Head,
                ..
            }) => {}
            Some(QkNormSpec {
                scope: QkNormScope::Projection,
                ..
            }) => {
                return refuse("a GPU computes norms of single query and key heads alone");
            }
        }
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;
    use cleave_models::{ConfigError, ConfigFields, read_model};
    use serde_json::json;
    use std::path::Path;

    fn spec(class: &str) -> ModelSpec {
        let config = json!({
            "architectures": [class],
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
    fn norms_without_a_kernel_are_refused() {
        supports_norms(&spec("LlamaForCausalLM")).unwrap();
        let with_head_norms = spec("Qwen3ForCausalLM");
        supports_norms(&with_head_norms).unwrap();
        let after = spec("Olmo2ForCausalLM");
        let error = supports_norms(&after).unwrap_err().to_string();
        assert!(
            error.contains("this olmo2 model") && error.contains("inputs"),
            "{error}"
        );
        let mut whole = with_head_norms;
        let Mixer::Attention(attention) = &mut whole.layers[1].mixer;
        attention.qk_norm.as_mut().unwrap().scope = QkNormScope::Projection;
        let error = supports_norms(&whole).unwrap_err().to_string();
        assert!(error.contains("single query and key heads"), "{error}");
    }
}
