//! Reasoning, tool calls and text in the output of a model.
//!
//! Owns: the formats in which models write them, one machine for each kind of format, and the
//! choice of a format by the chat template. Never: knows a request, or judges arguments.
//! Invariant: the parts of an output depend on its text alone, not on its division. Every character
//! is in a part, but for marks, the frame of a call, and whitespace next to these; text that only
//! resembles a call is text.

mod argument_grammar;
#[cfg(test)]
mod byte_model;
mod call_grammar;
mod call_rows;
mod calls;
#[cfg(test)]
mod division_tests;
mod escaped_call;
mod escaped_grammar;
#[cfg(test)]
mod grammar_tests;
mod harmony;
mod json_scan;
mod lark_text;
mod named_call;
mod object_call;
mod output_grammar;
mod python_value;
mod pythonic_call;
mod reasoning;
mod registry;
#[cfg(test)]
mod rendered_tests;
#[cfg(test)]
mod scenario_tests;
mod tagged_call;
#[cfg(test)]
mod template_tests;
#[cfg(test)]
mod tests;
mod tool_spec;

pub use output_grammar::{CallRules, CallableTool, OutputRules};
pub use registry::{OutputFormats, ReasoningField, ReasoningParser, ToolCallParser, UnknownParser};
pub use tool_spec::ToolSpec;

use calls::CallMachine;
use harmony::HarmonyMachine;
use output_grammar::ChannelStart;
use reasoning::{ReasoningMachine, ReasoningStart};
use registry::{CallStyle, ReasoningFormat};
use std::sync::Arc;

/// A part of an output, or a part of one of its calls.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum AnswerPart {
    /// Text for the user.
    Text(String),
    /// Text of the model's reasoning.
    Reasoning(String),
    /// A call of a tool begins. Its arguments follow, and its end.
    CallBegin {
        name: String,
        /// The call's id, if the model writes one.
        id: Option<String>,
    },
    /// The next characters of the arguments, which are the text of a JSON object unless the model
    /// made a mistake or the output was cut.
    CallArguments(String),
    CallEnd,
}

/// Parts in order; neighbours of one kind are one part.
#[derive(Debug, Default)]
pub(crate) struct AnswerParts(pub(crate) Vec<AnswerPart>);

impl AnswerParts {
    pub(crate) fn push(&mut self, part: AnswerPart) {
        match (self.0.last_mut(), part) {
            (_, AnswerPart::Text(text) | AnswerPart::Reasoning(text)) if text.is_empty() => {}
            (_, AnswerPart::CallArguments(text)) if text.is_empty() => {}
            (Some(AnswerPart::Text(last)), AnswerPart::Text(text))
            | (Some(AnswerPart::Reasoning(last)), AnswerPart::Reasoning(text))
            | (Some(AnswerPart::CallArguments(last)), AnswerPart::CallArguments(text)) => {
                last.push_str(&text);
            }
            (_, part) => self.0.push(part),
        }
    }

    fn push_text(&mut self, c: char) {
        if let Some(AnswerPart::Text(last)) = self.0.last_mut() {
            last.push(c);
        } else {
            self.0.push(AnswerPart::Text(c.into()));
        }
    }

    fn push_reasoning(&mut self, c: char) {
        if let Some(AnswerPart::Reasoning(last)) = self.0.last_mut() {
            last.push(c);
        } else {
            self.0.push(AnswerPart::Reasoning(c.into()));
        }
    }
}

/// The part of an output to which its next character belongs.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum OutputPlace {
    /// The characters since the last certain one may be the beginning of reasoning, or of the
    /// answer.
    Undecided,
    Reasoning,
    Answer,
}

/// A machine that takes an output character by character, so that no division of it matters.
pub(crate) trait OutputMachine: Send {
    fn push(&mut self, text: &str, out: &mut AnswerParts);

    /// Ends the output; what was held back becomes a part.
    fn finish(&mut self, out: &mut AnswerParts);

    /// The part to which the next character belongs.
    fn place(&self) -> OutputPlace {
        OutputPlace::Answer
    }
}

/// The reading of one request's outputs: the formats, and the tools that may be called.
#[derive(Clone, Debug)]
pub struct OutputReading {
    reasoning: Option<(&'static ReasoningFormat, ReasoningStart)>,
    calls: Option<(&'static CallStyle, Arc<[ToolSpec]>)>,
    channel_start: ChannelStart,
}

impl OutputReading {
    /// Reads outputs of a prompt with this text. Without tools no call is looked for. `None` if
    /// every output is nothing but text.
    pub fn new(formats: &OutputFormats, prompt: &str, tools: Arc<[ToolSpec]>) -> Option<Self> {
        let reasoning = formats.reasoning();
        let reasoning = reasoning.map(|format| (format, format.start_after(prompt)));
        // Channels divide the output even where no tool can be called.
        let calls = formats
            .calls()
            .filter(|style| !tools.is_empty() || matches!(style, CallStyle::Harmony));
        let calls = calls.map(|style| (style, tools));
        (reasoning.is_some() || calls.is_some()).then_some(Self {
            reasoning,
            calls,
            channel_start: harmony::start_after(prompt),
        })
    }

    /// Texts of special tokens that the machines must see, where a tokenizer has them.
    pub fn marks(&self) -> impl Iterator<Item = &'static str> + '_ {
        let reasoning = self.reasoning.iter().flat_map(|(format, _)| format.marks());
        let calls = self.calls.iter().flat_map(|(style, _)| style.marks());
        reasoning.chain(calls)
    }

    /// Whether ids of calls must be nine letters and digits, because the template refuses others.
    pub fn has_short_ids(&self) -> bool {
        let style = self.calls.as_ref().map(|(style, _)| *style);
        style.is_some_and(CallStyle::has_short_ids)
    }

    /// Whether the output begins within the model's reasoning.
    pub fn starts_in_reasoning(&self) -> bool {
        self.reasoning
            .is_some_and(|(_, start)| start == ReasoningStart::Open)
    }

    /// Begins to read one output.
    pub fn start(&self) -> OutputParser {
        let reasoning = self
            .reasoning
            .map(|(format, start)| ReasoningMachine::new(format, start));
        let calls = self.calls.as_ref().map(|(style, tools)| {
            let tools = Arc::clone(tools);
            let machine: Box<dyn OutputMachine> = match style {
                CallStyle::Framed(format) => Box::new(CallMachine::new(format, tools)),
                CallStyle::Harmony => Box::new(HarmonyMachine::new(tools)),
            };
            machine
        });
        OutputParser { reasoning, calls }
    }
}

/// Divides the text of one output into its parts.
pub struct OutputParser {
    reasoning: Option<ReasoningMachine>,
    calls: Option<Box<dyn OutputMachine>>,
}

impl OutputParser {
    /// Takes the next text; returns the parts that are certain.
    pub fn push(&mut self, text: &str) -> Vec<AnswerPart> {
        let mut out = AnswerParts::default();
        match &mut self.reasoning {
            None => self.push_answer(text, &mut out),
            Some(reasoning) => {
                let mut divided = AnswerParts::default();
                reasoning.push(text, &mut divided);
                self.push_divided(divided, &mut out);
            }
        }
        out.0
    }

    /// The part of the output to which the next character belongs.
    pub fn place(&self) -> OutputPlace {
        let reasoning = self.reasoning.as_ref().map(OutputMachine::place);
        match (reasoning, &self.calls) {
            (None | Some(OutputPlace::Answer), Some(calls)) => calls.place(),
            (reasoning, _) => reasoning.unwrap_or(OutputPlace::Answer),
        }
    }

    /// Ends the output; returns the rest of its parts.
    pub fn finish(&mut self) -> Vec<AnswerPart> {
        let mut out = AnswerParts::default();
        if let Some(reasoning) = &mut self.reasoning {
            let mut divided = AnswerParts::default();
            reasoning.finish(&mut divided);
            self.push_divided(divided, &mut out);
        }
        if let Some(calls) = &mut self.calls {
            calls.finish(&mut out);
        }
        out.0
    }

    fn push_divided(&mut self, divided: AnswerParts, out: &mut AnswerParts) {
        for part in divided.0 {
            match part {
                AnswerPart::Text(text) => self.push_answer(&text, out),
                other => out.push(other),
            }
        }
    }

    fn push_answer(&mut self, text: &str, out: &mut AnswerParts) {
        match &mut self.calls {
            Some(calls) => calls.push(text, out),
            None => out.push(AnswerPart::Text(text.to_owned())),
        }
    }
}
