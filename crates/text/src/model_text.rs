//! The text side of a model: tokenizer, chat templates, defaults.
//!
//! Owns: the reading of the files' contents, each checked against the others. Never: generates.
//! Invariant: it does not change after construction, so requests share it without a lock.

use crate::model_files::{ModelError, ModelFiles};
use crate::model_task::{ModelTask, RerankTokens};
use crate::output::OutputFormats;
use crate::template::{ChatTemplates, RenderError, TemplateInput};
use crate::tokenizer::{ModelTokenizer, PIECE_BYTES_MAX, load_tokenizer};
use cleave_domain::{AdapterId, SamplingParams, TokenId};
use cleave_grammar::{GrammarCompiler, GrammarError};
use serde_json::{Map, Value};
use std::ops::{Bound, RangeBounds, RangeInclusive};
use std::sync::{Arc, OnceLock};

/// A tokenizer with templates and defaults, ready to serve under a name.
pub struct ModelText {
    name: String,
    /// The served name of an alias's or an adapter's model.
    base: Option<String>,
    adapter: Option<AdapterId>,
    output_formats: OutputFormats,
    parts: Arc<TextParts>,
}

/// Everything that aliases and adapters of a model share with it.
struct TextParts {
    tokenizer: ModelTokenizer,
    templates: Option<ChatTemplates>,
    bos: Option<TokenId>,
    eos: Arc<[TokenId]>,
    context_tokens_max: u32,
    defaults: SamplingDefaults,
    /// Elements of a hidden state, where config.json names them.
    hidden_size: Option<u32>,
    task: ModelTask,
    rerank_tokens: Option<RerankTokens>,
    /// Made for the first constrained request.
    grammars: OnceLock<Result<GrammarCompiler, GrammarError>>,
}

/// Sampling defaults. As in vLLM, `generation_config.json` sets them, unless it says `do_sample:
/// false`; then OpenAI's defaults apply.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct SamplingDefaults {
    pub temperature: f32,
    /// Number of the likeliest tokens that are drawn from; 0 means all.
    pub top_k: u32,
    pub top_p: f32,
    pub min_p: f32,
    pub repetition_penalty: f32,
}

/// The ends of a range of numbers.
pub type NumberBounds = (Bound<f64>, Bound<f64>);

/// Makes bounds of two ends that are both in the range.
pub const fn bounds_from_to(low: f64, high: f64) -> NumberBounds {
    (Bound::Included(low), Bound::Included(high))
}

impl ModelText {
    /// Checks and compiles everything; an error names its file.
    pub fn new(files: ModelFiles) -> Result<Self, ModelError> {
        let ModelFiles {
            name,
            config,
            tokenizer,
            tokenizer_config,
            special_tokens_map,
            generation_config,
            chat_template,
            chat_templates_named,
            context_tokens_max,
            task,
        } = files;
        let config = object("config.json", &config)?;
        let generation = optional("generation_config.json", generation_config)?;
        let mut special = special_tokens(&optional("special_tokens_map.json", special_tokens_map)?);
        let tokenizer_config = optional("tokenizer_config.json", tokenizer_config)?;
        special.extend(special_tokens(&tokenizer_config));

        let library = load_tokenizer(&tokenizer)?;
        let named = |key: &str| special.get(key).and_then(Value::as_str);
        let configured = |key: &str| {
            let places = [&generation, text_config(&config), &config];
            let value = places.iter().find_map(|place| place.get(key));
            value.map(token_ids_of)
        };
        for key in ["bos_token_id", "eos_token_id"] {
            check_ids(&config, key)?;
            check_ids(text_config(&config), key)?;
        }
        // The weights' side knows the context of a model whose config.json leaves it to its class.
        let lengths = [context_length(&config)?, context_tokens_max];
        let context = lengths.into_iter().flatten().min();
        let context = context.ok_or_else(|| ModelError::Invalid {
            file: "config.json",
            reason: "max_position_embeddings is missing".into(),
        })?;
        let tokenizer = ModelTokenizer::new(library, vocab_size(&config)?);
        let vocabulary_count = tokenizer.vocabulary_count();
        let id_of = |key: &str| named(key).and_then(|token| tokenizer.id_of(token));
        let is_in_vocabulary = |id: &TokenId| *id < vocabulary_count;
        let bos = id_of("bos_token").or_else(|| configured("bos_token_id")?.first().copied());
        if let Some(unknown) = bos.filter(|id| !is_in_vocabulary(id)) {
            tracing::warn!(
                token = unknown,
                vocab_size = vocabulary_count,
                "the token that begins a text is beyond the model's vocabulary and is left out; see bos_token_id in \
                 config.json and generation_config.json"
            );
        }
        let bos = bos.filter(is_in_vocabulary);
        let mut eos = configured("eos_token_id").unwrap_or_default();
        eos.extend(id_of("eos_token"));
        eos.sort_unstable();
        eos.dedup();
        for unknown in eos.extract_if(.., |id| !is_in_vocabulary(id)) {
            tracing::warn!(
                token = unknown,
                vocab_size = vocabulary_count,
                "an end token is beyond the model's vocabulary and ends no answer; see eos_token_id in \
                 config.json and generation_config.json"
            );
        }
        let rerank_tokens = match &task {
            ModelTask::Rerank(task) => Some(task.tokens(&tokenizer)?),
            ModelTask::Generate | ModelTask::Embed(_) => None,
        };
        let templates = select_templates(&tokenizer_config, chat_template, chat_templates_named)?;
        // Calls are in the template for tools where there is one.
        let main = ["tool_use", "default"].iter().find_map(|name| {
            let mut named = templates.iter();
            named.find(|(other, _)| other == name)
        });
        let output_formats = main
            .map(|(_, template)| OutputFormats::of_template(template))
            .unwrap_or_default();
        let templates = (!templates.is_empty())
            .then(|| ChatTemplates::new(templates, special.clone()))
            .transpose()
            .map_err(|reason| ModelError::Invalid {
                file: "chat template",
                reason,
            })?;
        let parts = TextParts {
            templates,
            bos,
            eos: eos.into(),
            context_tokens_max: context,
            defaults: SamplingDefaults::of(&generation)?,
            grammars: OnceLock::new(),
            tokenizer,
            hidden_size: hidden_size(&config)?,
            task,
            rerank_tokens,
        };
        Ok(Self {
            name,
            base: None,
            adapter: None,
            output_formats,
            parts: Arc::new(parts),
        })
    }

    /// The text side of an adapter of this model, under the adapter's name.
    #[must_use]
    pub fn of_adapter(&self, name: &str, id: AdapterId) -> Self {
        Self {
            adapter: Some(id),
            ..self.of_alias(name)
        }
    }

    /// This model under another name.
    #[must_use]
    pub fn of_alias(&self, name: &str) -> Self {
        Self {
            name: name.to_owned(),
            base: Some(self.base_name().to_owned()),
            adapter: self.adapter,
            output_formats: self.output_formats,
            parts: Arc::clone(&self.parts),
        }
    }

    /// The name by which clients ask for it.
    pub fn name(&self) -> &str {
        &self.name
    }

    /// The name of the model whose workers serve it: of an alias or an adapter, its model's.
    pub fn base_name(&self) -> &str {
        self.base.as_ref().unwrap_or(&self.name)
    }

    /// The adapter that requests for it have, if it is one.
    pub fn adapter(&self) -> Option<AdapterId> {
        self.adapter
    }

    /// The compiler of grammars, made by `make` for the first of all requests.
    pub(crate) fn grammars_or_made(
        &self,
        make: impl FnOnce() -> Result<GrammarCompiler, GrammarError>,
    ) -> &Result<GrammarCompiler, GrammarError> {
        self.parts.grammars.get_or_init(make)
    }

    pub fn tokenizer(&self) -> &ModelTokenizer {
        &self.parts.tokenizer
    }

    /// Longest sequence, prompt and output together.
    pub fn context_tokens_max(&self) -> u32 {
        self.parts.context_tokens_max
    }

    /// Tokens that end an answer.
    pub fn eos(&self) -> &Arc<[TokenId]> {
        &self.parts.eos
    }

    /// Token that begins a text, if the model has one.
    pub fn bos(&self) -> Option<TokenId> {
        self.parts.bos
    }

    /// Number of token ids that the engine accepts; some of them may have no text.
    pub fn vocabulary_count(&self) -> u32 {
        self.parts.tokenizer.vocabulary_count()
    }

    /// Sampling parameters of a request that sets none.
    pub fn defaults(&self) -> SamplingDefaults {
        self.parts.defaults
    }

    /// Formats of reasoning and calls in outputs, as the chat template writes them.
    pub fn output_formats(&self) -> OutputFormats {
        self.output_formats
    }

    /// Reads outputs in other formats.
    pub fn set_output_formats(&mut self, formats: OutputFormats) {
        self.output_formats = formats;
    }

    /// The task that the model is served for.
    pub fn task(&self) -> &ModelTask {
        &self.parts.task
    }

    /// The tokens whose logits a reranker compares; `None` for any other model.
    pub fn rerank_tokens(&self) -> Option<RerankTokens> {
        self.parts.rerank_tokens
    }

    /// Elements of a vector, where config.json names them.
    pub fn hidden_size(&self) -> Option<u32> {
        self.parts.hidden_size
    }

    pub fn has_chat_template(&self) -> bool {
        self.parts.templates.is_some()
    }

    /// Longest text, in bytes, that the `tokenizers` library gets at once: a piece, or where only
    /// the library knows the tokens, a text that is not yet known to exceed the context.
    pub fn library_bytes_max(&self) -> usize {
        if self.parts.tokenizer.is_byte_level() {
            return PIECE_BYTES_MAX;
        }
        let bytes_max = self.parts.tokenizer.bytes_per_token_max();
        bytes_max.saturating_mul(self.parts.context_tokens_max as usize + 1)
    }

    /// Renders a conversation with the chat template.
    ///
    /// # Errors
    /// If the template refuses the conversation or reaches a limit, or the model has no template.
    pub fn render(&self, conversation: &TemplateInput) -> Result<String, RenderError> {
        match &self.parts.templates {
            Some(templates) => templates.render(conversation),
            None => Err(RenderError::Refused(
                "the model has no chat template".into(),
            )),
        }
    }
}

/// The ranges of both a request's field and the default of a model. They are within those of
/// [`SamplingParams`], which engines accept.
impl SamplingDefaults {
    /// Narrower than engines accept: the range of OpenAI's API.
    pub const TEMPERATURE: NumberBounds = bounds_from_to(0.0, 2.0);
    /// In vLLM -1 and 0 both keep all tokens.
    pub const TOP_K: RangeInclusive<i64> = -1..=u32::MAX as i64;
    /// A share above 0 that is too small for f32 counts as the smallest of f32.
    pub const TOP_P: NumberBounds = (
        Bound::Excluded(0.0),
        Bound::Included(*SamplingParams::TOP_P.end()),
    );
    /// As engines accept it.
    pub const MIN_P: NumberBounds =
        bounds_from_to(*SamplingParams::MIN_P.start(), *SamplingParams::MIN_P.end());
    /// Narrower than engines accept: no use of a penalty above 100 is known.
    pub const REPETITION_PENALTY: NumberBounds =
        bounds_from_to(*SamplingParams::REPETITION_PENALTY.start(), 100.0);

    /// Reads the values; those of a file that says `do_sample: false` do not count.
    fn of(generation: &Map<String, Value>) -> Result<Self, ModelError> {
        let unsampled = Map::new();
        let values = match generation.get("do_sample") {
            Some(Value::Bool(false)) => &unsampled,
            _ => generation,
        };
        let read = |key, default, range| default_value(values, key, default, range);
        let (low, high) = (*Self::TOP_K.start(), *Self::TOP_K.end());
        let top_k = bounds_from_to(low as f64, high as f64);
        let penalty = read("repetition_penalty", 1.0, Self::REPETITION_PENALTY)?;
        Ok(Self {
            temperature: read("temperature", 1.0, Self::TEMPERATURE)? as f32,
            top_k: read("top_k", 0.0, top_k)?.max(0.0) as u32,
            // A share too small for f32 still keeps the most likely token.
            top_p: (read("top_p", 1.0, Self::TOP_P)? as f32).max(f32::MIN_POSITIVE),
            min_p: read("min_p", 0.0, Self::MIN_P)? as f32,
            repetition_penalty: penalty as f32,
        })
    }
}

/// Reads a number of `generation_config.json`; `null` is the same as absent.
fn default_value(
    generation: &Map<String, Value>,
    key: &str,
    default: f64,
    range: NumberBounds,
) -> Result<f64, ModelError> {
    let value = match generation.get(key) {
        None | Some(Value::Null) => return Ok(default),
        Some(value) => value,
    };
    let number = value.as_f64().filter(|number| range.contains(number));
    number.ok_or_else(|| {
        let bound = |bound: Bound<f64>| match bound {
            Bound::Included(limit) => limit.to_string(),
            Bound::Excluded(limit) => format!("above {limit}"),
            Bound::Unbounded => "any".to_owned(),
        };
        let (low, high) = (bound(range.0), bound(range.1));
        ModelError::Invalid {
            file: "generation_config.json",
            reason: format!("{key} is {value}; it must be a number from {low} to {high}"),
        }
    })
}

fn object(file: &'static str, text: &str) -> Result<Map<String, Value>, ModelError> {
    serde_json::from_str(text).map_err(|error| ModelError::Invalid {
        file,
        reason: error.to_string(),
    })
}

fn optional(file: &'static str, text: Option<String>) -> Result<Map<String, Value>, ModelError> {
    text.map(|text| object(file, &text))
        .transpose()
        .map(Option::unwrap_or_default)
}

/// Reads one id or a list of ids.
fn token_ids_of(value: &Value) -> Vec<TokenId> {
    let one = |value: &Value| value.as_u64().and_then(|id| TokenId::try_from(id).ok());
    match value {
        Value::Array(values) => values.iter().filter_map(one).collect(),
        value => one(value).into_iter().collect(),
    }
}

/// Refuses ids in config.json beyond any vocabulary; ids slightly beyond the model's are left out
/// later.
fn check_ids(config: &Map<String, Value>, key: &str) -> Result<(), ModelError> {
    let list = match config.get(key) {
        Some(Value::Array(list)) => list.as_slice(),
        Some(one) => std::slice::from_ref(one),
        None => &[],
    };
    let is_absurd = |value: &&Value| value.as_u64().is_some_and(|id| id >= VOCAB_MAX);
    match list.iter().find(is_absurd) {
        None => Ok(()),
        Some(id) => Err(ModelError::Invalid {
            file: "config.json",
            reason: format!("{key} is {id}; token ids are below {VOCAB_MAX}"),
        }),
    }
}

/// Collects every `…_token`, given as a string or as an object with its content.
fn special_tokens(config: &Map<String, Value>) -> Map<String, Value> {
    let content = |value: &Value| match value {
        Value::Object(token) => token
            .get("content")
            .filter(|content| content.is_string())
            .cloned(),
        Value::String(_) => Some(value.clone()),
        _ => None,
    };
    let tokens = config.iter().filter(|(key, _)| key.ends_with("_token"));
    tokens
        .filter_map(|(key, value)| Some((key.clone(), content(value)?)))
        .collect()
}

/// Limit of a vocabulary.
const VOCAB_MAX: u64 = 1 << 24;
const POSITIONS_MAX: f64 = (1_u32 << 24) as f64;

/// Returns the part of a configuration that concerns text.
fn text_config(config: &Map<String, Value>) -> &Map<String, Value> {
    let text = config.get("text_config").and_then(Value::as_object);
    text.unwrap_or(config)
}

/// Returns the elements of a hidden state.
fn hidden_size(config: &Map<String, Value>) -> Result<Option<u32>, ModelError> {
    let Some(value) = text_config(config).get("hidden_size") else {
        return Ok(None);
    };
    let size = value.as_u64().and_then(|size| u32::try_from(size).ok());
    size.filter(|size| *size > 0)
        .map(Some)
        .ok_or_else(|| ModelError::Invalid {
            file: "config.json",
            reason: format!("hidden_size is {value}; it must be a whole number above 0"),
        })
}

fn vocab_size(config: &Map<String, Value>) -> Result<Option<u32>, ModelError> {
    let Some(value) = text_config(config).get("vocab_size") else {
        return Ok(None);
    };
    match value.as_u64() {
        Some(size @ 1..=VOCAB_MAX) => Ok(Some(size as u32)),
        _ => Err(ModelError::Invalid {
            file: "config.json",
            reason: format!(
                "vocab_size is {value}; it must be a whole number from 1 to {VOCAB_MAX}"
            ),
        }),
    }
}

/// Returns the context length, if there is one: `max_position_embeddings`, which includes the
/// scaling for Llama 3; the other kinds of scaling multiply it.
fn context_length(config: &Map<String, Value>) -> Result<Option<u32>, ModelError> {
    let text = text_config(config);
    let Some(stated) = text.get("max_position_embeddings") else {
        return Ok(None);
    };
    let invalid = |reason: String| ModelError::Invalid {
        file: "config.json",
        reason,
    };
    let positions = stated.as_u64().ok_or_else(|| {
        invalid(format!(
            "max_position_embeddings is {stated}; it must be a whole number"
        ))
    })?;
    let scaling = ["rope_parameters", "rope_scaling"]
        .iter()
        .find_map(|key| text.get(*key)?.as_object());
    let kind =
        scaling.and_then(|scaling| scaling.get("rope_type").or(scaling.get("type"))?.as_str());
    let factor = scaling
        .and_then(|scaling| scaling.get("factor")?.as_f64())
        .unwrap_or(1.0);
    let scaled = match kind {
        Some("linear" | "dynamic") => positions as f64 * factor,
        Some("yarn") => {
            let original =
                scaling.and_then(|s| s.get("original_max_position_embeddings")?.as_f64());
            original.unwrap_or(positions as f64) * factor
        }
        _ => positions as f64,
    };
    if (1.0..=POSITIONS_MAX).contains(&scaled) {
        Ok(Some(scaled as u32))
    } else {
        Err(invalid(format!(
            "max_position_embeddings is {positions}, {scaled} with its scaling; it must be from 1 to \
             {POSITIONS_MAX}"
        )))
    }
}

/// Returns the templates by name, with `default` among them if there is any; a file of its own
/// takes precedence.
fn select_templates(
    tokenizer_config: &Map<String, Value>,
    file: Option<String>,
    mut named: Vec<(String, String)>,
) -> Result<Vec<(String, String)>, ModelError> {
    let invalid = |reason: &str| ModelError::Invalid {
        file: "tokenizer_config.json",
        reason: format!("chat_template: {reason}"),
    };
    if let Some(template) = file {
        named.push(("default".into(), template));
        return Ok(named);
    }
    match tokenizer_config.get("chat_template") {
        None | Some(Value::Null) => {}
        Some(Value::String(template)) => named.push(("default".into(), template.clone())),
        Some(Value::Array(templates)) => {
            for template in templates {
                let text = |key: &str| template.get(key)?.as_str().map(str::to_owned);
                let (name, source) = text("name")
                    .zip(text("template"))
                    .ok_or_else(|| invalid("each of the list needs a `name` and a `template`"))?;
                named.push((name, source));
            }
        }
        Some(_) => return Err(invalid("neither a string nor a list")),
    }
    if !named.is_empty() && !named.iter().any(|(name, _)| name == "default") {
        return Err(invalid("no template is named `default`"));
    }
    Ok(named)
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::json;

    fn defaults(generation: &Value) -> Result<SamplingDefaults, String> {
        let Value::Object(map) = generation else {
            panic!("an object");
        };
        SamplingDefaults::of(map).map_err(|error| error.to_string())
    }

    #[test]
    fn a_bad_sampling_default_is_named_with_its_range() {
        for (generation, expected) in [
            (
                json!({"temperature": -1}),
                "temperature is -1; it must be a number from 0 to 2",
            ),
            (
                json!({"temperature": "x"}),
                "temperature is \"x\"; it must be a number from 0 to 2",
            ),
            (
                json!({"top_p": 0}),
                "top_p is 0; it must be a number from above 0 to 1",
            ),
            (json!({"top_k": []}), "top_k is []"),
            (json!({"min_p": 1.5}), "min_p is 1.5"),
            (json!({"repetition_penalty": 0}), "from 0.0001 to 100"),
        ] {
            let reason = defaults(&generation).unwrap_err();
            assert!(reason.contains(expected), "{reason}");
        }
    }

    #[test]
    fn absent_and_unsampled_defaults_are_openais() {
        let openai = defaults(&json!({})).unwrap();
        assert_eq!(
            (openai.temperature, openai.top_k, openai.top_p),
            (1.0, 0, 1.0)
        );
        for same in [
            json!({"temperature": null}),
            json!({"do_sample": false, "temperature": "x", "top_k": 5}),
            json!({"top_k": -1}),
        ] {
            assert_eq!(defaults(&same), Ok(openai));
        }
        let read = defaults(&json!({"temperature": 0.5, "top_k": 20, "top_p": 1e-300})).unwrap();
        assert_eq!((read.temperature, read.top_k), (0.5, 20));
        assert!(read.top_p > 0.0);
    }
}
