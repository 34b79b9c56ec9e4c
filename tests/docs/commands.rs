//! Command lines in documents, and the sub-commands and flags that the binary has.
//!
//! Owns: reading `--help`, and as much of a shell's grammar as the pages use.
//! Never: runs a command line of a page.

use std::collections::{BTreeMap, BTreeSet};
use std::process::Command;

/// The binary's sub-commands by their words, such as `bench run`; the binary itself is the empty
/// name.
pub(crate) struct BinaryCommands {
    commands: BTreeMap<String, CommandShape>,
}

struct CommandShape {
    flags: BTreeSet<String>,
    subcommands: BTreeSet<String>,
}

/// The long help of a command.
pub(crate) fn help(words: &[&str]) -> String {
    let output = Command::new(env!("CARGO_BIN_EXE_cleave"))
        .args(words)
        .arg("--help")
        // The help shows variables that are set, so none is.
        .env_clear()
        .env("COLUMNS", "100")
        .output()
        .expect("cleave runs");
    assert!(output.status.success(), "cleave {words:?} --help");
    String::from_utf8(output.stdout).expect("help is UTF-8")
}

/// Names of the sub-commands that a help lists, except `help` itself.
pub(crate) fn subcommands(help: &str) -> Vec<String> {
    help.lines()
        .skip_while(|line| *line != "Commands:")
        .skip(1)
        .take_while(|line| !line.is_empty())
        .filter(|line| line.starts_with("  ") && !line.starts_with("   "))
        .filter_map(|line| line.split_whitespace().next())
        .filter(|name| *name != "help")
        .map(str::to_owned)
        .collect()
}

impl BinaryCommands {
    pub(crate) fn of_the_binary() -> Self {
        let mut commands = BTreeMap::new();
        let mut open = vec![String::new()];
        while let Some(name) = open.pop() {
            let words: Vec<&str> = name.split_whitespace().collect();
            let text = help(&words);
            let subcommands = subcommands(&text);
            open.extend(
                subcommands
                    .iter()
                    .map(|sub| format!("{name} {sub}").trim().to_owned()),
            );
            let shape = CommandShape {
                flags: flags(&text),
                subcommands: subcommands.into_iter().collect(),
            };
            commands.insert(name, shape);
        }
        assert!(commands.len() > 15, "the sub-commands are found");
        Self { commands }
    }

    /// Checks the words after `cleave`.
    pub(crate) fn check(&self, words: &[String]) -> Result<(), String> {
        let mut name = String::new();
        let mut words = words.iter();
        while let Some(word) = words.next() {
            let shape = &self.commands[&name];
            if name == "config print" {
                // Its words are those of another command, whose name `--for` has.
                let (command, rest) = match word.as_str() {
                    "--for" => (words.next().cloned().unwrap_or_default(), Vec::new()),
                    _ => ("serve".to_owned(), vec![word.clone()]),
                };
                let command = command.split(' ').map(str::to_owned).collect();
                return self.check(&[command, rest, words.cloned().collect()].concat());
            } else if word == "--" {
                // Flags of the workers that `cleave autoscale` starts.
                let rest: Vec<String> = words.cloned().collect();
                let worker = [vec!["worker".to_owned()], rest].concat();
                return self.check(&worker);
            } else if word.starts_with('-') && word.len() > 1 {
                let flag = word.split('=').next().unwrap_or_default();
                if !shape.flags.contains(flag) {
                    return Err(format!("`cleave {name}` has no {flag}"));
                }
            } else if shape.subcommands.contains(word) {
                name = format!("{name} {word}").trim().to_owned();
            } else if !shape.subcommands.is_empty() && !is_placeholder(word) {
                return Err(format!("`cleave {name}` has no sub-command {word}"));
            }
        }
        Ok(())
    }
}

/// Whether a word stands for a command, such as `COMMAND` or an ellipsis.
fn is_placeholder(word: &str) -> bool {
    word == "…" || (!word.is_empty() && word.chars().all(|c| c.is_ascii_uppercase()))
}

fn flags(help: &str) -> BTreeSet<String> {
    let options = help.lines().map(str::trim_start);
    let options = options.filter(|line| line.starts_with('-') && !line.starts_with("- "));
    options
        .flat_map(|line| line.split([' ', ',', '=']))
        .filter(|word| word.starts_with('-'))
        .map(str::to_owned)
        .collect()
}

/// The calls of `cleave` in a line of a shell, each as the words after its name.
pub(crate) fn calls(line: &str) -> Vec<Vec<String>> {
    let mut calls = Vec::new();
    for words in simple_commands(line) {
        let mut words = words.into_iter().skip_while(|word| is_assignment(word));
        match words.next().as_deref() {
            Some("cleave") => calls.push(words.collect()),
            Some("cargo") => {
                let words: Vec<String> = words.collect();
                let is_run = words.first().is_some_and(|word| word == "run");
                let after = words.iter().position(|word| word == "--");
                if let (true, Some(at)) = (is_run, after) {
                    calls.push(words[at + 1..].to_vec());
                }
            }
            _ => {}
        }
    }
    calls
}

fn is_assignment(word: &str) -> bool {
    let name = word.split('=').next().unwrap_or_default();
    word.contains('=') && name.chars().all(|c| c.is_ascii_alphanumeric() || c == '_')
}

/// The words of each simple command: cut at `;`, `&`, `|`, `(`, without redirections and comments.
fn simple_commands(line: &str) -> Vec<Vec<String>> {
    let mut commands = vec![Vec::new()];
    let mut word: Option<String> = None;
    let mut quote = None;
    let take = |commands: &mut Vec<Vec<String>>, word: &mut Option<String>| {
        if let (Some(word), Some(last)) = (word.take(), commands.last_mut()) {
            last.push(word);
        }
    };
    // A small shell lexer: quotes join words, operators end a command, `#` begins a comment.
    for c in line.chars() {
        match (quote, c) {
            (Some(open), _) if c == open => quote = None,
            (Some(_), _) => word.get_or_insert_default().push(c),
            (None, '\'' | '"') => {
                quote = Some(c);
                word.get_or_insert_default();
            }
            (None, '#') if word.is_none() => break,
            (None, ';' | '&' | '|' | '(' | ')' | '<' | '>') => {
                take(&mut commands, &mut word);
                commands.push(Vec::new());
            }
            (None, c) if c.is_whitespace() => take(&mut commands, &mut word),
            (None, c) => word.get_or_insert_default().push(c),
        }
    }
    take(&mut commands, &mut word);
    commands
}
