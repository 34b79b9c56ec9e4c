//! Sizes of a grammar's expressions, which bound the memory of its compilation.
//!
//! Owns: limits that the library lacks: it counts its work only once it has taken the memory.
//! While it reads the schemas within a grammar, it checks their expressions too.
//! Never: judges whether a grammar is valid; a text that the library refuses may pass here.

use crate::compile::GrammarError;
use cleave_domain::Grammar;

mod lark;
mod regex;
mod schema;

/// Limit of an expression's parts. The library's memory grows with their square: this many optional
/// letters take 70 MB. Several expressions count as one whose square is the sum of theirs.
const PARTS_MAX: u64 = 4000;
/// Limit of the product of repetitions within each other.
const REPETITIONS_MAX: u64 = 100_000;
/// Limit of the remainders of all different `multipleOf`: the library has a state for each, in all
/// 25 MB.
const REMAINDERS_MAX: u64 = 10_000;

/// Refuses a grammar whose compilation would take too much memory.
///
/// # Errors
/// `Refused` with the part that is too large.
pub(crate) fn check(grammar: &Grammar) -> Result<(), GrammarError> {
    let mut size = GrammarSize::default();
    match grammar {
        Grammar::Regex(regex) => size.add_regex(regex),
        Grammar::Lark(lark) => size.add_lark(lark),
        Grammar::JsonSchema(schema) => {
            // The compiler has the error of a text that is no JSON.
            if let Ok(schema) = serde_json::from_str(schema) {
                size.add_schema(&schema);
            }
        }
        Grammar::Choice(_) => {}
    }
    size.check()
}

fn refused(reason: String) -> Result<(), GrammarError> {
    Err(GrammarError::Refused(reason))
}

/// Sizes of all parts of a grammar.
#[derive(Default)]
struct GrammarSize {
    /// Sum over all expressions.
    squares: u64,
    repetitions: u64,
    remainders: u64,
    /// The first error of an expression in a schema within the grammar.
    misread: Option<GrammarError>,
}

impl GrammarSize {
    fn check(&self) -> Result<(), GrammarError> {
        if let Some(misread) = &self.misread {
            return Err(misread.clone());
        }
        if self.squares > PARTS_MAX * PARTS_MAX {
            return refused(format!(
                "its expressions are too large: more than {PARTS_MAX} parts"
            ));
        }
        if self.repetitions > REPETITIONS_MAX {
            return refused(format!(
                "its repetitions within each other are too large: more than {REPETITIONS_MAX}"
            ));
        }
        if self.remainders > REMAINDERS_MAX {
            return refused(format!(
                "`multipleOf` is too large, alone or in common: more than {REMAINDERS_MAX} remainders"
            ));
        }
        Ok(())
    }

    fn add_parts(&mut self, parts: u64) {
        self.squares = self.squares.saturating_add(parts.saturating_mul(parts));
    }

    fn add_regex(&mut self, regex: &str) {
        let parts = self.regex_parts(regex);
        self.add_parts(parts);
    }
}

#[cfg(test)]
mod tests;
