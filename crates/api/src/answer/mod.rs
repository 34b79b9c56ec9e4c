//! The JSON of answers.
//!
//! Owns: OpenAI's shapes, whole and in chunks. Never: decides their contents. Invariant: the chunks
//! of a stream, put together, are the whole answer.

mod chunk;
mod scores;
mod sse;

pub(crate) use sse::{StreamSetup, stream};

use crate::choice::{ChoiceDelta, ChoiceFinish, StopCause};
use crate::flights::{AnswerFlights, TokenCounts};
use crate::request::{RequestWarning, UsageShown};
use crate::timing::TimingShown;
use cleave_text::ModelText;
use serde_json::{Map, Value, json};
use std::sync::Arc;
use std::time::SystemTime;

/// The endpoint that answers.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum CompletionKind {
    Chat,
    Completion,
}

impl CompletionKind {
    pub(crate) fn route(self) -> &'static str {
        match self {
            Self::Chat => "/v1/chat/completions",
            Self::Completion => "/v1/completions",
        }
    }

    /// Name in OpenTelemetry's conventions for generative models.
    pub(crate) fn operation(self) -> &'static str {
        match self {
            Self::Chat => "chat",
            Self::Completion => "text_completion",
        }
    }
}

/// The fields that all parts of an answer share.
#[derive(Clone)]
pub(crate) struct AnswerEnvelope {
    pub(crate) kind: CompletionKind,
    pub(crate) id: String,
    pub(crate) created: u64,
    pub(crate) model: Arc<ModelText>,
    pub(crate) warnings: Vec<RequestWarning>,
}

/// Current time in seconds since 1970.
pub(crate) fn unix_now() -> u64 {
    SystemTime::now()
        .duration_since(SystemTime::UNIX_EPOCH)
        .unwrap_or_default()
        .as_secs()
}

impl AnswerEnvelope {
    pub(crate) fn new(
        kind: CompletionKind,
        request_id: &str,
        model: Arc<ModelText>,
        warnings: Vec<RequestWarning>,
    ) -> Self {
        let prefix = match kind {
            CompletionKind::Chat => "chatcmpl",
            CompletionKind::Completion => "cmpl",
        };
        Self {
            kind,
            id: format!("{prefix}-{request_id}"),
            created: unix_now(),
            model,
            warnings,
        }
    }

    /// Builds the answer in one piece.
    pub(crate) fn complete(&self, deltas: Vec<ChoiceDelta>, counts: TokenCounts) -> Value {
        let choices = deltas.into_iter().enumerate().map(|(index, delta)| {
            let mut choice = Map::new();
            choice.insert("index".into(), index.into());
            match self.kind {
                CompletionKind::Chat => choice.insert(
                    "message".into(),
                    json!({"role": "assistant", "content": delta.text, "refusal": null}),
                ),
                CompletionKind::Completion => {
                    choice.insert("text".into(), delta.text.as_str().into())
                }
            };
            choice.insert("logprobs".into(), self.scores(&delta));
            insert_finish(&mut choice, delta.finish.as_ref());
            Value::Object(choice)
        });
        let object = match self.kind {
            CompletionKind::Chat => "chat.completion",
            CompletionKind::Completion => "text_completion",
        };
        let mut answer = self.envelope(object, choices.collect());
        answer.insert("usage".into(), usage_json(counts));
        if !self.warnings.is_empty() {
            answer.insert("warnings".into(), json!(self.warnings));
        }
        Value::Object(answer)
    }

    /// Builds the first chunk of a chat choice, which names the role.
    fn role_chunk(&self, index: usize) -> Map<String, Value> {
        let delta = json!({"role": "assistant", "content": ""});
        self.chunk(json!([{
            "index": index, "delta": delta, "logprobs": null, "finish_reason": null,
        }]))
    }

    /// Builds the last chunk, if token counts or timing were asked for.
    fn usage_chunk(
        &self,
        flights: &AnswerFlights,
        usage: UsageShown,
        timing: TimingShown,
    ) -> Map<String, Value> {
        let mut chunk = self.chunk(json!([]));
        if usage != UsageShown::Never {
            chunk.insert("usage".into(), usage_json(flights.counts()));
        }
        if timing == TimingShown::Asked {
            chunk.insert("timing".into(), flights.timing().object());
        }
        chunk
    }

    fn chunk(&self, choices: Value) -> Map<String, Value> {
        self.envelope(self.chunk_object(), choices)
    }

    fn chunk_object(&self) -> &'static str {
        match self.kind {
            CompletionKind::Chat => "chat.completion.chunk",
            CompletionKind::Completion => "text_completion",
        }
    }

    fn envelope(&self, object: &str, choices: Value) -> Map<String, Value> {
        let mut map = Map::new();
        map.insert("id".into(), self.id.as_str().into());
        map.insert("object".into(), object.into());
        map.insert("created".into(), self.created.into());
        map.insert("model".into(), self.model.name().into());
        map.insert("choices".into(), choices);
        map
    }

    fn scores(&self, delta: &ChoiceDelta) -> Value {
        match self.kind {
            _ if delta.scores.is_empty() => Value::Null,
            CompletionKind::Chat => scores::chat(&delta.scores, &self.model),
            CompletionKind::Completion => scores::completion(&delta.scores, &self.model),
        }
    }
}

/// `stop_reason` is vLLM's field: the client's own stop condition that was met.
fn insert_finish(choice: &mut Map<String, Value>, finish: Option<&ChoiceFinish>) {
    let cause = match finish.map(|finish| &finish.cause) {
        None | Some(StopCause::EosOrLength) => Value::Null,
        Some(StopCause::Text(text)) => text.as_str().into(),
        Some(StopCause::Token(token)) => (*token).into(),
    };
    choice.insert(
        "finish_reason".into(),
        finish.map_or(Value::Null, |finish| finish.reason.into()),
    );
    choice.insert("stop_reason".into(), cause);
}

pub(crate) fn usage_json(counts: TokenCounts) -> Value {
    let TokenCounts {
        prompt_tokens,
        output_tokens,
        cached_tokens,
    } = counts;
    let details = cached_tokens.map(|cached_tokens| json!({"cached_tokens": cached_tokens}));
    json!({
        "prompt_tokens": prompt_tokens,
        "completion_tokens": output_tokens,
        "total_tokens": prompt_tokens + output_tokens,
        "prompt_tokens_details": details,
    })
}
