//! The division of one answer into text, reasoning and tool calls.
//!
//! Owns: indices and ids of calls. Never: reads a format; `cleave_text` does. Invariant: a call has
//! one head, its first piece.

use crate::output_piece::{OutputPiece, OutputPieces, ToolCallHead, ToolCallPiece};
use crate::request::ReasoningShown;
use cleave_text::{AnswerPart, OutputParser, OutputReading};

/// Reads the text of one answer.
pub(crate) struct AnswerDivision {
    parser: OutputParser,
    has_short_ids: bool,
    reasoning: ReasoningShown,
    calls_count: usize,
}

impl AnswerDivision {
    pub(crate) fn new(reading: &OutputReading, reasoning: ReasoningShown) -> Self {
        Self {
            parser: reading.start(),
            has_short_ids: reading.has_short_ids(),
            reasoning,
            calls_count: 0,
        }
    }

    /// Takes the next text, and adds the pieces that are certain.
    pub(crate) fn push(&mut self, text: &str, pieces: &mut OutputPieces) {
        let parts = self.parser.push(text);
        self.add(parts, pieces);
    }

    /// Ends the answer, and adds the rest of its pieces.
    pub(crate) fn finish(&mut self, pieces: &mut OutputPieces) {
        let parts = self.parser.finish();
        self.add(parts, pieces);
    }

    pub(crate) fn has_calls(&self) -> bool {
        self.calls_count > 0
    }

    fn add(&mut self, parts: Vec<AnswerPart>, pieces: &mut OutputPieces) {
        for part in parts {
            match part {
                AnswerPart::Text(text) => pieces.push(OutputPiece::Text(text)),
                AnswerPart::Reasoning(_) if self.reasoning == ReasoningShown::LeftOut => {}
                AnswerPart::Reasoning(text) => pieces.push(OutputPiece::Reasoning(text)),
                AnswerPart::CallBegin { name, id } => {
                    let id = id.unwrap_or_else(|| self.new_id());
                    self.calls_count += 1;
                    let head = Some(ToolCallHead { id, name });
                    self.add_call(head, String::new(), pieces);
                }
                AnswerPart::CallArguments(text) => self.add_call(None, text, pieces),
                AnswerPart::CallEnd => {}
            }
        }
    }

    fn add_call(&self, head: Option<ToolCallHead>, arguments: String, pieces: &mut OutputPieces) {
        let index = self.calls_count.checked_sub(1);
        pieces.push(OutputPiece::ToolCall(ToolCallPiece {
            index: index.expect("a call has begun"),
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
