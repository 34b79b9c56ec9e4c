//! The stream of an answer.
//!
//! Owns: cutting bytes into events, and what of an event counts. Never: keeps the text.
//! Invariant: the same bytes give the same events however they are cut into pieces, and reading one
//! allocates nothing but where an event is split between two pieces.
//!
//! Each `data:` line is an event of its own, as all servers of this API write them.

use crate::record::Length;
use crate::stages::Stages;
use serde::Deserialize;
use serde::de::{Deserializer, IgnoredAny, MapAccess, SeqAccess, Visitor};
use serde_json::Value;
use std::fmt;

/// A line longer than this is no event.
const LINE_BYTES_MAX: usize = 4 << 20;

/// Cuts a stream into the contents of its `data:` lines.
#[derive(Default)]
pub(crate) struct Lines {
    /// Beginning of a line whose end has not come.
    carry: Vec<u8>,
}

/// A line had no end within what can be kept.
#[derive(Debug)]
pub(crate) struct Endless;

impl Lines {
    /// Takes the next piece and hands each event's data to `each`.
    pub(crate) fn feed(
        &mut self,
        mut bytes: &[u8],
        mut each: impl FnMut(&[u8]),
    ) -> Result<(), Endless> {
        while let Some(end) = bytes.iter().position(|byte| *byte == b'\n') {
            let (line, rest) = (&bytes[..end], &bytes[end + 1..]);
            if self.carry.is_empty() {
                data(line, &mut each);
            } else {
                self.carry.extend_from_slice(line);
                data(&self.carry, &mut each);
                self.carry.clear();
            }
            bytes = rest;
        }
        if self.carry.len() + bytes.len() > LINE_BYTES_MAX {
            return Err(Endless);
        }
        self.carry.extend_from_slice(bytes);
        Ok(())
    }
}

fn data(line: &[u8], each: &mut impl FnMut(&[u8])) {
    if let Some(data) = line.strip_prefix(b"data:") {
        each(data.trim_ascii());
    }
}

/// What an event says.
#[derive(Debug, PartialEq)]
pub(crate) enum Event {
    /// `[DONE]`.
    End,
    /// A chunk of the answer.
    Chunk(Chunk),
    /// An error, as the server words it.
    Error(String),
    /// Not JSON of this kind.
    Garbled,
}

/// What counts of a chunk.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub(crate) struct Chunk {
    /// There is output in it, even if it is not visible.
    pub(crate) output: bool,
    /// The first choice is over.
    pub(crate) finished: bool,
    pub(crate) usage: Option<Usage>,
    pub(crate) stages: Option<Stages>,
}

/// What a server counted.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub(crate) struct Usage {
    pub(crate) length: Length,
    pub(crate) cached: Option<u32>,
}

#[derive(Deserialize)]
struct RawChunk {
    #[serde(default)]
    choices: First,
    usage: Option<RawUsage>,
    timing: Option<Stages>,
    error: Option<Value>,
}

#[derive(Deserialize)]
struct RawUsage {
    #[serde(default)]
    prompt_tokens: u32,
    #[serde(default)]
    completion_tokens: u32,
    prompt_tokens_details: Option<Details>,
}

#[derive(Deserialize)]
struct Details {
    cached_tokens: Option<u32>,
}

/// Reads the data of one event.
pub(crate) fn read(data: &[u8]) -> Event {
    if data == b"[DONE]" {
        return Event::End;
    }
    let Ok(raw) = serde_json::from_slice::<RawChunk>(data) else {
        return Event::Garbled;
    };
    if let Some(error) = raw.error.filter(|error| !error.is_null()) {
        let message = error.get("message").and_then(Value::as_str);
        return Event::Error(message.map_or_else(|| error.to_string(), str::to_owned));
    }
    let usage = raw.usage.map(|usage| Usage {
        length: Length {
            input: usage.prompt_tokens,
            output: usage.completion_tokens,
        },
        cached: usage.prompt_tokens_details.and_then(|d| d.cached_tokens),
    });
    let First(first) = raw.choices;
    Event::Chunk(Chunk {
        output: first.output(),
        finished: matches!(first.finish_reason, Filled::Some),
        usage,
        stages: raw.timing,
    })
}

/// The first of the choices; one was asked for.
#[derive(Default)]
struct First(Choice);

#[derive(Default, Deserialize)]
#[serde(default)]
struct Choice {
    text: Filled,
    delta: Delta,
    finish_reason: Filled,
}

#[derive(Default, Deserialize)]
#[serde(default)]
struct Delta {
    role: Filled,
    content: Filled,
    reasoning: Filled,
    reasoning_content: Filled,
    tool_calls: Filled,
}

impl Choice {
    /// Text is output. So is empty text in the middle: a token that is a part of a character. Not so
    /// a chat's opening, which has a role, nor an empty end.
    fn output(&self) -> bool {
        let delta = &self.delta;
        let parts = [
            self.text,
            delta.content,
            delta.reasoning,
            delta.reasoning_content,
            delta.tool_calls,
        ];
        if parts.contains(&Filled::Some) {
            return true;
        }
        let ends = self.finish_reason == Filled::Some || delta.role == Filled::Some;
        parts.contains(&Filled::Empty) && !ends
    }
}

/// Whether there is something in a field; not what.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
enum Filled {
    /// Absent or null.
    #[default]
    None,
    Empty,
    Some,
}

impl<'de> Deserialize<'de> for Filled {
    fn deserialize<D: Deserializer<'de>>(source: D) -> Result<Self, D::Error> {
        source.deserialize_any(Looks)
    }
}

struct Looks;

impl<'de> Visitor<'de> for Looks {
    type Value = Filled;

    fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("text, a list, an object or null")
    }

    fn visit_str<E>(self, text: &str) -> Result<Filled, E> {
        Ok(match text.is_empty() {
            true => Filled::Empty,
            false => Filled::Some,
        })
    }

    fn visit_unit<E>(self) -> Result<Filled, E> {
        Ok(Filled::None)
    }

    fn visit_bool<E>(self, _: bool) -> Result<Filled, E> {
        Ok(Filled::Some)
    }

    fn visit_i64<E>(self, _: i64) -> Result<Filled, E> {
        Ok(Filled::Some)
    }

    fn visit_u64<E>(self, _: u64) -> Result<Filled, E> {
        Ok(Filled::Some)
    }

    fn visit_f64<E>(self, _: f64) -> Result<Filled, E> {
        Ok(Filled::Some)
    }

    fn visit_seq<A: SeqAccess<'de>>(self, mut list: A) -> Result<Filled, A::Error> {
        let mut filled = Filled::Empty;
        while list.next_element::<IgnoredAny>()?.is_some() {
            filled = Filled::Some;
        }
        Ok(filled)
    }

    fn visit_map<A: MapAccess<'de>>(self, mut map: A) -> Result<Filled, A::Error> {
        while map.next_entry::<IgnoredAny, IgnoredAny>()?.is_some() {}
        Ok(Filled::Some)
    }
}

impl<'de> Deserialize<'de> for First {
    fn deserialize<D: Deserializer<'de>>(source: D) -> Result<Self, D::Error> {
        struct List;
        impl<'de> Visitor<'de> for List {
            type Value = First;

            fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                f.write_str("a list of choices")
            }

            fn visit_seq<A: SeqAccess<'de>>(self, mut list: A) -> Result<First, A::Error> {
                let first = list.next_element()?.unwrap_or_default();
                while list.next_element::<IgnoredAny>()?.is_some() {}
                Ok(First(first))
            }
        }
        source.deserialize_seq(List)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use cleave_domain::Stage;
    use proptest::prelude::*;

    fn events(pieces: &[&[u8]]) -> Vec<String> {
        let mut lines = Lines::default();
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
        fn an_event_split_between_two_packets_was_lost(cuts in proptest::collection::vec(0..STREAM.len(), 0..6)) {
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

    fn chunk(data: &str) -> Chunk {
        match read(data.as_bytes()) {
            Event::Chunk(chunk) => chunk,
            other => panic!("{data}: {other:?}"),
        }
    }

    #[test]
    fn output_is_told_from_opening_and_end() {
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
    fn usage_and_stages_are_read_where_they_are() {
        let data = r#"{"choices":[],"usage":{"prompt_tokens":7,"completion_tokens":3,"total_tokens":10,
            "prompt_tokens_details":{"cached_tokens":4}},"timing":{"prefill_ms":2.5}}"#;
        let chunk = chunk(data);
        let usage = chunk.usage.unwrap();
        let length = Length {
            input: 7,
            output: 3,
        };
        assert_eq!((usage.length, usage.cached), (length, Some(4)));
        assert_eq!(chunk.stages.unwrap().of(Stage::Prefill), Some(2.5));
        let error = read(br#"{"error":{"message":"worker lost","code":500}}"#);
        assert_eq!(error, Event::Error("worker lost".into()));
        assert_eq!(read(b"{oops"), Event::Garbled);
        assert_eq!(read(b"[DONE]"), Event::End);
    }

    #[test]
    fn a_line_without_an_end_filled_the_memory() {
        let mut lines = Lines::default();
        let piece = vec![b'x'; 1 << 20];
        let fed = (0..8).try_for_each(|_| lines.feed(&piece, |_| {}));
        assert!(fed.is_err());
    }
}
