//! The library's errors, in words for a client.
//!
//! Owns: which of them are limits, and how much of a client's text an error repeats.
//! Never: judges a grammar.

use crate::compile::GrammarError;

/// Limit of a reason, in characters.
const CHARS_MAX: usize = 300;
/// Characters of an expression that are shown before and after the place of its error.
const NEAR_CHARS: usize = 20;
/// How the error of an expression begins; its lines have the expression, marks below it, and the
/// reason.
const EXPRESSION_ERROR: &str = "regex parse error:";
/// Words of the library's errors about a limit.
const LIMITS: [&str; 7] = [
    "too complex",
    "fuel",
    "limit",
    "schema too large",
    "too many expressions",
    "too many states",
    "stack level exceeded",
];

/// The error of a compilation.
pub(crate) fn reason(error: &str) -> GrammarError {
    if is_panic(error) {
        return GrammarError::Failed;
    }
    if let Some(at) = error.find(EXPRESSION_ERROR) {
        return GrammarError::Refused(expression_reason(&error[at..]));
    }
    let own_words = without_quotes(error).to_lowercase();
    if LIMITS.iter().any(|words| own_words.contains(words)) {
        return GrammarError::TooComplex;
    }
    let line = error.lines().next().unwrap_or_default().trim();
    let advice = ". Enable 'coerce_one_of' option to approximate oneOf with anyOf";
    GrammarError::Refused(shortened(&line.replace(advice, "")))
}

/// Whether an error of the library is a panic that it caught.
pub(crate) fn is_panic(error: &str) -> bool {
    error.starts_with("panic")
}

/// The mistake in an expression, and its place.
fn expression_reason(error: &str) -> String {
    let lines: Vec<&str> = error.lines().collect();
    let what = lines.iter().rev().find_map(|l| l.strip_prefix("error: "));
    let what = what.unwrap_or("its expression cannot be read").trim();
    let is_mark = |line: &&str| !line.trim().is_empty() && line.trim().bytes().all(|b| b == b'^');
    let marks = lines.iter().position(is_mark);
    let place = marks.filter(|at| *at > 0).and_then(|at| {
        let indent = |line: &str| line.len() - line.trim_start_matches(' ').len();
        // The library indents both lines by as much.
        let expression = lines[at - 1].get(4..)?;
        Some((indent(lines[at]).checked_sub(4)?, expression))
    });
    let Some((at, expression)) = place else {
        return shortened(what);
    };
    let from = at.saturating_sub(NEAR_CHARS);
    let near = expression.chars().skip(from).take(2 * NEAR_CHARS);
    let near: String = near.collect();
    let place = at + 1;
    shortened(&format!(
        "{what}, at character {place} of the expression, near `{near}`"
    ))
}

/// An error without what it quotes.
fn without_quotes(error: &str) -> String {
    let mut quote = None;
    let mut is_escaped = false;
    let is_kept = |c: &char| {
        let was_escaped = is_escaped;
        is_escaped = *c == '\\' && !was_escaped;
        match quote {
            Some(open) if *c == open && !was_escaped => quote = None,
            None if matches!(c, '"' | '`') => quote = Some(*c),
            None => return true,
            Some(_) => {}
        }
        false
    };
    error.chars().filter(is_kept).collect()
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
    fn words_that_an_error_quotes_are_no_limit() {
        let quoted = r#"unknown name: "limit \" fuel" in `too complex`"#;
        assert!(matches!(reason(quoted), GrammarError::Refused(_)));
        assert_eq!(reason("too many states: 9 >= 9"), GrammarError::TooComplex);
        assert_eq!(reason("panic at \"x\""), GrammarError::Failed);
    }
}
