//! Traces: one for each request, over the HTTP face, the router, both legs and the transfer between them.
//!
//! Owns: which requests are recorded, the ids of spans, and their way to an OpenTelemetry collector.
//! Never: holds anything up: spans are put together when what they tell is over, and go through a bounded
//! queue that drops, and counts, what it has no room for. Invariant: whether a trace is recorded is decided
//! once, where it begins; without a collector nothing is put together at all.
//!
//! `POST /v1/…` (HTTP face) → `flight` (a sequence) → `attempt` (router) → `prefill` → `transfer.send`, and
//! `decode` → `transfer.receive` (workers).

mod legs;
mod mark;
mod outbox;
mod request;
mod sampler;
mod story;

pub(crate) use legs::Legs;
pub(crate) use mark::Mark;
pub use outbox::TraceError;
pub(crate) use outbox::TraceSeries;
pub use sampler::{SampleError, Sampler};
pub(crate) use story::{Story, Told, Turn, named};

use cleave_api::{RequestSpan, TraceParent};
use opentelemetry::trace::{
    Event, SpanContext, SpanId, SpanKind, Status, TraceFlags, TraceId, TraceState,
};
use opentelemetry::{InstrumentationScope, KeyValue};
use opentelemetry_sdk::trace::{SpanData, SpanEvents, SpanLinks};
use outbox::Outbox;
use std::borrow::Cow;
use std::sync::Arc;
use std::time::SystemTime;

/// Where spans go, and of which requests.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct TraceOptions {
    /// An OpenTelemetry collector's OTLP/gRPC endpoint, `http://host:4317`. Default none: then no trace is
    /// recorded.
    pub endpoint: Option<String>,
    /// Which traces that begin here are recorded. Default all, and of clients' traces those that they
    /// record.
    pub sampler: Sampler,
}

/// The process's hand on its traces. Clones are the same.
#[derive(Clone, Debug, Default)]
pub(crate) struct Traces {
    outbox: Option<Arc<Outbox>>,
    sampler: Sampler,
}

impl Traces {
    /// Sends to the collector of `options`, if it names one. Must be called within a tokio runtime.
    pub(crate) fn to(options: &TraceOptions, series: &TraceSeries) -> Result<Self, TraceError> {
        let outbox = options.endpoint.as_deref();
        let outbox = outbox.map(|endpoint| Outbox::open(endpoint, series));
        Ok(Self {
            outbox: outbox.transpose()?.map(Arc::new),
            sampler: options.sampler,
        })
    }

    /// The span that a request's work belongs to. Without a collector the client's own, for logs.
    pub(crate) fn begin(&self, client: Option<TraceParent>) -> Option<TraceParent> {
        if self.outbox.is_none() {
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

    /// Whether there is a collector.
    pub(crate) fn are_sent(&self) -> bool {
        self.outbox.is_some()
    }

    /// Whether spans of this trace are put together here.
    pub(crate) fn records(&self, trace: Option<TraceParent>) -> bool {
        self.outbox.is_some() && trace.is_some_and(|trace| trace.is_recorded())
    }

    /// A request is over.
    pub(crate) fn tell(&self, request: &RequestSpan) {
        if self.records(Some(request.span)) {
            self.send(request::piece(request));
        }
    }

    pub(crate) fn send(&self, piece: Piece) {
        if let Some(outbox) = &self.outbox {
            outbox.send(piece.finish());
        }
    }

    /// Sends what waits; gives up after a moment if nobody takes it.
    pub(crate) async fn flush(&self) {
        if let Some(outbox) = &self.outbox {
            outbox.flush().await;
        }
    }
}

/// Of a span that begins here; never zero.
fn new_span() -> u64 {
    rand::random::<u64>().max(1)
}

/// A span that is being put together.
#[derive(Clone, Debug)]
pub(crate) struct Piece {
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

impl Piece {
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

    fn put(&mut self, key: &'static str, value: impl Into<opentelemetry::Value>) {
        self.attributes.push(KeyValue::new(key, value));
    }

    fn count(&mut self, key: &'static str, count: impl TryInto<i64>) {
        self.put(key, count.try_into().unwrap_or(i64::MAX));
    }

    fn note(&mut self, name: &'static str, attributes: Vec<KeyValue>) {
        let event = Event::new(name, SystemTime::now(), attributes, 0);
        self.events.push(event);
    }

    /// What broke it, in one word.
    fn fail(&mut self, reason: &'static str) {
        self.put("error.type", reason);
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
            // Another thread's clock may be read a moment earlier.
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
