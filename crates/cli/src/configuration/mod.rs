//! The values of flags: command line, then environment, then file, then default.
//!
//! Owns: where a value may come from, and which origin counts. Never: acts on a value. Invariant:
//! every origin is read through clap's definition of the flag, so that a value means the same and
//! has the same limits wherever it stands.
//!
//! A file's values become words of the command line, in front of those that the user gave, except
//! where the command line or the environment has the flag: conflicts and requirements between
//! flags then hold across all origins.

mod definition;
mod file;
mod misspelt;
mod origin;
mod print;

pub(crate) use definition::{FILE_VARIABLE, command};
pub(crate) use misspelt::warn_of_misspelt_variables;
pub(crate) use print::run;

use crate::args::{Cli, LogFormat};
use clap::parser::ValueSource;
use clap::{ArgMatches, Command, FromArgMatches};
use file::ConfigFile;
use origin::FlagOrigins;
use std::collections::BTreeSet;
use std::ffi::OsString;
use std::path::PathBuf;

/// The reason why no command can run.
#[derive(Debug)]
pub(crate) enum ConfigurationError {
    /// The words are wrong, or ask for help or the version.
    Words(clap::Error),
    /// The file is wrong.
    File {
        error: anyhow::Error,
        /// The format of the lines about it, from words and variables.
        log_format: LogFormat,
    },
}

impl From<clap::Error> for ConfigurationError {
    fn from(error: clap::Error) -> Self {
        Self::Words(error)
    }
}

/// Reads the command with all its flags.
///
/// # Errors
/// If words, variables or the file are wrong, or help is asked for.
pub(crate) fn read(words: Vec<OsString>) -> Result<Cli, ConfigurationError> {
    let resolved = Resolved::of(words)?;
    Ok(Cli::from_arg_matches(&resolved.matches)?)
}

/// The flags of a command with the origin of each.
struct Resolved {
    /// Words of the command, such as `bench run`.
    name: String,
    matches: ArgMatches,
    file: Option<ConfigFile>,
    /// Flags whose value in the file counts.
    from_file: BTreeSet<String>,
}

impl Resolved {
    fn of(mut words: Vec<OsString>) -> Result<Self, ConfigurationError> {
        let command = command();
        let (path, after_name) = command_path(&command, &words);
        let name = path.join(" ");
        let mut from_file = BTreeSet::new();
        let mut file = None;
        let given = words.clone();
        if definition::is_configurable(&name) {
            // This pass finds the file and the flags that outrank it; the next one reports errors.
            let lenient = command.clone().ignore_errors(true);
            let first = lenient.try_get_matches_from(&words)?;
            if let Some(path) = file_of(leaf_matches(&first)) {
                let read = ConfigFile::open(&path, &name);
                let read = read.map_err(|error| ConfigurationError::File {
                    error,
                    log_format: log_format_of(leaf_matches(&first)),
                })?;
                let counting = read.flags().iter().filter(|flag| {
                    let source = leaf_matches(&first).value_source(flag.id());
                    !matches!(
                        source,
                        Some(ValueSource::CommandLine | ValueSource::EnvVariable)
                    )
                });
                let counting: Vec<_> = counting.collect();
                from_file.extend(counting.iter().map(|flag| flag.long().to_owned()));
                let inserted = counting.iter().flat_map(|flag| flag.words());
                let inserted: Vec<OsString> = inserted.map(OsString::from).collect();
                words.splice(after_name..after_name, inserted);
                file = Some(read);
            }
        }
        let parsed = command.clone().try_get_matches_from(words);
        let matches = parsed.map_err(|error| {
            let origins = FlagOrigins {
                command: definition::find(&command, &name),
                words: &given,
                file: file.as_ref(),
                from_file: &from_file,
            };
            origins.explain(error)
        })?;
        Ok(Self {
            name,
            matches,
            file,
            from_file,
        })
    }

    /// The flags of the command itself.
    fn leaf(&self) -> &ArgMatches {
        leaf_matches(&self.matches)
    }
}

fn file_of(matches: &ArgMatches) -> Option<PathBuf> {
    matches.get_one::<PathBuf>(definition::CONFIG).cloned()
}

fn log_format_of(matches: &ArgMatches) -> LogFormat {
    let format = matches.try_get_one::<LogFormat>("log_format");
    format.ok().flatten().copied().unwrap_or(LogFormat::Text)
}

fn leaf_matches(mut matches: &ArgMatches) -> &ArgMatches {
    while let Some((_, inside)) = matches.subcommand() {
        matches = inside;
    }
    matches
}

/// The names of the command that the words run, and the index of the word after them.
fn command_path(root: &Command, words: &[OsString]) -> (Vec<String>, usize) {
    let (mut command, mut path) = (root, Vec::new());
    let (mut next, mut after_name) = (1, 1);
    while let Some(word) = words.get(next).and_then(|word| word.to_str()) {
        if let Some(inside) = command.find_subcommand(word) {
            path.push(inside.get_name().to_owned());
            command = inside;
            next += 1;
            after_name = next;
            if !inside.has_subcommands() {
                break;
            }
        } else if word.starts_with('-') {
            // Flags before the name of a command belong to every command, and have a value.
            let has_value_next = word.starts_with("--") && !word.contains('=');
            next += if has_value_next { 2 } else { 1 };
        } else {
            break;
        }
    }
    (path, after_name)
}

#[cfg(test)]
mod tests;
