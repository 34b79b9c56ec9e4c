//! Traces: one for each request, over the HTTP server, the router, both legs and the transfer
//! between them.
//!
//! Owns: which requests are recorded, the ids of spans, and their way to an OpenTelemetry
//! collector. Never delays anything: a span is built when its work is over, and goes through a
//! bounded queue that drops, and counts, spans beyond its limit. Invariant: whether a trace is
//! recorded is decided once, where it begins; without a collector no span is built.
//!
//! `POST /v1/…` (HTTP server) → `flight` (a sequence) → `attempt` (router) → `prefill` →
//! `transfer.send`, and `decode` → `transfer.receive` (workers).

mod flight_span;
mod request_context;
mod request_span;
mod sampler;
mod service;
mod span_queue;
mod worker_spans;

pub use flight_span::{AttemptChange, FlightOutcome, FlightSpan, log_ids};
pub use request_context::RequestContext;
pub use sampler::{TraceSampler, TraceSamplerError};
pub use service::ServiceProcess;
pub(crate) use span_queue::TraceSeries;
pub use worker_spans::WorkerSpans;

use crate::error::TelemetryError;
use cleave_api::{RequestSpan, TraceParent};
use opentelemetry::trace::{
    Event, SpanContext, SpanId, SpanKind, Status, TraceFlags, TraceId, TraceState,
};
use opentelemetry::{InstrumentationScope, KeyValue};
use opentelemetry_sdk::trace::{SpanData, SpanEvents, SpanLinks};
use span_queue::SpanQueue;
use std::borrow::Cow;
use std::path::PathBuf;
use std::sync::Arc;
use std::time::SystemTime;

/// The collector of spans, and the requests that are recorded.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct TraceOptions {
    /// An OpenTelemetry collector's OTLP/gRPC endpoint, `http://host:4317` or `https://host:4317`.
    /// Default none: then no trace is recorded.
    pub endpoint: Option<String>,
    /// The scheme of an endpoint without one.
    pub default_scheme: OtlpScheme,
    /// A PEM file of authorities that may sign the collector's certificate. Default: the system's.
    pub certificate: Option<PathBuf>,
    /// The sampler of traces that begin here. Default: all, and of clients' traces those that the
    /// clients record.
    pub sampler: TraceSampler,
}

/// The scheme of an endpoint that has none, as OpenTelemetry's specification names it.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum OtlpScheme {
    #[default]
    Https,
    /// Where `OTEL_EXPORTER_OTLP_INSECURE` is `true`.
    Http,
}

/// The process's traces. Clones share one queue.
#[derive(Clone, Debug, Default)]
pub struct Traces {
    queue: Option<Arc<SpanQueue>>,
    sampler: TraceSampler,
}

impl Traces {
    /// Sends spans of this process to the collector of `options`, if it names one. Must be called
    /// within a tokio runtime.
    pub(crate) fn to(
        options: &TraceOptions,
        service: &ServiceProcess,
        series: &TraceSeries,
    ) -> Result<Self, TelemetryError> {
        let outbox = SpanQueue::open(options, service, series)?;
        Ok(Self {
            queue: outbox.map(Arc::new),
            sampler: options.sampler,
        })
    }

    /// The span for a request's work. Without a collector it is the client's own span, for logs.
    pub fn begin(&self, client: Option<TraceParent>) -> Option<TraceParent> {
        if self.queue.is_none() {
            return client;
        }
        let trace = client.map_or_else(rand::random, |client| client.trace);
        let recorded = self.sampler.records(trace, client);
        Some(TraceParent {
            trace,
            span: new_span(),
            flags: u8::from(recorded),
        })
    }

    /// Whether spans of this trace are built here.
    pub fn records(&self, trace: Option<TraceParent>) -> bool {
        self.queue.is_some() && trace.is_some_and(|trace| trace.is_recorded())
    }

    /// Sends the span of a request that is over.
    pub fn send_request_span(&self, request: &RequestSpan) {
        if self.records(Some(request.span)) {
            self.send(request_span::request_span(request));
        }
    }

    pub(crate) fn send(&self, builder: SpanBuilder) {
        if let Some(outbox) = &self.queue {
            outbox.send(builder.finish());
        }
    }

    /// Sends all queued spans; gives up after a moment if the collector does not take them.
    pub async fn flush(&self) {
        if let Some(outbox) = &self.queue {
            outbox.flush().await;
        }
    }
}

/// The id of a new span; never zero.
fn new_span() -> u64 {
    rand::random::<u64>().max(1)
}

/// A span that is being built.
#[derive(Clone, Debug)]
pub(crate) struct SpanBuilder {
    name: Cow<'static, str>,
    kind: SpanKind,
    /// Its trace and its own id.
    span: TraceParent,
    parent: Option<u64>,
    began: SystemTime,
    ended: SystemTime,
    attributes: Vec<KeyValue>,
    events: Vec<Event>,
    status: Status,
}

impl SpanBuilder {
    /// A child of `parent`.
    fn under(parent: TraceParent, name: &'static str, began: SystemTime) -> Self {
        let span = TraceParent {
            span: new_span(),
            ..parent
        };
        Self {
            name: name.into(),
            kind: SpanKind::Internal,
            span,
            parent: Some(parent.span),
            began,
            ended: began,
            attributes: Vec::new(),
            events: Vec::new(),
            status: Status::Unset,
        }
    }

    fn set(&mut self, key: &'static str, value: impl Into<opentelemetry::Value>) {
        self.attributes.push(KeyValue::new(key, value));
    }

    fn set_count(&mut self, key: &'static str, count: impl TryInto<i64>) {
        self.set(key, count.try_into().unwrap_or(i64::MAX));
    }

    fn add_event(&mut self, name: &'static str, attributes: Vec<KeyValue>) {
        let event = Event::new(name, SystemTime::now(), attributes, 0);
        self.events.push(event);
    }

    /// Marks the span as failed, with a one-word reason.
    fn fail(&mut self, reason: &'static str) {
        self.set("error.type", reason);
        self.status = Status::error(reason);
    }

    fn finish(self) -> SpanData {
        let mut events = SpanEvents::default();
        events.events = self.events;
        SpanData {
            span_context: SpanContext::new(
                TraceId::from_bytes(self.span.trace.to_be_bytes()),
                SpanId::from_bytes(self.span.span.to_be_bytes()),
                TraceFlags::SAMPLED,
                false,
                TraceState::NONE,
            ),
            parent_span_id: SpanId::from_bytes(self.parent.unwrap_or(0).to_be_bytes()),
            parent_span_is_remote: self.parent.is_some() && self.kind == SpanKind::Server,
            span_kind: self.kind,
            name: self.name,
            start_time: self.began,
            // Another thread may read the clock a moment earlier.
            end_time: self.ended.max(self.began),
            attributes: self.attributes,
            dropped_attributes_count: 0,
            events,
            links: SpanLinks::default(),
            status: self.status,
            instrumentation_scope: InstrumentationScope::builder("cleave")
                .with_version(env!("CARGO_PKG_VERSION"))
                .build(),
        }
    }
}
