//! The chunks of a stream, as bytes.
//!
//! Owns: writing a chunk directly into its bytes. A server sends tens of thousands per second, and
//! trees of JSON values would cost more than the rest of a chunk's path. Never: decides the
//! contents. Invariant: a chunk is `data: `, one JSON object without a line break, and an empty
//! line.

use super::{AnswerEnvelope, CompletionKind, StopCause};
use crate::choice::{ChoiceDelta, ChoiceFinish};
use bytes::Bytes;
use serde::Serialize;
use serde_json::Value;

/// Writes the chunks of one stream; the part that all share is formatted once.
pub(super) struct ChunkWriter {
    /// Beginning of every chunk, up to the index of the choice.
    head: Vec<u8>,
}

impl ChunkWriter {
    pub(super) fn new(frame: &AnswerEnvelope) -> Self {
        let mut head = b"data: {\"id\":".to_vec();
        write_json(&mut head, &frame.id);
        head.extend(b",\"object\":");
        write_json(&mut head, frame.chunk_object());
        head.extend(b",\"created\":");
        write_json(&mut head, &frame.created);
        head.extend(b",\"model\":");
        write_json(&mut head, frame.model.name());
        head.extend(b",\"choices\":[{\"index\":");
        Self { head }
    }

    /// Appends a chunk with the addition to a choice, and token counts if they are shown.
    pub(super) fn write_delta(
        &self,
        out: &mut Vec<u8>,
        frame: &AnswerEnvelope,
        index: usize,
        delta: &ChoiceDelta,
        usage: Option<&Value>,
    ) {
        out.reserve(self.head.len() + delta.text.len() + 96);
        out.extend(&self.head);
        write_json(out, &index);
        match frame.kind {
            CompletionKind::Chat if delta.text.is_empty() => out.extend(b",\"delta\":{}"),
            CompletionKind::Chat => {
                out.extend(b",\"delta\":{\"content\":");
                write_json(out, &delta.text);
                out.push(b'}');
            }
            CompletionKind::Completion => {
                out.extend(b",\"text\":");
                write_json(out, &delta.text);
            }
        }
        if delta.scores.is_empty() {
            out.extend(b",\"logprobs\":null")
        } else {
            out.extend(b",\"logprobs\":");
            write_json(out, &frame.scores(delta));
        }
        write_finish(out, delta.finish.as_ref());
        out.extend(b"}]");
        // Warnings accompany the last chunk of each choice.
        if delta.finish.is_some() && !frame.warnings.is_empty() {
            out.extend(b",\"warnings\":");
            write_json(out, &frame.warnings);
        }
        if let Some(usage) = usage {
            out.extend(b",\"usage\":");
            write_json(out, usage);
        }
        out.extend(b"}\n\n");
    }
}

fn write_finish(out: &mut Vec<u8>, finish: Option<&ChoiceFinish>) {
    let Some(ChoiceFinish { reason, cause }) = finish else {
        return out.extend(b",\"finish_reason\":null,\"stop_reason\":null");
    };
    out.extend(b",\"finish_reason\":");
    write_json(out, reason);
    out.extend(b",\"stop_reason\":");
    match cause {
        StopCause::EosOrLength => out.extend(b"null"),
        StopCause::Text(text) => write_json(out, text),
        StopCause::Token(token) => write_json(out, token),
    }
}

/// Formats an object as an event.
pub(super) fn event(value: &Value) -> Bytes {
    Bytes::from(format!("data: {value}\n\n"))
}

fn write_json(out: &mut Vec<u8>, value: &(impl Serialize + ?Sized)) {
    serde_json::to_writer(out, value).expect("numbers, texts and trees of them are JSON");
}
