//! Rules by which a device draws tokens.
//!
//! Owns: the rule of one row. Never: draws.
//! Invariant: a draw depends on its rule, its mask and the logits only.

use crate::constraint::TokenMask;
use cleave_domain::TokenId;

/// Rule of one row's draw, see [`Ops::queue_draw`](super::Ops::queue_draw).
#[derive(Clone, Debug, PartialEq)]
pub struct DrawRule {
    /// Uniform random number below 2^53, a function of seed and position.
    pub random_bits: u64,
    /// `1 / temperature`; 0 takes the most likely token.
    pub inverse_temperature: f32,
    /// Number of most likely tokens that are kept; 0 keeps all.
    pub top_k: u32,
    /// Share of the probability that the kept tokens reach, in parts of 2^53; 2^53 keeps all.
    pub top_p: u64,
    /// Least probability relative to the most likely token's; 0 keeps all.
    pub min_p: f32,
    /// Greatest distance of a logit from the largest one, in standard deviations of all logits; 0
    /// keeps all.
    pub top_n_sigma: f32,
    /// Changes of logits, applied first; sorted by token, several of one token in the order of
    /// application.
    pub edits: Vec<LogitEdit>,
}

impl DrawRule {
    /// Takes the most likely token of the unchanged logits.
    pub fn greedy() -> Self {
        Self {
            random_bits: 0,
            inverse_temperature: 0.0,
            top_k: 0,
            top_p: 1 << 53,
            min_p: 0.0,
            top_n_sigma: 0.0,
            edits: Vec::new(),
        }
    }
}

/// The draw of a row whose tokens are limited, see
/// [`Ops::queue_masked_draw`](super::Ops::queue_masked_draw).
#[derive(Debug)]
pub struct MaskedDraw<'a> {
    /// Row of the last [`Ops::queue_draw`](super::Ops::queue_draw); it has no rule there.
    pub row: u32,
    /// The rule, applied to the logits that the mask leaves.
    pub rule: DrawRule,
    /// The tokens that may be drawn; at least one is in the vocabulary.
    pub mask: &'a TokenMask,
}

/// A change of one token's logit.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct LogitEdit {
    /// Token whose logit changes; one beyond the vocabulary has no effect.
    pub token: TokenId,
    /// Change that the logit gets.
    pub change: LogitChange,
}

/// Change of a logit, see [`LogitEdit`].
#[derive(Clone, Copy, Debug, PartialEq)]
pub enum LogitChange {
    /// Adds a bias to the logit.
    Add(f32),
    /// Makes the token impossible.
    Ban,
    /// Divides a positive logit by `repetition` and multiplies a negative one with it, then
    /// subtracts `frequency`, then `presence`.
    Penalize {
        /// Repetition penalty; 1 changes nothing.
        repetition: f32,
        /// Frequency penalty times the token's count in the output.
        frequency: f32,
        /// Presence penalty; 0 for a token that is not in the output.
        presence: f32,
    },
}

impl LogitChange {
    /// The logit after the change.
    pub fn apply(self, logit: f32) -> f32 {
        match self {
            Self::Add(bias) => logit + bias,
            Self::Ban => f32::NEG_INFINITY,
            Self::Penalize {
                repetition,
                frequency,
                presence,
            } => {
                let scaled = if logit > 0.0 {
                    logit / repetition
                } else {
                    logit * repetition
                };
                scaled - frequency - presence
            }
        }
    }
}
