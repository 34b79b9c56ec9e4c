//! `docs/cli.md`: every command with its flags, made from `--help`.
//!
//! Owns: the page. Never: knows a flag; a section identical to that of an earlier command is
//! referenced, not repeated.

use super::commands::{help, subcommands};
use std::collections::BTreeMap;
use std::fmt::Write;

/// Sections that every command has.
const EVERYWHERE: [&str; 2] = ["Logging", "Options"];

/// A flag or an argument.
#[derive(Clone, PartialEq, Eq)]
struct CliFlag {
    name: String,
    text: String,
    default: String,
    variable: String,
}

/// The help of one command.
struct CommandHelp {
    about: String,
    usage: String,
    sections: Vec<(String, Vec<CliFlag>)>,
    notes: String,
}

pub(crate) fn page() -> String {
    let mut page = String::from(
        "# Commands\n\nEvery command of `cleave` with its flags. Made from `--help` by \
         `UPDATE_CLI=1 cargo test -p cleave-cli --test rules cli_page`; the test compares the page with the binary.\n\n",
    );
    let top = help(&[]);
    let mut names = Vec::new();
    for name in subcommands(&top) {
        let inner = subcommands(&help(&[&name]));
        if inner.is_empty() {
            names.push(name);
        } else {
            names.extend(inner.iter().map(|sub| format!("{name} {sub}")));
        }
    }
    page += "| command | does |\n|---|---|\n";
    let read: Vec<(String, CommandHelp)> = names
        .into_iter()
        .map(|name| {
            let words: Vec<&str> = name.split(' ').collect();
            let read = CommandHelp::read(&help(&words));
            (name, read)
        })
        .collect();
    for (name, help) in &read {
        let anchor = name.replace(' ', "-");
        writeln!(
            page,
            "| [cleave {name}](#cleave-{anchor}) | {} |",
            cell(&help.about)
        )
        .expect("a string");
    }
    page += "\n## Every command\n\n";
    let logging = CommandHelp::read(&top).sections;
    for (title, flags) in logging.iter().filter(|(title, _)| title == "Logging") {
        page += &table(title, flags);
    }
    let mut shown = BTreeMap::<String, Vec<(String, Vec<CliFlag>)>>::new();
    for (name, help) in &read {
        writeln!(
            page,
            "## cleave {name}\n\n{}.\n\n```text\n{}\n```\n",
            help.about, help.usage
        )
        .expect("a string");
        for (title, flags) in &help.sections {
            if title == EVERYWHERE[0] || flags.is_empty() {
                continue;
            }
            let earlier = shown.entry(title.clone()).or_default();
            // A section equal to an earlier command's is named by reference.
            let same = earlier
                .iter()
                .find(|(_, earlier_flags)| earlier_flags == flags);
            if let Some((first, _)) = same.filter(|_| title != EVERYWHERE[1]) {
                let anchor = first.replace(' ', "-");
                writeln!(
                    page,
                    "**{title}**: as of [cleave {first}](#cleave-{anchor}).\n"
                )
                .expect("a string");
            } else {
                page += &table(title, flags);
                earlier.push((name.clone(), flags.clone()));
            }
        }
        if !help.notes.is_empty() {
            writeln!(page, "```text\n{}\n```\n", help.notes).expect("a string");
        }
    }
    page.trim_end().to_owned() + "\n"
}

fn cell(text: &str) -> String {
    text.replace('|', "\\|").replace('<', "&lt;")
}

fn code(text: &str) -> String {
    if text.is_empty() {
        String::new()
    } else {
        format!("`{}`", text.replace('|', "\\|"))
    }
}

fn table(title: &str, flags: &[CliFlag]) -> String {
    let mut table = format!("**{title}**\n\n| flag | default | meaning |\n|---|---|---|\n");
    for flag in flags {
        let mut meaning = cell(&flag.text);
        if !flag.variable.is_empty() {
            write!(meaning, " (variable `{}`)", flag.variable).expect("a string");
        }
        writeln!(
            table,
            "| {} | {} | {} |",
            code(&flag.name),
            code(&flag.default),
            meaning.trim()
        )
        .expect("a string");
    }
    table + "\n"
}

impl CommandHelp {
    fn read(text: &str) -> Self {
        let mut help = Self {
            about: String::new(),
            usage: String::new(),
            sections: Vec::new(),
            notes: String::new(),
        };
        let (about, rest) = text.split_once("\nUsage: ").expect("a help has its usage");
        help.about = about
            .split("\n\n")
            .next()
            .unwrap_or_default()
            .replace('\n', " ")
            .trim()
            .to_owned();
        let (usage, rest) = rest.split_once('\n').expect("flags follow");
        usage.clone_into(&mut help.usage);
        let mut lines = rest.lines().peekable();
        while let Some(line) = lines.next() {
            let is_head = line.ends_with(':') && !line.starts_with(' ') && !is_note(line);
            if is_head {
                help.sections
                    .push((line.trim_end_matches(':').to_owned(), Vec::new()));
            } else if !line.is_empty() && !line.starts_with(' ') {
                // Everything after the flags is examples and notes.
                let rest: Vec<&str> = std::iter::once(line).chain(lines).collect();
                help.notes = rest.join("\n").trim_end().to_owned();
                break;
            } else if let Some((_, flags)) = help.sections.last_mut() {
                take(line, flags);
            }
        }
        for (_, flags) in &mut help.sections {
            flags.retain(|flag| !flag.name.starts_with("-h,"));
        }
        help.sections.retain(|(title, _)| title != "Commands");
        help
    }
}

fn is_note(line: &str) -> bool {
    line.starts_with("Example")
}

/// Reads a line of a section: a flag's names, or more of the last flag.
fn take(line: &str, flags: &mut Vec<CliFlag>) {
    let words = line.trim();
    let indent = line.len() - line.trim_start().len();
    if words.is_empty() {
        return;
    }
    if indent < 8 {
        flags.push(CliFlag {
            name: words.to_owned(),
            text: String::new(),
            default: String::new(),
            variable: String::new(),
        });
        return;
    }
    let Some(flag) = flags.last_mut() else {
        return;
    };
    let inside = |start: &str| {
        words
            .strip_prefix(start)
            .and_then(|rest| rest.strip_suffix(']'))
    };
    if let Some(default) = inside("[default: ") {
        default.clone_into(&mut flag.default);
    } else if let Some(variable) = inside("[env: ") {
        variable
            .trim_end_matches('=')
            .clone_into(&mut flag.variable);
    } else if let Some(values) = inside("[possible values: ") {
        write!(flag.text, ". One of {values}").expect("a string");
    } else if words == "Possible values:" {
        flag.text.push(':');
    } else if let Some(value) = words.strip_prefix("- ") {
        let gap = if flag.text.ends_with(':') { "" } else { ";" };
        let (name, meaning) = value.split_once(':').unwrap_or((value, ""));
        write!(flag.text, "{gap} `{name}`: {}", meaning.trim()).expect("a string");
    } else {
        let gap = if flag.text.is_empty() { "" } else { " " };
        write!(flag.text, "{gap}{words}").expect("a string");
    }
}
