//! Requests for one vector instead of tokens: embeddings, and the scores of rerankers.

use crate::TokenId;
use serde::{Deserialize, Serialize};
use std::sync::Arc;

/// The vector that a prefill-only request asks for. All of its kinds come from the hidden states
/// after the model's final norm.
#[derive(Clone, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
pub enum Pooling {
    /// The hidden state of the last token, `(hidden)`.
    LastToken,
    /// The mean of the hidden states of all tokens, `(hidden)`.
    Mean,
    /// The hidden state of the first token, `(hidden)`; sentence-transformers call it CLS.
    FirstToken,
    /// The logits of these tokens after the last one, in this order.
    Logits(Arc<[TokenId]>),
}

/// Limit of the tokens of [`Pooling::Logits`]: a reranker reads two.
pub const POOLED_LOGITS_MAX: usize = 64;

/// Token of the one emission of a pooled request. It stands for the vector that comes with it, in
/// [`crate::PromptFacts::pooled`], so that order, fences and counts are those of a request for one
/// token; no client sees it.
pub const POOLED_TOKEN: TokenId = 0;

impl Pooling {
    /// Whether tokens `position..position + len` of a prompt of `tokens` tokens contribute.
    pub fn reads(&self, position: u32, len: u32, tokens: u32) -> bool {
        match self {
            Self::LastToken | Self::Logits(_) => position + len == tokens,
            Self::Mean => true,
            Self::FirstToken => position == 0,
        }
    }

    /// Whether only the last token's hidden state counts, so that the KV of the tokens before it
    /// may come from a cache.
    pub fn reads_last_token_alone(&self) -> bool {
        match self {
            Self::LastToken | Self::Logits(_) => true,
            Self::Mean | Self::FirstToken => false,
        }
    }

    /// Length of the vector, for a model whose hidden states have `hidden` elements.
    pub fn width(&self, hidden: usize) -> usize {
        match self {
            Self::LastToken | Self::Mean | Self::FirstToken => hidden,
            Self::Logits(tokens) => tokens.len(),
        }
    }

    /// The vector of a prompt of `tokens` tokens, from what the engine gave for all of them: the
    /// values, or their sum over the tokens.
    pub fn finish(&self, values: &[f64], tokens: u32) -> Arc<[f32]> {
        let count = match self {
            Self::Mean => f64::from(tokens.max(1)),
            Self::LastToken | Self::FirstToken | Self::Logits(_) => 1.0,
        };
        values.iter().map(|value| (value / count) as f32).collect()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn each_kind_reads_its_own_tokens() {
        let logits = Pooling::Logits([1].into());
        let parts = [(0, 3), (3, 4), (7, 3)];
        let reads = |pooling: &Pooling| parts.map(|(at, len)| pooling.reads(at, len, 10));
        assert_eq!(reads(&Pooling::LastToken), [false, false, true]);
        assert_eq!(reads(&logits), [false, false, true]);
        assert_eq!(reads(&Pooling::FirstToken), [true, false, false]);
        assert_eq!(reads(&Pooling::Mean), [true; 3]);
    }

    #[test]
    fn a_mean_is_the_sum_over_the_number_of_tokens() {
        let values = [3.0, -6.0];
        assert_eq!(*Pooling::Mean.finish(&values, 3), [1.0, -2.0]);
        assert_eq!(*Pooling::LastToken.finish(&values, 3), [3.0, -6.0]);
    }
}
