//! Answers of OpenAI's Responses API, whole and as events.
//!
//! Owns: the items of an answer, and the numbers of its events. Never: decides their contents.
//! Invariant: an item has ended before the next begins, a whole answer is the last event's, and a
//! stream ends with `response.completed` or `response.incomplete` if and only if the whole answer
//! was sent (lesson 16).

use crate::error::ApiError;
use crate::flights::TokenCounts;
use crate::output_piece::{
    ChoiceEnd, OutputPiece, OutputPieces, ToolCallHead, ToolCallPiece, ToolKind,
};
use crate::request::{NamespacedTool, RequestWarning, UsageShown};
use crate::response_store::{response_digits, whole_response};
use crate::surface::openai::write_json;
use crate::surface::openai_chat::token_scores;
use crate::surface::{AnswerEnd, AnswerHead, EventRenderer, EventUsage, unix_now};
use axum::http::StatusCode;
use cleave_domain::FinishReason;
use serde_json::{Map, Value, json};
use std::sync::Arc;

/// The warning of a response for which there was no room.
const NOT_STORED: RequestWarning = RequestWarning {
    param: "store",
    message: "The response is not stored: its conversation is longer than the memory for one tenant's responses, or other tenants' take the room.",
};

/// Whether a response can be named later.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Storage {
    Stored,
    NotStored,
}

/// Renders one answer. Its items are kept until the end, because the last event repeats them.
pub(super) struct ResponseEvents {
    head: AnswerHead,
    /// Items that have ended.
    output: Vec<Value>,
    open: Option<OpenItem>,
    end: Option<ChoiceEnd>,
    /// Number of the next event.
    sequence_number: u64,
}

/// An item that has begun and not ended.
struct OpenItem {
    id: String,
    content: ItemContent,
}

enum ItemContent {
    Message {
        text: String,
        /// Log-probabilities of its tokens, if they were asked for.
        logprobs: Vec<Value>,
    },
    Reasoning(String),
    Call {
        head: ToolCallHead,
        /// The namespace and the name of a function of one.
        namespaced: Option<NamespacedTool>,
        arguments: String,
    },
    CustomCall {
        head: ToolCallHead,
        input: String,
    },
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum ItemStatus {
    InProgress,
    Completed,
    Incomplete,
}

impl ItemStatus {
    fn word(self) -> &'static str {
        match self {
            Self::InProgress => "in_progress",
            Self::Completed => "completed",
            Self::Incomplete => "incomplete",
        }
    }
}

impl OpenItem {
    /// The item as it is so far; one in progress has no content yet.
    fn value(&self, status: ItemStatus) -> Value {
        let (id, word) = (&self.id, status.word());
        match &self.content {
            ItemContent::Message { text, logprobs } => {
                let content = match status {
                    ItemStatus::InProgress => json!([]),
                    ItemStatus::Completed | ItemStatus::Incomplete => {
                        json!([text_part(text, logprobs)])
                    }
                };
                json!({"id": id, "type": "message", "status": word, "role": "assistant", "content": content})
            }
            ItemContent::Reasoning(text) => {
                let content = match status {
                    ItemStatus::InProgress => json!([]),
                    ItemStatus::Completed | ItemStatus::Incomplete => json!([reasoning_part(text)]),
                };
                json!({"id": id, "type": "reasoning", "status": word, "summary": [], "content": content})
            }
            ItemContent::Call {
                head,
                namespaced,
                arguments,
            } => {
                let mut item = json!({
                    "id": id,
                    "type": "function_call",
                    "status": word,
                    "call_id": head.id,
                    "name": head.name,
                    "arguments": arguments,
                });
                if let Some(tool) = namespaced {
                    item["name"] = (*tool.name).into();
                    item["namespace"] = (*tool.namespace).into();
                }
                item
            }
            ItemContent::CustomCall { head, input } => json!({
                "id": id,
                "type": "custom_tool_call",
                "status": word,
                "call_id": head.id,
                "name": head.name,
                "input": input,
            }),
        }
    }
}

fn text_part(text: &str, logprobs: &[Value]) -> Value {
    json!({"type": "output_text", "text": text, "annotations": [], "logprobs": logprobs})
}

fn reasoning_part(text: &str) -> Value {
    json!({"type": "reasoning_text", "text": text})
}

impl ResponseEvents {
    pub(super) fn new(head: AnswerHead) -> Self {
        Self {
            head,
            output: Vec::new(),
            open: None,
            end: None,
            sequence_number: 0,
        }
    }

    /// Renders a whole answer.
    pub(super) fn whole(mut self, choices: &[OutputPieces], end: AnswerEnd) -> Value {
        let mut events = Vec::new();
        for pieces in choices {
            self.pieces(&mut events, 0, pieces, EventUsage::AtEnd);
        }
        let (_, response) = self.finished(end);
        serde_json::from_str(&response).expect("the parts of a response are JSON")
    }

    /// Writes an event with these members besides its type and number.
    fn event(&mut self, out: &mut Vec<u8>, kind: &str, members: &Value) {
        self.begin_event(out, kind);
        let members = members.as_object().into_iter().flatten();
        for (name, value) in members {
            out.push(b',');
            write_json(out, name);
            out.push(b':');
            write_json(out, value);
        }
        out.extend(b"}\n\n");
    }

    fn begin_event(&mut self, out: &mut Vec<u8>, kind: &str) {
        out.extend(b"event: ");
        out.extend(kind.as_bytes());
        out.extend(b"\ndata: {\"type\":");
        write_json(out, kind);
        out.extend(b",\"sequence_number\":");
        write_json(out, &self.sequence_number);
        self.sequence_number += 1;
    }

    /// Writes an event with the response, which is JSON.
    fn response_event(&mut self, out: &mut Vec<u8>, kind: &str, response: &str) {
        self.begin_event(out, kind);
        out.extend(b",\"response\":");
        out.extend(response.as_bytes());
        out.extend(b"}\n\n");
    }

    /// The response as JSON. `more` has members that only some states have.
    fn response(&self, status: &str, more: &Value, storage: Storage) -> String {
        whole_response(&self.members(status, more, storage), &self.output_text())
    }

    /// The items that have ended, a JSON array.
    fn output_text(&self) -> String {
        serde_json::to_string(&self.output).expect("items are JSON")
    }

    /// The response without its items, the text of a JSON object.
    fn members(&self, status: &str, more: &Value, storage: Storage) -> String {
        let mut response = json!({
            "id": self.head.facts.response_id,
            "object": "response",
            "created_at": self.head.created,
            "completed_at": null,
            "status": status,
            "error": null,
            "incomplete_details": null,
            "model": self.head.model.name(),
            "usage": null,
            "store": storage == Storage::Stored,
        });
        for (name, value) in more.as_object().into_iter().flatten() {
            response[name] = value.clone();
        }
        let mut text = response.to_string();
        if let Some(repeated) = &self.head.facts.repeated {
            text.pop();
            text.push(',');
            text.push_str(&repeated[1..]);
        }
        text
    }

    /// Whether the response is stored when it is complete.
    fn storage(&self) -> Storage {
        match &self.head.facts.recorder {
            Some(_) => Storage::Stored,
            None => Storage::NotStored,
        }
    }

    /// The kind of the last event, and its response.
    fn finished(&self, end: AnswerEnd) -> (&'static str, String) {
        let AnswerEnd { counts, timing } = end;
        let mut more = Map::new();
        more.insert("usage".into(), usage(counts));
        if !self.head.warnings.is_empty() {
            more.insert("warnings".into(), json!(self.head.warnings));
        }
        more.extend(timing.map(|timing| ("timing".to_owned(), timing)));
        let reason = self.end.as_ref().map(|end| end.reason);
        let (kind, status) = if reason == Some(FinishReason::Length) {
            let details = json!({"reason": "max_output_tokens"});
            more.insert("incomplete_details".into(), details);
            ("response.incomplete", "incomplete")
        } else {
            more.insert("completed_at".into(), unix_now().into());
            ("response.completed", "completed")
        };
        (kind, self.stored(status, more))
    }

    /// The complete response, which is stored now if it is to be.
    fn stored(&self, status: &str, mut more: Map<String, Value>) -> String {
        let output = self.output_text();
        let facts = &self.head.facts;
        let members = self.members(status, &Value::from(more.clone()), self.storage());
        if let (Some(recorder), Some(id)) = (&facts.recorder, &facts.response_id)
            && recorder.keep(Arc::clone(id), &members, &output).is_err()
        {
            let mut warnings = self.head.warnings.clone();
            warnings.push(NOT_STORED);
            more.insert("warnings".into(), json!(warnings));
            let members = self.members(status, &more.into(), Storage::NotStored);
            return whole_response(&members, &output);
        }
        whole_response(&members, &output)
    }

    fn output_index(&self) -> usize {
        self.output.len()
    }

    fn begin_item(&mut self, out: &mut Vec<u8>, content: ItemContent) {
        self.end_item(out, ItemStatus::Completed);
        let (prefix, part) = match &content {
            ItemContent::Message { .. } => ("msg", Some(text_part("", &[]))),
            ItemContent::Reasoning(_) => ("rs", Some(reasoning_part(""))),
            ItemContent::Call { .. } => ("fc", None),
            ItemContent::CustomCall { .. } => ("ctc", None),
        };
        let index = self.output_index();
        // The response's digits lead from the item to its router.
        let response = self.head.facts.response_id.as_deref();
        let digits = response_digits(response.expect("a response has an id"));
        let id = format!("{prefix}_{digits}_{index}");
        let item = OpenItem { id, content };
        let value = item.value(ItemStatus::InProgress);
        let added = json!({"output_index": index, "item": value});
        self.event(out, "response.output_item.added", &added);
        if let Some(part) = part {
            let added = json!({"item_id": item.id, "output_index": index, "content_index": 0, "part": part});
            self.event(out, "response.content_part.added", &added);
        }
        self.open = Some(item);
    }

    fn end_item(&mut self, out: &mut Vec<u8>, status: ItemStatus) {
        let Some(item) = self.open.take() else {
            return;
        };
        let index = self.output_index();
        let place = json!({"item_id": item.id, "output_index": index});
        let with = |members: Value| {
            let mut all = place.clone();
            for (name, value) in members.as_object().into_iter().flatten() {
                all[name] = value.clone();
            }
            all
        };
        match &item.content {
            ItemContent::Message { text, logprobs } => {
                let done = with(json!({"content_index": 0, "text": text, "logprobs": logprobs}));
                self.event(out, "response.output_text.done", &done);
                let done = with(json!({"content_index": 0, "part": text_part(text, logprobs)}));
                self.event(out, "response.content_part.done", &done);
            }
            ItemContent::Reasoning(text) => {
                let done = with(json!({"content_index": 0, "text": text}));
                self.event(out, "response.reasoning_text.done", &done);
                let done = with(json!({"content_index": 0, "part": reasoning_part(text)}));
                self.event(out, "response.content_part.done", &done);
            }
            ItemContent::CustomCall { input, .. } => {
                let done = with(json!({"input": input}));
                self.event(out, "response.custom_tool_call_input.done", &done);
            }
            ItemContent::Call {
                head, arguments, ..
            } => {
                let done = with(json!({"name": head.name, "arguments": arguments}));
                self.event(out, "response.function_call_arguments.done", &done);
            }
        }
        let value = item.value(status);
        let done = json!({"output_index": index, "item": value});
        self.event(out, "response.output_item.done", &done);
        self.output.push(value);
    }

    /// Adds text to the open item, and writes its event. These are most events, so no tree of
    /// values is made.
    fn delta(&mut self, out: &mut Vec<u8>, delta: &str, scores: Vec<Value>) {
        let Some(mut item) = self.open.take() else {
            return;
        };
        let (kind, whole) = match &mut item.content {
            ItemContent::Message { text, .. } => ("response.output_text.delta", text),
            ItemContent::Reasoning(text) => ("response.reasoning_text.delta", text),
            ItemContent::Call { arguments, .. } => {
                ("response.function_call_arguments.delta", arguments)
            }
            ItemContent::CustomCall { input, .. } => {
                ("response.custom_tool_call_input.delta", input)
            }
        };
        whole.push_str(delta);
        self.begin_event(out, kind);
        out.extend(b",\"item_id\":");
        write_json(out, &item.id);
        out.extend(b",\"output_index\":");
        write_json(out, &self.output_index());
        match &mut item.content {
            ItemContent::Message { logprobs, .. } => {
                out.extend(b",\"content_index\":0,\"logprobs\":");
                write_json(out, &scores);
                logprobs.extend(scores);
            }
            ItemContent::Reasoning(_) => out.extend(b",\"content_index\":0"),
            ItemContent::Call { .. } | ItemContent::CustomCall { .. } => {}
        }
        out.extend(b",\"delta\":");
        write_json(out, delta);
        out.extend(b"}\n\n");
        self.open = Some(item);
    }

    fn text(&mut self, out: &mut Vec<u8>, text: &str, scores: Vec<Value>) {
        let is_open = |item: &OpenItem| matches!(item.content, ItemContent::Message { .. });
        if !self.open.as_ref().is_some_and(is_open) {
            let (text, logprobs) = (String::new(), Vec::new());
            self.begin_item(out, ItemContent::Message { text, logprobs });
        }
        self.delta(out, text, scores);
    }

    fn reasoning(&mut self, out: &mut Vec<u8>, text: &str) {
        let is_open = |item: &OpenItem| matches!(item.content, ItemContent::Reasoning(_));
        if !self.open.as_ref().is_some_and(is_open) {
            self.begin_item(out, ItemContent::Reasoning(String::new()));
        }
        self.delta(out, text, Vec::new());
    }

    fn call(&mut self, out: &mut Vec<u8>, call: &ToolCallPiece) {
        if let Some(head) = &call.head {
            let head = head.clone();
            let mut namespaced = self.head.facts.namespaced.iter();
            let content = match call.kind {
                ToolKind::Function => ItemContent::Call {
                    namespaced: namespaced
                        .find(|tool| tool.shown_name == head.name)
                        .cloned(),
                    head,
                    arguments: String::new(),
                },
                ToolKind::Custom => ItemContent::CustomCall {
                    head,
                    input: String::new(),
                },
            };
            self.begin_item(out, content);
        }
        if !call.arguments.is_empty() {
            self.delta(out, &call.arguments, Vec::new());
        }
    }
}

impl EventRenderer for ResponseEvents {
    fn queued(&self) -> Option<String> {
        Some(self.members("queued", &Value::Null, self.storage()))
    }

    fn first(&mut self, out: &mut Vec<u8>, _: usize, _: EventUsage) {
        let response = self.response("in_progress", &Value::Null, self.storage());
        self.response_event(out, "response.created", &response);
        self.response_event(out, "response.in_progress", &response);
    }

    fn pieces(&mut self, out: &mut Vec<u8>, _: usize, pieces: &OutputPieces, _: EventUsage) {
        let scores = token_scores(pieces.scores(), &self.head.model);
        let mut scores = Some(scores).into_iter();
        for piece in pieces.iter() {
            match piece {
                // A request for scores has no tools, so there is one text beside reasoning.
                OutputPiece::Text(text) => {
                    self.text(out, text, scores.next().unwrap_or_default());
                }
                OutputPiece::Reasoning(text) => self.reasoning(out, text),
                OutputPiece::ToolCall(call) => self.call(out, call),
                // This API shows no scores, and asks for no vector.
                OutputPiece::Scores(_) | OutputPiece::PromptScores(_) | OutputPiece::Vector(_) => {}
                OutputPiece::End(end) => {
                    let status = match end.reason {
                        FinishReason::Stop => ItemStatus::Completed,
                        FinishReason::Length => ItemStatus::Incomplete,
                    };
                    self.end_item(out, status);
                    self.end = Some(end.clone());
                }
            }
        }
    }

    fn last(&mut self, out: &mut Vec<u8>, _: UsageShown, end: AnswerEnd) {
        let (kind, response) = self.finished(end);
        self.response_event(out, kind, &response);
    }

    fn error(&mut self, out: &mut Vec<u8>, error: &ApiError) {
        let error = json!({"error": error_object(error)});
        // The client of a response in the background learns of its failure by asking for it.
        if self.head.facts.is_background {
            self.stored("failed", error.as_object().cloned().unwrap_or_default());
            return;
        }
        let failed = self.response("failed", &error, Storage::NotStored);
        self.response_event(out, "response.failed", &failed);
    }
}

/// The error of a response, with a code that clients of this API know. They wait for the time that
/// the message of a limit has.
fn error_object(error: &ApiError) -> Value {
    let (message, code) = (error.message(), error.code());
    if error.status() == StatusCode::TOO_MANY_REQUESTS {
        let seconds = error.retry_after().unwrap_or_default().as_secs_f64();
        let message = format!("{message} Try again in {seconds:.1} s.");
        return json!({"code": "rate_limit_exceeded", "message": message});
    }
    let known = code.filter(|code| *code == "context_length_exceeded");
    let code = known.unwrap_or(if error.status().is_client_error() {
        "invalid_prompt"
    } else {
        "server_error"
    });
    json!({"code": code, "message": message})
}

fn usage(counts: TokenCounts) -> Value {
    let TokenCounts {
        prompt_tokens,
        output_tokens,
        reasoning_tokens,
        cached_tokens,
    } = counts;
    json!({
        "input_tokens": prompt_tokens,
        "input_tokens_details": {"cached_tokens": cached_tokens.unwrap_or(0)},
        "output_tokens": output_tokens,
        "output_tokens_details": {"reasoning_tokens": reasoning_tokens},
        "total_tokens": prompt_tokens + output_tokens,
    })
}
