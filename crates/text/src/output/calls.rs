//! Calls between marks, in any of the formats that have them.
//!
//! Owns: marks, the frame around calls, and the way back: the text since a mark is held until a
//! call of a known tool has begun, and is text if none does. Never: reads the inside of a call;
//! each [`CallBody`] reads one form of it.

use super::escaped_call::{ESCAPE, EscapedCall};
use super::named_call::{NamedCall, NamedForm};
use super::object_call::ObjectCall;
use super::pythonic_call::PythonicCall;
use super::reasoning::SPACE_BYTES_MAX;
use super::tagged_call::{TaggedCall, TaggedForm};
use super::tool_spec::ToolSpec;
use super::{AnswerPart, AnswerParts, OutputMachine};
use std::collections::VecDeque;
use std::sync::Arc;

/// Text that is held until a call has begun, in bytes; more of it is text.
const HEAD_BYTES_MAX: usize = 8 << 10;

/// A format of calls between marks. An empty mark does not exist.
#[derive(Debug)]
pub(super) struct CallFormat {
    /// Marks around all calls that belong together.
    pub(super) group_begin: &'static str,
    pub(super) group_end: &'static str,
    /// Marks around each call.
    pub(super) call_begin: &'static str,
    pub(super) call_end: &'static str,
    /// Mark between two calls of a group.
    pub(super) separator: &'static str,
    /// Whether the calls of a group may be in brackets, as a list.
    pub(super) has_list: bool,
    /// Whether models write these brackets always.
    pub(super) writes_list: bool,
    /// Whether a call may begin an output without a mark.
    pub(super) opens_output: bool,
    pub(super) form: CallForm,
}

/// The form of a call's inside.
#[derive(Debug)]
pub(super) enum CallForm {
    /// A JSON object with name and arguments.
    Object(ObjectForm),
    /// The name, a mark, and the arguments as a JSON object.
    Named(NamedForm),
    /// `Object` if it begins with a brace, otherwise `Named`.
    ObjectOrNamed(NamedForm),
    /// The name, and each argument between tags.
    Tagged(TaggedForm),
    /// A call in Python's syntax, with arguments by name.
    Pythonic,
    /// The name and an object with bare keys, whose texts are between escape marks.
    Escaped,
}

/// The members of a call's object.
#[derive(Debug)]
pub(super) struct ObjectForm {
    /// Member of a number that models write in front of the name; empty if there is none.
    pub(super) number: &'static str,
    pub(super) name: &'static str,
    /// Member of the arguments, where the model writes them.
    pub(super) arguments: &'static str,
}

/// The members of most formats.
pub(super) const NAMED_OBJECT: ObjectForm = ObjectForm {
    number: "",
    name: "name",
    arguments: "arguments",
};

/// Reads the inside of one call, character by character.
pub(super) trait CallBody: Send {
    /// Takes a character, and adds to the arguments.
    fn push(&mut self, c: char, arguments: &mut String) -> BodyStep;

    /// Ends the output within a call that has begun.
    fn finish(&mut self, arguments: &mut String);
}

/// The consequence of a character.
#[derive(Debug, PartialEq, Eq)]
pub(super) enum BodyStep {
    More,
    /// The call begins; the arguments so far belong to it.
    Begin(CallHead),
    /// The call is complete with this character.
    End,
    /// The call ended before these characters, the last of which is this one.
    EndBefore(String),
    /// The call begins and is complete.
    Whole(CallHead),
    /// This is no call; only before it has begun.
    NoCall,
}

#[derive(Debug, PartialEq, Eq)]
pub(super) struct CallHead {
    pub(super) name: String,
    pub(super) id: Option<String>,
}

impl CallFormat {
    /// The marks, and the tokens that may be parts of one.
    pub(super) fn marks(&self) -> impl Iterator<Item = &'static str> + use<> {
        let inner = match &self.form {
            CallForm::Named(form) | CallForm::ObjectOrNamed(form) => form.marks().to_vec(),
            CallForm::Tagged(form) => form.tags().to_vec(),
            CallForm::Escaped => vec![ESCAPE],
            CallForm::Object(_) | CallForm::Pythonic => Vec::new(),
        };
        let outer = [
            self.group_begin,
            self.group_end,
            self.call_begin,
            self.call_end,
        ];
        let marks = outer.into_iter().chain(inner);
        let marks = marks.filter(|mark| !mark.is_empty());
        marks.flat_map(mark_parts)
    }

    /// Marks that begin a call in a text.
    pub(super) fn begins(&self) -> impl Iterator<Item = &'static str> {
        let marks = [self.group_begin, self.call_begin];
        marks.into_iter().filter(|mark| !mark.is_empty())
    }

    /// Makes the reader of a call that begins with this character.
    fn body(&'static self, first: char, tools: &Arc<[ToolSpec]>) -> Box<dyn CallBody> {
        match &self.form {
            CallForm::Object(form) => Box::new(ObjectCall::new(form)),
            CallForm::ObjectOrNamed(_) if first == '{' => Box::new(ObjectCall::new(&NAMED_OBJECT)),
            CallForm::Named(form) | CallForm::ObjectOrNamed(form) => Box::new(NamedCall::new(form)),
            CallForm::Tagged(form) => Box::new(TaggedCall::new(form, Arc::clone(tools))),
            CallForm::Pythonic => Box::<PythonicCall>::default(),
            CallForm::Escaped => Box::<EscapedCall>::default(),
        }
    }
}

/// A mark, and the texts in it that may be tokens.
pub(super) fn mark_parts(mark: &'static str) -> impl Iterator<Item = &'static str> {
    let begin = mark.find('<').unwrap_or(0);
    let bars = mark.split_once('｜').and_then(|(before, _)| {
        let last = mark.rfind('｜')? + '｜'.len_utf8();
        Some(&mark[before.len()..last])
    });
    // A mark may have several parts in angle brackets.
    let brackets = mark.match_indices('<').filter_map(|(at, _)| {
        let end = mark[at..].find('>')?;
        Some(&mark[at..=at + end])
    });
    let texts = [mark, &mark[begin..], bars.unwrap_or(mark)];
    texts.into_iter().chain(brackets)
}

/// Divides an output into text and calls.
pub(super) struct CallMachine {
    format: &'static CallFormat,
    tools: Arc<[ToolSpec]>,
    stage: CallStage,
    /// Whitespace that is dropped if a call follows.
    space: String,
    /// Text since the beginning of a mark; it is text if no call begins.
    held: String,
    /// Characters that must be read again.
    again: VecDeque<char>,
    is_at_start: bool,
    in_list: bool,
    /// Whether nothing but whitespace came since a call.
    follows_call: bool,
}

enum CallStage {
    /// Text, or the beginning of a mark in it.
    Text,
    /// Behind the mark of a group: a list, or the mark of the next call.
    Opening { mark: String },
    /// Within a call, whose first character chooses the reader.
    Body {
        body: Option<Box<dyn CallBody>>,
        has_begun: bool,
    },
    /// Behind a call: its last mark.
    Tail,
    /// Behind the last mark of a call.
    Between,
}

impl CallMachine {
    pub(super) fn new(format: &'static CallFormat, tools: Arc<[ToolSpec]>) -> Self {
        Self {
            format,
            tools,
            stage: CallStage::Text,
            space: String::new(),
            held: String::new(),
            again: VecDeque::new(),
            is_at_start: true,
            in_list: false,
            follows_call: false,
        }
    }

    fn push_char(&mut self, c: char, out: &mut AnswerParts) {
        if !matches!(self.stage, CallStage::Text) && self.held.len() > HEAD_BYTES_MAX {
            self.again.push_front(c);
            return self.give_up(out);
        }
        match &mut self.stage {
            CallStage::Text => self.push_text(c, out),
            CallStage::Opening { .. } => self.push_opening(c, out),
            CallStage::Body { .. } => self.push_body(c, out),
            CallStage::Tail => self.push_tail(c),
            CallStage::Between => self.push_between(c, out),
        }
    }

    fn push_text(&mut self, c: char, out: &mut AnswerParts) {
        if self.held.is_empty() && c.is_whitespace() {
            self.space.push(c);
            if self.space.len() > SPACE_BYTES_MAX {
                self.release_space(out);
            }
            return;
        }
        if self.is_at_start && self.format.opens_output && self.held.is_empty() && "{[".contains(c)
        {
            self.stage = CallStage::Opening {
                mark: String::new(),
            };
            return self.push_opening(c, out);
        }
        self.held.push(c);
        if let Some(mark) = self.format.begins().find(|mark| *mark == self.held) {
            if mark == self.format.group_begin {
                self.stage = CallStage::Opening {
                    mark: String::new(),
                };
            } else {
                self.begin_body();
            }
        } else if !self
            .format
            .begins()
            .any(|mark| mark.starts_with(&self.held))
        {
            self.give_up(out);
        }
    }

    fn push_opening(&mut self, c: char, out: &mut AnswerParts) {
        let CallStage::Opening { mark } = &mut self.stage else {
            unreachable!("the caller matched the stage");
        };
        self.held.push(c);
        if mark.is_empty() && c.is_whitespace() {
            return;
        }
        if mark.is_empty() && c == '[' && self.format.has_list && !self.in_list {
            self.in_list = true;
            return;
        }
        if self.format.call_begin.is_empty() {
            self.held.pop();
            self.again.push_front(c);
            return self.begin_body();
        }
        mark.push(c);
        if mark == self.format.call_begin {
            self.begin_body();
        } else if !self.format.call_begin.starts_with(mark.as_str()) {
            self.give_up(out);
        }
    }

    fn begin_body(&mut self) {
        self.stage = CallStage::Body {
            body: None,
            has_begun: false,
        };
    }

    fn push_body(&mut self, c: char, out: &mut AnswerParts) {
        let CallStage::Body { body, has_begun } = &mut self.stage else {
            unreachable!("the caller matched the stage");
        };
        if body.is_none() && c.is_whitespace() {
            return self.held.push(c);
        }
        let body = body.get_or_insert_with(|| self.format.body(c, &self.tools));
        let mut arguments = String::new();
        let step = body.push(c, &mut arguments);
        let tools = &self.tools;
        let is_known = |head: &CallHead| tools.iter().any(|tool| tool.name() == head.name);
        match step {
            BodyStep::More if *has_begun => out.push(AnswerPart::CallArguments(arguments)),
            BodyStep::More => self.held.push(c),
            BodyStep::Begin(head) if is_known(&head) => {
                *has_begun = true;
                self.begin_call(head, arguments, out);
            }
            BodyStep::Whole(head) if is_known(&head) => {
                self.begin_call(head, arguments, out);
                self.end_call(out);
            }
            BodyStep::End => {
                out.push(AnswerPart::CallArguments(arguments));
                self.end_call(out);
            }
            BodyStep::EndBefore(rest) => {
                out.push(AnswerPart::CallArguments(arguments));
                prepend(&mut self.again, &rest);
                self.end_call(out);
            }
            BodyStep::NoCall | BodyStep::Begin(_) | BodyStep::Whole(_) => {
                self.held.push(c);
                self.give_up(out);
            }
        }
    }

    fn begin_call(&mut self, head: CallHead, arguments: String, out: &mut AnswerParts) {
        let CallHead { name, id } = head;
        self.held.clear();
        self.space.clear();
        self.is_at_start = false;
        self.follows_call = true;
        out.push(AnswerPart::CallBegin { name, id });
        out.push(AnswerPart::CallArguments(arguments));
    }

    fn end_call(&mut self, out: &mut AnswerParts) {
        out.push(AnswerPart::CallEnd);
        self.stage = if self.format.call_end.is_empty() {
            CallStage::Between
        } else {
            CallStage::Tail
        };
    }

    fn push_tail(&mut self, c: char) {
        if self.held.is_empty() && c.is_whitespace() && self.space.len() < SPACE_BYTES_MAX {
            return self.space.push(c);
        }
        self.held.push(c);
        let is_whole = self.held == self.format.call_end;
        if !is_whole && self.format.call_end.starts_with(&self.held) {
            return;
        }
        // A model forgets the mark at times.
        if is_whole {
            self.space.clear();
        } else {
            prepend(&mut self.again, &self.held);
        }
        self.held.clear();
        self.stage = CallStage::Between;
    }

    fn push_between(&mut self, c: char, out: &mut AnswerParts) {
        if self.held.is_empty() && c.is_whitespace() && self.space.len() < SPACE_BYTES_MAX {
            return self.space.push(c);
        }
        self.held.push(c);
        let format = self.format;
        let list_end = if self.in_list { "]" } else { "" };
        let marks = [
            format.group_end,
            format.group_begin,
            format.call_begin,
            format.separator,
            list_end,
        ];
        let mut marks = marks.into_iter().filter(|mark| !mark.is_empty());
        match marks.clone().find(|mark| *mark == self.held) {
            Some(mark) if mark == list_end => {
                self.in_list = false;
                self.held.clear();
            }
            Some(mark) if mark == format.group_end => {
                self.held.clear();
                self.space.clear();
                self.stage = CallStage::Text;
            }
            Some(mark) if mark == format.call_begin => self.begin_body(),
            Some(_) => {
                let mark = String::new();
                self.stage = CallStage::Opening { mark };
            }
            None if marks.any(|mark| mark.starts_with(&self.held)) => {}
            None => self.give_up(out),
        }
    }

    /// Makes text of the first character that was held, and reads the others again.
    fn give_up(&mut self, out: &mut AnswerParts) {
        self.release_space(out);
        let held = std::mem::take(&mut self.held);
        let mut held = held.chars();
        if let Some(first) = held.next() {
            out.push_text(first);
        }
        prepend(&mut self.again, held.as_str());
        self.in_list = false;
        self.stage = CallStage::Text;
    }

    fn release_space(&mut self, out: &mut AnswerParts) {
        self.is_at_start = false;
        self.follows_call = false;
        out.push(AnswerPart::Text(std::mem::take(&mut self.space)));
    }

    fn read_again(&mut self, out: &mut AnswerParts) {
        while let Some(c) = self.again.pop_front() {
            self.push_char(c, out);
        }
    }
}

/// Puts a text in front of the characters that are read again.
fn prepend(again: &mut VecDeque<char>, text: &str) {
    for c in text.chars().rev() {
        again.push_front(c);
    }
}

impl OutputMachine for CallMachine {
    fn push(&mut self, text: &str, out: &mut AnswerParts) {
        for c in text.chars() {
            self.push_char(c, out);
            self.read_again(out);
        }
    }

    fn finish(&mut self, out: &mut AnswerParts) {
        loop {
            self.read_again(out);
            match &mut self.stage {
                CallStage::Body {
                    body: Some(body),
                    has_begun: true,
                } => {
                    let mut arguments = String::new();
                    body.finish(&mut arguments);
                    out.push(AnswerPart::CallArguments(arguments));
                    out.push(AnswerPart::CallEnd);
                    self.stage = CallStage::Text;
                }
                _ if self.held.is_empty() => break,
                _ => self.give_up(out),
            }
        }
        // Whitespace behind a last call belongs to its frame.
        if !self.follows_call {
            self.release_space(out);
        }
    }
}
