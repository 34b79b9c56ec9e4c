//! A YAML text as a tree whose nodes know their positions.
//!
//! Owns: reading YAML, and reading one node as a value. Never knows a key. Invariant: every mistake
//! is a [`Diagnostic`] at its line and column, and reading goes on after it, so that one pass finds
//! all of them.

pub use serde_saphyr::Location;

use serde::de::{self, Deserialize, Deserializer, MapAccess, SeqAccess, Visitor};
use serde_saphyr::{DuplicateKeyPolicy, NonFiniteFloatPolicy, Options, Spanned};
use std::fmt;
use std::ops::RangeInclusive;
use std::path::Path;
use std::time::Duration;

/// A value with its position.
pub type YamlNode = Spanned<YamlValue>;

/// The kinds of value of a node.
#[derive(Clone, Debug, PartialEq)]
pub enum YamlValue {
    Nothing,
    Bool(bool),
    Integer(i64),
    Float(f64),
    Text(String),
    List(Vec<YamlNode>),
    Map(Vec<(Spanned<String>, YamlNode)>),
}

/// The longest time a file may name.
const TIME_MAX: Duration = Duration::from_secs(24 * 3600);

/// Nesting of lists and maps; a policy needs five levels, other files fewer. The reader recurses as
/// deep, and a file must not end the process that follows it.
const DEPTH_MAX: usize = 16;

/// Parses a text. A duplicate key is a mistake, and its first value counts.
pub fn parse(text: &str, diagnostics: &mut Diagnostics) -> Option<YamlNode> {
    // A duplicate key is reported, and then everything else is read as well.
    match serde_saphyr::from_str_with_options(text, options(DuplicateKeyPolicy::Error)) {
        Ok(tree) => Some(tree),
        Err(error) => {
            diagnostics.add_yaml_error(&error);
            let lenient = options(DuplicateKeyPolicy::FirstWins);
            serde_saphyr::from_str_with_options(text, lenient).ok()
        }
    }
}

fn options(duplicate_keys: DuplicateKeyPolicy) -> Options {
    serde_saphyr::options! {
        duplicate_keys: duplicate_keys,
        budget: serde_saphyr::budget! { max_depth: DEPTH_MAX },
        // The reader of the number checks its range.
        non_finite_float_policy: NonFiniteFloatPolicy::PassThrough,
        strict_booleans: true,
        with_snippet: false,
    }
}

/// One mistake in a file.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Diagnostic {
    /// From 1 on; 0 if the position is unknown.
    pub line: u64,
    pub column: u64,
    /// The mistake, and its correction.
    pub message: String,
}

impl fmt::Display for Diagnostic {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}:{}: {}", self.line, self.column, self.message)
    }
}

/// All mistakes of a file, a line each; `subject` is the kind of file, such as `the policy`.
pub fn mistakes_text(subject: &str, path: &Path, diagnostics: &[Diagnostic]) -> String {
    let path = path.display();
    let count = match diagnostics.len() {
        1 => "a mistake".to_owned(),
        count => format!("{count} mistakes"),
    };
    let lines = diagnostics
        .iter()
        .map(|diagnostic| format!("\n  {path}:{diagnostic}"));
    format!("{subject} {path} has {count}:{}", lines.collect::<String>())
}

/// The mistakes found so far.
#[derive(Debug, Default)]
pub struct Diagnostics(Vec<Diagnostic>);

impl Diagnostics {
    /// The mistakes, in the order of the text.
    pub fn into_sorted(mut self) -> Vec<Diagnostic> {
        self.0
            .sort_by_key(|diagnostic| (diagnostic.line, diagnostic.column));
        self.0
    }

    pub fn add(&mut self, at: Location, message: impl Into<String>) {
        self.0.push(Diagnostic {
            line: at.line(),
            column: at.column(),
            message: message.into(),
        });
    }

    fn add_yaml_error(&mut self, error: &serde_saphyr::Error) {
        use serde_saphyr::Error::{Budget, DuplicateMappingKey, MultipleDocuments};
        let bare = error.without_snippet();
        let at = bare.location().unwrap_or(Location::UNKNOWN);
        match bare {
            DuplicateMappingKey { key, .. } => {
                let key = key.as_deref().unwrap_or("?");
                return self.add(
                    at,
                    format!("`{key}` is there a second time; drop one of them"),
                );
            }
            MultipleDocuments { .. } => {
                return self.add(at, "the file is one document: drop what follows this line");
            }
            Budget { .. } => {
                let message = "the file has more entries, deeper ones or more repeated ones than any \
                            such file needs: is it one?";
                return self.add(at, message);
            }
            _ => {}
        }
        let message = bare.to_string();
        // The position is printed in front of it.
        let message = message.split(" at line ").next().unwrap_or_default();
        let message = message.lines().next().unwrap_or_default();
        let message = message.strip_prefix("error: ").unwrap_or(message);
        self.add(at, message.trim().trim_end_matches(['.', ',']));
    }

    /// A map's entries; anything else is a mistake.
    pub fn fields<'a>(
        &mut self,
        node: &'a YamlNode,
        subject: &'static str,
    ) -> Option<YamlFields<'a>> {
        match &node.value {
            YamlValue::Map(entries) => Some(YamlFields {
                at: node.referenced,
                subject,
                entries,
                read_keys: Vec::new(),
            }),
            other => {
                let (expected, got) = (subject, other.kind());
                self.add(
                    node.referenced,
                    format!("{expected} is a map of keys, not {got}"),
                );
                None
            }
        }
    }

    /// A list's entries; for anything else none, and a mistake.
    pub fn list<'a>(&mut self, node: &'a YamlNode, key: &str) -> &'a [YamlNode] {
        match &node.value {
            YamlValue::List(entries) => entries,
            other => {
                let got = other.kind();
                let message =
                    format!("`{key}` is a list, one entry in a line after `- `, and not {got}");
                self.add(node.referenced, message);
                &[]
            }
        }
    }

    pub fn text(&mut self, node: &YamlNode, key: &str) -> Option<String> {
        match &node.value {
            YamlValue::Text(text) if !text.is_empty() => Some(text.clone()),
            YamlValue::Text(_) => {
                self.add(node.referenced, format!("`{key}` is empty"));
                None
            }
            YamlValue::Bool(_) | YamlValue::Integer(_) | YamlValue::Float(_) => {
                let message = format!("`{key}` is a text; put {} in quotes", node.value);
                self.add(node.referenced, message);
                None
            }
            other => {
                let message = format!("`{key}` is a text, not {}", other.kind());
                self.add(node.referenced, message);
                None
            }
        }
    }

    pub fn boolean(&mut self, node: &YamlNode, key: &str) -> Option<bool> {
        if let YamlValue::Bool(truth) = node.value {
            return Some(truth);
        }
        let message = format!("`{key}` is true or false, not {}", node.value);
        self.add(node.referenced, message);
        None
    }

    pub fn integer(
        &mut self,
        node: &YamlNode,
        key: &str,
        range: &RangeInclusive<i64>,
    ) -> Option<i64> {
        if let YamlValue::Integer(number) = node.value
            && range.contains(&number)
        {
            return Some(number);
        }
        let (least, most) = (range.start(), range.end());
        let message = format!(
            "`{key}` is a whole number from {least} to {most}, not {}",
            node.value
        );
        self.add(node.referenced, message);
        None
    }

    /// A share above 0 and at most 1, in thousandths.
    pub fn permille(&mut self, node: &YamlNode, key: &str) -> Option<u32> {
        let share = match node.value {
            YamlValue::Integer(1) => 1.0,
            YamlValue::Float(share) => share,
            _ => 0.0,
        };
        let permille = (share * 1000.0).round();
        if (1.0..=1000.0).contains(&permille) {
            // At most 1000: no digit is lost.
            return Some(permille as u32);
        }
        let message = format!(
            "`{key}` is a share from 0.001 to 1, such as 0.95, not {}",
            node.value
        );
        self.add(node.referenced, message);
        None
    }

    /// A time: a number with its unit.
    pub fn time(&mut self, node: &YamlNode, key: &str) -> Option<Duration> {
        let example = "such as 500ms, 2s or 1.5m";
        let message = match &node.value {
            YamlValue::Text(text) => match parse_time(text) {
                Some(time) if time.is_zero() => {
                    format!(
                        "`{key}` is {text}: a time above 0, {example}; leave the key out for none"
                    )
                }
                Some(time) if time > TIME_MAX => format!("`{key}` is {text}: a day at most"),
                Some(time) => return Some(time),
                None => {
                    format!(
                        "`{key}` is a number with its unit (us, ms, s, m), {example}, not {text:?}"
                    )
                }
            },
            YamlValue::Integer(_) | YamlValue::Float(_) => {
                format!("`{key}` lacks a unit (us, ms, s, m): {}ms?", node.value)
            }
            other => format!("`{key}` is a time, {example}, not {other}"),
        };
        self.add(node.referenced, message);
        None
    }
}

/// Parses a time such as `500ms` or `1.5s`.
fn parse_time(text: &str) -> Option<Duration> {
    let digits = text.trim_end_matches(|c: char| c.is_ascii_alphabetic());
    let unit = match &text[digits.len()..] {
        "us" => 1e-6,
        "ms" => 1e-3,
        "s" => 1.0,
        "m" => 60.0,
        _ => return None,
    };
    let digits = digits.trim_end();
    let plain = digits.chars().all(|c| c.is_ascii_digit() || c == '.');
    let number: f64 = digits.parse().ok().filter(|_| plain)?;
    // Rounded, for 0.1 has no end in binary.
    let nanos = (number * unit * 1e9).round();
    Duration::try_from_secs_f64(nanos / 1e9).ok()
}

/// The entries of a map, taken one by one; keys that are left over are unknown.
pub struct YamlFields<'a> {
    pub at: Location,
    subject: &'static str,
    entries: &'a [(Spanned<String>, YamlNode)],
    read_keys: Vec<&'static str>,
}

impl<'a> YamlFields<'a> {
    /// The value of this key; none if it is not there, or there without a value.
    pub fn take(&mut self, key: &'static str) -> Option<&'a YamlNode> {
        self.read_keys.push(key);
        let found = self.entries.iter().find(|(name, _)| name.value == key);
        let (_, node) = found?;
        (node.value != YamlValue::Nothing).then_some(node)
    }

    /// The position of this key, whatever its value.
    pub fn place(&self, key: &str) -> Option<Location> {
        let found = self.entries.iter().find(|(name, _)| name.value == key);
        found.map(|(name, _)| name.referenced)
    }

    /// As [`Self::take`]; a missing key is a mistake.
    pub fn take_required(
        &mut self,
        key: &'static str,
        diagnostics: &mut Diagnostics,
    ) -> Option<&'a YamlNode> {
        let value = self.take(key);
        if value.is_none() {
            diagnostics.add(self.at, format!("{} lacks `{key}`", self.subject));
        }
        value
    }

    /// Reports every key that was not taken.
    pub fn reject_unknown(self, diagnostics: &mut Diagnostics) {
        for (name, _) in self.entries {
            if self.read_keys.contains(&name.value.as_str()) {
                continue;
            }
            let mut message = format!("{} has no key `{}`", self.subject, name.value);
            let near = self
                .read_keys
                .iter()
                .find(|key| distance(key, &name.value) <= 2);
            match near {
                Some(near) => message += &format!("; is `{near}` meant?"),
                None => message += &format!("; it may have {}", self.read_keys.join(", ")),
            }
            diagnostics.add(name.referenced, message);
        }
    }
}

/// Letters to change, add or drop (Levenshtein).
pub fn distance(one: &str, other: &str) -> usize {
    let other: Vec<char> = other.chars().collect();
    let mut row: Vec<usize> = (0..=other.len()).collect();
    for (i, a) in one.chars().enumerate() {
        let mut diagonal = i;
        row[0] = i + 1;
        for (j, b) in other.iter().enumerate() {
            let change = diagonal + usize::from(a != *b);
            diagonal = row[j + 1];
            row[j + 1] = change.min(row[j] + 1).min(diagonal + 1);
        }
    }
    row[other.len()]
}

impl YamlValue {
    /// The kind in words, with its article.
    pub fn kind(&self) -> &'static str {
        match self {
            Self::Nothing => "nothing",
            Self::Bool(_) => "true or false",
            Self::Integer(_) | Self::Float(_) => "a number",
            Self::Text(_) => "a text",
            Self::List(_) => "a list",
            Self::Map(_) => "a map",
        }
    }
}

impl fmt::Display for YamlValue {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Bool(truth) => write!(f, "{truth}"),
            Self::Integer(number) => write!(f, "{number}"),
            Self::Float(number) => write!(f, "{number}"),
            Self::Text(text) => write!(f, "{text:?}"),
            Self::Nothing | Self::List(_) | Self::Map(_) => f.write_str(self.kind()),
        }
    }
}

impl<'de> Deserialize<'de> for YamlValue {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        deserializer.deserialize_any(YamlValueVisitor)
    }
}

struct YamlValueVisitor;

impl<'de> Visitor<'de> for YamlValueVisitor {
    type Value = YamlValue;

    fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("any value")
    }

    fn visit_unit<E: de::Error>(self) -> Result<YamlValue, E> {
        Ok(YamlValue::Nothing)
    }

    fn visit_none<E: de::Error>(self) -> Result<YamlValue, E> {
        Ok(YamlValue::Nothing)
    }

    fn visit_some<D: Deserializer<'de>>(self, deserializer: D) -> Result<YamlValue, D::Error> {
        YamlValue::deserialize(deserializer)
    }

    fn visit_bool<E: de::Error>(self, truth: bool) -> Result<YamlValue, E> {
        Ok(YamlValue::Bool(truth))
    }

    fn visit_i64<E: de::Error>(self, number: i64) -> Result<YamlValue, E> {
        Ok(YamlValue::Integer(number))
    }

    fn visit_u64<E: de::Error>(self, number: u64) -> Result<YamlValue, E> {
        // A number too large for `i64` is kept roughly, for the message.
        Ok(i64::try_from(number).map_or(YamlValue::Float(number as f64), YamlValue::Integer))
    }

    fn visit_f64<E: de::Error>(self, number: f64) -> Result<YamlValue, E> {
        Ok(YamlValue::Float(number))
    }

    fn visit_str<E: de::Error>(self, text: &str) -> Result<YamlValue, E> {
        Ok(YamlValue::Text(text.to_owned()))
    }

    fn visit_seq<A: SeqAccess<'de>>(self, mut list: A) -> Result<YamlValue, A::Error> {
        let mut entries = Vec::new();
        while let Some(entry) = list.next_element()? {
            entries.push(entry);
        }
        Ok(YamlValue::List(entries))
    }

    fn visit_map<A: MapAccess<'de>>(self, mut map: A) -> Result<YamlValue, A::Error> {
        let mut entries = Vec::new();
        while let Some(entry) = map.next_entry()? {
            entries.push(entry);
        }
        Ok(YamlValue::Map(entries))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn times_are_exact_and_have_units() {
        let millis = |text| parse_time(text).map(|time| time.as_secs_f64() * 1e3);
        assert_eq!(parse_time("500ms"), Some(Duration::from_millis(500)));
        assert_eq!(parse_time("0.1s"), Some(Duration::from_millis(100)));
        assert_eq!(parse_time("250us"), Some(Duration::from_micros(250)));
        assert_eq!(parse_time("1.5m"), Some(Duration::from_secs(90)));
        assert_eq!(parse_time("2 s"), Some(Duration::from_secs(2)));
        for bad in [
            "",
            "ms",
            "-1s",
            "1e3s",
            "inf s",
            "1h",
            "1.2.3s",
            "s1",
            "99999999999999999999999s",
        ] {
            assert_eq!(millis(bad), None, "{bad}");
        }
    }

    #[test]
    fn a_typo_is_within_two_edits() {
        assert_eq!(distance("ttft", "tfft"), 1);
        assert_eq!(distance("attainment", "atainment"), 1);
        assert!(distance("ttft", "priority") > 2);
    }
}
