//! The way of spans to a collector.
//!
//! Owns: the queue and the task that empties it. Never: makes anybody wait. Invariant: each span that was
//! handed in is counted once: exported, dropped (the queue was full) or lost (the collector did not take it).

use cleave_api::Book;
use opentelemetry_otlp::{SpanExporter as Otlp, WithExportConfig};
use opentelemetry_sdk::Resource;
use opentelemetry_sdk::trace::{SpanData, SpanExporter};
use prometheus_client::encoding::EncodeLabelSet;
use prometheus_client::metrics::counter::Counter;
use prometheus_client::metrics::family::Family;
use std::time::Duration;
use tokio::sync::{mpsc, oneshot};
use tokio::time::{Instant, timeout, timeout_at};
use tracing::{info, warn};

/// Spans that wait; some 4 MiB of them.
const QUEUE_MAX: usize = 8192;
/// Spans sent at a time, as OpenTelemetry's libraries do.
const BATCH_MAX: usize = 512;
/// The first of a batch waits for others so long.
const LINGER: Duration = Duration::from_millis(500);
/// What is left at the end may take so long.
const FLUSH_MAX: Duration = Duration::from_secs(3);

/// Where traces go cannot be used.
#[derive(Debug, thiserror::Error)]
#[error("cannot send traces to {endpoint}: {reason}")]
pub struct TraceError {
    /// As it was given.
    pub endpoint: String,
    /// The exporter's words.
    pub reason: String,
}

#[derive(Clone, Debug, Default, PartialEq, Eq, Hash, EncodeLabelSet)]
struct Outcome {
    outcome: &'static str,
}

/// What became of spans.
#[derive(Clone, Debug)]
pub(crate) struct TraceSeries {
    spans: Family<Outcome, Counter>,
}

impl TraceSeries {
    pub(crate) fn register(book: &mut Book) -> Self {
        let series = Self {
            spans: Family::default(),
        };
        book.register(
            "cleave_trace_spans",
            "Spans of recorded traces: exported, dropped (the queue to the collector was full), lost (the \
             collector did not take them)",
            series.spans.clone(),
        );
        series
    }

    fn count(&self, outcome: &'static str, count: usize) {
        let counter = self.spans.get_or_create(&Outcome { outcome });
        counter.inc_by(count as u64);
    }
}

enum Letter {
    Span(Box<SpanData>),
    /// Everything handed in before is to be sent now.
    Flush(oneshot::Sender<()>),
}

/// See the module.
#[derive(Debug)]
pub(super) struct Outbox {
    queue: mpsc::Sender<Letter>,
    series: TraceSeries,
}

impl Outbox {
    pub(super) fn open(endpoint: &str, series: &TraceSeries) -> Result<Self, TraceError> {
        let exporter = Otlp::builder().with_tonic().with_endpoint(endpoint);
        let exporter = exporter.build().map_err(|error| TraceError {
            endpoint: endpoint.to_owned(),
            reason: error.to_string(),
        })?;
        Ok(Self::with(exporter, series))
    }

    fn with(exporter: impl SpanExporter + 'static, series: &TraceSeries) -> Self {
        for outcome in ["exported", "dropped", "lost"] {
            series.count(outcome, 0);
        }
        let (queue, letters) = mpsc::channel(QUEUE_MAX);
        let clerk = Clerk {
            exporter,
            series: series.clone(),
            failing: false,
        };
        tokio::spawn(clerk.run(letters));
        Self {
            queue,
            series: series.clone(),
        }
    }

    pub(super) fn send(&self, span: SpanData) {
        if self.queue.try_send(Letter::Span(Box::new(span))).is_err() {
            self.series.count("dropped", 1);
        }
    }

    pub(super) async fn flush(&self) {
        let flushed = async {
            let (told, hear) = oneshot::channel();
            if self.queue.send(Letter::Flush(told)).await.is_ok() {
                // A clerk that is gone has nothing left.
                let _ = hear.await;
            }
        };
        if timeout(FLUSH_MAX, flushed).await.is_err() {
            warn!("the last traces are lost: the collector does not take them");
        }
    }
}

/// Empties the queue.
struct Clerk<E> {
    exporter: E,
    series: TraceSeries,
    failing: bool,
}

impl<E: SpanExporter> Clerk<E> {
    /// Until nobody can hand in anything any more.
    async fn run(mut self, mut letters: mpsc::Receiver<Letter>) {
        self.exporter.set_resource(&resource());
        while let Some(first) = letters.recv().await {
            let ends = Instant::now() + LINGER;
            let (mut batch, mut asked) = (Vec::new(), None);
            take(first, &mut batch, &mut asked);
            while batch.len() < BATCH_MAX && asked.is_none() {
                match timeout_at(ends, letters.recv()).await {
                    Ok(Some(letter)) => take(letter, &mut batch, &mut asked),
                    Ok(None) | Err(_) => break,
                }
            }
            self.export(batch).await;
            if let Some(asked) = asked {
                // Who asked may have given up.
                let _ = asked.send(());
            }
        }
    }

    async fn export(&mut self, batch: Vec<SpanData>) {
        if batch.is_empty() {
            return;
        }
        let count = batch.len();
        let sent = self.exporter.export(batch).await;
        let outcome = if sent.is_ok() { "exported" } else { "lost" };
        self.series.count(outcome, count);
        // Once for each turn of things, and not for every batch.
        match (sent, self.failing) {
            (Err(error), false) => warn!(%error, "the collector does not take traces"),
            (Ok(()), true) => info!("the collector takes traces again"),
            (Err(_), true) | (Ok(()), false) => {}
        }
        self.failing = outcome == "lost";
    }
}

fn take(letter: Letter, batch: &mut Vec<SpanData>, asked: &mut Option<oneshot::Sender<()>>) {
    match letter {
        Letter::Span(span) => batch.push(*span),
        Letter::Flush(told) => *asked = Some(told),
    }
}

/// Who speaks: `OTEL_SERVICE_NAME` and `OTEL_RESOURCE_ATTRIBUTES` where they are set.
fn resource() -> Resource {
    let resource = Resource::builder();
    match std::env::var_os("OTEL_SERVICE_NAME") {
        Some(_) => resource,
        None => resource.with_service_name("cleave"),
    }
    .build()
}

#[cfg(test)]
mod tests {
    use super::super::Piece;
    use super::*;
    use opentelemetry_sdk::error::{OTelSdkError, OTelSdkResult};
    use opentelemetry_sdk::trace::InMemorySpanExporter;
    use std::time::SystemTime;

    /// A collector that is away.
    #[derive(Debug)]
    struct Away;

    impl SpanExporter for Away {
        async fn export(&self, _: Vec<SpanData>) -> OTelSdkResult {
            Err(OTelSdkError::InternalFailure("nobody is there".into()))
        }
    }

    fn series() -> (Book, TraceSeries) {
        let mut book = Book::default();
        let series = TraceSeries::register(&mut book);
        (book, series)
    }

    #[track_caller]
    fn says(book: &Book, outcome: &str, count: usize) {
        let text = book.text();
        let line = format!("cleave_trace_spans_total{{outcome=\"{outcome}\"}} {count}\n");
        assert!(text.contains(&line), "{line} is not in\n{text}");
    }

    fn span() -> SpanData {
        Piece::under(Default::default(), "x", SystemTime::now()).finish()
    }

    #[tokio::test(start_paused = true)]
    async fn spans_leave_together_and_a_flush_waits_for_them() {
        let (book, series) = series();
        let exporter = InMemorySpanExporter::default();
        let outbox = Outbox::with(exporter.clone(), &series);
        for _ in 0..700 {
            outbox.send(span());
        }
        outbox.flush().await;
        assert_eq!(exporter.get_finished_spans().unwrap().len(), 700);
        says(&book, "exported", 700);
        says(&book, "dropped", 0);
    }

    #[tokio::test(start_paused = true)]
    async fn what_finds_no_room_or_no_collector_was_counted_nowhere() {
        let (book, series) = series();
        let outbox = Outbox::with(Away, &series);
        // The clerk has not run yet.
        for _ in 0..QUEUE_MAX + 10 {
            outbox.send(span());
        }
        says(&book, "dropped", 10);
        outbox.flush().await;
        says(&book, "lost", QUEUE_MAX);
        says(&book, "exported", 0);
    }
}
