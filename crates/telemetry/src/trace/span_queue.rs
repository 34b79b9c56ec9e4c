//! The queue of spans to a collector.
//!
//! Owns: the queue and the task that empties it. Never delays a sender. Invariant: each span is
//! counted once: exported, dropped (the queue was full) or lost (the collector did not take it).

use super::{OtlpScheme, ServiceProcess, TraceOptions};
use crate::error::TelemetryError;
use cleave_api::MetricRegistry;
use opentelemetry_otlp::tonic_types::transport::{Certificate, ClientTlsConfig};
use opentelemetry_otlp::{SpanExporter as Otlp, WithExportConfig, WithTonicConfig};
use opentelemetry_sdk::trace::{SpanData, SpanExporter};
use prometheus_client::encoding::EncodeLabelSet;
use prometheus_client::metrics::counter::Counter;
use prometheus_client::metrics::family::Family;
use std::path::Path;
use std::time::Duration;
use tokio::sync::{mpsc, oneshot};
use tokio::time::{Instant, timeout, timeout_at};
use tracing::{info, warn};

/// Spans that may wait; some 4 MiB of them.
const QUEUE_MAX: usize = 8192;
/// Spans sent at a time, as OpenTelemetry's libraries do.
const BATCH_MAX: usize = 512;
/// How long the first span of a batch waits for others.
const BATCH_WAIT_MAX: Duration = Duration::from_millis(500);
/// How long the last spans may take when the process ends.
const FLUSH_MAX: Duration = Duration::from_secs(3);

#[derive(Clone, Debug, Default, PartialEq, Eq, Hash, EncodeLabelSet)]
struct SpanOutcomeLabels {
    outcome: &'static str,
}

/// Counts of spans by outcome.
#[derive(Clone, Debug)]
pub(crate) struct TraceSeries {
    spans: Family<SpanOutcomeLabels, Counter>,
}

impl TraceSeries {
    pub(crate) fn register(registry: &mut MetricRegistry) -> Self {
        let series = Self {
            spans: Family::default(),
        };
        registry.register(
            "cleave_trace_spans",
            "Spans of recorded traces: exported, dropped (the queue to the collector was full), lost (the \
             collector did not take them)",
            series.spans.clone(),
        );
        series
    }

    fn count(&self, outcome: &'static str, count: usize) {
        let counter = self.spans.get_or_create(&SpanOutcomeLabels { outcome });
        counter.inc_by(count as u64);
    }
}

enum ExporterMessage {
    Span(Box<SpanData>),
    /// Everything queued before this is to be sent now.
    Flush(oneshot::Sender<()>),
}

#[derive(Debug)]
pub(super) struct SpanQueue {
    queue: mpsc::Sender<ExporterMessage>,
    series: TraceSeries,
}

impl SpanQueue {
    /// Opens the queue of a process to the collector of `options`; `None` if they name none.
    pub(super) fn open(
        options: &TraceOptions,
        service: &ServiceProcess,
        series: &TraceSeries,
    ) -> Result<Option<Self>, TelemetryError> {
        let Some(endpoint) = &options.endpoint else {
            return Ok(None);
        };
        let unusable = |reason| TelemetryError::Collector {
            endpoint: endpoint.clone(),
            reason,
        };
        let url = endpoint_url(endpoint, options.default_scheme).map_err(unusable)?;
        let mut exporter = Otlp::builder().with_tonic().with_endpoint(&url);
        if url.starts_with("https:") {
            let tls = collector_tls(options.certificate.as_deref()).map_err(unusable)?;
            exporter = exporter.with_tls_config(tls);
        }
        let exporter = exporter.build();
        let mut exporter = exporter.map_err(|error| unusable(error.to_string()))?;
        exporter.set_resource(&service.resource());
        if url != *endpoint {
            info!(
                url,
                "the endpoint of traces has no scheme: https, unless OTEL_EXPORTER_OTLP_INSECURE is true"
            );
        }
        Ok(Some(Self::with(exporter, series)))
    }

    pub(super) fn with(exporter: impl SpanExporter + 'static, series: &TraceSeries) -> Self {
        for outcome in ["exported", "dropped", "lost"] {
            series.count(outcome, 0);
        }
        let (queue, messages) = mpsc::channel(QUEUE_MAX);
        let exporter_task = SpanExporterTask {
            exporter,
            series: series.clone(),
            failing: false,
        };
        tokio::spawn(exporter_task.export_until_closed(messages));
        Self {
            queue,
            series: series.clone(),
        }
    }

    pub(super) fn send(&self, span: SpanData) {
        if self
            .queue
            .try_send(ExporterMessage::Span(Box::new(span)))
            .is_err()
        {
            self.series.count("dropped", 1);
        }
    }

    pub(super) async fn flush(&self) {
        let flushed = async {
            let (done_sender, done) = oneshot::channel();
            if self
                .queue
                .send(ExporterMessage::Flush(done_sender))
                .await
                .is_ok()
            {
                // A task that has ended has no spans left.
                let _ = done.await;
            }
        };
        if timeout(FLUSH_MAX, flushed).await.is_err() {
            warn!("the last traces are lost: the collector does not take them");
        }
    }
}

/// Returns the endpoint with its scheme, in lower case.
fn endpoint_url(endpoint: &str, default_scheme: OtlpScheme) -> Result<String, String> {
    let Some((scheme, rest)) = endpoint.split_once("://") else {
        let scheme = match default_scheme {
            OtlpScheme::Https => "https",
            OtlpScheme::Http => "http",
        };
        return Ok(format!("{scheme}://{endpoint}"));
    };
    match scheme.to_ascii_lowercase().as_str() {
        scheme @ ("http" | "https") => Ok(format!("{scheme}://{rest}")),
        other => Err(format!(
            "the scheme is http or https, such as https://collector:4317, not `{other}`"
        )),
    }
}

/// The authorities that may sign the collector's certificate.
fn collector_tls(certificate: Option<&Path>) -> Result<ClientTlsConfig, String> {
    let Some(path) = certificate else {
        return Ok(ClientTlsConfig::new().with_native_roots());
    };
    let pem = std::fs::read(path);
    let pem = pem.map_err(|error| format!("--otlp-certificate {}: {error}", path.display()))?;
    Ok(ClientTlsConfig::new().ca_certificate(Certificate::from_pem(pem)))
}

struct SpanExporterTask<E> {
    exporter: E,
    series: TraceSeries,
    failing: bool,
}

impl<E: SpanExporter> SpanExporterTask<E> {
    /// Runs until no sender is left.
    async fn export_until_closed(mut self, mut messages: mpsc::Receiver<ExporterMessage>) {
        while let Some(first) = messages.recv().await {
            let ends = Instant::now() + BATCH_WAIT_MAX;
            let (mut batch, mut flush_answer) = (Vec::new(), None);
            sort_message(first, &mut batch, &mut flush_answer);
            while batch.len() < BATCH_MAX && flush_answer.is_none() {
                match timeout_at(ends, messages.recv()).await {
                    Ok(Some(message)) => sort_message(message, &mut batch, &mut flush_answer),
                    Ok(None) | Err(_) => break,
                }
            }
            self.export(batch).await;
            if let Some(flush_answer) = flush_answer {
                // The caller may have given up waiting.
                let _ = flush_answer.send(());
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
        // Logged once for each change, not for every batch.
        match (sent, self.failing) {
            (Err(error), false) => warn!(%error, "the collector does not take traces"),
            (Ok(()), true) => info!("the collector takes traces again"),
            (Err(_), true) | (Ok(()), false) => {}
        }
        self.failing = outcome == "lost";
    }
}

fn sort_message(
    message: ExporterMessage,
    batch: &mut Vec<SpanData>,
    flush_answer: &mut Option<oneshot::Sender<()>>,
) {
    match message {
        ExporterMessage::Span(span) => batch.push(*span),
        ExporterMessage::Flush(done_sender) => *flush_answer = Some(done_sender),
    }
}

#[cfg(test)]
mod tests {
    use super::super::SpanBuilder;
    use super::*;
    use opentelemetry_sdk::error::{OTelSdkError, OTelSdkResult};
    use opentelemetry_sdk::trace::InMemorySpanExporter;
    use std::time::SystemTime;

    /// A collector that never takes spans.
    #[derive(Debug)]
    struct FailingExporter;

    impl SpanExporter for FailingExporter {
        async fn export(&self, _: Vec<SpanData>) -> OTelSdkResult {
            Err(OTelSdkError::InternalFailure("nobody is there".into()))
        }
    }

    fn series() -> (MetricRegistry, TraceSeries) {
        let mut registry = MetricRegistry::default();
        let series = TraceSeries::register(&mut registry);
        (registry, series)
    }

    #[track_caller]
    fn assert_counted(registry: &MetricRegistry, outcome: &str, count: usize) {
        let text = registry.text();
        let line = format!("cleave_trace_spans_total{{outcome=\"{outcome}\"}} {count}\n");
        assert!(text.contains(&line), "{line} is not in\n{text}");
    }

    fn span() -> SpanData {
        SpanBuilder::under(Default::default(), "x", SystemTime::now()).finish()
    }

    #[test]
    fn an_endpoint_has_a_scheme_that_is_spoken() {
        let url = |endpoint| endpoint_url(endpoint, OtlpScheme::Https);
        assert_eq!(url("HTTP://h:1").as_deref(), Ok("http://h:1"));
        assert_eq!(url("https://h:1/").as_deref(), Ok("https://h:1/"));
        assert_eq!(
            url("127.0.0.1:4317").as_deref(),
            Ok("https://127.0.0.1:4317")
        );
        assert!(url("ftp://h:1").is_err_and(|reason| reason.contains("`ftp`")));
        let insecure = endpoint_url("h:1", OtlpScheme::Http);
        assert_eq!(insecure.as_deref(), Ok("http://h:1"));
    }

    #[tokio::test]
    async fn an_unusable_collector_is_named_with_its_flag() {
        let (_registry, series) = series();
        let open = |endpoint: &str, certificate: Option<&str>| {
            let options = TraceOptions {
                endpoint: Some(endpoint.to_owned()),
                certificate: certificate.map(Into::into),
                ..TraceOptions::default()
            };
            let service = ServiceProcess::router(8000);
            SpanQueue::open(&options, &service, &series).map_err(|error| error.to_string())
        };
        for (endpoint, certificate, expected) in [
            ("ftp://h:1", None, "--otlp-endpoint ftp://h:1"),
            ("http://", None, "--otlp-endpoint http://"),
            (
                "https://h:1",
                Some("/none.pem"),
                "--otlp-certificate /none.pem",
            ),
        ] {
            let reason = open(endpoint, certificate).unwrap_err();
            assert!(reason.contains(expected), "{reason}");
        }
        assert!(open("http://h:1", None).unwrap().is_some());
    }

    #[tokio::test(start_paused = true)]
    async fn spans_leave_together_and_a_flush_waits_for_them() {
        let (registry, series) = series();
        let exporter = InMemorySpanExporter::default();
        let outbox = SpanQueue::with(exporter.clone(), &series);
        for _ in 0..700 {
            outbox.send(span());
        }
        outbox.flush().await;
        assert_eq!(exporter.get_finished_spans().unwrap().len(), 700);
        assert_counted(&registry, "exported", 700);
        assert_counted(&registry, "dropped", 0);
    }

    #[tokio::test(start_paused = true)]
    async fn dropped_and_lost_spans_are_counted() {
        let (registry, series) = series();
        let outbox = SpanQueue::with(FailingExporter, &series);
        // The exporter's task has not run yet.
        for _ in 0..QUEUE_MAX + 10 {
            outbox.send(span());
        }
        assert_counted(&registry, "dropped", 10);
        outbox.flush().await;
        assert_counted(&registry, "lost", QUEUE_MAX);
        assert_counted(&registry, "exported", 0);
    }
}
