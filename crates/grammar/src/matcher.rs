//! The state of one output within its grammar.

use crate::compile::GrammarError;
use crate::lexers::SequenceLexers;
use crate::reasons::is_panic;
use cleave_domain::{ConstraintEnd, TokenId};
use llguidance::Matcher;
use llguidance::api::StopReason;
use std::sync::Arc;
use toktrie::{SimpleVob, TokTrie, parse_numeric_token};

/// An output so far, and the tokens that may follow it. Clones share only the state before the
/// output. Sequences of a grammar may share a lexer: it knows more states the more it has read, and
/// the answers are the same; a limit that their common work reaches is judged again without it.
pub struct GrammarMatcher {
    matcher: Matcher,
    /// The lexer, if other sequences may have it too.
    lexer: Option<Arc<Matcher>>,
    /// The state before the output.
    start: Arc<Matcher>,
    output: Vec<TokenId>,
    path: Path,
    end: ConstraintEnd,
    end_tokens: Arc<[TokenId]>,
}

/// How the state came about. The library renews the budget of a step only where it computes a mask,
/// so that tokens consumed without masks, and drafts, spend one budget together. Where it runs out,
/// the state is built again with a mask for each token, as a sequence has it that was never moved
/// and has no drafts: the answer must not depend on either.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Path {
    /// Perhaps with tokens that had no mask, or after drafts.
    Quick,
    /// With a mask for each token so far, also for the next one if `is_masked`; drafts are not
    /// examined. Only a mismatch leaves this path again, so that a sequence builds its state again
    /// once at most.
    Stepwise { is_masked: bool },
}

impl Clone for GrammarMatcher {
    fn clone(&self) -> Self {
        Self {
            matcher: self.matcher.deep_clone(),
            lexer: None,
            start: Arc::clone(&self.start),
            output: self.output.clone(),
            path: self.path,
            end: self.end,
            end_tokens: Arc::clone(&self.end_tokens),
        }
    }
}

impl GrammarMatcher {
    pub(crate) fn new(matcher: Matcher, end: ConstraintEnd, end_tokens: Arc<[TokenId]>) -> Self {
        Self {
            start: Arc::new(matcher.deep_clone()),
            matcher,
            lexer: None,
            output: Vec::new(),
            path: Path::Quick,
            end,
            end_tokens,
        }
    }

    /// A matcher of an output that has not begun, like this one, with one of these lexers.
    pub(crate) fn begin(&self, lexers: &SequenceLexers) -> Self {
        let lexer = lexers.take(&self.start);
        Self {
            matcher: Matcher::clone(&lexer),
            lexer: Some(lexer),
            start: Arc::clone(&self.start),
            output: Vec::new(),
            path: Path::Quick,
            end: self.end,
            end_tokens: Arc::clone(&self.end_tokens),
        }
    }

    #[cfg(test)]
    pub(crate) fn shares_lexer(&self) -> bool {
        self.lexer.is_some()
    }

    /// Writes the tokens that may come next, token `t` as bit `t % 32` of word `t / 32`, `[words]`.
    /// There is at least one.
    ///
    /// # Errors
    /// `TooComplex` or `Failed`; every later call fails too.
    pub fn allow(&mut self, words: &mut [u32]) -> Result<(), GrammarError> {
        let mask = self.repeated_stepwise(Self::mask)?;
        // The library's masks have a bit more than the vocabulary.
        let allowed = mask.as_slice();
        let common = allowed.len().min(words.len());
        words[..common].copy_from_slice(&allowed[..common]);
        words[common..].fill(0);
        if self.end == ConstraintEnd::Forced {
            self.leave_end_out(words);
        }
        Ok(())
    }

    fn mask(&mut self) -> Result<SimpleVob, GrammarError> {
        let mask = self.matcher.compute_mask_or_eos();
        if let Path::Stepwise { is_masked } = &mut self.path {
            *is_masked = true;
        }
        mask.map_err(|error| {
            // The grammar ends here, which it found only now.
            if self.matcher.stop_reason() == StopReason::NoExtensionBias {
                GrammarError::Mismatch
            } else {
                failure(&error.to_string())
            }
        })
    }

    /// Removes the end tokens, unless nothing else is allowed.
    fn leave_end_out(&self, words: &mut [u32]) {
        let bit = |token: TokenId| (token as usize / 32, 1_u32 << (token % 32));
        let ends = self.end_tokens.iter().map(|token| bit(*token));
        let removed: Vec<(usize, u32)> =
            ends.filter(|(word, bit)| words[*word] & bit != 0).collect();
        for (word, bit) in &removed {
            words[*word] &= !bit;
        }
        if words.iter().all(|word| *word == 0) {
            for (word, bit) in removed {
                words[word] |= bit;
            }
        }
    }

    /// Appends a token of the output. After the end of the grammar only end tokens follow, which
    /// change nothing.
    ///
    /// # Errors
    /// `Mismatch` if the token is not allowed, else as [`GrammarMatcher::allow`].
    pub fn consume(&mut self, token: TokenId) -> Result<(), GrammarError> {
        self.repeated_stepwise(|matcher| matcher.advance(token))?;
        self.output.push(token);
        Ok(())
    }

    fn advance(&mut self, token: TokenId) -> Result<(), GrammarError> {
        if self.matcher.is_stopped() && !self.matcher.is_error() {
            let is_end = self.end_tokens.contains(&token);
            return if is_end {
                Ok(())
            } else {
                Err(GrammarError::Mismatch)
            };
        }
        if self.path == (Path::Stepwise { is_masked: false }) {
            self.mask()?;
        }
        match self.matcher.try_consume_tokens(&[token]) {
            Ok(1) => {
                if let Path::Stepwise { is_masked } = &mut self.path {
                    *is_masked = false;
                }
                Ok(())
            }
            Ok(_) => Err(GrammarError::Mismatch),
            Err(error) => Err(failure(&error.to_string())),
        }
    }

    /// The result of an operation; one that fails is repeated once on a state that was built with a
    /// mask for each token.
    fn repeated_stepwise<T>(
        &mut self,
        operation: impl Fn(&mut Self) -> Result<T, GrammarError>,
    ) -> Result<T, GrammarError> {
        let result = operation(self);
        let is_final = match result {
            Ok(_) => true,
            // Another sequence may have broken the lexer.
            Err(GrammarError::Failed) => self.lexer.is_none(),
            Err(_) => self.path != Path::Quick,
        };
        if is_final {
            return result;
        }
        self.matcher = self.start.deep_clone();
        self.lexer = None;
        self.path = Path::Stepwise { is_masked: false };
        for at in 0..self.output.len() {
            self.advance(self.output[at])?;
        }
        let repeated = operation(self);
        if matches!(repeated, Err(GrammarError::Mismatch)) {
            // No limit was reached, and this state has spent nothing on drafts.
            self.path = Path::Quick;
        }
        repeated
    }

    /// How many of these tokens the grammar allows one after the other, or fewer; the output stays
    /// as it is.
    pub fn valid_prefix(&mut self, tokens: &[TokenId]) -> usize {
        if self.path != Path::Quick {
            return 0;
        }
        self.matcher.validate_tokens(tokens).unwrap_or(0)
    }

    /// The text and the special tokens that must follow, as far as they are known; none if there is
    /// a choice.
    pub fn forced(&mut self) -> Vec<ForcedPart> {
        if self.matcher.is_stopped() || self.path != Path::Quick {
            return Vec::new();
        }
        forced_parts(&self.matcher.compute_ff_bytes())
    }
}

/// A part of what must follow an output.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum ForcedPart {
    /// Bytes of a text, perhaps with a part of a character.
    Text(Vec<u8>),
    Token(TokenId),
}

/// Divides forced bytes: the library writes a token as a marker and its id in brackets.
fn forced_parts(mut bytes: &[u8]) -> Vec<ForcedPart> {
    let mut parts = Vec::new();
    while !bytes.is_empty() {
        let mark = bytes
            .iter()
            .position(|byte| *byte == TokTrie::SPECIAL_TOKEN_MARKER);
        let (text, rest) = bytes.split_at(mark.unwrap_or(bytes.len()));
        if !text.is_empty() {
            parts.push(ForcedPart::Text(text.to_vec()));
        }
        let Some(rest) = rest.get(1..) else {
            break;
        };
        let Some((length, token)) = parse_numeric_token(rest) else {
            break;
        };
        parts.push(ForcedPart::Token(token));
        bytes = &rest[length..];
    }
    parts
}

/// The library errs in a step where a limit is reached, or else panics, which it catches.
fn failure(error: &str) -> GrammarError {
    if is_panic(error) {
        GrammarError::Failed
    } else {
        GrammarError::TooComplex
    }
}
