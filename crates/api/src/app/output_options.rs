//! How outputs are read, for all models and for single ones.
//!
//! Never: knows a format; the text side does. Invariant: a parser that is named for a model goes
//! before one for all models, and both before the chat template's.

use cleave_text::{ModelText, OutputFormats, ReasoningField, ReasoningParser, ToolCallParser};
use std::collections::BTreeMap;

/// How reasoning and tool calls are read from outputs, and given to clients.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct OutputOptions {
    pub reasoning_parser: ParserChoice<ReasoningParser>,
    pub tool_call_parser: ParserChoice<ToolCallParser>,
    pub reasoning_field: ReasoningField,
}

/// The parser of each model; the chat template chooses where none is named.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ParserChoice<T> {
    /// That of models that are not in `by_model`.
    pub others: Option<T>,
    /// That of single models, by served name.
    pub by_model: BTreeMap<String, T>,
}

impl<T> Default for ParserChoice<T> {
    fn default() -> Self {
        Self {
            others: None,
            by_model: BTreeMap::new(),
        }
    }
}

impl<T: Copy> ParserChoice<T> {
    fn of(&self, model: &str) -> Option<T> {
        self.by_model.get(model).copied().or(self.others)
    }
}

impl OutputOptions {
    /// The formats of outputs of a model.
    pub(super) fn formats(&self, model: &ModelText) -> OutputFormats {
        let Self {
            reasoning_parser,
            tool_call_parser,
            reasoning_field,
        } = self;
        let formats = model.output_formats();
        let mut formats = formats.with_reasoning_field(*reasoning_field);
        if let Some(parser) = reasoning_parser.of(model.name()) {
            formats = formats.with_reasoning(parser);
        }
        if let Some(parser) = tool_call_parser.of(model.name()) {
            formats = formats.with_calls(parser);
        }
        formats
    }
}
