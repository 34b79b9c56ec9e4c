//! The APIs that clients speak, one file each.
//!
//! Owns: the conversion of an API's JSON into a [`GenerateRequest`], and of the pieces of an answer
//! into that API's JSON, whole and as a stream. Never: starts or waits for anything: `generate`
//! does, for all of them. Invariant: the events of a stream, put together, are the whole answer.
//!
//! A new API is a file here with its [`Surface`], and a row in [`SURFACES`].

pub(crate) mod anthropic_messages;
mod chat_body;
mod custom_tool;
mod openai;
mod openai_chat;
mod openai_completions;
mod openai_embeddings;
pub(crate) mod openai_responses;
mod pooled;
mod rerank;
pub(crate) mod tokenize;

use crate::body_work::BodyWork;
use crate::error::ApiError;
use crate::flights::TokenCounts;
use crate::openapi::RouteDoc;
use crate::output_piece::OutputPieces;
use crate::request::{AnswerFacts, GenerateRequest, RequestWarning, UsageShown};
use crate::response_store::{EarlierConversation, StoredNames};
use axum::http::{HeaderMap, HeaderName, StatusCode};
use cleave_text::ModelText;
use cleave_text::json::Document;
use serde_json::Value;
use std::sync::Arc;
use std::time::SystemTime;

/// Every API whose answers a model computes.
pub(crate) const SURFACES: [&dyn Surface; 10] = [
    &openai_chat::CHAT,
    &openai_completions::COMPLETIONS,
    &openai_responses::RESPONSES,
    &anthropic_messages::MESSAGES_API,
    &openai_embeddings::EMBEDDINGS,
    &rerank::RERANK_V1,
    &rerank::RERANK,
    &rerank::RERANK_V2,
    &rerank::SCORE_V1,
    &rerank::SCORE,
];

/// The answers that an API gives.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum SurfaceTask {
    Generate,
    Embed,
    Score,
}

/// The API that a request belongs to: its path is the API's route, or one below it. Models are in
/// several APIs, and Anthropic's clients have a header of their own.
pub(crate) fn surface_of(path: &str, headers: &HeaderMap) -> Option<&'static dyn Surface> {
    if path.starts_with("/v1/models") && anthropic_messages::is_of_anthropic(headers) {
        return Some(&anthropic_messages::MESSAGES_API);
    }
    let owns = |surface: &&dyn Surface| {
        let rest = path.strip_prefix(surface.route());
        rest.is_some_and(|rest| rest.is_empty() || rest.starts_with('/'))
    };
    SURFACES.into_iter().find(owns)
}

/// The text of an answer, each part made when it is taken.
pub(crate) type BodyParts = Box<dyn Iterator<Item = Vec<u8>> + Send>;

/// One API: its requests, and the JSON of its answers.
pub(crate) trait Surface: Send + Sync {
    /// Path of its requests; they are sent with POST.
    fn route(&self) -> &'static str;

    /// Name in OpenTelemetry's conventions for generative models.
    fn operation(&self) -> &'static str;

    /// The route in the OpenAPI document, with the declaration of its bodies.
    fn doc(&'static self) -> &'static RouteDoc;

    /// Work that reading a body causes.
    fn body_work(&self) -> BodyWork;

    /// The answers that it gives: only a model that is served for them has it.
    fn task(&self) -> SurfaceTask {
        SurfaceTask::Generate
    }

    /// Checks a body, and tokenizes its prompts.
    ///
    /// # Errors
    /// A 4xx that names the field.
    fn parse(&self, body: &Document, model: &ModelText) -> Result<GenerateRequest, ApiError>;

    /// Ids of stored responses and items in a body, if its API has that.
    fn stored_names(&self, body: &[u8]) -> StoredNames {
        let _ = body;
        StoredNames::default()
    }

    /// As [`Self::parse`], with what the body names of stored responses.
    ///
    /// # Errors
    /// A 4xx that names the field.
    fn parse_after(
        &self,
        body: &Document,
        model: &ModelText,
        earlier: &EarlierConversation,
    ) -> Result<GenerateRequest, ApiError> {
        let _ = earlier;
        self.parse(body, model)
    }

    /// Renders an answer in one part, as the text of JSON. `choices` has the pieces of each choice.
    fn whole_body(
        &'static self,
        head: AnswerHead,
        choices: &[OutputPieces],
        end: AnswerEnd,
    ) -> Vec<u8>;

    /// Renders an answer as [`Self::whole_body`] does, in parts where it may be long.
    fn parts(
        &'static self,
        head: AnswerHead,
        choices: &[OutputPieces],
        end: AnswerEnd,
    ) -> BodyParts {
        Box::new(std::iter::once(self.whole_body(head, choices, end)))
    }

    /// Begins the rendering of an answer as a stream of events; `None` of an API without streams,
    /// whose requests ask for none.
    fn events(&'static self, head: AnswerHead) -> Option<Box<dyn EventRenderer>> {
        drop(head);
        None
    }

    /// Returns the HTTP status of an error.
    fn error_status(&self, error: &ApiError) -> StatusCode {
        error.status()
    }

    /// A header that has the id of the request, beside the server's own.
    fn request_id_header(&self) -> Option<HeaderName> {
        None
    }

    /// Renders the body of an error, whatever part of the server found it.
    fn error(&self, error: &ApiError, request_id: &str) -> Value;
}

/// Renders the events of one stream, as server-sent events, to the end of a buffer.
pub(crate) trait EventRenderer: Send {
    /// The answer before it is made, of an API that can give it so: the members of its JSON object
    /// but `output`.
    fn queued(&self) -> Option<String> {
        None
    }

    /// Events before the first piece.
    fn first(&mut self, out: &mut Vec<u8>, choices_count: usize, usage: EventUsage);

    /// An event with pieces of a choice.
    fn pieces(&mut self, out: &mut Vec<u8>, index: usize, pieces: &OutputPieces, usage: EventUsage);

    /// Events after the whole answer was sent.
    fn last(&mut self, out: &mut Vec<u8>, usage: UsageShown, end: AnswerEnd);

    /// The last event of a stream that broke off.
    fn error(&mut self, out: &mut Vec<u8>, error: &ApiError);

    /// Bytes that a silent stream sends; they reset the idle timers of proxies. By default a
    /// comment, which clients ignore.
    fn keep_alive(&self) -> &'static [u8] {
        b": keep-alive\n\n"
    }
}

/// The facts that all parts of an answer share.
pub(crate) struct AnswerHead {
    pub(crate) request_id: Arc<str>,
    /// Time of the answer in seconds since 1970.
    pub(crate) created: u64,
    pub(crate) model: Arc<ModelText>,
    pub(crate) warnings: Vec<RequestWarning>,
    pub(crate) facts: AnswerFacts,
}

/// The facts that are known when an answer ends.
pub(crate) struct AnswerEnd {
    pub(crate) counts: TokenCounts,
    /// Durations of the stages, if the client asked for them.
    pub(crate) timing: Option<Value>,
}

/// Token counts in an event before the end of a stream.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum EventUsage {
    /// The client asked for none.
    Hidden,
    /// The last event will have them.
    AtEnd,
    /// The counts so far.
    SoFar(TokenCounts),
}

impl AnswerHead {
    /// Makes the head of an answer that begins now.
    pub(crate) fn new(request_id: Arc<str>, model: Arc<ModelText>, ask: &GenerateRequest) -> Self {
        Self {
            request_id,
            created: unix_now(),
            model,
            warnings: ask.warnings.clone(),
            facts: ask.facts.clone(),
        }
    }
}

/// The text of an answer.
fn json_body(answer: &Value) -> Vec<u8> {
    serde_json::to_vec(answer).expect("a JSON value has a text")
}

/// Current time in seconds since 1970.
pub(crate) fn unix_now() -> u64 {
    SystemTime::now()
        .duration_since(SystemTime::UNIX_EPOCH)
        .unwrap_or_default()
        .as_secs()
}
