//! A call as a JSON object with name and arguments.

use super::calls::{BodyStep, CallBody, CallHead, ObjectForm};
use super::json_scan::{JsonScan, ScanStep};
use serde_json::Value;

/// Names of the members that have a call's id, and its arguments.
const ID: &str = "id";
const ARGUMENTS: [&str; 2] = ["arguments", "parameters"];

/// Reads `{"name": …, "arguments": {…}}`, in any order and with other members. Arguments that
/// follow the name are not held back.
#[derive(Debug)]
pub(super) struct ObjectCall {
    form: &'static ObjectForm,
    place: ObjectPlace,
    /// Text of the current key or value.
    raw: String,
    scan: JsonScan,
    key: String,
    name: Option<String>,
    id: Option<String>,
    /// Arguments that came before the name.
    arguments: Option<String>,
    has_begun: bool,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum ObjectPlace {
    Start,
    /// A key follows, or the end of the object.
    Member,
    Key,
    Colon,
    Value,
    /// Within a value that is held.
    Held,
    /// Within the arguments of a call that has begun.
    Arguments,
    /// A comma follows, or the end of the object.
    Comma,
}

impl ObjectCall {
    pub(super) fn new(form: &'static ObjectForm) -> Self {
        Self {
            form,
            place: ObjectPlace::Start,
            raw: String::new(),
            scan: JsonScan::default(),
            key: String::new(),
            name: None,
            id: None,
            arguments: None,
            has_begun: false,
        }
    }

    fn head(&mut self) -> Option<CallHead> {
        let name = self.name.take()?;
        self.has_begun = true;
        let id = self.id.take();
        Some(CallHead { name, id })
    }

    /// This character is no part of a call.
    fn stray(&self, c: char) -> BodyStep {
        if self.has_begun {
            BodyStep::EndBefore(c.into())
        } else {
            BodyStep::NoCall
        }
    }

    /// Begins a key or a value with this character.
    fn begin(&mut self, place: ObjectPlace, c: char) -> ScanStep {
        self.place = place;
        self.scan = JsonScan::default();
        self.raw.clear();
        self.raw.push(c);
        self.scan.push(c)
    }

    /// Takes a value that was held.
    fn take_value(&mut self) -> Result<(), ()> {
        self.place = ObjectPlace::Comma;
        let is_arguments = ARGUMENTS.contains(&&*self.key);
        let is_name = self.key == self.form.name;
        if !is_arguments && !is_name && self.key != ID {
            return Ok(());
        }
        let value: Value = serde_json::from_str(&self.raw).map_err(drop)?;
        match value {
            Value::String(name) if is_name => self.name = Some(name),
            Value::String(id) if self.key == ID => self.id = Some(id),
            _ if self.key == ID => {}
            Value::Null if is_arguments => self.arguments = Some("{}".to_owned()),
            Value::Object(_) if is_arguments => self.arguments = Some(self.raw.clone()),
            // Some models write the object as a text.
            Value::String(text) if is_arguments => {
                let object: Value = serde_json::from_str(&text).map_err(drop)?;
                self.arguments = Some(text).filter(|_| object.is_object());
                return self.arguments.as_ref().map(drop).ok_or(());
            }
            _ => return Err(()),
        }
        Ok(())
    }

    fn held_step(&mut self, step: ScanStep, c: char) -> BodyStep {
        match step {
            ScanStep::Inside => BodyStep::More,
            ScanStep::Last => match self.take_value() {
                Ok(()) => BodyStep::More,
                Err(()) => self.stray(c),
            },
            ScanStep::Behind | ScanStep::Stray => self.stray(c),
        }
    }

    fn close(&mut self, arguments: &mut String) -> BodyStep {
        if self.has_begun {
            return BodyStep::End;
        }
        let held = self.arguments.take();
        match self.head() {
            Some(head) => {
                arguments.push_str(held.as_deref().unwrap_or("{}"));
                BodyStep::Whole(head)
            }
            None => BodyStep::NoCall,
        }
    }
}

impl CallBody for ObjectCall {
    fn push(&mut self, c: char, arguments: &mut String) -> BodyStep {
        let is_space = matches!(c, ' ' | '\t' | '\n' | '\r');
        match self.place {
            ObjectPlace::Arguments => {
                let step = self.scan.push(c);
                match step {
                    ScanStep::Inside | ScanStep::Last => arguments.push(c),
                    ScanStep::Behind | ScanStep::Stray => return BodyStep::EndBefore(c.into()),
                }
                if step == ScanStep::Last {
                    self.place = ObjectPlace::Comma;
                }
                BodyStep::More
            }
            ObjectPlace::Held => match self.scan.push(c) {
                ScanStep::Behind => match self.take_value() {
                    Ok(()) => self.push(c, arguments),
                    Err(()) => self.stray(c),
                },
                step => {
                    self.raw.push(c);
                    self.held_step(step, c)
                }
            },
            ObjectPlace::Key => {
                self.raw.push(c);
                if self.scan.push(c) != ScanStep::Last {
                    return BodyStep::More;
                }
                self.place = ObjectPlace::Colon;
                match serde_json::from_str(&self.raw) {
                    Ok(key) => {
                        self.key = key;
                        BodyStep::More
                    }
                    Err(_) => self.stray(c),
                }
            }
            _ if is_space => BodyStep::More,
            ObjectPlace::Start if c == '{' => {
                self.place = ObjectPlace::Member;
                BodyStep::More
            }
            ObjectPlace::Member if c == '"' => {
                self.begin(ObjectPlace::Key, c);
                BodyStep::More
            }
            ObjectPlace::Colon if c == ':' => {
                self.place = ObjectPlace::Value;
                BodyStep::More
            }
            ObjectPlace::Value => {
                let is_begin = c == '{' && ARGUMENTS.contains(&&*self.key);
                let step = self.begin(ObjectPlace::Held, c);
                if is_begin && let Some(head) = self.head() {
                    self.place = ObjectPlace::Arguments;
                    arguments.push(c);
                    return BodyStep::Begin(head);
                }
                self.held_step(step, c)
            }
            ObjectPlace::Comma if c == ',' => {
                self.place = ObjectPlace::Member;
                BodyStep::More
            }
            ObjectPlace::Comma | ObjectPlace::Member if c == '}' => self.close(arguments),
            _ => self.stray(c),
        }
    }

    fn finish(&mut self, _: &mut String) {}
}
