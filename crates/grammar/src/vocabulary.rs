//! The vocabulary of a model as bytes.

use std::sync::Arc;
use toktrie::{TokEnv, TokRxInfo, TokTrie, TokenId, TokenizerEnv};

/// The bytes that a token adds to a text.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum TokenBytes {
    /// Bytes of a text, perhaps a part of a character. Without any, the token is never allowed.
    Text(Vec<u8>),
    /// A special token of this name: no part of a text; a grammar in Lark may name it.
    Special(String),
}

/// Every token of a model, and the tokens that end its outputs.
#[derive(Clone, Debug)]
pub struct Vocabulary {
    /// By token id, as long as the model's logits.
    pub tokens: Vec<TokenBytes>,
    /// At least one, each an index of `tokens`.
    pub end_tokens: Arc<[TokenId]>,
}

/// A longer token is never allowed: the library's trie has a limit of 255 on the depth of a node
/// (vLLM 21204).
const TOKEN_BYTES_MAX: usize = 250;

impl Vocabulary {
    /// The form that the library of grammars takes.
    pub(crate) fn into_environment(self) -> TokEnv {
        let words: Vec<Vec<u8>> = self.tokens.into_iter().map(word).collect();
        let info = TokRxInfo::new(words.len() as u32, self.end_tokens[0]);
        let trie = TokTrie::from(&info, &words).with_eos_tokens(&self.end_tokens);
        Arc::new(ByteEnvironment { trie })
    }
}

/// Bytes of a token as the library spells them: names of special tokens follow a marker that is in
/// no text.
fn word(token: TokenBytes) -> Vec<u8> {
    match token {
        TokenBytes::Text(bytes) if bytes.len() > TOKEN_BYTES_MAX => Vec::new(),
        // The marker itself would make a text of a special token.
        TokenBytes::Text(bytes) if bytes.first() == Some(&TokTrie::SPECIAL_TOKEN_MARKER) => {
            Vec::new()
        }
        TokenBytes::Text(bytes) => bytes,
        TokenBytes::Special(name) => {
            let mut bytes = vec![TokTrie::SPECIAL_TOKEN_MARKER];
            bytes.extend(name.bytes().take(TOKEN_BYTES_MAX));
            bytes
        }
    }
}

/// Allows every division of a text into tokens: the model chooses its own, where a forced one would
/// harm the answer.
struct ByteEnvironment {
    trie: TokTrie,
}

impl TokenizerEnv for ByteEnvironment {
    fn tok_trie(&self) -> &TokTrie {
        &self.trie
    }

    fn tokenize_bytes(&self, text: &[u8]) -> Vec<TokenId> {
        self.trie.greedy_tokenize(text)
    }

    fn tokenize_is_canonical(&self) -> bool {
        false
    }
}
