//! The machine of a chat: lines of the user and events of the server in, texts and requests out.
//!
//! Owns: whose turn it is, and what each line means. Never: reads, prints, waits or sends; the body
//! does, in `mod.rs`. Invariant: at most one answer is open, and no line is taken while it is.
//!
//! Kinds of methods: getters (`need`); facts (`enter`, `receive`, `stop`, `end_input`, `loaded`,
//! `saved`); the poll (`poll`). The order: one fact, then `poll` until it gives `None`, then the
//! next fact.

use super::answer::{AddedText, GrowingAnswer};
use super::command::{ChatCommand, HELP, parse_command};
use super::transcript::{ChatTurn, Transcript, tool_call};
use serde_json::{Map, Value, json};
use std::collections::VecDeque;
use std::path::PathBuf;
use std::time::Duration;

/// The other side of the chat's texts.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum ChatSurface {
    /// A person reads and types.
    Terminal,
    /// A program: answers alone, and the first failure ends the chat.
    Pipe,
}

/// Settings of a chat, which it begins with.
#[derive(Clone, Debug)]
pub(super) struct ChatSettings {
    pub(super) surface: ChatSurface,
    pub(super) system: Option<String>,
    /// Fields of every request beside `messages`.
    pub(super) fields: Map<String, Value>,
    pub(super) shows_reasoning: bool,
    pub(super) shows_timing: bool,
}

/// Kind of a text, by which it is printed.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum TextRole {
    /// Text of the model.
    Content,
    Reasoning,
    /// Name and arguments of a call.
    Call,
    /// A line for the user about the chat.
    Note,
    /// A line about an error.
    Error,
}

#[derive(Clone, Debug, PartialEq)]
pub(super) enum ChatOutput {
    /// Print; notes and errors are whole lines.
    Show(TextRole, String),
    /// Send a request, and report its stream by `receive`.
    Send(Value),
    /// Write a file, and report it by `saved`.
    Save(PathBuf, String),
    /// Read a file, and report it by `loaded`.
    Load(PathBuf),
    /// End; with an error if something failed.
    Quit(Result<(), String>),
}

/// The next line that the chat takes.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) enum LineNeed {
    Message,
    /// The line before ended with a backslash.
    Continuation,
    /// The result of the call to this tool.
    ToolResult(String),
    /// None: an answer is open.
    Nothing,
}

/// Something that happened to a request, with the time since it was sent.
#[derive(Clone, Debug, PartialEq)]
pub(super) enum ServerEvent {
    Chunk(Value),
    /// The stream ended by itself.
    Ended,
    /// The server refused the request.
    Refused {
        status: u16,
        message: String,
        retry_after: Option<Duration>,
    },
    /// The connection failed, or the server reported an error.
    Failed(String),
}

pub(super) struct ChatSession {
    settings: ChatSettings,
    transcript: Transcript,
    answer: Option<GrowingAnswer>,
    /// Lines before the current one, each of which ended with a backslash.
    unfinished: String,
    /// Role of the text that was shown last, if its line is still open.
    open_line: Option<TextRole>,
    outputs: VecDeque<ChatOutput>,
}

impl ChatSession {
    pub(super) fn new(settings: ChatSettings) -> Self {
        Self {
            settings,
            transcript: Transcript::default(),
            answer: None,
            unfinished: String::new(),
            open_line: None,
            outputs: VecDeque::new(),
        }
    }

    // === getters

    pub(super) fn need(&self) -> LineNeed {
        if self.answer.is_some() {
            LineNeed::Nothing
        } else if !self.unfinished.is_empty() {
            LineNeed::Continuation
        } else if let Some(call) = self.transcript.open_calls().first() {
            LineNeed::ToolResult(call.name.clone())
        } else {
            LineNeed::Message
        }
    }

    // === facts

    /// Takes a line of the user. The last one may lack its end.
    pub(super) fn enter(&mut self, line: &str) {
        debug_assert!(self.answer.is_none(), "no line is read during an answer");
        if let Some(begun) = line.strip_suffix('\\') {
            self.unfinished.push_str(begun);
            self.unfinished.push('\n');
            return;
        }
        let line = std::mem::take(&mut self.unfinished) + line;
        // A program's lines may be another's text, which must not write files.
        if self.settings.surface == ChatSurface::Pipe {
            return self.take(&line);
        }
        match parse_command(&line) {
            Ok(Some(command)) => self.run(command),
            Ok(None) => {
                let escaped = line.strip_prefix('/').filter(|rest| rest.starts_with('/'));
                self.take(escaped.unwrap_or(&line));
            }
            Err(reason) => self.fail(&reason),
        }
    }

    /// The input ended. A line that was to go on ends with it.
    pub(super) fn end_input(&mut self) {
        let line = std::mem::take(&mut self.unfinished);
        if !line.is_empty() {
            self.enter(line.trim_end_matches('\n'));
            return;
        }
        let calls = self.transcript.open_calls();
        let ended = match calls.first() {
            Some(call) if self.settings.surface == ChatSurface::Pipe => Err(format!(
                "the input ended before the result of the call to {}",
                call.name
            )),
            _ => Ok(()),
        };
        self.outputs.push_back(ChatOutput::Quit(ended));
    }

    /// Handles an event of the open answer, `since` its request was sent.
    pub(super) fn receive(&mut self, event: ServerEvent, since: Duration) {
        let Some(answer) = &mut self.answer else {
            return; // It was stopped.
        };
        match event {
            ServerEvent::Chunk(chunk) if chunk["error"].is_object() => {
                let message = chunk["error"]["message"].as_str();
                let message = message.unwrap_or("the server reported an error");
                self.break_off(message);
            }
            ServerEvent::Chunk(chunk) => {
                for added in answer.add(&chunk, since) {
                    self.show_added(added);
                }
            }
            ServerEvent::Ended if answer.finish.is_none() => {
                self.break_off("the stream ended before the answer did");
            }
            ServerEvent::Ended => self.finish(since),
            ServerEvent::Refused {
                status,
                message,
                retry_after,
            } => {
                let mut reason = refusal(status, &message, retry_after);
                let may_retry = retry_after.is_some() && matches!(status, 429 | 503);
                if may_retry && self.settings.surface == ChatSurface::Terminal {
                    reason.push_str(" /retry asks again.");
                }
                self.break_off(&reason);
            }
            ServerEvent::Failed(message) => self.break_off(&message),
        }
    }

    /// The user stopped the open answer. Its text stays; its calls may be cut, so they go.
    pub(super) fn stop(&mut self) {
        let Some(answer) = self.answer.take() else {
            return;
        };
        self.keep_partial(answer);
        self.note("Stopped.");
    }

    /// The file of a `Load` was read, or could not be.
    pub(super) fn loaded(&mut self, text: Result<String, String>) {
        let read = text
            .and_then(|text| Transcript::from_file(&text).map_err(|error| format!("{error:#}")));
        match read {
            Ok((system, transcript)) => {
                self.settings.system = system.or(self.settings.system.take());
                self.transcript = transcript;
                self.note(&format!("{} turns.", self.transcript.turns_count()));
            }
            Err(reason) => self.fail(&format!("not loaded: {reason}")),
        }
    }

    /// The file of a `Save` was written, or could not be.
    pub(super) fn saved(&mut self, written: Result<(), String>) {
        match written {
            Ok(()) => self.note("Saved."),
            Err(reason) => self.fail(&format!("not saved: {reason}")),
        }
    }

    // === poll

    pub(super) fn poll(&mut self) -> Option<ChatOutput> {
        self.outputs.pop_front()
    }

    // === lines

    fn run(&mut self, command: ChatCommand) {
        match command {
            ChatCommand::Help => self.note(HELP),
            ChatCommand::System(text) => {
                self.settings.system = text;
                self.note("It applies from the next message on.");
            }
            ChatCommand::Reset => {
                self.transcript = Transcript::default();
                self.note("The conversation is empty.");
            }
            ChatCommand::Retry => {
                if self.transcript.forget_answer() {
                    self.send();
                } else {
                    self.fail("there is no message to answer again");
                }
            }
            ChatCommand::Save(path) => {
                let text = self.transcript.to_file(self.settings.system.as_deref());
                self.outputs.push_back(ChatOutput::Save(path, text));
            }
            ChatCommand::Load(path) => self.outputs.push_back(ChatOutput::Load(path)),
            ChatCommand::Timing => {
                self.settings.shows_timing = !self.settings.shows_timing;
                let is_shown = self.settings.shows_timing;
                let state = if is_shown { "on" } else { "off" };
                self.note(&format!("The line about time and tokens is {state}."));
            }
            ChatCommand::Reasoning => {
                self.settings.shows_reasoning = !self.settings.shows_reasoning;
                let is_shown = self.settings.shows_reasoning;
                let state = if is_shown { "shown" } else { "hidden" };
                self.note(&format!("Reasoning is {state}."));
            }
            ChatCommand::Stop => self.note("No answer is open."),
            ChatCommand::Quit => self.outputs.push_back(ChatOutput::Quit(Ok(()))),
        }
    }

    /// Takes a message, or the result of the first open call.
    fn take(&mut self, line: &str) {
        let mut calls = self.transcript.open_calls().into_iter();
        if let Some(call) = calls.next() {
            self.transcript.push(ChatTurn::Result {
                call: call.id,
                text: line.to_owned(),
            });
            if calls.next().is_none() {
                self.send();
            }
        } else if !line.trim().is_empty() {
            self.transcript.ask(line.to_owned());
            self.send();
        }
    }

    fn send(&mut self) {
        let mut body = self.settings.fields.clone();
        let messages = self.transcript.messages(self.settings.system.as_deref());
        body.insert("messages".to_owned(), messages.into());
        body.insert("stream".to_owned(), true.into());
        let usage = json!({"include_usage": true});
        body.insert("stream_options".to_owned(), usage);
        self.answer = Some(GrowingAnswer::default());
        self.outputs.push_back(ChatOutput::Send(body.into()));
    }

    // === answers

    fn show_added(&mut self, added: AddedText) {
        let is_terminal = self.settings.surface == ChatSurface::Terminal;
        match added {
            AddedText::Content(text) => self.show(TextRole::Content, &text),
            AddedText::Reasoning(text) if is_terminal && self.settings.shows_reasoning => {
                self.show(TextRole::Reasoning, &text);
            }
            AddedText::Call(name) if is_terminal => {
                self.end_line();
                self.show(TextRole::Call, &format!("call {name} "));
            }
            AddedText::Arguments(text) if is_terminal => self.show(TextRole::Call, &text),
            AddedText::Reasoning(_) | AddedText::Call(_) | AddedText::Arguments(_) => {}
        }
    }

    fn finish(&mut self, since: Duration) {
        let Some(answer) = self.answer.take() else {
            return;
        };
        self.end_line();
        let is_terminal = self.settings.surface == ChatSurface::Terminal;
        if !answer.calls.is_empty() && !is_terminal {
            let calls: Vec<Value> = answer.calls.iter().map(tool_call).collect();
            self.show(TextRole::Content, &json!({"tool_calls": calls}).to_string());
            self.end_line();
        }
        if is_terminal && !self.settings.shows_reasoning && !answer.reasoning.is_empty() {
            let count = answer.reasoning.chars().count();
            self.note(&format!("{count} characters of reasoning"));
        }
        for warning in &answer.warnings {
            self.note(&format!("Warning: {warning}"));
        }
        if answer.finish.as_deref() == Some("length") {
            self.note("The limit of tokens ended the answer.");
        }
        if self.settings.shows_timing {
            let line = answer.timing_line(since);
            self.outputs
                .push_back(ChatOutput::Show(TextRole::Note, line));
        }
        let checked =
            self.settings.fields.contains_key("response_format") && answer.calls.is_empty();
        let json = serde_json::from_str::<Value>(&answer.text);
        if let (true, Err(error)) = (checked, &json) {
            self.fail(&format!("the answer is no JSON: {error}"));
        }
        self.transcript.push(ChatTurn::Answer {
            text: answer.text,
            reasoning: answer.reasoning,
            calls: answer.calls,
        });
    }

    /// Ends the open answer by an error.
    fn break_off(&mut self, reason: &str) {
        if let Some(answer) = self.answer.take() {
            self.keep_partial(answer);
        }
        self.fail(reason);
    }

    fn keep_partial(&mut self, answer: GrowingAnswer) {
        self.end_line();
        if !answer.text.is_empty() {
            self.transcript.push(ChatTurn::Answer {
                text: answer.text,
                reasoning: answer.reasoning,
                calls: Vec::new(),
            });
        }
    }

    // === texts

    /// Shows a part of a line; another role begins a line of its own.
    fn show(&mut self, role: TextRole, text: &str) {
        if self.open_line.is_some_and(|open| open != role) {
            self.end_line();
        }
        self.open_line = (!text.ends_with('\n')).then_some(role);
        self.outputs
            .push_back(ChatOutput::Show(role, text.to_owned()));
    }

    fn end_line(&mut self) {
        if let Some(role) = self.open_line.take() {
            self.outputs
                .push_back(ChatOutput::Show(role, "\n".to_owned()));
        }
    }

    /// A line for a person; a program gets none.
    fn note(&mut self, text: &str) {
        if self.settings.surface == ChatSurface::Terminal {
            self.outputs
                .push_back(ChatOutput::Show(TextRole::Note, text.to_owned()));
        }
    }

    /// Shows an error, which ends a chat without a person.
    fn fail(&mut self, reason: &str) {
        self.outputs.push_back(match self.settings.surface {
            ChatSurface::Terminal => ChatOutput::Show(TextRole::Error, reason.to_owned()),
            ChatSurface::Pipe => ChatOutput::Quit(Err(reason.to_owned())),
        });
    }
}

/// A refusal in words, with the way out.
fn refusal(status: u16, message: &str, retry_after: Option<Duration>) -> String {
    match (status, retry_after) {
        (401, _) => format!("{message} Give the key by --api-key or OPENAI_API_KEY."),
        (429 | 503, Some(wait)) => {
            let seconds = wait.as_secs_f64().ceil();
            format!("{message} Try again in {seconds} s.")
        }
        _ => format!("{message} (status {status})"),
    }
}

#[cfg(test)]
mod tests;
