//! Operations and bytes of a model's work.
//!
//! Owns: the counts that prices are made of. Never: knows how fast a device is.
//! Invariant: a multiplication and its addition count as two operations.

use crate::spec::{AttentionSpec, ExpertsSpec, Mixer, ModelSpec};
use crate::tensors::ADAPTED_STACKS;
use cleave_domain::StepWork;

/// Bytes of a model's parts as a device stores them.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct StoredSizes {
    /// Bytes of all layers' weights, but for experts': fewer than two for each weight where they
    /// are quantised.
    pub layer_bytes: u64,
    /// Bytes of the weights of all experts of all layers, but for shared ones.
    pub expert_bytes: u64,
    /// Bytes of the head's weights.
    pub head_bytes: u64,
    /// Bytes of a key's or a value's element.
    pub kv_element_bytes: u64,
    /// Bytes of the quantisation scale of a key or a value in every head, or 0.
    pub kv_scale_bytes: u64,
}

/// Sizes of a model that determine what a step costs.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct ModelCost {
    /// Weights of the layers, applied to every token of a step; of its experts, those of the
    /// chosen.
    pub layer_weights: u64,
    /// Weights of the head, applied to every token that is drawn.
    pub head_weights: u64,
    /// Operations of one query token that attends to one token.
    pub pair_flops: u64,
    /// Bytes of the layers' weights, but for experts', read once a step.
    pub layer_bytes: u64,
    /// Weights of the layers' experts, of which a step reads those that its tokens choose.
    pub experts: ExpertsCost,
    /// Bytes of the head's weights, read once in each step that draws.
    pub head_bytes: u64,
    /// Bytes of a token's keys and values.
    pub token_bytes: u64,
}

/// Sizes of a model's experts that determine what a step costs.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct ExpertsCost {
    /// Bytes of all experts of all layers, but for shared ones.
    pub bytes: u64,
    /// Experts of a layer; 0 in a model without experts.
    pub count: u32,
    /// Experts that each token uses.
    pub chosen: u32,
}

impl ExpertsCost {
    /// Costs of a model without experts.
    pub const NONE: Self = Self {
        bytes: 0,
        count: 0,
        chosen: 0,
    };

    /// Bytes of the experts that at least one of `rows` tokens chooses, expected if every choice is
    /// as likely: `bytes · (1 − (1 − chosen / count)^rows)`.
    fn bytes_read(&self, rows: f64) -> f64 {
        self.bytes as f64 * experts_share(self.count, self.chosen, rows)
    }
}

/// Share of `count` experts that at least one of `rows` tokens chooses, expected if every choice is
/// as likely; 0 without experts.
pub(crate) fn experts_share(count: u32, chosen: u32, rows: f64) -> f64 {
    if count == 0 {
        return 0.0;
    }
    let is_left_out = 1.0 - f64::from(chosen) / f64::from(count);
    1.0 - is_left_out.powf(rows)
}

/// Sizes of a LoRA adapter that changes every projection that one may change.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct AdapterCost {
    /// Weights of its pairs of matrices, as it was trained.
    pub weights: u64,
    /// Weights that every row of it is multiplied with: the pairs of a stack are one pair, with
    /// zeros in its second matrix.
    pub stacked_weights: u64,
}

impl AdapterCost {
    /// Bytes that a step reads for it, however many rows it has: engines keep it in f32.
    pub fn bytes(&self) -> u64 {
        self.stacked_weights * size_of::<f32>() as u64
    }
}

impl ModelSpec {
    /// Costs of a LoRA adapter of this rank.
    pub fn adapter_cost(&self, rank: usize) -> AdapterCost {
        let mut cost = AdapterCost::default();
        for layer in &self.layers {
            for stack in ADAPTED_STACKS {
                let Some((rows, columns)) = layer.stack_shape(stack, self.hidden_size) else {
                    continue;
                };
                let ranks = rank * stack.len();
                cost.weights += (ranks * columns + rank * rows) as u64;
                cost.stacked_weights += (ranks * (columns + rows)) as u64;
            }
        }
        cost
    }

    /// Costs of this model, stored in these sizes.
    pub fn cost(&self, stored: &StoredSizes) -> ModelCost {
        let StoredSizes {
            layer_bytes,
            expert_bytes,
            head_bytes,
            kv_element_bytes,
            kv_scale_bytes,
        } = *stored;
        let mut cost = ModelCost {
            head_weights: self.hidden_size as u64 * self.vocab_size as u64,
            layer_bytes,
            experts: self.experts_cost(expert_bytes),
            head_bytes,
            ..ModelCost::default()
        };
        for layer in &self.layers {
            let counts = layer.projection_weights(self.hidden_size);
            let experts = layer.experts();
            let chosen = experts.map_or(0, |experts| experts.chosen as u64);
            let routed = experts.map_or(0, |experts| self.router_weights(experts));
            cost.layer_weights += counts.of_every_token + chosen * counts.of_expert + routed;
            let Mixer::Attention(AttentionSpec { heads, .. }) = &layer.mixer;
            // Two products, with the keys and with the values.
            cost.pair_flops += 4 * heads.query_width() as u64;
            let head_bytes = heads.head_dim as u64 * kv_element_bytes + kv_scale_bytes;
            cost.token_bytes += 2 * heads.kv_heads as u64 * head_bytes;
        }
        cost
    }

    /// Costs of the experts, of which the layers that have any have as many.
    fn experts_cost(&self, bytes: u64) -> ExpertsCost {
        let first = self.layers.iter().find_map(|layer| layer.experts());
        first.map_or(ExpertsCost::NONE, |experts| ExpertsCost {
            bytes,
            count: experts.count as u32,
            chosen: experts.chosen as u32,
        })
    }

    /// Weights of a router, and of the gate of the shared expert.
    fn router_weights(&self, experts: &ExpertsSpec) -> u64 {
        let has_gate = experts.shared.is_some_and(|shared| shared.has_gate);
        (experts.count + usize::from(has_gate)) as u64 * self.hidden_size as u64
    }

    /// Costs of this model with weights, keys and values of `element_bytes` bytes each.
    #[cfg(test)]
    fn cost_stored_in(&self, element_bytes: u64) -> ModelCost {
        let weights = self.cost(&StoredSizes::default());
        self.cost(&StoredSizes {
            layer_bytes: weights.layer_weights * element_bytes,
            expert_bytes: 0,
            head_bytes: weights.head_weights * element_bytes,
            kv_element_bytes: element_bytes,
            kv_scale_bytes: 0,
        })
    }
}

impl ModelCost {
    /// Operations of this work, of one step or of many together.
    pub fn flops(&self, work: &StepWork) -> f64 {
        let product = |weights: u64, rows: u32| 2.0 * weights as f64 * f64::from(rows);
        let attended = (work.pairs + work.context_tokens) as f64;
        product(self.layer_weights, work.rows)
            + product(self.head_weights, work.draws)
            + self.pair_flops as f64 * attended
    }

    /// Bytes of the layers' weights that a step of `rows` tokens reads.
    pub fn layer_bytes_read(&self, rows: f64) -> f64 {
        self.layer_bytes as f64 + self.experts.bytes_read(rows)
    }

    /// Bytes of memory that `steps` steps with this work together read: every weight once in each
    /// step, of experts those that the step's tokens choose, the head's in each step that draws,
    /// and the keys and values of the whole context. A layer with a sliding window reads fewer.
    pub fn bytes(&self, work: &StepWork, steps: u64) -> f64 {
        let drawing = steps.min(u64::from(work.draws));
        let rows = f64::from(work.rows) / steps.max(1) as f64;
        let weights =
            self.layer_bytes_read(rows) * steps as f64 + self.head_bytes as f64 * drawing as f64;
        weights + self.token_bytes as f64 * work.context_tokens as f64
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::{ConfigError, ConfigFields, read_model};
    use serde_json::json;
    use std::path::Path;

    /// A Llama of these sizes: layers, hidden, intermediate, query heads, KV heads, vocabulary.
    fn llama(sizes: [usize; 6], head_dim: usize) -> ModelSpec {
        let [layers, hidden, intermediate, query_heads, kv_heads, vocab] = sizes;
        let config = json!({
            "architectures": ["LlamaForCausalLM"],
            "num_hidden_layers": layers,
            "hidden_size": hidden,
            "intermediate_size": intermediate,
            "num_attention_heads": query_heads,
            "num_key_value_heads": kv_heads,
            "head_dim": head_dim,
            "vocab_size": vocab,
            "max_position_embeddings": 2048,
        });
        let fields = ConfigFields::new(
            Path::new("config.json"),
            config.as_object().cloned().unwrap_or_default(),
        );
        let read = read_model(&fields, |_| Ok::<_, ConfigError>(()));
        read.unwrap().0.spec
    }

    fn llama_8b() -> ModelSpec {
        llama([32, 4096, 14_336, 32, 8, 128_256], 128)
    }

    #[test]
    fn weight_counts_match_the_model_card() {
        let cost = llama_8b().cost_stored_in(2);
        let norms = 4096 * 65;
        let all = cost.layer_weights + 2 * cost.head_weights + norms;
        assert_eq!(all, 8_030_261_248, "as its model card counts them");
        assert_eq!(cost.token_bytes, 128 << 10);
    }

    /// PEFT counts 41,943,040 trainable parameters for rank 16 of all linear modules of Llama 3 8B.
    /// By hand, a layer's stacks have 48·(4096+6144), 16·(4096+4096), 32·(4096+28672) and
    /// 16·(14336+4096) weights.
    #[test]
    fn adapter_weights_match_what_peft_counts() {
        let cost = llama_8b().adapter_cost(16);
        assert_eq!(cost.weights, 41_943_040);
        let layer = 491_520 + 131_072 + 1_048_576 + 294_912;
        assert_eq!(cost.stacked_weights, 32 * layer);
        assert_eq!(cost.bytes(), 251_658_240);
    }

    /// Of experts and of their router nothing is changed.
    #[test]
    fn an_adapter_leaves_experts_as_they_are() {
        let attention = 2048 + 4096 + 2 * (2048 + 512) + 4096 + 2048;
        let cost = qwen3_30b_a3b().adapter_cost(8);
        assert_eq!(cost.weights, 48 * 8 * attention);
    }

    #[test]
    fn kv_layout_and_cost_agree_on_bytes() {
        let model = llama_8b();
        let token_bytes = model.cost_stored_in(2).token_bytes;
        let spec = model.kv_spec(16, 2, 0);
        assert_eq!(spec.check(), Ok(()));
        assert_eq!(spec.state, None);
        assert_eq!(spec.blocks.bytes, 16 * token_bytes);
        let layer_bytes = 16 * token_bytes / 32;
        for (layer, span) in (0..32).zip(&spec.blocks.layers) {
            let at = (u64::from(span.layer), span.offset, span.bytes);
            assert_eq!(at, (layer, layer * layer_bytes, layer_bytes));
        }
    }

    /// Four bits a weight, and one byte for each element of keys and values.
    #[test]
    fn quantised_weights_and_kv_cost_their_stored_bytes() {
        let dense = llama_8b().cost_stored_in(2);
        let stored = StoredSizes {
            layer_bytes: dense.layer_weights / 2,
            expert_bytes: 0,
            head_bytes: dense.head_bytes,
            kv_element_bytes: 1,
            kv_scale_bytes: 0,
        };
        let quantized = llama_8b().cost(&stored);
        let (work, steps) = (StepWork::decode(1000), 1);
        let saved = dense.bytes(&work, steps) - quantized.bytes(&work, steps);
        let (weights, context) = (dense.layer_weights * 3 / 2, 1000 * (64 << 10));
        assert_eq!(saved, (weights + context) as f64);
        let scaled = llama_8b().cost(&StoredSizes {
            kv_scale_bytes: 4,
            ..stored
        });
        assert_eq!(scaled.token_bytes, 32 * 2 * 8 * (128 + 4));
    }

    #[test]
    fn work_is_counted_in_operations_and_bytes() {
        let work = StepWork {
            rows: 3,
            pairs: 5,
            context_tokens: 7,
            draws: 2,
        };
        let cost = llama([2, 4, 8, 2, 1, 10], 2).cost_stored_in(2);
        assert_eq!((cost.layer_weights, cost.head_weights), (288, 40));
        assert_eq!((cost.layer_bytes, cost.head_bytes), (576, 80));
        assert_eq!((cost.token_bytes, cost.pair_flops), (16, 32));
        let dense = 2.0 * 288.0 * 3.0 + 2.0 * 40.0 * 2.0;
        assert_eq!(cost.flops(&work), dense + 32.0 * 12.0);
        // The head is read in each step that draws: in one of one, in two of four.
        assert_eq!(cost.bytes(&work, 1), 576.0 + 80.0 + 16.0 * 7.0);
        assert_eq!(cost.bytes(&work, 4), 4.0 * 576.0 + 2.0 * 80.0 + 112.0);
    }

    /// The config.json that Qwen published for Qwen3-30B-A3B, as far as it has sizes.
    fn qwen3_30b_a3b() -> ModelSpec {
        published(&json!({
            "architectures": ["Qwen3MoeForCausalLM"], "attention_bias": false,
            "decoder_sparse_step": 1, "head_dim": 128, "hidden_act": "silu", "hidden_size": 2048,
            "intermediate_size": 6144, "max_position_embeddings": 40960, "max_window_layers": 48,
            "mlp_only_layers": [], "model_type": "qwen3_moe", "moe_intermediate_size": 768,
            "norm_topk_prob": true, "num_attention_heads": 32, "num_experts": 128,
            "num_experts_per_tok": 8, "num_hidden_layers": 48, "num_key_value_heads": 4,
            "rms_norm_eps": 1e-6, "rope_theta": 1_000_000.0, "tie_word_embeddings": false,
            "vocab_size": 151_936
        }))
    }

    /// The config.json that OpenAI published for gpt-oss-20b, as far as it has sizes.
    fn gpt_oss_20b() -> ModelSpec {
        published(&json!({
            "architectures": ["GptOssForCausalLM"], "attention_bias": true, "head_dim": 64,
            "hidden_act": "silu", "hidden_size": 2880, "intermediate_size": 2880,
            "max_position_embeddings": 131_072, "model_type": "gpt_oss",
            "num_attention_heads": 64, "num_experts_per_tok": 4, "num_hidden_layers": 24,
            "num_key_value_heads": 8, "num_local_experts": 32, "rms_norm_eps": 1e-5,
            "rope_theta": 150_000, "sliding_window": 128, "swiglu_limit": 7.0,
            "tie_word_embeddings": false, "vocab_size": 201_088,
            "rope_scaling": {"beta_fast": 32.0, "beta_slow": 1.0, "factor": 32.0,
                "original_max_position_embeddings": 4096, "rope_type": "yarn", "truncate": false}
        }))
    }

    fn published(config: &serde_json::Value) -> ModelSpec {
        let fields = config.as_object().cloned().unwrap_or_default();
        let fields = ConfigFields::new(Path::new("config.json"), fields);
        let read = read_model(&fields, |_| Ok::<_, ConfigError>(()));
        read.unwrap().0.spec
    }

    /// By hand: attention 2·2048·4096 + 2·2048·512 weights a layer, an expert 3·2048·768, the
    /// router 128·2048. The model card counts 30.5 B in all and 3.3 B active.
    #[test]
    fn qwen3_30b_a3b_costs_follow_its_published_sizes() {
        let (attention, expert, router) = (18_874_368, 4_718_592, 262_144);
        let (layers, embedding) = (48, 311_164_928);
        let experts = layers * 128 * expert;
        let stored = StoredSizes {
            layer_bytes: 2 * layers * attention + 4 * layers * router,
            expert_bytes: 2 * experts,
            head_bytes: 2 * embedding,
            kv_element_bytes: 2,
            kv_scale_bytes: 0,
        };
        let cost = qwen3_30b_a3b().cost(&stored);
        assert_eq!(cost.layer_weights, 2_730_491_904);
        assert_eq!(
            cost.layer_weights,
            layers * (attention + router + 8 * expert)
        );
        assert_eq!(cost.head_weights, embedding);
        let active = cost.layer_weights + 2 * embedding;
        assert_eq!(active / 10_000_000, 335, "3.3 B, as its model card says");
        let norms = layers * (2 * 2048 + 2 * 128) + 2048;
        let all = layers * (attention + router) + experts + 2 * embedding + norms;
        assert_eq!(all, 30_532_122_624, "30.5 B, as its model card says");
        assert_eq!(cost.experts.bytes, 57_982_058_496);
        assert_eq!(cost.token_bytes, 96 << 10);
        assert_eq!(cost.pair_flops, 48 * 4 * 4096);
        // One token reads 8 of 128 experts, 64 read 1 − (15/16)^64 of them.
        let dense = stored.layer_bytes as f64;
        assert_eq!(cost.layer_bytes_read(1.0), dense + 57_982_058_496.0 / 16.0);
        let touched = (cost.layer_bytes_read(64.0) - dense) / 57_982_058_496.0;
        assert!((touched - 0.983_925).abs() < 1e-6, "{touched}");
    }

    /// By hand: attention 2·2880·4096 + 2·2880·512 weights a layer, an expert 3·2880², the router
    /// 32·2880. The model card counts 20.9 B in all and 3.6 B active. Experts in MXFP4 take 17
    /// bytes for 32 weights.
    #[test]
    fn gpt_oss_20b_costs_follow_its_published_sizes() {
        let (attention, expert, router) = (26_542_080, 24_883_200, 92_160);
        let (layers, embedding) = (24, 579_133_440);
        let experts = layers * 32 * expert;
        let stored = StoredSizes {
            layer_bytes: 2 * layers * attention + 4 * layers * router,
            expert_bytes: experts / 32 * 17,
            head_bytes: 2 * embedding,
            kv_element_bytes: 2,
            kv_scale_bytes: 0,
        };
        let cost = gpt_oss_20b().cost(&stored);
        assert_eq!(cost.layer_weights, 3_028_008_960);
        assert_eq!(
            cost.layer_weights,
            layers * (attention + router + 4 * expert)
        );
        let active = cost.layer_weights + embedding;
        assert_eq!(active / 10_000_000, 360, "3.6 B, as its model card says");
        assert_eq!(cost.experts.bytes, 10_152_345_600);
        assert_eq!(cost.token_bytes, 48 << 10);
        // One token reads 4 of 32 experts, 8 read 1 − (7/8)^8 of them.
        let dense = stored.layer_bytes as f64;
        assert_eq!(cost.layer_bytes_read(1.0), dense + 10_152_345_600.0 / 8.0);
        let touched = (cost.layer_bytes_read(8.0) - dense) / 10_152_345_600.0;
        assert!((touched - 0.656_391).abs() < 1e-6, "{touched}");
    }
}
