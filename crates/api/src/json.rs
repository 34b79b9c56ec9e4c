//! JSON as it stands in a request's body: checked once, and read where it lies.
//!
//! Owns: walking over checked JSON without building values, so that what nobody asks for costs nothing.
//! Never: knows which fields there are. Invariant: a [`Json`] is exactly one value of a text that the JSON
//! library has accepted, so that walking it cannot fail.

use serde::Deserialize;
use serde::de::{Deserializer, MapAccess, SeqAccess, Visitor};
use serde_json::Number;
use std::borrow::Cow;
use std::fmt;
use std::ops::Range;
use std::sync::Arc;

const BLANKS: [char; 4] = [' ', '\t', '\n', '\r'];

/// A checked text. Clones are the same text.
#[derive(Clone, Debug)]
pub(crate) struct Document(Arc<String>);

impl Document {
    /// Checks a text; builds nothing.
    ///
    /// # Errors
    /// The JSON library's errors: not JSON, nested too deeply, or a number that is too large.
    pub(crate) fn check(text: String) -> Result<Self, serde_json::Error> {
        serde_json::from_str::<Checked>(&text)?;
        Ok(Self(Arc::new(text)))
    }

    /// Bytes of the text.
    pub(crate) fn len(&self) -> usize {
        self.0.len()
    }

    /// The whole value.
    pub(crate) fn root(&self) -> Json<'_> {
        Json(self.0.trim_matches(BLANKS))
    }

    /// A value of this text that outlives the borrow.
    ///
    /// # Panics
    /// If the value is of another text.
    pub(crate) fn part(&self, value: Json<'_>) -> Part {
        let start = (value.0.as_ptr() as usize).checked_sub(self.0.as_ptr() as usize);
        let start = start.expect("a value of this text");
        let at = start..start + value.0.len();
        assert!(at.end <= self.0.len(), "a value of this text");
        Part {
            document: self.clone(),
            at,
        }
    }
}

/// A value together with the text that it stands in.
#[derive(Clone, Debug)]
pub(crate) struct Part {
    document: Document,
    at: Range<usize>,
}

impl Part {
    /// The text that it stands in.
    pub(crate) fn document(&self) -> &Document {
        &self.document
    }

    /// The value.
    pub(crate) fn json(&self) -> Json<'_> {
        Json(&self.document.0[self.at.clone()])
    }

    /// The value that begins at this byte of this part's text.
    pub(crate) fn json_from(&self, at: usize) -> Json<'_> {
        let rest = &self.document.0[self.at.start + at..self.at.end];
        Json(&rest[..value_len(rest.as_bytes())])
    }

    /// Where a value begins within this part's text.
    pub(crate) fn offset(&self, value: Json<'_>) -> usize {
        value.0.as_ptr() as usize - self.json().0.as_ptr() as usize
    }

    /// A value within this one.
    pub(crate) fn part(&self, value: Json<'_>) -> Self {
        self.document.part(value)
    }
}

/// One value, where it stands.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Json<'a>(&'a str);

/// A value's type, and the way into it.
#[derive(Clone, Debug)]
pub(crate) enum Shape<'a> {
    Null,
    Bool(bool),
    Number(Number),
    String(Quoted<'a>),
    Array(Items<'a>),
    Object(Members<'a>),
}

impl<'a> Json<'a> {
    /// Its type and the way into it.
    pub(crate) fn shape(self) -> Shape<'a> {
        match self.0.as_bytes()[0] {
            b'n' => Shape::Null,
            b't' => Shape::Bool(true),
            b'f' => Shape::Bool(false),
            b'"' => Shape::String(Quoted(self.0)),
            b'[' => Shape::Array(Items { rest: &self.0[1..] }),
            b'{' => Shape::Object(Members { rest: &self.0[1..] }),
            _ => Shape::Number(serde_json::from_str(self.0).expect("a checked number")),
        }
    }

    /// Whether it is `null`.
    pub(crate) fn is_null(self) -> bool {
        self.0.starts_with('n')
    }

    /// Its text in the body.
    pub(crate) fn text(self) -> &'a str {
        self.0
    }
}

/// A string with its quotes and escapes.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Quoted<'a>(&'a str);

impl<'a> Quoted<'a> {
    fn within(self) -> &'a str {
        &self.0[1..self.0.len() - 1]
    }

    pub(crate) fn is_empty(self) -> bool {
        self.0.len() == 2
    }

    /// Its text, without quotes and escapes.
    pub(crate) fn get(self) -> Cow<'a, str> {
        let within = self.within();
        match within.contains('\\') {
            false => Cow::Borrowed(within),
            true => Cow::Owned(without_escapes(within)),
        }
    }

    /// Where it begins in the body.
    pub(crate) fn json(self) -> Json<'a> {
        Json(self.0)
    }
}

/// The values of an array.
#[derive(Clone, Debug)]
pub(crate) struct Items<'a> {
    rest: &'a str,
}

impl<'a> Iterator for Items<'a> {
    type Item = Json<'a>;

    fn next(&mut self) -> Option<Json<'a>> {
        self.rest = after_blanks(self.rest);
        let (value, rest) = first_value(self.rest)?;
        self.rest = rest;
        Some(value)
    }
}

/// The keys and values of an object, as often as they stand there.
#[derive(Clone, Debug)]
pub(crate) struct Members<'a> {
    rest: &'a str,
}

impl<'a> Iterator for Members<'a> {
    type Item = (Quoted<'a>, Json<'a>);

    fn next(&mut self) -> Option<(Quoted<'a>, Json<'a>)> {
        self.rest = after_blanks(self.rest);
        let (Json(key), rest) = first_value(self.rest)?;
        let rest = after_blanks(rest);
        let (value, rest) = first_value(rest)?;
        self.rest = rest;
        Some((Quoted(key), value))
    }
}

/// The rest of a text behind blanks, a comma or a colon.
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

/// Bytes of the value that a checked text begins with.
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

/// Bytes of the string that a checked text begins with, with both quotes.
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
    // A character is shorter than its escape.
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
                    // The other half follows: a half alone was not accepted.
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

/// The UTF-16 unit of four digits.
fn unit_of(digits: &str) -> u32 {
    u32::from_str_radix(&digits[..4], 16).expect("a checked escape")
}

/// Any value that the JSON library would build, without building it: the same texts are accepted, and the same
/// errors come of the others.
struct Checked;

impl<'de> Deserialize<'de> for Checked {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        deserializer.deserialize_any(Check)
    }
}

struct Check;

impl<'de> Visitor<'de> for Check {
    type Value = Checked;

    fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("any valid JSON value")
    }

    fn visit_bool<E>(self, _: bool) -> Result<Checked, E> {
        Ok(Checked)
    }

    fn visit_i64<E>(self, _: i64) -> Result<Checked, E> {
        Ok(Checked)
    }

    fn visit_u64<E>(self, _: u64) -> Result<Checked, E> {
        Ok(Checked)
    }

    fn visit_f64<E>(self, _: f64) -> Result<Checked, E> {
        Ok(Checked)
    }

    fn visit_str<E>(self, _: &str) -> Result<Checked, E> {
        Ok(Checked)
    }

    fn visit_unit<E>(self) -> Result<Checked, E> {
        Ok(Checked)
    }

    fn visit_seq<A: SeqAccess<'de>>(self, mut items: A) -> Result<Checked, A::Error> {
        while let Some(Checked) = items.next_element()? {}
        Ok(Checked)
    }

    fn visit_map<A: MapAccess<'de>>(self, mut members: A) -> Result<Checked, A::Error> {
        while let Some((Checked, Checked)) = members.next_entry()? {}
        Ok(Checked)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;
    use serde_json::{Map, Value};

    /// The value that the library would have built.
    fn built(json: Json<'_>) -> Value {
        match json.shape() {
            Shape::Null => Value::Null,
            Shape::Bool(flag) => Value::Bool(flag),
            Shape::Number(number) => Value::Number(number),
            Shape::String(text) => Value::String(text.get().into_owned()),
            Shape::Array(items) => Value::Array(items.map(built).collect()),
            Shape::Object(members) => {
                let mut map = Map::new();
                for (key, value) in members {
                    map.insert(key.get().into_owned(), built(value));
                }
                Value::Object(map)
            }
        }
    }

    fn same_as_the_library(text: &str) {
        let ours = Document::check(text.to_owned());
        let theirs = serde_json::from_str::<Value>(text);
        match (ours, theirs) {
            (Ok(ours), Ok(theirs)) => assert_eq!(built(ours.root()), theirs, "{text}"),
            (Err(ours), Err(theirs)) => assert_eq!(ours.to_string(), theirs.to_string(), "{text}"),
            (ours, theirs) => panic!("{text}: {ours:?}, {theirs:?}"),
        }
    }

    #[test]
    fn odd_texts_read_as_the_library_reads_them() {
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
        fn values_read_as_the_library_reads_them(value in value(), pretty: bool) {
            let text = match pretty {
                true => serde_json::to_string_pretty(&value).unwrap(),
                false => value.to_string(),
            };
            same_as_the_library(&text);
        }

        #[test]
        fn noise_reads_as_the_library_reads_it(text in "[\\[\\]{}:,\" \\\\u0-9a-f.\\-truenl]{0,40}") {
            same_as_the_library(&text);
        }
    }
}
