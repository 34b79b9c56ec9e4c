//! Text to tokens where a pattern cuts the text and pieces are spelt in bytes (GPT-2, Llama 3, Qwen).
//!
//! Owns: a shorter way to the same tokens. The library keeps for each piece where in the text each of its
//! bytes came from, which costs several times what its tokens do. Never: tokenizes otherwise than the
//! library: its own pattern cuts, its own model merges, and whatever is not of exactly this kind goes all
//! of its way. Invariant: tokens are those that the library gives.

use super::Special;
use super::piece::level_byte;
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

/// What `ByteLevel` cuts with where no `Split` does it before.
const GPT2: &str = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+";
/// Stands for a text to see what is put around one; no token has this id.
const TEXT: TokenId = TokenId::MAX;

/// A tokenizer of this kind.
pub(crate) struct Bytewise {
    cut: SysRegex,
    texts: Texts,
    /// Tokens that are found in the text before anything else, by their first byte, the longest first.
    added: Vec<Vec<(String, TokenId)>>,
    /// How each byte is spelt.
    letters: Vec<char>,
    /// What is put before and after a text; none where that is not so simple.
    around: Option<(Vec<TokenId>, Vec<TokenId>)>,
}

/// Which texts the normalizer leaves as they are.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Texts {
    Every,
    Ascii,
}

/// Pieces of a text that are remembered at most.
const SEEN_MAX: usize = 16 * 1024;
/// And one piece for so many bytes of the text, so that a text of pieces of which no two are alike takes no
/// memory of many times its own.
const SEEN_BYTES: usize = 64;

/// Tokens of one text.
struct Writer<'t> {
    ids: Vec<TokenId>,
    /// More tokens than so many are counted and not kept.
    ids_max: usize,
    /// Tokens that were not kept.
    beyond: usize,
    /// Where the tokens of a piece are that came before: most pieces of a long text have.
    seen: HashMap<&'t str, Range<usize>>,
    seen_max: usize,
    spelt: String,
}

/// The tokens of a text, or how many there are if they are too many.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) enum Encoded {
    Tokens(Vec<TokenId>),
    TooMany(usize),
}

impl Bytewise {
    /// None if the tokenizer is of another kind.
    pub(crate) fn of(tokenizer: &Tokenizer) -> Option<Self> {
        let ModelWrapper::BPE(model) = tokenizer.get_model() else {
            return None;
        };
        let texts = match tokenizer.get_normalizer() {
            None => Texts::Every,
            Some(NormalizerWrapper::NFC(_)) => Texts::Ascii,
            Some(_) => return None,
        };
        let random = model.dropout.is_some_and(|share| share > 0.0);
        let shaped = tokenizer.get_truncation().is_some() || tokenizer.get_padding().is_some();
        if random || shaped || tokenizer.get_encode_special_tokens() {
            return None;
        }
        let cut = SysRegex::new(pattern(tokenizer.get_pre_tokenizer()?)?).ok()?;
        Some(Self {
            cut,
            texts,
            added: added(tokenizer)?,
            letters: letters()?,
            around: around(tokenizer),
        })
    }

    /// The text's tokens, `tokens_max` at most; none where only the library knows them.
    pub(crate) fn encode(
        &self,
        tokenizer: &Tokenizer,
        (text, special): (&str, Special),
        tokens_max: usize,
    ) -> Option<Encoded> {
        if self.texts == Texts::Ascii && !text.is_ascii() {
            return None;
        }
        let mut writer = Writer {
            ids: Vec::with_capacity(tokens_max.min(text.len() / 4)),
            ids_max: tokens_max,
            beyond: 0,
            seen: HashMap::new(),
            seen_max: (text.len() / SEEN_BYTES).clamp(SEEN_BYTES, SEEN_MAX),
            spelt: String::new(),
        };
        let around = match special {
            Special::Kept => Some(self.around.as_ref()?),
            Special::Skipped => None,
        };
        for id in around.into_iter().flat_map(|(before, _)| before) {
            writer.push(*id);
        }
        let mut rest = text;
        while let Some((at, content, id)) = self.first_added(rest) {
            self.pieces(tokenizer, &rest[..at], &mut writer)?;
            writer.push(id);
            rest = &rest[at + content.len()..];
        }
        self.pieces(tokenizer, rest, &mut writer)?;
        for id in around.into_iter().flat_map(|(_, after)| after) {
            writer.push(*id);
        }
        Some(match writer.beyond {
            0 => Encoded::Tokens(writer.ids),
            beyond => Encoded::TooMany(writer.ids.len() + beyond),
        })
    }

    /// The first token in a text that is found before anything else, the longest of those that begin there.
    fn first_added(&self, text: &str) -> Option<(usize, &str, TokenId)> {
        let bytes = text.as_bytes();
        bytes.iter().enumerate().find_map(|(at, first)| {
            let mut here = self.added[usize::from(*first)].iter();
            let (content, id) =
                here.find(|(content, _)| bytes[at..].starts_with(content.as_bytes()))?;
            Some((at, content.as_str(), *id))
        })
    }

    fn pieces<'t>(
        &self,
        tokenizer: &Tokenizer,
        text: &'t str,
        writer: &mut Writer<'t>,
    ) -> Option<()> {
        let mut done = 0;
        for (from, to) in self.cut.find_iter(text) {
            // What lies between two matches is a piece too.
            for piece in [&text[done..from], &text[from..to]] {
                writer.piece(tokenizer, &self.letters, piece)?;
            }
            done = to;
        }
        // A pattern that gives up says so to the library only.
        (done == text.len()).then_some(())
    }
}

impl<'t> Writer<'t> {
    fn piece(&mut self, tokenizer: &Tokenizer, letters: &[char], piece: &'t str) -> Option<()> {
        if piece.is_empty() {
            return Some(());
        }
        if let Some(seen) = self.seen.get(piece).cloned() {
            for at in seen {
                self.push(self.ids[at]);
            }
            return Some(());
        }
        self.spelt.clear();
        let spelt = piece.bytes().map(|byte| letters[usize::from(byte)]);
        self.spelt.extend(spelt);
        let from = self.ids.len();
        let tokens = tokenizer.get_model().tokenize(&self.spelt).ok()?;
        for token in tokens {
            self.push(token.id);
        }
        if self.seen.len() < self.seen_max && self.beyond == 0 {
            self.seen.insert(piece, from..self.ids.len());
        }
        Some(())
    }

    fn push(&mut self, id: TokenId) {
        if self.ids.len() < self.ids_max {
            self.ids.push(id);
        } else {
            self.beyond += 1;
        }
    }
}

/// What cuts the text, if nothing else is done to it but that its bytes are spelt.
fn pattern(pre: &PreTokenizerWrapper) -> Option<&str> {
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

/// None if any token wishes more than to be found.
fn added(tokenizer: &Tokenizer) -> Option<Vec<Vec<(String, TokenId)>>> {
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

fn letters() -> Option<Vec<char>> {
    let letters = ('\0'..'\u{200}').filter_map(|letter| Some((level_byte(letter)?, letter)));
    let mut letters: Vec<(u8, char)> = letters.collect();
    letters.sort_unstable();
    (letters.len() == 256).then(|| letters.into_iter().map(|(_, letter)| letter).collect())
}

fn around(tokenizer: &Tokenizer) -> Option<(Vec<TokenId>, Vec<TokenId>)> {
    let text = Encoding::from_tokens(vec![Token::new(TEXT, String::new(), (0, 0))], 0);
    let whole = tokenizer.post_process(text, None, true).ok()?;
    let mut parts = whole.get_ids().split(|id| *id == TEXT);
    let around = (parts.next()?.to_vec(), parts.next()?.to_vec());
    parts.next().is_none().then_some(around)
}

#[cfg(test)]
mod tests;
