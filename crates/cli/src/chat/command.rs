//! The commands of a chat, which begin with a slash.
//!
//! Owns: their names and the text of `/help`. Never: does what they ask for. Only a person at a
//! terminal has them.

use std::path::PathBuf;

pub(super) const HELP: &str = "\
/help            this list
/system [TEXT]   set the system prompt, or remove it
/reset           forget the conversation; the system prompt stays
/retry           answer the last message again
/save FILE       write the conversation to a file, which /ui/chat reads too
/load FILE       go on with a conversation from a file
/timing          switch the line about time and tokens on or off
/reasoning       show reasoning, or only how long it is
/quit            end; so do Ctrl-D and, where no answer is open, Ctrl-C twice
//…              a message that begins with a slash
A line that ends with \\ goes on in the next one. Ctrl-C (or /stop) ends an answer.";

#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) enum ChatCommand {
    Help,
    System(Option<String>),
    Reset,
    Retry,
    Save(PathBuf),
    Load(PathBuf),
    Timing,
    Reasoning,
    /// Nothing is open while a line is read, so there is nothing to stop.
    Stop,
    Quit,
}

/// Reads a line: a command, or `None` for a message.
///
/// # Errors
/// One for people, where the line is neither.
pub(super) fn parse_command(line: &str) -> Result<Option<ChatCommand>, String> {
    let line = line.trim();
    if !line.starts_with('/') || line.starts_with("//") {
        return Ok(None);
    }
    let (name, rest) = line.split_once(char::is_whitespace).unwrap_or((line, ""));
    let rest = rest.trim();
    let file = || {
        let path = (!rest.is_empty()).then(|| PathBuf::from(rest));
        path.ok_or_else(|| format!("{name} needs the name of a file"))
    };
    let command = match name {
        "/system" => ChatCommand::System((!rest.is_empty()).then(|| rest.to_owned())),
        "/save" => ChatCommand::Save(file()?),
        "/load" => ChatCommand::Load(file()?),
        _ if !rest.is_empty() => return Err(unknown(line)),
        "/help" => ChatCommand::Help,
        "/reset" => ChatCommand::Reset,
        "/retry" => ChatCommand::Retry,
        "/timing" => ChatCommand::Timing,
        "/reasoning" => ChatCommand::Reasoning,
        "/stop" => ChatCommand::Stop,
        "/quit" | "/exit" => ChatCommand::Quit,
        _ => return Err(unknown(line)),
    };
    Ok(Some(command))
}

fn unknown(line: &str) -> String {
    format!("{line} is no command: /help lists them, and // begins a message with a slash")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_slash_begins_a_command_and_two_a_message() {
        for (line, command) in [
            ("hello", None),
            ("//etc is a folder", None),
            (" /help ", Some(ChatCommand::Help)),
            ("/system", Some(ChatCommand::System(None))),
            (
                "/system Be  short.",
                Some(ChatCommand::System(Some("Be  short.".to_owned()))),
            ),
            (
                "/save a b.json",
                Some(ChatCommand::Save(PathBuf::from("a b.json"))),
            ),
        ] {
            assert_eq!(parse_command(line), Ok(command), "{line}");
        }
        for line in ["/etc/passwd", "/help me", "/save", "/"] {
            assert!(parse_command(line).is_err(), "{line}");
        }
    }
}
