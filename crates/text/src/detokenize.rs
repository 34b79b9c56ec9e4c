//! Detokenization, token by token.
//!
//! Owns: the decision which text is final. Never: decodes all tokens again: the cost of a token
//! does not depend on the number before it. Invariant: the texts together equal the tokenizer's
//! decoding of all tokens, and none of them ends within a character.
//!
//! There is one exception, in byte-fallback vocabularies: one invalid byte changes the decoding of
//! the whole run of byte tokens around it. A run is therefore held back until its end, but only up
//! to [`HELD_TOKENS_MAX`] tokens: scripts that the vocabulary lacks are spelled in bytes throughout
//! and would never be streamed. Text of a longer run that was sent is not corrected.

use crate::model_text::ModelText;
use crate::tokenizer::{PieceEncoding, SpecialTokens, fallback_byte};
use cleave_domain::TokenId;
use std::sync::Arc;

/// Limit of byte tokens held back: eight Chinese characters.
const HELD_TOKENS_MAX: usize = 24;

/// The text of one sequence, from its tokens.
pub struct TextStream {
    model: Arc<ModelText>,
    special: SpecialTokens,
    /// Special tokens that are text although the others are skipped.
    shown: Box<[TokenId]>,
    /// The last token that was released; decoded together with `held` as its context.
    context_token: Option<TokenId>,
    held: Vec<TokenId>,
    bytes: Vec<u8>,
    run: ByteRun,
}

/// Whether text precedes the first token.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum TextStart {
    /// The first token begins a text; some tokenizers drop its leading space.
    Fresh,
    /// The first token continues a text and keeps its leading space.
    Continued,
}

/// State of the current run of byte tokens.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum ByteRun {
    /// There is no run, or all of it is held.
    Held,
    /// The run is too long to hold; its characters are sent when they are complete.
    Streaming,
    /// The run is not UTF-8; each byte becomes a replacement character.
    Damaged,
}

impl TextStream {
    pub fn new(model: Arc<ModelText>, special: SpecialTokens, start: TextStart) -> Self {
        let before = match start {
            TextStart::Fresh => None,
            TextStart::Continued => model.tokenizer().letter_token(),
        };
        Self {
            model,
            special,
            shown: Box::default(),
            context_token: before,
            held: Vec::new(),
            bytes: Vec::new(),
            run: ByteRun::Held,
        }
    }

    /// Shows these tokens even if special ones are skipped.
    pub fn showing(self, shown: Box<[TokenId]>) -> Self {
        Self { shown, ..self }
    }

    /// Takes a token; returns the text that is now final.
    pub fn push(&mut self, token: TokenId) -> String {
        let special = if self.shown.contains(&token) {
            SpecialTokens::Kept
        } else {
            self.special
        };
        let Some(piece) = self.model.tokenizer().piece(token, special) else {
            return String::new();
        };
        match self.model.tokenizer().spelling() {
            PieceEncoding::ByteLevel => {
                self.bytes
                    .extend(self.model.tokenizer().spelling().bytes(&piece));
                complete_lossy(&mut self.bytes)
            }
            PieceEncoding::ByteFallback => match fallback_byte(&piece) {
                Some(byte) => self.push_byte(token, byte),
                None => self.push_words(token),
            },
            PieceEncoding::Words => self.push_words(token),
        }
    }

    /// Ends the text; returns what was held back.
    pub fn finish(&mut self) -> String {
        match self.model.tokenizer().spelling() {
            PieceEncoding::ByteLevel => {
                String::from_utf8_lossy(&std::mem::take(&mut self.bytes)).into_owned()
            }
            PieceEncoding::ByteFallback => self.end_run() + &self.release(),
            PieceEncoding::Words => self.release(),
        }
    }

    /// Takes a token of whole characters, which ends a run and is released at once.
    fn push_words(&mut self, token: TokenId) -> String {
        let tail = self.end_run();
        self.held.push(token);
        tail + &self.release()
    }

    fn push_byte(&mut self, token: TokenId, byte: u8) -> String {
        self.bytes.push(byte);
        match self.run {
            ByteRun::Damaged => {
                self.bytes.clear();
                char::REPLACEMENT_CHARACTER.to_string()
            }
            ByteRun::Streaming => complete_bytewise(&mut self.bytes),
            ByteRun::Held => {
                self.held.push(token);
                if is_broken(&self.bytes) {
                    self.run = ByteRun::Damaged;
                    self.context_token = self.model.tokenizer().letter_token();
                    self.bytes.clear();
                    let count = std::mem::take(&mut self.held).len();
                    return char::REPLACEMENT_CHARACTER.to_string().repeat(count);
                }
                if self.held.len() <= HELD_TOKENS_MAX {
                    return String::new();
                }
                self.start_streaming_run()
            }
        }
    }

    /// Releases the complete characters of a run that became too long to hold.
    fn start_streaming_run(&mut self) -> String {
        self.run = ByteRun::Streaming;
        let complete = match std::str::from_utf8(&self.bytes) {
            Ok(text) => text.len(),
            Err(error) => error.valid_up_to(),
        };
        self.bytes.drain(..complete);
        self.held.truncate(complete);
        self.release()
    }

    /// Ends a run. The bytes left of a streamed run are no character.
    fn end_run(&mut self) -> String {
        let left = match self.run {
            ByteRun::Streaming => self.bytes.len(),
            ByteRun::Held | ByteRun::Damaged => 0,
        };
        self.bytes.clear();
        self.run = ByteRun::Held;
        char::REPLACEMENT_CHARACTER.to_string().repeat(left)
    }

    /// Decodes the held tokens in the context of `before`.
    fn release(&mut self) -> String {
        let Some(&last) = self.held.last() else {
            return String::new();
        };
        let held = std::mem::take(&mut self.held);
        let window: Vec<TokenId> = self.context_token.into_iter().chain(held).collect();
        let with = self.model.tokenizer().decode(&window, SpecialTokens::Kept);
        let without = match self.context_token {
            Some(before) => self
                .model
                .tokenizer()
                .decode(&[before], SpecialTokens::Kept),
            None => String::new(),
        };
        self.context_token = Some(last);
        // A byte token as context would join with the bytes that follow.
        if self
            .model
            .tokenizer()
            .piece(last, SpecialTokens::Kept)
            .as_deref()
            .and_then(fallback_byte)
            .is_some()
        {
            self.context_token = self.model.tokenizer().letter_token();
        }
        match with.strip_prefix(&without) {
            Some(text) => text.to_owned(),
            None => with,
        }
    }
}

/// Removes complete characters from `bytes`, replaces invalid ones, and leaves an incomplete
/// character.
fn complete_lossy(bytes: &mut Vec<u8>) -> String {
    let mut out = String::new();
    let mut rest = bytes.as_slice();
    loop {
        match std::str::from_utf8(rest) {
            Ok(text) => {
                out.push_str(text);
                rest = &[];
                break;
            }
            Err(error) => {
                let (good, bad) = rest.split_at(error.valid_up_to());
                // The error guarantees that this part is valid.
                out.push_str(&String::from_utf8_lossy(good));
                rest = bad;
                let Some(length) = error.error_len() else {
                    break;
                };
                out.push(char::REPLACEMENT_CHARACTER);
                rest = &rest[length..];
            }
        }
    }
    let rest = rest.len();
    bytes.drain(..bytes.len() - rest);
    out
}

/// As [`complete_lossy`], with one replacement character for each invalid byte.
fn complete_bytewise(bytes: &mut Vec<u8>) -> String {
    let mut out = String::new();
    while !bytes.is_empty() {
        let (good, bad) = match std::str::from_utf8(bytes) {
            Ok(text) => (text.len(), 0),
            Err(error) => (error.valid_up_to(), error.error_len().unwrap_or(0)),
        };
        out.push_str(&String::from_utf8_lossy(&bytes[..good]));
        out.extend(std::iter::repeat_n(char::REPLACEMENT_CHARACTER, bad));
        bytes.drain(..good + bad);
        if bad == 0 {
            break;
        }
    }
    out
}

/// Whether no continuation makes these bytes UTF-8.
fn is_broken(bytes: &[u8]) -> bool {
    matches!(std::str::from_utf8(bytes), Err(error) if error.error_len().is_some())
}
