//! The surface of APIs whose answers are made of vectors: embeddings, rankings and scores.
//!
//! Owns: what they share: an answer in one part, written into bytes entry by entry. Never: computes
//! a value. Invariant: an answer has a vector for each sequence, or is an error.

use super::{AnswerEnd, AnswerHead, BodyParts, Surface, SurfaceTask};
use crate::body_work::BodyWork;
use crate::error::ApiError;
use crate::openapi::RouteDoc;
use crate::output_piece::OutputPieces;
use crate::request::GenerateRequest;
use cleave_text::ModelText;
use cleave_text::json::Document;
use serde::Serialize;
use serde_json::{Map, Value, json};
use std::sync::Arc;

/// Writes an answer, of the vectors of its sequences.
pub(super) type WriteAnswer = fn(&AnswerHead, &[Arc<[f32]>], AnswerEnd) -> BodyParts;

/// Length from which on a part of an answer is full.
const PART_BYTES: usize = 64 * 1024;

/// One of these APIs: the parts in which it differs from the others.
pub(super) struct PooledSurface {
    /// Path of its requests.
    pub(super) route: &'static str,
    /// Name in OpenTelemetry's conventions.
    pub(super) operation: &'static str,
    pub(super) task: SurfaceTask,
    pub(super) doc: RouteDoc,
    pub(super) body_work: BodyWork,
    /// Checks a body, and tokenizes its prompts.
    pub(super) parse: fn(&Document, &ModelText) -> Result<GenerateRequest, ApiError>,
    /// Writes an answer; it has a vector for each sequence.
    pub(super) answer: WriteAnswer,
}

impl Surface for PooledSurface {
    fn route(&self) -> &'static str {
        self.route
    }

    fn operation(&self) -> &'static str {
        self.operation
    }

    fn doc(&'static self) -> &'static RouteDoc {
        &self.doc
    }

    fn body_work(&self) -> BodyWork {
        self.body_work
    }

    fn task(&self) -> SurfaceTask {
        self.task
    }

    fn parse(&self, body: &Document, model: &ModelText) -> Result<GenerateRequest, ApiError> {
        (self.parse)(body, model)
    }

    fn whole_body(
        &'static self,
        head: AnswerHead,
        choices: &[OutputPieces],
        end: AnswerEnd,
    ) -> Vec<u8> {
        self.parts(head, choices, end).flatten().collect()
    }

    fn parts(
        &'static self,
        head: AnswerHead,
        choices: &[OutputPieces],
        end: AnswerEnd,
    ) -> BodyParts {
        let vectors: Vec<Arc<[f32]>> = choices.iter().filter_map(OutputPieces::vector).collect();
        assert_eq!(
            vectors.len(),
            choices.len(),
            "a sequence ended without its vector"
        );
        (self.answer)(&head, &vectors, end)
    }

    fn error(&self, error: &ApiError, _: &str) -> Value {
        error.object()
    }
}

/// Adds the counts of tokens, and the durations if the client asked for them.
pub(super) fn insert_usage(answer: &mut Map<String, Value>, end: AnswerEnd) {
    let AnswerEnd { counts, timing } = end;
    let tokens = counts.prompt_tokens;
    let usage = json!({"prompt_tokens": tokens, "total_tokens": tokens, "completion_tokens": 0});
    answer.insert("usage".into(), usage);
    if let Some(timing) = timing {
        answer.insert("timing".into(), timing);
    }
}

/// Writes an object of these members and a list of so many entries, each written by `entry`. As
/// JSON the numbers of vectors take several times their memory, so that only a part of them is
/// written at a time.
pub(super) fn answer_parts(
    members: Map<String, Value>,
    list: &str,
    count: usize,
    entry: impl Fn(usize, &mut Vec<u8>) + Send + 'static,
) -> BodyParts {
    let mut begun = Vec::new();
    write_body(&mut begun, &Value::Object(members));
    begun.pop();
    let comma = if begun.len() > 1 { "," } else { "" };
    begun.extend(format!("{comma}{}:[", json!(list)).as_bytes());
    let mut begun = Some(begun);
    let mut entries = 0..count;
    let part = move || {
        let mut out = begun.take()?;
        while out.len() < PART_BYTES {
            let Some(index) = entries.next() else {
                out.extend(b"]}");
                return Some(out);
            };
            if index > 0 {
                out.push(b',');
            }
            entry(index, &mut out);
        }
        begun = Some(Vec::new());
        Some(out)
    };
    Box::new(std::iter::from_fn(part))
}

/// The parts of an answer without anything.
pub(super) fn no_parts() -> BodyParts {
    Box::new(std::iter::empty())
}

pub(super) fn write_body<T: Serialize>(out: &mut Vec<u8>, value: &T) {
    serde_json::to_writer(out, value).expect("a vector takes all bytes");
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_long_answer_is_written_in_parts() {
        for count in [0, 1, 7, 5000] {
            let entry = |index: usize, out: &mut Vec<u8>| write_body(out, &vec![index; 20]);
            let parts: Vec<Vec<u8>> = answer_parts(Map::new(), "data", count, entry).collect();
            let longest = parts.iter().map(Vec::len).max();
            assert!(longest < Some(PART_BYTES + 200), "{count}: {longest:?}");
            let answer: Value = serde_json::from_slice(&parts.concat()).unwrap();
            let data = answer["data"].as_array().unwrap();
            assert_eq!(data.len(), count);
            for (index, entry) in data.iter().enumerate() {
                assert_eq!(entry[19], index);
            }
        }
    }
}
