//! Answers of Anthropic's Messages API, whole and as events.
//!
//! Owns: the blocks of an answer. Never: decides their contents. Invariant: a block has ended
//! before the next begins, and a stream ends with `message_stop` if and only if the whole answer
//! was sent (lesson 16).

use super::error_object;
use crate::error::ApiError;
use crate::flights::TokenCounts;
use crate::output_piece::{ChoiceEnd, OutputPiece, OutputPieces, StopCause, ToolCallPiece};
use crate::request::UsageShown;
use crate::surface::chat_body::BROKEN_ARGUMENTS;
use crate::surface::openai::write_json;
use crate::surface::{AnswerEnd, AnswerHead, EventRenderer, EventUsage};
use cleave_domain::FinishReason;
use serde_json::{Value, json};

/// Sent while there is nothing else to send.
const PING: &[u8] = b"event: ping\ndata: {\"type\":\"ping\"}\n\n";

/// Renders a whole message.
pub(super) fn whole(head: &AnswerHead, choices: &[OutputPieces], end: AnswerEnd) -> Value {
    let AnswerEnd { counts, timing } = end;
    let choice = choices.first();
    let pieces = choice.into_iter().flat_map(OutputPieces::iter);
    let content: Vec<Value> = pieces.filter_map(block).collect();
    let mut message = message(head, &content, counts);
    let (reason, sequence) = match choice.and_then(OutputPieces::end) {
        Some(end) => stop_reason(end, head, counts),
        None => (Value::Null, Value::Null),
    };
    message["stop_reason"] = reason;
    message["stop_sequence"] = sequence;
    if !head.warnings.is_empty() {
        message["warnings"] = json!(head.warnings);
    }
    if let Some(timing) = timing {
        message["timing"] = timing;
    }
    message
}

/// The message without its end.
fn message(head: &AnswerHead, content: &[Value], counts: TokenCounts) -> Value {
    json!({
        "id": format!("msg_{}", head.request_id),
        "type": "message",
        "role": "assistant",
        "model": head.model.name(),
        "content": content,
        "stop_reason": null,
        "stop_sequence": null,
        "usage": usage(counts),
    })
}

/// `input_tokens` are those that were computed, as in Anthropic's API. Counts are never null there.
fn usage(counts: TokenCounts) -> Value {
    let TokenCounts {
        prompt_tokens,
        output_tokens,
        reasoning_tokens: _,
        cached_tokens,
    } = counts;
    let cached_tokens = cached_tokens.unwrap_or(0);
    json!({
        "input_tokens": prompt_tokens.saturating_sub(cached_tokens),
        "cache_creation_input_tokens": 0,
        "cache_read_input_tokens": cached_tokens,
        "output_tokens": output_tokens,
    })
}

/// A block of a whole message.
fn block(piece: &OutputPiece) -> Option<Value> {
    match piece {
        OutputPiece::Text(text) => Some(json!({"type": "text", "text": text})),
        OutputPiece::Reasoning(text) => {
            let signature = signature(&blake3::hash(text.as_bytes()));
            Some(json!({"type": "thinking", "thinking": text, "signature": signature}))
        }
        OutputPiece::ToolCall(call) => {
            let mut block = tool_use(call);
            block["input"] = input(&call.arguments);
            Some(block)
        }
        OutputPiece::Scores(_)
        | OutputPiece::PromptScores(_)
        | OutputPiece::Vector(_)
        | OutputPiece::End(_) => None,
    }
}

/// The beginning of a block of a call.
fn tool_use(call: &ToolCallPiece) -> Value {
    let head = call.head.as_ref();
    let (id, name) = head.map_or(("", ""), |head| (&*head.id, &*head.name));
    json!({"type": "tool_use", "id": id, "name": name, "input": {}})
}

/// The arguments of a call. A cut text, or one with a mistake, is no object, but none of it is
/// lost.
fn input(arguments: &str) -> Value {
    match serde_json::from_str(arguments) {
        Ok(Value::Object(arguments)) => arguments.into(),
        _ if arguments.is_empty() => json!({}),
        _ => json!({BROKEN_ARGUMENTS: arguments}),
    }
}

/// An opaque mark of reasoning. Clients send it back with the reasoning; nothing depends on it.
fn signature(hash: &blake3::Hash) -> String {
    format!("cleave-{}", hash.to_hex())
}

/// The reason of the end, and the client's stop sequence that was met.
fn stop_reason(end: &ChoiceEnd, head: &AnswerHead, counts: TokenCounts) -> (Value, Value) {
    let is_below = |limit: u32| counts.output_tokens < u64::from(limit);
    match (end.reason, &end.cause) {
        (FinishReason::Length, _) if head.facts.tokens_max.is_some_and(is_below) => {
            ("model_context_window_exceeded".into(), Value::Null)
        }
        (FinishReason::Length, _) => ("max_tokens".into(), Value::Null),
        (FinishReason::Stop, _) if end.whole_calls.is_some() => ("tool_use".into(), Value::Null),
        (FinishReason::Stop, StopCause::Text(text)) => {
            ("stop_sequence".into(), text.as_str().into())
        }
        (FinishReason::Stop, _) => ("end_turn".into(), Value::Null),
    }
}

/// Writes the events of one stream.
pub(super) struct MessageEvents {
    head: AnswerHead,
    /// The block that has begun and not ended.
    open: Option<OpenBlock>,
    blocks_count: usize,
    end: Option<ChoiceEnd>,
}

enum OpenBlock {
    Text,
    /// The hash of the reasoning so far.
    Thinking(Box<blake3::Hasher>),
    Call,
}

impl MessageEvents {
    pub(super) fn new(head: AnswerHead) -> Self {
        Self {
            head,
            open: None,
            blocks_count: 0,
            end: None,
        }
    }

    fn begin_block(&mut self, out: &mut Vec<u8>, open: OpenBlock, block: &Value) {
        self.end_block(out);
        let index = self.blocks_count;
        let event = json!({"type": "content_block_start", "index": index, "content_block": block});
        write_event(out, "content_block_start", &event);
        self.open = Some(open);
    }

    fn end_block(&mut self, out: &mut Vec<u8>) {
        let Some(open) = self.open.take() else {
            return;
        };
        if let OpenBlock::Thinking(hasher) = open {
            let signature = signature(&hasher.finalize());
            self.delta(out, "signature_delta", "signature", &signature);
        }
        let event = json!({"type": "content_block_stop", "index": self.blocks_count});
        write_event(out, "content_block_stop", &event);
        self.blocks_count += 1;
    }

    /// Writes a delta of the open block. These are most events, so no tree of values is made.
    fn delta(&self, out: &mut Vec<u8>, kind: &str, field: &str, text: &str) {
        out.extend(
            b"event: content_block_delta\ndata: {\"type\":\"content_block_delta\",\"index\":",
        );
        write_json(out, &self.blocks_count);
        out.extend(b",\"delta\":{\"type\":");
        write_json(out, kind);
        out.push(b',');
        write_json(out, field);
        out.push(b':');
        write_json(out, text);
        out.extend(b"}}\n\n");
    }

    fn text(&mut self, out: &mut Vec<u8>, text: &str) {
        if !matches!(self.open, Some(OpenBlock::Text)) {
            let block = json!({"type": "text", "text": ""});
            self.begin_block(out, OpenBlock::Text, &block);
        }
        self.delta(out, "text_delta", "text", text);
    }

    fn reasoning(&mut self, out: &mut Vec<u8>, text: &str) {
        if !matches!(self.open, Some(OpenBlock::Thinking(_))) {
            let block = json!({"type": "thinking", "thinking": "", "signature": ""});
            self.begin_block(out, OpenBlock::Thinking(Box::default()), &block);
        }
        if let Some(OpenBlock::Thinking(hasher)) = &mut self.open {
            hasher.update(text.as_bytes());
        }
        self.delta(out, "thinking_delta", "thinking", text);
    }

    fn call(&mut self, out: &mut Vec<u8>, call: &ToolCallPiece) {
        if call.head.is_some() {
            self.begin_block(out, OpenBlock::Call, &tool_use(call));
        }
        if !call.arguments.is_empty() {
            self.delta(out, "input_json_delta", "partial_json", &call.arguments);
        }
    }
}

impl EventRenderer for MessageEvents {
    fn first(&mut self, out: &mut Vec<u8>, _: usize, usage: EventUsage) {
        let counts = match usage {
            EventUsage::SoFar(counts) => counts,
            EventUsage::Hidden | EventUsage::AtEnd => TokenCounts {
                prompt_tokens: 0,
                output_tokens: 0,
                reasoning_tokens: 0,
                cached_tokens: None,
            },
        };
        let message = message(&self.head, &[], counts);
        let event = json!({"type": "message_start", "message": message});
        write_event(out, "message_start", &event);
    }

    fn pieces(&mut self, out: &mut Vec<u8>, _: usize, pieces: &OutputPieces, _: EventUsage) {
        for piece in pieces.iter() {
            match piece {
                OutputPiece::Text(text) => self.text(out, text),
                OutputPiece::Reasoning(text) => self.reasoning(out, text),
                OutputPiece::ToolCall(call) => self.call(out, call),
                // This API shows no scores, and asks for no vector.
                OutputPiece::Scores(_) | OutputPiece::PromptScores(_) | OutputPiece::Vector(_) => {}
                OutputPiece::End(end) => {
                    self.end_block(out);
                    self.end = Some(end.clone());
                }
            }
        }
    }

    fn last(&mut self, out: &mut Vec<u8>, _: UsageShown, end: AnswerEnd) {
        let AnswerEnd { counts, timing } = end;
        let (reason, sequence) = match &self.end {
            Some(end) => stop_reason(end, &self.head, counts),
            None => (Value::Null, Value::Null),
        };
        let mut event = json!({
            "type": "message_delta",
            "delta": {"stop_reason": reason, "stop_sequence": sequence},
            "usage": usage(counts),
        });
        if !self.head.warnings.is_empty() {
            event["warnings"] = json!(self.head.warnings);
        }
        if let Some(timing) = timing {
            event["timing"] = timing;
        }
        write_event(out, "message_delta", &event);
        write_event(out, "message_stop", &json!({"type": "message_stop"}));
    }

    fn error(&mut self, out: &mut Vec<u8>, error: &ApiError) {
        write_event(out, "error", &error_object(error, &self.head.request_id));
    }

    fn keep_alive(&self) -> &'static [u8] {
        PING
    }
}

/// Writes an object as an event of this name.
fn write_event(out: &mut Vec<u8>, name: &str, object: &Value) {
    out.extend(b"event: ");
    out.extend(name.as_bytes());
    out.extend(b"\ndata: ");
    write_json(out, object);
    out.extend(b"\n\n");
}
