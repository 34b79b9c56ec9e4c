//! A client's regular expressions, which the library rewrites before it reads them.
//!
//! Owns: the refusal of expressions that the rewriting changes, and places in a client's text.
//! Never: parses an expression.
//! Invariant: an expression that passes is read as the client wrote it.

use crate::compile::GrammarError;
use llguidance::regex_to_lark;
use serde_json::Value;

/// Characters of an expression that are shown before and after the place of its error.
const NEAR_CHARS: usize = 20;
/// Characters that the library replaces by their escapes, which the flag `x` does not skip.
const ESCAPED_SPACE: [char; 3] = ['\n', '\r', '\t'];
/// Keywords whose values are no schemas.
const DATA_KEYWORDS: [&str; 4] = ["enum", "const", "default", "examples"];
/// Keywords whose values have schemas by name.
const NAMING_KEYWORDS: [&str; 5] = [
    "properties",
    "patternProperties",
    "$defs",
    "definitions",
    "dependentSchemas",
];

/// Classes that the library narrows to ASCII in the expressions of a schema.
const SCHEMA_CLASSES: &str = "dw";

/// An expression of a client.
#[derive(Clone, Copy)]
pub(crate) struct ClientExpression<'a> {
    text: &'a str,
    ascii_classes: &'static str,
}

impl<'a> ClientExpression<'a> {
    /// An expression that is a grammar.
    pub(crate) fn of_regex(text: &'a str) -> Self {
        Self {
            text,
            ascii_classes: "",
        }
    }

    /// Refuses an expression that the library would read as another one.
    ///
    /// # Errors
    /// `Refused` with the part and its place.
    pub(crate) fn check(self) -> Result<(), GrammarError> {
        let refused = |what: &str, at: usize| {
            let chars_before = self.text[..at].chars().count();
            Err(GrammarError::Refused(placed(what, self.text, chars_before)))
        };
        let mut verbose = None;
        let mut letters = self.text.char_indices();
        while let Some((at, letter)) = letters.next() {
            if letter == '\\' && letters.next().is_none() {
                return refused("incomplete escape", at);
            }
            if letter == '(' && has_verbose_flag(&self.text[at..]) {
                verbose = verbose.or(Some(at));
            }
        }
        match verbose {
            Some(at) if self.text.contains(ESCAPED_SPACE) => refused(
                "the flag `x` with a line break or a tab is not supported",
                at,
            ),
            _ => Ok(()),
        }
    }

    /// The expression between slashes, as the library rewrites it.
    pub(crate) fn rewritten(self) -> String {
        regex_to_lark(self.text, self.ascii_classes)
    }

    /// Describes a mistake at a place of the rewritten expression, in characters.
    pub(crate) fn placed(self, what: &str, rewritten_at: usize) -> String {
        let bounds = self.text.char_indices().map(|(at, _)| at);
        let bounds: Vec<usize> = bounds.chain([self.text.len()]).collect();
        let length = |index: usize| {
            let before = &self.text[..bounds[index]];
            regex_to_lark(before, self.ascii_classes).chars().count()
        };
        // The last bound whose text is not longer, and of those that are as long the first: the
        // library drops a backslash until its letter follows.
        let indices: Vec<usize> = (0..bounds.len()).collect();
        let behind = indices.partition_point(|index| length(*index) <= rewritten_at);
        let longest = length(behind.saturating_sub(1));
        let at = indices.partition_point(|index| length(*index) < longest);
        placed(what, self.text, at)
    }
}

/// The expressions of a schema.
pub(crate) fn of_schema(schema: &Value) -> Vec<ClientExpression<'_>> {
    let mut found = Vec::new();
    collect(schema, false, &mut found);
    found
}

/// Collects the expressions of a schema, or of schemas by name.
fn collect<'a>(value: &'a Value, is_naming: bool, found: &mut Vec<ClientExpression<'a>>) {
    let expression = |text: &'a str| ClientExpression {
        text,
        ascii_classes: SCHEMA_CLASSES,
    };
    match value {
        Value::Object(members) if is_naming => {
            members
                .values()
                .for_each(|named| collect(named, false, found));
        }
        Value::Object(members) => {
            for (keyword, value) in members {
                match (keyword.as_str(), value) {
                    ("pattern", Value::String(text)) => found.push(expression(text)),
                    (keyword, _) if DATA_KEYWORDS.contains(&keyword) => {}
                    (keyword, _) => {
                        if let ("patternProperties", Value::Object(properties)) = (keyword, value) {
                            found.extend(properties.keys().map(|text| expression(text)));
                        }
                        collect(value, NAMING_KEYWORDS.contains(&keyword), found);
                    }
                }
            }
        }
        Value::Array(items) => items.iter().for_each(|item| collect(item, false, found)),
        Value::Null | Value::Bool(_) | Value::Number(_) | Value::String(_) => {}
    }
}

/// Whether a group, from its bracket, sets the flag `x`.
fn has_verbose_flag(group: &str) -> bool {
    let Some(flags) = group.strip_prefix("(?") else {
        return false;
    };
    let mut set = flags.chars().take_while(char::is_ascii_alphabetic);
    set.any(|flag| flag == 'x')
}

/// A mistake with its place, behind so many characters of an expression.
pub(crate) fn placed(what: &str, expression: &str, chars_before: usize) -> String {
    let from = chars_before.saturating_sub(NEAR_CHARS);
    let mut near = String::new();
    for c in expression.chars().skip(from).take(2 * NEAR_CHARS) {
        if c.is_control() {
            near.extend(c.escape_default());
        } else {
            near.push(c);
        }
    }
    let place = chars_before + 1;
    format!("{what}, at character {place} of the expression, near `{near}`")
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::json;

    #[test]
    fn every_expression_of_a_schema_is_found() {
        let schema = json!({
            "pattern": "a",
            "properties": {
                "default": {"pattern": "b"},
                "pattern": {"items": [{"pattern": "c"}]},
                "patternProperties": {"title": "no expression"}
            },
            "patternProperties": {"d": {"pattern": "e"}},
            "enum": [{"pattern": "data"}],
            "$defs": {"enum": {"anyOf": [{"pattern": "f"}]}}
        });
        let found: Vec<&str> = of_schema(&schema).iter().map(|found| found.text).collect();
        assert_eq!(found, ["a", "b", "c", "d", "e", "f"]);
    }

    #[test]
    fn a_place_is_one_of_the_clients_text() {
        let expression = ClientExpression {
            text: "\\d/\n\\w\\/(",
            ascii_classes: SCHEMA_CLASSES,
        };
        assert_eq!(expression.rewritten(), r"[0-9]\/\n[0-9a-zA-Z_]\/(");
        for (rewritten_at, place) in [(0, 1), (5, 3), (7, 4), (9, 5), (21, 7), (23, 9), (24, 10)] {
            let reason = expression.placed("wrong", rewritten_at);
            assert!(
                reason.contains(&format!("character {place} ")),
                "{rewritten_at}: {reason}"
            );
        }
    }
}
