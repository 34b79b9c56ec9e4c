//! The line between one router and one worker, whatever carries it.
//!
//! Invariant: what a worker emits and reports travels in one order; a line that cannot take more is
//! cut, never blocked on, because a brain's driver waits for nobody.

use crate::trace::Mark;
use cleave_api::ModelFiles;
use cleave_domain::{Emission, HandoffId, Order, Report, RouterId, WorkerDescription, WorkerRef};
use std::sync::Arc;
use std::time::Duration;
use tokio::sync::mpsc;

/// Things that wait on one line, each direction; a peer that is so far behind is lost.
pub(crate) const LINE_ITEMS_MAX: usize = 1 << 16;

/// From a router to a worker.
#[derive(Clone, Debug, PartialEq)]
pub(crate) enum Downward {
    /// Where another worker is; before the first order that needs it.
    Peer {
        worker: WorkerRef,
        data_address: String,
    },
    /// That life of a worker is over, or lost to this router.
    PeerGone { worker: WorkerRef },
    /// A worker of the same name that started later is connected, and this line ends.
    NameTaken { data_address: String },
    Order {
        order: Order,
        /// How the request that it is about is known.
        mark: Option<Arc<Mark>>,
    },
}

/// From a worker to a router.
#[derive(Clone, Debug, PartialEq)]
pub(crate) enum Upward {
    Report(Report),
    /// Tokens drawn at one go; what one step gives travels together.
    Emissions(Vec<(HandoffId, Emission)>),
    /// For operators; the router's brain does not hear it.
    Link(LinkState),
}

/// A link to another worker, as it was measured at its start.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct LinkState {
    pub(crate) peer: WorkerRef,
    /// What carries it, for people.
    pub(crate) transport: String,
    pub(crate) bytes_per_second: u64,
    pub(crate) latency: Duration,
}

/// Who joins.
#[derive(Clone, Debug, PartialEq)]
pub(crate) struct Introduction {
    pub(crate) worker: WorkerRef,
    /// For people: logs and metrics.
    pub(crate) name: String,
    pub(crate) description: WorkerDescription,
    /// `host:port` of its data listener; empty for a worker that is reached in process.
    pub(crate) data_address: String,
    pub(crate) files: Arc<ModelFiles>,
    /// A connection on which it hears nothing for so long is over.
    pub(crate) silence: Duration,
}

/// A router, as a worker's driver knows it.
#[derive(Clone, Debug)]
pub(crate) struct RouterLine {
    pub(crate) router: RouterId,
    /// Tells two connections to the same router apart.
    pub(crate) serial: u64,
    pub(crate) out: mpsc::Sender<Upward>,
}

/// A worker, as a router's driver knows it.
#[derive(Clone, Debug)]
pub(crate) struct WorkerLine {
    pub(crate) introduction: Introduction,
    /// Tells two connections of the same life apart.
    pub(crate) serial: u64,
    pub(crate) out: mpsc::Sender<Downward>,
}
