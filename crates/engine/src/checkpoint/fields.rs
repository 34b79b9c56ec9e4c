//! Reading a JSON object field by field, so that an error names the field.
//!
//! Owns: the difference between an absent, a null and a mistyped field.
//! Never: knows the names of fields.
//! Invariant: `null` reads as absent, as transformers, which writes these files, means it.

use super::CheckpointError;
use serde_json::{Map, Value};
use std::io;
use std::path::{Path, PathBuf};

/// Limit of a configuration file in bytes; real ones are kilobytes.
const CONFIG_BYTES_MAX: u64 = 16 << 20;

/// A JSON object of a file, with its place for error messages.
#[derive(Debug)]
pub(super) struct ConfigFields {
    file: PathBuf,
    /// Path of the object in the file: empty, or `rope_scaling.`.
    prefix: String,
    map: Map<String, Value>,
}

impl ConfigFields {
    /// Reads a file; `None` if it is not there.
    pub(super) fn read(file: &Path) -> Result<Option<Self>, CheckpointError> {
        let bytes = match cleave_files::read(file, CONFIG_BYTES_MAX) {
            Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(None),
            Err(error) if error.kind() == io::ErrorKind::FileTooLarge => {
                return Err(CheckpointError::damaged(file, "size", error.to_string()));
            }
            Err(error) => return Err(CheckpointError::absent(file, error.to_string())),
            Ok(bytes) => bytes,
        };
        match serde_json::from_slice(&bytes) {
            Ok(Value::Object(map)) => Ok(Some(Self {
                file: file.to_owned(),
                prefix: String::new(),
                map,
            })),
            Ok(_) => Err(CheckpointError::damaged(
                file,
                "top",
                "is not a JSON object",
            )),
            Err(error) => Err(CheckpointError::damaged(file, "JSON", error.to_string())),
        }
    }

    /// Wraps an object that is about to be written to a file.
    pub(super) fn of(file: &Path, map: Map<String, Value>) -> Self {
        Self {
            file: file.to_owned(),
            prefix: String::new(),
            map,
        }
    }

    /// Value of a field; `None` if it is absent or null.
    pub(super) fn get(&self, name: &str) -> Option<&Value> {
        self.map.get(name).filter(|value| !value.is_null())
    }

    pub(super) fn names(&self) -> impl Iterator<Item = &str> {
        self.map.keys().map(String::as_str)
    }

    pub(super) fn damaged(&self, name: &str, problem: impl Into<String>) -> CheckpointError {
        CheckpointError::damaged(&self.file, self.place(name), problem)
    }

    pub(super) fn unsupported(&self, name: &str, problem: impl Into<String>) -> CheckpointError {
        CheckpointError::unsupported(&self.file, self.place(name), problem)
    }

    fn place(&self, name: &str) -> String {
        format!("field `{}{name}`", self.prefix)
    }

    fn wrong_type(&self, name: &str, wanted: &str, value: &Value) -> CheckpointError {
        let mut text = value.to_string();
        if text.len() > 60 {
            text = text.chars().take(60).chain("…".chars()).collect();
        }
        self.damaged(name, format!("should be {wanted}, is {text}"))
    }

    /// Reads a whole number from 0 to `max`.
    pub(super) fn count(&self, name: &str, max: usize) -> Result<Option<usize>, CheckpointError> {
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
    pub(super) fn size(&self, name: &str, max: usize) -> Result<usize, CheckpointError> {
        match self.count(name, max)? {
            Some(0) => {
                let problem = format!("is 0; should be a whole number from 1 to {max}");
                Err(self.damaged(name, problem))
            }
            Some(number) => Ok(number),
            None => Err(self.damaged(name, "is missing")),
        }
    }

    pub(super) fn number(&self, name: &str) -> Result<Option<f64>, CheckpointError> {
        self.get(name)
            .map(|value| {
                value
                    .as_f64()
                    .filter(|number| number.is_finite())
                    .ok_or_else(|| self.wrong_type(name, "a number", value))
            })
            .transpose()
    }

    pub(super) fn flag(&self, name: &str) -> Result<Option<bool>, CheckpointError> {
        self.get(name)
            .map(|value| {
                value
                    .as_bool()
                    .ok_or_else(|| self.wrong_type(name, "true or false", value))
            })
            .transpose()
    }

    pub(super) fn text(&self, name: &str) -> Result<Option<&str>, CheckpointError> {
        self.get(name)
            .map(|value| {
                value
                    .as_str()
                    .ok_or_else(|| self.wrong_type(name, "a text", value))
            })
            .transpose()
    }

    pub(super) fn texts(&self, name: &str) -> Result<Option<Vec<&str>>, CheckpointError> {
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
    pub(super) fn counts(
        &self,
        name: &str,
        max: usize,
    ) -> Result<Option<Vec<usize>>, CheckpointError> {
        let one = |value: &Value| {
            let number = value.as_u64().and_then(|n| usize::try_from(n).ok());
            number.filter(|number| *number <= max)
        };
        self.get(name)
            .map(|value| {
                let list = value.as_array();
                let list = list.and_then(|list| list.iter().map(one).collect());
                let wanted = format!("a list of whole numbers up to {max}");
                list.ok_or_else(|| self.wrong_type(name, &wanted, value))
            })
            .transpose()
    }

    /// Reads a nested object.
    pub(super) fn object(&self, name: &str) -> Result<Option<Self>, CheckpointError> {
        self.get(name)
            .map(|value| match value {
                Value::Object(map) => Ok(Self {
                    file: self.file.clone(),
                    prefix: format!("{}{name}.", self.prefix),
                    map: map.clone(),
                }),
                other => Err(self.wrong_type(name, "an object", other)),
            })
            .transpose()
    }

    /// Reads one token id or a list of them. Ids outside a vocabulary of this size, such as -1, can
    /// match no token: they are ignored here, and the API, which ignores the same ones, logs a
    /// warning. Ids above `id_max` are refused.
    pub(super) fn token_ids(
        &self,
        name: &str,
        vocab_size: usize,
        id_max: u64,
    ) -> Result<Option<Vec<u32>>, CheckpointError> {
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
            let wanted =
                format!("a token id from 0 to {last}, the vocabulary's last, or a list of them");
            return Err(self.wrong_type(name, &wanted, value));
        }
        let known = list.iter().filter_map(|value| {
            let id = value.as_u64().filter(|id| *id < vocab_size as u64)?;
            u32::try_from(id).ok()
        });
        Ok(Some(known.collect()))
    }
}
