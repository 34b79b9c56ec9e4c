//! Load for any server of OpenAI's API, and the latencies that its users see.
//!
//! Owns: workloads, open-loop load, measurements at the client, the search for goodput, the report.
//! Never: knows Cleave's internals, or decides anything about a request. Invariant: arrivals never
//! wait for answers, and every request is counted: refused, failed and late are all misses.
//!
//! A [`BenchWorkload`] and a [`ScheduleOptions`] give a [`RequestSchedule`]; a [`BenchJob`] sends
//! it to a [`MeasuredServer`] and leaves a [`BenchReport`]. Everything random comes from one seed.

mod arrivals;
mod client;
mod confidence;
mod connection;
#[cfg(any(test, fuzzing))]
pub mod fuzzing;
mod lengths;
mod measurement;
mod number;
mod plot;
mod prompt;
mod record;
mod report;
mod request;
mod result;
mod rng;
mod run;
mod schedule;
mod search;
mod search_time;
mod server;
mod slo;
mod sse;
mod stages;
mod summary;
mod trace;
mod workload;

pub use arrivals::ArrivalProcess;
pub use confidence::{ConfidenceInterval, GoalVerdict, wilson};
pub use lengths::LengthScaling;
pub use measurement::{BenchJob, GoodputSearch, ProgressObserver};
pub use number::parse_duration;
pub use request::{AnswerLength, ApiEndpoint, RequestOptions, SloHeaders, StageRequest};
pub use result::{
    BenchReport, GoodputResult, LoadMachine, RateResult, ReportKind, ResultFolder, RunReport,
    SCHEMA, TargetsMs, TimelineBin,
};
pub use run::{CutReason, InterruptSignal, RunProgress};
pub use schedule::{RequestSchedule, ScheduleEntry, ScheduleOptions};
pub use search::RateBounds;
pub use search_time::SearchTime;
pub use server::{MeasuredServer, PromptEncoding, ServerFacts, ServerTarget};
pub use slo::{MissReason, SloSet, SloTargets};
pub use summary::{LatencyCurves, RunSummary, SampleStats};
pub use workload::BenchWorkload;

/// Raises this process's limit of open files to what the system allows: each request in flight
/// needs a connection, and the usual limit is 1024.
pub fn raise_connections_max() {
    use rustix::process::{Resource, getrlimit, setrlimit};
    let mut limit = getrlimit(Resource::Nofile);
    limit.current = limit.maximum;
    // If the system refuses, connections fail later, and are counted.
    setrlimit(Resource::Nofile, limit).ok();
}
