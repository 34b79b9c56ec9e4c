//! JSON of a request: checked once and read in place.
//!
//! Owns: iteration over checked JSON without building values, so that unread parts cost nothing.
//! Never: knows field names. Invariant: a [`Json`] is exactly one value of a text that the JSON
//! library has accepted, so iteration cannot fail.

use serde::Deserialize;
use serde::de::{Deserializer, MapAccess, SeqAccess, Visitor};
use serde_json::Number;
use std::borrow::Cow;
use std::fmt;
use std::ops::Range;
use std::sync::Arc;

const BLANKS: [char; 4] = [' ', '\t', '\n', '\r'];

/// A checked text. Clones share it.
#[derive(Clone, Debug)]
pub struct Document(Arc<String>);

impl Document {
    /// Checks a text without building a value.
    ///
    /// # Errors
    /// Those of the JSON library: not JSON, nested too deeply, or a number out of range.
    pub fn check(text: String) -> Result<Self, serde_json::Error> {
        Json::check(&text)?;
        Ok(Self(Arc::new(text)))
    }

    /// Length of the text in bytes.
    #[expect(clippy::len_without_is_empty, reason = "a value has at least a byte")]
    pub fn len(&self) -> usize {
        self.0.len()
    }

    pub fn root(&self) -> Json<'_> {
        Json(self.0.trim_matches(BLANKS))
    }

    /// Copies a value of this text so that it outlives the borrow.
    ///
    /// # Panics
    /// If the value belongs to another text.
    pub fn part(&self, value: Json<'_>) -> JsonPart {
        let start = (value.0.as_ptr() as usize).checked_sub(self.0.as_ptr() as usize);
        let start = start.expect("a value of this text");
        let at = start..start + value.0.len();
        assert!(at.end <= self.0.len(), "a value of this text");
        JsonPart {
            document: self.clone(),
            at,
        }
    }
}

/// A value together with the text that contains it.
#[derive(Clone, Debug)]
pub struct JsonPart {
    document: Document,
    at: Range<usize>,
}

impl JsonPart {
    /// Returns the whole text that contains the value.
    pub fn document(&self) -> &Document {
        &self.document
    }

    pub fn json(&self) -> Json<'_> {
        Json(&self.document.0[self.at.clone()])
    }

    /// Returns the value that begins at this byte of this value's text.
    pub fn json_from(&self, at: usize) -> Json<'_> {
        let rest = &self.document.0[self.at.start + at..self.at.end];
        Json(&rest[..value_len(rest.as_bytes())])
    }

    /// Returns the offset of a value within this value's text.
    pub fn offset(&self, value: Json<'_>) -> usize {
        value.0.as_ptr() as usize - self.json().0.as_ptr() as usize
    }

    /// Returns a value within this one.
    pub fn part(&self, value: Json<'_>) -> Self {
        self.document.part(value)
    }
}

/// One value, borrowed from its text.
#[derive(Clone, Copy, Debug)]
pub struct Json<'a>(&'a str);

/// The type of a value, with access to its contents.
#[derive(Clone, Debug)]
pub enum JsonShape<'a> {
    Null,
    Bool(bool),
    Number(Number),
    String(JsonString<'a>),
    Array(JsonItems<'a>),
    Object(JsonMembers<'a>),
}

impl<'a> Json<'a> {
    /// Checks a text in place.
    ///
    /// # Errors
    /// As for [`Document::check`].
    pub fn check(text: &'a str) -> Result<Self, serde_json::Error> {
        serde_json::from_str::<ValidJson>(text)?;
        Ok(Self(text.trim_matches(BLANKS)))
    }

    pub fn shape(self) -> JsonShape<'a> {
        match self.0.as_bytes()[0] {
            b'n' => JsonShape::Null,
            b't' => JsonShape::Bool(true),
            b'f' => JsonShape::Bool(false),
            b'"' => JsonShape::String(JsonString(self.0)),
            b'[' => JsonShape::Array(JsonItems { rest: &self.0[1..] }),
            b'{' => JsonShape::Object(JsonMembers { rest: &self.0[1..] }),
            _ => JsonShape::Number(serde_json::from_str(self.0).expect("a checked number")),
        }
    }

    pub fn is_null(self) -> bool {
        self.0.starts_with('n')
    }

    /// Returns the value as it was written.
    pub fn text(self) -> &'a str {
        self.0
    }
}

/// A string with its quotes and escapes.
#[derive(Clone, Copy, Debug)]
pub struct JsonString<'a>(&'a str);

impl<'a> JsonString<'a> {
    fn within(self) -> &'a str {
        &self.0[1..self.0.len() - 1]
    }

    pub fn is_empty(self) -> bool {
        self.0.len() == 2
    }

    /// Returns the text without quotes and escapes.
    pub fn get(self) -> Cow<'a, str> {
        let within = self.within();
        if within.contains('\\') {
            Cow::Owned(without_escapes(within))
        } else {
            Cow::Borrowed(within)
        }
    }

    /// Returns the string as a value, with its position in the text.
    pub fn json(self) -> Json<'a> {
        Json(self.0)
    }
}

/// The values of an array.
#[derive(Clone, Debug)]
pub struct JsonItems<'a> {
    rest: &'a str,
}

impl<'a> Iterator for JsonItems<'a> {
    type Item = Json<'a>;

    fn next(&mut self) -> Option<Json<'a>> {
        self.rest = after_blanks(self.rest);
        let (value, rest) = first_value(self.rest)?;
        self.rest = rest;
        Some(value)
    }
}

/// The keys and values of an object, duplicates included.
#[derive(Clone, Debug)]
pub struct JsonMembers<'a> {
    rest: &'a str,
}

impl<'a> Iterator for JsonMembers<'a> {
    type Item = (JsonString<'a>, Json<'a>);

    fn next(&mut self) -> Option<(JsonString<'a>, Json<'a>)> {
        self.rest = after_blanks(self.rest);
        let (Json(key), rest) = first_value(self.rest)?;
        let rest = after_blanks(rest);
        let (value, rest) = first_value(rest)?;
        self.rest = rest;
        Some((JsonString(key), value))
    }
}

/// Skips blanks, commas and colons.
fn after_blanks(text: &str) -> &str {
    text.trim_start_matches([' ', '\t', '\n', '\r', ',', ':'])
}

fn first_value(text: &str) -> Option<(Json<'_>, &str)> {
    match text.as_bytes().first()? {
        b']' | b'}' => None,
        _ => {
            let (value, rest) = text.split_at(value_len(text.as_bytes()));
            Some((Json(value), rest))
        }
    }
}

/// Length in bytes of the value that begins a checked text.
fn value_len(text: &[u8]) -> usize {
    let ends_word = |byte: &u8| matches!(byte, b',' | b']' | b'}' | b' ' | b'\t' | b'\n' | b'\r');
    match text[0] {
        b'"' => string_len(text),
        b'[' | b'{' => {
            let (mut at, mut depth) = (0, 0_usize);
            loop {
                match text[at] {
                    b'"' => at += string_len(&text[at..]),
                    b'[' | b'{' => {
                        depth += 1;
                        at += 1;
                    }
                    b']' | b'}' => {
                        depth -= 1;
                        at += 1;
                        if depth == 0 {
                            return at;
                        }
                    }
                    _ => at += 1,
                }
            }
        }
        _ => text.iter().position(ends_word).unwrap_or(text.len()),
    }
}

/// Length in bytes of the string that begins a checked text, with both quotes.
fn string_len(text: &[u8]) -> usize {
    let mut at = 1;
    loop {
        match text[at] {
            b'"' => return at + 1,
            b'\\' => at += 2,
            _ => at += 1,
        }
    }
}

fn without_escapes(text: &str) -> String {
    // A character is never longer than its escape.
    let mut out = String::with_capacity(text.len());
    let mut rest = text;
    while let Some(at) = rest.find('\\') {
        out.push_str(&rest[..at]);
        let escape = rest.as_bytes()[at + 1];
        rest = &rest[at + 2..];
        match escape {
            b'n' => out.push('\n'),
            b't' => out.push('\t'),
            b'r' => out.push('\r'),
            b'b' => out.push('\u{8}'),
            b'f' => out.push('\u{c}'),
            b'u' => {
                let mut unit = unit_of(rest);
                rest = &rest[4..];
                if let 0xD800..=0xDBFF = unit {
                    // The low surrogate follows: the check rejects a lone surrogate.
                    let low = unit_of(&rest[2..]);
                    rest = &rest[6..];
                    unit = 0x1_0000 + ((unit - 0xD800) << 10) + (low - 0xDC00);
                }
                out.push(char::from_u32(unit).expect("a checked escape"));
            }
            other => out.push(char::from(other)),
        }
    }
    out + rest
}

/// Parses four hexadecimal digits as a UTF-16 unit.
fn unit_of(digits: &str) -> u32 {
    u32::from_str_radix(&digits[..4], 16).expect("a checked escape")
}

/// Accepts every value without building it: the accepted texts and the errors are the same as for
/// the library's own value type.
struct ValidJson;

impl<'de> Deserialize<'de> for ValidJson {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        deserializer.deserialize_any(ValidityVisitor)
    }
}

struct ValidityVisitor;

impl<'de> Visitor<'de> for ValidityVisitor {
    type Value = ValidJson;

    fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("any valid JSON value")
    }

    fn visit_bool<E>(self, _: bool) -> Result<ValidJson, E> {
        Ok(ValidJson)
    }

    fn visit_i64<E>(self, _: i64) -> Result<ValidJson, E> {
        Ok(ValidJson)
    }

    fn visit_u64<E>(self, _: u64) -> Result<ValidJson, E> {
        Ok(ValidJson)
    }

    fn visit_f64<E>(self, _: f64) -> Result<ValidJson, E> {
        Ok(ValidJson)
    }

    fn visit_str<E>(self, _: &str) -> Result<ValidJson, E> {
        Ok(ValidJson)
    }

    fn visit_unit<E>(self) -> Result<ValidJson, E> {
        Ok(ValidJson)
    }

    fn visit_seq<A: SeqAccess<'de>>(self, mut items: A) -> Result<ValidJson, A::Error> {
        while let Some(ValidJson) = items.next_element()? {}
        Ok(ValidJson)
    }

    fn visit_map<A: MapAccess<'de>>(self, mut members: A) -> Result<ValidJson, A::Error> {
        while let Some((ValidJson, ValidJson)) = members.next_entry()? {}
        Ok(ValidJson)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;
    use serde_json::{Map, Value};

    /// The value that the JSON library builds.
    fn built(json: Json<'_>) -> Value {
        match json.shape() {
            JsonShape::Null => Value::Null,
            JsonShape::Bool(flag) => Value::Bool(flag),
            JsonShape::Number(number) => Value::Number(number),
            JsonShape::String(text) => Value::String(text.get().into_owned()),
            JsonShape::Array(items) => Value::Array(items.map(built).collect()),
            JsonShape::Object(members) => {
                let mut map = Map::new();
                for (key, value) in members {
                    map.insert(key.get().into_owned(), built(value));
                }
                Value::Object(map)
            }
        }
    }

    fn same_as_the_library(text: &str) {
        let checked = Document::check(text.to_owned());
        let parsed = serde_json::from_str::<Value>(text);
        match (checked, parsed) {
            (Ok(checked), Ok(parsed)) => assert_eq!(built(checked.root()), parsed, "{text}"),
            (Err(checked), Err(parsed)) => {
                assert_eq!(checked.to_string(), parsed.to_string(), "{text}")
            }
            (checked, parsed) => panic!("{text}: {checked:?}, {parsed:?}"),
        }
    }

    #[test]
    fn unusual_json_reads_as_serde_json_reads_it() {
        let deep = |depth: usize| "[".repeat(depth) + &"]".repeat(depth);
        for text in [
            " { \"a\" : [ 1 , -2.5e3 , true , null ] , \"a\" : \"\\u00e9\\ud83d\\ude42\\\"\\\\\\/\" } \n",
            "[]",
            "{}",
            "[[],{},[{}],\"]\",\"\\\"}\"]",
            "{\"\\u0061\":1,\"\":{\"}\":[]}}",
            "\"\\ud800\"",
            "\"\\ud800\\u0041\"",
            "[1e999]",
            "[1,]",
            "{\"a\"}",
            "",
            "1 2",
            "18446744073709551615",
            "-9223372036854775808",
            "123456789012345678901234567890",
            "-0",
            "\"a\nb\"",
            &deep(127),
            &deep(128),
            &deep(100_000),
        ] {
            same_as_the_library(text);
        }
    }

    fn value() -> impl Strategy<Value = Value> {
        let leaf = prop_oneof![
            Just(Value::Null),
            any::<bool>().prop_map(Value::from),
            any::<i64>().prop_map(Value::from),
            any::<f64>().prop_map(Value::from),
            any::<String>().prop_map(Value::from),
            "[\\x00-\\x7f]{0,12}".prop_map(Value::from),
        ];
        leaf.prop_recursive(4, 64, 6, |inner| {
            let members = prop::collection::vec((any::<String>(), inner.clone()), 0..6);
            prop_oneof![
                prop::collection::vec(inner, 0..6).prop_map(Value::from),
                members.prop_map(|members| members.into_iter().collect::<Map<_, _>>().into()),
            ]
        })
    }

    proptest! {
            #[test]
            fn random_json_values_read_as_serde_json_reads_them(value in value(), pretty: bool) {
                let text = if pretty {
    serde_json::to_string_pretty(&value).unwrap()
    } else {
    value.to_string()
    };
                same_as_the_library(&text);
            }

            #[test]
            fn noise_is_accepted_and_read_as_serde_json_does(text in "[\\[\\]{}:,\" \\\\u0-9a-f.\\-truenl]{0,40}") {
                same_as_the_library(&text);
            }
        }
}
