//! Events that reach a router's driver from its own process.
//!
//! Owns: the list, which is closed. Never: handles one.
//! Invariant: what a worker or a connection sends is not here; it has a channel of its own.

use cleave_domain::{AdapterCommand, FlightId, Request, SloPolicy, WorkerId};
use cleave_router::{CancelReason, OperatorRequest};
use std::collections::BTreeMap;
use std::sync::Arc;
use tokio::sync::oneshot;

/// Events from clients, operators and the process that a router's driver receives.
#[derive(Debug)]
pub(crate) enum RouterEvent {
    /// A client submits a sequence.
    Submitted {
        flight: FlightId,
        /// The served name of its model; empty where only one is served.
        model: Arc<str>,
        request: Arc<Request>,
    },
    /// A client left before the last token.
    Cancelled { flight: FlightId, why: CancelReason },
    /// A client does not read its events.
    Stalled { flight: FlightId },
    /// The client reads again.
    Flowing { flight: FlightId },
    /// An operator's command for a worker.
    Commanded {
        worker: WorkerId,
        command: OperatorRequest,
    },
    /// An operator changes the adapters of a model's workers.
    AdapterChanged {
        model: Arc<str>,
        command: AdapterCommand,
        answer: oneshot::Sender<Result<(), String>>,
    },
    /// A new SLO policy holds from now on.
    PolicyChanged { policy: Arc<SloPolicy> },
    /// The number of requests of a model that wait here, without being flights, for its first
    /// worker. The name is empty before a model is known.
    WaitingHere { model: Arc<str>, count: u32 },
    /// The number of requests that are open at other routers, by model.
    WaitingElsewhere { counts: BTreeMap<String, u32> },
    /// The process was asked to end.
    Drain,
    /// Stop at once; what is left of flights is ended.
    Stop,
}
