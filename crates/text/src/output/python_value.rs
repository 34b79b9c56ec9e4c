//! Literals of Python as JSON.

use serde_json::{Map, Value};
use std::iter::Peekable;
use std::str::Chars;

/// Depth of lists and mappings in a literal.
const DEPTH_MAX: u32 = 64;

/// Returns the JSON of a value, which is JSON itself or a literal of Python: a string, a number,
/// `True`, `False`, `None`, a list, a tuple or a mapping of these, with JSON's words among them.
pub(super) fn python_to_json(text: &str) -> Option<String> {
    if let Ok(value) = serde_json::from_str::<Value>(text) {
        return Some(value.to_string());
    }
    let mut chars = text.chars().peekable();
    let value = value(&mut chars, DEPTH_MAX)?;
    skip_spaces(&mut chars);
    chars.next().is_none().then(|| value.to_string())
}

fn skip_spaces(chars: &mut Peekable<Chars<'_>>) {
    while chars.next_if(|c| c.is_whitespace()).is_some() {}
}

fn value(chars: &mut Peekable<Chars<'_>>, depth: u32) -> Option<Value> {
    skip_spaces(chars);
    match *chars.peek()? {
        '"' | '\'' => string(chars).map(Value::String),
        '[' => items(chars, ']', depth).map(Value::Array),
        '(' => items(chars, ')', depth).map(Value::Array),
        '{' => mapping(chars, depth).map(Value::Object),
        _ => word(chars),
    }
}

fn items(chars: &mut Peekable<Chars<'_>>, end: char, depth: u32) -> Option<Vec<Value>> {
    let depth = depth.checked_sub(1)?;
    chars.next();
    let mut items = Vec::new();
    loop {
        skip_spaces(chars);
        if chars.next_if_eq(&end).is_some() {
            return Some(items);
        }
        items.push(value(chars, depth)?);
        skip_spaces(chars);
        if chars.next_if_eq(&',').is_none() && *chars.peek()? != end {
            return None;
        }
    }
}

fn mapping(chars: &mut Peekable<Chars<'_>>, depth: u32) -> Option<Map<String, Value>> {
    let depth = depth.checked_sub(1)?;
    chars.next();
    let mut members = Map::new();
    loop {
        skip_spaces(chars);
        if chars.next_if_eq(&'}').is_some() {
            return Some(members);
        }
        let key = string(chars)?;
        skip_spaces(chars);
        chars.next_if_eq(&':')?;
        members.insert(key, value(chars, depth)?);
        skip_spaces(chars);
        if chars.next_if_eq(&',').is_none() && *chars.peek()? != '}' {
            return None;
        }
    }
}

fn word(chars: &mut Peekable<Chars<'_>>) -> Option<Value> {
    let mut word = String::new();
    while let Some(c) = chars.next_if(|c| c.is_ascii_alphanumeric() || "+-._".contains(*c)) {
        word.push(c);
    }
    match word.as_str() {
        "True" | "true" => Some(Value::Bool(true)),
        "False" | "false" => Some(Value::Bool(false)),
        "None" | "null" => Some(Value::Null),
        number => serde_json::from_str::<Value>(number).ok(),
    }
}

fn string(chars: &mut Peekable<Chars<'_>>) -> Option<String> {
    let quote = chars.next_if(|c| matches!(c, '"' | '\''))?;
    let mut text = String::new();
    loop {
        match chars.next()? {
            c if c == quote => return Some(text),
            '\\' => match chars.next()? {
                'n' => text.push('\n'),
                't' => text.push('\t'),
                'r' => text.push('\r'),
                '\n' => {}
                'x' => text.push(escape(chars, 2)?),
                'u' => text.push(escape(chars, 4)?),
                c @ ('\\' | '\'' | '"') => text.push(c),
                // Python keeps the backslash of an escape that it does not know.
                c => text.extend(['\\', c]),
            },
            c => text.push(c),
        }
    }
}

fn escape(chars: &mut Peekable<Chars<'_>>, digits: usize) -> Option<char> {
    let digits: String = chars.by_ref().take(digits).collect();
    char::from_u32(u32::from_str_radix(&digits, 16).ok()?)
}
