//! The JSON of answers.
//!
//! Owns: OpenAI's shapes, whole and in chunks. Never: decides what is in them.
//! Invariant: the chunks of a stream, put together, are the whole answer.

mod chunk;
mod scores;
mod sse;

pub(crate) use sse::{Live, stream};

use crate::ask::{UsageShown, Warning};
use crate::choice::{Delta, Finish, StopCause};
use crate::flights::{Counts, Flights};
use crate::model::ModelText;
use crate::timing::TimingShown;
use serde_json::{Map, Value, json};
use std::sync::Arc;
use std::time::SystemTime;

/// Which endpoint answers.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Kind {
    Chat,
    Completion,
}

impl Kind {
    /// Where it is asked.
    pub(crate) fn route(self) -> &'static str {
        match self {
            Self::Chat => "/v1/chat/completions",
            Self::Completion => "/v1/completions",
        }
    }

    /// As OpenTelemetry's conventions for generative models call it.
    pub(crate) fn operation(self) -> &'static str {
        match self {
            Self::Chat => "chat",
            Self::Completion => "text_completion",
        }
    }
}

/// What all parts of an answer have in common.
#[derive(Clone)]
pub(crate) struct Frame {
    pub(crate) kind: Kind,
    pub(crate) id: String,
    pub(crate) created: u64,
    pub(crate) model: Arc<ModelText>,
    pub(crate) warnings: Vec<Warning>,
}

/// Seconds since 1970.
pub(crate) fn unix_now() -> u64 {
    SystemTime::now()
        .duration_since(SystemTime::UNIX_EPOCH)
        .unwrap_or_default()
        .as_secs()
}

impl Frame {
    pub(crate) fn new(
        kind: Kind,
        request_id: &str,
        model: Arc<ModelText>,
        warnings: Vec<Warning>,
    ) -> Self {
        let prefix = match kind {
            Kind::Chat => "chatcmpl",
            Kind::Completion => "cmpl",
        };
        Self {
            kind,
            id: format!("{prefix}-{request_id}"),
            created: unix_now(),
            model,
            warnings,
        }
    }

    /// The answer in one piece.
    pub(crate) fn whole(&self, deltas: Vec<Delta>, counts: Counts) -> Value {
        let choices = deltas.into_iter().enumerate().map(|(index, delta)| {
            let mut choice = Map::new();
            choice.insert("index".into(), index.into());
            match self.kind {
                Kind::Chat => choice.insert(
                    "message".into(),
                    json!({"role": "assistant", "content": delta.text, "refusal": null}),
                ),
                Kind::Completion => choice.insert("text".into(), delta.text.as_str().into()),
            };
            choice.insert("logprobs".into(), self.scores(&delta));
            finish(&mut choice, delta.finish.as_ref());
            Value::Object(choice)
        });
        let object = match self.kind {
            Kind::Chat => "chat.completion",
            Kind::Completion => "text_completion",
        };
        let mut answer = self.envelope(object, choices.collect());
        answer.insert("usage".into(), usage(counts));
        if !self.warnings.is_empty() {
            answer.insert("warnings".into(), json!(self.warnings));
        }
        Value::Object(answer)
    }

    /// The first chunk of a chat choice: who speaks.
    fn opening(&self, index: usize) -> Map<String, Value> {
        let delta = json!({"role": "assistant", "content": ""});
        self.chunk(json!([{
            "index": index, "delta": delta, "logprobs": null, "finish_reason": null,
        }]))
    }

    /// The last chunk, if token counts or times were asked for.
    fn closing(
        &self,
        flights: &Flights,
        (counts, timing): (UsageShown, TimingShown),
    ) -> Map<String, Value> {
        let mut chunk = self.chunk(json!([]));
        if counts != UsageShown::Never {
            chunk.insert("usage".into(), usage(flights.counts()));
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
            Kind::Chat => "chat.completion.chunk",
            Kind::Completion => "text_completion",
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

    fn scores(&self, delta: &Delta) -> Value {
        match self.kind {
            _ if delta.scores.is_empty() => Value::Null,
            Kind::Chat => scores::chat(&delta.scores, &self.model),
            Kind::Completion => scores::completion(&delta.scores, &self.model),
        }
    }
}

/// `stop_reason` is vLLM's: what of the client's own stops was met.
fn finish(choice: &mut Map<String, Value>, finish: Option<&Finish>) {
    let cause = match finish.map(|finish| &finish.cause) {
        None | Some(StopCause::Own) => Value::Null,
        Some(StopCause::Text(text)) => text.as_str().into(),
        Some(StopCause::Token(token)) => (*token).into(),
    };
    choice.insert(
        "finish_reason".into(),
        finish.map_or(Value::Null, |finish| finish.reason.into()),
    );
    choice.insert("stop_reason".into(), cause);
}

pub(crate) fn usage(counts: Counts) -> Value {
    let Counts {
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
