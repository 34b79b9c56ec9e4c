//! The text side of a model: tokenizer, chat templates, defaults.
//!
//! Owns: everything between text and token ids. Never: generates. Invariant: it does not change
//! after construction, so requests share it without a lock.

use crate::model_files::{ModelError, ModelFiles};
use crate::template::{ChatTemplates, RenderError, TemplateInput};
use crate::tokenizer::{ByteLevelEncoder, EncodedText, PieceEncoding, SpecialTokens};
use cleave_domain::TokenId;
use serde_json::{Map, Value};
use std::collections::HashMap;
use std::ops::RangeInclusive;
use std::sync::Arc;
use tokenizers::{NormalizerWrapper, Tokenizer};

/// A tokenizer with templates and defaults, ready to serve.
pub struct ModelText {
    name: String,
    pub(crate) tokenizer: Tokenizer,
    /// The fast encoder, if the tokenizer is of its kind.
    pub(crate) byte_level: Option<ByteLevelEncoder>,
    spelling: PieceEncoding,
    templates: Option<ChatTemplates>,
    bos: Option<TokenId>,
    eos: Arc<[TokenId]>,
    context_tokens_max: u32,
    vocabulary_count: u32,
    /// Whether the tokenizer has tokens beyond the model's vocabulary.
    has_tokens_beyond_vocabulary: bool,
    piece_bytes_max: usize,
    /// Largest factor by which the normalizer shortens a text.
    shortening_max: usize,
    defaults: SamplingDefaults,
    letter_token: Option<TokenId>,
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

/// Repetition penalties that engines accept; nearer to 0 a division by the penalty overflows.
pub const REPETITION_PENALTY: RangeInclusive<f64> = 1e-4..=100.0;

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
        } = files;
        let config = object("config.json", &config)?;
        let generation = optional("generation_config.json", generation_config)?;
        let mut special = special_tokens(&optional("special_tokens_map.json", special_tokens_map)?);
        let tokenizer_config = optional("tokenizer_config.json", tokenizer_config)?;
        special.extend(special_tokens(&tokenizer_config));

        let tokenizer = load_tokenizer(&tokenizer)?;
        let named = |key: &str| special.get(key).and_then(Value::as_str);
        let id_of = |key: &str| named(key).and_then(|token| tokenizer.token_to_id(token));
        let configured = |key: &str| {
            generation
                .get(key)
                .or_else(|| config.get(key))
                .map(token_ids_of)
        };
        ["bos_token_id", "eos_token_id"]
            .iter()
            .try_for_each(|key| check_ids(&config, key))?;
        let context = context_length(&config)?;
        let vocabulary = tokenizer.get_vocab(true);
        let size = vocabulary.values().max().map_or(0, |last| last + 1);
        let vocabulary_count = vocab_size(&config)?.unwrap_or(size);
        warn_of_unknown_tokens(&vocabulary, vocabulary_count);
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
        let templates = select_templates(&tokenizer_config, chat_template, chat_templates_named)?;
        let templates = (!templates.is_empty())
            .then(|| ChatTemplates::new(templates, special.clone()))
            .transpose()
            .map_err(|reason| ModelError::Invalid {
                file: "chat template",
                reason,
            })?;
        Ok(Self {
            name,
            spelling: PieceEncoding::of(&tokenizer),
            byte_level: ByteLevelEncoder::of(&tokenizer),
            shortening_max: shortening_max(tokenizer.get_normalizer()),
            templates,
            bos,
            eos: eos.into(),
            context_tokens_max: context_tokens_max.unwrap_or(context).min(context),
            vocabulary_count,
            has_tokens_beyond_vocabulary: size > vocabulary_count,
            piece_bytes_max: vocabulary.keys().map(String::len).max().unwrap_or(1),
            defaults: SamplingDefaults::of(&generation)?,
            letter_token: letter_token(&vocabulary),
            tokenizer,
        })
    }

    pub fn name(&self) -> &str {
        &self.name
    }

    /// Longest sequence, prompt and output together.
    pub fn context_tokens_max(&self) -> u32 {
        self.context_tokens_max
    }

    /// Tokens that end an answer.
    pub fn eos(&self) -> &Arc<[TokenId]> {
        &self.eos
    }

    /// Token that begins a text, if the model has one.
    pub fn bos(&self) -> Option<TokenId> {
        self.bos
    }

    /// Number of token ids that the engine accepts; some of them may have no text.
    pub fn vocabulary_count(&self) -> u32 {
        self.vocabulary_count
    }

    /// Sampling parameters of a request that sets none.
    pub fn defaults(&self) -> SamplingDefaults {
        self.defaults
    }

    pub(crate) fn spelling(&self) -> PieceEncoding {
        self.spelling
    }

    /// Token of a plain letter. As context it tells the decoder that text precedes, where the
    /// decoder treats the first token of a text differently.
    pub(crate) fn letter_token(&self) -> Option<TokenId> {
        self.letter_token
    }

    pub fn has_chat_template(&self) -> bool {
        self.templates.is_some()
    }

    /// Tokenizes a text of any length.
    ///
    /// # Errors
    /// As [`Self::encode_within`].
    pub fn encode(&self, text: &str, special: SpecialTokens) -> Result<Vec<TokenId>, ModelError> {
        match self.encode_within(text, special, usize::MAX)? {
            EncodedText::Tokens(tokens) => Ok(tokens),
            EncodedText::TooMany(_) => unreachable!("no text has so many tokens"),
        }
    }

    /// Tokenizes a text if it has `tokens_max` tokens at most, otherwise returns their number.
    ///
    /// # Errors
    /// If the tokenizer fails, or has a token for the text that the model does not have.
    pub fn encode_within(
        &self,
        text: &str,
        special: SpecialTokens,
        tokens_max: usize,
    ) -> Result<EncodedText, ModelError> {
        let encoded = self.encode_any(text, special, tokens_max)?;
        let EncodedText::Tokens(tokens) = &encoded else {
            return Ok(encoded);
        };
        let is_unknown = |token: &&TokenId| **token >= self.vocabulary_count;
        match tokens
            .iter()
            .find(is_unknown)
            .filter(|_| self.has_tokens_beyond_vocabulary)
        {
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
        special: SpecialTokens,
        tokens_max: usize,
    ) -> Result<EncodedText, ModelError> {
        let bytewise = self.byte_level.as_ref();
        let short = bytewise.and_then(|b| b.encode(&self.tokenizer, text, special, tokens_max));
        if let Some(encoded) = short {
            return Ok(encoded);
        }
        let encoding = self
            .tokenizer
            .encode_fast(text, special == SpecialTokens::Kept);
        encoding
            .map(|encoding| match encoding.get_ids() {
                ids if ids.len() > tokens_max => EncodedText::TooMany(ids.len()),
                ids => EncodedText::Tokens(ids.to_vec()),
            })
            .map_err(|error| ModelError::Invalid {
                file: "tokenizer.json",
                reason: format!("the text cannot be tokenized: {error}"),
            })
    }

    /// Decodes tokens to text, all at once.
    pub fn decode(&self, tokens: &[TokenId], special: SpecialTokens) -> String {
        // Decoders fail only in their regular expressions; the text is empty then.
        self.tokenizer
            .decode(tokens, special == SpecialTokens::Skipped)
            .unwrap_or_default()
    }

    /// Lower bound of a text's tokens; a prompt that cannot fit is refused before it is tokenized.
    pub fn tokens_min(&self, text: &str) -> usize {
        text.len() / self.piece_bytes_max / self.shortening_max
    }

    /// Longest text, in bytes, that is tokenized before it is known to exceed the context.
    pub fn text_bytes_max(&self) -> usize {
        let pieces = self.piece_bytes_max.saturating_mul(self.shortening_max);
        pieces.saturating_mul(self.context_tokens_max as usize + 1)
    }

    /// Whether the fast encoder applies. Otherwise the library's record of the origin of each byte
    /// takes a hundred times the text's memory.
    pub fn is_byte_level(&self) -> bool {
        self.byte_level.is_some()
    }

    /// Spelling of a token in the vocabulary; `None` for ids without one, and for special tokens if
    /// they are skipped.
    pub fn piece(&self, token: TokenId, special: SpecialTokens) -> Option<String> {
        let piece = self.tokenizer.id_to_token(token)?;
        let skipped = special == SpecialTokens::Skipped
            && self
                .tokenizer
                .get_added_vocabulary()
                .is_special_token(&piece);
        (!skipped).then_some(piece)
    }

    /// Bytes that a token stands for within a text.
    pub fn bytes(&self, token: TokenId) -> Vec<u8> {
        match self.piece(token, SpecialTokens::Kept) {
            Some(piece) => self.spelling.bytes(&piece),
            None => Vec::new(),
        }
    }

    /// Renders a conversation with the chat template.
    ///
    /// # Errors
    /// If the template refuses the conversation or reaches a limit, or the model has no template.
    pub fn render(&self, conversation: &TemplateInput) -> Result<String, RenderError> {
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

/// Returns the largest factor by which a normalizer shortens a text.
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
    // Padding and truncation are left over from training; a prompt is never cut or padded.
    tokenizer.with_padding(None);
    tokenizer
        .with_truncation(None)
        .map_err(|error| invalid(error.to_string()))?;
    Ok(tokenizer)
}

/// Returns the first token that consists of letters only.
fn letter_token(vocabulary: &HashMap<String, TokenId>) -> Option<TokenId> {
    let letters = |piece: &str| !piece.is_empty() && piece.chars().all(|c| c.is_ascii_alphabetic());
    vocabulary
        .iter()
        .filter(|(piece, _)| letters(piece))
        .map(|(_, &token)| token)
        .min()
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

/// Warns of tokens that the tokenizer has and the model does not: a text with one of them is
/// refused.
fn warn_of_unknown_tokens(vocabulary: &HashMap<String, TokenId>, vocabulary_count: u32) {
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

/// Returns the context length: `max_position_embeddings`, which includes the scaling for Llama 3;
/// the other kinds of scaling multiply it.
fn context_length(config: &Map<String, Value>) -> Result<u32, ModelError> {
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
    if (1.0..=POSITIONS_MAX).contains(&scaled) {
        Ok(scaled as u32)
    } else {
        Err(invalid(&format!(
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
