//! The chunks of a stream, as bytes.
//!
//! Owns: how a chunk is written, straight into its bytes: a server sends tens of thousands a second, and
//! trees of JSON values cost more than the rest of a chunk's way. Never: decides what is in one.
//! Invariant: a chunk is `data: `, one JSON object without a line break, and an empty line.

use super::{Frame, Kind, StopCause};
use crate::choice::{Delta, Finish};
use bytes::Bytes;
use serde::Serialize;
use serde_json::Value;

/// The chunks of one stream; what all have in common is written once.
pub(super) struct Chunks {
    /// Up to the number of the choice.
    head: Vec<u8>,
}

impl Chunks {
    pub(super) fn new(frame: &Frame) -> Self {
        let mut head = b"data: {\"id\":".to_vec();
        put(&mut head, &frame.id);
        head.extend(b",\"object\":");
        put(&mut head, frame.chunk_object());
        head.extend(b",\"created\":");
        put(&mut head, &frame.created);
        head.extend(b",\"model\":");
        put(&mut head, frame.model.name());
        head.extend(b",\"choices\":[{\"index\":");
        Self { head }
    }

    /// Appends a chunk with what was added to a choice, and token counts if they are shown.
    pub(super) fn addition(
        &self,
        out: &mut Vec<u8>,
        (frame, index): (&Frame, usize),
        delta: &Delta,
        usage: Option<&Value>,
    ) {
        out.reserve(self.head.len() + delta.text.len() + 96);
        out.extend(&self.head);
        put(out, &index);
        match frame.kind {
            Kind::Chat if delta.text.is_empty() => out.extend(b",\"delta\":{}"),
            Kind::Chat => {
                out.extend(b",\"delta\":{\"content\":");
                put(out, &delta.text);
                out.push(b'}');
            }
            Kind::Completion => {
                out.extend(b",\"text\":");
                put(out, &delta.text);
            }
        }
        match delta.scores.is_empty() {
            true => out.extend(b",\"logprobs\":null"),
            false => {
                out.extend(b",\"logprobs\":");
                put(out, &frame.scores(delta));
            }
        }
        finish(out, delta.finish.as_ref());
        out.extend(b"}]");
        // Beside the last of each choice's text.
        if delta.finish.is_some() && !frame.warnings.is_empty() {
            out.extend(b",\"warnings\":");
            put(out, &frame.warnings);
        }
        if let Some(usage) = usage {
            out.extend(b",\"usage\":");
            put(out, usage);
        }
        out.extend(b"}\n\n");
    }
}

fn finish(out: &mut Vec<u8>, finish: Option<&Finish>) {
    let Some(Finish { reason, cause }) = finish else {
        return out.extend(b",\"finish_reason\":null,\"stop_reason\":null");
    };
    out.extend(b",\"finish_reason\":");
    put(out, reason);
    out.extend(b",\"stop_reason\":");
    match cause {
        StopCause::Own => out.extend(b"null"),
        StopCause::Text(text) => put(out, text),
        StopCause::Token(token) => put(out, token),
    }
}

/// Any object, as an event.
pub(super) fn event(value: &Value) -> Bytes {
    Bytes::from(format!("data: {value}\n\n"))
}

fn put(out: &mut Vec<u8>, value: &(impl Serialize + ?Sized)) {
    serde_json::to_writer(out, value).expect("numbers, texts and trees of them are JSON");
}
