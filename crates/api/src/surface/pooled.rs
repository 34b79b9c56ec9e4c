//! The surface of APIs whose answers are made of vectors: embeddings, rankings and scores.
//!
//! Owns: what they share: an answer in one part, written into bytes entry by entry. Never: computes
//! a value. Invariant: an answer has a vector for each sequence, or is an error.

use super::{AnswerEnd, AnswerHead, Surface, SurfaceTask};
use crate::body_work::BodyWork;
use crate::error::ApiError;
use crate::openapi::RouteDoc;
use crate::output_piece::OutputPieces;
use crate::request::GenerateRequest;
use cleave_text::ModelText;
use cleave_text::json::Document;
use serde_json::{Map, Value, json};
use std::sync::Arc;

/// Writes an answer, of the vectors of its sequences.
pub(super) type WriteAnswer = fn(&AnswerHead, &[Arc<[f32]>], AnswerEnd) -> Vec<u8>;

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
    pub(super) whole: WriteAnswer,
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
        let vectors: Vec<Arc<[f32]>> = choices.iter().filter_map(OutputPieces::vector).collect();
        assert_eq!(
            vectors.len(),
            choices.len(),
            "a sequence ended without its vector"
        );
        (self.whole)(&head, &vectors, end)
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

/// Writes an object of these members and a list of so many entries, each written by `entry`.
pub(super) fn write_answer(
    members: Map<String, Value>,
    list: &str,
    count: usize,
    entry: impl Fn(usize, &mut Vec<u8>),
) -> Vec<u8> {
    let mut out = Vec::new();
    write_body(&mut out, &Value::Object(members));
    out.pop();
    out.extend(format!(",{}:[", json!(list)).as_bytes());
    for index in 0..count {
        if index > 0 {
            out.push(b',');
        }
        entry(index, &mut out);
    }
    out.extend(b"]}");
    out
}

pub(super) fn write_body(out: &mut Vec<u8>, value: &Value) {
    serde_json::to_writer(out, value).expect("a vector takes all bytes");
}
