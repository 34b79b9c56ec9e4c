//! A constraint that suites use, of arithmetic instead of a grammar.
//!
//! Owns: the rule: a token leaves the remainder that the output before it asks for. Never: forces a
//! token. Invariant: what it allows depends on the whole output, so that a matcher that missed a
//! token, or saw one twice, allows others.

use super::BuildEngine;
use crate::constraint::{ConstraintError, ConstraintSource, TokenMask, TokenMatcher};
use crate::{Engine, EngineLimits};
use cleave_domain::{Constraint, ConstraintEnd, Grammar, TokenId};
use std::path::Path;
use std::sync::Arc;

/// One of so many tokens is allowed at each place.
const MODULUS: u32 = 3;

/// Builds an engine that enforces the constraint.
pub(super) fn build_enforcing(
    build: BuildEngine<'_>,
    dir: &Path,
    limits: EngineLimits,
) -> Result<Box<dyn Engine>, String> {
    let mut engine = build(dir, limits)?;
    engine.enforce(Arc::new(ResidueRule));
    Ok(engine)
}

/// The constraint, by which a token's remainder follows from the output before it.
pub(super) fn residues() -> Option<Arc<Constraint>> {
    Some(Arc::new(Constraint {
        grammar: Grammar::Lark("residues".into()),
        end: ConstraintEnd::Allowed,
    }))
}

struct ResidueRule;

struct ResidueMatcher {
    /// A hash of the output.
    state: u32,
}

impl ConstraintSource for ResidueRule {
    fn open(
        &self,
        _: &Constraint,
        output: &[TokenId],
    ) -> Result<Box<dyn TokenMatcher>, ConstraintError> {
        let mut matcher = ResidueMatcher { state: 1 };
        for token in output {
            if !matcher.is_next(*token) {
                let reason = format!("token {token} is not allowed");
                return Err(ConstraintError::Broken(reason));
            }
            matcher.push(*token);
        }
        Ok(Box::new(matcher))
    }
}

impl ResidueMatcher {
    fn is_next(&self, token: TokenId) -> bool {
        token % MODULUS == self.state % MODULUS
    }

    fn after(&self, token: TokenId) -> Self {
        let mixed = self.state.wrapping_mul(0x9E37_79B1).wrapping_add(token + 1);
        Self {
            state: mixed ^ (mixed >> 15),
        }
    }
}

impl TokenMatcher for ResidueMatcher {
    fn allow(&mut self, mask: &mut TokenMask) -> Result<(), ConstraintError> {
        for (token, word) in (0..).step_by(32).zip(mask.words_mut()) {
            let bits = (0..32).filter(|bit| self.is_next(token + bit));
            *word = bits.fold(0, |word, bit| word | 1 << bit);
        }
        Ok(())
    }

    fn push(&mut self, token: TokenId) {
        assert!(self.is_next(token), "token {token} was not allowed");
        *self = self.after(token);
    }

    fn valid_prefix(&mut self, tokens: &[TokenId]) -> usize {
        let mut matcher = Self { state: self.state };
        let is_valid = |token: &&TokenId| {
            let is_valid = matcher.is_next(**token);
            matcher = matcher.after(**token);
            is_valid
        };
        tokens.iter().take_while(is_valid).count()
    }

    fn forced(&mut self) -> Vec<TokenId> {
        Vec::new()
    }
}
