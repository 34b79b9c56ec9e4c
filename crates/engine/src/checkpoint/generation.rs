//! What generation_config.json says.
//!
//! Owns: the file's fields.
//! Never: applies them; whoever takes requests does.
//! Invariant: an absent file says nothing, a damaged one is an error.

use super::CheckpointError;
use super::fields::Fields;
use cleave_domain::TokenId;
use std::path::Path;

/// The makers' sampling defaults; `None` where they do not say.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct GenerationConfig {
    /// The token that begins a text.
    pub bos: Option<TokenId>,
    /// Tokens that end a text; wins over config.json's.
    pub eos: Option<Vec<TokenId>>,
    /// False means greedy.
    pub do_sample: Option<bool>,
    /// Sampling temperature.
    pub temperature: Option<f32>,
    /// Nucleus.
    pub top_p: Option<f32>,
    /// Most likely tokens kept.
    pub top_k: Option<u32>,
    /// Least share of the most likely token.
    pub min_p: Option<f32>,
    /// CTRL's penalty.
    pub repetition_penalty: Option<f32>,
}

impl GenerationConfig {
    /// Reads the file of a model with a vocabulary of this size; an absent one says nothing.
    pub(super) fn read(file: &Path, vocab_size: usize) -> Result<Self, CheckpointError> {
        let Some(fields) = Fields::read(file)? else {
            return Ok(Self::default());
        };
        let number = |name| Ok::<_, CheckpointError>(fields.number(name)?.map(|n| n as f32));
        Ok(Self {
            bos: fields
                .token_ids("bos_token_id", vocab_size, u64::MAX)?
                .and_then(|ids| ids.first().copied()),
            eos: fields.token_ids("eos_token_id", vocab_size, u64::MAX)?,
            do_sample: fields.flag("do_sample")?,
            temperature: number("temperature")?,
            top_p: number("top_p")?,
            top_k: fields.count("top_k", u32::MAX as usize)?.map(|k| k as u32),
            min_p: number("min_p")?,
            repetition_penalty: number("repetition_penalty")?,
        })
    }
}
