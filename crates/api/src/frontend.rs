//! The interface between the HTTP side and the part that serves requests.

use crate::admin::Operator;
use crate::request_record::RequestSpan;
use crate::trace_parent::TraceParent;
use crate::ui::FleetSnapshot;
use cleave_domain::{
    AdapterId, Emission, Ending, Request, RequestStageTimes, SloPolicy, TokenUsage,
};
use futures::stream::BoxStream;
use parking_lot::Mutex;
use std::collections::BTreeMap;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

/// The serving side, as the HTTP side sees it.
pub trait Frontend: Operator {
    /// Starts one sequence. Dropping the stream before its end cancels the sequence.
    fn submit(&self, request: Request) -> FlightStream;

    /// As [`Self::submit`], with the context of the request. The default drops the context.
    fn submit_for(&self, request: Request, caller: SubmissionContext) -> FlightStream {
        drop(caller);
        self.submit(request)
    }

    /// The SLO policy in force. The default is a policy without targets.
    fn policy(&self) -> Arc<SloPolicy> {
        Arc::default()
    }

    /// Whether a request for this model sent now would find a worker.
    fn readiness(&self, model: &str) -> ServingReadiness;

    /// Time limit of the wait for a worker of this model that an autoscaler is asked to start;
    /// `None` if nothing starts workers. The name is empty before a model is known.
    fn worker_wait_max(&self, model: &str) -> Option<Duration> {
        let _ = model;
        None
    }

    /// Receives the number of requests that wait for the first worker of this model; the name is
    /// empty where none is known. Only a frontend with [`Self::worker_wait_max`] needs it.
    fn report_waiting_requests(&self, model: &str, count: u32) {
        let _ = (model, count);
    }

    /// Tokens of the longest sequence, prompt and output together, that a worker of this model can
    /// hold. `None` before any was connected, and from a frontend without workers.
    fn sequence_tokens_max(&self, model: &str) -> Option<u32> {
        let _ = model;
        None
    }

    /// A number of 24 bits that tells this router from the others of its fleet, until it ends.
    fn router_number(&self) -> u32 {
        0
    }

    /// The LoRA adapter that workers serve under this name, if there is one.
    fn adapter(&self, name: &str) -> Option<ServedAdapter> {
        let _ = name;
        None
    }

    /// All LoRA adapters that workers serve, by name.
    fn adapters(&self) -> Vec<ServedAdapter> {
        Vec::new()
    }

    /// Whether accepted work makes progress.
    fn progress(&self) -> ServingProgress {
        ServingProgress::Advancing
    }

    /// Number of open sequences, and their limit.
    fn streams(&self) -> StreamCounts {
        StreamCounts::default()
    }

    /// Number of open sequences of each model, by name.
    fn streams_by_model(&self) -> BTreeMap<String, usize> {
        BTreeMap::new()
    }

    /// Starts the span of an HTTP request in its client's trace, or in a new one, and decides
    /// whether it is recorded. The default continues the client's span.
    fn begin_span(&self, client: Option<TraceParent>) -> Option<TraceParent> {
        client
    }

    /// Receives the span of a recorded request at its end.
    fn end_span(&self, span: RequestSpan) {
        drop(span);
    }

    /// State of the fleet for `/ui`; `None` if the frontend shows none or has stopped.
    fn fleet_snapshot(&self) -> Option<FleetSnapshot> {
        None
    }

    /// Metrics of the serving side in OpenMetrics text format, without the closing `# EOF`.
    fn metrics(&self) -> String;
}

/// A LoRA adapter that clients name as their model.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ServedAdapter {
    /// The name that requests give.
    pub name: String,
    /// The content that the name stands for now.
    pub adapter: AdapterId,
    /// Name of the base model, whose workers serve it.
    pub base: String,
    /// The folder that it was read from.
    pub root: String,
}

/// The request that a sequence belongs to.
#[derive(Clone, Debug, Default)]
pub struct SubmissionContext {
    /// Set before the client's stream is dropped because its text is complete; a drop without it is
    /// a disconnect.
    pub stop_signal: StopSignal,
    /// Served name of its model; empty where only one is served.
    pub model: Arc<str>,
    /// Id of the request, as in logs.
    pub request_id: Arc<str>,
    pub trace: Option<TraceParent>,
    /// Receives the names of the workers that get work of it.
    pub workers: ServingWorkers,
}

/// Open sequences and their limit; see [`Frontend::streams`].
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct StreamCounts {
    /// Sequences submitted and not yet dropped by their clients.
    pub open: usize,
    /// Number of open sequences at which the next one is refused; `None` for no limit.
    pub max: Option<usize>,
}

/// A flag that is set when a sequence's text is complete before its tokens are: at a stop string.
/// Clones share the flag.
#[derive(Clone, Debug, Default)]
pub struct StopSignal(Arc<AtomicBool>);

impl StopSignal {
    pub fn signal(&self) {
        self.0.store(true, Ordering::Release);
    }

    pub fn is_set(&self) -> bool {
        self.0.load(Ordering::Acquire)
    }
}

/// Names of the workers that got work of a request, each once, in the order of its placements.
/// Clones share one list.
#[derive(Clone, Debug, Default)]
pub struct ServingWorkers(Arc<Mutex<Vec<String>>>);

impl ServingWorkers {
    pub fn add(&self, name: String) {
        let mut names = self.0.lock();
        if !names.contains(&name) {
            names.push(name);
        }
    }

    /// The names with commas between them; `None` without any.
    pub fn names(&self) -> Option<String> {
        let names = self.0.lock();
        (!names.is_empty()).then(|| names.join(","))
    }
}

/// The events of a sequence: tokens in order, then exactly one [`FlightEvent::Ended`].
pub type FlightStream = BoxStream<'static, FlightEvent>;

#[derive(Clone, Debug, PartialEq)]
pub enum FlightEvent {
    /// The next output token; indices count from 0 without gaps.
    Token(Emission),
    Ended {
        ending: Ending,
        /// Tokens used so far.
        usage: TokenUsage,
        /// Durations of the stages of the flight.
        timing: RequestStageTimes,
    },
}

/// Whether requests can be served; see [`Frontend::readiness`].
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum ServingReadiness {
    Ready,
    /// Prompts can be run, but no output, for this reason. Vectors need no output.
    PromptsOnly(String),
    /// Requests cannot be served now, for this reason; waiting may help.
    NotReady(String),
    /// The server shuts down; waiting does not help.
    Draining,
}

/// Whether work makes progress; see [`Frontend::progress`].
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum ServingProgress {
    /// Work proceeds, or there is none.
    Advancing,
    /// Work waits and nothing happens, for this reason or since this time.
    Stalled(String),
}
