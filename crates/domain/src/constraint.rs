//! Constraints on the text of an output.

use serde::{Deserialize, Serialize};
use std::fmt;
use std::sync::Arc;

/// A constraint on the output of a sequence. It is part of the sampling parameters: only tokens
/// that keep to it are drawn. It has no state: whoever continues the sequence replays its output.
#[derive(Clone, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
pub struct Constraint {
    /// The texts that are allowed.
    pub grammar: Grammar,
    /// When the output may end.
    pub end: ConstraintEnd,
}

/// When an end token of the model is among the allowed tokens. (Stop tokens of a request are tokens
/// as others: they are allowed where the grammar has their text.)
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
pub enum ConstraintEnd {
    /// Wherever the output so far is a whole text of the grammar.
    Allowed,
    /// Only where nothing else is allowed: the request ignores end tokens.
    Forced,
}

/// A set of texts, as a client described it.
#[derive(Clone, PartialEq, Eq, Hash, Serialize, Deserialize)]
pub enum Grammar {
    /// The JSON texts that a JSON Schema accepts; the schema as JSON text.
    JsonSchema(Arc<str>),
    /// The texts that a regular expression matches as a whole, in the syntax of Rust's `regex`.
    Regex(Arc<str>),
    /// One of these texts; never empty.
    Choice(Arc<[String]>),
    /// A context-free grammar in Lark's syntax, with the rule `start`.
    Lark(Arc<str>),
}

/// Limit of a grammar's bytes ([`Grammar::bytes`]): each flight holds it.
pub const GRAMMAR_BYTES_MAX: usize = 128 << 10;

impl Grammar {
    /// The length of the description, in bytes.
    pub fn bytes(&self) -> usize {
        match self {
            Self::JsonSchema(text) | Self::Regex(text) | Self::Lark(text) => text.len(),
            Self::Choice(texts) => texts.iter().map(|text| text.len() + 1).sum(),
        }
    }

    /// Name of the kind, for people.
    pub fn kind(&self) -> &'static str {
        match self {
            Self::JsonSchema(_) => "JSON schema",
            Self::Regex(_) => "regular expression",
            Self::Choice(_) => "choice",
            Self::Lark(_) => "grammar",
        }
    }
}

/// Without the text, which belongs to the client and to no log.
impl fmt::Debug for Grammar {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{} of {} bytes", self.kind(), self.bytes())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_text_of_a_grammar_is_not_in_its_debug_output() {
        let constraint = Constraint {
            grammar: Grammar::Choice(Arc::from(["secret".to_owned()])),
            end: ConstraintEnd::Allowed,
        };
        let shown = format!("{constraint:?}");
        assert!(shown.contains("choice of 7 bytes"), "{shown}");
        assert!(!shown.contains("secret"), "{shown}");
    }
}
