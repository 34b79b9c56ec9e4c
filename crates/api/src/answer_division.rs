//! The division of one answer into text, reasoning and tool calls.
//!
//! Owns: indices and ids of calls, and the number of tokens that are reasoning. Never: reads a
//! format; `cleave_text` does. Invariant: a call has one head, its first piece.

use crate::custom_input::CustomInput;
use crate::output_piece::{OutputPiece, OutputPieces, ToolCallHead, ToolCallPiece, ToolKind};
use crate::request::{OutputFormat, ReasoningShown};
use cleave_text::{AnswerPart, OutputParser, OutputPlace, OutputReading};
use serde::de::IgnoredAny;
use std::sync::Arc;

/// Reads the text of one answer.
pub(crate) struct AnswerDivision {
    parser: OutputParser,
    has_short_ids: bool,
    reasoning: ReasoningShown,
    custom_tools: Arc<[String]>,
    /// The input of the open call, if its tool is a custom one.
    custom_input: Option<CustomInput>,
    calls_count: usize,
    /// Arguments so far of the call that has not ended, as the model wrote them.
    open_arguments: Option<String>,
    /// Whether the output ended within a call.
    is_call_cut: bool,
    reasoning_tokens: u32,
    /// Tokens of which it is not certain whether they begin reasoning.
    undecided_tokens: u32,
}

impl AnswerDivision {
    pub(crate) fn new(reading: &OutputReading, output: &OutputFormat) -> Self {
        Self {
            parser: reading.start(),
            has_short_ids: reading.has_short_ids(),
            reasoning: output.reasoning,
            custom_tools: Arc::clone(&output.custom_tools),
            custom_input: None,
            calls_count: 0,
            open_arguments: None,
            is_call_cut: false,
            reasoning_tokens: 0,
            undecided_tokens: 0,
        }
    }

    /// Takes the next text, and adds the pieces that are certain.
    pub(crate) fn push(&mut self, text: &str, pieces: &mut OutputPieces) {
        let parts = self.parser.push(text);
        self.add(parts, pieces);
    }

    /// The part to which the next character belongs.
    pub(crate) fn place(&self) -> OutputPlace {
        self.parser.place()
    }

    /// Counts a token whose text was pushed; `before` is the place before it. The marks around
    /// reasoning count as reasoning.
    pub(crate) fn count_token(&mut self, before: OutputPlace) {
        match (before, self.place()) {
            (OutputPlace::Reasoning, _) | (_, OutputPlace::Reasoning) => {
                self.reasoning_tokens += 1 + std::mem::take(&mut self.undecided_tokens);
            }
            (_, OutputPlace::Undecided) => self.undecided_tokens += 1,
            (_, OutputPlace::Answer) => self.undecided_tokens = 0,
        }
    }

    /// Tokens of reasoning so far.
    pub(crate) fn reasoning_tokens(&self) -> u32 {
        self.reasoning_tokens
    }

    /// Ends the answer, and adds the rest of its pieces.
    pub(crate) fn finish(&mut self, pieces: &mut OutputPieces) {
        // Some formats close their objects when they end, so that a cut is visible only before.
        let open = self.open_arguments.take();
        self.is_call_cut = open.is_some_and(|arguments| !is_object(&arguments));
        let parts = self.parser.finish();
        self.add(parts, pieces);
        self.end_call(pieces);
    }

    pub(crate) fn has_calls(&self) -> bool {
        self.calls_count > 0
    }

    /// Whether the output ended before its last call was complete.
    pub(crate) fn is_call_cut(&self) -> bool {
        self.is_call_cut
    }

    fn add(&mut self, parts: Vec<AnswerPart>, pieces: &mut OutputPieces) {
        for part in parts {
            match part {
                AnswerPart::Text(text) => pieces.push(OutputPiece::Text(text)),
                AnswerPart::Reasoning(_) if self.reasoning == ReasoningShown::LeftOut => {}
                AnswerPart::Reasoning(text) => pieces.push(OutputPiece::Reasoning(text)),
                AnswerPart::CallBegin { name, id } => {
                    self.end_call(pieces);
                    self.open_arguments = Some(String::new());
                    let id = id.unwrap_or_else(|| self.new_id());
                    self.calls_count += 1;
                    let is_custom = self.custom_tools.contains(&name);
                    self.custom_input = is_custom.then(CustomInput::default);
                    let head = Some(ToolCallHead { id, name });
                    self.add_call(self.kind(), head, String::new(), pieces);
                }
                AnswerPart::CallArguments(text) => {
                    if let Some(arguments) = &mut self.open_arguments {
                        arguments.push_str(&text);
                    }
                    let text = match &mut self.custom_input {
                        Some(input) => input.push(&text),
                        None => text,
                    };
                    if !text.is_empty() {
                        self.add_call(self.kind(), None, text, pieces);
                    }
                }
                AnswerPart::CallEnd => self.end_call(pieces),
            }
        }
    }

    /// Adds the rest of a custom tool's input.
    fn end_call(&mut self, pieces: &mut OutputPieces) {
        self.open_arguments = None;
        let Some(input) = self.custom_input.take() else {
            return;
        };
        let rest = input.finish();
        if !rest.is_empty() {
            self.add_call(ToolKind::Custom, None, rest, pieces);
        }
    }

    /// The kind of the open call.
    fn kind(&self) -> ToolKind {
        match self.custom_input {
            Some(_) => ToolKind::Custom,
            None => ToolKind::Function,
        }
    }

    fn add_call(
        &self,
        kind: ToolKind,
        head: Option<ToolCallHead>,
        arguments: String,
        pieces: &mut OutputPieces,
    ) {
        let index = self.calls_count.checked_sub(1);
        pieces.push(OutputPiece::ToolCall(ToolCallPiece {
            index: index.expect("a call has begun"),
            kind,
            head,
            arguments,
        }));
    }

    fn new_id(&self) -> String {
        let number = rand::random::<u128>();
        if self.has_short_ids {
            format!("{:09x}", number >> 92)
        } else {
            format!("call_{:024x}", number >> 32)
        }
    }
}

/// Whether arguments are the whole text of a JSON object.
fn is_object(arguments: &str) -> bool {
    arguments.trim_start().starts_with('{') && serde_json::from_str::<IgnoredAny>(arguments).is_ok()
}
