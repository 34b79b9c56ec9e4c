//! Grammars over the tokens of a model's tokenizer.
//!
//! Owns: the vocabulary that grammars see, and the tokens of forced bytes. Never: compiles a
//! grammar itself (see `cleave_grammar`). Invariant: the bytes of a text's tokens, joined, are the
//! text.

use crate::model_text::ModelText;
use crate::tokenizer::SpecialTokens;
use cleave_domain::TokenId;
use cleave_grammar::{ForcedPart, GrammarCompiler, GrammarError, GrammarMatcher, Vocabulary};
use std::sync::Arc;

impl ModelText {
    /// The compiler of constraints for this model. The first call makes it, which takes a part of a
    /// second for a large vocabulary; others wait for it.
    ///
    /// # Errors
    /// `NoEndToken`, or `Failed` if the vocabulary is unusable.
    pub fn grammars(&self) -> Result<&GrammarCompiler, GrammarError> {
        let made = self.grammars_or_made(|| {
            let tokens = 0..self.vocabulary_count();
            GrammarCompiler::new(Vocabulary {
                tokens: tokens
                    .map(|token| self.tokenizer().grammar_bytes(token))
                    .collect(),
                end_tokens: Arc::clone(self.eos()),
            })
        });
        made.as_ref().map_err(Clone::clone)
    }

    /// Tokens that the grammar forces next, as the model would probably divide them. The last token
    /// of the forced text is left out unless a special token follows: it may be longer with what
    /// follows it.
    pub fn forced_tokens(&self, matcher: &mut GrammarMatcher) -> Vec<TokenId> {
        let mut tokens = Vec::new();
        let mut forced = matcher.forced().into_iter().peekable();
        while let Some(part) = forced.next() {
            match part {
                ForcedPart::Token(token) => tokens.push(token),
                ForcedPart::Text(bytes) => {
                    tokens.extend(self.tokens_of(&bytes));
                    if forced.peek().is_none() {
                        tokens.pop();
                    }
                }
            }
        }
        tokens
    }

    /// Tokens of a forced text.
    fn tokens_of(&self, bytes: &[u8]) -> Vec<TokenId> {
        // A character may be forced in part.
        let text = String::from_utf8_lossy(bytes);
        let text = text.trim_end_matches(char::REPLACEMENT_CHARACTER);
        let encoded = self.tokenizer().encode(text, SpecialTokens::Skipped);
        let encoded = encoded
            .ok()
            .filter(|tokens| self.bytes_of(tokens) == text.as_bytes());
        match (encoded, self.grammars()) {
            (Some(tokens), _) => tokens,
            // Tokenizers that add a space in front of a text divide it otherwise than within one.
            (None, Ok(compiler)) => compiler.longest_tokens(text.as_bytes()),
            (None, Err(_)) => Vec::new(),
        }
    }

    fn bytes_of(&self, tokens: &[TokenId]) -> Vec<u8> {
        let bytes = tokens.iter().map(|token| self.tokenizer().bytes(*token));
        bytes.collect::<Vec<_>>().concat()
    }
}

/// Special tokens that may be marks of a format, by their texts.
#[derive(Clone, Debug, Default)]
pub(crate) struct MarkTokens(Vec<(String, TokenId)>);

impl MarkTokens {
    /// The longest token that a text begins with, and the length of its text.
    pub(crate) fn at_start(&self, text: &str) -> Option<(TokenId, usize)> {
        let fits = self.0.iter().filter(|(mark, _)| text.starts_with(mark));
        let longest = fits.max_by_key(|(mark, _)| mark.len());
        longest.map(|(mark, token)| (*token, mark.len()))
    }

    /// Whether a text is one token.
    pub(crate) fn has(&self, text: &str) -> bool {
        self.0.iter().any(|(mark, _)| mark == text)
    }
}

impl FromIterator<(String, TokenId)> for MarkTokens {
    fn from_iter<I: IntoIterator<Item = (String, TokenId)>>(tokens: I) -> Self {
        Self(tokens.into_iter().collect())
    }
}

#[cfg(test)]
mod tests;
