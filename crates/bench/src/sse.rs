//! The server-sent events of an answer.
//!
//! Owns: splitting bytes into events, and the parts of an event that are measured. Never: keeps the
//! text. Invariant: the same bytes give the same events however they are split into pieces, and
//! reading one allocates only if an event is split between two pieces.
//!
//! Each `data:` line is an event of its own, as all servers of this API write them.

use crate::record::RequestTokens;
use crate::stages::StageTimes;
use serde::Deserialize;
use serde::de::{Deserializer, IgnoredAny, MapAccess, SeqAccess, Visitor};
use serde_json::Value;
use std::fmt;

/// Longest line that is accepted.
const LINE_BYTES_MAX: usize = 4 << 20;

/// Splits a stream into the contents of its `data:` lines.
#[derive(Default)]
pub(crate) struct SseLines {
    /// Beginning of an incomplete line.
    carry: Vec<u8>,
}

/// A line exceeded the longest length.
#[derive(Debug)]
pub(crate) struct EndlessLine;

impl SseLines {
    /// Takes the next piece and gives each event's data to `each`.
    pub(crate) fn feed(
        &mut self,
        mut bytes: &[u8],
        mut each: impl FnMut(&[u8]),
    ) -> Result<(), EndlessLine> {
        while let Some(end) = bytes.iter().position(|byte| *byte == b'\n') {
            let (line, rest) = (&bytes[..end], &bytes[end + 1..]);
            if self.carry.is_empty() {
                emit_data(line, &mut each);
            } else {
                self.carry.extend_from_slice(line);
                emit_data(&self.carry, &mut each);
                self.carry.clear();
            }
            bytes = rest;
        }
        if self.carry.len() + bytes.len() > LINE_BYTES_MAX {
            return Err(EndlessLine);
        }
        self.carry.extend_from_slice(bytes);
        Ok(())
    }
}

fn emit_data(line: &[u8], each: &mut impl FnMut(&[u8])) {
    if let Some(data) = line.strip_prefix(b"data:") {
        each(data.trim_ascii());
    }
}

/// The meaning of an event.
#[derive(Debug, PartialEq)]
pub(crate) enum SseEvent {
    End,
    /// A chunk of the answer.
    Chunk(AnswerChunk),
    /// An error, in the server's words.
    Error(String),
    /// Data that is not JSON of this kind.
    Malformed,
}

/// The measured parts of a chunk.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub(crate) struct AnswerChunk {
    /// The chunk contains output, even if it is not visible.
    pub(crate) output: bool,
    /// The first choice is over.
    pub(crate) finished: bool,
    pub(crate) usage: Option<ChunkUsage>,
    pub(crate) stages: Option<StageTimes>,
}

/// Token counts of the server.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub(crate) struct ChunkUsage {
    pub(crate) length: RequestTokens,
    pub(crate) cached: Option<u32>,
}

#[derive(Deserialize)]
struct RawChunk {
    #[serde(default)]
    choices: FirstChoice,
    usage: Option<RawUsage>,
    timing: Option<StageTimes>,
    error: Option<Value>,
}

#[derive(Deserialize)]
struct RawUsage {
    #[serde(default)]
    prompt_tokens: u32,
    #[serde(default)]
    completion_tokens: u32,
    prompt_tokens_details: Option<RawUsageDetails>,
}

#[derive(Deserialize)]
struct RawUsageDetails {
    cached_tokens: Option<u32>,
}

/// Reads the data of one event.
pub(crate) fn parse_event(data: &[u8]) -> SseEvent {
    if data == b"[DONE]" {
        return SseEvent::End;
    }
    let Ok(raw) = serde_json::from_slice::<RawChunk>(data) else {
        return SseEvent::Malformed;
    };
    if let Some(error) = raw.error.filter(|error| !error.is_null()) {
        let message = error.get("message").and_then(Value::as_str);
        return SseEvent::Error(message.map_or_else(|| error.to_string(), str::to_owned));
    }
    let usage = raw.usage.map(|usage| ChunkUsage {
        length: RequestTokens {
            input: usage.prompt_tokens,
            output: usage.completion_tokens,
        },
        cached: usage.prompt_tokens_details.and_then(|d| d.cached_tokens),
    });
    let FirstChoice(first) = raw.choices;
    SseEvent::Chunk(AnswerChunk {
        output: first.output(),
        finished: matches!(first.finish_reason, FieldContent::Some),
        usage,
        stages: raw.timing,
    })
}

/// The first of the choices; requests ask for one.
#[derive(Default)]
struct FirstChoice(RawChoice);

#[derive(Default, Deserialize)]
#[serde(default)]
struct RawChoice {
    text: FieldContent,
    delta: RawDelta,
    finish_reason: FieldContent,
}

#[derive(Default, Deserialize)]
#[serde(default)]
struct RawDelta {
    role: FieldContent,
    content: FieldContent,
    reasoning: FieldContent,
    reasoning_content: FieldContent,
    tool_calls: FieldContent,
}

impl RawChoice {
    /// Whether the chunk contains output. Text is output, and so is empty text in mid-stream: a
    /// token that is part of a character. A chat's opening, which has a role, and an empty end are
    /// not.
    fn output(&self) -> bool {
        let delta = &self.delta;
        let parts = [
            self.text,
            delta.content,
            delta.reasoning,
            delta.reasoning_content,
            delta.tool_calls,
        ];
        if parts.contains(&FieldContent::Some) {
            return true;
        }
        let ends = self.finish_reason == FieldContent::Some || delta.role == FieldContent::Some;
        parts.contains(&FieldContent::Empty) && !ends
    }
}

/// Whether a field has content; the content itself is not kept.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
enum FieldContent {
    #[default]
    None,
    Empty,
    Some,
}

impl<'de> Deserialize<'de> for FieldContent {
    fn deserialize<D: Deserializer<'de>>(source: D) -> Result<Self, D::Error> {
        source.deserialize_any(FieldContentVisitor)
    }
}

struct FieldContentVisitor;

impl<'de> Visitor<'de> for FieldContentVisitor {
    type Value = FieldContent;

    fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("text, a list, an object or null")
    }

    fn visit_str<E>(self, text: &str) -> Result<FieldContent, E> {
        Ok(if text.is_empty() {
            FieldContent::Empty
        } else {
            FieldContent::Some
        })
    }

    fn visit_unit<E>(self) -> Result<FieldContent, E> {
        Ok(FieldContent::None)
    }

    fn visit_bool<E>(self, _: bool) -> Result<FieldContent, E> {
        Ok(FieldContent::Some)
    }

    fn visit_i64<E>(self, _: i64) -> Result<FieldContent, E> {
        Ok(FieldContent::Some)
    }

    fn visit_u64<E>(self, _: u64) -> Result<FieldContent, E> {
        Ok(FieldContent::Some)
    }

    fn visit_f64<E>(self, _: f64) -> Result<FieldContent, E> {
        Ok(FieldContent::Some)
    }

    fn visit_seq<A: SeqAccess<'de>>(self, mut list: A) -> Result<FieldContent, A::Error> {
        let mut filled = FieldContent::Empty;
        while list.next_element::<IgnoredAny>()?.is_some() {
            filled = FieldContent::Some;
        }
        Ok(filled)
    }

    fn visit_map<A: MapAccess<'de>>(self, mut map: A) -> Result<FieldContent, A::Error> {
        while map.next_entry::<IgnoredAny, IgnoredAny>()?.is_some() {}
        Ok(FieldContent::Some)
    }
}

impl<'de> Deserialize<'de> for FirstChoice {
    fn deserialize<D: Deserializer<'de>>(source: D) -> Result<Self, D::Error> {
        struct FirstChoiceVisitor;
        impl<'de> Visitor<'de> for FirstChoiceVisitor {
            type Value = FirstChoice;

            fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                f.write_str("a list of choices")
            }

            fn visit_seq<A: SeqAccess<'de>>(self, mut list: A) -> Result<FirstChoice, A::Error> {
                let first = list.next_element()?.unwrap_or_default();
                while list.next_element::<IgnoredAny>()?.is_some() {}
                Ok(FirstChoice(first))
            }
        }
        source.deserialize_seq(FirstChoiceVisitor)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use cleave_domain::RequestStage;
    use proptest::prelude::*;

    fn events(pieces: &[&[u8]]) -> Vec<String> {
        let mut lines = SseLines::default();
        let mut events = Vec::new();
        for piece in pieces {
            let each = |data: &[u8]| events.push(String::from_utf8_lossy(data).into_owned());
            lines.feed(piece, each).unwrap();
        }
        events
    }

    const STREAM: &[u8] =
        b": keep-alive\n\ndata: {\"a\": 1}\n\nevent: x\r\ndata:{}\r\n\r\n\ndata: [DONE]\n\n";

    proptest! {
        #[test]
        fn events_are_read_whatever_the_chunking(cuts in proptest::collection::vec(0..STREAM.len(), 0..6)) {
            let mut cuts = cuts;
            cuts.sort_unstable();
            let (mut pieces, mut from) = (Vec::new(), 0);
            for cut in cuts {
                pieces.push(&STREAM[from..cut]);
                from = cut;
            }
            pieces.push(&STREAM[from..]);
            prop_assert_eq!(events(&pieces), ["{\"a\": 1}", "{}", "[DONE]"]);
        }
    }

    fn chunk(data: &str) -> AnswerChunk {
        match parse_event(data.as_bytes()) {
            SseEvent::Chunk(chunk) => chunk,
            other => panic!("{data}: {other:?}"),
        }
    }

    #[test]
    fn output_chunks_differ_from_role_and_end_chunks() {
        for (data, output, finished) in [
            (
                r#"{"choices":[{"text":"a","finish_reason":null}]}"#,
                true,
                false,
            ),
            (
                r#"{"choices":[{"text":"","finish_reason":null}]}"#,
                true,
                false,
            ),
            (
                r#"{"choices":[{"text":"","finish_reason":"length"}]}"#,
                false,
                true,
            ),
            (
                r#"{"choices":[{"text":"\u00e9\"","finish_reason":"stop"}]}"#,
                true,
                true,
            ),
            (
                r#"{"choices":[{"delta":{"role":"assistant","content":""}}]}"#,
                false,
                false,
            ),
            (
                r#"{"choices":[{"delta":{"content":"b"},"logprobs":null}]}"#,
                true,
                false,
            ),
            (
                r#"{"choices":[{"delta":{"role":"assistant","content":"b"}}]}"#,
                true,
                false,
            ),
            (
                r#"{"choices":[{"delta":{"tool_calls":[{"index":0}]}}]}"#,
                true,
                false,
            ),
            (
                r#"{"choices":[{"delta":{"content":null,"reasoning_content":"x"}}]}"#,
                true,
                false,
            ),
            (
                r#"{"choices":[{"delta":{},"finish_reason":"stop"}]}"#,
                false,
                true,
            ),
            (r#"{"choices":[],"usage":null}"#, false, false),
        ] {
            let chunk = chunk(data);
            assert_eq!((chunk.output, chunk.finished), (output, finished), "{data}");
        }
    }

    #[test]
    fn usage_timing_and_errors_are_read_from_events() {
        let data = r#"{"choices":[],"usage":{"prompt_tokens":7,"completion_tokens":3,"total_tokens":10,
            "prompt_tokens_details":{"cached_tokens":4}},"timing":{"prefill_ms":2.5}}"#;
        let chunk = chunk(data);
        let usage = chunk.usage.unwrap();
        let length = RequestTokens {
            input: 7,
            output: 3,
        };
        assert_eq!((usage.length, usage.cached), (length, Some(4)));
        assert_eq!(chunk.stages.unwrap().of(RequestStage::Prefill), Some(2.5));
        let error = parse_event(br#"{"error":{"message":"worker lost","code":500}}"#);
        assert_eq!(error, SseEvent::Error("worker lost".into()));
        assert_eq!(parse_event(b"{oops"), SseEvent::Malformed);
        assert_eq!(parse_event(b"[DONE]"), SseEvent::End);
    }

    #[test]
    fn an_endless_line_ends_the_stream() {
        let mut lines = SseLines::default();
        let piece = vec![b'x'; 1 << 20];
        let fed = (0..8).try_for_each(|_| lines.feed(&piece, |_| {}));
        assert!(fed.is_err());
    }
}
