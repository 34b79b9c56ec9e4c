//! Metrics, traces and tapes of one process: what the brains note, and what the body measures.
//!
//! Owns: names, labels and buckets of metrics, spans and their way to a collector, the files of
//! tapes. Never: counts anything that a brain could have noted; the simulator counts the same
//! notes. Never knows a connection, a driver or a server. Invariant: base units; every series of
//! the hand-off exists from the start, so that a zero is a zero and not an absence.

mod buckets;
mod error;
mod json_field;
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
mod series_table;
mod server;
mod slo;
mod tape;
mod trace;
mod worker;

pub use error::TelemetryError;
pub use json_field::JsonField;
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
pub use slo::{SloMeters, SloSeries, TokenCounters};
pub use tape::{RouterTapeRecord, TapeRecorder, WorkerTapeRecord};
use trace::TraceSeries;
pub use trace::{
    AttemptChange, FlightOutcome, FlightSpan, OtlpScheme, RequestContext, ServiceProcess,
    TraceOptions, TraceSampler, TraceSamplerError, Traces, WorkerSpans, log_ids,
};
pub use worker::{AdapterUse, DeviceCeilings, WorkerMeters, WorkerSeries};

use cleave_api::MetricRegistry;
use process::ProcessSeries;
use std::sync::Arc;

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
    /// With traces of this process to the collector that the options name, if any. Must be called
    /// within a tokio runtime.
    pub fn with_traces(
        options: &TraceOptions,
        service: &ServiceProcess,
    ) -> Result<Self, TelemetryError> {
        let telemetry = Self::default();
        let traces = Traces::to(options, service, &telemetry.trace_series)?;
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
