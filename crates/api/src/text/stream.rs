//! Detokenization, token by token.
//!
//! Owns: which text is final. Never: decodes the whole again: the cost of a token does not depend
//! on how many came before. Invariant: the texts together are the tokenizer's decoding of all
//! tokens, and none of them ends within a character.
//!
//! One exception, in byte-fallback vocabularies only: there one bad byte spoils the whole run of
//! byte tokens around it. A run is held back until its end for that reason, but only
//! [`RUN_TOKENS_HELD`] tokens of it: scripts that the vocabulary lacks are spelt in bytes
//! throughout and would not be streamed at all. What has gone out of a longer run stays.

use crate::model::{ModelText, Special, Spelling, fallback_byte};
use cleave_domain::TokenId;
use std::sync::Arc;

/// Byte tokens held back at most: eight Chinese characters.
const RUN_TOKENS_HELD: usize = 24;

/// Turns tokens into text.
pub struct TextStream {
    model: Arc<ModelText>,
    special: Special,
    /// Stands before `held` when decoding: the last token that went out.
    before: Option<TokenId>,
    held: Vec<TokenId>,
    bytes: Vec<u8>,
    run: Run,
}

/// Whether text came before.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Start {
    /// The first token begins a text; some tokenizers drop its leading space.
    Fresh,
    /// The first token continues a text: its leading space counts.
    Continued,
}

/// The run of byte tokens that we are in.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Run {
    /// None, or all of it held.
    Held,
    /// Too long to hold: characters go out as they are complete.
    Trusted,
    /// Not UTF-8: each byte is a replacement character.
    Damaged,
}

impl TextStream {
    /// A new text.
    pub fn new(model: Arc<ModelText>, special: Special, start: Start) -> Self {
        let before = match start {
            Start::Fresh => None,
            Start::Continued => model.neutral(),
        };
        Self {
            model,
            special,
            before,
            held: Vec::new(),
            bytes: Vec::new(),
            run: Run::Held,
        }
    }

    /// Takes a token; gives the text that is final now.
    pub fn push(&mut self, token: TokenId) -> String {
        let Some(piece) = self.model.piece(token, self.special) else {
            return String::new();
        };
        match self.model.spelling() {
            Spelling::ByteLevel => {
                self.bytes.extend(self.model.spelling().bytes(&piece));
                complete_lossy(&mut self.bytes)
            }
            Spelling::ByteFallback => match fallback_byte(&piece) {
                Some(byte) => self.push_byte(token, byte),
                None => self.push_words(token),
            },
            Spelling::Words => self.push_words(token),
        }
    }

    /// The end: gives what was held back.
    pub fn finish(&mut self) -> String {
        match self.model.spelling() {
            Spelling::ByteLevel => {
                String::from_utf8_lossy(&std::mem::take(&mut self.bytes)).into_owned()
            }
            Spelling::ByteFallback => self.end_run() + &self.release(),
            Spelling::Words => self.release(),
        }
    }

    /// A token of whole characters: ends a run, and goes out at once.
    fn push_words(&mut self, token: TokenId) -> String {
        let tail = self.end_run();
        self.held.push(token);
        tail + &self.release()
    }

    fn push_byte(&mut self, token: TokenId, byte: u8) -> String {
        self.bytes.push(byte);
        match self.run {
            Run::Damaged => {
                self.bytes.clear();
                char::REPLACEMENT_CHARACTER.to_string()
            }
            Run::Trusted => complete_bytewise(&mut self.bytes),
            Run::Held => {
                self.held.push(token);
                if broken(&self.bytes) {
                    self.run = Run::Damaged;
                    self.before = self.model.neutral();
                    self.bytes.clear();
                    let count = std::mem::take(&mut self.held).len();
                    return char::REPLACEMENT_CHARACTER.to_string().repeat(count);
                }
                if self.held.len() <= RUN_TOKENS_HELD {
                    return String::new();
                }
                self.trust()
            }
        }
    }

    /// Lets the complete characters of a long run go.
    fn trust(&mut self) -> String {
        self.run = Run::Trusted;
        let complete = match std::str::from_utf8(&self.bytes) {
            Ok(text) => text.len(),
            Err(error) => error.valid_up_to(),
        };
        self.bytes.drain(..complete);
        self.held.truncate(complete);
        self.release()
    }

    /// What is left of a trusted run is no character.
    fn end_run(&mut self) -> String {
        let left = match self.run {
            Run::Trusted => self.bytes.len(),
            Run::Held | Run::Damaged => 0,
        };
        self.bytes.clear();
        self.run = Run::Held;
        char::REPLACEMENT_CHARACTER.to_string().repeat(left)
    }

    /// Decodes what is held, as it stands after `before`.
    fn release(&mut self) -> String {
        let Some(&last) = self.held.last() else {
            return String::new();
        };
        let held = std::mem::take(&mut self.held);
        let window: Vec<TokenId> = self.before.into_iter().chain(held).collect();
        let with = self.model.decode(&window, Special::Kept);
        let without = match self.before {
            Some(before) => self.model.decode(&[before], Special::Kept),
            None => String::new(),
        };
        self.before = Some(last);
        // A run that ended before this token would join with bytes that follow.
        if self
            .model
            .piece(last, Special::Kept)
            .as_deref()
            .and_then(fallback_byte)
            .is_some()
        {
            self.before = self.model.neutral();
        }
        match with.strip_prefix(&without) {
            Some(text) => text.to_owned(),
            None => with,
        }
    }
}

/// Takes complete characters out of `bytes`, replacing what cannot become one, and leaves the
/// beginning of a character.
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
                // Valid up to there, by what the error says.
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

/// The same, with one replacement character for each bad byte.
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

/// Whether no continuation can make this UTF-8.
fn broken(bytes: &[u8]) -> bool {
    matches!(std::str::from_utf8(bytes), Err(error) if error.error_len().is_some())
}
