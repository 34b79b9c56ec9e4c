//! Everything that can happen to the fleet, and everything the router can ask of its body.

use cleave_domain::{
    Ending, Failure, FlightId, HandoffId, Order, Refusal, Report, Request, Role, WorkerDescription,
    WorkerRef,
};
use serde::{Deserialize, Serialize};
use std::sync::Arc;
use std::time::Duration;

/// What a router's brain is told once, at birth.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Limits {
    /// Flights at once; further ones are refused. Default 4096.
    pub flights_max: u32,
    /// Flights that wait for a worker with room; further ones are refused. Default 1024.
    pub queue_max: u32,
    /// How long a flight may wait for room before it is refused. Default 30 s.
    pub queue_wait_max: Duration,
    /// Failures a flight survives. A worker that refuses starts a new attempt too, but is no
    /// failure; `queue_wait_max` bounds those. Default 2.
    pub failures_max: u32,
    /// How often leases are renewed; a third of the workers' lease or less. Default 5 s.
    pub renew_every: Duration,
    /// How long a reservation's answer may take before the worker is passed over; also how long one leg
    /// may take to say that all is well after the other was lost or let go. Default 2 s.
    pub reserve_timeout: Duration,
    /// Output tokens to count on when a decode worker's room is judged (or `max_tokens`, if
    /// smaller); the workers' own number. Default 256.
    pub expected_output_tokens: u32,
}

impl Default for Limits {
    fn default() -> Self {
        Self {
            flights_max: 4096,
            queue_max: 1024,
            queue_wait_max: Duration::from_secs(30),
            failures_max: 2,
            renew_every: Duration::from_secs(5),
            reserve_timeout: Duration::from_secs(2),
            expected_output_tokens: 256,
        }
    }
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
    /// What would become of a request sent now; said whenever it changes. A router is born with no
    /// pair.
    Readiness(Readiness),
    /// A fact worth counting.
    Note(Note),
}

/// See [`Output::Readiness`].
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub enum Readiness {
    /// A pair of workers could serve it, now or once they have room.
    Ready,
    /// No pair could; so many workers that accept requests serve each leg.
    NoPair {
        /// Run prompts.
        prefill: u32,
        /// Generate.
        decode: u32,
    },
    /// The router accepts nothing new.
    Draining,
}

impl Readiness {
    /// Nobody is there.
    pub const NONE: Self = Self::NoPair {
        prefill: 0,
        decode: 0,
    };
}

/// How many workers of each role.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Census {
    /// Run prompts only.
    pub prefill: u32,
    /// Generate only.
    pub decode: u32,
    /// Do either.
    pub both: u32,
}

impl Census {
    /// All of them.
    pub fn total(self) -> u32 {
        self.prefill + self.decode + self.both
    }

    pub(crate) fn of_role(&mut self, role: Role) -> &mut u32 {
        match role {
            Role::Prefill => &mut self.prefill,
            Role::Decode => &mut self.decode,
            Role::Both => &mut self.both,
        }
    }
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
        workers: Census,
        /// Flights not ended.
        flights: u32,
        /// Flights waiting for room.
        flights_waiting: u32,
    },
}
