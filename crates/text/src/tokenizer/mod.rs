//! Conversion of text into tokens, and of tokens into text at once.
//!
//! Owns: the tokenizer of a model, the spelling of its tokens, and a shorter way to the tokens of
//! common tokenizers. Never: reads a file, or joins tokens that arrive one by one (see
//! `detokenize`). Invariant: tokens and texts are those of the `tokenizers` library, and every
//! token is one of the model.

mod byte_level;
mod piece;

pub use byte_level::{EncodedText, PIECE_BYTES_MAX};
pub(crate) use piece::{PieceEncoding, fallback_byte};

use crate::grammar::MarkTokens;
use crate::model_files::ModelError;
use byte_level::{ByteLevelEncoder, NotEncoded};
use cleave_domain::TokenId;
use cleave_grammar::TokenBytes;
use std::collections::HashMap;
use tokenizers::{NormalizerWrapper, Tokenizer};

/// The tokenizer of a model.
pub struct ModelTokenizer {
    library: Tokenizer,
    /// The fast encoder, if the tokenizer is of its kind.
    byte_level: Option<ByteLevelEncoder>,
    spelling: PieceEncoding,
    vocabulary_count: u32,
    /// Whether the tokenizer has tokens beyond the model's vocabulary.
    has_tokens_beyond_vocabulary: bool,
    piece_bytes_max: usize,
    /// Largest factor by which the normalizer shortens a text.
    shortening_max: usize,
    letter_token: Option<TokenId>,
}

/// The treatment of special tokens.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum SpecialTokens {
    /// Special tokens are added to tokens, or shown in text.
    Kept,
    /// Special tokens are left out.
    Skipped,
}

/// A text that cannot be tokenized.
#[derive(Debug, thiserror::Error)]
pub enum EncodeError {
    /// A text has a token that the tokenizer has and the model does not.
    #[error(
        "the text has the token {token:?}, id {id}, which is not in the model's vocabulary of \
         {vocab_size} tokens (`vocab_size` in config.json)"
    )]
    UnknownToken {
        /// Spelling of the token in the tokenizer.
        token: String,
        /// Id of the token.
        id: u32,
        /// Vocabulary size in config.json.
        vocab_size: u32,
    },
    /// A text has a piece, such as a word or a run of blanks, that is too long to be tokenized.
    #[error(
        "the text has {bytes} bytes without a place where the tokenizer divides it; at most \
         {PIECE_BYTES_MAX} can be tokenized at once"
    )]
    LongPiece {
        /// Length of the piece.
        bytes: usize,
    },
    /// The tokenizer failed on the text, for this reason.
    #[error("tokenizer.json: the text cannot be tokenized: {0}")]
    Failed(String),
}

impl ModelTokenizer {
    /// Makes the tokenizer of a model with this many tokens; `None` if config.json has no size.
    pub(crate) fn new(library: Tokenizer, vocab_size: Option<u32>) -> Self {
        let vocabulary = library.get_vocab(true);
        let size = vocabulary.values().max().map_or(0, |last| last + 1);
        let vocabulary_count = vocab_size.unwrap_or(size);
        warn_of_unknown_tokens(&vocabulary, vocabulary_count);
        Self {
            spelling: PieceEncoding::of(&library),
            byte_level: ByteLevelEncoder::of(&library),
            shortening_max: shortening_max(library.get_normalizer()),
            vocabulary_count,
            has_tokens_beyond_vocabulary: size > vocabulary_count,
            piece_bytes_max: vocabulary.keys().map(String::len).max().unwrap_or(1),
            letter_token: letter_token(&vocabulary),
            library,
        }
    }

    pub(crate) fn vocabulary_count(&self) -> u32 {
        self.vocabulary_count
    }

    pub fn id_of(&self, piece: &str) -> Option<TokenId> {
        self.library.token_to_id(piece)
    }

    pub(crate) fn spelling(&self) -> PieceEncoding {
        self.spelling
    }

    /// Token of a plain letter. As context it tells the decoder that text precedes, where the
    /// decoder treats the first token of a text differently.
    pub(crate) fn letter_token(&self) -> Option<TokenId> {
        self.letter_token
    }

    /// Longest text, in bytes, of one token.
    pub(crate) fn bytes_per_token_max(&self) -> usize {
        self.piece_bytes_max.saturating_mul(self.shortening_max)
    }

    #[cfg(test)]
    pub(crate) fn library(&self) -> &Tokenizer {
        &self.library
    }

    #[cfg(test)]
    pub(crate) fn byte_level(&self) -> Option<&ByteLevelEncoder> {
        self.byte_level.as_ref()
    }

    /// Tokenizes a text of any length.
    ///
    /// # Errors
    /// As [`Self::encode_within`].
    pub fn encode(&self, text: &str, special: SpecialTokens) -> Result<Vec<TokenId>, EncodeError> {
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
    ) -> Result<EncodedText, EncodeError> {
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
            Some(&id) => Err(EncodeError::UnknownToken {
                token: self.library.id_to_token(id).unwrap_or_default(),
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
    ) -> Result<EncodedText, EncodeError> {
        let bytewise = self.byte_level.as_ref();
        match bytewise.map(|b| b.encode(&self.library, text, special, tokens_max)) {
            Some(Ok(encoded)) => return Ok(encoded),
            Some(Err(NotEncoded::LongPiece(bytes))) => {
                return Err(EncodeError::LongPiece { bytes });
            }
            // The library takes a hundred times the memory of a text, and its pattern gives up,
            // too.
            Some(Err(NotEncoded::LibraryOnly)) if text.len() > PIECE_BYTES_MAX => {
                let reason =
                    "its pattern gives up, as it does on a very long run of blanks".to_owned();
                return Err(EncodeError::Failed(reason));
            }
            Some(Err(NotEncoded::LibraryOnly)) | None => {}
        }
        let encoding = self
            .library
            .encode_fast(text, special == SpecialTokens::Kept);
        encoding
            .map(|encoding| match encoding.get_ids() {
                ids if ids.len() > tokens_max => EncodedText::TooMany(ids.len()),
                ids => EncodedText::Tokens(ids.to_vec()),
            })
            .map_err(|error| EncodeError::Failed(error.to_string()))
    }

    /// Decodes tokens to text, all at once.
    pub fn decode(&self, tokens: &[TokenId], special: SpecialTokens) -> String {
        // Decoders fail only in their regular expressions; the text is empty then.
        self.library
            .decode(tokens, special == SpecialTokens::Skipped)
            .unwrap_or_default()
    }

    /// Lower bound of a text's tokens; a prompt that cannot fit is refused before it is tokenized.
    pub fn tokens_min(&self, text: &str) -> usize {
        text.len() / self.piece_bytes_max / self.shortening_max
    }

    /// Whether the fast encoder applies. Otherwise the library's record of the origin of each byte
    /// takes a hundred times the text's memory.
    pub fn is_byte_level(&self) -> bool {
        self.byte_level.is_some()
    }

    /// Spelling of a token in the vocabulary; `None` for ids without one, and for special tokens if
    /// they are skipped.
    pub fn piece(&self, token: TokenId, special: SpecialTokens) -> Option<String> {
        let piece = self.library.id_to_token(token)?;
        let skipped = special == SpecialTokens::Skipped
            && self.library.get_added_vocabulary().is_special_token(&piece);
        (!skipped).then_some(piece)
    }

    /// The token as grammars see it; special tokens are no part of a text.
    pub(crate) fn grammar_bytes(&self, token: TokenId) -> TokenBytes {
        match self.piece(token, SpecialTokens::Kept) {
            Some(piece) if self.library.get_added_vocabulary().is_special_token(&piece) => {
                TokenBytes::Special(piece)
            }
            Some(piece) => TokenBytes::Text(self.spelling.bytes(&piece)),
            None => TokenBytes::Text(Vec::new()),
        }
    }

    /// Added tokens that may be marks of a format, special or not: the tokenizer makes one token of
    /// their texts wherever these are.
    pub(crate) fn mark_tokens(&self) -> MarkTokens {
        let added = self.library.get_added_vocabulary();
        let tokens = added.get_added_tokens_decoder().iter();
        let tokens = tokens.filter(|(token, _)| **token < self.vocabulary_count);
        let marks = tokens.map(|(token, added)| (added.content.clone(), *token));
        marks
            .filter(|(mark, _)| mark.len() > 1 && mark.starts_with(['<', '[', '｜']))
            .collect()
    }

    /// Bytes that a token stands for within a text.
    pub fn bytes(&self, token: TokenId) -> Vec<u8> {
        match self.piece(token, SpecialTokens::Kept) {
            Some(piece) => self.spelling.bytes(&piece),
            None => Vec::new(),
        }
    }
}

/// Reads the contents of tokenizer.json.
pub(crate) fn load_tokenizer(text: &str) -> Result<Tokenizer, ModelError> {
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
