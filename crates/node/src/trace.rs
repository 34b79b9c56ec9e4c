//! Traces: one span per flight with a span for each leg, sent to an OpenTelemetry collector. They are part
//! of the client's trace if it named one.
//!
//! Never: holds anything up: spans are made when a flight has ended, and a collector that is away
//! loses them. Without an endpoint nothing is made at all.

use crate::NodeError;
use cleave_api::TraceParent;
use cleave_domain::{Ending, FlightId, Usage, WorkerRef};
use opentelemetry::trace::{
    Event, Span, SpanBuilder, SpanContext, SpanId, Status, TraceContextExt, TraceFlags, TraceId,
    TraceState, TracerProvider,
};
use opentelemetry::{Context, KeyValue};
use opentelemetry_otlp::{SpanExporter, WithExportConfig};
use opentelemetry_sdk::Resource;
use opentelemetry_sdk::trace::SdkTracerProvider;
use std::time::{Duration, SystemTime};
use tracing::warn;

/// Where spans go, if anywhere.
#[derive(Clone, Debug, Default)]
pub(crate) struct Traces {
    provider: Option<SdkTracerProvider>,
}

/// A flight as its trace tells it.
#[derive(Clone, Debug)]
pub(crate) struct Story {
    parent: Option<TraceParent>,
    submitted: SystemTime,
    first_token: Option<SystemTime>,
    /// Of the last attempt.
    legs: Option<(WorkerRef, WorkerRef)>,
    attempts: u32,
    /// Where another attempt took over in mid-stream.
    turns: Vec<Event>,
}

/// How a stream came to another attempt.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Turn {
    /// The attempt before was over, and its tokens were computed again.
    Resumed,
    /// The running sequence moved.
    Migrated,
}

impl Turn {
    pub(crate) fn name(self) -> &'static str {
        match self {
            Self::Resumed => "resumed",
            Self::Migrated => "migrated",
        }
    }
}

impl Story {
    pub(crate) fn begin(parent: Option<TraceParent>) -> Self {
        Self {
            parent,
            submitted: SystemTime::now(),
            first_token: None,
            legs: None,
            attempts: 0,
            turns: Vec::new(),
        }
    }

    pub(crate) fn placed(&mut self, prefill: WorkerRef, decode: WorkerRef) {
        self.legs = Some((prefill, decode));
        self.attempts += 1;
    }

    /// The running sequence is to go on there.
    pub(crate) fn moving(&mut self, to: WorkerRef) {
        if let Some((_, decode)) = &mut self.legs {
            *decode = to;
        }
        self.attempts += 1;
    }

    /// An attempt took over after so many tokens, and its client waited for so long.
    pub(crate) fn turned(&mut self, turn: Turn, (attempt, tokens, pause): (u32, usize, Duration)) {
        let attributes = vec![
            KeyValue::new("cleave.attempt", i64::from(attempt)),
            KeyValue::new("cleave.tokens", i64::try_from(tokens).unwrap_or(i64::MAX)),
            KeyValue::new("cleave.pause_seconds", pause.as_secs_f64()),
        ];
        let event = Event::new(turn.name(), SystemTime::now(), attributes, 0);
        self.turns.push(event);
    }

    pub(crate) fn token(&mut self) {
        self.first_token.get_or_insert_with(SystemTime::now);
    }
}

impl Traces {
    /// Sends spans to the collector at `endpoint` (`http://host:4317`, OTLP over gRPC). Must be
    /// called within a tokio runtime.
    pub(crate) fn to(endpoint: Option<&str>) -> Result<Self, NodeError> {
        let Some(endpoint) = endpoint else {
            return Ok(Self::default());
        };
        let exporter = SpanExporter::builder()
            .with_tonic()
            .with_endpoint(endpoint)
            .build();
        let exporter =
            exporter.map_err(|error| NodeError::Traces(endpoint.to_owned(), error.to_string()))?;
        let provider = SdkTracerProvider::builder()
            .with_batch_exporter(exporter)
            .with_resource(Resource::builder().with_service_name("cleave").build());
        Ok(Self {
            provider: Some(provider.build()),
        })
    }

    /// Tells of a flight that has ended.
    pub(crate) fn tell(&self, flight: FlightId, story: &Story, (ending, usage): (&Ending, Usage)) {
        let Some(provider) = &self.provider else {
            return;
        };
        let tracer = provider.tracer("cleave");
        let now = SystemTime::now();
        let attributes = [
            KeyValue::new("cleave.flight", flight.to_string()),
            KeyValue::new("cleave.attempts", i64::from(story.attempts)),
            KeyValue::new("gen_ai.usage.input_tokens", i64::from(usage.prompt_tokens)),
            KeyValue::new("gen_ai.usage.output_tokens", i64::from(usage.output_tokens)),
            KeyValue::new("cleave.cached_tokens", i64::from(usage.cached_tokens)),
            KeyValue::new("cleave.ending", format!("{ending:?}")),
        ];
        let mut span = SpanBuilder::from_name("flight")
            .with_start_time(story.submitted)
            .with_attributes(attributes)
            .with_events(story.turns.clone())
            .start_with_context(&tracer, &asked_by(story.parent));
        if let Ending::Failed(failure) = ending {
            span.set_status(Status::error(format!("{failure:?}")));
        }
        let parent = Context::new().with_span(span);
        if let Some((prefill, decode)) = story.legs {
            let handed_on = story.first_token.unwrap_or(now);
            let legs = [
                ("prefill", prefill, story.submitted, handed_on),
                ("decode", decode, handed_on, now),
            ];
            for (name, worker, start, end) in legs {
                let mut leg = SpanBuilder::from_name(name)
                    .with_start_time(start)
                    .with_attributes([KeyValue::new("cleave.worker", worker.to_string())])
                    .start_with_context(&tracer, &parent);
                leg.end_with_timestamp(end);
            }
        }
        parent.span().end_with_timestamp(now);
    }

    /// Sends what is left.
    pub(crate) async fn close(self) {
        let Some(provider) = self.provider else {
            return;
        };
        let closed = tokio::task::spawn_blocking(move || provider.shutdown()).await;
        if let Ok(Err(error)) = closed {
            warn!(%error, "the last traces are lost");
        }
    }
}

/// The client's span, so that whether it records decides whether we do.
fn asked_by(parent: Option<TraceParent>) -> Context {
    let Some(TraceParent { trace, span, flags }) = parent else {
        return Context::new();
    };
    let client = SpanContext::new(
        TraceId::from_bytes(trace.to_be_bytes()),
        SpanId::from_bytes(span.to_be_bytes()),
        TraceFlags::new(flags),
        true,
        TraceState::NONE,
    );
    Context::new().with_remote_span_context(client)
}

#[cfg(test)]
mod tests {
    use super::*;
    use cleave_domain::{FinishReason, WorkerId};
    use opentelemetry_sdk::trace::{InMemorySpanExporter, SpanData};

    #[test]
    fn a_flight_is_a_span_with_its_two_legs() {
        let exporter = InMemorySpanExporter::default();
        let provider = SdkTracerProvider::builder()
            .with_simple_exporter(exporter.clone())
            .build();
        let traces = Traces {
            provider: Some(provider),
        };
        let worker = |worker| WorkerRef {
            worker: WorkerId(worker),
            ..WorkerRef::default()
        };
        let mut story = Story::begin(Some(TraceParent {
            trace: 5,
            span: 6,
            flags: 1,
        }));
        story.placed(worker(1), worker(2));
        story.token();
        story.turned(Turn::Resumed, (1, 40, Duration::from_millis(120)));
        let ending = Ending::Done {
            reason: FinishReason::Stop,
        };
        traces.tell(FlightId(7), &story, (&ending, Usage::default()));

        let spans = exporter.get_finished_spans().unwrap();
        let names: Vec<_> = spans.iter().map(|span| span.name.as_ref()).collect();
        assert_eq!(names, ["prefill", "decode", "flight"]);
        assert_eq!(spans[2].events[0].name, "resumed");
        let flight = spans[2].span_context.span_id();
        assert!(spans[..2].iter().all(|leg| leg.parent_span_id == flight));
        let client = (
            SpanId::from_bytes(6_u64.to_be_bytes()),
            5_u128.to_be_bytes(),
        );
        assert_eq!(spans[2].parent_span_id, client.0);
        let of_client = |span: &SpanData| span.span_context.trace_id().to_bytes() == client.1;
        assert!(spans.iter().all(of_client));
        assert_eq!(spans[0].end_time, spans[1].start_time);
        assert_eq!(spans[1].end_time, spans[2].end_time);

        // A client that does not record its trace wants nothing of ours either.
        exporter.reset();
        let mut story = Story::begin(Some(TraceParent {
            trace: 5,
            span: 6,
            flags: 0,
        }));
        story.token();
        traces.tell(FlightId(8), &story, (&ending, Usage::default()));
        assert_eq!(exporter.get_finished_spans().unwrap(), []);
    }
}
