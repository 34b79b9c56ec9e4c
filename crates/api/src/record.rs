//! What is told of a completion request once it is over: a line in the log, and a span where its trace
//! is recorded.
//!
//! Owns: what both say. Never: text or tokens of a prompt or an answer. Invariant: each request is told
//! once, however it ends.

use crate::answer::Kind;
use crate::error::ApiError;
use crate::frontend::Frontend;
use crate::trace_parent::TraceParent;
use std::sync::Arc;
use std::time::SystemTime;
use tracing::field::display;
use tracing::{debug, warn};

/// One HTTP request, as its span tells it.
#[derive(Clone, Debug, PartialEq)]
pub struct RequestSpan {
    /// The span; its flights' parent.
    pub span: TraceParent,
    /// The client's span that it continues.
    pub client: Option<u64>,
    /// As logs name it.
    pub request_id: Arc<str>,
    /// As it was routed.
    pub route: &'static str,
    /// `chat` or `text_completion`, as OpenTelemetry's conventions call it.
    pub operation: &'static str,
    /// When it came.
    pub began: SystemTime,
    /// When the first token was passed on.
    pub first_token: Option<SystemTime>,
    /// When the last one was, or whatever ended it happened.
    pub ended: SystemTime,
    /// What is served.
    pub model: Option<String>,
    /// Of all its prompts.
    pub prompt_tokens: u64,
    /// Of all its sequences that finished.
    pub output_tokens: u64,
    /// Sequences that it asked for.
    pub sequences: usize,
    /// Why each that finished did: `stop` or `length`.
    pub finish_reasons: Vec<&'static str>,
    /// `completed`, `cancelled`, `refused`, `failed` or `invalid`.
    pub ending: &'static str,
    /// The status that it was answered with; `None` if its client left before.
    pub status: Option<u16>,
    /// The machine-readable reason, where it was answered with an error.
    pub error: Option<&'static str>,
}

/// Gathers it.
pub(crate) struct Record {
    frontend: Arc<dyn Frontend>,
    told: RequestSpan,
    /// What its flights belong to, if anything.
    trace: Option<TraceParent>,
    /// Tokens that came for its sequences so far.
    tokens_received: u64,
}

/// Who asks for what.
pub(crate) struct Asked {
    pub(crate) request_id: Arc<str>,
    pub(crate) kind: Kind,
    /// As its header names it.
    pub(crate) client: Option<TraceParent>,
    /// The span that its work belongs to.
    pub(crate) trace: Option<TraceParent>,
}

impl Record {
    pub(crate) fn begin(frontend: Arc<dyn Frontend>, asked: Asked) -> Self {
        let Asked {
            request_id,
            kind,
            client,
            trace,
        } = asked;
        let began = SystemTime::now();
        Self {
            frontend,
            trace,
            tokens_received: 0,
            told: RequestSpan {
                span: trace.unwrap_or_default(),
                client: client.map(|client| client.span),
                request_id,
                route: kind.route(),
                operation: kind.operation(),
                began,
                first_token: None,
                ended: began,
                model: None,
                prompt_tokens: 0,
                output_tokens: 0,
                sequences: 0,
                finish_reasons: Vec::new(),
                ending: "failed",
                status: None,
                error: None,
            },
        }
    }

    /// What logs, and whoever serves its sequences, know it by.
    pub(crate) fn mark(&self) -> (Arc<str>, Option<TraceParent>) {
        (Arc::clone(&self.told.request_id), self.trace)
    }

    pub(crate) fn submitted(&mut self, model: &str, prompt_tokens: u64, sequences: usize) {
        if self.is_recorded() {
            self.told.model = Some(model.to_owned());
        }
        self.told.prompt_tokens = prompt_tokens;
        self.told.sequences = sequences;
    }

    pub(crate) fn first_token(&mut self) {
        if self.is_recorded() {
            self.told.first_token.get_or_insert_with(SystemTime::now);
        }
    }

    /// A token came for one of its sequences.
    pub(crate) fn token(&mut self) {
        self.tokens_received += 1;
    }

    pub(crate) fn finished(&mut self, reason: &'static str, output_tokens: u32) {
        self.told.output_tokens += u64::from(output_tokens);
        if self.is_recorded() {
            self.told.finish_reasons.push(reason);
        }
    }

    pub(crate) fn failed(&mut self, error: &ApiError) {
        self.told.status = Some(error.status().as_u16());
        self.told.error = error.code();
    }

    /// It is over; said once.
    pub(crate) fn end(&mut self, ending: &'static str) {
        // Sequences that were broken off never said how many they had.
        self.told.output_tokens = self.told.output_tokens.max(self.tokens_received);
        let RequestSpan {
            request_id,
            route,
            prompt_tokens,
            output_tokens,
            ..
        } = &self.told;
        let trace_id = self.trace.map(display);
        let reason = self.told.error;
        match ending {
            "failed" => {
                warn!(%request_id, trace_id, route, ending, reason, prompt_tokens, output_tokens, "request over");
            }
            _ => {
                debug!(%request_id, trace_id, route, ending, reason, prompt_tokens, output_tokens, "request over");
            }
        }
        if self.is_recorded() {
            self.told.ended = SystemTime::now();
            self.told.ending = ending;
            if ending == "completed" {
                self.told.status = Some(200);
            }
            self.frontend.end_span(self.told.clone());
        }
    }

    fn is_recorded(&self) -> bool {
        self.trace.is_some_and(|trace| trace.is_recorded())
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::{CommandError, FlightStream, Operator, Readiness, WorkerCommand, WorkerView};
    use cleave_domain::Request;

    struct Nobody;

    impl Frontend for Nobody {
        fn submit(&self, _: Request) -> FlightStream {
            Box::pin(futures::stream::empty())
        }

        fn readiness(&self) -> Readiness {
            Readiness::Ready
        }

        fn metrics(&self) -> String {
            String::new()
        }
    }

    impl Operator for Nobody {
        fn workers(&self) -> Vec<WorkerView> {
            Vec::new()
        }

        fn command(&self, _: &str, _: WorkerCommand) -> Result<WorkerView, CommandError> {
            Err(CommandError::Stopped)
        }
    }

    #[test]
    fn a_stream_that_is_cut_is_logged_with_the_tokens_it_had() {
        let asked = || Asked {
            request_id: "r".into(),
            kind: Kind::Completion,
            client: None,
            trace: None,
        };
        let begin = || Record::begin(Arc::new(Nobody), asked());
        let mut cut = begin();
        (0..3).for_each(|_| cut.token());
        cut.end("failed");
        assert_eq!(cut.told.output_tokens, 3);
        let mut whole = begin();
        (0..3).for_each(|_| whole.token());
        whole.finished("stop", 3);
        whole.end("completed");
        assert_eq!(whole.told.output_tokens, 3);
    }
}
