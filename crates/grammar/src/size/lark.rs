//! Sizes of grammars in Lark's syntax. A terminal is one expression with those that it names, which
//! the library writes out.

use super::GrammarSize;
use crate::expressions::of_schema;
use serde_json::Value;
use std::collections::HashMap;

/// A part of a body.
#[derive(Clone, Copy)]
enum BodyPart<'a> {
    Name(&'a str),
    /// An expression of so many parts.
    Regex(u64),
    /// A sign or a text.
    Other,
}

/// The bodies of a grammar, by their names.
#[derive(Default)]
struct LarkBodies<'a> {
    found: Vec<(&'a str, Vec<BodyPart<'a>>)>,
    /// Parts of the last body before this line.
    line_begin: usize,
    line_name: Option<&'a str>,
}

impl<'a> LarkBodies<'a> {
    fn push(&mut self, part: BodyPart<'a>) {
        if self.found.is_empty() {
            self.found.push(("", Vec::new()));
        }
        if let Some((_, body)) = self.found.last_mut() {
            if let (BodyPart::Name(name), true) = (part, body.len() == self.line_begin) {
                self.line_name = Some(name);
            }
            body.push(part);
        }
    }

    fn is_line_begin(&self) -> bool {
        self.found.last().map_or(0, |(_, body)| body.len()) == self.line_begin
    }

    fn line(&mut self) {
        self.line_begin = self.found.last().map_or(0, |(_, body)| body.len());
        self.line_name = None;
    }

    /// The line so far is the head of a new body.
    fn colon(&mut self) {
        let Some(name) = self.line_name.take() else {
            return;
        };
        let mut head = Vec::new();
        if let Some((_, body)) = self.found.last_mut() {
            head = body.split_off(self.line_begin);
        }
        head.retain(|part| matches!(part, BodyPart::Regex(_)));
        self.line_begin = head.len();
        self.found.push((name, head));
    }
}

/// Whether a name is that of a terminal, which is one expression with those that it names.
fn is_terminal(name: &str) -> bool {
    let first = name.trim_start_matches('_').chars().next();
    first.is_none_or(|first| first.is_ascii_uppercase())
}

impl GrammarSize {
    pub(super) fn add_lark(&mut self, lark: &str) {
        let mut bodies = LarkBodies::default();
        let mut rest = lark;
        while let Some(letter) = rest.chars().next() {
            let taken = match letter {
                '\n' => {
                    bodies.line();
                    1
                }
                '#' => rest.find('\n').unwrap_or(rest.len()),
                '/' if rest.starts_with("//") => rest.find('\n').unwrap_or(rest.len()),
                '"' => {
                    bodies.push(BodyPart::Other);
                    quoted_end(rest, '"')
                }
                '/' => {
                    let end = quoted_end(rest, '/');
                    let flags = rest[end..].chars().take_while(char::is_ascii_lowercase);
                    let ignores_case = flags.into_iter().any(|flag| flag == 'i');
                    let regex = rest[..end].trim_matches('/');
                    let parts = if ignores_case {
                        self.regex_parts(&format!("(?i){regex}"))
                    } else {
                        self.regex_parts(regex)
                    };
                    bodies.push(BodyPart::Regex(parts));
                    end
                }
                '%' => self.directive(rest, &mut bodies),
                ':' => {
                    bodies.colon();
                    1
                }
                _ if letter.is_ascii_alphanumeric() || letter == '_' => {
                    let is_part = |c: char| c.is_ascii_alphanumeric() || matches!(c, '_' | '-');
                    let end = rest.find(|c| !is_part(c)).unwrap_or(rest.len());
                    bodies.push(BodyPart::Name(&rest[..end]));
                    end
                }
                // A mark before the name of a rule.
                '?' if bodies.is_line_begin() => 1,
                ' ' | '\t' | '\r' | '!' | '|' => 1,
                other => {
                    bodies.push(BodyPart::Other);
                    other.len_utf8()
                }
            };
            rest = &rest[taken..];
        }
        self.add_bodies(&bodies.found);
    }

    /// Reads a directive, with the JSON behind it; returns the length of both.
    fn directive(&mut self, text: &str, bodies: &mut LarkBodies<'_>) -> usize {
        let is_part = |c: char| c.is_ascii_alphabetic();
        let end = text[1..]
            .find(|c| !is_part(c))
            .map_or(text.len(), |end| end + 1);
        match &text[1..end] {
            "json" | "llguidance" | "regex" => {
                bodies.push(BodyPart::Other);
                let mut values = serde_json::Deserializer::from_str(&text[end..]).into_iter();
                let value: Option<Value> = values.next().and_then(Result::ok);
                if let Some(value) = value {
                    self.add_schema(&value);
                    let misread = of_schema(&value).into_iter().find_map(|e| e.check().err());
                    self.misread = self.misread.take().or(misread);
                    return end + values.byte_offset();
                }
            }
            "ignore" | "import" | "declare" => bodies.found.push(("", Vec::new())),
            _ => bodies.push(BodyPart::Other),
        }
        end
    }

    fn add_bodies(&mut self, bodies: &[(&str, Vec<BodyPart<'_>>)]) {
        let mut terminals: HashMap<&str, TerminalSize<'_>> = HashMap::new();
        for (name, body) in bodies {
            if is_terminal(name) {
                let terminal = terminals.entry(name).or_default();
                terminal.bodies.push(body);
                continue;
            }
            // A rule has its expressions apart from each other.
            for part in body {
                if let BodyPart::Regex(parts) = part {
                    self.add_parts(*parts);
                }
            }
        }
        let names: Vec<&str> = terminals.keys().copied().collect();
        for name in names {
            let parts = terminal_parts(name, &mut terminals);
            self.add_parts(parts);
        }
    }
}

#[derive(Default)]
struct TerminalSize<'a> {
    bodies: Vec<&'a [BodyPart<'a>]>,
    /// `Some(0)` while it is found: one that names itself is refused by the library.
    parts: Option<u64>,
}

/// The parts of a terminal with those that it names.
fn terminal_parts<'a>(name: &str, terminals: &mut HashMap<&'a str, TerminalSize<'a>>) -> u64 {
    let Some(terminal) = terminals.get_mut(name) else {
        return 1;
    };
    if let Some(parts) = terminal.parts {
        return parts;
    }
    terminal.parts = Some(0);
    let bodies = terminal.bodies.clone();
    let mut parts = 0_u64;
    for part in bodies.into_iter().flatten() {
        parts = parts.saturating_add(match part {
            BodyPart::Name(name) => terminal_parts(name, terminals),
            BodyPart::Regex(parts) => *parts,
            BodyPart::Other => 1,
        });
    }
    if let Some(terminal) = terminals.get_mut(name) {
        terminal.parts = Some(parts);
    }
    parts
}

/// The end of a text that begins with a mark and ends with it, or of one without an end.
fn quoted_end(text: &str, mark: char) -> usize {
    let mut is_escaped = false;
    for (at, letter) in text.char_indices().skip(1) {
        match letter {
            _ if is_escaped => is_escaped = false,
            '\\' => is_escaped = true,
            _ if letter == mark => return at + 1,
            _ => {}
        }
    }
    text.len()
}
