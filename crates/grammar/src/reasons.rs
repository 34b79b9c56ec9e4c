//! The library's errors, in words for a client.
//!
//! Owns: which of them are limits, and how much of a client's text an error repeats.
//! Never: judges a grammar.

use crate::compile::GrammarError;
use crate::expressions::{ClientExpression, of_schema, placed};
use cleave_domain::Grammar;
use serde_json::Value;

/// Limit of a reason, in characters.
const CHARS_MAX: usize = 300;
/// How the error of an expression begins; its lines have the expression, marks below it, and the
/// reason.
const EXPRESSION_ERROR: &str = "regex parse error:";
/// How the library's errors about a limit begin. A client's text never begins an error.
const LIMITS: [&str; 10] = [
    "schema too large",
    "Schema intersection stack level exceeded",
    "initial lexer configuration (grammar) too big",
    "grammar size (number of symbols) too big",
    "too many expressions constructed",
    "too many states: ",
    "fuel exhausted when checking relevance of lexemes",
    "maximum relevance check fuel",
    "lexer precomputation failed",
    "DNF too large, fuel exhausted",
];

/// The error of a compilation.
pub(crate) fn reason(error: &str, grammar: &Grammar) -> GrammarError {
    if is_panic(error) {
        return GrammarError::Failed;
    }
    // The lines below quote the client's grammar.
    let line = error.lines().next().unwrap_or_default().trim();
    if line.ends_with(EXPRESSION_ERROR)
        && let Some(reason) = expression_reason(error, grammar)
    {
        return GrammarError::Refused(shortened(&reason));
    }
    let own_words = without_place(line);
    if LIMITS.iter().any(|words| own_words.starts_with(words)) {
        return GrammarError::TooComplex;
    }
    let advice = ". Enable 'coerce_one_of' option to approximate oneOf with anyOf";
    GrammarError::Refused(shortened(&line.replace(advice, "")))
}

/// Whether an error of the library is a panic that it caught.
pub(crate) fn is_panic(error: &str) -> bool {
    error.starts_with("panic")
}

/// The mistake in an expression, and its place.
fn expression_reason(error: &str, grammar: &Grammar) -> Option<String> {
    let what = error.lines().find_map(|line| line.strip_prefix("error: "));
    let what = what?.trim();
    // The library indents the expression, and the marks below it, by as much. One of several lines
    // has no indent but numbers.
    let mut lines = error.lines().skip(1);
    let mut unindented = || lines.next().and_then(|line| line.strip_prefix("    "));
    let (Some(expression), Some(marks)) = (unindented(), unindented()) else {
        return Some(what.to_owned());
    };
    // A second mark is that of the mistake; the first one is of the part that it repeats.
    let at = marks.trim_end_matches('^').len();
    let schema: Value;
    let of_client = match grammar {
        Grammar::Regex(regex) => vec![ClientExpression::of_regex(regex)],
        Grammar::JsonSchema(text) => {
            schema = serde_json::from_str(text).unwrap_or_default();
            of_schema(&schema)
        }
        Grammar::Choice(_) | Grammar::Lark(_) => Vec::new(),
    };
    let mut of_client = of_client.into_iter();
    let found = of_client.find(|found| found.rewritten() == expression);
    Some(match found {
        Some(found) => found.placed(what, at),
        None => placed(what, expression, at),
    })
}

/// An error without the place in the grammar, `at LINE(COLUMN): `, and the part that failed.
fn without_place(error: &str) -> &str {
    let is_place = |c: char| c.is_ascii_digit() || matches!(c, '(' | ')');
    let behind = error.strip_prefix("at ").and_then(|at| {
        let behind = at.trim_start_matches(is_place);
        behind.strip_prefix(": ")
    });
    let behind = behind.unwrap_or(error);
    let part = "failed to compile JSON schema: ";
    behind.strip_prefix(part).unwrap_or(behind)
}

/// A text within the limit: a longer one loses its middle, since the reason may be at either end.
fn shortened(text: &str) -> String {
    let count = text.chars().count();
    if count <= CHARS_MAX {
        return text.to_owned();
    }
    let side = CHARS_MAX / 2 - 2;
    let begin: String = text.chars().take(side).collect();
    let end: String = text.chars().skip(count - side).collect();
    format!("{begin} … {end}")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_long_reason_keeps_both_ends() {
        let long = format!("begins {} ends", "ä".repeat(1000));
        let short = shortened(&long);
        assert!(short.chars().count() <= CHARS_MAX, "{short}");
        assert!(short.starts_with("begins ä") && short.ends_with("ä ends"));
        assert_eq!(shortened("whole"), "whole");
    }

    #[test]
    fn only_the_librarys_own_words_are_a_limit() {
        let of = |error: &str| reason(error, &Grammar::Choice([].into()));
        for limit in [
            "too many states: 9 >= 9",
            "at 1(8): grammar size (number of symbols) too big (limit for this grammar: 9)",
            "at 1(8): failed to compile JSON schema: schema too large\n   1 | start: %json {}",
        ] {
            assert_eq!(of(limit), GrammarError::TooComplex, "{limit}");
        }
        for mistake in [
            "Unknown format: too many states: 9",
            "at 2(1): unknown name: \"a\"\n   1 | schema too large",
            "Unknown format: regex parse error:",
        ] {
            let line = mistake.lines().next().unwrap();
            assert_eq!(of(mistake), GrammarError::Refused(line.to_owned()));
        }
        assert_eq!(of("panic at \"x\""), GrammarError::Failed);
    }
}
