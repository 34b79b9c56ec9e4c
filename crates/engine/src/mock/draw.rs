//! The tokens of a mock engine.
//!
//! Owns: the choice of a token: invented, of a script, and among those that a constraint allows.
//! Never: reads a block.
//! Invariant: that of the engine.

use super::MockSlot;
use crate::EngineError;
use crate::constraint::{ConstraintError, TokenMask};
use cleave_domain::{OpenSlot, SampledToken, SlotIndex, TokenId, TokenScores};

pub(super) fn slot_error(slot: SlotIndex, problem: &str) -> EngineError {
    EngineError::Slot(slot, problem.to_owned())
}

impl MockSlot {
    /// Draws the token at `position`.
    ///
    /// # Errors
    /// If the constraint fails, or does not allow what a script says.
    pub(super) fn draw(&mut self, position: u32, vocab_size: u32) -> Result<TokenId, EngineError> {
        let open = &self.open;
        let token = match &mut self.constraint {
            None => scripted_token(self.answer.as_deref(), open, |_| true)
                .unwrap_or_else(|| token(open, position, vocab_size)),
            Some(constraint) => {
                let failed = |error| EngineError::Constraint {
                    slots: vec![open.slot],
                    error,
                };
                let mask = constraint.mask(vocab_size as usize).map_err(failed)?;
                let scripted = constrained_token(self.answer.as_deref(), open, mask, vocab_size)?;
                let token = scripted.or_else(|| allowed_token(open, mask, position, vocab_size));
                let none = || ConstraintError::Unenforceable("it allows no token".to_owned());
                let token = token.ok_or_else(|| failed(none()))?;
                constraint.push(token);
                token
            }
        };
        self.open.output.push(token);
        Ok(token)
    }
}

/// The next token of a script's answer, or behind its end a stop token, one that is allowed if
/// there is one. `None` without a script, and where no stop token may end the answer: it goes on
/// with invented tokens, as a model's would.
fn scripted_token(
    answer: Option<&[TokenId]>,
    open: &OpenSlot,
    is_allowed: impl Fn(TokenId) -> bool,
) -> Option<TokenId> {
    let answer = answer?;
    if let Some(token) = answer.get(open.output.len()) {
        return Some(*token);
    }
    let stops = open.stop_tokens.iter().copied();
    let mut stops = stops.filter(|token| !banned(open).contains(token));
    let first = stops.next();
    let allowed = first
        .into_iter()
        .chain(stops)
        .find(|token| is_allowed(*token));
    allowed.or(first)
}

/// The next token of a script's answer, or its end where a constraint allows nothing else.
///
/// # Errors
/// If the constraint allows other tokens only.
fn constrained_token(
    answer: Option<&[TokenId]>,
    open: &OpenSlot,
    mask: &TokenMask,
    vocab_size: u32,
) -> Result<Option<TokenId>, EngineError> {
    let scripted = scripted_token(answer, open, |token| mask.allows(token));
    if scripted.is_none_or(|token| mask.allows(token)) {
        return Ok(scripted);
    }
    let stops = &open.stop_tokens;
    let end = stops.iter().find(|token| mask.allows(**token)).copied();
    let end = end.filter(|_| mask.is_within(stops, vocab_size));
    let problem = "the script's answer is not one that the request's constraint allows";
    end.map(Some).ok_or_else(|| slot_error(open.slot, problem))
}

/// The token at `position` among those that a constraint allows; stop tokens that are banned only
/// where nothing else is allowed.
fn allowed_token(
    open: &OpenSlot,
    mask: &TokenMask,
    position: u32,
    vocab_size: u32,
) -> Option<TokenId> {
    let all: Vec<TokenId> = mask.tokens(vocab_size).collect();
    let banned = banned(open);
    let mut unbanned = all.clone();
    unbanned.retain(|token| !banned.contains(token));
    let choice = if unbanned.is_empty() { all } else { unbanned };
    let throw = mix(open.sampling.seed ^ mix(u64::from(position) + 1));
    let place = throw.checked_rem(choice.len() as u64)?;
    choice.get(place as usize).copied()
}

/// Tokens that may not be drawn yet.
fn banned(open: &OpenSlot) -> &[TokenId] {
    if open.output.len() < open.min_tokens as usize {
        &open.stop_tokens
    } else {
        &[]
    }
}

/// The token at `position`: the first of a chain of hashes that is not banned.
fn token(open: &OpenSlot, position: u32, vocab_size: u32) -> TokenId {
    let banned = banned(open);
    let mut throw = mix(open.sampling.seed ^ mix(u64::from(position) + 1));
    // If the whole vocabulary is banned there is nothing to draw, and any token will do.
    for _ in 0..64 {
        let token = (throw % u64::from(vocab_size.max(1))) as TokenId;
        if !banned.contains(&token) {
            return token;
        }
        throw = mix(throw);
    }
    0
}

/// A drawn token with the scores of a flat distribution: all logits are 0.
pub(super) fn sampled(token: TokenId, top: Option<u32>, vocab_size: u32) -> SampledToken {
    let scores = top.map(|top| TokenScores {
        normalizer: (vocab_size.max(1) as f32).ln(),
        chosen: 0.0,
        top: (0..top.min(vocab_size)).map(|token| (token, 0.0)).collect(),
    });
    SampledToken { token, scores }
}

pub(super) fn mix(value: u64) -> u64 {
    cleave_domain::SplitMix64::hash(value)
}
