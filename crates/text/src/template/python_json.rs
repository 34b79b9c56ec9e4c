//! JSON as Python's `json.dumps` writes it.
//!
//! Owns: separators, indentation, escapes and the spelling of floats. Never: reads JSON. Invariant:
//! the text equals Python's to the byte, because models were trained on it.

use super::budget::charge;
use minijinja::value::{Value, ValueKind};
use minijinja::{Error, ErrorKind};

/// Format options; the defaults are those of Hugging Face's `tojson`.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct JsonStyle {
    /// Spaces per level; `None` writes one line.
    pub(crate) indent: Option<usize>,
    pub(crate) item_separator: String,
    pub(crate) key_separator: String,
    pub(crate) keys: KeyOrder,
    /// Treatment of characters beyond ASCII.
    pub(crate) characters: NonAsciiStyle,
}

/// Order of keys; see [`JsonStyle::keys`].
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum KeyOrder {
    AsGiven,
    Sorted,
}

/// Treatment of characters beyond ASCII; see [`JsonStyle::characters`].
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum NonAsciiStyle {
    AsGiven,
    Escaped,
}

impl JsonStyle {
    /// Style of `json.dumps(value, indent=indent, ensure_ascii=False)`.
    pub(crate) fn indented(indent: Option<usize>) -> Self {
        let item_separator = if indent.is_some() { "," } else { ", " };
        Self {
            indent,
            item_separator: item_separator.into(),
            key_separator: ": ".into(),
            keys: KeyOrder::AsGiven,
            characters: NonAsciiStyle::AsGiven,
        }
    }

    /// Writes the value as text.
    ///
    /// # Errors
    /// If the value has no JSON, or the rendering's budget is exhausted.
    pub(crate) fn dump(&self, value: &Value) -> Result<String, Error> {
        let mut out = String::new();
        self.write(&mut out, value, 0)?;
        // The template engine copies the text, so the room for more of it would count twice.
        out.shrink_to_fit();
        Ok(out)
    }

    fn write(&self, out: &mut String, value: &Value, depth: usize) -> Result<(), Error> {
        charge(8)?;
        if depth > DEPTH_MAX {
            let reason = format!("nested more than {DEPTH_MAX} levels deep");
            return Err(Error::new(ErrorKind::BadSerialization, reason));
        }
        match value.kind() {
            ValueKind::Undefined | ValueKind::None => out.push_str("null"),
            ValueKind::Bool => out.push_str(if value.is_true() { "true" } else { "false" }),
            ValueKind::Number if value.is_integer() => out.push_str(&value.to_string()),
            ValueKind::Number => match f64::try_from(value.clone())? {
                float if float.is_finite() => out.push_str(&float_repr(float)),
                _ => out.push_str("null"),
            },
            ValueKind::String => self.quote(out, value.as_str().unwrap_or_default())?,
            ValueKind::Seq | ValueKind::Iterable => {
                let nest = BracketPair {
                    open: '[',
                    close: ']',
                    depth,
                };
                let items = value.try_iter()?.map(|item| Ok((None, item)));
                self.nest(out, nest, items)?;
            }
            ValueKind::Map => {
                let nest = BracketPair {
                    open: '{',
                    close: '}',
                    depth,
                };
                let pairs = value.as_object().and_then(|map| map.try_iter_pairs());
                let pairs = pairs.into_iter().flatten();
                match self.keys {
                    KeyOrder::AsGiven => {
                        let items = pairs.map(|(key, item)| Ok((Some(key_text(&key)?), item)));
                        self.nest(out, nest, items)?;
                    }
                    KeyOrder::Sorted => {
                        let mut entries = Vec::new();
                        for (key, item) in pairs {
                            charge(2 * size_of::<Value>())?;
                            entries.push((key_text(&key)?, item));
                        }
                        entries.sort_by(|(a, _), (b, _)| a.cmp(b));
                        let items = entries.into_iter().map(|(key, item)| Ok((Some(key), item)));
                        self.nest(out, nest, items)?;
                    }
                }
            }
            kind => {
                let reason = format!("a value of type {kind} has no JSON");
                return Err(Error::new(ErrorKind::BadSerialization, reason));
            }
        }
        Ok(())
    }

    fn nest(
        &self,
        out: &mut String,
        nest: BracketPair,
        items: impl Iterator<Item = Result<(Option<String>, Value), Error>>,
    ) -> Result<(), Error> {
        out.push(nest.open);
        let mut empty = true;
        for item in items {
            let (key, item) = item?;
            if !empty {
                charge(self.item_separator.len())?;
                out.push_str(&self.item_separator);
            }
            empty = false;
            self.new_line(out, nest.depth + 1)?;
            if let Some(key) = key {
                charge(key.len() + self.key_separator.len())?;
                self.quote(out, &key)?;
                out.push_str(&self.key_separator);
            }
            self.write(out, &item, nest.depth + 1)?;
        }
        if !empty {
            self.new_line(out, nest.depth)?;
        }
        out.push(nest.close);
        Ok(())
    }

    fn new_line(&self, out: &mut String, depth: usize) -> Result<(), Error> {
        if let Some(indent) = self.indent {
            let blanks = indent.saturating_mul(depth);
            charge(blanks)?;
            out.push('\n');
            out.extend(std::iter::repeat_n(' ', blanks));
        }
        Ok(())
    }

    /// Charges what it writes: an escape takes up to twelve bytes for a character.
    fn quote(&self, out: &mut String, text: &str) -> Result<(), Error> {
        let written = text.chars().map(|character| self.escape_bytes(character));
        charge(2 + written.sum::<usize>())?;
        out.push('"');
        for character in text.chars() {
            match character {
                '"' => out.push_str("\\\""),
                '\\' => out.push_str("\\\\"),
                '\n' => out.push_str("\\n"),
                '\r' => out.push_str("\\r"),
                '\t' => out.push_str("\\t"),
                '\u{8}' => out.push_str("\\b"),
                '\u{c}' => out.push_str("\\f"),
                control if control < ' ' => out.push_str(&format!("\\u{:04x}", control as u32)),
                wide if self.characters == NonAsciiStyle::Escaped && !wide.is_ascii() => {
                    for unit in wide.encode_utf16(&mut [0; 2]) {
                        out.push_str(&format!("\\u{unit:04x}"));
                    }
                }
                plain => out.push(plain),
            }
        }
        out.push('"');
        Ok(())
    }

    /// Bytes that a character takes within quotes.
    fn escape_bytes(&self, character: char) -> usize {
        match character {
            '"' | '\\' | '\n' | '\r' | '\t' | '\u{8}' | '\u{c}' => 2,
            control if control < ' ' => 6,
            wide if self.characters == NonAsciiStyle::Escaped && !wide.is_ascii() => {
                6 * wide.len_utf16()
            }
            plain => plain.len_utf8(),
        }
    }
}

#[derive(Clone, Copy)]
struct BracketPair {
    open: char,
    close: char,
    depth: usize,
}

/// Limit of levels; a body has fewer.
const DEPTH_MAX: usize = 200;

/// Writes a mapping's key as JSON.
fn key_text(key: &Value) -> Result<String, Error> {
    match key.kind() {
        ValueKind::String | ValueKind::Number => Ok(key.to_string()),
        ValueKind::Bool => Ok(if key.is_true() { "true" } else { "false" }.to_owned()),
        ValueKind::None => Ok("null".to_owned()),
        kind => {
            let reason = format!("a key of type {kind} has no JSON");
            Err(Error::new(ErrorKind::BadSerialization, reason))
        }
    }
}

/// Writes a float as Python's `repr`: shortest digits, and an exponent of two digits below 1e-4 and
/// from 1e16 on.
fn float_repr(float: f64) -> String {
    let size = float.abs();
    if size != 0.0 && !(1e-4..1e16).contains(&size) {
        let text = format!("{float:e}");
        if let Some((digits, exponent)) = text.split_once('e') {
            let (sign, exponent) = match exponent.strip_prefix('-') {
                Some(exponent) => ('-', exponent),
                None => ('+', exponent),
            };
            return format!("{digits}e{sign}{exponent:0>2}");
        }
    }
    format!("{float:?}")
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::json::Document;
    use crate::template::json_value::value_of;

    fn value(text: &str) -> Value {
        let document = Document::check(text.to_owned()).unwrap();
        value_of(&document.part(document.root()), document.root())
    }

    /// The expected texts were printed by Python 3.
    #[test]
    fn json_is_spelled_as_python_spells_it() {
        let value =
            value(r#"{"b": [1, 2.0, 1e-5, 1e16, 0.1], "a": {"ü": "<&'\"\n\u001f>", "e": []}}"#);
        assert_eq!(
            JsonStyle::indented(None).dump(&value).unwrap(),
            "{\"b\": [1, 2.0, 1e-05, 1e+16, 0.1], \"a\": {\"ü\": \"<&'\\\"\\n\\u001f>\", \"e\": []}}"
        );
        assert_eq!(
            JsonStyle::indented(Some(2))
                .dump(&self::value(r#"{"a": [1], "e": {}}"#))
                .unwrap(),
            "{\n  \"a\": [\n    1\n  ],\n  \"e\": {}\n}"
        );
        let escaped = JsonStyle {
            characters: NonAsciiStyle::Escaped,
            keys: KeyOrder::Sorted,
            ..JsonStyle::indented(None)
        };
        assert_eq!(
            escaped
                .dump(&self::value(r#"{"b": "🙂", "a": "ü"}"#))
                .unwrap(),
            r#"{"a": "\u00fc", "b": "\ud83d\ude42"}"#
        );
    }
}
