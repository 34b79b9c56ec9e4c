//! JSON as Python's `json.dumps` writes it.
//!
//! Owns: separators, indentation, escapes and the spelling of floats. Never: reads JSON.
//! Invariant: chat templates were trained on this text, so that every space counts.

use serde_json::Value;

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
    pub(crate) fn dump(&self, value: &Value) -> String {
        let mut out = String::new();
        self.write(&mut out, value, 0);
        out
    }

    fn write(&self, out: &mut String, value: &Value, depth: usize) {
        match value {
            Value::Null => out.push_str("null"),
            Value::Bool(flag) => out.push_str(if *flag { "true" } else { "false" }),
            Value::Number(number) => match number.as_f64().filter(|_| number.is_f64()) {
                Some(float) => out.push_str(&float_repr(float)),
                None => out.push_str(&number.to_string()),
            },
            Value::String(text) => self.quote(out, text),
            Value::Array(items) => {
                let items = items.iter().map(|item| (None, item));
                self.nest(
                    out,
                    Nest {
                        open: '[',
                        close: ']',
                        depth,
                    },
                    items,
                );
            }
            Value::Object(map) => {
                let mut entries: Vec<_> = map.iter().collect();
                if self.keys == Keys::Sorted {
                    entries.sort_by_key(|(key, _)| *key);
                }
                let items = entries
                    .into_iter()
                    .map(|(key, item)| (Some(key.as_str()), item));
                self.nest(
                    out,
                    Nest {
                        open: '{',
                        close: '}',
                        depth,
                    },
                    items,
                );
            }
        }
    }

    fn nest<'a>(
        &self,
        out: &mut String,
        nest: Nest,
        items: impl ExactSizeIterator<Item = (Option<&'a str>, &'a Value)>,
    ) {
        out.push(nest.open);
        let empty = items.len() == 0;
        for (place, (key, item)) in items.enumerate() {
            if place > 0 {
                out.push_str(&self.item_separator);
            }
            self.new_line(out, nest.depth + 1);
            if let Some(key) = key {
                self.quote(out, key);
                out.push_str(&self.key_separator);
            }
            self.write(out, item, nest.depth + 1);
        }
        if !empty {
            self.new_line(out, nest.depth);
        }
        out.push(nest.close);
    }

    fn new_line(&self, out: &mut String, depth: usize) {
        if let Some(indent) = self.indent {
            out.push('\n');
            out.extend(std::iter::repeat_n(' ', indent * depth));
        }
    }

    fn quote(&self, out: &mut String, text: &str) {
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
    }
}

#[derive(Clone, Copy)]
struct Nest {
    open: char,
    close: char,
    depth: usize,
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
    use serde_json::json;

    /// Expected texts are what Python 3 printed.
    #[test]
    fn python_spelling_was_not_kept() {
        let value = json!({"b": [1, 2.0, 1e-5, 1e16, 0.1], "a": {"ü": "<&'\"\n\u{1f}>", "e": []}});
        assert_eq!(
            Style::indented(None).dump(&value),
            "{\"b\": [1, 2.0, 1e-05, 1e+16, 0.1], \"a\": {\"ü\": \"<&'\\\"\\n\\u001f>\", \"e\": []}}"
        );
        assert_eq!(
            Style::indented(Some(2)).dump(&json!({"a": [1], "e": {}})),
            "{\n  \"a\": [\n    1\n  ],\n  \"e\": {}\n}"
        );
        let escaped = Style {
            characters: Characters::Escaped,
            keys: Keys::Sorted,
            ..Style::indented(None)
        };
        assert_eq!(
            escaped.dump(&json!({"b": "🙂", "a": "ü"})),
            r#"{"a": "\u00fc", "b": "\ud83d\ude42"}"#
        );
    }
}
