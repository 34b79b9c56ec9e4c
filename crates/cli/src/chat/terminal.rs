//! Lines in and texts out, for a person at a terminal or for a pipe.
//!
//! Owns: colours, the editor of lines, and the cleaning of texts. Never: knows what a line means.
//! Invariant: no text of a model or a server moves a terminal's cursor or changes its colours.

use super::session::{ChatSurface, LineNeed, TextRole};
use anyhow::{Context, ensure};
use rustyline::DefaultEditor;
use rustyline::error::ReadlineError;
use std::io::{BufRead, ErrorKind, IsTerminal, Read, Write};

/// Limit of a line of standard input, which is also that of a body at a server.
const LINE_BYTES_MAX: u64 = 8 << 20;

/// Escape sequences (ECMA-48, "SGR") before and after a text.
const DIM: &str = "\u{1b}[2m";
const CYAN: &str = "\u{1b}[36m";
const RED: &str = "\u{1b}[31m";
const PLAIN: &str = "\u{1b}[0m";

/// A person, if both standard input and output are a terminal.
pub(super) fn surface() -> ChatSurface {
    if std::io::stdin().is_terminal() && std::io::stdout().is_terminal() {
        ChatSurface::Terminal
    } else {
        ChatSurface::Pipe
    }
}

/// Prints texts by their role.
pub(super) struct ChatPrinter {
    surface: ChatSurface,
    has_colours: bool,
}

impl ChatPrinter {
    pub(super) fn new(surface: ChatSurface) -> Self {
        let set = |name| std::env::var_os(name).is_some_and(|value| !value.is_empty());
        let is_dumb = std::env::var_os("TERM").is_some_and(|term| term == "dumb");
        Self {
            surface,
            has_colours: surface == ChatSurface::Terminal && !set("NO_COLOR") && !is_dumb,
        }
    }

    /// Prints a text. A closed standard output ends the program without an error.
    ///
    /// # Errors
    /// If standard output cannot be written.
    pub(super) fn print(&self, role: TextRole, text: &str) -> anyhow::Result<()> {
        let text = self.styled(role, text);
        let is_for_people = matches!(role, TextRole::Note | TextRole::Error);
        if is_for_people && self.surface == ChatSurface::Pipe {
            eprint!("{text}");
            return Ok(());
        }
        let mut out = std::io::stdout().lock();
        match out.write_all(text.as_bytes()).and_then(|()| out.flush()) {
            Err(error) if error.kind() == ErrorKind::BrokenPipe => std::process::exit(0),
            written => written.context("cannot write the answer"),
        }
    }

    fn styled(&self, role: TextRole, text: &str) -> String {
        let (style, end) = match role {
            TextRole::Content => ("", ""),
            TextRole::Reasoning => (DIM, ""),
            TextRole::Call => (CYAN, ""),
            TextRole::Note => (DIM, "\n"),
            TextRole::Error => (RED, "\n"),
        };
        let text = match self.surface {
            ChatSurface::Terminal => clean(text),
            ChatSurface::Pipe => text.to_owned(),
        };
        if self.has_colours && !style.is_empty() && !text.trim().is_empty() {
            format!("{style}{text}{PLAIN}{end}")
        } else {
            format!("{text}{end}")
        }
    }
}

/// Replaces control characters, which could write anywhere on a terminal.
fn clean(text: &str) -> String {
    let shown = |char: char| {
        let is_special = char.is_control() && !matches!(char, '\n' | '\t');
        if is_special { '\u{fffd}' } else { char }
    };
    text.chars().map(shown).collect()
}

/// The end of reading a line.
pub(super) enum ReadOutcome {
    Line(String),
    End,
    /// The user pressed Ctrl-C.
    Interrupted,
    /// The user typed bytes that are no UTF-8.
    NotText,
}

/// The source of lines: a terminal with its editor, or a pipe.
pub(super) enum ChatInput {
    Editor(Box<DefaultEditor>),
    Lines,
}

impl ChatInput {
    /// # Errors
    /// If the terminal cannot be used.
    pub(super) fn new(surface: ChatSurface) -> anyhow::Result<Self> {
        Ok(match surface {
            ChatSurface::Terminal => {
                let editor = DefaultEditor::new().context("cannot use the terminal")?;
                Self::Editor(Box::new(editor))
            }
            ChatSurface::Pipe => Self::Lines,
        })
    }

    /// Reads the next line, without its end.
    ///
    /// # Errors
    /// If the input cannot be read, is no text, or has a line that is too long.
    pub(super) fn read(&mut self, need: &LineNeed) -> anyhow::Result<ReadOutcome> {
        match self {
            Self::Editor(editor) => read_terminal(editor, &prompt(need)),
            Self::Lines => read_line(&mut std::io::stdin().lock()),
        }
    }
}

fn read_terminal(editor: &mut DefaultEditor, prompt: &str) -> anyhow::Result<ReadOutcome> {
    loop {
        match editor.readline(prompt) {
            Ok(line) => {
                editor.add_history_entry(&line).ok();
                return Ok(ReadOutcome::Line(line));
            }
            Err(ReadlineError::Eof) => return Ok(ReadOutcome::End),
            Err(ReadlineError::Interrupted) => return Ok(ReadOutcome::Interrupted),
            // The window has another size.
            Err(ReadlineError::Signal(_)) => {}
            Err(error) if is_not_text(&error) => return Ok(ReadOutcome::NotText),
            Err(error) => return Err(error).context("cannot read the terminal"),
        }
    }
}

/// Whether the editor met bytes that are no UTF-8. It has taken them out of the input.
fn is_not_text(error: &ReadlineError) -> bool {
    matches!(error, ReadlineError::Io(error) if error.kind() == ErrorKind::InvalidData)
}

fn prompt(need: &LineNeed) -> String {
    match need {
        LineNeed::ToolResult(name) => format!("result of {}> ", clean(name)),
        LineNeed::Continuation => ". ".to_owned(),
        LineNeed::Message | LineNeed::Nothing => "> ".to_owned(),
    }
}

fn read_line(input: &mut impl BufRead) -> anyhow::Result<ReadOutcome> {
    let mut line = String::new();
    let read = input.take(LINE_BYTES_MAX).read_line(&mut line);
    let count = read.context("cannot read standard input")?;
    ensure!(
        (count as u64) < LINE_BYTES_MAX,
        "a line of standard input is longer than {LINE_BYTES_MAX} bytes"
    );
    if count == 0 {
        return Ok(ReadOutcome::End);
    }
    let line = line.trim_end_matches(['\r', '\n']);
    Ok(ReadOutcome::Line(line.to_owned()))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn hostile_texts_cannot_drive_a_terminal() {
        let hostile = "a\u{1b}[2J\u{9b}31m\r\u{8}\u{7}b\tc\n";
        let mut printer = ChatPrinter {
            surface: ChatSurface::Terminal,
            has_colours: true,
        };
        for role in [TextRole::Content, TextRole::Call, TextRole::Error] {
            let shown = printer.styled(role, hostile);
            let styles = [CYAN, RED, PLAIN].into_iter();
            let own = styles.fold(shown.clone(), |text, style| text.replace(style, ""));
            let is_safe = own
                .chars()
                .all(|char| !char.is_control() || "\n\t".contains(char));
            assert!(is_safe, "{shown:?}");
        }
        printer.has_colours = false;
        let plain = printer.styled(TextRole::Reasoning, "dim");
        assert_eq!(plain, "dim");
        assert_eq!(
            prompt(&LineNeed::ToolResult("\u{1b}c".to_owned())),
            "result of \u{fffd}c> "
        );
    }

    #[test]
    fn a_pipe_gets_texts_as_they_are() {
        let printer = ChatPrinter::new(ChatSurface::Pipe);
        let text = "a\u{1b}[2J\r\n";
        assert_eq!(printer.styled(TextRole::Content, text), text);
    }

    #[test]
    fn a_byte_that_is_no_text_does_not_end_the_editor() {
        assert!(is_not_text(&ErrorKind::InvalidData.into()));
        assert!(!is_not_text(&ErrorKind::BrokenPipe.into()));
        assert!(!is_not_text(&ReadlineError::Eof));
    }

    #[test]
    fn lines_are_read_without_their_ends() {
        let mut input = "one\r\n\ntwo".as_bytes();
        let mut next = || match read_line(&mut input).unwrap() {
            ReadOutcome::Line(line) => Some(line),
            ReadOutcome::End | ReadOutcome::Interrupted | ReadOutcome::NotText => None,
        };
        let lines: Vec<String> = std::iter::from_fn(&mut next).collect();
        assert_eq!(lines, ["one", "", "two"]);
        assert!(read_line(&mut &[0xff, b'\n'][..]).is_err());
    }
}
