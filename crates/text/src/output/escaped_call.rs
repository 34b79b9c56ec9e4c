//! A call as Gemma writes it: `call:name{key:value, …}`, with texts between escape marks.

use super::calls::{BodyStep, CallBody, CallHead};
use serde_json::Value;

/// Text in front of a name.
pub(super) const PREFIX: &str = "call:";
/// Mark before and behind a text, within which every other character is itself.
pub(super) const ESCAPE: &str = "<|\"|>";
/// Limit of a key or of a value without marks, in bytes.
const WORD_BYTES_MAX: usize = 64 << 10;

/// Reads one call, and makes a JSON object of its arguments.
#[derive(Debug, Default)]
pub(super) struct EscapedCall {
    place: EscapedPlace,
    /// Name, key or value so far, or the beginning of a mark.
    text: String,
    /// Open objects and lists, the innermost last.
    open: Vec<Container>,
}

#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
enum EscapedPlace {
    #[default]
    Name,
    /// A key follows, or the end of its object.
    Key,
    /// A value follows, or the end of its list.
    Value,
    /// Within a number or a word.
    Word,
    Text,
    /// A comma follows, or the end of an object or list.
    Behind,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Container {
    Object,
    List,
}

impl Container {
    fn end(self) -> char {
        match self {
            Self::Object => '}',
            Self::List => ']',
        }
    }
}

impl EscapedCall {
    fn push_name(&mut self, c: char, arguments: &mut String) -> BodyStep {
        if c != '{' {
            self.text.push(c);
            let is_begun = self.text.starts_with(PREFIX) || PREFIX.starts_with(&self.text);
            return if is_begun {
                BodyStep::More
            } else {
                BodyStep::NoCall
            };
        }
        let Some(name) = self.text.strip_prefix(PREFIX) else {
            return BodyStep::NoCall;
        };
        let name = name.trim().to_owned();
        self.text.clear();
        self.begin(Container::Object, arguments);
        BodyStep::Begin(CallHead { name, id: None })
    }

    fn begin(&mut self, container: Container, arguments: &mut String) {
        self.open.push(container);
        let (place, begin) = match container {
            Container::Object => (EscapedPlace::Key, '{'),
            Container::List => (EscapedPlace::Value, '['),
        };
        self.place = place;
        arguments.push(begin);
    }

    fn push_key(&mut self, c: char, arguments: &mut String) -> BodyStep {
        match c {
            '}' if self.text.trim().is_empty() => self.close(c, arguments),
            ':' => {
                let key = self.text.trim();
                let key = key.strip_prefix(ESCAPE).unwrap_or(key);
                let key = key.strip_suffix(ESCAPE).unwrap_or(key);
                arguments.push_str(&Value::from(key).to_string());
                arguments.push_str(": ");
                self.text.clear();
                self.place = EscapedPlace::Value;
                BodyStep::More
            }
            _ if self.text.len() > WORD_BYTES_MAX => BodyStep::EndBefore(c.into()),
            _ => {
                self.text.push(c);
                BodyStep::More
            }
        }
    }

    fn push_value(&mut self, c: char, arguments: &mut String) -> BodyStep {
        match c {
            _ if self.text.is_empty() && c.is_whitespace() => {}
            '{' if self.text.is_empty() => self.begin(Container::Object, arguments),
            '[' if self.text.is_empty() => self.begin(Container::List, arguments),
            ']' if self.text.is_empty() => return self.close(c, arguments),
            // A value that was left out, whose end is this.
            ',' | '}' if self.text.is_empty() => return self.push_behind(c, arguments),
            _ => {
                self.text.push(c);
                if self.text == ESCAPE {
                    self.text.clear();
                    arguments.push('"');
                    self.place = EscapedPlace::Text;
                } else if !ESCAPE.starts_with(&self.text) {
                    self.place = EscapedPlace::Word;
                }
            }
        }
        BodyStep::More
    }

    fn push_word(&mut self, c: char, arguments: &mut String) -> BodyStep {
        let ends = matches!(c, ',' | '}' | ']');
        if !ends && self.text.len() <= WORD_BYTES_MAX {
            self.text.push(c);
            return BodyStep::More;
        }
        self.end_word(arguments);
        self.push_behind(c, arguments)
    }

    fn end_word(&mut self, arguments: &mut String) {
        let word = std::mem::take(&mut self.text);
        let word = word.trim();
        match serde_json::from_str::<Value>(word) {
            Ok(_) => arguments.push_str(word),
            Err(_) => arguments.push_str(&Value::from(word).to_string()),
        }
        self.place = EscapedPlace::Behind;
    }

    fn push_text(&mut self, c: char, arguments: &mut String) {
        self.text.push(c);
        if let Some(text) = self.text.strip_suffix(ESCAPE) {
            push_escaped(text, arguments);
            arguments.push('"');
            self.text.clear();
            self.place = EscapedPlace::Behind;
            return;
        }
        let mut starts = self.text.char_indices().map(|(at, _)| at);
        let held = starts.find(|at| ESCAPE.starts_with(&self.text[*at..]));
        let held = self.text.split_off(held.unwrap_or(self.text.len()));
        push_escaped(&self.text, arguments);
        self.text = held;
    }

    fn push_behind(&mut self, c: char, arguments: &mut String) -> BodyStep {
        match (c, self.open.last()) {
            (',', Some(container)) => {
                arguments.push_str(", ");
                self.place = match container {
                    Container::Object => EscapedPlace::Key,
                    Container::List => EscapedPlace::Value,
                };
                BodyStep::More
            }
            ('}' | ']', _) => self.close(c, arguments),
            _ if c.is_whitespace() => BodyStep::More,
            _ => BodyStep::EndBefore(c.into()),
        }
    }

    fn close(&mut self, c: char, arguments: &mut String) -> BodyStep {
        if self.open.last().is_none_or(|open| open.end() != c) {
            return BodyStep::EndBefore(c.into());
        }
        arguments.push(c);
        self.open.pop();
        self.text.clear();
        self.place = EscapedPlace::Behind;
        if self.open.is_empty() {
            BodyStep::End
        } else {
            BodyStep::More
        }
    }
}

impl CallBody for EscapedCall {
    fn push(&mut self, c: char, arguments: &mut String) -> BodyStep {
        match self.place {
            EscapedPlace::Name => self.push_name(c, arguments),
            EscapedPlace::Key => self.push_key(c, arguments),
            EscapedPlace::Value => self.push_value(c, arguments),
            EscapedPlace::Word => self.push_word(c, arguments),
            EscapedPlace::Text => {
                self.push_text(c, arguments);
                BodyStep::More
            }
            EscapedPlace::Behind => self.push_behind(c, arguments),
        }
    }

    fn finish(&mut self, arguments: &mut String) {
        match self.place {
            EscapedPlace::Word => self.end_word(arguments),
            EscapedPlace::Text => push_escaped(&self.text, arguments),
            EscapedPlace::Name | EscapedPlace::Key | EscapedPlace::Value | EscapedPlace::Behind => {
            }
        }
    }
}

/// Adds the inside of a JSON string.
pub(super) fn push_escaped(text: &str, arguments: &mut String) {
    let quoted = Value::from(text).to_string();
    arguments.push_str(&quoted[1..quoted.len() - 1]);
}
