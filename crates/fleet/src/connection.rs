//! The connection between one router and one worker, independent of what carries it.
//!
//! Invariant: what a worker emits and reports travels in one order. A connection that cannot take
//! more is cut; a driver never blocks on it.

use cleave_domain::{
    AdapterChangeId, AdapterCommand, Emission, HandoffId, Order, PrefillTiming, Report, RouterId,
    WorkerDescription, WorkerRef,
};
use cleave_telemetry::RequestContext;
use cleave_text::ModelFiles;
use cleave_transfer::WriteGrant;
use serde::{Deserialize, Serialize};
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;
use std::time::Instant;
use tokio::sync::{mpsc, watch};

/// Messages that may wait on one connection in each direction; a peer further behind than that
/// counts as lost.
pub(crate) const CONNECTION_ITEMS_MAX: usize = 1 << 16;

/// From a router to a worker.
#[derive(Clone, Debug, PartialEq)]
pub enum ToWorker {
    /// The address of another worker; sent before the first order that needs it.
    Peer {
        worker: WorkerRef,
        data_address: String,
    },
    /// That incarnation of a worker has ended, or this router has lost it.
    PeerGone { worker: WorkerRef },
    /// A worker of the same name that started later is connected; this connection ends.
    NameTaken { data_address: String },
    /// A change of the adapters that the worker serves, which it answers.
    Adapter {
        /// The number that the answer names.
        request: u64,
        /// The place of the change among all changes: one that comes after a later change of its
        /// name has no effect.
        change: AdapterChangeId,
        command: AdapterCommand,
    },
    Order {
        order: Order,
        /// The id and the trace of the order's request.
        context: Option<Arc<RequestContext>>,
    },
    /// Permits the worker to write into blocks that another worker reserved; sent before the order
    /// that needs it.
    Grant {
        handoff: HandoffId,
        grant: WriteGrant,
    },
}

/// From a worker to a router.
#[derive(Clone, Debug, PartialEq)]
pub enum FromWorker {
    Report(Report),
    /// Output tokens; those of one step travel together.
    Emissions(Vec<(HandoffId, Emission)>),
    /// Permits a sender to write into blocks reserved here; sent before the answer to the
    /// reservation.
    Grant {
        handoff: HandoffId,
        grant: WriteGrant,
    },
    /// For operators; the router's brain does not see it.
    Link(LinkState),
    /// Answers [`ToWorker::Adapter`], after the report of the adapters.
    AdapterAnswer {
        request: u64,
        /// The reason why it was refused.
        outcome: Result<(), String>,
    },
}

/// A link to another worker, as it was measured at its start.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct LinkState {
    pub peer: WorkerRef,
    /// The transport's name, for display.
    pub transport: String,
    pub bytes_per_second: u64,
    pub latency: Duration,
}

/// A worker's registration at a router.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Registration {
    pub worker: WorkerRef,
    /// Shown in logs and metrics.
    pub name: String,
    pub description: WorkerDescription,
    /// `host:port` of its data listener; empty for a worker that is reached in process.
    pub data_address: String,
    pub files: Arc<ModelFiles>,
    /// The worker ends a connection on which it receives nothing for this long.
    pub silence: Duration,
}

/// A name appears in logs, metrics and file names.
const NAME_CHARS_MAX: usize = 128;

/// The reason why this cannot be a worker's name; `None` if it can.
pub fn invalid_name_reason(name: &str) -> Option<&'static str> {
    let fits = |c: char| c.is_alphanumeric() || "-_.:@".contains(c);
    if name.is_empty() {
        Some("is empty")
    } else if name.chars().count() > NAME_CHARS_MAX {
        Some("is longer than 128 characters")
    } else if !name.chars().all(fits) {
        Some("has a character other than letters, digits and - _ . : @")
    } else {
        None
    }
}

/// A worker's connection to a router.
#[derive(Clone, Debug)]
pub struct RouterConnection {
    pub router: RouterId,
    /// Tells two connections to the same router apart.
    pub serial: u64,
    pub out: mpsc::Sender<FromWorker>,
}

/// A router's connection to a worker.
#[derive(Clone, Debug)]
pub struct WorkerConnection {
    pub registration: Registration,
    /// Tells two connections of the same incarnation apart.
    pub serial: u64,
    pub out: mpsc::Sender<ToWorker>,
    /// Counts the worker's messages where they are received.
    pub activity: Arc<WorkerActivity>,
    /// Becomes true when the worker must wait because another worker has its name.
    pub waits_for_name: watch::Sender<bool>,
}

/// Statistics of one worker's connection, for the dashboard; nothing waits for them.
#[derive(Debug)]
pub struct WorkerActivity {
    since: Instant,
    tokens: AtomicU64,
    /// Microseconds from `since` to the last message; 0 before the first.
    received_at: AtomicU64,
    /// Microseconds from `since` to the last tokens; 0 before the first.
    emitted_at: AtomicU64,
    /// Microseconds that the last step took; 0 before the first.
    step: AtomicU64,
}

impl Default for WorkerActivity {
    fn default() -> Self {
        Self {
            since: Instant::now(),
            tokens: AtomicU64::new(0),
            received_at: AtomicU64::new(0),
            emitted_at: AtomicU64::new(0),
            step: AtomicU64::new(0),
        }
    }
}

/// Emissions further apart than this are not of consecutive steps.
const EMISSION_GAP_MAX: Duration = Duration::from_secs(2);

impl WorkerActivity {
    /// Records tokens that arrived together.
    pub(crate) fn record_tokens(&self, tokens: usize) {
        let now = self.touch();
        self.tokens.fetch_add(tokens as u64, Ordering::Relaxed);
        let before = self.emitted_at.swap(now, Ordering::Relaxed);
        let gap = now.saturating_sub(before);
        if before > 0 && u128::from(gap) < EMISSION_GAP_MAX.as_micros() {
            self.step.store(gap.max(1), Ordering::Relaxed);
        }
    }

    /// Records a report, and the run time of a prompt if the report has one.
    pub(crate) fn record_report(&self, report: &Report) {
        self.touch();
        if let Report::Prefilled { timing, .. } = report {
            let PrefillTiming { wait: _, run } = timing;
            let run = u64::try_from(run.as_micros()).unwrap_or(u64::MAX);
            if run > 0 {
                self.step.store(run, Ordering::Relaxed);
            }
        }
    }

    fn touch(&self) -> u64 {
        let now = u64::try_from(self.since.elapsed().as_micros()).unwrap_or(u64::MAX);
        let now = now.max(1);
        self.received_at.store(now, Ordering::Relaxed);
        now
    }

    pub fn tokens_count(&self) -> u64 {
        self.tokens.load(Ordering::Relaxed)
    }

    /// The duration of the last step: the time between two emissions, or the run of a whole prompt.
    pub fn step_time(&self) -> Option<Duration> {
        let micros = self.step.load(Ordering::Relaxed);
        (micros > 0).then(|| Duration::from_micros(micros))
    }

    /// The time since the last message.
    pub fn silence(&self) -> Option<Duration> {
        let received = self.received_at.load(Ordering::Relaxed);
        let received = (received > 0).then(|| Duration::from_micros(received));
        received.map(|received| self.since.elapsed().saturating_sub(received))
    }
}
