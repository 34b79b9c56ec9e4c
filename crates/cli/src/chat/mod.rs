//! `cleave chat`: a conversation in a terminal or through a pipe.
//!
//! Owns: the body around the machine of `session.rs`: files, signals, the request. Never: decides
//! what a line means or what is sent. Invariant: all outputs are performed before the next fact.

mod answer;
mod command;
mod local;
mod server;
mod session;
mod terminal;
mod transcript;

use crate::args::ChatArgs;
use anyhow::{Context, anyhow, bail, ensure};
use local::LocalModel;
use serde_json::{Map, Value, json};
use server::ChatServer;
use session::{
    ChatOutput, ChatSession, ChatSettings, ChatSurface, LineNeed, ServerEvent, TextRole,
};
use std::path::Path;
use std::time::Instant;
use terminal::{ChatInput, ChatPrinter, ReadOutcome};
use tokio::runtime::Runtime;

/// Exit status after Ctrl-C: 128 + SIGINT, as in shells.
const EXIT_ON_SIGNAL: i32 = 130;

/// Limit of a file of tools, of a schema, or of a conversation.
const FILE_BYTES_MAX: u64 = 64 << 20;

/// The result of a chat, once it has ended.
type ChatEnd = Result<(), String>;

pub(crate) fn run(args: &ChatArgs) -> anyhow::Result<()> {
    let surface = terminal::surface();
    let mut fields = fields(args)?;
    crate::log::log_panics();
    let runtime = tokio::runtime::Builder::new_multi_thread()
        .enable_all()
        .build()
        .context("cannot start the runtime")?;
    if surface == ChatSurface::Pipe {
        // A blocked read of standard input cannot be woken.
        runtime.spawn(async {
            if tokio::signal::ctrl_c().await.is_ok() {
                std::process::exit(EXIT_ON_SIGNAL);
            }
        });
    }
    let local = match &args.url {
        Some(_) => None,
        None => Some(LocalModel::start(args, &runtime)?),
    };
    let own = local.as_ref().map(LocalModel::url);
    let url = args.url.as_deref().or(own.as_deref());
    let server = ChatServer::new(url.context("there is a server")?, args)?;
    let model = match args.model.name.served_model_name.first() {
        Some(name) => name.clone(),
        None => runtime.block_on(server.model())?,
    };
    fields.insert("model".to_owned(), model.as_str().into());
    let settings = ChatSettings {
        surface,
        system: args.system.clone(),
        fields,
        shows_reasoning: !args.hide_reasoning,
        shows_timing: args.timing || surface == ChatSurface::Terminal,
    };
    let mut body = ChatBody {
        session: ChatSession::new(settings),
        printer: ChatPrinter::new(surface),
        server,
        runtime: &runtime,
    };
    if surface == ChatSurface::Terminal {
        let greeting = format!("{model}: /help lists the commands, Ctrl-D ends.");
        body.printer.print(TextRole::Note, &greeting)?;
    }
    let ended = body.talk(&mut ChatInput::new(surface)?)?;
    if let Some(local) = local {
        local.end(&runtime);
    }
    ended.map_err(|reason| anyhow!(reason))
}

/// The fields of every request beside messages and model.
fn fields(args: &ChatArgs) -> anyhow::Result<Map<String, Value>> {
    let mut fields = Map::new();
    let mut set = |name: &str, value: Value| fields.insert(name.to_owned(), value);
    if let Some(temperature) = args.temperature {
        set("temperature", temperature.into());
    }
    if let Some(tokens) = args.max_tokens {
        set("max_tokens", tokens.into());
    }
    if let Some(effort) = args.reasoning_effort {
        set("reasoning_effort", effort.name().into());
    }
    if let Some(path) = &args.tools {
        let read = read_json(path).and_then(tools);
        let flag = || format!("--tools {}", path.display());
        set("tools", read.with_context(flag)?);
    }
    if let Some(path) = &args.json_schema {
        let flag = || format!("--json-schema {}", path.display());
        let schema = read_json(path).with_context(flag)?;
        ensure!(schema.is_object(), "{}: expected an object", flag());
        let named = json!({"name": "answer", "schema": schema});
        set(
            "response_format",
            json!({"type": "json_schema", "json_schema": named}),
        );
    }
    Ok(fields)
}

fn read_json(path: &Path) -> anyhow::Result<Value> {
    let text = cleave_files::read_text(path, FILE_BYTES_MAX)?;
    serde_json::from_str(&text).context("this is not JSON")
}

/// Checks a list of tools, and completes functions to OpenAI's form.
fn tools(list: Value) -> anyhow::Result<Value> {
    let Value::Array(list) = list else {
        bail!("expected a list: [{{\"name\": …, \"parameters\": {{…}}}}]");
    };
    let complete = |(index, tool): (usize, Value)| {
        let tool = match tool.get("function") {
            Some(_) => tool,
            None => json!({"type": "function", "function": tool}),
        };
        ensure!(
            tool["function"]["name"].is_string(),
            "tool {} has no `name`",
            index + 1
        );
        Ok(tool)
    };
    list.into_iter().enumerate().map(complete).collect()
}

/// The machine with everything that performs its outputs.
struct ChatBody<'a> {
    session: ChatSession,
    printer: ChatPrinter,
    server: ChatServer,
    runtime: &'a Runtime,
}

impl ChatBody<'_> {
    /// Reads lines until the chat ends.
    fn talk(&mut self, input: &mut ChatInput) -> anyhow::Result<ChatEnd> {
        let mut is_warned = false;
        loop {
            let read = input.read(&self.session.need())?;
            let was_warned = std::mem::replace(&mut is_warned, false);
            match read {
                ReadOutcome::Line(line) => self.session.enter(&line),
                ReadOutcome::End => self.session.end_input(),
                ReadOutcome::NotText => {
                    let reason = "that was not UTF-8; the line is dropped";
                    self.printer.print(TextRole::Error, reason)?;
                }
                ReadOutcome::Interrupted if was_warned => std::process::exit(EXIT_ON_SIGNAL),
                // It may have been meant for an answer that has just ended.
                ReadOutcome::Interrupted => {
                    is_warned = true;
                    let warning = "Ctrl-C once more ends the program, and so does Ctrl-D.";
                    self.printer.print(TextRole::Note, warning)?;
                }
            }
            if let Some(ended) = self.perform()? {
                return Ok(ended);
            }
        }
    }

    /// Performs all outputs; gives the chat's end if it has come.
    fn perform(&mut self) -> anyhow::Result<Option<ChatEnd>> {
        while let Some(output) = self.session.poll() {
            match output {
                ChatOutput::Show(role, text) => self.printer.print(role, &text)?,
                ChatOutput::Send(body) => {
                    if let Some(ended) = self.answer(&body)? {
                        return Ok(Some(ended));
                    }
                }
                ChatOutput::Save(path, text) => {
                    let written = std::fs::write(&path, text);
                    let place = |error| format!("{}: {error}", path.display());
                    self.session.saved(written.map_err(place));
                }
                ChatOutput::Load(path) => {
                    let text = cleave_files::read_text(&path, FILE_BYTES_MAX);
                    let place = |error| format!("{}: {error}", path.display());
                    self.session.loaded(text.map_err(place));
                }
                ChatOutput::Quit(ended) => return Ok(Some(ended)),
            }
        }
        Ok(None)
    }

    /// Streams an answer to its end, or until Ctrl-C.
    fn answer(&mut self, body: &Value) -> anyhow::Result<Option<ChatEnd>> {
        let Self {
            session,
            printer,
            server,
            runtime,
        } = self;
        let sent = Instant::now();
        let mut ended = None;
        let mut each = |event: ServerEvent| -> anyhow::Result<()> {
            session.receive(event, sent.elapsed());
            while let Some(output) = session.poll() {
                match output {
                    ChatOutput::Show(role, text) => printer.print(role, &text)?,
                    ChatOutput::Quit(end) => ended = Some(end),
                    ChatOutput::Send(_) | ChatOutput::Save(..) | ChatOutput::Load(_) => {
                        unreachable!("only a line makes these")
                    }
                }
            }
            Ok(())
        };
        let stopped = runtime.block_on(async {
            tokio::select! {
                streamed = server.stream(body, &mut each) => streamed.map(|()| false),
                signal = tokio::signal::ctrl_c() => signal.map(|()| true).context("cannot listen for signals"),
            }
        })?;
        if stopped {
            self.session.stop();
        }
        debug_assert!(self.session.need() != LineNeed::Nothing, "the answer ended");
        Ok(ended)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::args::{Cli, CliCommand};
    use clap::Parser;

    #[test]
    fn a_missing_file_is_named_with_its_flag() {
        for flag in ["--tools", "--json-schema"] {
            let line = ["cleave", "chat", flag, "missing/file.json"];
            let CliCommand::Chat(args) = Cli::parse_from(line).command else {
                panic!("a chat was asked for");
            };
            let error = format!("{:#}", fields(&args).unwrap_err());
            let begin = format!("{flag} missing/file.json: No such file");
            assert!(error.starts_with(&begin), "{error}");
        }
    }

    #[test]
    fn functions_become_tools_and_faults_are_named() {
        let plain = tools(json!([{"name": "f"}, {"type": "function", "function": {"name": "g"}}]));
        let plain = plain.unwrap();
        assert_eq!(plain[0]["function"]["name"], "f");
        assert_eq!(plain[1]["function"]["name"], "g");
        assert_eq!(plain[0]["type"], "function");
        let error = tools(json!([{"name": "f"}, {"parameters": {}}])).unwrap_err();
        assert_eq!(error.to_string(), "tool 2 has no `name`");
        assert!(tools(json!({"name": "f"})).is_err());
    }
}
