//! How a device draws tokens, as plain data.
//!
//! Owns: the rule of one draw. Never: draws.

use cleave_domain::TokenId;

/// How the token after a row is drawn by a device that draws, see [`Ops::draw`](super::Ops::draw).
#[derive(Clone, Debug, PartialEq)]
pub struct DrawRule {
    /// What the draw is made with, below 2^53: of seed and position.
    pub bits: u64,
    /// `1 / temperature`; 0 takes the most likely token.
    pub heat: f32,
    /// Most likely tokens that are kept; 0 keeps all.
    pub top_k: u32,
    /// Share of the weight that the kept tokens reach, in parts of 2^53; that keeps all.
    pub top_p: u64,
    /// Least weight relative to the most likely token's; 0 keeps all.
    pub min_p: f32,
    /// Changes of logits before anything else, by token, several of one token in the order they apply.
    pub edits: Vec<Edit>,
}

/// A change of one token's logit.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Edit {
    /// Whose; beyond the vocabulary it changes nothing.
    pub token: TokenId,
    /// Which.
    pub change: Change,
}

/// See [`Edit`].
#[derive(Clone, Copy, Debug, PartialEq)]
pub enum Change {
    /// Adds a bias.
    Add(f32),
    /// Makes the token impossible.
    Ban,
    /// Divides a positive logit by `repetition` and multiplies another with it, then takes off
    /// `frequency`, then `presence`.
    Penalize {
        /// 1 changes nothing.
        repetition: f32,
        /// The penalty times how often the token is in the output.
        frequency: f32,
        /// 0 for a token that is not in the output.
        presence: f32,
    },
}

impl Change {
    /// The logit after the change.
    pub fn of(self, logit: f32) -> f32 {
        match self {
            Self::Add(bias) => logit + bias,
            Self::Ban => f32::NEG_INFINITY,
            Self::Penalize {
                repetition,
                frequency,
                presence,
            } => {
                let scaled = match logit > 0.0 {
                    true => logit / repetition,
                    false => logit * repetition,
                };
                scaled - frequency - presence
            }
        }
    }
}
