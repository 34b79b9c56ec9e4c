//! The record of a completion request: its part of the log line, and a span if its trace is
//! recorded.
//!
//! Owns: the contents of both. Never: text or tokens of a prompt or an answer. Invariant: each
//! request is recorded once, however it ends.

use crate::access_line::{AccessLine, RequestWork};
use crate::error::ApiError;
use crate::frontend::{Frontend, ServingWorkers};
use crate::surface::Surface;
use crate::trace_parent::TraceParent;
use std::sync::Arc;
use std::time::{Duration, SystemTime};

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
    line: AccessLine,
    /// The class whose targets count, once it is known.
    class: Option<String>,
    /// Prompt tokens that came from a prefix cache.
    cached_tokens: u64,
    /// Tokens received so far for its sequences.
    tokens_received: u64,
}

/// Latencies of a request, as far as it came.
#[derive(Clone, Copy, Debug, Default)]
pub(crate) struct RequestLatencies {
    /// From the arrival of the request to its first token.
    pub(crate) ttft: Option<Duration>,
    /// The mean gap between tokens of a sequence.
    pub(crate) tpot: Option<Duration>,
}

/// Identity of a request: its id, its API and its trace.
pub(crate) struct RequestMeta {
    pub(crate) request_id: Arc<str>,
    pub(crate) surface: &'static dyn Surface,
    /// The client's trace context, from its header.
    pub(crate) client: Option<TraceParent>,
    /// The span that the request's work belongs to.
    pub(crate) trace: Option<TraceParent>,
    pub(crate) line: AccessLine,
}

impl RequestRecord {
    pub(crate) fn begin(frontend: Arc<dyn Frontend>, meta: RequestMeta) -> Self {
        let RequestMeta {
            request_id,
            surface,
            client,
            trace,
            line,
        } = meta;
        let began = SystemTime::now();
        Self {
            frontend,
            surface,
            trace,
            line,
            class: None,
            cached_tokens: 0,
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

    /// The list for the names of the workers that serve it.
    pub(crate) fn workers(&self) -> ServingWorkers {
        self.line.workers()
    }

    pub(crate) fn submitted(
        &mut self,
        model: &str,
        class: &str,
        prompt_tokens: u64,
        sequences: usize,
    ) {
        self.span.model = Some(model.to_owned());
        self.class = (!class.is_empty()).then(|| class.to_owned());
        self.span.prompt_tokens = prompt_tokens;
        self.span.sequences = sequences;
    }

    pub(crate) fn first_token(&mut self) {
        if self.is_recorded() {
            self.span.first_token.get_or_insert_with(SystemTime::now);
        }
    }

    /// Counts tokens of one of its prompts that came from a prefix cache.
    pub(crate) fn cached(&mut self, tokens: u32) {
        self.cached_tokens += u64::from(tokens);
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
        self.line.set_error(error);
    }

    /// Fills in the log line, and sends the span. Called once.
    pub(crate) fn end(&mut self, ending: &'static str, latencies: RequestLatencies) {
        // Sequences that were broken off never reported their token counts.
        self.span.output_tokens = self.span.output_tokens.max(self.tokens_received);
        let RequestLatencies { ttft, tpot } = latencies;
        self.line.set_work(RequestWork {
            ending,
            model: self.span.model.clone(),
            class: self.class.take(),
            sequences: self.span.sequences,
            prompt_tokens: self.span.prompt_tokens,
            cached_tokens: self.cached_tokens,
            output_tokens: self.span.output_tokens,
            ttft,
            tpot,
        });
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
    use crate::access_line::{AccessLog, RequestHead};
    use crate::app::PromptLog;
    use crate::fuzzing::EchoFrontend;
    use axum::http::Method;

    #[test]
    fn a_broken_stream_records_the_tokens_it_received() {
        let meta = || RequestMeta {
            request_id: "r".into(),
            surface: crate::surface::SURFACES[1],
            client: None,
            trace: None,
            line: AccessLine::begin(
                RequestHead {
                    method: Method::POST,
                    path: "/v1/chat/completions".to_owned(),
                    request_id: "r".into(),
                    trace: None,
                },
                AccessLog::Off,
                PromptLog::Hidden,
            ),
        };
        let begin = || RequestRecord::begin(Arc::new(EchoFrontend), meta());
        let mut cut = begin();
        (0..3).for_each(|_| cut.token());
        cut.end("failed", RequestLatencies::default());
        assert_eq!(cut.span.output_tokens, 3);
        let mut whole = begin();
        (0..3).for_each(|_| whole.token());
        whole.finished("stop", 3);
        whole.end("completed", RequestLatencies::default());
        assert_eq!(whole.span.output_tokens, 3);
    }
}
