//! The model as a checkpoint's config.json describes it.
//!
//! Owns: every architecture's defaults and both spellings of each field.
//! Never: reads a tensor.
//! Invariant: a [`ModelConfig`] is consistent: sizes are positive and bounded, heads divide, every
//! layer has its window; a model that this engine cannot run has been refused.

use super::CheckpointError;
use super::fields::ConfigFields;
use super::quantization::Quantization;
use super::rope::Rope;
use crate::ops::HeadShape;
use cleave_domain::TokenId;
use std::path::Path;

/// Bounds on what a file may claim, far above any model, so that products cannot overflow.
const WIDTH_MAX: usize = 1 << 20;
const LAYERS_MAX: usize = 1 << 12;
const VOCAB_MAX: usize = 1 << 24;
/// Llama 4 Scout has 10485760. The text side has the same limit.
const CONTEXT_MAX: usize = 1 << 24;
/// Limit of token ids in config.json. An id a little beyond the vocabulary is a common slip and is
/// ignored; one beyond every vocabulary means a damaged file.
const TOKEN_ID_MAX: u64 = VOCAB_MAX as u64 - 1;

/// A family of models that the forward pass knows.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Architecture {
    /// Llama 2, 3, 3.1, 3.2, 3.3 and models with their architecture.
    Llama,
    /// Mistral 7B and its finetunes.
    Mistral,
    /// Qwen2 and Qwen2.5 models.
    Qwen2,
    /// Qwen3 models without experts (dense).
    Qwen3,
}

/// Each architecture with its class and its model type in config.json.
const ARCHITECTURES: [(Architecture, &str, &str); 4] = [
    (Architecture::Llama, "LlamaForCausalLM", "llama"),
    (Architecture::Mistral, "MistralForCausalLM", "mistral"),
    (Architecture::Qwen2, "Qwen2ForCausalLM", "qwen2"),
    (Architecture::Qwen3, "Qwen3ForCausalLM", "qwen3"),
];

impl Architecture {
    /// The model type as config.json spells it.
    pub fn name(self) -> &'static str {
        match self {
            Self::Llama => "llama",
            Self::Mistral => "mistral",
            Self::Qwen2 => "qwen2",
            Self::Qwen3 => "qwen3",
        }
    }
}

/// Projections that have a bias.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Biases {
    /// Queries, keys and values.
    pub qkv: bool,
    /// The output projection of attention.
    pub output: bool,
    /// The MLP's gate, up and down projections.
    pub mlp: bool,
}

/// A model's shape and constants.
#[derive(Clone, Debug, PartialEq)]
pub struct ModelConfig {
    /// Family of the model.
    pub architecture: Architecture,
    /// Rows of the embedding and of the head; may exceed the tokenizer's vocabulary.
    pub vocab_size: usize,
    /// Width of the residual stream.
    pub hidden_size: usize,
    /// Width of the MLP's gate and up projections.
    pub intermediate_size: usize,
    /// Shape of attention's heads.
    pub heads: HeadShape,
    /// Each layer's sliding window in tokens, the token itself included; `None` attends to
    /// everything.
    pub windows: Vec<Option<usize>>,
    /// Epsilon, added to the mean of squares in every norm.
    pub norm_epsilon: f32,
    /// Base and scaling of the rotary embedding.
    pub rope: Rope,
    /// Longest context that the model was trained for, in tokens.
    pub context_tokens_max: usize,
    /// Whether the head shares the embedding's weights; `None` if config.json does not say.
    pub tied: Option<bool>,
    /// Projections that have a bias.
    pub biases: Biases,
    /// Whether queries and keys are normalised per head.
    pub head_norms: bool,
    /// Layout of quantised projections; `None` if all are floats of 16 or 32 bits.
    pub(super) quantization: Option<Quantization>,
    /// The token that begins a text.
    pub bos: Option<TokenId>,
    /// Tokens that end a text.
    pub eos: Vec<TokenId>,
}

impl ModelConfig {
    /// Number of layers: one window for each.
    pub fn layers_count(&self) -> usize {
        self.windows.len()
    }

    /// Reads config.json, which must exist.
    pub(super) fn read(file: &Path) -> Result<Self, CheckpointError> {
        let fields = ConfigFields::read(file)?.ok_or_else(|| {
            CheckpointError::absent(
                file,
                "missing; a checkpoint is a Hugging Face folder with config.json, tokenizer.json \
                 and *.safetensors",
            )
        })?;
        Self::from_fields(&fields)
    }

    /// Reads an object that is about to be written as config.json.
    pub(crate) fn from_object(
        file: &Path,
        object: serde_json::Map<String, serde_json::Value>,
    ) -> Result<Self, CheckpointError> {
        Self::from_fields(&ConfigFields::of(file, object))
    }

    fn from_fields(fields: &ConfigFields) -> Result<Self, CheckpointError> {
        let architecture = architecture(fields)?;
        refuse_unsupported(fields)?;
        let vocab_size = fields.size("vocab_size", VOCAB_MAX)?;
        let context_tokens_max = fields.size("max_position_embeddings", CONTEXT_MAX)?;
        let layers_count = fields.size("num_hidden_layers", LAYERS_MAX)?;
        let heads = heads(fields, architecture)?;
        Ok(Self {
            architecture,
            vocab_size,
            hidden_size: fields.size("hidden_size", WIDTH_MAX)?,
            intermediate_size: fields.size("intermediate_size", WIDTH_MAX)?,
            heads,
            windows: windows(fields, architecture, layers_count)?,
            norm_epsilon: epsilon(fields)?,
            rope: Rope::read(fields)?,
            context_tokens_max,
            tied: fields.flag("tie_word_embeddings")?,
            biases: biases(fields, architecture)?,
            head_norms: architecture == Architecture::Qwen3,
            quantization: Quantization::read(fields)?,
            bos: fields
                .token_ids("bos_token_id", vocab_size, TOKEN_ID_MAX)?
                .and_then(|ids| ids.first().copied()),
            eos: fields
                .token_ids("eos_token_id", vocab_size, TOKEN_ID_MAX)?
                .unwrap_or_default(),
        })
    }
}

fn architecture(fields: &ConfigFields) -> Result<Architecture, CheckpointError> {
    let classes = fields.texts("architectures")?.unwrap_or_default();
    let model_type = fields.text("model_type")?;
    let found = ARCHITECTURES.iter().find(|(_, class, name)| {
        if classes.is_empty() {
            model_type == Some(*name)
        } else {
            classes.contains(class)
        }
    });
    if let Some((architecture, _, _)) = found {
        return Ok(*architecture);
    }
    let supported = ARCHITECTURES.map(|(_, class, _)| class).join(", ");
    let (field, is) = match (classes.first(), model_type) {
        (Some(class), _) => ("architectures", *class),
        (None, Some(name)) => ("model_type", name),
        (None, None) => {
            let problem = format!("is missing, so the architecture is unknown; one of {supported}");
            return Err(fields.damaged("architectures", problem));
        }
    };
    let problem = format!("{is} is not supported; supported are {supported}");
    Err(fields.unsupported(field, problem))
}

/// Refuses settings with which the model would run, but give wrong answers.
fn refuse_unsupported(fields: &ConfigFields) -> Result<(), CheckpointError> {
    if let Some(act) = fields.text("hidden_act")?
        && !matches!(act, "silu" | "swish")
    {
        return Err(fields.unsupported("hidden_act", format!("{act} is not supported; silu is")));
    }
    if let Some(share) = fields.number("partial_rotary_factor")?
        && share != 1.0
    {
        let problem = format!("{share} is not supported; only whole heads are rotated");
        return Err(fields.unsupported("partial_rotary_factor", problem));
    }
    Ok(())
}

fn heads(fields: &ConfigFields, architecture: Architecture) -> Result<HeadShape, CheckpointError> {
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
    let head_dim = match fields.count("head_dim", WIDTH_MAX)? {
        Some(dim) => dim,
        // Qwen3's own default does not depend on the width.
        None if architecture == Architecture::Qwen3 && !fields.names().any(|n| n == "head_dim") => {
            128
        }
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

fn epsilon(fields: &ConfigFields) -> Result<f32, CheckpointError> {
    let epsilon = fields.number("rms_norm_eps")?.unwrap_or(1e-6);
    if (0.0..1.0).contains(&epsilon) {
        Ok(epsilon as f32)
    } else {
        Err(fields.damaged("rms_norm_eps", format!("{epsilon} is not from 0 to 1")))
    }
}

fn biases(fields: &ConfigFields, architecture: Architecture) -> Result<Biases, CheckpointError> {
    let attention = fields.flag("attention_bias")?.unwrap_or(false);
    Ok(match architecture {
        Architecture::Llama => Biases {
            qkv: attention,
            output: attention,
            mlp: fields.flag("mlp_bias")?.unwrap_or(false),
        },
        Architecture::Qwen3 => Biases {
            qkv: attention,
            output: attention,
            mlp: false,
        },
        Architecture::Qwen2 => Biases {
            qkv: true,
            ..Biases::default()
        },
        Architecture::Mistral => Biases::default(),
    })
}

fn windows(
    fields: &ConfigFields,
    architecture: Architecture,
    layers_count: usize,
) -> Result<Vec<Option<usize>>, CheckpointError> {
    let stated = fields.names().any(|name| name == "sliding_window");
    let mut window = fields.count("sliding_window", CONTEXT_MAX)?;
    if window == Some(0) {
        let problem = format!("is 0; should be null or a whole number from 1 to {CONTEXT_MAX}");
        return Err(fields.damaged("sliding_window", problem));
    }
    if window.is_none() && !stated {
        // Default of every architecture that has a window; an explicit null means no window.
        window = Some(4096);
    }
    let first = match architecture {
        Architecture::Llama => return Ok(vec![None; layers_count]),
        Architecture::Mistral => 0,
        Architecture::Qwen2 | Architecture::Qwen3 => {
            if !fields.flag("use_sliding_window")?.unwrap_or(false) {
                return Ok(vec![None; layers_count]);
            }
            fields.count("max_window_layers", LAYERS_MAX)?.unwrap_or(28)
        }
    };
    let Some(types) = fields.texts("layer_types")? else {
        return Ok((0..layers_count)
            .map(|layer| window.filter(|_| layer >= first))
            .collect());
    };
    if types.len() != layers_count {
        let problem = format!("{} entries for {layers_count} layers", types.len());
        return Err(fields.damaged("layer_types", problem));
    }
    let windows = types.iter().map(|layer| match *layer {
        "sliding_attention" => Ok(window),
        "full_attention" => Ok(None),
        other => {
            let problem = format!("{other} is not supported; sliding and full attention are");
            Err(fields.unsupported("layer_types", problem))
        }
    });
    windows.collect()
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;
    use serde_json::{Map, Value, json};
    use std::fs;

    const FOLDERS: [&str; 5] = ["llama2", "llama3", "llama3-new", "mistral", "qwen3"];

    fn config(folder: &str) -> Map<String, Value> {
        let root = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../testdata");
        let text = fs::read(root.join(folder).join("config.json")).unwrap();
        serde_json::from_slice(&text).unwrap()
    }

    fn read(config: Map<String, Value>) -> Result<ModelConfig, CheckpointError> {
        ModelConfig::from_object(Path::new("config.json"), config)
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
            let HeadShape { query_heads, kv_heads, head_dim } = config.heads;
            for (size, max) in [
                (config.vocab_size, VOCAB_MAX),
                (config.hidden_size, WIDTH_MAX),
                (config.intermediate_size, WIDTH_MAX),
                (config.context_tokens_max, CONTEXT_MAX),
                (config.layers_count(), LAYERS_MAX),
                (query_heads * head_dim, WIDTH_MAX),
                (kv_heads * head_dim, WIDTH_MAX),
            ] {
                prop_assert!((1..=max).contains(&size), "{config:?}");
            }
            let ids = config.bos.iter().chain(&config.eos);
            prop_assert!(ids.into_iter().all(|id| (*id as usize) < config.vocab_size));
            let frequencies = config.rope.frequencies(head_dim);
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
}
