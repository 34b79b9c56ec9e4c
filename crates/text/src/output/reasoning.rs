//! Reasoning between two marks at the beginning of an output.

use super::registry::ReasoningFormat;
use super::{AnswerParts, OutputMachine, OutputPlace};

/// Whitespace that is held back, in bytes: more of it is text, even next to a mark.
pub(super) const SPACE_BYTES_MAX: usize = 64;

/// The place at which an output begins.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum ReasoningStart {
    /// Within reasoning that the prompt opens.
    Open,
    /// The model may begin to reason.
    Possible,
    /// Behind reasoning that the prompt closes.
    Closed,
}

/// Divides an output into reasoning and answer.
pub(super) struct ReasoningMachine {
    format: &'static ReasoningFormat,
    stage: ReasoningStage,
    /// Whitespace that is dropped if a mark follows.
    space: String,
    /// Beginning of a mark.
    held: String,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum ReasoningStage {
    /// Nothing but whitespace came so far, and the reasoning may begin.
    Before,
    /// The reasoning has begun, and had no character yet.
    Opened,
    Reasoning,
    /// The reasoning has ended, and the answer had no character yet.
    Closed,
    Answer,
}

impl ReasoningMachine {
    pub(super) fn new(format: &'static ReasoningFormat, start: ReasoningStart) -> Self {
        let stage = if start == ReasoningStart::Open {
            ReasoningStage::Opened
        } else {
            ReasoningStage::Before
        };
        Self {
            format,
            stage,
            space: String::new(),
            held: String::new(),
        }
    }

    fn push_char(&mut self, c: char, out: &mut AnswerParts) {
        use ReasoningStage::{Answer, Before, Closed, Opened, Reasoning};
        if self.stage == Answer {
            return out.push_text(c);
        }
        if self.held.is_empty() && c.is_whitespace() {
            self.space.push(c);
            if self.space.len() > SPACE_BYTES_MAX {
                self.release_space(out);
            }
            return;
        }
        // A model repeats the opening mark where the prompt has it already.
        let marks: &[&str] = match self.stage {
            Before => &[self.format.begin],
            Opened => &[self.format.begin, self.format.end],
            Reasoning => &[self.format.end],
            Closed | Answer => &[],
        };
        self.held.push(c);
        while !self.held.is_empty() {
            if let Some(mark) = marks.iter().find(|mark| **mark == self.held) {
                self.stage = if *mark == self.format.begin {
                    Opened
                } else {
                    Closed
                };
                self.held.clear();
                self.space.clear();
                return;
            }
            if marks.iter().any(|mark| mark.starts_with(&self.held)) {
                return;
            }
            self.release_space(out);
            let first = self.held.remove(0);
            match self.stage {
                Before | Closed | Answer => out.push_text(first),
                Opened | Reasoning => out.push_reasoning(first),
            }
            self.stage = match self.stage {
                Opened | Reasoning => Reasoning,
                Before | Closed | Answer => Answer,
            };
            if self.stage == Answer {
                for c in std::mem::take(&mut self.held).chars() {
                    out.push_text(c);
                }
            }
        }
    }

    /// Gives away whitespace that no mark follows; that between a mark and the first character is
    /// dropped.
    fn release_space(&mut self, out: &mut AnswerParts) {
        for c in std::mem::take(&mut self.space).chars() {
            match self.stage {
                ReasoningStage::Before | ReasoningStage::Answer => out.push_text(c),
                ReasoningStage::Reasoning => out.push_reasoning(c),
                ReasoningStage::Opened | ReasoningStage::Closed => {}
            }
        }
    }
}

impl OutputMachine for ReasoningMachine {
    fn push(&mut self, text: &str, out: &mut AnswerParts) {
        for c in text.chars() {
            self.push_char(c, out);
        }
    }

    fn place(&self) -> OutputPlace {
        match self.stage {
            ReasoningStage::Before => OutputPlace::Undecided,
            ReasoningStage::Opened | ReasoningStage::Reasoning => OutputPlace::Reasoning,
            ReasoningStage::Closed | ReasoningStage::Answer => OutputPlace::Answer,
        }
    }

    fn finish(&mut self, out: &mut AnswerParts) {
        self.release_space(out);
        for c in std::mem::take(&mut self.held).chars() {
            match self.stage {
                ReasoningStage::Opened | ReasoningStage::Reasoning => out.push_reasoning(c),
                _ => out.push_text(c),
            }
        }
    }
}
