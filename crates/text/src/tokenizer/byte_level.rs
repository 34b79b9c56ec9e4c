//! Tokenization for byte-level BPE tokenizers, whose pattern splits the text and whose pieces are
//! spelled in bytes (GPT-2, Llama 3, Qwen).
//!
//! Owns: a shorter way to the same tokens. The `tokenizers` library stores the origin of each byte
//! of a piece, which costs several times the memory of the tokens. Never: tokenizes differently:
//! the library's own pattern splits, its own model merges, and a tokenizer with any other feature
//! is left to the library. Invariants: the tokens are those of the library; the library gets no
//! piece of more than [`PIECE_BYTES_MAX`] bytes.

use super::SpecialTokens;
use super::piece::byte_of_level_letter;
use cleave_domain::TokenId;
use std::collections::HashMap;
use std::ops::Range;
use tokenizers::pre_tokenizers::byte_level::ByteLevel;
use tokenizers::pre_tokenizers::split::{Split, SplitPattern};
use tokenizers::utils::SysRegex;
use tokenizers::{
    AddedToken, Encoding, Model, ModelWrapper, NormalizerWrapper, PreTokenizerWrapper,
    SplitDelimiterBehavior, Token, Tokenizer,
};
use unicode_normalization_alignments::{UnicodeNormalization, is_nfc};

/// The pattern of `ByteLevel` where no `Split` precedes it.
const GPT2: &str = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+";
/// Placeholder for a text, used to find the tokens around it; no token has this id.
const TEXT_MARK: TokenId = TokenId::MAX;

pub(crate) struct ByteLevelEncoder {
    split_pattern: SysRegex,
    normalizer: TextNormalizer,
    /// Added tokens, which are matched before the pattern splits; by first byte, longest first.
    added: Vec<Vec<(String, TokenId)>>,
    /// Letter that spells each byte.
    byte_letters: Vec<char>,
    /// Tokens before and after a text.
    wrapping_tokens: (Vec<TokenId>, Vec<TokenId>),
}

/// The change that a text between two added tokens gets before the pattern splits it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum TextNormalizer {
    None,
    Nfc,
}

/// Limit of a piece, in bytes. The library takes 121 bytes of memory per byte of a piece to
/// merge it, and no ordinary text has a word or a run of blanks of this length.
pub const PIECE_BYTES_MAX: usize = 128 * 1024;

/// The reason why a text was not encoded.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum NotEncoded {
    /// Only the library knows the tokens.
    LibraryOnly,
    /// A piece has this many bytes, more than [`PIECE_BYTES_MAX`].
    LongPiece(usize),
}

/// Limit of cached pieces of a text.
const CACHED_PIECES_MAX: usize = 16 * 1024;
/// Bytes of the text per cached piece, so that a text of distinct pieces does not take many times
/// its own memory.
const BYTES_PER_CACHED_PIECE: usize = 64;

/// Collects the tokens of one text.
struct TokenWriter {
    ids: Vec<TokenId>,
    /// Limit of tokens kept; further ones are only counted.
    ids_max: usize,
    /// Number of tokens that were not kept.
    excess_count: usize,
    spelt: String,
}

/// Positions of the tokens of earlier pieces: most pieces of a long text repeat.
struct PieceCache<'t> {
    positions: HashMap<&'t str, Range<usize>>,
    count_max: usize,
}

impl PieceCache<'_> {
    fn for_text(bytes: usize) -> Self {
        let count = bytes / BYTES_PER_CACHED_PIECE;
        Self {
            positions: HashMap::new(),
            count_max: count.clamp(BYTES_PER_CACHED_PIECE, CACHED_PIECES_MAX),
        }
    }
}

/// The tokens of a text, or their number if there are too many.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum EncodedText {
    Tokens(Vec<TokenId>),
    /// The text has this many tokens, more than the limit.
    TooMany(usize),
}

impl ByteLevelEncoder {
    /// Returns `None` if the tokenizer has a feature beyond this kind.
    pub(crate) fn of(tokenizer: &Tokenizer) -> Option<Self> {
        let ModelWrapper::BPE(model) = tokenizer.get_model() else {
            return None;
        };
        let normalizer = match tokenizer.get_normalizer() {
            None => TextNormalizer::None,
            Some(NormalizerWrapper::NFC(_)) => TextNormalizer::Nfc,
            Some(_) => return None,
        };
        let random = model.dropout.is_some_and(|share| share > 0.0);
        let shaped = tokenizer.get_truncation().is_some() || tokenizer.get_padding().is_some();
        if random || shaped || tokenizer.get_encode_special_tokens() {
            return None;
        }
        let cut = SysRegex::new(split_pattern(tokenizer.get_pre_tokenizer()?)?).ok()?;
        Some(Self {
            split_pattern: cut,
            normalizer,
            added: added_tokens(tokenizer)?,
            byte_letters: byte_letters()?,
            wrapping_tokens: wrapping_tokens(tokenizer)?,
        })
    }

    /// Tokenizes the text into `tokens_max` tokens at most.
    ///
    /// # Errors
    /// If only the library knows the tokens, or a piece is too long.
    pub(crate) fn encode(
        &self,
        tokenizer: &Tokenizer,
        text: &str,
        special: SpecialTokens,
        tokens_max: usize,
    ) -> Result<EncodedText, NotEncoded> {
        let mut writer = TokenWriter {
            ids: Vec::with_capacity(tokens_max.min(text.len() / 4)),
            ids_max: tokens_max,
            excess_count: 0,
            spelt: String::new(),
        };
        let mut cache = PieceCache::for_text(text.len());
        let around = (special == SpecialTokens::Kept).then_some(&self.wrapping_tokens);
        for id in around.into_iter().flat_map(|(before, _)| before) {
            writer.push(*id);
        }
        // Added tokens split the text first; normalizer and pattern see only the parts between
        // them.
        let mut rest = text;
        while let Some((at, content, id)) = self.first_added(rest) {
            self.part(tokenizer, &rest[..at], &mut cache, &mut writer)?;
            writer.push(id);
            rest = &rest[at + content.len()..];
        }
        self.part(tokenizer, rest, &mut cache, &mut writer)?;
        for id in around.into_iter().flat_map(|(_, after)| after) {
            writer.push(*id);
        }
        Ok(match writer.excess_count {
            0 => EncodedText::Tokens(writer.ids),
            beyond => EncodedText::TooMany(writer.ids.len() + beyond),
        })
    }

    /// Finds the first added token in a text, the longest of those that begin there.
    fn first_added(&self, text: &str) -> Option<(usize, &str, TokenId)> {
        let bytes = text.as_bytes();
        bytes.iter().enumerate().find_map(|(at, first)| {
            let mut here = self.added[usize::from(*first)].iter();
            let (content, id) =
                here.find(|(content, _)| bytes[at..].starts_with(content.as_bytes()))?;
            Some((at, content.as_str(), *id))
        })
    }

    /// Tokenizes a part of the text that has no added token.
    fn part<'t>(
        &self,
        tokenizer: &Tokenizer,
        text: &'t str,
        cache: &mut PieceCache<'t>,
        writer: &mut TokenWriter,
    ) -> Result<(), NotEncoded> {
        if self.normalizer == TextNormalizer::None || text.is_ascii() || is_nfc(text) {
            return self.pieces(tokenizer, text, cache, writer);
        }
        let normalized: String = text.nfc().map(|(character, _)| character).collect();
        let mut cache = PieceCache::for_text(normalized.len());
        self.pieces(tokenizer, &normalized, &mut cache, writer)
    }

    fn pieces<'t>(
        &self,
        tokenizer: &Tokenizer,
        text: &'t str,
        cache: &mut PieceCache<'t>,
        writer: &mut TokenWriter,
    ) -> Result<(), NotEncoded> {
        let mut done = 0;
        for (from, to) in self.split_pattern.find_iter(text) {
            // The text between two matches is a piece, too.
            for piece in [&text[done..from], &text[from..to]] {
                writer.piece(tokenizer, &self.byte_letters, piece, cache)?;
            }
            done = to;
        }
        // A regular expression that gives up reports it only to the library; a gap at the end shows
        // it.
        if done == text.len() {
            Ok(())
        } else {
            Err(NotEncoded::LibraryOnly)
        }
    }
}

impl TokenWriter {
    fn piece<'t>(
        &mut self,
        tokenizer: &Tokenizer,
        letters: &[char],
        piece: &'t str,
        cache: &mut PieceCache<'t>,
    ) -> Result<(), NotEncoded> {
        if piece.is_empty() {
            return Ok(());
        }
        if piece.len() > PIECE_BYTES_MAX {
            return Err(NotEncoded::LongPiece(piece.len()));
        }
        if let Some(cached) = cache.positions.get(piece).cloned() {
            for at in cached {
                self.push(self.ids[at]);
            }
            return Ok(());
        }
        self.spelt.clear();
        let spelt = piece.bytes().map(|byte| letters[usize::from(byte)]);
        self.spelt.extend(spelt);
        let from = self.ids.len();
        let merged = tokenizer.get_model().tokenize(&self.spelt);
        for token in merged.map_err(|_| NotEncoded::LibraryOnly)? {
            self.push(token.id);
        }
        if cache.positions.len() < cache.count_max && self.excess_count == 0 {
            cache.positions.insert(piece, from..self.ids.len());
        }
        Ok(())
    }

    fn push(&mut self, id: TokenId) {
        if self.ids.len() < self.ids_max {
            self.ids.push(id);
        } else {
            self.excess_count += 1;
        }
    }
}

/// Returns the split pattern, if the pre-tokenizer does nothing but split and spell bytes.
fn split_pattern(pre: &PreTokenizerWrapper) -> Option<&str> {
    let spells = |level: &ByteLevel| !level.add_prefix_space;
    match pre {
        PreTokenizerWrapper::ByteLevel(level) => (spells(level) && level.use_regex).then_some(GPT2),
        PreTokenizerWrapper::Sequence(sequence) => match sequence.as_ref() {
            [
                PreTokenizerWrapper::Split(split),
                PreTokenizerWrapper::ByteLevel(level),
            ] => {
                let Split {
                    pattern: SplitPattern::Regex(pattern),
                    behavior: SplitDelimiterBehavior::Isolated,
                    invert: false,
                    ..
                } = split
                else {
                    return None;
                };
                (spells(level) && !level.use_regex).then_some(pattern)
            }
            _ => None,
        },
        _ => None,
    }
}

/// Returns the added tokens by first byte; `None` if any of them has a matching flag.
fn added_tokens(tokenizer: &Tokenizer) -> Option<Vec<Vec<(String, TokenId)>>> {
    let mut by_first = vec![Vec::new(); 256];
    for (id, token) in tokenizer.get_added_tokens_decoder() {
        let AddedToken {
            content,
            single_word: false,
            lstrip: false,
            rstrip: false,
            normalized: false,
            ..
        } = token
        else {
            return None;
        };
        let first = *content.as_bytes().first()?;
        by_first[usize::from(first)].push((content, id));
    }
    for tokens in &mut by_first {
        tokens.sort_unstable_by_key(|(content, _)| std::cmp::Reverse(content.len()));
    }
    Some(by_first)
}

fn byte_letters() -> Option<Vec<char>> {
    let letters =
        ('\0'..'\u{200}').filter_map(|letter| Some((byte_of_level_letter(letter)?, letter)));
    let mut letters: Vec<(u8, char)> = letters.collect();
    letters.sort_unstable();
    (letters.len() == 256).then(|| letters.into_iter().map(|(_, letter)| letter).collect())
}

fn wrapping_tokens(tokenizer: &Tokenizer) -> Option<(Vec<TokenId>, Vec<TokenId>)> {
    let text = Encoding::from_tokens(vec![Token::new(TEXT_MARK, String::new(), (0, 0))], 0);
    let whole = tokenizer.post_process(text, None, true).ok()?;
    let mut parts = whole.get_ids().split(|id| *id == TEXT_MARK);
    let around = (parts.next()?.to_vec(), parts.next()?.to_vec());
    parts.next().is_none().then_some(around)
}

#[cfg(test)]
mod tests;
