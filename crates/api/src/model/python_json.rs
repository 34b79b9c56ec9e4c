//! JSON as Python's `json.dumps` writes it.
//!
//! Owns: separators, indentation, escapes and the spelling of floats. Never: reads JSON.
//! Invariant: chat templates were trained on this text, so that every space counts.

use super::budget::charge;
use minijinja::value::{Value, ValueKind};
use minijinja::{Error, ErrorKind};

/// How to write; the defaults are those of Hugging Face's `tojson`.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Style {
    /// Spaces per level; `None` writes one line.
    pub(crate) indent: Option<usize>,
    /// Between items.
    pub(crate) item_separator: String,
    /// Between key and value.
    pub(crate) key_separator: String,
    /// Whether keys keep their order or are sorted.
    pub(crate) keys: Keys,
    /// What becomes of characters beyond ASCII.
    pub(crate) characters: Characters,
}

/// See [`Style::keys`].
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Keys {
    AsGiven,
    Sorted,
}

/// See [`Style::characters`].
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Characters {
    AsGiven,
    Escaped,
}

impl Style {
    /// `json.dumps(value, indent=indent, ensure_ascii=False)`.
    pub(crate) fn indented(indent: Option<usize>) -> Self {
        let item_separator = if indent.is_some() { "," } else { ", " };
        Self {
            indent,
            item_separator: item_separator.into(),
            key_separator: ": ".into(),
            keys: Keys::AsGiven,
            characters: Characters::AsGiven,
        }
    }

    /// The value as text.
    ///
    /// # Errors
    /// If the value has no JSON, or the rendering has no room for it.
    pub(crate) fn dump(&self, value: &Value) -> Result<String, Error> {
        let mut out = String::new();
        self.write(&mut out, value, 0)?;
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
                let nest = Nest {
                    open: '[',
                    close: ']',
                    depth,
                };
                let items = value.try_iter()?.map(|item| Ok((None, item)));
                self.nest(out, nest, items)?;
            }
            ValueKind::Map => {
                let nest = Nest {
                    open: '{',
                    close: '}',
                    depth,
                };
                let pairs = value.as_object().and_then(|map| map.try_iter_pairs());
                let pairs = pairs.into_iter().flatten();
                match self.keys {
                    Keys::AsGiven => {
                        let items = pairs.map(|(key, item)| Ok((Some(key_text(&key)?), item)));
                        self.nest(out, nest, items)?;
                    }
                    Keys::Sorted => {
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
        nest: Nest,
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

    /// Counts what it writes: an escape has up to twelve characters for one.
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
                wide if self.characters == Characters::Escaped && !wide.is_ascii() => {
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
            wide if self.characters == Characters::Escaped && !wide.is_ascii() => {
                6 * wide.len_utf16()
            }
            plain => plain.len_utf8(),
        }
    }
}

#[derive(Clone, Copy)]
struct Nest {
    open: char,
    close: char,
    depth: usize,
}

/// Levels of a value; a body has fewer.
const DEPTH_MAX: usize = 200;

/// A mapping's key as JSON has it.
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

/// Python's `repr`: shortest digits, exponent below 1e-4 and from 1e16 on, with two digits.
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
    use crate::model::value_of;

    fn value(text: &str) -> Value {
        let document = Document::check(text.to_owned()).unwrap();
        value_of(&document.part(document.root()), document.root())
    }

    /// Expected texts are what Python 3 printed.
    #[test]
    fn python_spelling_was_not_kept() {
        let value =
            value(r#"{"b": [1, 2.0, 1e-5, 1e16, 0.1], "a": {"ü": "<&'\"\n\u001f>", "e": []}}"#);
        assert_eq!(
            Style::indented(None).dump(&value).unwrap(),
            "{\"b\": [1, 2.0, 1e-05, 1e+16, 0.1], \"a\": {\"ü\": \"<&'\\\"\\n\\u001f>\", \"e\": []}}"
        );
        assert_eq!(
            Style::indented(Some(2))
                .dump(&self::value(r#"{"a": [1], "e": {}}"#))
                .unwrap(),
            "{\n  \"a\": [\n    1\n  ],\n  \"e\": {}\n}"
        );
        let escaped = Style {
            characters: Characters::Escaped,
            keys: Keys::Sorted,
            ..Style::indented(None)
        };
        assert_eq!(
            escaped
                .dump(&self::value(r#"{"b": "🙂", "a": "ü"}"#))
                .unwrap(),
            r#"{"a": "\u00fc", "b": "\ud83d\ude42"}"#
        );
    }
}
