//! Parts of a grammar in Lark's syntax, from which a server builds one.
//!
//! Owns: the limit of whitespace in JSON, and the spelling of texts and expressions.
//! Never: compiles anything.

use crate::compile::GrammarError;
use crate::expressions::{ClientExpression, of_schema};
use cleave_domain::Grammar;
use serde_json::{Map, Value, json};
use std::fmt::Write;

/// Between two parts of a JSON text at most this much whitespace is allowed, room for an indented
/// line. Without a limit small models write it until their last token.
const JSON_WHITESPACE: &str = r"[\x20\x0A\x0D\x09]{1,64}";
/// Options of the library in a schema, which would lift the limit of whitespace or let keywords
/// pass without effect.
const LIBRARY_OPTIONS: &str = "x-guidance";

/// The keywords of a schema that are enforced.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum SchemaKeywords {
    /// All; a schema with another one is refused.
    All,
    /// All that can be; others have no effect.
    Known,
}

/// The expression of a grammar, for a rule of another one.
///
/// # Errors
/// `Refused` for a schema that is none, or that sets the library's options, and for an expression
/// that the library would read as another one.
pub fn lark_expression(grammar: &Grammar) -> Result<String, GrammarError> {
    match grammar {
        Grammar::JsonSchema(schema) => json_expression(&parsed(schema)?, SchemaKeywords::All),
        Grammar::Regex(regex) => regex_expression(regex),
        Grammar::Choice(texts) => Ok(format!("({})", alternatives(texts))),
        // Line breaks end the last rule of the inner grammar, or a comment.
        Grammar::Lark(lark) => Ok(format!("%lark {{\n{lark}\n}}")),
    }
}

/// The expression of JSON by a schema.
///
/// # Errors
/// As [`lark_expression`].
pub fn json_expression(schema: &Value, keywords: SchemaKeywords) -> Result<String, GrammarError> {
    let bounded = bounded(schema, keywords)?;
    Ok(format!("%json {bounded}"))
}

/// The expression of a text.
pub fn text_expression(text: &str) -> String {
    Value::from(text).to_string()
}

/// A regular expression that matches this text alone, for a part of another one.
pub fn regex_of_text(text: &str) -> String {
    let mut regex = String::new();
    for c in text.chars() {
        if c.is_ascii() && !c.is_ascii_alphanumeric() {
            write!(regex, "\\x{:02X}", u32::from(c)).expect("a string takes every text");
        } else {
            regex.push(c);
        }
    }
    regex
}

/// Quotes a regular expression, as the library does with one that is a grammar.
fn regex_expression(regex: &str) -> Result<String, GrammarError> {
    if regex.is_empty() {
        return Ok(text_expression(""));
    }
    let expression = ClientExpression::of_regex(regex);
    expression.check()?;
    Ok(format!("/{}/", expression.rewritten()))
}

/// One of these texts.
pub(crate) fn alternatives(texts: &[String]) -> String {
    let texts = texts.iter().map(|text| text_expression(text));
    texts.collect::<Vec<_>>().join(" | ")
}

pub(crate) fn parsed(schema: &str) -> Result<Value, GrammarError> {
    serde_json::from_str(schema).map_err(|error| GrammarError::Refused(error.to_string()))
}

/// The schema with the limit of whitespace.
pub(crate) fn bounded(schema: &Value, keywords: SchemaKeywords) -> Result<Value, GrammarError> {
    let refused = |problem: &str| Err(GrammarError::Refused(problem.to_owned()));
    let mut members = match schema {
        Value::Object(members) => members.clone(),
        // Every value matches.
        Value::Bool(true) => Map::new(),
        Value::Bool(false) => return refused("no value matches `false`"),
        _ => return refused("a schema is an object or a boolean"),
    };
    let mut expressions = of_schema(schema).into_iter();
    expressions.try_for_each(ClientExpression::check)?;
    let mut options = json!({ "whitespace_pattern": JSON_WHITESPACE });
    if keywords == SchemaKeywords::Known {
        options["lenient"] = true.into();
    }
    if members
        .insert(LIBRARY_OPTIONS.to_owned(), options)
        .is_some()
    {
        return refused(&format!("`{LIBRARY_OPTIONS}` is not supported"));
    }
    Ok(Value::Object(members))
}
