//! Constraints on the tokens that a slot draws.
//!
//! Owns: the interface to whoever knows grammars, and masks of tokens. Never: reads a grammar.
//! Invariant: a mask that is applied leaves at least one token.

use cleave_domain::{Constraint, TokenId};
use std::fmt;

/// Gives engines the matchers of constraints. Called on the engine's thread, so that whatever takes
/// long is done before.
pub trait ConstraintSource: Send + Sync {
    /// The matcher of an output so far.
    ///
    /// # Errors
    /// If the constraint cannot be enforced, or the output does not keep to it.
    fn open(
        &self,
        constraint: &Constraint,
        output: &[TokenId],
    ) -> Result<Box<dyn TokenMatcher>, ConstraintError>;
}

/// The state of one output within its constraint.
pub trait TokenMatcher: Send {
    /// Allows the tokens that may come next, in a mask that allows none.
    ///
    /// # Errors
    /// If they cannot be found.
    fn allow(&mut self, mask: &mut TokenMask) -> Result<(), ConstraintError>;

    /// Appends a token that was allowed. A matcher that fails here fails in its next
    /// [`TokenMatcher::allow`].
    fn push(&mut self, token: TokenId);

    /// How many of these tokens would be allowed, one after the other.
    fn valid_prefix(&mut self, tokens: &[TokenId]) -> usize;

    /// Tokens that will probably come next, because the constraint leaves no other text. Only
    /// proposals: nothing depends on them.
    fn forced(&mut self) -> Vec<TokenId>;
}

/// A constraint that cannot be enforced, in words without a text of it.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum ConstraintError {
    /// The constraint itself is the reason: every engine would fail here.
    #[error("{0}")]
    Unenforceable(String),
    /// This engine or the output is the reason: another attempt may succeed.
    #[error("{0}")]
    Broken(String),
}

/// A set of tokens, `[ceil(vocab / 32)]` words: token `t` is bit `t % 32` of word `t / 32`.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct TokenMask {
    words: Vec<u32>,
}

impl TokenMask {
    /// A set of none of a vocabulary's tokens.
    pub fn none_of(vocab_size: usize) -> Self {
        let words = vec![0; vocab_size.div_ceil(32)];
        Self { words }
    }

    /// Empties the set, for a vocabulary of this size.
    pub(crate) fn clear(&mut self, vocab_size: usize) {
        self.words.clear();
        self.words.resize(vocab_size.div_ceil(32), 0);
    }

    /// The words, `[ceil(vocab / 32)]`; bits beyond the vocabulary have no effect.
    pub fn words(&self) -> &[u32] {
        &self.words
    }

    /// The words, for a matcher to set; bits beyond the vocabulary have no effect.
    pub fn words_mut(&mut self) -> &mut [u32] {
        &mut self.words
    }

    /// Whether a token is in the set.
    pub fn allows(&self, token: TokenId) -> bool {
        let word = self.words.get(token as usize / 32);
        word.is_some_and(|word| word >> (token % 32) & 1 == 1)
    }

    /// The tokens below `vocab_size` in the set, ascending. Most words of a small set are 0.
    pub(crate) fn tokens(&self, vocab_size: u32) -> impl Iterator<Item = TokenId> {
        let words = (0..vocab_size).step_by(32).zip(&self.words);
        let tokens = words
            .filter(|(_, word)| **word != 0)
            .flat_map(|(first, word)| {
                (first..first + 32).filter(move |at| word >> (at % 32) & 1 == 1)
            });
        tokens.filter(move |token| *token < vocab_size)
    }

    /// Whether none of the tokens below `vocab_size` is in the set.
    pub(crate) fn is_empty(&self, vocab_size: u32) -> bool {
        self.tokens(vocab_size).next().is_none()
    }

    /// Whether all of the set's tokens below `vocab_size` are among these.
    pub(crate) fn is_within(&self, tokens: &[TokenId], vocab_size: u32) -> bool {
        // Most sets have hundreds of others: the first one answers.
        self.tokens(vocab_size).all(|token| tokens.contains(&token))
    }

    /// Sets the logits of all other tokens to −∞, `[vocab]`.
    pub(crate) fn apply(&self, logits: &mut [f32]) {
        for (word, logits) in self.words.iter().zip(logits.chunks_mut(32)) {
            match *word {
                u32::MAX => {}
                0 => logits.fill(f32::NEG_INFINITY),
                word => keep_bits(word, logits),
            }
        }
    }
}

/// For each four bits of a mask, the bits of four logits that stay. A test of each bit would take
/// several times as long as the memory.
const KEPT: [[u32; 4]; 16] = {
    let mut kept = [[0; 4]; 16];
    let mut at = 0;
    while at < 64 {
        if ((at / 4) >> (at % 4)) & 1 == 1 {
            kept[at / 4][at % 4] = u32::MAX;
        }
        at += 1;
    }
    kept
};

/// Sets the logits whose bit is not set to −∞, `[up to 32]`.
fn keep_bits(word: u32, logits: &mut [f32]) {
    let mut bits = word;
    let mut fours = logits.chunks_exact_mut(4);
    for four in &mut fours {
        for (logit, kept) in four.iter_mut().zip(KEPT[bits as usize % 16]) {
            *logit = kept_or_infinite(*logit, kept);
        }
        bits >>= 4;
    }
    for (logit, kept) in fours
        .into_remainder()
        .iter_mut()
        .zip(KEPT[bits as usize % 16])
    {
        *logit = kept_or_infinite(*logit, kept);
    }
}

fn kept_or_infinite(logit: f32, kept: u32) -> f32 {
    f32::from_bits((logit.to_bits() & kept) | (f32::NEG_INFINITY.to_bits() & !kept))
}

/// The constraint of a slot's output, with the tokens that it allows next once these are known.
pub(crate) struct SlotConstraint {
    matcher: Box<dyn TokenMatcher>,
    /// Reused, so that a draw allocates nothing.
    mask: TokenMask,
    /// Whether `mask` is that of the output so far.
    is_mask_known: bool,
}

impl SlotConstraint {
    pub(crate) fn new(matcher: Box<dyn TokenMatcher>) -> Self {
        Self {
            matcher,
            mask: TokenMask::default(),
            is_mask_known: false,
        }
    }

    /// The tokens that are allowed next. They are found once for each place, so that whoever has
    /// time before the draw may ask first.
    pub(crate) fn mask(&mut self, vocab_size: usize) -> Result<&TokenMask, ConstraintError> {
        if !self.is_mask_known {
            self.mask.clear(vocab_size);
            self.matcher.allow(&mut self.mask)?;
            self.is_mask_known = true;
        }
        Ok(&self.mask)
    }

    /// The mask, if it was found for this place.
    pub(crate) fn known_mask(&self) -> Option<&TokenMask> {
        self.is_mask_known.then_some(&self.mask)
    }

    /// Appends a token that was allowed.
    pub(crate) fn push(&mut self, token: TokenId) {
        self.is_mask_known = false;
        self.matcher.push(token);
    }

    pub(crate) fn valid_prefix(&mut self, tokens: &[TokenId]) -> usize {
        self.matcher.valid_prefix(tokens)
    }

    pub(crate) fn forced(&mut self) -> Vec<TokenId> {
        self.matcher.forced()
    }
}

/// The matcher's state is not shown.
impl fmt::Debug for SlotConstraint {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("SlotConstraint")
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn mask(vocab_size: usize, tokens: &[TokenId]) -> TokenMask {
        let mut mask = TokenMask::none_of(vocab_size);
        for token in tokens {
            mask.words_mut()[*token as usize / 32] |= 1 << (token % 32);
        }
        mask
    }

    #[test]
    fn a_mask_leaves_the_logits_of_its_tokens() {
        // Of the third word none, of the last one a part.
        let kept: Vec<TokenId> = [0, 5].into_iter().chain(32..64).chain(96..111).collect();
        let kept = [&kept[..], &[117, 126, 127, 130, 133]].concat();
        let mut logits = vec![1.5; 135];
        mask(135, &kept).apply(&mut logits);
        for (token, logit) in (0..).zip(&logits) {
            let expected = if kept.contains(&token) {
                1.5
            } else {
                f32::NEG_INFINITY
            };
            assert_eq!(*logit, expected, "{token}");
        }
    }

    // Lesson: 46.
    #[test]
    fn tokens_beyond_the_vocabulary_do_not_count() {
        let beyond = mask(70, &[75]);
        assert!(beyond.is_empty(70));
        assert!(!mask(70, &[69]).is_empty(70));
        assert!(beyond.is_within(&[], 70));
        assert_eq!(
            mask(70, &[3, 64, 75]).tokens(70).collect::<Vec<_>>(),
            [3, 64]
        );
        assert!(mask(70, &[3, 64]).is_within(&[64, 9, 3], 70));
        assert!(!mask(70, &[3, 64]).is_within(&[64], 70));
    }
}
