//! Constraints of worlds: which tokens may follow an output, by rules that need no text.
//!
//! Owns: the rules ([`CellConstraint`]), their state along one output ([`CellMatcher`]), and the
//! mistakes that an engine may make with it ([`MatcherFault`]). Never: draws.
//! Invariant: what is allowed depends on the constraint and on each token of the output so far, and
//! nothing else; it is at least one token.

use crate::KvHash;
use cleave_domain::{Constraint, ConstraintEnd, Grammar, SplitMix64, TokenId};
use std::sync::Arc;

/// Tokens that are proposed at once because they are forced.
const FORCED_MAX: usize = 6;

/// A constraint of a world's request, which its engines know how to enforce.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct CellConstraint {
    /// Decides which tokens are allowed where.
    pub seed: u64,
    pub vocab_size: u32,
    /// The token that ends an output; it must be a stop token of the request.
    pub end_token: TokenId,
    /// Tokens of an answer before its end, at most.
    pub answer_tokens: u32,
    /// Reasoning in front of the answer, where any token is allowed.
    pub thinking: Option<CellThinking>,
}

/// Reasoning in front of an answer.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct CellThinking {
    /// The token that ends it.
    pub end_token: TokenId,
    /// Tokens after which only that one is allowed.
    pub budget_tokens: u32,
}

/// The state of one output within its constraint.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub struct CellMatcher {
    constraint: CellConstraint,
    /// A hash of all tokens so far.
    state: KvHash,
    place: MatcherPlace,
    /// Index of the first token that was not allowed.
    strayed_at: Option<u32>,
    tokens: u32,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
enum MatcherPlace {
    Thinking { tokens: u32 },
    Answer { tokens: u32 },
    Ended,
}

/// A mistake in an engine's matchers, to show that a world notices it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum MatcherFault {
    /// A slot that opens behind its first token consumes it twice: once at each end of a hand-off.
    FirstTokenTwice,
    /// A slot that opens behind an output does not replay it: its matcher is a new one.
    NotRebuilt,
    /// A draw uses the mask of the sequence's token before.
    StaleMask,
    /// A free row uses the mask of a row in front of it.
    LeakedMask,
    /// Behind the end of reasoning within the drafts of a step, every token is allowed.
    ThinkingEndMissed,
}

impl CellConstraint {
    /// The constraint as a request has it.
    pub fn constraint(&self) -> Arc<Constraint> {
        let Self {
            seed,
            vocab_size,
            end_token,
            answer_tokens,
            thinking,
        } = *self;
        let mut numbers = vec![seed.to_string()];
        numbers.extend([vocab_size, end_token, answer_tokens].map(|number| number.to_string()));
        if let Some(thinking) = thinking {
            let CellThinking {
                end_token,
                budget_tokens,
            } = thinking;
            numbers.extend([end_token, budget_tokens].map(|number| number.to_string()));
        }
        Arc::new(Constraint {
            grammar: Grammar::Choice(numbers.into()),
            end: ConstraintEnd::Allowed,
        })
    }

    /// Reads what [`CellConstraint::constraint`] wrote; nothing for another constraint.
    pub fn of(constraint: &Constraint) -> Option<Self> {
        let Grammar::Choice(texts) = &constraint.grammar else {
            return None;
        };
        let seed = texts.first()?.parse().ok()?;
        let rest = texts[1..].iter().map(|text| text.parse().ok());
        let rest: Vec<u32> = rest.collect::<Option<_>>()?;
        let (rest, thinking) = match rest[..] {
            [_, _, _] => (rest, None),
            [.., end_token, budget_tokens] if rest.len() == 5 => {
                let thinking = CellThinking {
                    end_token,
                    budget_tokens,
                };
                (rest, Some(thinking))
            }
            _ => return None,
        };
        Some(Self {
            seed,
            vocab_size: rest[0],
            end_token: rest[1],
            answer_tokens: rest[2],
            thinking,
        })
    }

    /// The matcher before the first token of an output.
    pub fn start(&self) -> CellMatcher {
        let place = match self.thinking {
            Some(_) => MatcherPlace::Thinking { tokens: 0 },
            None => MatcherPlace::Answer { tokens: 0 },
        };
        CellMatcher {
            constraint: *self,
            state: KvHash(SplitMix64::finalize(self.seed)),
            place,
            strayed_at: None,
            tokens: 0,
        }
    }

    /// The matcher behind an output.
    pub fn start_after(&self, output: &[TokenId]) -> CellMatcher {
        let mut matcher = self.start();
        output.iter().for_each(|token| matcher.push(*token));
        matcher
    }
}

impl CellMatcher {
    /// The tokens that may come next, ascending.
    pub fn allowed(&self) -> Vec<TokenId> {
        let tokens = 0..self.constraint.vocab_size;
        tokens.filter(|token| self.allows(*token)).collect()
    }

    /// Whether a token may come next.
    pub fn allows(&self, token: TokenId) -> bool {
        let CellConstraint {
            vocab_size,
            end_token,
            answer_tokens,
            thinking,
            ..
        } = self.constraint;
        let draw = self.state.0;
        match (self.place, thinking) {
            (MatcherPlace::Thinking { tokens }, Some(thinking)) => {
                let is_over = tokens >= thinking.budget_tokens;
                token == thinking.end_token || !is_over && token != end_token
            }
            (MatcherPlace::Answer { tokens }, _) if tokens < answer_tokens => {
                let only = ((draw >> 8) % u64::from(vocab_size - 1)) as TokenId;
                let only = only + TokenId::from(only >= end_token);
                if token == end_token {
                    return draw.is_multiple_of(16);
                }
                let is_forced = draw.is_multiple_of(3);
                let own = SplitMix64::finalize(draw ^ u64::from(token));
                token == only || !is_forced && own.is_multiple_of(3)
            }
            _ => token == end_token,
        }
    }

    /// Appends a token. [`CellMatcher::strayed_at`] says whether all were allowed.
    pub fn push(&mut self, token: TokenId) {
        if !self.allows(token) {
            self.strayed_at.get_or_insert(self.tokens);
        }
        self.tokens += 1;
        self.state = self.state.extend(token);
        let CellConstraint {
            end_token,
            thinking,
            ..
        } = self.constraint;
        self.place = match self.place {
            MatcherPlace::Thinking { .. } if thinking.is_some_and(|one| one.end_token == token) => {
                MatcherPlace::Answer { tokens: 0 }
            }
            MatcherPlace::Thinking { tokens } => MatcherPlace::Thinking { tokens: tokens + 1 },
            MatcherPlace::Answer { .. } if token == end_token => MatcherPlace::Ended,
            MatcherPlace::Answer { tokens } => MatcherPlace::Answer { tokens: tokens + 1 },
            MatcherPlace::Ended => MatcherPlace::Ended,
        };
    }

    /// Index of the first token of the output that was not allowed, if there is one.
    pub fn strayed_at(&self) -> Option<u32> {
        self.strayed_at
    }

    /// Whether the output is still in its reasoning.
    pub fn is_thinking(&self) -> bool {
        matches!(self.place, MatcherPlace::Thinking { .. })
    }

    /// How many of these tokens would be allowed, one after the other.
    pub fn valid_prefix(&self, tokens: &[TokenId]) -> usize {
        let mut ahead = self.clone();
        let is_valid = |token: &&TokenId| {
            let is_valid = ahead.allows(**token);
            ahead.push(**token);
            is_valid
        };
        tokens.iter().take_while(is_valid).count()
    }

    /// The tokens that are the only ones allowed next. One proposal in four ends in another token:
    /// nothing may depend on proposals.
    pub fn forced(&self) -> Vec<TokenId> {
        let mut ahead = self.clone();
        let mut tokens = Vec::new();
        while tokens.len() < FORCED_MAX && ahead.place != MatcherPlace::Ended {
            let [only] = ahead.allowed()[..] else {
                break;
            };
            ahead.push(only);
            tokens.push(only);
        }
        let is_spoiled = (self.state.0 >> 32).is_multiple_of(4);
        if let Some(last) = tokens.last_mut().filter(|_| is_spoiled) {
            *last = (*last + 1) % self.constraint.vocab_size;
        }
        tokens
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn constraints() -> impl Iterator<Item = CellConstraint> {
        (0..200).map(|seed| CellConstraint {
            seed,
            vocab_size: 50,
            end_token: 49,
            answer_tokens: 1 + seed as u32 % 20,
            thinking: (seed % 2 == 0).then_some(CellThinking {
                end_token: 7,
                budget_tokens: seed as u32 % 5,
            }),
        })
    }

    #[test]
    fn a_constraint_survives_its_request() {
        for constraint in constraints() {
            assert_eq!(
                CellConstraint::of(&constraint.constraint()),
                Some(constraint)
            );
        }
    }

    #[test]
    fn an_allowed_output_ends_within_its_limits() {
        for constraint in constraints() {
            let mut matcher = constraint.start();
            let mut output = Vec::new();
            while matcher.place != MatcherPlace::Ended {
                let allowed = matcher.allowed();
                assert!(!allowed.is_empty(), "{constraint:?} {output:?}");
                let token = allowed[(constraint.seed as usize + output.len()) % allowed.len()];
                assert_eq!(matcher.valid_prefix(&[token]), 1);
                matcher.push(token);
                output.push(token);
            }
            assert_eq!(matcher.strayed_at(), None);
            assert_eq!(matcher, constraint.start_after(&output));
            let thought = constraint.thinking.map_or(0, |one| one.budget_tokens + 1);
            assert!(output.len() <= (thought + constraint.answer_tokens + 1) as usize);
        }
    }

    #[test]
    fn a_token_twice_is_another_state() {
        let matcher = constraints().nth(1).expect("a constraint").start();
        let token = matcher.allowed()[0];
        let (mut once, mut twice) = (matcher.clone(), matcher);
        once.push(token);
        twice.push(token);
        twice.push(token);
        assert_ne!(once.allowed(), twice.allowed());
    }
}
