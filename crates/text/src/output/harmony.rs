//! Messages in channels, the format of gpt-oss.
//!
//! An output is a list of messages, each a header, `<|message|>`, content and a mark. The header
//! has the channel, and the recipient if the message is a call: `analysis` is reasoning, a message
//! to a function is a call, everything else is text.

use super::tool_spec::ToolSpec;
use super::{AnswerPart, AnswerParts, OutputMachine};
use std::sync::Arc;

/// Limit of a header, in bytes; a longer one is text.
const HEADER_BYTES_MAX: usize = 1 << 10;
const CHANNEL: &str = "<|channel|>";
const START: &str = "<|start|>";
const CONSTRAIN: &str = "<|constrain|>";
const MESSAGE: &str = "<|message|>";
/// Marks that end a message.
const ENDS: [&str; 3] = ["<|end|>", "<|call|>", "<|return|>"];

/// Every mark of the format.
pub(super) const MARKS: [&str; 7] = [
    CHANNEL, START, CONSTRAIN, MESSAGE, ENDS[0], ENDS[1], ENDS[2],
];

/// Divides an output in channels.
pub(super) struct HarmonyMachine {
    tools: Arc<[ToolSpec]>,
    stage: HarmonyStage,
    /// Beginning of a mark.
    held: String,
}

#[derive(Debug, PartialEq, Eq)]
enum HarmonyStage {
    /// Within a header, whose text is held.
    Header(String),
    Content(ChannelContent),
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum ChannelContent {
    Text,
    Reasoning,
    Call,
}

impl HarmonyMachine {
    pub(super) fn new(tools: Arc<[ToolSpec]>) -> Self {
        Self {
            tools,
            stage: HarmonyStage::Content(ChannelContent::Text),
            held: String::new(),
        }
    }

    fn push_char(&mut self, c: char, out: &mut AnswerParts) {
        self.held.push(c);
        while !self.held.is_empty() {
            if let Some(mark) = MARKS.iter().find(|mark| **mark == self.held) {
                self.held.clear();
                return self.push_mark(mark, out);
            }
            if MARKS.iter().any(|mark| mark.starts_with(&self.held)) {
                return;
            }
            let first = self.held.remove(0);
            self.push_inside(first, out);
        }
    }

    fn push_mark(&mut self, mark: &str, out: &mut AnswerParts) {
        match &mut self.stage {
            HarmonyStage::Header(header) if mark == MESSAGE => {
                let header = std::mem::take(header);
                let kind = self.begin_message(&header, out);
                self.stage = HarmonyStage::Content(kind);
            }
            HarmonyStage::Header(header) if !ENDS.contains(&mark) => header.push_str(mark),
            HarmonyStage::Header(_) => self.release_header(out),
            HarmonyStage::Content(kind) => {
                if *kind == ChannelContent::Call {
                    out.push(AnswerPart::CallEnd);
                }
                self.stage = match mark {
                    CHANNEL | START => HarmonyStage::Header(mark.to_owned()),
                    _ => HarmonyStage::Content(ChannelContent::Text),
                };
            }
        }
    }

    fn push_inside(&mut self, c: char, out: &mut AnswerParts) {
        match &mut self.stage {
            HarmonyStage::Header(header) => {
                header.push(c);
                if header.len() > HEADER_BYTES_MAX {
                    self.release_header(out);
                }
            }
            HarmonyStage::Content(ChannelContent::Text) => out.push_text(c),
            HarmonyStage::Content(ChannelContent::Reasoning) => out.push_reasoning(c),
            HarmonyStage::Content(ChannelContent::Call) => {
                out.push(AnswerPart::CallArguments(c.into()));
            }
        }
    }

    fn release_header(&mut self, out: &mut AnswerParts) {
        if let HarmonyStage::Header(header) = &mut self.stage {
            out.push(AnswerPart::Text(std::mem::take(header)));
        }
        self.stage = HarmonyStage::Content(ChannelContent::Text);
    }

    fn begin_message(&self, header: &str, out: &mut AnswerParts) -> ChannelContent {
        let words = |text: &str| text.split([' ', '<', '\n']).next().unwrap_or("").to_owned();
        let recipient = header.split_once("to=functions.");
        let name = recipient.map(|(_, rest)| words(rest));
        let channel = header.split_once(CHANNEL).map(|(_, rest)| words(rest));
        let known = name.filter(|name| self.tools.iter().any(|tool| tool.name() == name));
        match known {
            Some(name) => {
                out.push(AnswerPart::CallBegin { name, id: None });
                ChannelContent::Call
            }
            None if channel.as_deref() == Some("analysis") => ChannelContent::Reasoning,
            None => ChannelContent::Text,
        }
    }
}

impl OutputMachine for HarmonyMachine {
    fn push(&mut self, text: &str, out: &mut AnswerParts) {
        for c in text.chars() {
            self.push_char(c, out);
        }
    }

    fn finish(&mut self, out: &mut AnswerParts) {
        for c in std::mem::take(&mut self.held).chars() {
            self.push_inside(c, out);
        }
        match &self.stage {
            HarmonyStage::Header(_) => self.release_header(out),
            HarmonyStage::Content(ChannelContent::Call) => out.push(AnswerPart::CallEnd),
            HarmonyStage::Content(_) => {}
        }
    }
}
