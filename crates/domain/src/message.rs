//! The messages between routers and workers. The same values travel through a channel in one
//! process, a gRPC stream between processes, and the simulated links.

use crate::{
    AdapterId, AdapterReport, BlockHash, BlockRef, DecodeTiming, HandoffId, PrefillTiming, Prices,
    Request, Role, SampledToken, ScalingGossip, SloMetric, WorkerLoad, WorkerRef,
};
use serde::{Deserialize, Serialize};
use std::sync::Arc;
use std::time::Duration;

/// A message from a router to a worker.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub enum Order {
    /// Decode leg: reserve blocks for a sequence that another worker will send.
    Reserve(ReserveOrder),
    /// Prefill leg: run the prompt and send its KV to another worker.
    Prefill(PrefillOrder),
    /// Decode leg: migrate a running sequence to another decode worker.
    Migrate(MigrateOrder),
    /// Renew the leases of these hand-offs.
    Renew {
        /// All hand-offs of the router on this worker.
        handoffs: Vec<HandoffId>,
    },
    /// Cancel a hand-off and free all that it holds. At the source of a `MigrateOrder`, the new
    /// attempt names only the migration: it is aborted unless the seal was sent, and the old
    /// attempt continues.
    Cancel {
        /// The hand-off to cancel, or the new attempt of a migration.
        handoff: HandoffId,
    },
    /// Accept nothing new and leave once nothing is left, as after a request to stop the process.
    Drain,
    /// Serve these legs from now on; sequences of another leg continue until they are migrated or
    /// end.
    Serve {
        /// The legs to serve from now on.
        role: Role,
    },
    /// Relay this to every other connected router.
    #[serde(rename = "PassOn")]
    Relay(Arc<ScalingGossip>),
    /// Both legs: reserve blocks and run the request here, from its prompt to its last token. A
    /// pooled request has no decode leg: any worker that serves prefill legs runs it.
    Run(RunOrder),
    /// Begin to load an adapter, since a prompt with it follows once the decode worker of its pair
    /// has answered. Nothing is answered: the prompt waits for the adapter in any case.
    FetchAdapter {
        /// The adapter to load.
        adapter: AdapterId,
    },
}

impl Order {
    /// The hand-off that it is about, and the request that it brings, where it may have to wait for
    /// what the request needs. Other orders never wait; a renewal of a hand-off comes again.
    pub fn subject(&self) -> (Option<HandoffId>, Option<&Request>) {
        let (handoff, request) = match self {
            Self::Reserve(reserve) => (reserve.handoff, &reserve.request),
            Self::Prefill(prefill) => (prefill.handoff, &prefill.request),
            Self::Run(run) => (run.handoff, &run.request),
            Self::Cancel { handoff } => return (Some(*handoff), None),
            Self::Migrate(_)
            | Self::Renew { .. }
            | Self::Drain
            | Self::Serve { .. }
            | Self::Relay(_)
            | Self::FetchAdapter { .. } => return (None, None),
        };
        (Some(handoff), Some(request))
    }
}

/// The content of an [`Order::Run`].
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct RunOrder {
    /// The hand-off of both legs; nothing is sent for it.
    pub handoff: HandoffId,
    /// The request to serve: prompt and tokens generated so far.
    pub request: Arc<Request>,
    /// Output tokens to reserve blocks for; further blocks are taken as needed.
    pub expected_output_tokens: u32,
    /// How long the request has been in progress; processes do not share a clock.
    pub waited: Duration,
    /// The deadline of its first token; `None` without a target.
    pub due: Option<Deadline>,
}

/// The content of an [`Order::Reserve`].
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct ReserveOrder {
    /// The hand-off for which blocks are reserved.
    pub handoff: HandoffId,
    /// The request to serve.
    pub request: Arc<Request>,
    /// The other worker, which will write the blocks; no third one may.
    pub sender: WorkerRef,
    /// Output tokens to reserve blocks for; further blocks are taken as needed.
    pub expected_output_tokens: u32,
    /// Output tokens, beyond [`Request::generated`], that the sender may draw before it seals: the
    /// answer names blocks for them too. 0 when the sender is a prefill leg, whose one token needs
    /// no block.
    pub ahead_tokens: u32,
    /// How long the request has been in progress; processes do not share a clock.
    pub waited: Duration,
    /// The deadline of its first token; `None` without a target.
    pub due: Option<Deadline>,
}

/// The content of an [`Order::Prefill`].
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct PrefillOrder {
    /// The hand-off whose prompt is run.
    pub handoff: HandoffId,
    /// The request: prompt and tokens generated so far.
    pub request: Arc<Request>,
    /// The reserved blocks of the receiver.
    pub target: HandoffTarget,
    /// How long the request has been in progress; processes do not share a clock.
    pub waited: Duration,
    /// The deadline of its first token; `None` without a target.
    pub due: Option<Deadline>,
}

/// The deadline of the next token of a prompt, computed by its router from targets, arrival and the
/// time since. A worker uses only this value.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
pub struct Deadline {
    /// The time left when the order was sent; zero if the deadline has passed.
    pub left: Duration,
    /// The behaviour of a worker that cannot meet the deadline.
    pub unmet: OnDeadlineMiss,
}

/// The behaviour of a worker that cannot meet a [`Deadline`].
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
pub enum OnDeadlineMiss {
    /// Answer [`Refusal::Late`], so that a first attempt may use another worker.
    Refuse,
    /// Serve as soon as possible: requests that were begun before, resumed, migrated or queued by
    /// policy are never refused for being late.
    Serve,
}

/// See [`Order::Migrate`]. The sequence continues under its old attempt while its full blocks are
/// sent; then it pauses until its last block, and the tokens drawn meanwhile, have landed. The
/// client observes this pause, so it must not grow with the context.
///
/// The worker answers with `MigrationAborted`, or with `Prefilled` of the new attempt when the
/// sequence pauses. After that the old attempt ends here as any other does; or `MigrationAborted`
/// revokes the migration, because the receiver reported that it did not take the sequence. If the
/// outcome is unknown (the link broke after the seal), the old attempt fails here: two workers must
/// never run one sequence.
#[derive(Clone, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
pub struct MigrateOrder {
    /// The new attempt; another worker has reserved blocks for it.
    pub handoff: HandoffId,
    /// The attempt that generates here.
    pub of: HandoffId,
    /// The reserved blocks of the receiver.
    pub target: HandoffTarget,
    /// The length of the sequence, prompt and output, that the receiver knew when it reserved: the
    /// seal carries the tokens after it, at least one.
    pub tokens: u32,
}

/// The blocks reserved on the decode worker.
#[derive(Clone, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
pub struct HandoffTarget {
    /// The worker that reserved; never the sender itself.
    pub worker: WorkerRef,
    /// The first `present` blocks of the sequence are already there and are not sent.
    pub present: u32,
    /// The reserved blocks for the others, in order: block `present + i` of the sequence goes to
    /// `blocks[i]`. May be more than the prompt fills; the rest is for growth.
    pub blocks: Vec<BlockRef>,
    /// The reserved state slot, where the model has states. A sequence's state is final only when
    /// it is sealed, so it is always sent.
    #[serde(default)]
    pub state: Option<BlockRef>,
    /// The reserved blocks of the window plane, where the model has one.
    #[serde(default)]
    pub window: Option<WindowTarget>,
}

/// Blocks of the window plane that are reserved for a hand-off. They are always sent: `present`
/// does not count for them.
#[derive(Clone, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
pub struct WindowTarget {
    /// The ordinal of the first: no token after those of the reservation reads a block before it.
    pub first: u32,
    /// Block `first + i` of the sequence goes to `blocks[i]`, up to the last of
    /// [`HandoffTarget::blocks`].
    pub blocks: Vec<BlockRef>,
}

/// A message from a worker to the router whose order it answers.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub enum Report {
    /// Answers `ReserveOrder`: blocks are reserved and may be written to.
    Reserved {
        /// The hand-off that owns the reserved blocks.
        handoff: HandoffId,
        /// The number of leading blocks that are already here.
        present: u32,
        /// The reserved blocks, as in [`HandoffTarget::blocks`].
        blocks: Vec<BlockRef>,
        /// The reserved state slot, as in [`HandoffTarget::state`].
        #[serde(default)]
        state: Option<BlockRef>,
        /// The reserved blocks of the window plane, as in [`HandoffTarget::window`].
        #[serde(default)]
        window: Option<WindowTarget>,
    },
    /// Answers `ReserveOrder`, `PrefillOrder` or `RunOrder`: refused; the order changed nothing. An
    /// order that names a hand-off and leg already accepted is a repetition, and gets no answer.
    Refused {
        /// The hand-off that was refused.
        handoff: HandoffId,
        /// The reason for the refusal.
        refusal: Refusal,
    },
    /// The sending leg drew its last token, and emitted it before this report: the first token of a
    /// prefill leg, or the last one before a running sequence migrates.
    Prefilled {
        /// The hand-off whose token was drawn.
        handoff: HandoffId,
        /// The times of the prefill leg; zero for a sequence that migrates.
        timing: PrefillTiming,
    },
    /// Decode leg: everything arrived and was verified, and the sequence runs.
    Landed {
        /// The hand-off that has landed.
        handoff: HandoffId,
    },
    /// Answers `MigrateOrder`, or revokes its `Prefilled`: the sequence does not migrate, and
    /// continues here under its old attempt unless that has ended.
    #[serde(rename = "Stayed")]
    MigrationAborted {
        /// The new attempt, which has ended on this worker.
        handoff: HandoffId,
        /// The reason why the sequence does not migrate.
        failure: Failure,
    },
    /// Blocks are about to run out here. A request without an answer: this running sequence should
    /// migrate if another worker has room.
    #[serde(rename = "Crowded")]
    MemoryPressure {
        /// The hand-off of the sequence that should migrate.
        handoff: HandoffId,
    },
    /// The sequence produced its last token here, emitted before this report.
    Finished {
        /// The hand-off that has finished.
        handoff: HandoffId,
        /// The reason for the end.
        reason: FinishReason,
        /// The number of output tokens of all attempts.
        output_tokens: u32,
        /// The times of its start on the decode leg.
        timing: DecodeTiming,
        /// The times of the prefill leg, if the first token was also the last one; no `Prefilled`
        /// is sent then.
        prefill: Option<PrefillTiming>,
    },
    /// The leg of this worker failed; `Released` follows when nothing is held.
    LegFailed {
        /// The hand-off whose leg failed.
        handoff: HandoffId,
        /// The reason for the failure.
        failure: Failure,
    },
    /// The last report of an accepted hand-off, sent once for both legs if both are here: the
    /// worker holds nothing of it any more.
    Released {
        /// The hand-off of which nothing is held.
        handoff: HandoffId,
    },
    /// The load of the worker; also sent to a router that joins.
    Load(WorkerLoad),
    /// The prices of work on this worker; sent to a router that joins, before its first
    /// `WorkerLoad`, and after changes.
    Prices(Prices),
    /// The worker accepts nothing new and will leave.
    Draining,
    /// The worker serves these legs from now on; the answer to `Serve`, sent to every router.
    Serves {
        /// The legs that the worker serves.
        role: Role,
    },
    /// Changes of the prefix cache of the worker; a router that joins gets all contents.
    Prefix {
        /// Contents that can be reused now.
        stored: Vec<BlockHash>,
        /// Contents that were evicted.
        evicted: Vec<BlockHash>,
    },
    /// Gossip of another router, relayed by this worker.
    #[serde(rename = "PassedOn")]
    Relayed(Arc<ScalingGossip>),
    /// Answers `RunOrder`: all blocks are held or reserved, and the prompt may run from now on.
    Running {
        /// The hand-off that was accepted with both legs.
        handoff: HandoffId,
        /// The number of leading blocks that come from the prefix cache.
        present: u32,
    },
    /// The adapters that the worker serves, all of them, by ascending name; sent to a router that
    /// joins, and after changes.
    Adapters(AdapterReport),
}

/// The reason for which a request or order was refused.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub enum Refusal {
    /// The queue is at its limit.
    QueueFull {
        /// The earliest time at which a retry can succeed.
        retry_after: Duration,
    },
    /// Not enough blocks can become free.
    NoBlocks {
        /// The earliest time at which a retry can succeed.
        retry_after: Duration,
    },
    /// Prompt and output would exceed every pool or context.
    TooLong {
        /// The largest number of tokens that fits.
        tokens_max: u32,
    },
    /// A token of the request or its sampling is not in the vocabulary, or a sampling parameter is
    /// out of range. No worker would run it.
    OutOfVocabulary {
        /// The size of the vocabulary: token ids are below it.
        vocab_size: u32,
    },
    /// No worker (or pair of workers) for this model is connected, or none of them answers.
    NoWorker,
    /// A target cannot be met, by prediction; refused before any work.
    Late {
        /// The target that would be missed.
        aim: SloMetric,
        /// The value of the target's metric that was predicted.
        predicted: Duration,
        /// The predicted time until the target can be met.
        retry_after: Duration,
    },
    /// The worker or router is draining.
    Draining,
    /// The order names another worker or incarnation, or a leg that this worker does not serve.
    WrongWorker,
    /// The adapter of the request is not served here, or cannot be loaded.
    NoAdapter {
        /// The reason, for the client and the operator.
        reason: String,
    },
}

/// The reason for which a leg failed, and possibly its flight.
#[derive(Clone, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
pub enum Failure {
    /// The connection to a worker was lost.
    WorkerLost,
    /// A worker answers, but its step does not complete.
    WorkerStuck,
    /// The link to the other worker broke.
    LinkLost,
    /// The lease was not renewed in time.
    LeaseExpired,
    /// Blocks arrived damaged, incomplete or for another generation.
    Corrupt,
    /// The receiver refused the blocks.
    Rejected,
    /// The engine could not run a step, or read or write a block.
    Engine(String),
    /// The sequence alone needs more blocks than the whole pool has.
    OutOfBlocks,
    /// The router was stopped before the end.
    Draining,
    /// The client did not read its output for too long.
    SlowReader,
    /// All retries failed; the last reason.
    RetriesSpent(Box<Failure>),
    /// The request's constraint cannot be enforced any further, for a reason without a text of it:
    /// no worker could, so there is no other attempt.
    Constraint(String),
}

/// The reason for the regular end of generation.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
pub enum FinishReason {
    /// A stop token was drawn.
    Stop,
    /// `max_tokens` or the context's end was reached.
    Length,
}

/// The end of a flight; every flight has exactly one.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub enum Ending {
    /// The sequence was generated to its end.
    Done {
        /// The reason for the end.
        reason: FinishReason,
    },
    /// The flight was refused; nothing was emitted.
    Refused(Refusal),
    /// The client cancelled the flight.
    Cancelled,
    /// The flight failed; tokens may have been emitted.
    Failed(Failure),
}

/// Token counts of a flight.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct TokenUsage {
    /// Tokens of the prompt.
    pub prompt_tokens: u32,
    /// Tokens generated by all attempts.
    pub output_tokens: u32,
    /// Prompt tokens that came from a prefix cache.
    pub cached_tokens: u32,
}

/// The reason for which one end of a hand-off gave it up.
#[derive(Clone, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
pub enum AbandonCause {
    /// The sequence ended before its migration.
    Finished,
    /// The router cancelled it, or the hand-off is unknown here.
    Cancelled,
    /// A failure on that end, or of the link.
    Failed(Failure),
}

/// An output token on its way to a client. The emissions and reports of a worker about a flight
/// share one ordered stream.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Emission {
    /// The index of the output token in the request, counted from 0, [`Request::generated`]
    /// included.
    pub index: u32,
    /// The token with its scores.
    pub sampled: SampledToken,
    /// Set with the token that ends the prefill leg, and only then.
    pub prompt: Option<PromptFacts>,
}

/// The results of running a prompt.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct PromptFacts {
    /// Prompt tokens that came from the prefix cache.
    pub cached_tokens: u32,
    /// Scores of the tokens of the prompt from the second on, if requested.
    pub scores: Vec<SampledToken>,
    /// The times of the prefill leg.
    pub timing: PrefillTiming,
    /// The vector of a pooled request, see [`crate::Pooling`]; its token is
    /// [`crate::POOLED_TOKEN`].
    #[serde(default)]
    pub pooled: Option<Arc<[f32]>>,
}
