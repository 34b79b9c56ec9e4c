//! A call as its name, and each argument between tags.

use super::calls::{BodyStep, CallBody, CallHead};
use super::escaped_call::push_escaped;
use super::json_scan::JsonScan;
use super::tool_spec::{ParameterKind, ToolSpec};
use serde_json::Value;
use std::sync::Arc;

/// A value whose kind is not text is held up to this many bytes; a longer one is a text.
const VALUE_BYTES_MAX: usize = 64 << 10;

/// The form of one format. An empty mark does not exist.
#[derive(Debug)]
pub(super) struct TaggedForm {
    /// Mark behind the name; without one the name ends at the first line break or `<`.
    pub(super) name_end: &'static str,
    pub(super) key_begin: &'static str,
    pub(super) key_end: &'static str,
    pub(super) value_begin: &'static str,
    pub(super) value_end: &'static str,
    pub(super) call_end: &'static str,
    /// Whether a value has a line break before and behind it that is not part of it.
    pub(super) has_lines: bool,
    /// Attribute of a key, up to its value: `true` if the value is a text, otherwise `false`.
    pub(super) text_attribute: &'static str,
}

impl TaggedForm {
    /// Marks within a call that are whole tags; an empty one does not exist.
    pub(super) fn tags(&self) -> [&'static str; 5] {
        let marks = [
            self.key_begin,
            self.key_end,
            self.value_begin,
            self.value_end,
            self.call_end,
        ];
        let is_tag = |mark: &str| mark.starts_with('<') && mark.ends_with('>');
        marks.map(|mark| if is_tag(mark) { mark } else { "" })
    }
}

/// Reads one call, and makes a JSON object of its arguments.
#[derive(Debug)]
pub(super) struct TaggedCall {
    form: &'static TaggedForm,
    tools: Arc<[ToolSpec]>,
    place: TagPlace,
    /// Name, key or value so far, or the beginning of a mark.
    text: String,
    name: String,
    kind: ParameterKind,
    /// Follows a value that is an object or a list: no mark within its strings ends it.
    scan: Option<JsonScan>,
    has_arguments: bool,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum TagPlace {
    Name,
    /// Before a key, or the end of the call.
    Between,
    Key,
    /// Before the mark of a value.
    BeforeValue,
    /// Behind the mark of a value: a line break may follow.
    ValueStart,
    /// Within a value that is held.
    Held,
    /// Within a text, of which only the beginning of its last mark is held.
    Text,
}

impl TaggedCall {
    pub(super) fn new(form: &'static TaggedForm, tools: Arc<[ToolSpec]>) -> Self {
        Self {
            form,
            tools,
            place: TagPlace::Name,
            text: String::new(),
            name: String::new(),
            kind: ParameterKind::Json,
            scan: None,
            has_arguments: false,
        }
    }

    fn push_name(&mut self, c: char, arguments: &mut String) -> BodyStep {
        self.text.push(c);
        let mark = self.form.name_end;
        let name = if mark.is_empty() {
            self.text.strip_suffix(['\n', '<'])
        } else {
            self.text.strip_suffix(mark)
        };
        let Some(name) = name else {
            return BodyStep::More;
        };
        self.name = name.trim().to_owned();
        self.text.clear();
        if mark.is_empty() && c == '<' {
            self.text.push(c);
        }
        self.place = TagPlace::Between;
        arguments.push('{');
        BodyStep::Begin(CallHead {
            name: self.name.clone(),
            id: None,
        })
    }

    fn push_between(&mut self, c: char, arguments: &mut String) -> BodyStep {
        if self.text.is_empty() && c.is_whitespace() {
            return BodyStep::More;
        }
        self.text.push(c);
        let (key, end) = (self.form.key_begin, self.form.call_end);
        if self.text == key {
            self.text.clear();
            self.place = TagPlace::Key;
            BodyStep::More
        } else if self.text == end {
            arguments.push('}');
            BodyStep::End
        } else if key.starts_with(&self.text) || end.starts_with(&self.text) {
            BodyStep::More
        } else {
            // The call is over, though its last mark is missing.
            arguments.push('}');
            BodyStep::EndBefore(std::mem::take(&mut self.text))
        }
    }

    fn push_key(&mut self, c: char, arguments: &mut String) {
        self.text.push(c);
        let Some(key) = self.text.strip_suffix(self.form.key_end) else {
            return;
        };
        let attribute = self.form.text_attribute;
        let (key, is_text) = match key.split_once(attribute).filter(|_| !attribute.is_empty()) {
            Some((key, is_text)) => (key, Some(is_text.trim() == "true")),
            None => (key, None),
        };
        let key = key.trim();
        self.kind = match is_text {
            Some(true) => ParameterKind::Text,
            Some(false) => ParameterKind::Json,
            None => {
                let tool = self.tools.iter().find(|tool| tool.name() == self.name);
                tool.map_or(ParameterKind::Json, |tool| tool.kind(key))
            }
        };
        if self.has_arguments {
            arguments.push_str(", ");
        }
        self.has_arguments = true;
        arguments.push_str(&Value::from(key).to_string());
        arguments.push_str(": ");
        self.text.clear();
        self.place = TagPlace::BeforeValue;
        if self.form.value_begin.is_empty() {
            self.begin_value(arguments);
        }
    }

    /// Whether the character is in the mark of a value or before it.
    fn push_before_value(&mut self, c: char, arguments: &mut String) -> BodyStep {
        if self.text.is_empty() && c.is_whitespace() {
            return BodyStep::More;
        }
        self.text.push(c);
        if self.text == self.form.value_begin {
            self.text.clear();
            self.begin_value(arguments);
            BodyStep::More
        } else if self.form.value_begin.starts_with(&self.text) {
            BodyStep::More
        } else {
            arguments.push_str("null}");
            BodyStep::EndBefore(std::mem::take(&mut self.text))
        }
    }

    fn begin_value(&mut self, arguments: &mut String) {
        self.place = TagPlace::ValueStart;
        self.scan = None;
        if self.kind == ParameterKind::Text {
            arguments.push('"');
        }
    }

    fn push_value(&mut self, c: char, arguments: &mut String) {
        if self.place == TagPlace::ValueStart {
            self.place = if self.kind == ParameterKind::Text {
                TagPlace::Text
            } else {
                TagPlace::Held
            };
            if c == '\n' && self.form.has_lines {
                return;
            }
        }
        if self.place == TagPlace::Held {
            let may_be_list = self.kind == ParameterKind::Json && self.text.trim().is_empty();
            if may_be_list && matches!(c, '{' | '[') {
                self.scan = Some(JsonScan::default());
            }
            if let Some(scan) = &mut self.scan {
                scan.push(c);
            }
        }
        self.text.push(c);
        let mark = self.form.value_end;
        let is_within = self.scan.as_ref().is_some_and(JsonScan::is_in_string);
        let value = self.text.strip_suffix(mark).filter(|_| !is_within);
        if let Some(value) = value {
            let value = match value.strip_suffix('\n') {
                Some(line) if self.form.has_lines => line,
                _ => value,
            };
            match self.place {
                TagPlace::Text => {
                    push_escaped(value, arguments);
                    arguments.push('"');
                }
                _ => arguments.push_str(&json_of(value, self.kind)),
            }
            self.text.clear();
            self.place = TagPlace::Between;
            return;
        }
        if self.place == TagPlace::Held && self.text.len() > VALUE_BYTES_MAX {
            self.place = TagPlace::Text;
            arguments.push('"');
        }
        if self.place == TagPlace::Text {
            let kept = self.held_bytes();
            let rest = self.text.split_off(self.text.len() - kept);
            push_escaped(&self.text, arguments);
            self.text = rest;
        }
    }

    /// Bytes at the end of a text that may begin the value's last mark.
    fn held_bytes(&self) -> usize {
        let mark = self.form.value_end;
        let may_begin = |at: usize| {
            let rest = &self.text[at..];
            let line = rest.strip_prefix('\n').filter(|_| self.form.has_lines);
            mark.starts_with(rest) || line.is_some_and(|rest| mark.starts_with(rest))
        };
        let starts = self.text.char_indices().map(|(at, _)| at);
        let first = starts.into_iter().find(|at| may_begin(*at));
        first.map_or(0, |at| self.text.len() - at)
    }
}

impl CallBody for TaggedCall {
    fn push(&mut self, c: char, arguments: &mut String) -> BodyStep {
        match self.place {
            TagPlace::Name => return self.push_name(c, arguments),
            TagPlace::Between => return self.push_between(c, arguments),
            TagPlace::BeforeValue => return self.push_before_value(c, arguments),
            TagPlace::Key => self.push_key(c, arguments),
            TagPlace::ValueStart | TagPlace::Held | TagPlace::Text => self.push_value(c, arguments),
        }
        BodyStep::More
    }

    fn finish(&mut self, arguments: &mut String) {
        match self.place {
            TagPlace::Between => arguments.push('}'),
            TagPlace::Held => arguments.push_str(&Value::from(&*self.text).to_string()),
            TagPlace::Text => push_escaped(&self.text, arguments),
            TagPlace::Name | TagPlace::Key | TagPlace::BeforeValue | TagPlace::ValueStart => {}
        }
    }
}

/// The JSON of a value that was written without quotes.
pub(super) fn json_of(text: &str, kind: ParameterKind) -> String {
    let bare = text.trim();
    let null = || "null".to_owned();
    match kind {
        ParameterKind::TextOrNull if bare == "null" => return null(),
        ParameterKind::Text | ParameterKind::TextOrNull => {}
        ParameterKind::TextOrScalar | ParameterKind::Json => match bare {
            "None" => return null(),
            "True" => return "true".to_owned(),
            "False" => return "false".to_owned(),
            _ => match serde_json::from_str::<Value>(bare) {
                Ok(Value::String(_)) | Err(_) => {}
                Ok(Value::Array(_) | Value::Object(_)) if kind == ParameterKind::TextOrScalar => {}
                Ok(_) => return bare.to_owned(),
            },
        },
    }
    Value::from(text).to_string()
}
