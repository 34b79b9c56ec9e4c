//! Everything that can happen to the fleet, and every action that the router can ask of its body.
//!
//! Owns: the whole contract between brain and body, its limits, and the notes for metrics and logs.
//! Never: text, an address or a reading of a clock; a body adds those.
//! Invariant: every value serialises, so that a tape of inputs replays to the same outputs.

use cleave_domain::{
    Ending, Failure, FlightId, HandoffId, Order, Refusal, Report, Request, RequestStageTimes, Role,
    RouterId, SloPolicy, SloVerdict, TokenId, WorkerDescription, WorkerId, WorkerRef,
};
use serde::{Deserialize, Serialize};
use std::sync::Arc;
use std::time::Duration;

/// Configuration of a router's brain, fixed at construction.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct RouterLimits {
    /// This router's id among other routers. Default 0: there is no other one.
    #[serde(default)]
    pub me: RouterId,
    /// Flights at once; further ones are refused. Default 4096.
    pub flights_max: u32,
    /// Flights that wait for a worker with room; further ones are refused. Default 1024.
    pub queue_max: u32,
    /// How long a flight may wait for room before it is refused. Default 30 s.
    pub queue_wait_max: Duration,
    /// Failures that a flight survives, before its first token and after it: the bound exists
    /// because the cause may be the prompt itself. A worker that refuses starts a new attempt too,
    /// but is no failure; `queue_wait_max` bounds those. Nor is the loss of several workers at
    /// once, for as many times. Default 3.
    pub failures_max: u32,
    /// The pause before a flight whose worker was lost is placed again, from its second failure on,
    /// and where several workers were lost at once; four times as long after each further failure.
    /// Default 50 ms; zero for none.
    #[serde(default = "retry_pause")]
    pub retry_pause: Duration,
    /// Workers that are lost within this time of each other have one cause; zero for never. Longer
    /// than it takes to notice the loss of both, whichever sent something last. Default 1 s.
    #[serde(default = "losses_together")]
    pub losses_together: Duration,
    /// How often leases are renewed; a third of the workers' lease or less. Default 5 s.
    pub renew_every: Duration,
    /// How long a worker may take to answer an order to reserve or to run before it is passed over;
    /// also how long one leg may take to confirm after the other was lost or released. Default 2 s.
    pub reserve_timeout: Duration,
    /// Output tokens assumed when a decode worker's room is judged (or `max_tokens`, if smaller);
    /// the workers use the same number. Default 256.
    pub expected_output_tokens: u32,
    /// Running sequences that leave one worker at once; the others wait, and run on. Default 4.
    pub moves_max: u32,
    /// Output tokens that a sequence may draw while it moves; after them it is paused until it has
    /// arrived. Default 64.
    pub move_ahead_tokens: u32,
    /// How long flights wait for a stuck worker to progress again; then they go elsewhere, or into
    /// the queue. Before that they leave only for room that is free at once. Default 30 s.
    pub stuck_max: Duration,
    /// How long a client may take nothing while tokens wait for it. Default 60 s.
    pub reader_wait_max: Duration,
    /// Basis of routing decisions. Default `Slo`.
    pub mode: RoutingMode,
    /// Whether one worker may serve both legs of a request. Default `Auto`.
    pub placement: LegPlacement,
    /// Classes and targets, until `PolicyChanged`. Default: one class without targets.
    pub policy: Arc<SloPolicy>,
}

#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash, Serialize, Deserialize)]
pub enum RoutingMode {
    /// Predicted times against targets; a request whose target cannot be met is refused.
    #[default]
    Slo,
    /// Cached prefixes and load; targets only order the queue.
    Load,
    /// Round robin, among workers with room.
    RoundRobin,
}

#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash, Serialize, Deserialize)]
pub enum LegPlacement {
    /// The shape predicted to serve the request better, at the lower cost to others.
    #[default]
    Auto,
    /// Two workers, unless one serves both legs by its role.
    Split,
    /// One worker, whatever its role.
    Whole,
}

fn retry_pause() -> Duration {
    Duration::from_millis(50)
}

fn losses_together() -> Duration {
    Duration::from_secs(1)
}

impl Default for RouterLimits {
    fn default() -> Self {
        Self {
            me: RouterId(0),
            flights_max: 4096,
            queue_max: 1024,
            queue_wait_max: Duration::from_secs(30),
            failures_max: 3,
            retry_pause: retry_pause(),
            losses_together: losses_together(),
            renew_every: Duration::from_secs(5),
            reserve_timeout: Duration::from_secs(2),
            expected_output_tokens: 256,
            moves_max: 4,
            move_ahead_tokens: 64,
            stuck_max: Duration::from_secs(30),
            reader_wait_max: Duration::from_secs(60),
            mode: RoutingMode::Slo,
            placement: LegPlacement::Auto,
            policy: Arc::default(),
        }
    }
}

#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub enum RouterInput {
    /// A worker connected. An earlier incarnation of it is over.
    WorkerJoined {
        worker: WorkerRef,
        description: WorkerDescription,
    },
    /// A worker's connection ended.
    WorkerLost { worker: WorkerRef },
    /// A worker sent a report.
    #[serde(rename = "Told")]
    WorkerReported { worker: WorkerRef, report: Report },
    /// A client requests a sequence.
    Submitted {
        /// The flight it becomes.
        flight: FlightId,
        request: Arc<Request>,
    },
    /// The client cancelled, or left.
    Cancelled { flight: FlightId, why: CancelReason },
    /// Answers `Fence` and `Count`, if the flight is open.
    Counted {
        /// As in the question.
        handoff: HandoffId,
        /// All output tokens that the client was given, [`Request::generated`] included.
        generated: Arc<[TokenId]>,
    },
    /// A client does not read: more tokens wait for it than a socket holds.
    #[serde(rename = "Stalled")]
    ReaderStalled { flight: FlightId },
    #[serde(rename = "Flowing")]
    ReaderResumed { flight: FlightId },
    /// An operator commands a worker.
    Commanded {
        /// The worker, in any incarnation.
        worker: WorkerId,
        command: OperatorRequest,
    },
    /// A new policy: for requests submitted from now on, and for the order of the queue. Targets of
    /// earlier requests stay.
    PolicyChanged { policy: Arc<SloPolicy> },
    /// The number of requests that wait outside this brain has changed.
    Waiting {
        place: OutsideQueue,
        /// The present number of those requests.
        count: u32,
    },
    /// The brain's deadline passed; an early wake-up is harmless.
    Woke,
    /// The process was asked to end: accept nothing new.
    Draining,
}

/// Where requests wait that are not flights of this router.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
pub enum OutsideQueue {
    /// At this router, for a worker to bring its tokenizer.
    Here,
    /// At the fleet's other routers, as reported by them over HTTP.
    Elsewhere,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
pub enum CancelReason {
    Left,
    /// The client has all that it wanted, since a stop string was found. Counts as done.
    Enough {
        /// Tokens that the client was given.
        output_tokens: u32,
    },
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub enum OperatorRequest {
    /// Accept nothing new; running sequences move to others; leave once nothing is left.
    Drain,
    /// Change the role; running sequences that no longer fit move to others.
    Serve(Role),
}

/// Work for the body, to be performed in this order.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub enum RouterOutput {
    /// Send this order to a worker.
    #[serde(rename = "Tell")]
    Order { worker: WorkerRef, order: Order },
    /// Stop passing tokens of this attempt and of earlier ones to the client: they are over, and
    /// another worker will draw the following tokens. Answered by `Counted`.
    Fence {
        /// The last attempt that was begun.
        handoff: HandoffId,
    },
    /// Report the tokens that the client was given so far, without stopping anything. Answered by
    /// `Counted`.
    Count {
        /// The attempt that asks.
        handoff: HandoffId,
    },
    /// The flight is over; emitted once.
    End {
        flight: FlightId,
        ending: Ending,
        /// Output tokens of a flight that is done. If fewer reached the client, some were lost, and
        /// the flight has failed.
        output_tokens: Option<u32>,
        /// Times of the stages, as far as it came.
        timing: RequestStageTimes,
    },
    /// Draining is complete: no flight is left.
    Drained,
    /// The outcome of a request sent now; emitted whenever it changes. Initially a router has no
    /// pair.
    Readiness(RouterReadiness),
    /// The wanted numbers of workers, where the policy has an autoscaler.
    #[serde(rename = "Want")]
    WorkersWanted(cleave_planner::scaling::ScalerDecision),
    /// A fact for metrics, traces and logs.
    Note(RouterNote),
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
pub enum RouterReadiness {
    /// A pair of workers could serve it, now or once they have room.
    Ready,
    /// No pair could; the numbers are workers that accept requests of each leg.
    NoPair { prefill: u32, decode: u32 },
    /// The router accepts nothing new.
    Draining,
}

impl RouterReadiness {
    pub const NONE: Self = Self::NoPair {
        prefill: 0,
        decode: 0,
    };
}

/// Number of workers of each role.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct RoleCounts {
    pub prefill: u32,
    pub decode: u32,
    pub both: u32,
    /// Number of devices, as far as workers report them.
    #[serde(default)]
    pub devices: u32,
}

impl RoleCounts {
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

/// Predicted times of a request on a pair of workers, or on one.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
pub struct RequestForecast {
    /// The worker for the prompt.
    pub prefill: WorkerRef,
    /// The worker for decoding; equal to `prefill` where one worker serves both legs.
    pub decode: WorkerRef,
    /// Prompt tokens that `prefill` is believed to have cached.
    pub cached_tokens: u32,
    /// From arrival to the first token.
    pub ttft: Duration,
    /// Mean gap between the tokens after it.
    pub tpot: Duration,
    /// From arrival to the last token.
    pub e2e: Duration,
    /// Expected number of output tokens.
    pub output_tokens: u32,
}

/// A decision about a request with its reasons; for logs, and compared in replays.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct PlacementDecision {
    pub flight: FlightId,
    /// Its class at this decision.
    pub class: String,
    pub tenant: String,
    pub waited: Duration,
    /// Correction of predicted times to the first token, in thousandths: the factor that made those
    /// of its class come true lately.
    pub ttft_permille: u32,
    /// The same for gaps between tokens.
    pub tpot_permille: u32,
    /// The pairs that were compared, best first; the legs were ranked separately before.
    pub considered: Vec<RequestForecast>,
    pub outcome: DecisionOutcome,
}

#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub enum DecisionOutcome {
    /// It goes to the first of the considered pairs, for this reason.
    Placed(PlacementReason),
    /// It waits: no worker has room, or others come first.
    Waits,
    /// It was moved to this class.
    Downgraded {
        class: String,
    },
    Refused(Refusal),
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
pub enum PlacementReason {
    /// Two workers: the prompt would disturb running streams, or would wait for them.
    Split,
    /// One worker that serves both legs by its role.
    Both,
    /// The prompt runs on the decode worker, in the slack of its streams.
    OnDecode,
    /// A short answer ends where its prompt ran.
    OnPrefill,
    /// Prices are unknown; chosen by load.
    Load,
    Turn,
}

/// Facts for metrics and logs.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub enum RouterNote {
    /// A decision about a request, and its reasons.
    Decided(Box<PlacementDecision>),
    /// The outcome of a flight. Emitted once for each, before its `End`.
    Judged {
        flight: FlightId,
        /// Its class at the end.
        class: String,
        tenant: String,
        /// Outcome for its targets.
        verdict: SloVerdict,
        /// Times of its stages.
        timing: RequestStageTimes,
        output_tokens: u32,
        /// The forecast of its last placement; none for one never placed by prices.
        forecast: Option<Box<RequestForecast>>,
    },
    /// Both legs were chosen.
    Placed {
        handoff: HandoffId,
        prefill: WorkerRef,
        /// The worker for decoding; equal to `prefill` when aggregated.
        decode: WorkerRef,
        /// Prompt tokens the prefill worker is believed to have cached.
        cached_tokens: u32,
        waited: Duration,
    },
    /// A worker refused its leg, or did not answer in time; the flight goes elsewhere.
    PassedOver {
        handoff: HandoffId,
        worker: WorkerRef,
        /// Its answer; `None` if it did not answer in time.
        refusal: Option<Refusal>,
    },
    /// A report about a past attempt, or of a past incarnation, was ignored.
    Stale { worker: WorkerRef },
    /// An attempt failed and another is to be started.
    Retried {
        /// The attempt that failed.
        handoff: HandoffId,
        failure: Failure,
        /// Output tokens that the client has; if any, the stream is resumed.
        generated_tokens: u32,
    },
    /// A running sequence is to move. One `Moved` or `MigrationAborted` follows, before its flight
    /// ends.
    Moving {
        handoff: HandoffId,
        from: WorkerRef,
        to: WorkerRef,
        why: MoveReason,
    },
    Moved {
        handoff: HandoffId,
        /// From the first order on.
        took: Duration,
    },
    /// The move was aborted: the sequence goes on where it was, or from its client's tokens, or is
    /// over.
    #[serde(rename = "Stayed")]
    MigrationAborted {
        handoff: HandoffId,
        /// The reason; `Rejected` where the flight ended meanwhile and nothing had broken.
        failure: Failure,
    },
    /// All legs of a cancelled flight were released; measured from the cancel.
    CancelFreed {
        flight: FlightId,
        took: Duration,
        /// How far the flight had come when its client left.
        stage: CancelStage,
    },
    /// A worker that makes no progress is passed over, until it does.
    WorkerStuck { worker: WorkerRef },
    /// A worker reported more cached prefixes than are kept of one; some were dropped.
    PrefixDropped {
        worker: WorkerRef,
        dropped_count: usize,
    },
    /// State of the fleet, whenever it has changed.
    Fleet {
        workers: RoleCounts,
        flights: u32,
        /// Flights waiting for room.
        flights_waiting: u32,
    },
}

impl RouterNote {
    /// The flight that it is about, if any.
    pub fn flight(&self) -> Option<FlightId> {
        match self {
            Self::Decided(decision) => Some(decision.flight),
            Self::Judged { flight, .. } | Self::CancelFreed { flight, .. } => Some(*flight),
            Self::Placed { handoff, .. }
            | Self::PassedOver { handoff, .. }
            | Self::Retried { handoff, .. }
            | Self::Moving { handoff, .. }
            | Self::Moved { handoff, .. }
            | Self::MigrationAborted { handoff, .. } => Some(handoff.flight),
            Self::Stale { .. }
            | Self::WorkerStuck { .. }
            | Self::PrefixDropped { .. }
            | Self::Fleet { .. } => None,
        }
    }
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
pub enum MoveReason {
    Drain,
    /// Its worker serves other legs from now on.
    Role,
    /// Its worker is about to run out of blocks.
    #[serde(rename = "Crowded")]
    MemoryPressure,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
pub enum CancelStage {
    /// It waited for room.
    Queued,
    /// The decode worker was asked for blocks, or one worker to run both legs; no answer yet.
    Reserving,
    /// Its prompt was to run, or ran.
    Prefilling,
    /// Its first token was drawn; blocks were being sent.
    Sending,
    Decoding,
}
