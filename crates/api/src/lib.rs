//! The HTTP side of a server.
//!
//! Owns: OpenAI-shaped JSON, validation, limits on memory and quotas, server-sent events. Never:
//! knows a router or a worker (it talks to a [`Frontend`]), or tokenizes (the crate `text` does).
//! Invariant: bad input ends here with a 4xx that names the field, and leaves no state behind.

mod access_line;
mod adapter_routes;
mod admin;
mod answer_division;
mod app;
mod body;
mod body_work;
mod caller;
mod choice;
mod compression;
mod constraint_check;
mod cross_origin;
mod custom_input;
mod error;
mod field;
mod flights;
mod frontend;
#[cfg(any(test, fuzzing))]
pub mod fuzzing;
mod gate;
mod generate;
mod input_turns;
mod meant_route;
mod memory_budget;
mod metric_registry;
mod metrics;
mod model_routes;
mod models;
mod openapi;
mod output_piece;
mod quota;
mod request;
mod request_record;
mod response_store;
mod routes;
mod sse;
mod surface;
mod timing;
mod trace_parent;
mod ui;

pub use access_line::AccessLog;
pub use adapter_routes::AdapterChange;
pub use admin::{
    CommandError, LinkView, Operator, ScalingDecision, ScalingView, WorkerCommand, WorkerState,
    WorkerView, admin_routes,
};
pub use app::{ApiOptions, App, OutputOptions, ParserChoice, PromptLog};
pub use compression::with_compression;
pub use cross_origin::AllowedOrigin;
pub use error::RETRY_AFTER;
pub use frontend::{
    FlightEvent, FlightStream, Frontend, ServedAdapter, ServingProgress, ServingReadiness,
    ServingWorkers, StopSignal, StreamCounts, SubmissionContext,
};
pub use gate::AdminKey;
pub use metric_registry::{DescribedMetric, MetricRegistry, prometheus_text};
pub use metrics::metrics_described;
pub use request_record::RequestSpan;
pub use response_store::{PeerReply, ResponsePeers, ResponseStoreLimits};
pub use routes::{loading_answer, metrics_answer};
pub use trace_parent::TraceParent;
pub use ui::{
    ClassRow, DashboardEvent, DurationQuantiles, FleetSnapshot, FlightStageCounts, HISTORY_SECONDS,
    HandoffTotals, HistorySecond, LinkRow, LostWorker, PoolTarget, ScalingChange, ScalingSummary,
    VerdictCounts, WINDOW, WorkerRow, ui_routes,
};
