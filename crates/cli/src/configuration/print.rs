//! `cleave config`: checks a file, or prints the values in force as one.

use super::definition::{command, find, is_configurable, is_secret};
use super::file::ConfigFile;
use super::origin::FlagOrigins;
use super::{ConfigurationError, Resolved};
use crate::args::{ConfigArgs, ConfigCheckArgs, ConfigCommand, ConfigPrintArgs};
use anyhow::bail;
use clap::Arg;
use clap::builder::ArgAction;
use clap::error::ErrorKind;
use clap::parser::ValueSource;
use std::any::TypeId;
use std::ffi::OsString;
use std::fmt::Write as _;
use std::io::Write as _;

/// Words that YAML, or an older version of it, reads as something other than a text.
const NO_TEXTS: [&str; 12] = [
    "true", "false", "null", "yes", "no", "on", "off", "y", "n", "nan", "inf", "infinity",
];

pub(crate) fn run(args: &ConfigArgs) -> anyhow::Result<()> {
    let text = match &args.command {
        ConfigCommand::Check(args) => check(args)?,
        ConfigCommand::Print(args) => print(args)?,
    };
    std::io::stdout().lock().write_all(text.as_bytes())?;
    Ok(())
}

fn check(args: &ConfigCheckArgs) -> anyhow::Result<String> {
    let ConfigCheckArgs {
        file,
        command: name,
    } = args;
    check_name(name)?;
    let flags = ConfigFile::open(file, name)?;
    let words = words_of(name).chain(flags.flags().iter().flat_map(|flag| flag.words()));
    let root = super::definition::without_variables();
    let parsed = root.clone().try_get_matches_from(words);
    // The command line may have what the file lacks.
    if let Err(error) = parsed
        && error.kind() == ErrorKind::ArgumentConflict
    {
        let from_file = flags.flags().iter().map(|flag| flag.long().to_owned());
        let origins = FlagOrigins {
            command: find(&root, name),
            words: &[],
            file: Some(&flags),
            from_file: &from_file.collect(),
        };
        let text = error.to_string();
        let reason = text.split("\n\n").next().unwrap_or_default();
        bail!(
            "the configuration {} has flags that exclude each other: {}\n\n  {}",
            file.display(),
            reason.trim_start_matches("error: "),
            origins.notes(&error).join("\n  ")
        );
    }
    let count = flags.flags().len();
    Ok(format!(
        "{}: no mistakes (flags of `cleave {name}`: {count})\n",
        file.display()
    ))
}

/// The values in force, as a file that sets them again.
fn print(args: &ConfigPrintArgs) -> anyhow::Result<String> {
    let ConfigPrintArgs {
        command: name,
        flags,
    } = args;
    check_name(name)?;
    let first = flags.first().and_then(|word| word.to_str());
    if let Some(other) = first.filter(|word| is_configurable(word)) {
        bail!(
            "`{other}` is a command: name it by --for, as in `cleave config print --for {other}`"
        );
    }
    let words = words_of(name).map(OsString::from);
    let resolved = match Resolved::of(words.chain(flags.iter().cloned()).collect()) {
        Ok(resolved) => resolved,
        Err(ConfigurationError::Words(error)) => error.exit(),
        Err(ConfigurationError::File { error, .. }) => return Err(error),
    };
    Ok(resolved.text())
}

fn check_name(name: &str) -> anyhow::Result<()> {
    if !is_configurable(name) {
        let names: Vec<&str> = super::definition::configurable().collect();
        bail!(
            "--for {name}: no such command takes a configuration; these do: {}",
            names.join(", ")
        );
    }
    Ok(())
}

fn words_of(name: &str) -> impl Iterator<Item = String> {
    std::iter::once("cleave".to_owned()).chain(name.split(' ').map(str::to_owned))
}

impl Resolved {
    pub(super) fn text(&self) -> String {
        let root = command();
        let leaf = find(&root, &self.name).expect("the command was parsed");
        let mut text = format!("# cleave {}", self.name);
        if let Some(file) = &self.file {
            write!(text, " --config {}", file.path().display()).expect("a string");
        }
        text.push('\n');
        let mut heading = "";
        for argument in leaf.get_arguments().chain(root.get_arguments()) {
            let Some(line) = self.line(argument) else {
                continue;
            };
            let next = argument.get_help_heading().unwrap_or("Options");
            if next != heading {
                write!(text, "\n# {next}\n").expect("a string");
                heading = next;
            }
            text += &line;
        }
        text
    }

    /// The line of a flag; none if it has no value.
    fn line(&self, argument: &Arg) -> Option<String> {
        let long = argument.get_long()?;
        let id = argument.get_id().as_str();
        if id == super::definition::CONFIG || !self.leaf().try_contains_id(id).unwrap_or(false) {
            return None;
        }
        let values = self.leaf().try_get_raw(id).ok().flatten()?;
        let values: Vec<_> = values.map(|value| value.to_string_lossy()).collect();
        let origin = match self.leaf().value_source(id) {
            _ if self.from_file.contains(long) => "file",
            Some(ValueSource::CommandLine) => "command line",
            Some(ValueSource::EnvVariable) => "environment",
            _ => "default",
        };
        if is_secret(argument) {
            return Some(format!("# {long}: hidden  # {origin}\n"));
        }
        if matches!(argument.get_action(), ArgAction::SetTrue) {
            // A variable may say `1`, a file may not.
            let is_set = self.leaf().get_flag(id);
            return Some(format!("{long}: {is_set}  # {origin}\n"));
        }
        let mut scalars = values.iter().map(|value| scalar(argument, value));
        let value = if matches!(argument.get_action(), ArgAction::Append) {
            format!("[{}]", scalars.collect::<Vec<_>>().join(", "))
        } else {
            scalars.next()?
        };
        Some(format!("{long}: {value}  # {origin}\n"))
    }
}

/// A value as YAML: in quotes where it would be read as something else.
fn scalar(argument: &Arg, value: &str) -> String {
    let is_text = argument.get_value_parser().type_id() == TypeId::of::<String>();
    let is_same_number = value
        .parse::<f64>()
        .is_ok_and(|number| number.to_string() == value);
    if (is_same_number && !is_text) || is_plain(value) {
        value.to_owned()
    } else {
        // A text of JSON is one of YAML.
        serde_json::Value::from(value).to_string()
    }
}

/// Whether YAML reads these letters as a text.
fn is_plain(value: &str) -> bool {
    let fits = |c: char| c.is_ascii_alphanumeric() || "_-./".contains(c);
    value.starts_with(|c: char| c.is_ascii_alphabetic() || c == '/')
        && value.chars().all(fits)
        && !NO_TEXTS.contains(&value.to_lowercase().as_str())
}
