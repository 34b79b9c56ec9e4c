//! The record of a completion request: a log line at its end, and a span if its trace is recorded.
//!
//! Owns: the contents of both. Never: text or tokens of a prompt or an answer. Invariant: each
//! request is recorded once, however it ends.

use crate::error::ApiError;
use crate::frontend::Frontend;
use crate::surface::Surface;
use crate::trace_parent::TraceParent;
use std::sync::Arc;
use std::time::SystemTime;
use tracing::field::display;
use tracing::{debug, warn};

/// The span of one HTTP request.
#[derive(Clone, Debug, PartialEq)]
pub struct RequestSpan {
    /// This span, which is the parent of the spans of its flights.
    pub span: TraceParent,
    /// Id of the client's span, if the client sent one.
    pub client: Option<u64>,
    /// Id of the request, as in logs.
    pub request_id: Arc<str>,
    pub route: &'static str,
    /// `chat` or `text_completion`, as in OpenTelemetry's conventions for generative models.
    pub operation: &'static str,
    pub began: SystemTime,
    /// Time at which the first token was sent to the client.
    pub first_token: Option<SystemTime>,
    /// Time at which the request ended.
    pub ended: SystemTime,
    /// Name of the served model.
    pub model: Option<String>,
    /// Tokens of all its prompts.
    pub prompt_tokens: u64,
    /// Tokens of all its sequences that finished.
    pub output_tokens: u64,
    /// Number of sequences that the request asked for.
    pub sequences: usize,
    /// Finish reason of each finished sequence: `stop` or `length`.
    pub finish_reasons: Vec<&'static str>,
    /// `completed`, `cancelled`, `refused`, `failed` or `invalid`.
    pub ending: &'static str,
    /// HTTP status of the answer; `None` if the client left before it.
    pub status: Option<u16>,
    /// Machine-readable error code, if the answer was an error.
    pub error: Option<&'static str>,
}

/// Collects the data of one request until its end.
pub(crate) struct RequestRecord {
    frontend: Arc<dyn Frontend>,
    surface: &'static dyn Surface,
    span: RequestSpan,
    /// The trace context that the request's flights belong to, if any.
    trace: Option<TraceParent>,
    /// Tokens received so far for its sequences.
    tokens_received: u64,
}

/// Identity of a request: its id, its API and its trace.
pub(crate) struct RequestMeta {
    pub(crate) request_id: Arc<str>,
    pub(crate) surface: &'static dyn Surface,
    /// The client's trace context, from its header.
    pub(crate) client: Option<TraceParent>,
    /// The span that the request's work belongs to.
    pub(crate) trace: Option<TraceParent>,
}

impl RequestRecord {
    pub(crate) fn begin(frontend: Arc<dyn Frontend>, meta: RequestMeta) -> Self {
        let RequestMeta {
            request_id,
            surface,
            client,
            trace,
        } = meta;
        let began = SystemTime::now();
        Self {
            frontend,
            surface,
            trace,
            tokens_received: 0,
            span: RequestSpan {
                span: trace.unwrap_or_default(),
                client: client.map(|client| client.span),
                request_id,
                route: surface.route(),
                operation: surface.operation(),
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

    /// Returns the request id and the trace context, for logs and for the flights.
    pub(crate) fn ids(&self) -> (Arc<str>, Option<TraceParent>) {
        (Arc::clone(&self.span.request_id), self.trace)
    }

    pub(crate) fn submitted(&mut self, model: &str, prompt_tokens: u64, sequences: usize) {
        if self.is_recorded() {
            self.span.model = Some(model.to_owned());
        }
        self.span.prompt_tokens = prompt_tokens;
        self.span.sequences = sequences;
    }

    pub(crate) fn first_token(&mut self) {
        if self.is_recorded() {
            self.span.first_token.get_or_insert_with(SystemTime::now);
        }
    }

    /// Counts a token of one of its sequences.
    pub(crate) fn token(&mut self) {
        self.tokens_received += 1;
    }

    pub(crate) fn finished(&mut self, reason: &'static str, output_tokens: u32) {
        self.span.output_tokens += u64::from(output_tokens);
        if self.is_recorded() {
            self.span.finish_reasons.push(reason);
        }
    }

    pub(crate) fn failed(&mut self, error: &ApiError) {
        self.span.status = Some(self.surface.error_status(error).as_u16());
        self.span.error = error.code();
    }

    /// Writes the log line and the span. Called once.
    pub(crate) fn end(&mut self, ending: &'static str) {
        // Sequences that were broken off never reported their token counts.
        self.span.output_tokens = self.span.output_tokens.max(self.tokens_received);
        let RequestSpan {
            request_id,
            route,
            prompt_tokens,
            output_tokens,
            ..
        } = &self.span;
        let trace_id = self.trace.map(display);
        let reason = self.span.error;
        match ending {
            "failed" => {
                warn!(%request_id, trace_id, route, ending, reason, prompt_tokens, output_tokens, "request over");
            }
            _ => {
                debug!(%request_id, trace_id, route, ending, reason, prompt_tokens, output_tokens, "request over");
            }
        }
        if self.is_recorded() {
            self.span.ended = SystemTime::now();
            self.span.ending = ending;
            if ending == "completed" {
                self.span.status = Some(200);
            }
            self.frontend.end_span(self.span.clone());
        }
    }

    fn is_recorded(&self) -> bool {
        self.trace.is_some_and(|trace| trace.is_recorded())
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::fuzzing::EchoFrontend;

    #[test]
    fn a_broken_stream_records_the_tokens_it_received() {
        let meta = || RequestMeta {
            request_id: "r".into(),
            surface: crate::surface::SURFACES[1],
            client: None,
            trace: None,
        };
        let begin = || RequestRecord::begin(Arc::new(EchoFrontend), meta());
        let mut cut = begin();
        (0..3).for_each(|_| cut.token());
        cut.end("failed");
        assert_eq!(cut.span.output_tokens, 3);
        let mut whole = begin();
        (0..3).for_each(|_| whole.token());
        whole.finished("stop", 3);
        whole.end("completed");
        assert_eq!(whole.span.output_tokens, 3);
    }
}
