//! A model as sums over its layers: as much of it as prices and memory depend on.
//!
//! Owns: the sums, of a spec or of published sizes. Never: knows a device or a format of numbers.
//! Invariant: all sums are those of the whole model; how devices divide them is a planner's.

mod published;

pub use published::published_names;

use crate::cost::{StoredSizes, experts_share};
use crate::spec::{Mlp, ModelSpec};

/// Sums over the layers of a model.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ModelParts {
    /// Name in tables, such as `llama-3.1-8b`.
    pub name: String,
    /// Layers, of whatever mixer.
    pub layers_count: u32,
    /// Elements of a row between layers.
    pub hidden: u64,
    /// Tokens of the vocabulary.
    pub vocab_size: u32,
    /// Tokens of the longest sequence.
    pub context_tokens_max: u32,
    /// Most KV heads of a layer, which bounds how many devices can divide keys and values.
    pub kv_heads: u32,
    /// Weights that every row is multiplied with: attention, dense and shared MLPs, routers.
    pub dense_weights: u64,
    /// Experts; a model without any has a count of 0.
    pub experts: ExpertParts,
    /// Weights of the head, which rows that draw are multiplied with.
    pub head_weights: u64,
    /// Weights of the embedding, or 0 where the head has them.
    pub embedding_weights: u64,
    /// Elements that a row has between the matrices of the MLPs, of all layers together.
    pub mlp_elements: u64,
    /// Attention over the whole context.
    pub whole: AttentionParts,
    /// Attention of layers with a window, each sum times the window's tokens.
    pub windowed: AttentionParts,
    /// Elements of a token's keys and values in layers with a window.
    pub windowed_kv_elements: u64,
}

/// Experts of all layers.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct ExpertParts {
    /// Weights of one expert in each layer, of all layers together.
    pub weights_each: u64,
    /// Experts of a layer.
    pub count: u32,
    /// Experts of a layer that a row is multiplied with.
    pub chosen: u32,
}

impl ExpertParts {
    /// Weights of all experts.
    pub fn weights(&self) -> u64 {
        self.weights_each * u64::from(self.count)
    }

    /// Share of the experts that `rows` rows choose, expected if every choice is as likely.
    pub fn share_read(&self, rows: f64) -> f64 {
        experts_share(self.count, self.chosen, rows)
    }
}

/// Attention of several layers together.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct AttentionParts {
    /// Operations of one row that attends to one token.
    pub pair_flops: u64,
    /// Elements of one token's keys and values.
    pub kv_elements: u64,
}

impl AttentionParts {
    fn add(&mut self, query_width: u64, kv_width: u64, times: u64) {
        // Two products, with the keys and with the values.
        self.pair_flops += 4 * query_width * times;
        self.kv_elements += 2 * kv_width * times;
    }
}

impl ModelParts {
    /// Weights in memory, but for norms and biases.
    pub fn weights(&self) -> u64 {
        self.dense_weights + self.experts.weights() + self.head_weights + self.embedding_weights
    }

    /// Elements of a token's keys and values in all layers.
    pub fn kv_elements(&self) -> u64 {
        self.whole.kv_elements + self.windowed_kv_elements
    }
}

impl ModelSpec {
    /// The sums of this model.
    pub fn parts(&self, name: &str) -> ModelParts {
        let cost = self.cost(&StoredSizes::default());
        let hidden = self.hidden_size as u64;
        let mut parts = ModelParts {
            name: name.to_owned(),
            layers_count: self.layers.len() as u32,
            hidden,
            vocab_size: self.vocab_size as u32,
            context_tokens_max: u32::try_from(self.context_tokens_max).unwrap_or(u32::MAX),
            kv_heads: 0,
            dense_weights: cost.layer_weights,
            experts: ExpertParts::default(),
            head_weights: cost.head_weights,
            embedding_weights: if self.tied == Some(true) {
                0
            } else {
                cost.head_weights
            },
            mlp_elements: 0,
            whole: AttentionParts::default(),
            windowed: AttentionParts::default(),
            windowed_kv_elements: 0,
        };
        for attention in self.attention() {
            let (query, kv) = (attention.heads.query_width(), attention.heads.kv_width());
            let (query, kv) = (query as u64, kv as u64);
            parts.kv_heads = parts.kv_heads.max(attention.heads.kv_heads as u32);
            match attention
                .window
                .filter(|tokens| *tokens < self.context_tokens_max)
            {
                None => parts.whole.add(query, kv, 1),
                Some(tokens) => {
                    parts.windowed.add(query, kv, tokens as u64);
                    parts.windowed_kv_elements += 2 * kv;
                }
            }
        }
        for layer in &self.layers {
            match &layer.mlp {
                Mlp::Gated(mlp) => parts.mlp_elements += mlp.width as u64,
                Mlp::Experts(experts) => {
                    let (width, chosen) = (experts.expert.width as u64, experts.chosen as u64);
                    let shared = experts.shared.map_or(0, |shared| shared.mlp.width as u64);
                    parts.mlp_elements += width * chosen + shared;
                    parts.experts.weights_each += 3 * hidden * width;
                    parts.experts.count = experts.count as u32;
                    parts.experts.chosen = experts.chosen as u32;
                }
            }
        }
        // The cost counts the chosen experts among the layers' weights.
        let chosen = u64::from(parts.experts.chosen) * parts.experts.weights_each;
        parts.dense_weights -= chosen;
        parts
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::{ConfigError, ConfigFields, read_model};
    use serde_json::{Value, json};
    use std::path::Path;

    fn spec(config: &Value) -> ModelSpec {
        let fields = config.as_object().cloned().unwrap_or_default();
        let fields = ConfigFields::new(Path::new("config.json"), fields);
        let read = read_model(&fields, |_| Ok::<_, ConfigError>(()));
        read.unwrap().0.spec
    }

    /// The config.json that was published for each of these has the sizes of the table.
    #[test]
    fn a_published_config_has_the_sums_of_the_table() {
        let llama = json!({
            "architectures": ["LlamaForCausalLM"], "num_hidden_layers": 32, "hidden_size": 4096,
            "intermediate_size": 14336, "num_attention_heads": 32, "num_key_value_heads": 8,
            "head_dim": 128, "vocab_size": 128_256, "max_position_embeddings": 131_072,
            "tie_word_embeddings": false
        });
        let mixture = json!({
            "architectures": ["Qwen3MoeForCausalLM"], "attention_bias": false,
            "decoder_sparse_step": 1, "head_dim": 128, "hidden_act": "silu", "hidden_size": 2048,
            "intermediate_size": 6144, "max_position_embeddings": 40960, "max_window_layers": 48,
            "mlp_only_layers": [], "model_type": "qwen3_moe", "moe_intermediate_size": 768,
            "norm_topk_prob": true, "num_attention_heads": 32, "num_experts": 128,
            "num_experts_per_tok": 8, "num_hidden_layers": 48, "num_key_value_heads": 4,
            "rms_norm_eps": 1e-6, "rope_theta": 1_000_000.0, "tie_word_embeddings": false,
            "vocab_size": 151_936
        });
        let windows = json!({
            "architectures": ["GptOssForCausalLM"], "attention_bias": true, "head_dim": 64,
            "hidden_act": "silu", "hidden_size": 2880, "intermediate_size": 2880,
            "max_position_embeddings": 131_072, "model_type": "gpt_oss",
            "num_attention_heads": 64, "num_experts_per_tok": 4, "num_hidden_layers": 24,
            "num_key_value_heads": 8, "num_local_experts": 32, "rms_norm_eps": 1e-5,
            "rope_theta": 150_000, "sliding_window": 128, "swiglu_limit": 7.0,
            "tie_word_embeddings": false, "vocab_size": 201_088,
            "rope_scaling": {"beta_fast": 32.0, "beta_slow": 1.0, "factor": 32.0,
                "original_max_position_embeddings": 4096, "rope_type": "yarn", "truncate": false}
        });
        for (name, config) in [
            ("llama-3.1-8b", llama),
            ("qwen3-30b-a3b", mixture),
            ("gpt-oss-20b", windows),
        ] {
            let read = spec(&config).parts(name);
            assert_eq!(Ok(read), ModelParts::published(name), "{name}");
        }
    }

    #[test]
    fn experts_are_read_as_rows_choose_them() {
        let experts = ModelParts::published("qwen3-30b-a3b").unwrap().experts;
        assert_eq!(experts.share_read(1.0), 1.0 / 16.0);
        let touched = experts.share_read(64.0);
        assert!((touched - 0.983_925).abs() < 1e-6, "{touched}");
        assert_eq!(ExpertParts::default().share_read(9.0), 0.0);
    }
}
