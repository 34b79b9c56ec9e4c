//! A call in Python's syntax: `name(key=value, …)`.

use super::calls::{BodyStep, CallBody, CallHead};
use super::python_value::python_to_json;
use serde_json::Value;

/// Limit of one value, in bytes: it is held until its end, since its JSON differs from its text.
const VALUE_BYTES_MAX: usize = 64 << 10;

/// Reads one call, and makes a JSON object of its arguments.
#[derive(Debug, Default)]
pub(super) struct PythonicCall {
    place: PythonPlace,
    text: String,
    depth: usize,
    quote: Option<char>,
    is_escaped: bool,
    has_arguments: bool,
}

#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
enum PythonPlace {
    #[default]
    Name,
    /// Before a key, or the end of the call.
    Between,
    Key,
    Value,
}

pub(super) fn is_name(c: char) -> bool {
    c.is_alphanumeric() || matches!(c, '_' | '.' | '-')
}

impl PythonicCall {
    fn push_value(&mut self, c: char, arguments: &mut String) -> BodyStep {
        if let Some(quote) = self.quote {
            if self.is_escaped {
                self.is_escaped = false;
            } else if c == '\\' {
                self.is_escaped = true;
            } else if c == quote {
                self.quote = None;
            }
        } else {
            match c {
                '"' | '\'' => self.quote = Some(c),
                '(' | '[' | '{' => self.depth += 1,
                ',' if self.depth == 0 => {
                    self.end_value(arguments);
                    return BodyStep::More;
                }
                ')' if self.depth == 0 => {
                    self.end_value(arguments);
                    arguments.push('}');
                    return BodyStep::End;
                }
                ')' | ']' | '}' if self.depth > 0 => self.depth -= 1,
                _ => {}
            }
        }
        if self.text.len() > VALUE_BYTES_MAX {
            self.end_value(arguments);
            return BodyStep::EndBefore(c.into());
        }
        self.text.push(c);
        BodyStep::More
    }

    fn end_value(&mut self, arguments: &mut String) {
        let text = std::mem::take(&mut self.text);
        let text = text.trim();
        match python_to_json(text) {
            Some(json) => arguments.push_str(&json),
            None => arguments.push_str(&Value::from(text).to_string()),
        }
        self.place = PythonPlace::Between;
    }
}

impl CallBody for PythonicCall {
    fn push(&mut self, c: char, arguments: &mut String) -> BodyStep {
        match self.place {
            PythonPlace::Name if is_name(c) => {
                self.text.push(c);
                BodyStep::More
            }
            PythonPlace::Name if c == '(' && !self.text.is_empty() => {
                self.place = PythonPlace::Between;
                arguments.push('{');
                let name = std::mem::take(&mut self.text);
                BodyStep::Begin(CallHead { name, id: None })
            }
            PythonPlace::Name => BodyStep::NoCall,
            PythonPlace::Value => self.push_value(c, arguments),
            PythonPlace::Between | PythonPlace::Key if c.is_whitespace() => BodyStep::More,
            PythonPlace::Between | PythonPlace::Key if is_name(c) => {
                self.place = PythonPlace::Key;
                self.text.push(c);
                BodyStep::More
            }
            PythonPlace::Key if c == '=' => {
                if self.has_arguments {
                    arguments.push_str(", ");
                }
                self.has_arguments = true;
                let key = std::mem::take(&mut self.text);
                arguments.push_str(&Value::from(key).to_string());
                arguments.push_str(": ");
                self.place = PythonPlace::Value;
                BodyStep::More
            }
            PythonPlace::Between if c == ')' => {
                arguments.push('}');
                BodyStep::End
            }
            // An argument without a name, of which there is no JSON object.
            PythonPlace::Between | PythonPlace::Key => {
                arguments.push_str(&self.text);
                BodyStep::EndBefore(c.into())
            }
        }
    }

    fn finish(&mut self, arguments: &mut String) {
        arguments.push_str(&self.text);
    }
}
