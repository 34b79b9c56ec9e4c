//! The origins of flags in errors: the variable, or the line of the file, that sets a wrong value.
//!
//! Never: changes an error about words of the command line.

use super::file::ConfigFile;
use clap::Command;
use clap::error::{ContextKind, ContextValue};
use std::collections::BTreeSet;
use std::ffi::OsString;

/// Where flags may come from, beside the command line.
pub(super) struct FlagOrigins<'a> {
    /// The command, with its variables.
    pub(super) command: Option<&'a Command>,
    /// The words as the user gave them, without those of the file.
    pub(super) words: &'a [OsString],
    pub(super) file: Option<&'a ConfigFile>,
    /// Flags whose value in the file counts.
    pub(super) from_file: &'a BTreeSet<String>,
}

impl FlagOrigins<'_> {
    /// Adds to an error where each of its flags is set.
    pub(super) fn explain(&self, error: clap::Error) -> clap::Error {
        let notes = self.notes(&error);
        if notes.is_empty() {
            return error;
        }
        let text = error.to_string();
        let text = text.strip_prefix("error: ").unwrap_or(&text);
        let (first, rest) = text.split_once("\n\n").unwrap_or((text, ""));
        let notes = notes.join("\n  ");
        clap::Error::raw(error.kind(), format!("{first}\n\n  {notes}\n\n{rest}"))
    }

    /// A line for each flag of an error that is not a word of the command line.
    pub(super) fn notes(&self, error: &clap::Error) -> Vec<String> {
        let flags = flags_of(error);
        flags.iter().filter_map(|long| self.origin(long)).collect()
    }

    /// The origin of a flag in words; `None` for one of the command line.
    fn origin(&self, long: &str) -> Option<String> {
        let flag = format!("--{long}");
        if let Some(file) = self.file.filter(|_| self.from_file.contains(long)) {
            let at = file.flags().iter().find(|flag| flag.long() == long)?.at();
            let (path, line, column) = (file.path().display(), at.line(), at.column());
            return Some(format!("{flag} is set at {path}:{line}:{column}"));
        }
        let arguments = &mut self.command?.get_arguments();
        let argument = arguments.find(|argument| argument.get_long() == Some(long))?;
        let short = argument.get_short().map(|short| format!("-{short}"));
        let is_word = |word: &OsString| {
            let word = word.to_string_lossy();
            let names = word.strip_prefix(&flag);
            names.is_some_and(|rest| rest.is_empty() || rest.starts_with('='))
                || short.as_ref().is_some_and(|short| word.starts_with(short))
        };
        let variable = argument.get_env()?.to_str()?;
        let is_set = std::env::var_os(variable).is_some() && !self.words.iter().any(is_word);
        is_set.then(|| format!("{flag} is set by the environment variable {variable}"))
    }
}

/// The long names of the flags that an error names.
fn flags_of(error: &clap::Error) -> BTreeSet<String> {
    let mut named = Vec::new();
    for kind in [ContextKind::InvalidArg, ContextKind::PriorArg] {
        match error.get(kind) {
            Some(ContextValue::String(flag)) => named.push(flag.clone()),
            Some(ContextValue::Strings(flags)) => named.extend(flags.iter().cloned()),
            _ => {}
        }
    }
    let long = |flag: &String| {
        let name = flag.strip_prefix("--")?;
        let end = name.find([' ', '=', '[']).unwrap_or(name.len());
        Some(name[..end].to_owned())
    };
    named.iter().filter_map(long).collect()
}
