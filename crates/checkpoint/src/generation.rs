//! Tokens that begin and end a text, from generation_config.json.
//!
//! Owns: these two fields of the file.
//! Never: reads sampling defaults; the API does, and applies them to each request.
//! Invariant: an absent file sets neither field, a damaged one is an error.

use super::CheckpointError;
use cleave_domain::TokenId;
use std::path::Path;

/// The file's token ids; `None` where the file has no value.
#[derive(Clone, Debug, Default, PartialEq)]
pub(super) struct GenerationConfig {
    /// The token that begins a text.
    pub(super) bos: Option<TokenId>,
    /// Tokens that end a text; they override config.json's.
    pub(super) eos: Option<Vec<TokenId>>,
}

impl GenerationConfig {
    /// Reads the file of a model with a vocabulary of this size; an absent file sets neither field.
    pub(super) fn read(file: &Path, vocab_size: usize) -> Result<Self, CheckpointError> {
        let Some(fields) = crate::config_file::read(file)? else {
            return Ok(Self::default());
        };
        Ok(Self {
            bos: fields
                .token_ids("bos_token_id", vocab_size, u64::MAX)?
                .and_then(|ids| ids.first().copied()),
            eos: fields.token_ids("eos_token_id", vocab_size, u64::MAX)?,
        })
    }
}
