//! Sampling defaults from generation_config.json.
//!
//! Owns: the file's fields.
//! Never: applies the defaults; the API does, to each request.
//! Invariant: an absent file sets no default, a damaged one is an error.

use super::CheckpointError;
use super::fields::ConfigFields;
use cleave_domain::TokenId;
use std::path::Path;

/// The model makers' sampling defaults; `None` where the file has no value.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct GenerationConfig {
    /// The token that begins a text.
    pub bos: Option<TokenId>,
    /// Tokens that end a text; they override config.json's.
    pub eos: Option<Vec<TokenId>>,
    /// Whether to sample; false means greedy.
    pub do_sample: Option<bool>,
    /// Sampling temperature: divides the logits.
    pub temperature: Option<f32>,
    /// Nucleus sampling: the share of probability that is kept.
    pub top_p: Option<f32>,
    /// Number of most likely tokens that are kept.
    pub top_k: Option<u32>,
    /// Least probability relative to the most likely token's.
    pub min_p: Option<f32>,
    /// Repetition penalty as in CTRL (Keskar and others, 2019).
    pub repetition_penalty: Option<f32>,
}

impl GenerationConfig {
    /// Reads the file of a model with a vocabulary of this size; an absent file gives no defaults.
    pub(super) fn read(file: &Path, vocab_size: usize) -> Result<Self, CheckpointError> {
        let Some(fields) = ConfigFields::read(file)? else {
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
