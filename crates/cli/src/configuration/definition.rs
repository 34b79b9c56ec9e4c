//! The command line as clap sees it: the flags of `args`, and what one walk over all commands adds.
//!
//! Owns: the variable of each flag, the flag `--config`, and the short help. Never: reads a file.

use crate::args::Cli;
use clap::builder::BoolishValueParser;
use clap::{Arg, ArgAction, Command, CommandFactory, value_parser};
use std::ffi::OsString;
use std::fmt::Write;
use std::path::PathBuf;

/// The identifier of `--config`.
pub(super) const CONFIG: &str = "config";

/// The variable of `--config`.
pub(crate) const FILE_VARIABLE: &str = "CLEAVE_CONFIG";

/// Commands that take a file of flags, with the ten flags that their short help has.
const MOST_USED: [(&str, &str); 10] = [
    (
        "serve",
        "model served-model-name max-model-len device prefill decode host port api-key config",
    ),
    (
        "router",
        "listen policy router-mode placement ssl-certfile ssl-keyfile admin-listen api-key peer-tls config",
    ),
    (
        "worker",
        "leg router model served-model-name device threads kv-cache data-listen name config",
    ),
    (
        "chat",
        "url api-key model system temperature max-tokens reasoning-effort tools device config",
    ),
    (
        "generate",
        "model prompt max-tokens temperature top-p seed json dtype device config",
    ),
    (
        "bench engine",
        "model shapes rounds json dtype quantize threads device kv-cache config",
    ),
    (
        "bench run",
        "url model api-key workload trace rate duration slo out config",
    ),
    (
        "bench goodput",
        "url model api-key workload trace slo goal duration out config",
    ),
    (
        "plan calibrate",
        "model budget steps json dtype quantize threads device kv-cache config",
    ),
    (
        "autoscale",
        "local router served-model-name cacert admin-key config",
    ),
];

/// Commands whose flags have no variables: one that is set for a server would change what these
/// tools do, or exclude flags of theirs.
const WITHOUT_VARIABLES: [&str; 9] = [
    "synth",
    "sim",
    "check",
    "replay",
    "metrics",
    "key",
    "completions",
    "man",
    "config",
];

/// Flags without a variable: of the same name as a server's, with another meaning.
const OTHER_MEANING: [(&str, &str); 6] = [
    ("bench run", "model"),
    ("bench run", "prompt"),
    ("bench run", "threads"),
    ("bench goodput", "model"),
    ("bench goodput", "prompt"),
    ("bench goodput", "threads"),
];

/// A flag that carries a secret in its value, beside those with a `KEY`.
const SECRET: &str = "header";

/// Where else a flag's value may come from.
pub(crate) const ORIGINS: &str = "Each flag may also be a variable, --max-num-seqs as CLEAVE_MAX_NUM_SEQS, or a line of the file \
     of\n--config, `max-num-seqs: 64`. The command line counts before the environment, and both \
     before the\nfile. `cleave config print` shows what is in force.";

/// The definition, with the values of variables.
pub(crate) fn command() -> Command {
    let command = without_variables().mut_args(with_variable);
    each_command(command, "", &|command, name| {
        let first = name.split(' ').next().unwrap_or_default();
        if WITHOUT_VARIABLES.contains(&first) {
            return command;
        }
        command.mut_args(|argument| match argument.get_long() {
            Some(long) if OTHER_MEANING.contains(&(name, long)) => argument,
            _ => with_variable(argument),
        })
    })
}

/// The definition as the environment does not change it.
pub(super) fn without_variables() -> Command {
    let command = Cli::command().mut_args(|argument| argument.hide_short_help(true));
    let everywhere: Vec<Arg> = command.get_arguments().cloned().collect();
    each_command(command, "", &|command, name| {
        let command = command.mut_args(with_negative_numbers);
        match most_used(name) {
            Some(most_used) => with_short_help(command.arg(config_flag()), &most_used, &everywhere),
            None => command,
        }
    })
}

/// Lets `--port -1` be a wrong value: clap would take `-1` for a flag, and advise `-- -1`.
fn with_negative_numbers(argument: Arg) -> Arg {
    let is_option = argument.get_long().is_some() && argument.get_action().takes_values();
    argument.allow_negative_numbers(is_option)
}

/// Commands that take `--config`.
pub(super) fn configurable() -> impl Iterator<Item = &'static str> {
    MOST_USED.iter().map(|(name, _)| *name)
}

pub(super) fn is_configurable(name: &str) -> bool {
    configurable().any(|known| known == name)
}

/// The flags that the short help of a command explains.
pub(super) fn most_used(name: &str) -> Option<Vec<&'static str>> {
    let found = MOST_USED.iter().find(|(command, _)| *command == name);
    found.map(|(_, flags)| flags.split(' ').collect())
}

/// Whether the value of a flag must not be shown.
pub(super) fn is_secret(argument: &Arg) -> bool {
    let is_key = argument
        .get_value_names()
        .is_some_and(|names| names.iter().any(|name| name == "KEY"));
    is_key || argument.get_long() == Some(SECRET)
}

/// The variable of a flag: `CLEAVE_` and its name.
pub(super) fn variable(long: &str) -> String {
    format!("CLEAVE_{}", long.replace('-', "_").to_uppercase())
}

/// Changes each command that does something, given its words such as `bench run`.
fn each_command(
    command: Command,
    name: &str,
    change: &dyn Fn(Command, &str) -> Command,
) -> Command {
    if !command.has_subcommands() {
        return change(command, name);
    }
    command.mut_subcommands(|inside| {
        let name = format!("{name} {}", inside.get_name());
        each_command(inside, name.trim(), change)
    })
}

/// Gives a flag its variable. A variable that the flag has in `args` is one that other programs
/// define, too, and counts where ours is not set. The help names the rule, not each variable.
fn with_variable(argument: Arg) -> Arg {
    let is_switch = matches!(argument.get_action(), ArgAction::SetTrue);
    let named = match argument.get_long() {
        Some(long) if is_switch || argument.get_action().takes_values() => variable(long),
        _ => return argument,
    };
    let is_set = |name: &str| std::env::var_os(name).is_some();
    let others = argument.get_env().map(|name| name.to_owned());
    let others = others.filter(|name| !is_set(&named) && name.to_str().is_some_and(is_set));
    if std::env::var_os(&named).is_some_and(|value| is_of_kubernetes(&named, &value)) {
        return argument;
    }
    let argument = if is_switch {
        argument.value_parser(BoolishValueParser::new())
    } else {
        argument
    };
    let argument = argument.env(others.unwrap_or_else(|| OsString::from(named)));
    argument.hide_env(true).hide_env_values(true)
}

/// Whether Kubernetes set the variable: for a service called `cleave` each container of its
/// namespace gets `CLEAVE_PORT=tcp://10.0.0.1:8000`.
fn is_of_kubernetes(name: &str, value: &OsString) -> bool {
    let value = value.to_string_lossy();
    let is_address = ["tcp://", "udp://", "sctp://"]
        .iter()
        .any(|scheme| value.starts_with(scheme));
    name.ends_with("_PORT") && is_address
}

fn config_flag() -> Arg {
    Arg::new(CONFIG)
        .long("config")
        .value_name("FILE")
        .value_parser(value_parser!(PathBuf))
        .help_heading("Configuration")
        .help(
            "YAML file of flags, one in a line without its dashes, such as `max-num-seqs: 64`. \
             Command line and environment count before it",
        )
}

/// Limits the short help to the most used flags, and to the names of the others.
fn with_short_help(command: Command, most_used: &[&str], everywhere: &[Arg]) -> Command {
    let is_most_used = |argument: &Arg| {
        let long = argument.get_long();
        long.is_none_or(|long| most_used.contains(&long))
    };
    let mut others: Vec<(String, Vec<String>)> = Vec::new();
    let hidden = command
        .get_arguments()
        .filter(|argument| !is_most_used(argument));
    for argument in hidden.chain(everywhere) {
        let Some(long) = argument.get_long().filter(|_| !argument.is_hide_set()) else {
            continue;
        };
        let heading = argument.get_help_heading().unwrap_or("Others").to_owned();
        let flag = format!("--{long}");
        match others.iter_mut().find(|(known, _)| *known == heading) {
            Some((_, flags)) => flags.push(flag),
            None => others.push((heading, vec![flag])),
        }
    }
    let examples = command
        .get_after_help()
        .map(ToString::to_string)
        .unwrap_or_default();
    let short = format!(
        "Others, which --help explains:\n{}\n{ORIGINS}\n\n{examples}",
        names_text(&others)
    );
    let command = command.mut_args(|argument| {
        if is_most_used(&argument) {
            argument
        } else {
            argument.hide_short_help(true)
        }
    });
    command.after_help(short).after_long_help(examples)
}

/// The names of flags below their headings, in lines of at most 98 columns.
fn names_text(sections: &[(String, Vec<String>)]) -> String {
    const COLUMNS: usize = 98;
    let widest = sections.iter().map(|(heading, _)| heading.len()).max();
    let indent = widest.unwrap_or_default() + 4;
    let mut text = String::new();
    for (heading, flags) in sections {
        write!(text, "  {heading:<width$}", width = indent - 2).expect("a string");
        let mut column = indent;
        for flag in flags {
            if column + flag.len() > COLUMNS {
                text.truncate(text.trim_end().len());
                write!(text, "\n{:indent$}", "").expect("a string");
                column = indent;
            }
            write!(text, "{flag} ").expect("a string");
            column += flag.len() + 1;
        }
        text.truncate(text.trim_end().len());
        text.push('\n');
    }
    text
}

/// A command by its words.
pub(super) fn find<'a>(root: &'a Command, name: &str) -> Option<&'a Command> {
    name.split(' ')
        .try_fold(root, |command, word| command.find_subcommand(word))
}
