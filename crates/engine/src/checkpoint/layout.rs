//! Names and shapes of the tensors that a model has.
//!
//! Owns: Hugging Face's names for the parts of a layer.
//! Never: reads a file.
//! Invariant: the list is complete: a tensor that is not on it is not loaded.

use super::config::ModelConfig;

/// A tensor that the model needs.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct ExpectedTensor {
    pub(crate) name: String,
    /// One or two dimensions.
    pub(crate) shape: Vec<usize>,
}

/// Name of the embedding, `(vocab, hidden)`.
pub(crate) const EMBEDDING: &str = "model.embed_tokens.weight";
/// Name of the final norm, `(hidden)`.
pub(crate) const LAST_NORM: &str = "model.norm.weight";
/// Name of the head, `(vocab, hidden)`; absent or ignored if it is tied to the embedding.
pub(crate) const HEAD: &str = "lm_head.weight";

/// Name of a layer's tensor; `part` is, for example, `mlp.up_proj.weight`.
pub(crate) fn layer_tensor_name(layer: usize, part: &str) -> String {
    format!("model.layers.{layer}.{part}")
}

/// Whether an unused tensor may be ignored: old writers stored the rotary frequencies, and some
/// store a tied head twice.
pub(super) fn may_be_ignored(name: &str, tied: bool) -> bool {
    name.ends_with(".rotary_emb.inv_freq") || (tied && name == HEAD)
}

/// Every tensor of the model.
pub(crate) fn expected(config: &ModelConfig, tied: bool) -> Vec<ExpectedTensor> {
    let mut list = vec![
        (
            EMBEDDING.to_owned(),
            vec![config.vocab_size, config.hidden_size],
        ),
        (LAST_NORM.to_owned(), vec![config.hidden_size]),
    ];
    if !tied {
        list.push((HEAD.to_owned(), vec![config.vocab_size, config.hidden_size]));
    }
    let parts = layer_parts(config);
    for layer in 0..config.layers_count() {
        let of_layer = parts
            .iter()
            .map(|(part, shape)| (layer_tensor_name(layer, part), shape.clone()));
        list.extend(of_layer);
    }
    list.into_iter()
        .map(|(name, shape)| ExpectedTensor { name, shape })
        .collect()
}

/// The four matrices of a layer, each a stack of one or several projections.
pub(crate) const STACKS: [&[&str]; 4] = [
    &["self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"],
    &["self_attn.o_proj"],
    &["mlp.gate_proj", "mlp.up_proj"],
    &["mlp.down_proj"],
];

/// Name of the projection whose weight this is; `None` for any other tensor.
pub(crate) fn module_of(name: &str) -> Option<&str> {
    let module = name.strip_suffix(".weight")?;
    module.ends_with("_proj").then_some(module)
}

fn layer_parts(config: &ModelConfig) -> Vec<(String, Vec<usize>)> {
    let (hidden, gate) = (config.hidden_size, config.intermediate_size);
    let (query, kv) = (config.heads.query_width(), config.heads.kv_width());
    let biases = config.biases;
    let projections = [
        ("self_attn.q_proj", query, hidden, biases.qkv),
        ("self_attn.k_proj", kv, hidden, biases.qkv),
        ("self_attn.v_proj", kv, hidden, biases.qkv),
        ("self_attn.o_proj", hidden, query, biases.output),
        ("mlp.gate_proj", gate, hidden, biases.mlp),
        ("mlp.up_proj", gate, hidden, biases.mlp),
        ("mlp.down_proj", hidden, gate, biases.mlp),
    ];
    let mut parts = vec![
        ("input_layernorm.weight".to_owned(), vec![hidden]),
        ("post_attention_layernorm.weight".to_owned(), vec![hidden]),
    ];
    for (name, rows, columns, has_bias) in projections {
        parts.push((format!("{name}.weight"), vec![rows, columns]));
        if has_bias {
            parts.push((format!("{name}.bias"), vec![rows]));
        }
    }
    if config.head_norms {
        for name in ["self_attn.q_norm.weight", "self_attn.k_norm.weight"] {
            parts.push((name.to_owned(), vec![config.heads.head_dim]));
        }
    }
    parts
}
