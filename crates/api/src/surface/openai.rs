//! The surface of OpenAI's two generating APIs.
//!
//! Owns: the envelope, finish, usage and warnings of an answer, and its chunks, which are written
//! directly into bytes: a server sends tens of thousands per second, and trees of JSON values would
//! cost more than the rest of a chunk's path. Never: decides the contents. Invariant: a chunk is
//! `data: `, one JSON object without a line break, and an empty line; a stream ends with `data:
//! [DONE]` if and only if the whole answer was sent, otherwise with an error object, so that no
//! client takes half an answer for a whole one (lesson 16).

use super::{AnswerEnd, AnswerHead, EventRenderer, EventUsage, Surface, json_body};
use crate::body_work::BodyWork;
use crate::error::ApiError;
use crate::flights::TokenCounts;
use crate::openapi::RouteDoc;
use crate::output_piece::{
    ChoiceEnd, OutputPiece, OutputPieces, StopCause, TokenScore, ToolCallHead, ToolCallPiece,
    ToolKind,
};
use crate::request::{GenerateRequest, UsageShown};
use cleave_domain::TokenId;
use cleave_text::ModelText;
use cleave_text::json::Document;
use serde::Serialize;
use serde_json::{Map, Value, json};
use std::borrow::Cow;

/// One of the two APIs: the parts in which it differs from the other.
pub(super) struct OpenAiSurface {
    /// Path of its requests.
    pub(super) route: &'static str,
    /// Name in OpenTelemetry's conventions.
    pub(super) operation: &'static str,
    pub(super) doc: RouteDoc,
    pub(super) body_work: BodyWork,
    /// Checks a body, and tokenizes its prompts.
    pub(super) parse: fn(&Document, &ModelText) -> Result<GenerateRequest, ApiError>,
    /// Beginning of an answer's id.
    pub(super) id_prefix: &'static str,
    /// `object` of a whole answer.
    pub(super) whole_object: &'static str,
    /// `object` of a chunk.
    pub(super) chunk_object: &'static str,
    /// The choice of the first chunk, where a stream begins with one, by its index.
    pub(super) first_choice: Option<fn(usize) -> Value>,
    /// Inserts the content into a choice of a whole answer.
    pub(super) insert_content: fn(&mut Map<String, Value>, &ChoiceParts<'_>, &ModelText),
    /// Writes the member of a chunk's choice that has a part of the content.
    pub(super) write_delta: fn(&mut Vec<u8>, ChoiceDelta<'_>, &ModelText),
    /// Where vLLM's answers of this API have `prompt_logprobs`.
    pub(super) prompt_scores_place: PromptScoresPlace,
    /// Builds `choices[].logprobs` of tokens.
    pub(super) scores: fn(&[TokenScore], &ModelText) -> Value,
}

/// The object that has `prompt_logprobs`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum PromptScoresPlace {
    /// Each choice, since their prompts differ.
    Choice,
    /// The answer, which has one prompt.
    Answer,
}

impl Surface for OpenAiSurface {
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

    fn parse(&self, body: &Document, model: &ModelText) -> Result<GenerateRequest, ApiError> {
        (self.parse)(body, model)
    }

    fn whole_body(
        &'static self,
        head: AnswerHead,
        choices: &[OutputPieces],
        end: AnswerEnd,
    ) -> Vec<u8> {
        let answer = OpenAiAnswer::new(self, head);
        let mut of_answer = None;
        let choices = choices.iter().enumerate().map(|(index, pieces)| {
            let parts = ChoiceParts::of(pieces);
            let prompt_scores =
                (parts.prompt_scores).map(|scores| prompt_scores(scores, &answer.head.model));
            let mut choice = Map::new();
            choice.insert("index".into(), index.into());
            (self.insert_content)(&mut choice, &parts, &answer.head.model);
            choice.insert("logprobs".into(), answer.scores(parts.scores));
            insert_end(&mut choice, parts.end);
            match (self.prompt_scores_place, prompt_scores) {
                (_, None) => {}
                (PromptScoresPlace::Choice, Some(scores)) => {
                    choice.insert("prompt_logprobs".into(), scores);
                }
                (PromptScoresPlace::Answer, Some(scores)) => of_answer = Some(scores),
            }
            Value::Object(choice)
        });
        let mut whole = answer.envelope(self.whole_object, choices.collect());
        if let Some(scores) = of_answer {
            whole.insert("prompt_logprobs".into(), scores);
        }
        let AnswerEnd { counts, timing } = end;
        whole.insert("usage".into(), usage_json(counts));
        if !answer.head.warnings.is_empty() {
            whole.insert("warnings".into(), json!(answer.head.warnings));
        }
        if let Some(timing) = timing {
            whole.insert("timing".into(), timing);
        }
        json_body(&Value::Object(whole))
    }

    fn events(&'static self, head: AnswerHead) -> Option<Box<dyn EventRenderer>> {
        Some(Box::new(OpenAiEvents::new(self, head)))
    }

    fn error(&self, error: &ApiError, _: &str) -> Value {
        error.object()
    }
}

/// The pieces of a choice, as a whole answer of these APIs has them.
pub(super) struct ChoiceParts<'a> {
    pub(super) text: Cow<'a, str>,
    pub(super) reasoning: Cow<'a, str>,
    pub(super) calls: Vec<&'a ToolCallPiece>,
    scores: &'a [TokenScore],
    prompt_scores: Option<&'a [TokenScore]>,
    end: Option<&'a ChoiceEnd>,
}

impl<'a> ChoiceParts<'a> {
    fn of(pieces: &'a OutputPieces) -> Self {
        let mut parts = Self {
            text: Cow::Borrowed(""),
            reasoning: Cow::Borrowed(""),
            calls: Vec::new(),
            scores: &[],
            prompt_scores: None,
            end: None,
        };
        let add = |whole: &mut Cow<'a, str>, text: &'a String| {
            if whole.is_empty() {
                *whole = Cow::Borrowed(text);
            } else {
                whole.to_mut().push_str(text);
            }
        };
        for piece in pieces.iter() {
            match piece {
                OutputPiece::Text(text) => add(&mut parts.text, text),
                OutputPiece::Reasoning(text) => add(&mut parts.reasoning, text),
                OutputPiece::ToolCall(call) => parts.calls.push(call),
                OutputPiece::Scores(scores) => parts.scores = scores,
                OutputPiece::PromptScores(scores) => parts.prompt_scores = Some(scores),
                // These APIs ask for no vector.
                OutputPiece::Vector(_) => {}
                OutputPiece::End(end) => parts.end = Some(end),
            }
        }
        parts
    }
}

/// The content of one chunk.
#[derive(Clone, Copy, Debug)]
pub(super) enum ChoiceDelta<'a> {
    Nothing,
    Text(&'a str),
    Reasoning(&'a str),
    CallHead {
        index: usize,
        kind: ToolKind,
        head: &'a ToolCallHead,
    },
    CallArguments {
        index: usize,
        kind: ToolKind,
        arguments: &'a str,
    },
}

impl<'a> ChoiceDelta<'a> {
    /// The contents of a piece, in the order of their chunks. The first chunk of a call has its
    /// name and id, and no arguments; no later one has these again, because clients append them.
    fn of(piece: &'a OutputPiece) -> [Option<Self>; 2] {
        match piece {
            OutputPiece::Text(text) => [Some(Self::Text(text)), None],
            OutputPiece::Reasoning(text) => [Some(Self::Reasoning(text)), None],
            OutputPiece::ToolCall(call) => {
                let (index, kind) = (call.index, call.kind);
                let head = call.head.as_ref();
                let arguments = &*call.arguments;
                let arguments = (!arguments.is_empty()).then_some(arguments);
                [
                    head.map(|head| Self::CallHead { index, kind, head }),
                    arguments.map(|arguments| Self::CallArguments {
                        index,
                        kind,
                        arguments,
                    }),
                ]
            }
            // Streams have no scores of the prompt.
            OutputPiece::Scores(_)
            | OutputPiece::PromptScores(_)
            | OutputPiece::Vector(_)
            | OutputPiece::End(_) => [None; 2],
        }
    }

    fn is_of_call(&self) -> bool {
        matches!(self, Self::CallHead { .. } | Self::CallArguments { .. })
    }
}

/// One answer: its head, and the id that is made of it.
struct OpenAiAnswer {
    surface: &'static OpenAiSurface,
    id: String,
    head: AnswerHead,
}

impl OpenAiAnswer {
    fn new(surface: &'static OpenAiSurface, head: AnswerHead) -> Self {
        let id = format!("{}-{}", surface.id_prefix, head.request_id);
        Self { surface, id, head }
    }

    fn envelope(&self, object: &str, choices: Value) -> Map<String, Value> {
        let mut map = Map::new();
        map.insert("id".into(), self.id.as_str().into());
        map.insert("object".into(), object.into());
        map.insert("created".into(), self.head.created.into());
        map.insert("model".into(), self.head.model.name().into());
        map.insert("choices".into(), choices);
        map
    }

    fn chunk(&self, choices: Value) -> Map<String, Value> {
        self.envelope(self.surface.chunk_object, choices)
    }

    fn scores(&self, scores: &[TokenScore]) -> Value {
        if scores.is_empty() {
            Value::Null
        } else {
            (self.surface.scores)(scores, &self.head.model)
        }
    }
}

/// `stop_reason` is vLLM's field: the client's own stop condition that was met.
fn insert_end(choice: &mut Map<String, Value>, end: Option<&ChoiceEnd>) {
    let cause = match end.map(|end| &end.cause) {
        None | Some(StopCause::EosOrLength) => Value::Null,
        Some(StopCause::Text(text)) => text.as_str().into(),
        Some(StopCause::Token(token)) => (*token).into(),
    };
    choice.insert(
        "finish_reason".into(),
        end.map_or(Value::Null, |end| end.reason_word().into()),
    );
    choice.insert("stop_reason".into(), cause);
}

fn usage_json(counts: TokenCounts) -> Value {
    let TokenCounts {
        prompt_tokens,
        output_tokens,
        reasoning_tokens,
        cached_tokens,
    } = counts;
    let details = cached_tokens.map(|cached_tokens| json!({"cached_tokens": cached_tokens}));
    json!({
        "prompt_tokens": prompt_tokens,
        "completion_tokens": output_tokens,
        "total_tokens": prompt_tokens + output_tokens,
        "prompt_tokens_details": details,
        "completion_tokens_details": {"reasoning_tokens": reasoning_tokens},
    })
}

/// Builds vLLM's `prompt_logprobs`: null for the first token, then by token id the likeliest tokens
/// and the prompt's own. The rank of a token that is not among the likeliest is unknown.
fn prompt_scores(scores: &[TokenScore], model: &ModelText) -> Value {
    let entry = |score: &TokenScore| {
        let Some(own) = score.logprob else {
            return Value::Null;
        };
        let one = |token: TokenId, logprob: f32, rank: Option<usize>| {
            let text = token_text(token, model);
            json!({"logprob": logprob, "rank": rank, "decoded_token": text})
        };
        let mut map = Map::new();
        map.insert(score.token.to_string(), one(score.token, own, None));
        for (place, &(token, logprob)) in score.top.iter().enumerate() {
            map.insert(token.to_string(), one(token, logprob, Some(place + 1)));
        }
        Value::Object(map)
    };
    scores.iter().map(entry).collect()
}

/// Text of a token as a client sees it: its own bytes, with replacements for invalid UTF-8.
pub(super) fn token_text(token: TokenId, model: &ModelText) -> String {
    String::from_utf8_lossy(&model.tokenizer().bytes(token)).into_owned()
}

/// Writes the chunks of one stream; the part that all share is formatted once.
struct OpenAiEvents {
    answer: OpenAiAnswer,
    /// Beginning of every chunk, up to the index of the choice.
    chunk_start: Vec<u8>,
}

impl OpenAiEvents {
    fn new(surface: &'static OpenAiSurface, head: AnswerHead) -> Self {
        let answer = OpenAiAnswer::new(surface, head);
        let mut chunk_start = b"data: {\"id\":".to_vec();
        write_json(&mut chunk_start, &answer.id);
        chunk_start.extend(b",\"object\":");
        write_json(&mut chunk_start, surface.chunk_object);
        chunk_start.extend(b",\"created\":");
        write_json(&mut chunk_start, &answer.head.created);
        chunk_start.extend(b",\"model\":");
        write_json(&mut chunk_start, answer.head.model.name());
        chunk_start.extend(b",\"choices\":[{\"index\":");
        Self {
            answer,
            chunk_start,
        }
    }
}

impl OpenAiEvents {
    /// Writes a chunk of one choice.
    fn chunk(
        &self,
        out: &mut Vec<u8>,
        index: usize,
        delta: ChoiceDelta<'_>,
        scores: &[TokenScore],
        end: Option<&ChoiceEnd>,
        usage: EventUsage,
    ) {
        out.reserve(self.chunk_start.len() + 96);
        out.extend(&self.chunk_start);
        write_json(out, &index);
        (self.answer.surface.write_delta)(out, delta, &self.answer.head.model);
        if scores.is_empty() {
            out.extend(b",\"logprobs\":null")
        } else {
            out.extend(b",\"logprobs\":");
            write_json(out, &self.answer.scores(scores));
        }
        write_end(out, end);
        out.extend(b"}]");
        // Warnings accompany the last chunk of each choice.
        let warnings = &self.answer.head.warnings;
        if end.is_some() && !warnings.is_empty() {
            out.extend(b",\"warnings\":");
            write_json(out, warnings);
        }
        if let Some(usage) = usage_value(usage) {
            out.extend(b",\"usage\":");
            write_json(out, &usage);
        }
        out.extend(b"}\n\n");
    }
}

impl EventRenderer for OpenAiEvents {
    fn first(&mut self, out: &mut Vec<u8>, choices_count: usize, usage: EventUsage) {
        let Some(first_choice) = self.answer.surface.first_choice else {
            return;
        };
        for index in 0..choices_count {
            let mut chunk = self.answer.chunk(json!([first_choice(index)]));
            chunk.extend(usage_value(usage).map(|usage| ("usage".to_owned(), usage)));
            write_event(out, &Value::Object(chunk));
        }
    }

    fn pieces(
        &mut self,
        out: &mut Vec<u8>,
        index: usize,
        pieces: &OutputPieces,
        usage: EventUsage,
    ) {
        let mut scores = pieces.scores();
        let end = pieces.end();
        let deltas = pieces.iter().flat_map(ChoiceDelta::of).flatten();
        let mut deltas = deltas.peekable();
        // The end has a chunk of its own behind a call.
        while let Some(delta) = deltas.next() {
            let is_last = deltas.peek().is_none() && !delta.is_of_call();
            self.chunk(out, index, delta, scores, end.filter(|_| is_last), usage);
            if is_last {
                return;
            }
            scores = &[];
        }
        if end.is_some() || !scores.is_empty() {
            self.chunk(out, index, ChoiceDelta::Nothing, scores, end, usage);
        }
    }

    fn last(&mut self, out: &mut Vec<u8>, usage: UsageShown, end: AnswerEnd) {
        let AnswerEnd { counts, timing } = end;
        if usage != UsageShown::Never || timing.is_some() {
            let mut chunk = self.answer.chunk(json!([]));
            if usage != UsageShown::Never {
                chunk.insert("usage".into(), usage_json(counts));
            }
            if let Some(timing) = timing {
                chunk.insert("timing".into(), timing);
            }
            write_event(out, &Value::Object(chunk));
        }
        out.extend(b"data: [DONE]\n\n");
    }

    fn error(&mut self, out: &mut Vec<u8>, error: &ApiError) {
        write_event(out, &error.object());
    }
}

/// Token counts as every chunk but the last shows them.
fn usage_value(usage: EventUsage) -> Option<Value> {
    match usage {
        EventUsage::Hidden => None,
        EventUsage::AtEnd => Some(Value::Null),
        EventUsage::SoFar(counts) => Some(usage_json(counts)),
    }
}

fn write_end(out: &mut Vec<u8>, end: Option<&ChoiceEnd>) {
    let Some(end) = end else {
        return out.extend(b",\"finish_reason\":null,\"stop_reason\":null");
    };
    out.extend(b",\"finish_reason\":");
    write_json(out, end.reason_word());
    out.extend(b",\"stop_reason\":");
    match &end.cause {
        StopCause::EosOrLength => out.extend(b"null"),
        StopCause::Text(text) => write_json(out, text),
        StopCause::Token(token) => write_json(out, token),
    }
}

/// Writes an object as an event.
fn write_event(out: &mut Vec<u8>, object: &Value) {
    out.extend(b"data: ");
    write_json(out, object);
    out.extend(b"\n\n");
}

pub(super) fn write_json(out: &mut Vec<u8>, value: &(impl Serialize + ?Sized)) {
    serde_json::to_writer(out, value).expect("numbers, texts and trees of them are JSON");
}
