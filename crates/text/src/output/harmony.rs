//! Messages in channels, the format of gpt-oss.
//!
//! An output is a list of messages, each a header, `<|message|>`, content and a mark. The header
//! has the channel, and the recipient if the message is a call: `analysis` is reasoning, a message
//! to a function is a call, everything else is text.

use super::call_grammar::arguments_of;
use super::json_scan::JsonScan;
use super::lark_text::LarkText;
use super::output_grammar::{ChannelStart, OutputGrammar};
use super::tool_spec::ToolSpec;
use super::{AnswerPart, AnswerParts, OutputMachine, OutputPlace};
use cleave_grammar::{GrammarError, lark_expression};
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

/// End of a prompt behind which a message's header goes on.
const AUTHOR: &str = "<|start|>assistant";

/// The place at which an output of a prompt begins.
pub(super) fn start_after(prompt: &str) -> ChannelStart {
    if prompt.trim_end().ends_with(AUTHOR) {
        ChannelStart::Header
    } else {
        ChannelStart::Content
    }
}

/// Expression of an output's messages: reasoning, and the content or a call at the end.
///
/// # Errors
/// `Refused` with the part that cannot be enforced.
pub(super) fn grammar(output: &mut OutputGrammar<'_>) -> Result<String, GrammarError> {
    let rules = output.rules;
    let lark = &mut output.lark;
    let next = lark.literal(&format!("{}{AUTHOR}", ENDS[0]));
    let begin =
        |lark: &LarkText<'_>, channel: &str| lark.literal(&format!("{CHANNEL}{channel}{MESSAGE}"));
    let analysis = begin(lark, "analysis");
    // With a limit there is one message of reasoning, as each would have the whole limit.
    let (thinking, times) = match rules.reasoning_tokens_max {
        Some(tokens_max) => (lark.limited_until(ENDS[0], tokens_max)?, "?"),
        None => (lark.text_until("(?s:.*)", &MARKS, "", ENDS[0]), "*"),
    };
    let author = lark.literal(AUTHOR);
    let analysis = lark.rule(&format!("{analysis} {thinking} {author}"));
    let text = lark.text_without(&MARKS, "");
    let mut last = Vec::new();
    let calls = &rules.calls;
    if !calls.are_required {
        let content = rules.content.map(lark_expression).transpose()?;
        let content = content.map_or_else(|| text.clone(), |content| lark.rule(&content));
        let begin = begin(lark, "final");
        last.push(format!("{begin} {content}"));
    }
    for tool in calls.tools {
        let head = format!(
            "{CHANNEL}commentary to=functions.{} {CONSTRAIN}json{MESSAGE}",
            tool.name
        );
        let arguments = arguments_of(tool, calls)?;
        last.push(format!("{} {arguments}", lark.literal(&head)));
    }
    let last = lark.one_of(&last);
    // A message in front of a call is content, of which a required call has none.
    if calls.tools.is_empty() || calls.are_required {
        return Ok(format!("{analysis}{times} {last}"));
    }
    let preamble = begin(lark, "commentary");
    let preamble = lark.rule(&format!("{preamble} {text} {next}"));
    Ok(format!("{analysis}{times} {preamble}? {last}"))
}

/// Divides an output in channels.
pub(super) struct HarmonyMachine {
    tools: Arc<[ToolSpec]>,
    stage: HarmonyStage,
    /// Follows the arguments of a call: no mark within their strings ends it.
    scan: JsonScan,
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
            scan: JsonScan::default(),
            held: String::new(),
        }
    }

    fn push_char(&mut self, c: char, out: &mut AnswerParts) {
        self.held.push(c);
        while !self.held.is_empty() {
            let in_string = self.stage == HarmonyStage::Content(ChannelContent::Call)
                && self.scan.is_in_string();
            if in_string {
                let first = self.held.remove(0);
                self.push_inside(first, out);
                continue;
            }
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
                self.scan = JsonScan::default();
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
                self.scan.push(c);
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

    fn place(&self) -> OutputPlace {
        match &self.stage {
            HarmonyStage::Header(_) => OutputPlace::Undecided,
            HarmonyStage::Content(ChannelContent::Reasoning) => OutputPlace::Reasoning,
            HarmonyStage::Content(ChannelContent::Text | ChannelContent::Call) => {
                OutputPlace::Answer
            }
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
