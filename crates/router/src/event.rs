//! Everything that can happen to the fleet, and everything the router can ask of its body.

use cleave_domain::{
    Ending, Failure, FlightId, HandoffId, Order, Refusal, Report, Request, WorkerDescription,
    WorkerRef,
};
use serde::{Deserialize, Serialize};
use std::sync::Arc;
use std::time::Duration;

/// What a router's brain is told once, at birth.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Limits {
    /// Flights at once; further ones are refused.
    pub flights_max: u32,
    /// Flights that wait for a worker with room; further ones are refused.
    pub queue_max: u32,
    /// How long a flight may wait for room before it is refused.
    pub queue_wait_max: Duration,
    /// Failures a flight survives. A worker that refuses starts a new attempt too, but is no
    /// failure; `queue_wait_max` bounds those.
    pub failures_max: u32,
    /// How often leases are renewed; a third of the workers' lease or less.
    pub renew_every: Duration,
    /// How long a reservation's answer may take before the worker is passed over; also how long one leg
    /// may take to say that all is well after the other was lost or let go.
    pub reserve_timeout: Duration,
    /// Output tokens to count on when a decode worker's room is judged (or `max_tokens`, if
    /// smaller); the workers' own number.
    pub expected_output_tokens: u32,
}

/// What happened.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub enum Input {
    /// A worker connected. If it was known in an earlier life, that life is over.
    WorkerJoined {
        /// Who.
        worker: WorkerRef,
        /// What it is.
        description: WorkerDescription,
    },
    /// A worker is gone.
    WorkerLost {
        /// Who.
        worker: WorkerRef,
    },
    /// A worker said something.
    Told {
        /// Who.
        worker: WorkerRef,
        /// What.
        report: Report,
    },
    /// A client wants a sequence.
    Submitted {
        /// The flight it becomes.
        flight: FlightId,
        /// What.
        request: Arc<Request>,
    },
    /// The client no longer wants it.
    Cancelled {
        /// Which.
        flight: FlightId,
    },
    /// The brain's deadline passed; an early wake-up is harmless.
    Woke,
    /// The process was asked to end: accept nothing new.
    Draining,
}

/// What the body must do, in this order.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub enum Output {
    /// Say this to a worker.
    Tell {
        /// Who.
        worker: WorkerRef,
        /// What.
        order: Order,
    },
    /// The flight is over; said once.
    End {
        /// Which.
        flight: FlightId,
        /// How.
        ending: Ending,
    },
    /// Draining is done: no flight is left.
    Drained,
    /// A fact worth counting.
    Note(Note),
}

/// Facts for metrics and logs.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub enum Note {
    /// Both legs were chosen.
    Placed {
        /// The attempt.
        handoff: HandoffId,
        /// Runs the prompt.
        prefill: WorkerRef,
        /// Generates; equal to `prefill` when aggregated.
        decode: WorkerRef,
        /// Prompt tokens the prefill worker is believed to have cached.
        cached_tokens: u32,
        /// From submission.
        waited: Duration,
    },
    /// A worker would not take its leg, or did not answer in time; the flight goes elsewhere.
    PassedOver {
        /// The attempt.
        handoff: HandoffId,
        /// Who.
        worker: WorkerRef,
        /// What it said; `None` when it said nothing in time.
        refusal: Option<Refusal>,
    },
    /// A report about a past attempt, or of a past life, was ignored.
    Stale {
        /// Whose.
        worker: WorkerRef,
    },
    /// An attempt failed and another was started.
    Retried {
        /// The attempt that failed.
        handoff: HandoffId,
        /// Why.
        failure: Failure,
    },
    /// From the client's leaving to the last release.
    CancelFreed {
        /// Which.
        flight: FlightId,
        /// How long.
        took: Duration,
    },
    /// How the fleet stands.
    Fleet {
        /// Connected workers.
        workers: u32,
        /// Flights not ended.
        flights: u32,
        /// Flights waiting for room.
        flights_waiting: u32,
    },
}
