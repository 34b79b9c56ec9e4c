//! Reading a JSON object field by field, so that an error names the field.
//!
//! Owns: the difference between an absent, a null and a mistyped field, and which fields were read.
//! Never: knows the names of fields.
//! Invariant: `null` reads as absent, as transformers, which writes these files, means it.

use crate::error::ConfigError;
use serde_json::{Map, Value};
use std::cell::RefCell;
use std::collections::BTreeSet;
use std::path::{Path, PathBuf};
use std::rc::Rc;

/// A JSON object of a file, with its place for error messages.
#[derive(Debug)]
pub struct ConfigFields {
    file: PathBuf,
    /// Path of the object in the file: empty, or `rope_scaling.`.
    prefix: String,
    map: Map<String, Value>,
    /// Paths of the fields of the whole file that were read; one of an object ends in a point if
    /// its fields count one by one.
    read: Rc<RefCell<BTreeSet<String>>>,
}

impl ConfigFields {
    /// Wraps the top object of a file.
    pub fn new(file: &Path, map: Map<String, Value>) -> Self {
        Self {
            file: file.to_owned(),
            prefix: String::new(),
            map,
            read: Rc::default(),
        }
    }

    /// The same object, with these numbers where a field is absent or null.
    pub(crate) fn with_defaults(&self, defaults: &[(&str, usize)]) -> Self {
        let mut map = self.map.clone();
        for (name, value) in defaults {
            if map.get(*name).is_none_or(Value::is_null) {
                map.insert((*name).to_owned(), (*value).into());
            }
        }
        Self {
            file: self.file.clone(),
            prefix: self.prefix.clone(),
            map,
            read: Rc::clone(&self.read),
        }
    }

    /// Whether the object has this field, be it null.
    pub fn has(&self, name: &str) -> bool {
        self.map.contains_key(name)
    }

    /// Value of a field; `None` if it is absent or null.
    pub fn get(&self, name: &str) -> Option<&Value> {
        self.mark_read(name);
        self.map.get(name).filter(|value| !value.is_null())
    }

    fn mark_read(&self, name: &str) {
        let path = format!("{}{name}", self.prefix);
        self.read.borrow_mut().insert(path);
    }

    /// Counts fields as read that have no effect, with all that they contain.
    pub fn ignore(&self, names: &[&str]) {
        names.iter().for_each(|name| self.mark_read(name));
    }

    /// Paths of the fields that no reader used, with their values, in the file's order; a null
    /// counts as absent.
    pub(crate) fn unread(&self) -> Vec<(String, &Value)> {
        let mut list = Vec::new();
        collect_unread(&self.read.borrow(), &self.prefix, &self.map, &mut list);
        list
    }

    /// Refuses a file with a field that no reader used.
    ///
    /// # Errors
    /// The first such field, with its value.
    pub fn refuse_unread(&self) -> Result<(), ConfigError> {
        match self.unread().first() {
            None => Ok(()),
            Some((path, value)) => {
                let problem = format!(
                    "{} is not known; it may change how weights are read. Remove it from the file \
                     if it does not",
                    shown(value)
                );
                Err(self.unsupported(path, problem))
            }
        }
    }

    /// Names of all fields.
    pub fn names(&self) -> impl Iterator<Item = &str> {
        self.map.keys().map(String::as_str)
    }

    /// Error of a field that contradicts itself or another.
    pub fn damaged(&self, name: &str, problem: impl Into<String>) -> ConfigError {
        ConfigError::Damaged {
            file: self.file.clone(),
            place: self.location(name),
            problem: problem.into(),
        }
    }

    /// Error of a field whose value is not supported.
    pub fn unsupported(&self, name: &str, problem: impl Into<String>) -> ConfigError {
        ConfigError::Unsupported {
            file: self.file.clone(),
            place: self.location(name),
            problem: problem.into(),
        }
    }

    fn location(&self, name: &str) -> String {
        format!("field `{}{name}`", self.prefix)
    }

    fn wrong_type(&self, name: &str, expected: &str, value: &Value) -> ConfigError {
        self.damaged(name, format!("should be {expected}, is {}", shown(value)))
    }

    /// Reads a whole number from 0 to `max`.
    ///
    /// # Errors
    /// If the field has another type or is out of range.
    pub fn count(&self, name: &str, max: usize) -> Result<Option<usize>, ConfigError> {
        let Some(value) = self.get(name) else {
            return Ok(None);
        };
        // Some writers store 4096 as 4096.0.
        let number = value.as_u64().or_else(|| {
            value
                .as_f64()
                .filter(|n| n.fract() == 0.0 && (0.0..9e15).contains(n))
                .map(|n| n as u64)
        });
        match number.and_then(|number| usize::try_from(number).ok()) {
            Some(number) if number <= max => Ok(Some(number)),
            _ => Err(self.wrong_type(name, &format!("a whole number from 0 to {max}"), value)),
        }
    }

    /// Reads a required whole number from 1 to `max`.
    ///
    /// # Errors
    /// If the field has another type, is out of range or is missing.
    pub fn size(&self, name: &str, max: usize) -> Result<usize, ConfigError> {
        match self.count(name, max)? {
            Some(0) => {
                let problem = format!("is 0; should be a whole number from 1 to {max}");
                Err(self.damaged(name, problem))
            }
            Some(number) => Ok(number),
            None => Err(self.damaged(name, "is missing")),
        }
    }

    /// Reads a finite number.
    ///
    /// # Errors
    /// If the field has another type or is not finite.
    pub fn number(&self, name: &str) -> Result<Option<f64>, ConfigError> {
        self.get(name)
            .map(|value| {
                value
                    .as_f64()
                    .filter(|number| number.is_finite())
                    .ok_or_else(|| self.wrong_type(name, "a number", value))
            })
            .transpose()
    }

    /// Reads true or false.
    ///
    /// # Errors
    /// If the field has another type.
    pub fn flag(&self, name: &str) -> Result<Option<bool>, ConfigError> {
        self.get(name)
            .map(|value| {
                value
                    .as_bool()
                    .ok_or_else(|| self.wrong_type(name, "true or false", value))
            })
            .transpose()
    }

    /// Reads a text.
    ///
    /// # Errors
    /// If the field has another type.
    pub fn text(&self, name: &str) -> Result<Option<&str>, ConfigError> {
        self.get(name)
            .map(|value| {
                value
                    .as_str()
                    .ok_or_else(|| self.wrong_type(name, "a text", value))
            })
            .transpose()
    }

    /// Reads a list of texts.
    ///
    /// # Errors
    /// If the field has another type.
    pub fn texts(&self, name: &str) -> Result<Option<Vec<&str>>, ConfigError> {
        self.get(name)
            .map(|value| {
                value
                    .as_array()
                    .and_then(|list| list.iter().map(Value::as_str).collect())
                    .ok_or_else(|| self.wrong_type(name, "a list of texts", value))
            })
            .transpose()
    }

    /// Reads a list of whole numbers up to `max`.
    ///
    /// # Errors
    /// If the field has another type or one is out of range.
    pub fn counts(&self, name: &str, max: usize) -> Result<Option<Vec<usize>>, ConfigError> {
        let one = |value: &Value| {
            let number = value.as_u64().and_then(|n| usize::try_from(n).ok());
            number.filter(|number| *number <= max)
        };
        self.get(name)
            .map(|value| {
                let list = value.as_array();
                let list = list.and_then(|list| list.iter().map(one).collect());
                let expected = format!("a list of whole numbers up to {max}");
                list.ok_or_else(|| self.wrong_type(name, &expected, value))
            })
            .transpose()
    }

    /// Reads a list of finite numbers.
    ///
    /// # Errors
    /// If the field has another type.
    pub fn numbers(&self, name: &str) -> Result<Option<Vec<f64>>, ConfigError> {
        let one = |value: &Value| value.as_f64().filter(|number| number.is_finite());
        self.get(name)
            .map(|value| {
                let list = value.as_array();
                let list = list.and_then(|list| list.iter().map(one).collect());
                list.ok_or_else(|| self.wrong_type(name, "a list of numbers", value))
            })
            .transpose()
    }

    /// Reads a nested object, whose fields then count one by one as read or not.
    ///
    /// # Errors
    /// If the field has another type.
    pub fn object(&self, name: &str) -> Result<Option<Self>, ConfigError> {
        self.get(name)
            .map(|value| match value {
                Value::Object(map) => {
                    let prefix = format!("{}{name}.", self.prefix);
                    self.read.borrow_mut().insert(prefix.clone());
                    Ok(Self {
                        file: self.file.clone(),
                        prefix,
                        map: map.clone(),
                        read: self.read.clone(),
                    })
                }
                other => Err(self.wrong_type(name, "an object", other)),
            })
            .transpose()
    }

    /// Reads one token id or a list of them. Ids outside a vocabulary of this size, such as -1, can
    /// match no token: they are ignored here, and the API, which ignores the same ones, logs a
    /// warning. Ids above `id_max` are refused.
    ///
    /// # Errors
    /// If the field has another type or an id is above `id_max`.
    pub fn token_ids(
        &self,
        name: &str,
        vocab_size: usize,
        id_max: u64,
    ) -> Result<Option<Vec<u32>>, ConfigError> {
        let Some(value) = self.get(name) else {
            return Ok(None);
        };
        let list = match value {
            Value::Array(list) => list.as_slice(),
            one => std::slice::from_ref(one),
        };
        let is_id = |value: &Value| {
            value.as_i64().is_some_and(|id| id < 0) || value.as_u64().is_some_and(|id| id <= id_max)
        };
        if !list.iter().all(is_id) {
            let last = vocab_size.saturating_sub(1);
            let expected =
                format!("a token id from 0 to {last}, the vocabulary's last, or a list of them");
            return Err(self.wrong_type(name, &expected, value));
        }
        let ids = list.iter().filter_map(|value| {
            let id = value.as_u64().filter(|id| *id < vocab_size as u64)?;
            u32::try_from(id).ok()
        });
        Ok(Some(ids.collect()))
    }
}

/// A value as errors show it: its beginning, if it is long.
pub(crate) fn shown(value: &Value) -> String {
    const CHARS_MAX: usize = 60;
    let text = value.to_string();
    match text.char_indices().nth(CHARS_MAX) {
        Some((end, _)) => format!("{}…", &text[..end]),
        None => text,
    }
}

fn collect_unread<'a>(
    read: &BTreeSet<String>,
    prefix: &str,
    map: &'a Map<String, Value>,
    list: &mut Vec<(String, &'a Value)>,
) {
    for (name, value) in map {
        let path = format!("{prefix}{name}");
        let opened = format!("{path}.");
        match value {
            Value::Null => {}
            Value::Object(inside) if read.contains(&opened) => {
                collect_unread(read, &opened, inside, list);
            }
            _ if read.contains(&path) => {}
            _ => list.push((path, value)),
        }
    }
}
