//! A model's text side: tokenizer, chat templates, defaults.
//!
//! Owns: everything between text and token ids. Never: generates. Invariant: once built it does
//! not change, so that requests share it without a lock.

mod body_value;
mod budget;
mod bytewise;
mod calendar;
mod files;
mod piece;
mod python_json;
#[cfg(test)]
mod reference;
mod sandbox;
mod template;

pub(crate) use body_value::{list_of, record_of, value_of, value_with};
pub use files::{ModelError, ModelFiles};
pub(crate) use piece::{Spelling, fallback_byte};
pub(crate) use template::{Conversation, End, RenderError};

use bytewise::Bytewise;
pub(crate) use bytewise::Encoded;
use cleave_domain::TokenId;
use serde_json::{Map, Value};
use std::collections::HashMap;
use std::ops::RangeInclusive;
use std::sync::Arc;
use template::ChatTemplates;
use tokenizers::{NormalizerWrapper, Tokenizer};

/// A tokenizer with templates and defaults, ready to serve.
pub struct ModelText {
    name: String,
    tokenizer: Tokenizer,
    /// A shorter way to the same tokens, where there is one.
    bytewise: Option<Bytewise>,
    spelling: Spelling,
    templates: Option<ChatTemplates>,
    bos: Option<TokenId>,
    eos: Arc<[TokenId]>,
    context_tokens_max: u32,
    vocabulary_count: u32,
    /// Whether the tokenizer knows tokens beyond these.
    has_unknown: bool,
    piece_bytes_max: usize,
    /// How many times shorter the normalizer may make a text.
    shortening_max: usize,
    defaults: SamplingDefaults,
    neutral: Option<TokenId>,
}

/// Sampling where the client says nothing. As in vLLM, `generation_config.json` decides, unless it
/// says `do_sample: false`; then OpenAI's defaults hold.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(crate) struct SamplingDefaults {
    pub(crate) temperature: f32,
    pub(crate) top_k: u32,
    pub(crate) top_p: f32,
    pub(crate) min_p: f32,
    pub(crate) repetition_penalty: f32,
}

/// The repetition penalties that engines take; nearer to 0 a division by one overflows.
pub(crate) const REPETITION_PENALTY: RangeInclusive<f64> = 1e-4..=100.0;

/// What becomes of special tokens in text.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Special {
    /// They are added (to tokens) or shown (in text).
    Kept,
    /// They are left out.
    Skipped,
}

impl ModelText {
    /// Checks and compiles everything; the error names the file.
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
        } = files;
        let config = object("config.json", &config)?;
        let generation = optional("generation_config.json", generation_config)?;
        let mut special = special_tokens(&optional("special_tokens_map.json", special_tokens_map)?);
        let tokenizer_config = optional("tokenizer_config.json", tokenizer_config)?;
        special.extend(special_tokens(&tokenizer_config));

        let tokenizer = load_tokenizer(&tokenizer)?;
        let named = |key: &str| special.get(key).and_then(Value::as_str);
        let id_of = |key: &str| named(key).and_then(|token| tokenizer.token_to_id(token));
        let configured = |key: &str| generation.get(key).or_else(|| config.get(key)).map(ids);
        ["bos_token_id", "eos_token_id"]
            .iter()
            .try_for_each(|key| check_ids(&config, key))?;
        let context = context(&config)?;
        let vocabulary = tokenizer.get_vocab(true);
        let size = vocabulary.values().max().map_or(0, |last| last + 1);
        let vocabulary_count = vocab_size(&config)?.unwrap_or(size);
        warn_of_unknown(&vocabulary, vocabulary_count);
        let known = |id: &TokenId| *id < vocabulary_count;
        let bos = id_of("bos_token").or_else(|| configured("bos_token_id")?.first().copied());
        if let Some(unknown) = bos.filter(|id| !known(id)) {
            tracing::warn!(
                token = unknown,
                vocab_size = vocabulary_count,
                "the token that begins a text is beyond the model's vocabulary and is left out; see bos_token_id in \
                 config.json and generation_config.json"
            );
        }
        let bos = bos.filter(known);
        let mut eos = configured("eos_token_id").unwrap_or_default();
        eos.extend(id_of("eos_token"));
        eos.sort_unstable();
        eos.dedup();
        for unknown in eos.extract_if(.., |id| !known(id)) {
            tracing::warn!(
                token = unknown,
                vocab_size = vocabulary_count,
                "an end token is beyond the model's vocabulary and ends no answer; see eos_token_id in \
                 config.json and generation_config.json"
            );
        }
        let templates = chosen(&tokenizer_config, chat_template, chat_templates_named)?;
        let templates = (!templates.is_empty())
            .then(|| ChatTemplates::new(templates, special.clone()))
            .transpose()
            .map_err(|reason| ModelError::Invalid {
                file: "chat template",
                reason,
            })?;
        Ok(Self {
            name,
            spelling: Spelling::of(&tokenizer),
            bytewise: Bytewise::of(&tokenizer),
            shortening_max: shortening_max(tokenizer.get_normalizer()),
            templates,
            bos,
            eos: eos.into(),
            context_tokens_max: context_tokens_max.unwrap_or(context).min(context),
            vocabulary_count,
            has_unknown: size > vocabulary_count,
            piece_bytes_max: vocabulary.keys().map(String::len).max().unwrap_or(1),
            defaults: SamplingDefaults::of(&generation)?,
            neutral: neutral(&vocabulary),
            tokenizer,
        })
    }

    /// The served name.
    pub fn name(&self) -> &str {
        &self.name
    }

    /// The longest sequence, prompt and output together.
    pub fn context_tokens_max(&self) -> u32 {
        self.context_tokens_max
    }

    /// Tokens that end an answer.
    pub fn eos(&self) -> &Arc<[TokenId]> {
        &self.eos
    }

    /// The token that begins a text, where the model has one.
    pub fn bos(&self) -> Option<TokenId> {
        self.bos
    }

    /// Ids below this are tokens to the engine; some may have no text.
    pub fn vocabulary_count(&self) -> u32 {
        self.vocabulary_count
    }

    pub(crate) fn defaults(&self) -> SamplingDefaults {
        self.defaults
    }

    pub(crate) fn spelling(&self) -> Spelling {
        self.spelling
    }

    /// A plain letter's token: stands for "some text came before" where a decoder treats the
    /// first token of a text differently.
    pub(crate) fn neutral(&self) -> Option<TokenId> {
        self.neutral
    }

    pub(crate) fn has_chat_template(&self) -> bool {
        self.templates.is_some()
    }

    /// Text to tokens.
    pub fn encode(&self, text: &str, special: Special) -> Result<Vec<TokenId>, ModelError> {
        match self.encode_within(text, special, usize::MAX)? {
            Encoded::Tokens(tokens) => Ok(tokens),
            Encoded::TooMany(_) => unreachable!("no text has so many tokens"),
        }
    }

    /// Text to tokens if there are `tokens_max` at most, otherwise their number.
    pub(crate) fn encode_within(
        &self,
        text: &str,
        special: Special,
        tokens_max: usize,
    ) -> Result<Encoded, ModelError> {
        let encoded = self.encode_any(text, special, tokens_max)?;
        let Encoded::Tokens(tokens) = &encoded else {
            return Ok(encoded);
        };
        let is_unknown = |token: &&TokenId| **token >= self.vocabulary_count;
        match tokens.iter().find(is_unknown).filter(|_| self.has_unknown) {
            None => Ok(encoded),
            Some(&id) => Err(ModelError::UnknownToken {
                token: self.tokenizer.id_to_token(id).unwrap_or_default(),
                id,
                vocab_size: self.vocabulary_count,
            }),
        }
    }

    fn encode_any(
        &self,
        text: &str,
        special: Special,
        tokens_max: usize,
    ) -> Result<Encoded, ModelError> {
        let bytewise = self.bytewise.as_ref();
        let short = bytewise.and_then(|b| b.encode(&self.tokenizer, (text, special), tokens_max));
        if let Some(encoded) = short {
            return Ok(encoded);
        }
        let encoding = self.tokenizer.encode_fast(text, special == Special::Kept);
        encoding
            .map(|encoding| match encoding.get_ids() {
                ids if ids.len() > tokens_max => Encoded::TooMany(ids.len()),
                ids => Encoded::Tokens(ids.to_vec()),
            })
            .map_err(|error| ModelError::Invalid {
                file: "tokenizer.json",
                reason: format!("the text cannot be tokenized: {error}"),
            })
    }

    /// Tokens to text, all at once.
    pub fn decode(&self, tokens: &[TokenId], special: Special) -> String {
        // A decoder's errors are those of its own regular expressions; there is no text then.
        self.tokenizer
            .decode(tokens, special == Special::Skipped)
            .unwrap_or_default()
    }

    /// The fewest tokens a text can have; lets a hopeless prompt be refused before it is tokenized.
    pub(crate) fn tokens_min(&self, text: &str) -> usize {
        text.len() / self.piece_bytes_max / self.shortening_max
    }

    /// Whether texts become tokens without the library's lists of where each byte came from, which take a
    /// hundred times the text.
    pub(crate) fn is_bytewise(&self) -> bool {
        self.bytewise.is_some()
    }

    /// A token's spelling in the vocabulary; `None` for ids without one, and for special tokens
    /// if they are skipped.
    pub(crate) fn piece(&self, token: TokenId, special: Special) -> Option<String> {
        let piece = self.tokenizer.id_to_token(token)?;
        let skipped = special == Special::Skipped
            && self
                .tokenizer
                .get_added_vocabulary()
                .is_special_token(&piece);
        (!skipped).then_some(piece)
    }

    /// The bytes a token stands for within a text.
    pub(crate) fn bytes(&self, token: TokenId) -> Vec<u8> {
        match self.piece(token, Special::Kept) {
            Some(piece) => self.spelling.bytes(&piece),
            None => Vec::new(),
        }
    }

    pub(crate) fn render(&self, conversation: &Conversation) -> Result<String, RenderError> {
        match &self.templates {
            Some(templates) => templates.render(conversation),
            None => Err(RenderError::Refused(
                "the model has no chat template".into(),
            )),
        }
    }
}

impl SamplingDefaults {
    fn of(generation: &Map<String, Value>) -> Result<Self, ModelError> {
        let sampled = generation.get("do_sample") != Some(&Value::Bool(false));
        let value = |key: &str, otherwise: f32| match generation.get(key) {
            Some(Value::Number(number)) if sampled => {
                number.as_f64().map_or(otherwise, |n| n as f32)
            }
            _ => otherwise,
        };
        let defaults = Self {
            temperature: value("temperature", 1.0),
            top_k: value("top_k", 0.0).max(0.0) as u32,
            top_p: value("top_p", 1.0),
            min_p: value("min_p", 0.0),
            repetition_penalty: value("repetition_penalty", 1.0),
        };
        let sound = (0.0..=2.0).contains(&defaults.temperature)
            && (0.0..=1.0).contains(&defaults.min_p)
            && defaults.top_p > 0.0
            && defaults.top_p <= 1.0
            && REPETITION_PENALTY.contains(&f64::from(defaults.repetition_penalty));
        if sound {
            return Ok(defaults);
        }
        Err(ModelError::Invalid {
            file: "generation_config.json",
            reason: format!("a sampling value is out of range: {defaults:?}"),
        })
    }
}

/// How many times shorter a normalizer may make a text.
fn shortening_max(normalizer: Option<&NormalizerWrapper>) -> usize {
    let lengthens = |normalizer: &NormalizerWrapper| match normalizer {
        NormalizerWrapper::Prepend(_) => true,
        NormalizerWrapper::Replace(replace) => {
            let pattern = serde_json::to_value(replace).unwrap_or_default();
            let pattern = pattern["pattern"]["String"].as_str();
            pattern.is_some_and(|pattern| pattern.len() <= replace.content.len())
        }
        _ => false,
    };
    let all_lengthen = match normalizer {
        None => true,
        Some(NormalizerWrapper::Sequence(all)) => all.as_ref().iter().all(lengthens),
        Some(one) => lengthens(one),
    };
    if all_lengthen { 1 } else { 4 }
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

fn load_tokenizer(text: &str) -> Result<Tokenizer, ModelError> {
    let invalid = |reason: String| ModelError::Invalid {
        file: "tokenizer.json",
        reason,
    };
    let mut tokenizer =
        Tokenizer::from_bytes(text.as_bytes()).map_err(|error| invalid(error.to_string()))?;
    // Left over from training; a prompt is never cut or padded.
    tokenizer.with_padding(None);
    tokenizer
        .with_truncation(None)
        .map_err(|error| invalid(error.to_string()))?;
    Ok(tokenizer)
}

/// The first token of letters only.
fn neutral(vocabulary: &HashMap<String, TokenId>) -> Option<TokenId> {
    let letters = |piece: &str| !piece.is_empty() && piece.chars().all(|c| c.is_ascii_alphabetic());
    vocabulary
        .iter()
        .filter(|(piece, _)| letters(piece))
        .map(|(_, &token)| token)
        .min()
}

/// One id or a list of them.
fn ids(value: &Value) -> Vec<TokenId> {
    let one = |value: &Value| value.as_u64().and_then(|id| TokenId::try_from(id).ok());
    match value {
        Value::Array(values) => values.iter().filter_map(one).collect(),
        value => one(value).into_iter().collect(),
    }
}

/// Refuses ids in config.json that no vocabulary has; those slightly beyond the model's are left out later.
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

/// Every `…_token` with a name, plain or as an object with its content.
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

/// Tokens that a model may have.
const VOCAB_MAX: u64 = 1 << 24;
/// Positions that a model may have.
const POSITIONS_MAX: f64 = (1_u32 << 24) as f64;

/// The part of a configuration that is about text.
fn text_config(config: &Map<String, Value>) -> &Map<String, Value> {
    let text = config.get("text_config").and_then(Value::as_object);
    text.unwrap_or(config)
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

/// Tells the operator of tokens that the tokenizer knows and the model does not: a text that has one is refused.
fn warn_of_unknown(vocabulary: &HashMap<String, TokenId>, vocabulary_count: u32) {
    let unknown = vocabulary.iter().filter(|(_, id)| **id >= vocabulary_count);
    let (count, first) = (unknown.clone().count(), unknown.min_by_key(|(_, id)| **id));
    if let Some((token, id)) = first {
        tracing::warn!(
            count,
            token,
            id,
            vocab_size = vocabulary_count,
            "tokenizer.json has tokens beyond the model's vocabulary; a request whose text has one is refused"
        );
    }
}

/// `max_position_embeddings`, which Llama 3's scaling already includes and others' multiply.
fn context(config: &Map<String, Value>) -> Result<u32, ModelError> {
    let invalid = |reason: &str| ModelError::Invalid {
        file: "config.json",
        reason: reason.into(),
    };
    let text = text_config(config);
    let positions = text.get("max_position_embeddings").and_then(Value::as_u64);
    let positions = positions.ok_or_else(|| invalid("max_position_embeddings is missing"))?;
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
    match (1.0..=POSITIONS_MAX).contains(&scaled) {
        true => Ok(scaled as u32),
        false => Err(invalid(&format!(
            "max_position_embeddings is {positions}, {scaled} with what scales it; it must be from 1 to \
             {POSITIONS_MAX}"
        ))),
    }
}

/// The templates by name, `default` among them if there is any; a file of its own comes first.
fn chosen(
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
