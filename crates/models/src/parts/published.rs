//! Sizes of published models, as their makers' config.json has them.
//!
//! Owns: the table. Never: reads a file. Invariant: the weights add up to the published number.

use super::{AttentionParts, ExpertParts, ModelParts};

/// Sizes of one model.
#[derive(Clone, Copy)]
struct PublishedSizes {
    name: &'static str,
    layers: u32,
    hidden: u64,
    query_heads: u64,
    kv_heads: u64,
    head_dim: u64,
    mlp: MlpSizes,
    vocab: u64,
    is_tied: bool,
    context: u32,
    /// Tokens of the window of every second layer.
    window: Option<u64>,
}

#[derive(Clone, Copy)]
enum MlpSizes {
    /// Width of an MLP of two matrices, up and down.
    Plain(u64),
    /// Width of an MLP of three matrices, gate, up and down.
    Gated(u64),
    /// Experts of three matrices.
    Experts { count: u32, chosen: u32, width: u64 },
}

impl PublishedSizes {
    /// A model whose heads have 128 elements and whose embedding is not its head.
    const fn new(name: &'static str, layers: u32, hidden: u64, heads: (u64, u64)) -> Self {
        Self {
            name,
            layers,
            hidden,
            query_heads: heads.0,
            kv_heads: heads.1,
            head_dim: 128,
            mlp: MlpSizes::Plain(4 * hidden),
            vocab: 0,
            is_tied: false,
            context: 0,
            window: None,
        }
    }

    const fn gated(self, width: u64) -> Self {
        Self {
            mlp: MlpSizes::Gated(width),
            ..self
        }
    }

    const fn experts(self, count: u32, chosen: u32, width: u64) -> Self {
        Self {
            mlp: MlpSizes::Experts {
                count,
                chosen,
                width,
            },
            ..self
        }
    }

    const fn words(self, vocab: u64, context: u32) -> Self {
        Self {
            vocab,
            context,
            ..self
        }
    }

    const fn head_dim(self, head_dim: u64) -> Self {
        Self { head_dim, ..self }
    }

    const fn tied(self) -> Self {
        Self {
            is_tied: true,
            ..self
        }
    }

    const fn window(self, tokens: u64) -> Self {
        Self {
            window: Some(tokens),
            ..self
        }
    }
}

/// The sizes of each model's config.json on its maker's page of the Hugging Face hub
/// (facebook/opt-13b, meta-llama/Llama-3.1-8B, Qwen/Qwen3-30B-A3B, openai/gpt-oss-20b …).
const PUBLISHED: [PublishedSizes; 24] = [
    PublishedSizes::new("opt-13b", 40, 5120, (40, 40))
        .words(50_272, 2048)
        .tied(),
    PublishedSizes::new("opt-66b", 64, 9216, (72, 72))
        .words(50_272, 2048)
        .tied(),
    PublishedSizes::new("opt-175b", 96, 12_288, (96, 96))
        .words(50_272, 2048)
        .tied(),
    PublishedSizes::new("llama-2-7b", 32, 4096, (32, 32))
        .gated(11_008)
        .words(32_000, 4096),
    PublishedSizes::new("llama-2-13b", 40, 5120, (40, 40))
        .gated(13_824)
        .words(32_000, 4096),
    PublishedSizes::new("llama-2-70b", 80, 8192, (64, 8))
        .gated(28_672)
        .words(32_000, 4096),
    PublishedSizes::new("llama-3.2-1b", 16, 2048, (32, 8))
        .gated(8192)
        .words(128_256, 131_072)
        .head_dim(64)
        .tied(),
    PublishedSizes::new("llama-3.2-3b", 28, 3072, (24, 8))
        .gated(8192)
        .words(128_256, 131_072)
        .tied(),
    PublishedSizes::new("llama-3.1-8b", 32, 4096, (32, 8))
        .gated(14_336)
        .words(128_256, 131_072),
    PublishedSizes::new("llama-3.1-70b", 80, 8192, (64, 8))
        .gated(28_672)
        .words(128_256, 131_072),
    PublishedSizes::new("llama-3.1-405b", 126, 16_384, (128, 8))
        .gated(53_248)
        .words(128_256, 131_072),
    PublishedSizes::new("qwen3-0.6b", 28, 1024, (16, 8))
        .gated(3072)
        .words(151_936, 40_960)
        .tied(),
    PublishedSizes::new("qwen3-1.7b", 28, 2048, (16, 8))
        .gated(6144)
        .words(151_936, 40_960)
        .tied(),
    PublishedSizes::new("qwen3-4b", 36, 2560, (32, 8))
        .gated(9728)
        .words(151_936, 40_960)
        .tied(),
    PublishedSizes::new("qwen3-8b", 36, 4096, (32, 8))
        .gated(12_288)
        .words(151_936, 40_960),
    PublishedSizes::new("qwen3-14b", 40, 5120, (40, 8))
        .gated(17_408)
        .words(151_936, 40_960),
    PublishedSizes::new("qwen3-32b", 64, 5120, (64, 8))
        .gated(25_600)
        .words(151_936, 40_960),
    PublishedSizes::new("qwen3-30b-a3b", 48, 2048, (32, 4))
        .experts(128, 8, 768)
        .words(151_936, 40_960),
    PublishedSizes::new("qwen3-235b-a22b", 94, 4096, (64, 4))
        .experts(128, 8, 1536)
        .words(151_936, 40_960),
    PublishedSizes::new("mistral-7b", 32, 4096, (32, 8))
        .gated(14_336)
        .words(32_768, 32_768),
    PublishedSizes::new("mixtral-8x7b", 32, 4096, (32, 8))
        .experts(8, 2, 14_336)
        .words(32_000, 32_768),
    PublishedSizes::new("olmoe-1b-7b", 16, 2048, (16, 16))
        .experts(64, 8, 1024)
        .words(50_304, 4096),
    PublishedSizes::new("gpt-oss-20b", 24, 2880, (64, 8))
        .experts(32, 4, 2880)
        .words(201_088, 131_072)
        .head_dim(64)
        .window(128),
    PublishedSizes::new("gpt-oss-120b", 36, 2880, (64, 8))
        .experts(128, 4, 2880)
        .words(201_088, 131_072)
        .head_dim(64)
        .window(128),
];

/// Names of the models in the table.
pub fn published_names() -> impl Iterator<Item = &'static str> {
    PUBLISHED.iter().map(|sizes| sizes.name)
}

impl ModelParts {
    /// The sums of a published model.
    ///
    /// # Errors
    /// Lists the names of the table.
    pub fn published(name: &str) -> Result<Self, String> {
        let found = PUBLISHED.iter().find(|sizes| sizes.name == name);
        let names: Vec<&str> = published_names().collect();
        let unknown = || format!("no model `{name}`; there are {}", names.join(", "));
        found.map(PublishedSizes::parts).ok_or_else(unknown)
    }
}

impl PublishedSizes {
    fn parts(&self) -> ModelParts {
        let layers = u64::from(self.layers);
        let (query, kv) = (
            self.query_heads * self.head_dim,
            self.kv_heads * self.head_dim,
        );
        let attention = 2 * self.hidden * (query + kv);
        let (mlp, mlp_elements, experts) = match self.mlp {
            MlpSizes::Plain(width) => (2 * self.hidden * width, width, ExpertParts::default()),
            MlpSizes::Gated(width) => (3 * self.hidden * width, width, ExpertParts::default()),
            MlpSizes::Experts {
                count,
                chosen,
                width,
            } => {
                let experts = ExpertParts {
                    weights_each: layers * 3 * self.hidden * width,
                    count,
                    chosen,
                };
                let router = u64::from(count) * self.hidden;
                (router, u64::from(chosen) * width, experts)
            }
        };
        let (mut whole, mut windowed) = (AttentionParts::default(), AttentionParts::default());
        let in_windows = if self.window.is_some() { layers / 2 } else { 0 };
        whole.add(query, kv, layers - in_windows);
        windowed.add(query, kv, in_windows * self.window.unwrap_or(0));
        let head_weights = self.hidden * self.vocab;
        ModelParts {
            name: self.name.to_owned(),
            layers_count: self.layers,
            hidden: self.hidden,
            vocab_size: self.vocab as u32,
            context_tokens_max: self.context,
            kv_heads: self.kv_heads as u32,
            dense_weights: layers * (attention + mlp),
            experts,
            head_weights,
            embedding_weights: if self.is_tied { 0 } else { head_weights },
            mlp_elements: layers * mlp_elements,
            whole,
            windowed,
            windowed_kv_elements: 2 * kv * in_windows,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Billions of parameters, as the model cards count them.
    #[test]
    fn weights_add_up_to_the_published_number() {
        let published = [
            ("opt-13b", 12.85),
            ("opt-66b", 65.7),
            ("opt-175b", 174.6),
            ("llama-2-7b", 6.74),
            ("llama-2-13b", 13.02),
            ("llama-2-70b", 68.98),
            ("llama-3.2-1b", 1.236),
            ("llama-3.2-3b", 3.21),
            ("llama-3.1-8b", 8.03),
            ("llama-3.1-70b", 70.55),
            ("llama-3.1-405b", 405.9),
            ("qwen3-0.6b", 0.596),
            ("qwen3-1.7b", 1.72),
            ("qwen3-4b", 4.02),
            ("qwen3-8b", 8.19),
            ("qwen3-14b", 14.77),
            ("qwen3-32b", 32.76),
            ("qwen3-30b-a3b", 30.53),
            ("qwen3-235b-a22b", 235.1),
            ("mistral-7b", 7.25),
            ("mixtral-8x7b", 46.7),
            ("olmoe-1b-7b", 6.92),
            ("gpt-oss-20b", 20.9),
            ("gpt-oss-120b", 116.8),
        ];
        assert!(
            published
                .iter()
                .map(|(name, _)| *name)
                .eq(published_names())
        );
        for (name, billions) in published {
            let found = ModelParts::published(name).unwrap().weights() as f64 / 1e9;
            assert!((found / billions - 1.0).abs() < 0.005, "{name}: {found} B");
        }
    }

    /// Bytes of a token's keys and values in 16 bits, as DistServe, vLLM and Qwen's cards give
    /// them.
    #[test]
    fn keys_and_values_take_the_published_bytes() {
        for (name, bytes) in [
            ("opt-13b", 819_200),
            ("opt-66b", 2_359_296),
            ("opt-175b", 4_718_592),
            ("llama-2-70b", 327_680),
            ("llama-3.1-70b", 327_680),
            ("llama-3.1-8b", 131_072),
            ("qwen3-8b", 147_456),
            ("qwen3-32b", 262_144),
        ] {
            let parts = ModelParts::published(name).unwrap();
            assert_eq!(2 * parts.kv_elements(), bytes, "{name}");
        }
    }

    #[test]
    fn an_unknown_name_lists_the_known_ones() {
        let error = ModelParts::published("abacus").unwrap_err();
        assert!(
            error.contains("abacus") && error.contains("opt-66b"),
            "{error}"
        );
    }
}
