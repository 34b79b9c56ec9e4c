//! Metrics of the HTTP side: requests as clients see them.
//!
//! Owns: names, buckets and labels of these metrics. Never: knows the metrics of the serving side,
//! which arrive as text. Invariant: each request is counted once, however it ends.

use crate::error::ApiError;
use crate::frontend::ServingWorkers;
use crate::metric_registry::MetricRegistry;
use crate::request::RequestWarning;
use crate::request_record::{RequestLatencies, RequestRecord};
use crate::response_store::EvictionReason;
use crate::trace_parent::TraceParent;
use prometheus_client::encoding::{EncodeLabelSet, LabelSetEncoder};
use prometheus_client::metrics::counter::Counter;
use prometheus_client::metrics::family::Family;
use prometheus_client::metrics::gauge::Gauge;
use prometheus_client::metrics::histogram::{Histogram, exponential_buckets};
use prometheus_client::registry::Unit;
use std::sync::Arc;
use std::time::{Duration, Instant};

/// Buckets of the time to the first token and of the end-to-end time, in seconds.
const WAITS: [f64; 16] = [
    0.005, 0.01, 0.025, 0.05, 0.075, 0.1, 0.25, 0.5, 0.75, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 300.0,
];
/// Buckets of the time between tokens, in seconds.
const GAPS: [f64; 14] = [
    0.001, 0.0025, 0.005, 0.01, 0.015, 0.025, 0.035, 0.05, 0.075, 0.1, 0.25, 0.5, 1.0, 5.0,
];
/// Buckets of token counts.
const SIZES: [f64; 16] = [
    1.0, 4.0, 16.0, 64.0, 128.0, 256.0, 512.0, 1024.0, 2048.0, 4096.0, 8192.0, 16384.0, 32768.0,
    65536.0, 131_072.0, 262_144.0,
];

pub(crate) struct HttpMetrics {
    registry: MetricRegistry,
    responses: Family<ResponseLabels, Counter>,
    in_flight: Gauge,
    endings: Family<EndingLabels, Counter>,
    read: Histogram,
    first_token: Histogram,
    gap: Histogram,
    end_to_end: Histogram,
    prompt_tokens: Histogram,
    output_tokens: Histogram,
    over_limit: Family<QuotaRefusalLabels, Counter>,
    warnings: Family<WarningLabels, Counter>,
    stored: StoreMetrics,
}

/// Series of the stored responses. Clones share them.
#[derive(Clone, Debug, Default)]
pub(crate) struct StoreMetrics {
    responses: Gauge,
    bytes: Gauge,
    evictions: Family<EndingLabels, Counter>,
    pub(crate) not_kept: Counter,
}

impl StoreMetrics {
    /// Sets what is stored now, and counts what went.
    pub(crate) fn set(&self, count: usize, bytes: usize, evictions: &[EvictionReason]) {
        self.responses.set(count as i64);
        self.bytes.set(bytes as i64);
        for reason in evictions {
            let reason = EndingLabels(reason.word());
            self.evictions.get_or_create(&reason).inc();
        }
    }
}

/// Label `param`: a field name of this API.
#[derive(Clone, Debug, Default, PartialEq, Eq, Hash)]
struct WarningLabels(&'static str);

impl EncodeLabelSet for WarningLabels {
    fn encode(&self, encoder: &mut LabelSetEncoder<'_>) -> Result<(), std::fmt::Error> {
        use prometheus_client::encoding::EncodeLabel;
        ("param", self.0).encode(encoder.encode_label())
    }
}

#[derive(Clone, Debug, Default, PartialEq, Eq, Hash)]
struct ResponseLabels {
    route: String,
    status: u16,
}

/// Labels of a quota refusal: a tenant of the policy and a limit of this API.
#[derive(Clone, Debug, Default, PartialEq, Eq, Hash)]
struct QuotaRefusalLabels {
    tenant: String,
    limit: &'static str,
}

#[derive(Clone, Debug, Default, PartialEq, Eq, Hash)]
struct EndingLabels(&'static str);

impl EncodeLabelSet for ResponseLabels {
    fn encode(&self, encoder: &mut LabelSetEncoder<'_>) -> Result<(), std::fmt::Error> {
        use prometheus_client::encoding::EncodeLabel;
        ("route", self.route.as_str()).encode(encoder.encode_label())?;
        ("status", u64::from(self.status)).encode(encoder.encode_label())
    }
}

impl EncodeLabelSet for QuotaRefusalLabels {
    fn encode(&self, encoder: &mut LabelSetEncoder<'_>) -> Result<(), std::fmt::Error> {
        use prometheus_client::encoding::EncodeLabel;
        ("tenant", self.tenant.as_str()).encode(encoder.encode_label())?;
        ("limit", self.limit).encode(encoder.encode_label())
    }
}

impl EncodeLabelSet for EndingLabels {
    fn encode(&self, encoder: &mut LabelSetEncoder<'_>) -> Result<(), std::fmt::Error> {
        use prometheus_client::encoding::EncodeLabel;
        ("reason", self.0).encode(encoder.encode_label())
    }
}

impl HttpMetrics {
    /// Counts the warnings of a request that is served but not done in full.
    pub(crate) fn count_warnings(&self, warnings: &[RequestWarning]) {
        for RequestWarning { param, message: _ } in warnings {
            self.warnings.get_or_create(&WarningLabels(param)).inc();
        }
    }

    pub(crate) fn new() -> Self {
        let mut metrics = Self {
            registry: MetricRegistry::with_prefix("cleave"),
            responses: Family::default(),
            in_flight: Gauge::default(),
            endings: Family::default(),
            read: Histogram::new(exponential_buckets(0.000_01, 10_f64.powf(0.1), 41)),
            first_token: Histogram::new(WAITS),
            gap: Histogram::new(GAPS),
            end_to_end: Histogram::new(WAITS),
            prompt_tokens: Histogram::new(SIZES),
            output_tokens: Histogram::new(SIZES),
            over_limit: Family::default(),
            warnings: Family::default(),
            stored: StoreMetrics::default(),
        };
        let book = &mut metrics.registry;
        book.register(
            "http_requests",
            "HTTP requests of all routes answered, by route and status",
            metrics.responses.clone(),
        );
        book.register(
            "http_requests_in_flight",
            "Chat and text completions being served",
            metrics.in_flight.clone(),
        );
        book.register(
            "request_endings",
            "Chat and text completions, by how they ended: completed, cancelled (the client left), \
             refused, failed, invalid",
            metrics.endings.clone(),
        );
        book.register(
            "request_warnings",
            "Requests answered with a warning, by the field that is not done in full",
            metrics.warnings.clone(),
        );
        let mut seconds = |name: &str, text: &str, histogram: &Histogram| {
            book.register_with_unit(name, Unit::Seconds, text, histogram.clone());
        };
        seconds(
            "request_read",
            "From the request's arrival to its submission: body, template, tokens",
            &metrics.read,
        );
        seconds(
            "http_time_to_first_token",
            "From the arrival of an HTTP request to the first token of each of its sequences, however they end \
             (cleave_ttft_seconds is by class and begins with the submission)",
            &metrics.first_token,
        );
        seconds(
            "http_inter_token_latency",
            "Each gap between two tokens of a sequence, as the HTTP server gets them (cleave_tpot_seconds is the mean of a \
             sequence, by class)",
            &metrics.gap,
        );
        seconds(
            "http_e2e_request_latency",
            "From the arrival of an HTTP request to the end of its last sequence, if it completed (cleave_e2e_seconds is \
             each sequence's, by class)",
            &metrics.end_to_end,
        );
        book.register(
            "request_prompt_tokens",
            "Prompt tokens of a request",
            metrics.prompt_tokens.clone(),
        );
        book.register(
            "request_output_tokens",
            "Output tokens of a sequence that finished",
            metrics.output_tokens.clone(),
        );
        book.register(
            "tenant_refusals",
            "Requests beyond their tenant's quota, by tenant and limit: tenant_rate, tenant_tokens, \
             tenant_concurrency",
            metrics.over_limit.clone(),
        );
        let stored = &metrics.stored;
        book.register(
            "stored_responses",
            "Responses that are stored for later requests",
            stored.responses.clone(),
        );
        book.register_with_unit(
            "stored_responses",
            Unit::Bytes,
            "Memory of the stored responses, with their inputs and keys",
            stored.bytes.clone(),
        );
        book.register(
            "stored_response_evictions",
            "Stored responses that were removed, by reason: age, bytes (all memory is taken), \
             tenant_bytes (the tenant's share is taken), deleted",
            stored.evictions.clone(),
        );
        book.register(
            "responses_not_stored",
            "Responses that were to be stored and for which there was no room",
            stored.not_kept.clone(),
        );
        metrics
    }

    /// The series of the stored responses.
    pub(crate) fn stored_responses(&self) -> StoreMetrics {
        self.stored.clone()
    }

    /// Counts a request beyond its tenant's quota.
    pub(crate) fn count_quota_refusal(&self, tenant: &str, limit: &'static str) {
        let tenant = tenant.to_owned();
        let over = QuotaRefusalLabels { tenant, limit };
        self.over_limit.get_or_create(&over).inc();
    }

    pub(crate) fn count_response(&self, route: &str, status: u16) {
        let route = route.to_owned();
        self.responses
            .get_or_create(&ResponseLabels { route, status })
            .inc();
    }

    /// Renders the metrics as OpenMetrics text without `# EOF`.
    pub(crate) fn encode(&self) -> String {
        self.registry.text()
    }
}

/// Renders every metric of the HTTP side with its labels as OpenMetrics text; for documentation.
pub fn metrics_described() -> String {
    HttpMetrics::new().registry.text_with_empty_series()
}

/// Measures one completion request from arrival to end. If it is dropped before, the client has
/// disconnected.
pub(crate) struct RequestMeter {
    metrics: Arc<HttpMetrics>,
    record: RequestRecord,
    arrived: Instant,
    last_token: Vec<Option<Instant>>,
    ttft: Option<Duration>,
    /// The sum of all gaps between tokens of one sequence, and their number.
    gaps: (Duration, u32),
    ended: bool,
}

impl RequestMeter {
    pub(crate) fn start(metrics: &Arc<HttpMetrics>, record: RequestRecord) -> Self {
        metrics.in_flight.inc();
        Self {
            metrics: metrics.clone(),
            record,
            arrived: Instant::now(),
            last_token: Vec::new(),
            ttft: None,
            gaps: (Duration::ZERO, 0),
            ended: false,
        }
    }

    /// Observes the time from arrival to submission.
    pub(crate) fn observe_read_time(&self) {
        let read = self.arrived.elapsed();
        self.metrics.read.observe(read.as_secs_f64());
    }

    /// Returns the request id for logs, and the trace context of the sequences.
    pub(crate) fn ids(&self) -> (Arc<str>, Option<TraceParent>) {
        self.record.ids()
    }

    /// The list for the names of the workers that serve it.
    pub(crate) fn workers(&self) -> ServingWorkers {
        self.record.workers()
    }

    pub(crate) fn submitted(
        &mut self,
        model: &str,
        class: &str,
        prompt_tokens: u64,
        sequences: usize,
    ) {
        self.record
            .submitted(model, class, prompt_tokens, sequences);
        self.metrics.prompt_tokens.observe(prompt_tokens as f64);
        self.last_token = vec![None; sequences];
    }

    /// Counts tokens of one prompt that came from a prefix cache.
    pub(crate) fn cached(&mut self, tokens: u32) {
        self.record.cached(tokens);
    }

    pub(crate) fn token(&mut self, sequence: usize) {
        let now = Instant::now();
        self.record.token();
        match self.last_token[sequence].replace(now) {
            Some(last) => {
                let gap = now - last;
                self.gaps = (self.gaps.0 + gap, self.gaps.1 + 1);
                self.metrics.gap.observe(gap.as_secs_f64());
            }
            None => {
                self.record.first_token();
                let waited = now - self.arrived;
                self.ttft.get_or_insert(waited);
                self.metrics.first_token.observe(waited.as_secs_f64());
            }
        }
    }

    /// Observes the end of a sequence; one that asked for a vector has no output tokens.
    pub(crate) fn finished(&mut self, reason: &'static str, output_tokens: Option<u32>) {
        if let Some(output_tokens) = output_tokens {
            self.metrics.output_tokens.observe(f64::from(output_tokens));
        }
        self.record.finished(reason, output_tokens.unwrap_or(0));
    }

    /// Observes the end of a complete answer.
    pub(crate) fn completed(&mut self) {
        self.metrics
            .end_to_end
            .observe(self.arrived.elapsed().as_secs_f64());
        self.end("completed");
    }

    pub(crate) fn failed(&mut self, error: &ApiError) {
        self.record.failed(error);
        self.end(match error {
            error if error.is_refusal() => "refused",
            error if error.is_client_fault() => "invalid",
            _ => "failed",
        });
    }

    fn end(&mut self, reason: &'static str) {
        if !std::mem::replace(&mut self.ended, true) {
            self.metrics
                .endings
                .get_or_create(&EndingLabels(reason))
                .inc();
            self.metrics.in_flight.dec();
            let (gaps, count) = self.gaps;
            let latencies = RequestLatencies {
                ttft: self.ttft,
                tpot: gaps.checked_div(count),
            };
            self.record.end(reason, latencies);
        }
    }
}

impl Drop for RequestMeter {
    fn drop(&mut self) {
        self.end(if std::thread::panicking() {
            "failed"
        } else {
            "cancelled"
        });
    }
}
