//! Load on any server of OpenAI's API, and what its users feel of it.
//!
//! Owns: workloads, open-loop load, what is measured at the client, the search for goodput, the
//! report. Never: knows Cleave's insides, or decides anything about a request.
//! Invariant: arrivals never wait for answers, and whatever was asked is counted: refused, failed and
//! late are all misses.
//!
//! A [`Workload`] and a [`Wish`] give a [`Schedule`]; a [`Job`] sends it to a [`Server`] and leaves a
//! [`Report`]. Everything random comes from one seed.

mod arrivals;
mod ask;
mod client;
mod confidence;
mod connection;
mod dice;
#[cfg(any(test, fuzzing))]
pub mod fuzzing;
mod job;
mod lengths;
mod number;
mod plot;
mod prompt;
mod record;
mod report;
mod result;
mod run;
mod schedule;
mod search;
mod server;
mod slo;
mod sse;
mod stages;
mod summary;
mod trace;
mod workload;

pub use arrivals::Arrivals;
pub use ask::{Asking, Ending, Endpoint, SloHeaders, Timing};
pub use confidence::{Interval, Verdict, wilson};
pub use job::{Hunt, Job, Watch};
pub use lengths::Scaling;
pub use number::span;
pub use result::{
    Bin, Environment, Folder, Goodput, Kind, Report, RunReport, SCHEMA, TargetsMs, Try,
};
pub use run::{Cut, Progress, Stop};
pub use schedule::{Asked, Schedule, Wish};
pub use search::Bounds;
pub use server::{Findings, PromptForm, Server, Target};
pub use slo::{Miss, Slo, Targets};
pub use summary::{Curves, Stats, Summary};
pub use workload::Workload;

/// Lets this process open as many connections as the system allows it: each request under way needs
/// one, and the usual limit is 1024.
pub fn raise_connections_max() {
    use rustix::process::{Resource, getrlimit, setrlimit};
    let mut limit = getrlimit(Resource::Nofile);
    limit.current = limit.maximum;
    // If not allowed, connections fail later, and are counted.
    setrlimit(Resource::Nofile, limit).ok();
}
