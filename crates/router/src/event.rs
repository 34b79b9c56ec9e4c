//! Everything that can happen to the fleet, and everything the router can ask of its body.
//!
//! Owns: the whole contract between brain and body, its limits, and what is noted for people. Never:
//! text, an address or a moment of a clock; a body adds those.
//! Invariant: every value serialises, so that a tape of inputs replays to the same outputs.

use cleave_domain::{
    Ending, Failure, FlightId, HandoffId, Order, Refusal, Report, Request, Role, RouterId,
    SloPolicy, Timing, TokenId, Verdict, WorkerDescription, WorkerId, WorkerRef,
};
use serde::{Deserialize, Serialize};
use std::sync::Arc;
use std::time::Duration;

/// What a router's brain is told once, at birth.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Limits {
    /// Who this is, to other routers. Default 0: there is no other one.
    #[serde(default)]
    pub me: RouterId,
    /// Flights at once; further ones are refused. Default 4096.
    pub flights_max: u32,
    /// Flights that wait for a worker with room; further ones are refused. Default 1024.
    pub queue_max: u32,
    /// How long a flight may wait for room before it is refused. Default 30 s.
    pub queue_wait_max: Duration,
    /// Failures a flight survives, before its first token and after it: what the prompt did to one
    /// worker it may do to the next. A worker that refuses starts a new attempt too, but is no
    /// failure; `queue_wait_max` bounds those. Nor is the loss of several workers at once, for as
    /// many times. Default 3.
    pub failures_max: u32,
    /// The pause before a flight whose worker was lost is placed again, from its second failure on, and
    /// where several workers were lost at once; four times as long after each further failure.
    /// Default 50 ms; zero for none.
    #[serde(default = "retry_pause")]
    pub retry_pause: Duration,
    /// Workers that are lost within so long of each other have one cause; zero for never. Longer than
    /// it takes to notice the loss of both, whichever was heard last. Default 1 s.
    #[serde(default = "losses_together")]
    pub losses_together: Duration,
    /// How often leases are renewed; a third of the workers' lease or less. Default 5 s.
    pub renew_every: Duration,
    /// How long a reservation's answer may take before the worker is passed over; also how long one leg
    /// may take to say that all is well after the other was lost or let go. Default 2 s.
    pub reserve_timeout: Duration,
    /// Output tokens to count on when a decode worker's room is judged (or `max_tokens`, if
    /// smaller); the workers' own number. Default 256.
    pub expected_output_tokens: u32,
    /// Running sequences that leave one worker at once; the others wait, and run on. Default 4.
    pub moves_max: u32,
    /// Output tokens that a sequence may draw while it moves; past them it stands still until it has
    /// arrived. Default 64.
    pub move_ahead_tokens: u32,
    /// How long flights wait for a stuck worker to move again; then they go elsewhere, or into the
    /// line. Before that they go only where there is room at once. Default 30 s.
    pub stuck_max: Duration,
    /// How long a client may take nothing while tokens wait for it. Default 60 s.
    pub reader_wait_max: Duration,
    /// What routing goes by. Default `Slo`.
    pub mode: Mode,
    /// Whether the legs of a request may be one worker's. Default `Auto`.
    pub placement: Placement,
    /// What is promised to whom, until `PolicyChanged`. Default: one class without targets.
    pub policy: Arc<SloPolicy>,
}

/// See [`Limits::mode`].
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash, Serialize, Deserialize)]
pub enum Mode {
    /// Predicted times against targets; what cannot be met is refused.
    #[default]
    Slo,
    /// Cached prefixes and load; targets order the line and nothing more.
    Load,
    /// By turns, among those with room.
    RoundRobin,
}

/// See [`Limits::placement`].
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash, Serialize, Deserialize)]
pub enum Placement {
    /// Whichever is predicted to serve the request better, with the less harm to others.
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

impl Default for Limits {
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
            mode: Mode::Slo,
            placement: Placement::Auto,
            policy: Arc::default(),
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
        /// Why.
        why: CancelReason,
    },
    /// Answers `Fence` and `Count`, if the flight is open.
    Counted {
        /// As in the question.
        handoff: HandoffId,
        /// All output tokens that the client was given, [`Request::generated`] included.
        generated: Arc<[TokenId]>,
    },
    /// A client does not read: what was given to it waits, more than a socket holds.
    Stalled {
        /// Whose.
        flight: FlightId,
    },
    /// It reads again.
    Flowing {
        /// Whose.
        flight: FlightId,
    },
    /// An operator wants something of a worker.
    Commanded {
        /// Of which, in whatever life it is.
        worker: WorkerId,
        /// What.
        command: Command,
    },
    /// Other promises hold from now on: for what is submitted from now on, and for the order of the
    /// line. What was promised stays promised.
    PolicyChanged {
        /// The whole of it.
        policy: Arc<SloPolicy>,
    },
    /// So many requests wait that are no flights here.
    Waiting {
        /// Where.
        place: Outside,
        /// How many, from now on.
        count: u32,
    },
    /// The brain's deadline passed; an early wake-up is harmless.
    Woke,
    /// The process was asked to end: accept nothing new.
    Draining,
}

/// Where requests wait that are no flights of this router.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
pub enum Outside {
    /// At this router, for a worker to bring its tokenizer.
    Here,
    /// At the fleet's other routers, as these say over HTTP.
    Elsewhere,
}

/// See [`Input::Cancelled`].
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
pub enum CancelReason {
    /// It left.
    Left,
    /// It has all that it wanted: a stop string came. As good as done.
    Enough {
        /// Tokens that it was given.
        output_tokens: u32,
    },
}

/// See [`Input::Commanded`].
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub enum Command {
    /// Take nothing new; running sequences move to others; leave once nothing is left.
    Drain,
    /// Serve these legs from now on; running sequences that no longer fit move to others.
    Serve(Role),
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
    /// Give the client nothing more that an attempt up to this one emitted: it is over, and another
    /// worker will draw its further tokens. Answered by `Counted`.
    Fence {
        /// The last attempt ever begun.
        handoff: HandoffId,
    },
    /// Say what the client was given so far; nothing stops. Answered by `Counted`.
    Count {
        /// The attempt that needs to know.
        handoff: HandoffId,
    },
    /// The flight is over; said once.
    End {
        /// Which.
        flight: FlightId,
        /// How.
        ending: Ending,
        /// Of a flight that is done: its output tokens. Where fewer passed, some were lost, and it
        /// has failed.
        output_tokens: Option<u32>,
        /// Where its time went, as far as it came.
        timing: Timing,
    },
    /// Draining is done: no flight is left.
    Drained,
    /// What would become of a request sent now; said whenever it changes. A router is born with no
    /// pair.
    Readiness(Readiness),
    /// So many workers are wanted, where the policy says that the fleet grows and shrinks.
    Want(cleave_planner::scaling::Decision),
    /// A fact worth counting.
    Note(Note),
}

/// See [`Output::Readiness`].
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
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
    /// With so many devices, as far as they say which.
    #[serde(default)]
    pub devices: u32,
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

/// What a request is predicted to meet at a pair of workers, or one.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
pub struct Forecast {
    /// Would run the prompt.
    pub prefill: WorkerRef,
    /// Would generate; equal to `prefill` where one worker serves both legs.
    pub decode: WorkerRef,
    /// Prompt tokens that `prefill` is believed to have cached.
    pub cached_tokens: u32,
    /// From arrival to the first token.
    pub ttft: Duration,
    /// Mean gap between the tokens after it.
    pub tpot: Duration,
    /// From arrival to the last token.
    pub e2e: Duration,
    /// Tokens that it is expected to produce.
    pub output_tokens: u32,
}

/// Why something was decided about a request; kept for people, and compared in replays.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Decision {
    /// Which.
    pub flight: FlightId,
    /// Its class as it stands.
    pub class: String,
    /// Its tenant.
    pub tenant: String,
    /// Since it arrived.
    pub waited: Duration,
    /// What predictions of times to the first token were multiplied with, in thousandths: what made
    /// those of its class come true of late.
    pub ttft_permille: u32,
    /// The same for gaps between tokens.
    pub tpot_permille: u32,
    /// The pairs that were judged together, best first; the legs were ranked apart before.
    pub considered: Vec<Forecast>,
    /// What was decided.
    pub outcome: Decided,
}

/// See [`Decision::outcome`].
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub enum Decided {
    /// It goes to the first of those considered, for this reason.
    Placed(PlaceReason),
    /// It waits: no worker has room, or others come first.
    Waits,
    /// It became one of that class.
    Downgraded {
        /// Which.
        class: String,
    },
    /// It was refused.
    Refused(Refusal),
}

/// Why a pair was chosen.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
pub enum PlaceReason {
    /// Two workers: the prompt would disturb running streams, or would wait for them.
    Split,
    /// One worker that serves both legs by its role.
    Both,
    /// The prompt runs on the decode worker, in the slack of its streams.
    OnDecode,
    /// A short answer ends where its prompt ran.
    OnPrefill,
    /// Nothing is known of what things cost; by load.
    Load,
    /// By turns.
    Turn,
}

/// Facts for metrics and logs.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub enum Note {
    /// Something was decided about a request, and why.
    Decided(Box<Decision>),
    /// A flight ended, and this is what it was worth. Said once of each, before its `End`.
    Judged {
        /// Which.
        flight: FlightId,
        /// Its class in the end.
        class: String,
        /// Its tenant.
        tenant: String,
        /// What came of its promise.
        verdict: Verdict,
        /// Where its time went.
        timing: Timing,
        /// Tokens it produced.
        output_tokens: u32,
        /// What was predicted when it was placed last; none for one never placed by prices.
        forecast: Option<Box<Forecast>>,
    },
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
    /// An attempt failed and another is to be started.
    Retried {
        /// The attempt that failed.
        handoff: HandoffId,
        /// Why.
        failure: Failure,
        /// Output tokens that the client has; if any, the stream is resumed.
        generated_tokens: u32,
    },
    /// A running sequence is to move. One `Moved` or `Stayed` follows, before its flight ends.
    Moving {
        /// The new attempt.
        handoff: HandoffId,
        /// From.
        from: WorkerRef,
        /// To.
        to: WorkerRef,
        /// Why.
        why: MoveReason,
    },
    /// It runs there.
    Moved {
        /// The new attempt.
        handoff: HandoffId,
        /// From the first order on.
        took: Duration,
    },
    /// It did not: it goes on where it was, or from its client's tokens, or is over.
    Stayed {
        /// The new attempt.
        handoff: HandoffId,
        /// Why; `Rejected` where the flight ended meanwhile and nothing had broken.
        failure: Failure,
    },
    /// From the client's leaving to the last release.
    CancelFreed {
        /// Which.
        flight: FlightId,
        /// How long.
        took: Duration,
        /// How far the flight had come when its client left.
        stage: CancelStage,
    },
    /// A worker that makes no progress is passed over, until it does.
    WorkerStuck {
        /// Who.
        worker: WorkerRef,
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

/// Why a running sequence moves.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
pub enum MoveReason {
    /// Its worker leaves.
    Drain,
    /// Its worker serves other legs from now on.
    Role,
    /// Its worker is about to run out of blocks.
    Crowded,
}

/// How far a flight had come.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
pub enum CancelStage {
    /// It waited for room.
    Queued,
    /// The decode worker was asked for blocks.
    Reserving,
    /// Its prompt was to run, or ran.
    Prefilling,
    /// Its first token was drawn; blocks were on their way.
    Sending,
    /// It generated.
    Decoding,
}
