//! Grammars over the tokens of a model's tokenizer.
//!
//! Owns: the vocabulary that grammars see, and the tokens of forced bytes. Never: compiles a
//! grammar itself (see `cleave_grammar`). Invariant: the bytes of a text's tokens, joined, are the
//! text.

use crate::model_text::ModelText;
use crate::tokenizer::SpecialTokens;
use cleave_domain::TokenId;
use cleave_grammar::{GrammarCompiler, GrammarError, GrammarMatcher, Vocabulary};
use std::sync::Arc;

impl ModelText {
    /// The compiler of constraints for this model. The first call makes it, which takes a part of a
    /// second for a large vocabulary; others wait for it.
    ///
    /// # Errors
    /// `NoEndToken`, or `Failed` if the vocabulary is unusable.
    pub fn grammars(&self) -> Result<&GrammarCompiler, GrammarError> {
        let made = self.grammars.get_or_init(|| {
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
    /// of the forced text is left out: it may be longer with what follows it.
    pub fn forced_tokens(&self, matcher: &mut GrammarMatcher) -> Vec<TokenId> {
        let forced = matcher.forced_bytes();
        // A character may be forced in part.
        let text = String::from_utf8_lossy(&forced);
        let text = text.trim_end_matches(char::REPLACEMENT_CHARACTER);
        if text.is_empty() {
            return Vec::new();
        }
        let encoded = self.tokenizer().encode(text, SpecialTokens::Skipped);
        let encoded = encoded
            .ok()
            .filter(|tokens| self.bytes_of(tokens) == text.as_bytes());
        let mut tokens = match (encoded, self.grammars()) {
            (Some(tokens), _) => tokens,
            // Tokenizers that add a space in front of a text divide it otherwise than within one.
            (None, Ok(compiler)) => compiler.longest_tokens(text.as_bytes()),
            (None, Err(_)) => Vec::new(),
        };
        tokens.pop();
        tokens
    }

    fn bytes_of(&self, tokens: &[TokenId]) -> Vec<u8> {
        let bytes = tokens.iter().map(|token| self.tokenizer().bytes(*token));
        bytes.collect::<Vec<_>>().concat()
    }
}

#[cfg(test)]
mod tests;
