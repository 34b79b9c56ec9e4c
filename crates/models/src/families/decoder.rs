//! Decoders in Llama's layout: attention and a gated MLP in every layer, each with one norm.
//!
//! Owns: the keys that these families share, and the bounds on sizes.
//! Never: knows which family it reads for, but for the values that the family's file passes.

mod windows;

pub(super) use windows::{
    no_windows, optional_windows, periodic_windows, stated_windows, switched_windows, windows,
    windows_where,
};

use super::experts::DecoderExperts;
use crate::error::ConfigError;
use crate::fields::ConfigFields;
use crate::rope::{LayerRopes, Rope, RopeReader, RopeScaling};
use crate::spec::{
    Activation, AttentionBiases, AttentionSpec, GatedMlpSpec, HeadShape, LayerNorms, LayerSpec,
    Mixer, Mlp, ModelSpec, NormFormula, NormSpec, NormWeight, PartOrder, QkNormScope, QkNormSpec,
    RopeIndex, Scalars,
};

/// Bounds on what a file may claim, far above any model, so that products cannot overflow.
pub(super) const WIDTH_MAX: usize = 1 << 20;
pub(super) const LAYERS_MAX: usize = 1 << 12;
const VOCAB_MAX: usize = 1 << 24;
/// Llama 4 Scout has 10485760. The text side has the same limit.
const CONTEXT_MAX: usize = 1 << 24;
/// Limit of token ids in config.json. An id a little beyond the vocabulary is a common slip and is
/// ignored; one beyond every vocabulary means a damaged file.
const TOKEN_ID_MAX: u64 = VOCAB_MAX as u64 - 1;

/// A decoder of this layout: what differs between its families.
pub(super) struct Decoder {
    pub(super) family: &'static str,
    pub(super) heads: HeadShape,
    pub(super) biases: AttentionBiases,
    pub(super) mlp: DecoderMlp,
    pub(super) norms: DecoderNorms,
    pub(super) factors: DecoderFactors,
    /// Window of each layer, see [`AttentionSpec::window`].
    pub(super) windows: Vec<Option<usize>>,
    pub(super) ropes: DecoderRopes,
}

/// MLPs of a decoder; Llama's by default.
pub(super) struct DecoderMlp {
    /// Key of the width; a file may leave it out if every layer has experts.
    pub(super) width: &'static str,
    pub(super) bias: bool,
    /// Key of the activation.
    pub(super) activation: &'static str,
    /// Activation, if config.json has no such key.
    pub(super) activation_default: Activation,
    /// Experts, and the layers that have them in place of a dense MLP, if any has.
    pub(super) experts: Option<DecoderExperts>,
}

impl DecoderMlp {
    /// Experts in some layers, and Llama's MLP in the others.
    pub(super) fn with_experts(experts: DecoderExperts) -> Self {
        Self {
            experts: Some(experts),
            ..Self::default()
        }
    }

    /// Reads the MLP of each layer.
    fn layers(&self, fields: &ConfigFields, count: usize) -> Result<Vec<Mlp>, ConfigError> {
        let has_experts = |layer: usize| {
            let experts = self.experts.as_ref()?;
            experts.has_experts.get(layer)?.then_some(experts.spec)
        };
        let width = if (0..count).any(|layer| has_experts(layer).is_none()) {
            fields.size(self.width, WIDTH_MAX)?
        } else {
            fields.count(self.width, WIDTH_MAX)?.unwrap_or(0)
        };
        let dense = GatedMlpSpec {
            width,
            activation: activation(fields, self.activation)?.unwrap_or(self.activation_default),
            bias: self.bias,
        };
        let mlp = |layer| has_experts(layer).map_or(Mlp::Gated(dense), Mlp::Experts);
        Ok((0..count).map(mlp).collect())
    }

    /// Reads whether all three projections have a bias.
    pub(super) fn read(fields: &ConfigFields) -> Result<Self, ConfigError> {
        Ok(Self {
            bias: fields.flag("mlp_bias")?.unwrap_or(false),
            ..Self::default()
        })
    }
}

impl Default for DecoderMlp {
    fn default() -> Self {
        Self {
            width: "intermediate_size",
            bias: false,
            activation: "hidden_act",
            activation_default: Activation::Silu,
            experts: None,
        }
    }
}

/// Norms of a decoder; Llama's by default.
#[derive(Clone, Copy)]
pub(super) struct DecoderNorms {
    pub(super) placement: NormPlacement,
    /// Scope of the norm of queries and keys, if there is one.
    pub(super) qk: Option<QkNormScope>,
    pub(super) formula: NormFormula,
    /// Key of the epsilon.
    pub(super) epsilon_key: &'static str,
    /// Epsilon, if config.json has no such key.
    pub(super) epsilon: f64,
    /// How all weights are stored.
    pub(super) weight: NormWeight,
}

/// Sides of attention and MLP on which each has a norm.
#[derive(Clone, Copy)]
pub(super) enum NormPlacement {
    /// Norms of inputs, `x += part(norm(x))`, as in Llama.
    Input,
    /// Norms of outputs, `x += norm(part(x))`, as in OLMo 2.
    Output,
    /// Norms of inputs and of outputs, as in Gemma 2.
    Both,
    /// One norm of the input of both, `x += attention(norm(x)) + mlp(norm(x))`, as in Cohere.
    Shared,
}

impl Default for DecoderNorms {
    fn default() -> Self {
        Self {
            placement: NormPlacement::Input,
            qk: None,
            formula: NormFormula::RmsNorm,
            epsilon_key: "rms_norm_eps",
            epsilon: 1e-6,
            weight: NormWeight::AsStored,
        }
    }
}

impl NormPlacement {
    fn layer_norms(self, norm: NormSpec) -> LayerNorms {
        let (input, output) = match self {
            Self::Input | Self::Shared => (Some(norm), None),
            Self::Output => (None, Some(norm)),
            Self::Both => (Some(norm), Some(norm)),
        };
        LayerNorms {
            mixer_input: input,
            mixer_output: output,
            mlp_input: match self {
                Self::Shared => None,
                Self::Input | Self::Output | Self::Both => input,
            },
            mlp_output: output,
        }
    }

    const fn order(self) -> PartOrder {
        match self {
            Self::Shared => PartOrder::Parallel,
            Self::Input | Self::Output | Self::Both => PartOrder::Sequential,
        }
    }
}

/// Factors of a decoder, and the sinks of its scores; Llama's by default.
#[derive(Clone, Copy, Default)]
pub(super) struct DecoderFactors {
    /// Factor of the scores, if it is not the usual `1 / sqrt(head_dim)`.
    pub(super) scores: Option<f32>,
    /// Cap of the scores.
    pub(super) scores_cap: Option<f32>,
    /// Whether each query head has a sink.
    pub(super) has_sinks: bool,
    pub(super) scalars: Scalars,
}

/// Rotary embeddings of a decoder.
pub(super) struct DecoderRopes {
    list: Vec<Rope>,
    /// Embedding of each layer; the first for all if it is empty.
    of_layers: Vec<RopeIndex>,
}

impl DecoderRopes {
    /// One embedding of all layers.
    pub(super) fn one(rope: Rope) -> Self {
        Self {
            list: vec![rope],
            of_layers: Vec::new(),
        }
    }

    /// The second embedding in layers that are marked, the first in the others.
    pub(super) fn two(first: Rope, second: Rope, has_second: impl Iterator<Item = bool>) -> Self {
        let index = |is_second: bool| RopeIndex(usize::from(is_second));
        Self {
            list: vec![first, second],
            of_layers: has_second.map(index).collect(),
        }
    }

    /// An embedding for layers with a window, and one for those without.
    pub(super) fn by_window(ropes: LayerRopes, windows: &[Option<usize>]) -> Self {
        let LayerRopes { full, sliding } = ropes;
        if full == sliding {
            return Self::one(full);
        }
        Self::two(full, sliding, windows.iter().map(Option::is_some))
    }

    /// Reads one embedding of whole heads for all layers.
    pub(super) fn read(fields: &ConfigFields, heads: &HeadShape) -> Result<Self, ConfigError> {
        RopeReader::new(heads.head_dim).read(fields).map(Self::one)
    }

    fn of(&self, layer: usize) -> RopeIndex {
        self.of_layers.get(layer).copied().unwrap_or(RopeIndex(0))
    }
}

impl Decoder {
    /// Reads what the families share.
    pub(super) fn spec(self, fields: &ConfigFields) -> Result<ModelSpec, ConfigError> {
        let Self {
            family,
            heads,
            biases,
            mlp,
            norms,
            factors,
            windows,
            ropes,
        } = self;
        let vocab_size = fields.size("vocab_size", VOCAB_MAX)?;
        let norm = NormSpec {
            formula: norms.formula,
            epsilon: epsilon(fields, &norms)?,
            weight: norms.weight,
        };
        let mlps = mlp.layers(fields, windows.len())?;
        let usual_scale = 1.0 / (heads.head_dim as f32).sqrt();
        let layer = |(index, (window, mlp))| LayerSpec {
            order: norms.placement.order(),
            norms: norms.placement.layer_norms(norm),
            mixer: Mixer::Attention(AttentionSpec {
                heads,
                rope: ropes.of(index),
                qk_norm: norms.qk.map(|scope| QkNormSpec { norm, scope }),
                window,
                scale: factors.scores.unwrap_or(usual_scale),
                soft_cap: factors.scores_cap,
                biases,
                has_sinks: factors.has_sinks,
            }),
            mlp,
        };
        Ok(ModelSpec {
            family,
            vocab_size,
            hidden_size: fields.size("hidden_size", WIDTH_MAX)?,
            context_tokens_max: context(fields, &ropes.list)?,
            scalars: factors.scalars,
            layers: windows
                .into_iter()
                .zip(mlps)
                .enumerate()
                .map(layer)
                .collect(),
            ropes: ropes.list,
            final_norm: norm,
            tied: fields.flag("tie_word_embeddings")?,
            bos: fields
                .token_ids("bos_token_id", vocab_size, TOKEN_ID_MAX)?
                .and_then(|ids| ids.first().copied()),
            eos: fields
                .token_ids("eos_token_id", vocab_size, TOKEN_ID_MAX)?
                .unwrap_or_default(),
        })
    }
}

/// The longest context: `max_position_embeddings`, or what YaRN stretches the original one to,
/// where a finetune or a user added YaRN without changing the former.
fn context(fields: &ConfigFields, ropes: &[Rope]) -> Result<usize, ConfigError> {
    let stated = fields.size("max_position_embeddings", CONTEXT_MAX)?;
    let stretched = ropes.iter().filter_map(|rope| match &rope.scaling {
        RopeScaling::Yarn(yarn) => Some((yarn.original_context * yarn.factor) as usize),
        _ => None,
    });
    let longest = stretched.max().unwrap_or(0).min(CONTEXT_MAX);
    Ok(stated.max(longest))
}

/// Reads an activation, if there is such a key.
pub(super) fn activation(
    fields: &ConfigFields,
    name: &str,
) -> Result<Option<Activation>, ConfigError> {
    match fields.text(name)? {
        None => Ok(None),
        Some("silu" | "swish") => Ok(Some(Activation::Silu)),
        Some("gelu_pytorch_tanh" | "gelu_new") => Ok(Some(Activation::GeluTanh)),
        Some(other) => {
            let problem = format!("{other} is not supported; silu and gelu_pytorch_tanh are");
            Err(fields.unsupported(name, problem))
        }
    }
}

/// Refuses any other text than the one that the class has, if config.json states one.
pub(super) fn require_text(
    fields: &ConfigFields,
    name: &str,
    own: &str,
) -> Result<(), ConfigError> {
    match fields.text(name)? {
        Some(other) if other != own => {
            let problem = format!("{other} is not supported; {own} is");
            Err(fields.unsupported(name, problem))
        }
        _ => Ok(()),
    }
}

/// Reads a factor, 1 if config.json has none.
pub(super) fn factor(fields: &ConfigFields, name: &str) -> Result<f32, ConfigError> {
    factor_or(fields, name, 1.0)
}

/// Reads a factor, or takes the class's own default.
pub(super) fn factor_or(
    fields: &ConfigFields,
    name: &str,
    default: f32,
) -> Result<f32, ConfigError> {
    const RANGE: std::ops::RangeInclusive<f64> = 1e-6..=1e6;
    match fields.number(name)? {
        None => Ok(default),
        Some(factor) if RANGE.contains(&factor) => Ok(factor as f32),
        Some(factor) => {
            let (least, most) = (RANGE.start(), RANGE.end());
            let problem = format!("{factor} is not from {least} to {most}");
            Err(fields.damaged(name, problem))
        }
    }
}

/// Reads a cap of scores or logits: none if it is null, the class's own default if it is absent.
pub(super) fn cap(
    fields: &ConfigFields,
    name: &str,
    default: f32,
) -> Result<Option<f32>, ConfigError> {
    let is_off = fields.has(name) && fields.get(name).is_none();
    let cap = factor_or(fields, name, default)?;
    Ok((!is_off).then_some(cap))
}

/// Reads `attention_bias`, which in most families holds for all four projections.
pub(super) fn attention_biases(fields: &ConfigFields) -> Result<AttentionBiases, ConfigError> {
    attention_biases_or(fields, false)
}

/// Reads `attention_bias`, or takes the class's own default.
pub(super) fn attention_biases_or(
    fields: &ConfigFields,
    default: bool,
) -> Result<AttentionBiases, ConfigError> {
    let attention = fields.flag("attention_bias")?.unwrap_or(default);
    Ok(AttentionBiases {
        qkv: attention,
        output: attention,
    })
}

/// Reads the heads. `head_dim` is the family's default where config.json has no such key; without
/// one the heads share the width.
pub(super) fn heads(
    fields: &ConfigFields,
    head_dim: Option<usize>,
) -> Result<HeadShape, ConfigError> {
    let hidden = fields.size("hidden_size", WIDTH_MAX)?;
    let query_heads = fields.size("num_attention_heads", WIDTH_MAX)?;
    let kv_heads = match fields.count("num_key_value_heads", WIDTH_MAX)? {
        None => query_heads,
        Some(0) => {
            let problem = format!("is 0; should be a whole number from 1 to {query_heads}");
            return Err(fields.damaged("num_key_value_heads", problem));
        }
        Some(count) => count,
    };
    if !query_heads.is_multiple_of(kv_heads) {
        let problem = format!("{kv_heads} does not divide num_attention_heads, {query_heads}");
        return Err(fields.damaged("num_key_value_heads", problem));
    }
    let of_family = head_dim.filter(|_| !fields.has("head_dim"));
    let head_dim = match fields.count("head_dim", WIDTH_MAX)?.or(of_family) {
        Some(dim) => dim,
        None if hidden.is_multiple_of(query_heads) => hidden / query_heads,
        None => {
            let problem = format!("{query_heads} does not divide hidden_size, {hidden}");
            return Err(fields.damaged("num_attention_heads", problem));
        }
    };
    if head_dim == 0 || !head_dim.is_multiple_of(2) || head_dim > 1024 {
        let problem = format!("{head_dim} is not an even number from 2 to 1024");
        return Err(fields.damaged("head_dim", problem));
    }
    if query_heads * head_dim > WIDTH_MAX {
        let problem = format!("{query_heads} heads of {head_dim} are wider than {WIDTH_MAX}");
        return Err(fields.damaged("num_attention_heads", problem));
    }
    Ok(HeadShape {
        query_heads,
        kv_heads,
        head_dim,
    })
}

fn epsilon(fields: &ConfigFields, norms: &DecoderNorms) -> Result<f32, ConfigError> {
    let epsilon = fields.number(norms.epsilon_key)?.unwrap_or(norms.epsilon);
    if (0.0..1.0).contains(&epsilon) {
        Ok(epsilon as f32)
    } else {
        Err(fields.damaged(norms.epsilon_key, format!("{epsilon} is not from 0 to 1")))
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::registry::read_model;
    use proptest::prelude::*;
    use serde_json::{Map, Value, json};
    use std::fs;
    use std::path::Path;

    const FOLDERS: [&str; 33] = [
        "cohere",
        "cohere2",
        "exaone4",
        "gemma2",
        "gemma3",
        "gemma3-images",
        "glm4",
        "glm4-moe",
        "gpt-oss",
        "granite",
        "granite4",
        "granite4-moe",
        "granitemoe",
        "granitemoeshared",
        "llama2",
        "llama3",
        "llama3-new",
        "minimax-m2",
        "ministral3",
        "mistral",
        "mistral-small3",
        "mixtral",
        "olmo2",
        "olmo3",
        "olmoe",
        "phi3",
        "phi4-mini",
        "phi4-mini-short",
        "qwen2-moe",
        "qwen3",
        "qwen3-moe",
        "seed-oss",
        "smollm3",
    ];

    fn config(folder: &str) -> Map<String, Value> {
        let root = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../testdata");
        let text = fs::read(root.join(folder).join("config.json")).unwrap();
        serde_json::from_slice(&text).unwrap()
    }

    fn read(config: Map<String, Value>) -> Result<ModelSpec, ConfigError> {
        let fields = ConfigFields::new(Path::new("config.json"), config);
        read_model(&fields, |_| Ok::<_, ConfigError>(())).map(|(model, ())| model.spec)
    }

    /// Extreme values of every JSON type, which no real config has.
    fn absurd() -> impl Strategy<Value = Value> {
        let numbers = prop::sample::select(vec![
            json!(0),
            json!(-1),
            json!(1),
            json!(1e9 as u64),
            json!(1_000_000_000_000_000_000_u64),
            json!(u64::MAX),
            json!(i64::MIN),
            json!(1e308),
            json!(-1e308),
            json!(5e-324),
            json!(0.5),
            json!(1e18),
        ]);
        let others = prop::sample::select(vec![
            Value::Null,
            json!(true),
            json!("silu"),
            json!(""),
            json!([]),
            json!([1e9, -1]),
            json!({}),
            json!({"rope_type": "linear", "factor": 1e308}),
            json!({"rope_type": "llama3", "factor": 0, "low_freq_factor": 1e-308,
                "high_freq_factor": 1e308, "original_max_position_embeddings": 5e-324}),
        ]);
        prop_oneof![2 => numbers, 1 => others]
    }

    proptest! {
        #[test]
        fn a_config_is_refused_or_consistent(
            folder in prop::sample::select(&FOLDERS[..]),
            changes in prop::collection::vec((any::<prop::sample::Index>(), absurd()), 1..4),
        ) {
            let mut changed = config(folder);
            let names: Vec<String> = changed.keys().cloned().collect();
            for (index, value) in changes {
                changed.insert(index.get(&names).clone(), value);
            }
            let Ok(config) = read(changed) else {
                return Ok(());
            };
            let heads = config.uniform_heads().expect("a decoder has at least one layer");
            let HeadShape { query_heads, kv_heads, head_dim } = heads;
            for (size, max) in [
                (config.vocab_size, VOCAB_MAX),
                (config.hidden_size, WIDTH_MAX),
                (config.context_tokens_max, CONTEXT_MAX),
                (config.layers.len(), LAYERS_MAX),
                (query_heads * head_dim, WIDTH_MAX),
                (kv_heads * head_dim, WIDTH_MAX),
            ] {
                prop_assert!((1..=max).contains(&size), "{config:?}");
            }
            for layer in &config.layers {
                let widths = match &layer.mlp {
                    Mlp::Gated(mlp) => mlp.width..=mlp.width,
                    Mlp::Experts(experts) => {
                        prop_assert!((1..=experts.count).contains(&experts.chosen));
                        let groups = experts.router.groups;
                        let has_enough = groups.is_none_or(|groups| {
                            let size = experts.count / groups.count;
                            groups.chosen * size >= experts.chosen && size >= 2
                        });
                        prop_assert!(has_enough);
                        experts.expert.width..=experts.count * experts.expert.width
                    }
                };
                prop_assert!(*widths.start() >= 1 && *widths.end() <= 4 * WIDTH_MAX);
            }
            let ids = config.bos.iter().chain(&config.eos);
            prop_assert!(ids.into_iter().all(|id| (*id as usize) < config.vocab_size));
            let frequencies = config.ropes[0].frequencies(config.context_tokens_max);
            let sound = |f: &f32| f.is_finite() && *f >= 0.0;
            prop_assert!(frequencies.iter().all(sound), "{config:?}");
        }
    }

    #[test]
    fn token_ids_beyond_the_vocabulary_are_ignored() {
        let mut changed = config("llama2");
        let vocab_size = changed["vocab_size"].as_u64().unwrap();
        changed.insert(
            "eos_token_id".into(),
            json!([2, -1, vocab_size, vocab_size + 7]),
        );
        changed.insert("bos_token_id".into(), json!(-1));
        changed.insert("max_position_embeddings".into(), json!(10_485_760));
        let config = read(changed).unwrap();
        assert_eq!((config.eos, config.bos), (vec![2], None));
        assert_eq!(config.context_tokens_max, 10_485_760);
    }

    #[test]
    fn a_refused_field_is_named_with_its_value_and_range() {
        for (field, value, range) in [
            ("max_position_embeddings", json!(1e18 as u64), "16777216"),
            ("max_position_embeddings", json!(0), "from 1 to"),
            ("bos_token_id", json!(1_000_000_000), "from 0 to"),
            ("eos_token_id", json!([1, 1_000_000_000]), "from 0 to"),
            ("hidden_size", json!(-8), "from 0 to"),
            ("num_attention_heads", json!(1_u64 << 40), "from 0 to"),
            ("num_key_value_heads", json!(0), "from 1 to"),
            ("rms_norm_eps", json!(1e308), "from 0 to 1"),
            ("rope_theta", json!(1e308), "from 1 to"),
            ("rope_theta", json!(-1.0), "from 1 to"),
        ] {
            let mut changed = config("llama2");
            changed.insert(field.into(), value.clone());
            let error = read(changed).unwrap_err().to_string();
            assert!(
                error.contains("config.json") && error.contains(field),
                "{error}"
            );
            assert!(error.contains(range), "{field} {value}: {error}");
        }
    }

    #[test]
    fn an_unread_key_refuses_the_model_by_name() {
        for (key, value) in [
            ("attn_logit_softcapping", json!(50.0)),
            ("rope_interleaved", json!(true)),
            ("attention_bias_of_tomorrow", json!(true)),
            ("num_experts", json!(8)),
            ("is_causal", json!(false)),
            ("is_encoder_decoder", json!(true)),
        ] {
            let mut changed = config("llama2");
            changed.insert(key.into(), value);
            let error = read(changed).unwrap_err().to_string();
            assert!(
                error.contains(key) && error.contains("Remove it"),
                "{error}"
            );
        }
    }

    #[test]
    fn an_unread_nested_key_refuses_the_model() {
        let mut changed = config("llama3");
        changed["rope_scaling"]["mscale_all_dim"] = json!(0.7);
        let error = read(changed).unwrap_err().to_string();
        assert!(error.contains("`rope_scaling.mscale_all_dim`"), "{error}");
    }

    #[test]
    fn harmless_and_null_keys_are_accepted() {
        for (key, value) in [
            ("_name_or_path", json!("meta-llama/Llama-2-7b-hf")),
            ("attn_logit_softcapping", Value::Null),
            ("is_encoder_decoder", json!(false)),
            ("is_causal", json!(true)),
            ("is_llama_config", json!(true)),
            ("pretraining_tp", json!(2)),
            ("rope_interleaved", json!(false)),
            ("torch_dtype", json!("float16")),
            ("unsloth_version", json!("2025.3")),
            ("sliding_window", json!(4096)),
        ] {
            let mut changed = config("llama2");
            changed.insert(key.into(), value);
            read(changed).unwrap_or_else(|error| panic!("{key}: {error}"));
        }
    }

    #[test]
    fn two_spellings_of_a_rope_must_agree() {
        let mut changed = config("llama3-new");
        let same = changed["rope_parameters"].clone();
        changed.insert("rope_scaling".into(), same);
        let both = read(changed.clone()).unwrap();
        assert_eq!(both.ropes, read(config("llama3-new")).unwrap().ropes);
        changed["rope_scaling"]["factor"] = json!(2.0);
        let error = read(changed).unwrap_err().to_string();
        assert!(error.contains("differs from rope_parameters"), "{error}");
    }

    #[test]
    fn a_layer_type_of_another_class_refuses_any_decoder() {
        for folder in ["llama2", "mistral", "qwen3"] {
            let mut changed = config(folder);
            let layers = changed["num_hidden_layers"].as_u64().unwrap() as usize;
            changed.insert(
                "layer_types".into(),
                json!(vec!["chunked_attention"; layers]),
            );
            let error = read(changed).unwrap_err().to_string();
            assert!(error.contains("chunked_attention"), "{folder}: {error}");
        }
    }
}
