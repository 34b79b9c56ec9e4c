//! Metrics, traces and tapes of one process: what the brains note, and what the body measures.
//!
//! Owns: names, labels and buckets of metrics, spans and their way to a collector, the files of
//! tapes. Never: counts anything that a brain could have noted; the simulator counts the same
//! notes. Never knows a connection, a driver or a server. Invariant: base units; every series of
//! the hand-off exists from the start, so that a zero is a zero and not an absence.

mod log_limit;
mod observer;
mod outcome;
mod overhead;
mod page;
mod picker;
mod policy;
mod process;
mod router;
mod scaling;
mod server;
mod slo;
mod tape;
mod trace;
mod worker;

pub use log_limit::LogLimit;
pub use observer::{NoteContext, RouterObserver, WorkerObserver};
pub use outcome::{HandoffLoss, RequestVerdict, failure_name, refusal_name};
pub use overhead::RouterOverhead;
pub use page::metrics_page;
pub use picker::{PickerChoice, PickerSeries};
pub use policy::PolicySeries;
pub use router::{RouterMeters, RouterSeries};
pub use scaling::ScalingSeries;
pub use server::ServerSeries;
pub use slo::{SloMeters, SloSeries};
pub use tape::{RouterTapeRecord, TapeRecorder, WorkerTapeRecord};
use trace::TraceSeries;
pub use trace::{
    AttemptChange, FlightOutcome, FlightSpan, OtlpScheme, RequestContext, TraceOptions,
    TraceSampler, TraceSamplerError, Traces, WorkerSpans, log_ids,
};
pub use worker::{DeviceCeilings, WorkerMeters, WorkerSeries};

use cleave_api::MetricRegistry;
use process::ProcessSeries;
use prometheus_client::encoding::EncodeLabelSet;
use prometheus_client::metrics::family::Family;
use prometheus_client::metrics::gauge::Gauge;
use prometheus_client::metrics::histogram::{Histogram, exponential_buckets};
use std::io;
use std::path::PathBuf;
use std::sync::Arc;
use std::sync::atomic::AtomicU64;

/// The reason why a process cannot be observed as its options ask.
#[derive(Debug, thiserror::Error)]
pub enum TelemetryError {
    /// The collector of traces cannot be used.
    #[error(
        "--otlp-endpoint {endpoint} (or OTEL_EXPORTER_OTLP_ENDPOINT): traces cannot be sent there: {reason}"
    )]
    Collector {
        /// The endpoint as configured.
        endpoint: String,
        reason: String,
    },
    /// The tape cannot be written.
    #[error("cannot write the tape {}", .0.display())]
    Tape(PathBuf, #[source] io::Error),
}

/// All series of a process. Clones are the same ones.
#[derive(Clone, Debug)]
pub struct Telemetry {
    registry: Arc<MetricRegistry>,
    pub workers: WorkerSeries,
    pub router: RouterSeries,
    pub slo: SloSeries,
    pub policy: PolicySeries,
    pub picker: PickerSeries,
    pub scaling: ScalingSeries,
    pub servers: ServerSeries,
    process: ProcessSeries,
    trace_series: TraceSeries,
    pub traces: Traces,
}

impl Default for Telemetry {
    fn default() -> Self {
        let mut registry = MetricRegistry::default();
        let workers = WorkerSeries::register(&mut registry);
        let router = RouterSeries::register(&mut registry);
        let slo = SloSeries::register(&mut registry);
        let policy = PolicySeries::register(&mut registry);
        let picker = PickerSeries::register(&mut registry);
        let scaling = ScalingSeries::register(&mut registry);
        let servers = ServerSeries::register(&mut registry);
        let process = ProcessSeries::register(&mut registry);
        let trace_series = TraceSeries::register(&mut registry);
        Self {
            registry: Arc::new(registry),
            workers,
            router,
            slo,
            policy,
            picker,
            scaling,
            servers,
            process,
            trace_series,
            traces: Traces::default(),
        }
    }
}

impl Telemetry {
    /// With traces to the collector that the options name, if any. Must be called within a tokio
    /// runtime.
    pub fn with_traces(options: &TraceOptions) -> Result<Self, TelemetryError> {
        let telemetry = Self::default();
        let traces = Traces::to(options, &telemetry.trace_series)?;
        Ok(Self {
            traces,
            ..telemetry
        })
    }

    /// The OpenMetrics text, without the closing `# EOF`.
    pub fn text(&self) -> String {
        self.slo.refresh();
        self.process.refresh();
        self.registry.text()
    }
}

/// From 0.1 ms to about 100 s, three per decade: steps, transfers and waits all fall inside.
fn seconds() -> Histogram {
    const BOUNDS: [f64; 19] = [
        0.0001, 0.0002, 0.0005, 0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1.0, 2.0,
        5.0, 10.0, 20.0, 50.0, 100.0,
    ];
    Histogram::new(BOUNDS)
}

/// From 0.01 ms to 100 ms, in steps of about a quarter: for times below a millisecond.
fn submillisecond_seconds() -> Histogram {
    Histogram::new(exponential_buckets(0.000_01, 10_f64.powf(0.1), 41))
}

type FloatGauge = Gauge<f64, AtomicU64>;

/// Times to the first token: a class's target is some tenths of a second to some seconds, and a
/// bound is near each that is usual.
fn first_token_seconds() -> Histogram {
    const BOUNDS: [f64; 20] = [
        0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.15, 0.2, 0.25, 0.3, 0.4, 0.5, 0.75, 1.0, 2.0,
        5.0, 10.0, 30.0, 120.0,
    ];
    Histogram::new(BOUNDS)
}

/// Gaps between tokens: targets are some hundredths of a second.
fn gap_seconds() -> Histogram {
    const BOUNDS: [f64; 18] = [
        0.001, 0.0025, 0.005, 0.0075, 0.01, 0.015, 0.02, 0.025, 0.03, 0.04, 0.05, 0.06, 0.08, 0.1,
        0.2, 0.5, 1.0, 5.0,
    ];
    Histogram::new(BOUNDS)
}

/// Ratios of real times to predicted ones: 1 is in the middle, and a factor of two either way is
/// visible.
fn ratios() -> Histogram {
    const BOUNDS: [f64; 14] = [
        0.1, 0.25, 0.5, 0.67, 0.8, 0.9, 1.0, 1.1, 1.25, 1.5, 2.0, 4.0, 10.0, 100.0,
    ];
    Histogram::new(BOUNDS)
}

type HistogramFamily<L> = Family<L, Histogram, fn() -> Histogram>;

fn ratio_histograms<L>() -> HistogramFamily<L>
where
    L: Clone + std::hash::Hash + Eq + EncodeLabelSet,
{
    Family::new_with_constructor(ratios as fn() -> Histogram)
}

fn histograms<L>() -> HistogramFamily<L>
where
    L: Clone + std::hash::Hash + Eq + EncodeLabelSet,
{
    Family::new_with_constructor(seconds as fn() -> Histogram)
}
