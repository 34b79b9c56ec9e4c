//! A file of flags: flat YAML whose keys are the flags of one command without their dashes.
//!
//! Owns: the keys, the kinds of their values, and the place of every mistake. Never: decides which
//! origin counts.

use super::definition::{find, without_variables};
use anyhow::{Context, bail};
use clap::builder::ArgAction;
use clap::error::ErrorKind;
use clap::{Arg, Command};
use cleave_yaml::{Diagnostics, Location, YamlNode, YamlValue, distance, mistakes_text};
use serde_json::Value;
use std::any::TypeId;
use std::path::{Path, PathBuf};

/// A file larger than this has more than flags.
const FILE_BYTES_MAX: u64 = 1 << 20;

/// The flags of a file, each a valid one of its command.
pub(super) struct ConfigFile {
    path: PathBuf,
    flags: Vec<FileFlag>,
}

/// A flag of a file.
pub(super) struct FileFlag {
    id: String,
    long: String,
    value: FileValue,
    at: Location,
}

enum FileValue {
    Switch(bool),
    /// One value, or those of a flag that may be repeated.
    Values(Vec<String>),
}

impl FileFlag {
    /// Its identifier among clap's matches.
    pub(super) fn id(&self) -> &str {
        &self.id
    }

    pub(super) fn long(&self) -> &str {
        &self.long
    }

    /// The place of its value.
    pub(super) fn at(&self) -> Location {
        self.at
    }

    /// The words of a command line that say the same.
    pub(super) fn words(&self) -> Vec<String> {
        let long = &self.long;
        match &self.value {
            FileValue::Switch(true) => vec![format!("--{long}")],
            FileValue::Switch(false) => Vec::new(),
            FileValue::Values(values) => {
                let words = values.iter().map(|value| format!("--{long}={value}"));
                words.collect()
            }
        }
    }
}

impl ConfigFile {
    /// Reads and checks the flags of a command, such as `bench run`.
    ///
    /// # Errors
    /// If the file cannot be read, or has mistakes: all of them.
    pub(super) fn open(path: &Path, name: &str) -> anyhow::Result<Self> {
        let read = cleave_files::read(path, FILE_BYTES_MAX);
        let bytes =
            read.with_context(|| format!("cannot read the configuration {}", path.display()))?;
        let text = str::from_utf8(&bytes)
            .with_context(|| format!("the configuration {} is not UTF-8", path.display()))?;
        let root = without_variables();
        let command = find(&root, name).context("a command that exists")?;
        let mut reader = FileReader {
            root: &root,
            command,
            name,
            diagnostics: Diagnostics::default(),
        };
        let flags = reader.read(text);
        let diagnostics = reader.diagnostics.into_sorted();
        if !diagnostics.is_empty() {
            bail!(mistakes_text("the configuration", path, &diagnostics));
        }
        Ok(Self {
            path: path.to_owned(),
            flags,
        })
    }

    pub(super) fn path(&self) -> &Path {
        &self.path
    }

    pub(super) fn flags(&self) -> &[FileFlag] {
        &self.flags
    }
}

struct FileReader<'a> {
    root: &'a Command,
    command: &'a Command,
    /// The words of the command.
    name: &'a str,
    diagnostics: Diagnostics,
}

impl FileReader<'_> {
    fn read(&mut self, text: &str) -> Vec<FileFlag> {
        let Some(tree) = cleave_yaml::parse(text, &mut self.diagnostics) else {
            return Vec::new();
        };
        let entries = match tree.value {
            // Every line is a comment.
            YamlValue::Nothing => return Vec::new(),
            YamlValue::Map(entries) => entries,
            other => {
                let message = format!(
                    "a configuration is a map of flags, such as `port: 8000`, not {}",
                    other.kind()
                );
                self.diagnostics.add(tree.referenced, message);
                return Vec::new();
            }
        };
        let flags = entries.iter().filter_map(|(key, node)| {
            let argument = self.argument(&key.value, key.referenced)?;
            let value = self.value(&argument, node)?;
            let flag = FileFlag {
                id: argument.get_id().to_string(),
                long: key.value.clone(),
                value,
                at: node.referenced,
            };
            self.check(&flag, node.referenced).then_some(flag)
        });
        flags.collect()
    }

    /// The flag of a key.
    fn argument(&mut self, key: &str, at: Location) -> Option<Arg> {
        let flags = || {
            self.command
                .get_arguments()
                .chain(self.root.get_arguments())
        };
        let named = flags().find(|argument| argument.get_long() == Some(key));
        if let Some(argument) =
            named.filter(|argument| argument.get_id() != super::definition::CONFIG)
        {
            return Some(argument.clone());
        }
        let dashed = key.trim_start_matches('-').replace('_', "-");
        let nearest = flags()
            .filter_map(|argument| argument.get_long())
            .min_by_key(|long| distance(long, &dashed));
        let mut message = format!("`cleave {}` has no flag `{key}`", self.name);
        match nearest.filter(|long| distance(long, &dashed) <= 2 && *long != key) {
            Some(near) => message += &format!("; is `{near}` meant?"),
            None => match self.other_command(&dashed) {
                Some(other) => message += &format!("; `cleave {other}` has it"),
                None => message += &format!("; `cleave {} --help` lists them", self.name),
            },
        }
        self.diagnostics.add(at, message);
        None
    }

    /// Another command that takes a file and has this flag.
    fn other_command(&self, long: &str) -> Option<&'static str> {
        super::definition::configurable().find(|name| {
            let command = find(self.root, name);
            let mut flags = command.into_iter().flat_map(Command::get_arguments);
            flags.any(|argument| argument.get_long() == Some(long))
        })
    }

    fn value(&mut self, argument: &Arg, node: &YamlNode) -> Option<FileValue> {
        let long = argument.get_long().unwrap_or_default();
        if matches!(argument.get_action(), ArgAction::SetTrue) {
            let is_set = self.diagnostics.boolean(node, long)?;
            return Some(FileValue::Switch(is_set));
        }
        let YamlValue::List(entries) = &node.value else {
            let value = self.scalar(argument, node)?;
            return Some(FileValue::Values(vec![value]));
        };
        if !matches!(argument.get_action(), ArgAction::Append) {
            let message = format!("`{long}` has one value, not a list");
            self.diagnostics.add(node.referenced, message);
            return None;
        }
        let values: Vec<_> = entries
            .iter()
            .map(|entry| self.scalar(argument, entry))
            .collect();
        values
            .into_iter()
            .collect::<Option<_>>()
            .map(FileValue::Values)
    }

    /// One value as the command line would have it.
    fn scalar(&mut self, argument: &Arg, node: &YamlNode) -> Option<String> {
        let long = argument.get_long().unwrap_or_default();
        let is_text = argument.get_value_parser().type_id() == TypeId::of::<String>();
        let of = |name: &str| {
            let names = argument.get_value_names().unwrap_or_default();
            let mut forms = names.iter().flat_map(|known| known.split('|'));
            forms.any(|known| known == name)
        };
        let message = match &node.value {
            YamlValue::Text(text) => return Some(text.clone()),
            YamlValue::Integer(_) | YamlValue::Float(_) if is_text => {
                // A version 1.10 would become 1.1.
                format!("`{long}` is a text; put {} in quotes", node.value)
            }
            YamlValue::Integer(number) => return Some(number.to_string()),
            YamlValue::Float(number) => return Some(number.to_string()),
            YamlValue::Map(_) if of("JSON") => return Some(json(&node.value).to_string()),
            YamlValue::Nothing => format!("`{long}` has no value; give one, or drop the line"),
            other => {
                let expected = argument.get_value_names().unwrap_or_default().join(" ");
                format!("`{long}` takes a value ({expected}), not {}", other)
            }
        };
        self.diagnostics.add(node.referenced, message);
        None
    }

    /// Checks the value by the flag's own parser.
    fn check(&mut self, flag: &FileFlag, at: Location) -> bool {
        let path = self.name.split(' ').map(str::to_owned);
        let words = std::iter::once("cleave".to_owned()).chain(path);
        let parsed = self
            .root
            .clone()
            .try_get_matches_from(words.chain(flag.words()));
        let Err(error) = parsed else {
            return true;
        };
        // Flags that miss or exclude each other are for the command line as a whole.
        let is_of_value = matches!(
            error.kind(),
            ErrorKind::ValueValidation | ErrorKind::InvalidValue | ErrorKind::InvalidUtf8
        );
        if is_of_value {
            self.diagnostics.add(at, first_paragraph(&error));
        }
        !is_of_value
    }
}

/// The reason of an error of clap in one line.
fn first_paragraph(error: &clap::Error) -> String {
    let text = error.to_string();
    let paragraph = text.split("\n\n").next().unwrap_or_default();
    let lines: Vec<&str> = paragraph.lines().map(str::trim).collect();
    let text = lines.join(" ");
    text.strip_prefix("error: ").unwrap_or(&text).to_owned()
}

/// A value as JSON.
fn json(value: &YamlValue) -> Value {
    match value {
        YamlValue::Nothing => Value::Null,
        YamlValue::Bool(truth) => Value::from(*truth),
        YamlValue::Integer(number) => Value::from(*number),
        YamlValue::Float(number) => Value::from(*number),
        YamlValue::Text(text) => Value::from(text.as_str()),
        YamlValue::List(entries) => entries.iter().map(|entry| json(&entry.value)).collect(),
        YamlValue::Map(entries) => entries
            .iter()
            .map(|(key, node)| (key.value.clone(), json(&node.value)))
            .collect(),
    }
}
