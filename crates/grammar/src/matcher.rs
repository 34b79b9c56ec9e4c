//! The state of one output within its grammar.

use crate::compile::{GrammarError, is_panic};
use cleave_domain::{ConstraintEnd, TokenId};
use llguidance::Matcher;
use llguidance::api::StopReason;
use std::sync::Arc;

/// An output so far, and the tokens that may follow it. Clones share nothing: the work that one
/// sequence caused counts against no other's limits.
pub struct GrammarMatcher {
    matcher: Matcher,
    end: ConstraintEnd,
    end_tokens: Arc<[TokenId]>,
}

impl Clone for GrammarMatcher {
    fn clone(&self) -> Self {
        Self {
            matcher: self.matcher.deep_clone(),
            end: self.end,
            end_tokens: Arc::clone(&self.end_tokens),
        }
    }
}

impl GrammarMatcher {
    pub(crate) fn new(matcher: Matcher, end: ConstraintEnd, end_tokens: Arc<[TokenId]>) -> Self {
        Self {
            matcher,
            end,
            end_tokens,
        }
    }

    /// Writes the tokens that may come next, token `t` as bit `t % 32` of word `t / 32`, `[words]`.
    /// There is at least one.
    ///
    /// # Errors
    /// `TooComplex` or `Failed`; every later call fails too.
    pub fn allow(&mut self, words: &mut [u32]) -> Result<(), GrammarError> {
        let mask = self.matcher.compute_mask_or_eos();
        let mask = match mask {
            Ok(mask) => mask,
            // The grammar ends here, which it found only now.
            Err(_) if self.matcher.stop_reason() == StopReason::NoExtensionBias => {
                return Err(GrammarError::Mismatch);
            }
            Err(error) => return Err(failure(&error.to_string())),
        };
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
        if self.matcher.is_stopped() && !self.matcher.is_error() {
            let is_end = self.end_tokens.contains(&token);
            return if is_end {
                Ok(())
            } else {
                Err(GrammarError::Mismatch)
            };
        }
        match self.matcher.try_consume_tokens(&[token]) {
            Ok(1) => Ok(()),
            Ok(_) => Err(GrammarError::Mismatch),
            Err(error) => Err(failure(&error.to_string())),
        }
    }

    /// How many of these tokens the grammar allows one after the other; the output stays as it is.
    pub fn valid_prefix(&mut self, tokens: &[TokenId]) -> usize {
        self.matcher.validate_tokens(tokens).unwrap_or(0)
    }

    /// The bytes that must follow, as far as they are known; empty if there is a choice.
    pub fn forced_bytes(&mut self) -> Vec<u8> {
        if self.matcher.is_stopped() {
            return Vec::new();
        }
        self.matcher.compute_ff_bytes()
    }
}

/// The library errs in a step where a limit is reached, or else panics, which it catches.
fn failure(error: &str) -> GrammarError {
    if is_panic(error) {
        GrammarError::Failed
    } else {
        GrammarError::TooComplex
    }
}
