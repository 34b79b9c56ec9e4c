//! The KV of a token, as a hash of all tokens up to it.

use cleave_domain::{SplitMix64, TokenId};

/// Stands for attention over a sequence's first tokens: their hash.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
pub struct KvHash(pub u64);

impl KvHash {
    /// The cell of `token` after the sequence that ends in `self`.
    #[inline]
    pub fn extend(self, token: TokenId) -> Self {
        let token = SplitMix64::finalize(u64::from(token) + 1);
        Self(SplitMix64::finalize(self.0.rotate_left(17) ^ token))
    }

    /// The cell of the last of `tokens` after that sequence.
    pub fn extend_all(self, tokens: &[TokenId]) -> Self {
        tokens.iter().fold(self, |last, token| last.extend(*token))
    }
}
