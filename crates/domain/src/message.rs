//! What routers and workers say to each other. The same values travel through a channel in one
//! process, a gRPC stream between processes, and the simulator's links.

use crate::{
    Aim, BlockHash, BlockRef, DecodeTiming, HandoffId, Load, PrefillTiming, Prices, Request, Role,
    Sampled, Voice, WorkerRef,
};
use serde::{Deserialize, Serialize};
use std::sync::Arc;
use std::time::Duration;

/// From a router to a worker.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub enum Order {
    /// Decode leg: hold blocks for a sequence that will arrive.
    Reserve(Reserve),
    /// Prefill leg: run the prompt and hand it on.
    Prefill(Prefill),
    /// Decode leg: hand a running sequence on to another decode worker.
    Migrate(Migrate),
    /// These are still wanted: their leases start anew.
    Renew {
        /// Every hand-off that the router has on this worker.
        handoffs: Vec<HandoffId>,
    },
    /// No longer wanted: free everything of it. At the source of a `Migrate`, its new attempt names the
    /// move alone: it is given up unless the seal was sent, and the old attempt goes on.
    Cancel {
        /// What.
        handoff: HandoffId,
    },
    /// Take on nothing new and leave once nothing is left, as when the process is asked to end.
    Drain,
    /// Serve these legs from now on; what is here of another leg goes on until it is moved or over.
    Serve {
        /// Which.
        role: Role,
    },
    /// Tell this to every other router that is connected.
    PassOn(Arc<Voice>),
}

/// See [`Order::Reserve`].
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Reserve {
    /// The attempt.
    pub handoff: HandoffId,
    /// What to generate.
    pub request: Arc<Request>,
    /// Who will write; nobody else may. The worker itself when both legs are one.
    pub sender: WorkerRef,
    /// Output tokens to set blocks aside for; beyond it blocks are taken as they are needed.
    pub expected_output_tokens: u32,
    /// Output tokens, beyond [`Request::generated`], that the sender may draw before it seals: the
    /// answer names blocks for them too. 0 when the sender is a prefill leg, whose one token needs
    /// no room.
    pub ahead_tokens: u32,
    /// How long the request is under way already; clocks are not shared.
    pub waited: Duration,
    /// When its first token is due; `None` if nothing was promised of it.
    pub due: Option<Due>,
}

/// See [`Order::Prefill`].
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Prefill {
    /// The attempt.
    pub handoff: HandoffId,
    /// What to run: prompt and tokens generated so far.
    pub request: Arc<Request>,
    /// Where the blocks go.
    pub target: Target,
    /// How long the request is under way already; clocks are not shared.
    pub waited: Duration,
    /// When its first token is due; `None` if nothing was promised of it.
    pub due: Option<Due>,
}

/// When a prompt's next token is due, as its router has computed it from targets, arrival and what was
/// made of both since. A worker goes by this alone.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
pub struct Due {
    /// Time left, from the order on; zero if it has passed.
    pub left: Duration,
    /// What a worker does that cannot make it.
    pub unmet: DueUnmet,
}

/// See [`Due::unmet`].
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
pub enum DueUnmet {
    /// It answers [`Refusal::Late`]: a first attempt may go elsewhere.
    Refuse,
    /// It serves as soon as it can: what was begun before, resumed, moved or let wait is never refused
    /// for being late.
    Serve,
}

/// See [`Order::Migrate`]. The sequence runs on under its old attempt while its full blocks leave;
/// then it stands still until its last block, and the tokens drawn meanwhile, have landed. That
/// standstill is the pause its client sees, so it must not grow with the context.
///
/// The order is answered by `Stayed`, or by `Prefilled` of the new attempt when it stands still. After
/// that the old attempt ends here as any does, or `Stayed` takes it back: the receiver said that it
/// did not take the sequence. When nobody can tell (the link broke after the seal), the old attempt
/// fails here: two workers must never run one sequence.
#[derive(Clone, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
pub struct Migrate {
    /// The new attempt; another worker has reserved for it.
    pub handoff: HandoffId,
    /// The attempt that generates here.
    pub of: HandoffId,
    /// Where the blocks go.
    pub target: Target,
    /// Tokens of the sequence, prompt and output, that the receiver was told of when it reserved:
    /// the seal carries those after them, at least one.
    pub tokens: u32,
}

/// The reserved place on the decode worker.
#[derive(Clone, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
pub struct Target {
    /// Who reserved. The worker itself when both legs are one; then nothing is sent.
    pub worker: WorkerRef,
    /// The sequence's first `present` blocks are there already and are not sent.
    pub present: u32,
    /// Where the others go, in order: block `present + i` of the sequence goes to `blocks[i]`.
    /// May be more than the prompt fills: the rest is room to grow.
    pub blocks: Vec<BlockRef>,
}

/// From a worker to the router whose order it is about.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub enum Report {
    /// Answers `Reserve`: blocks are held and may be written to.
    Reserved {
        /// The attempt.
        handoff: HandoffId,
        /// Leading blocks that are here already.
        present: u32,
        /// The others, as in [`Target::blocks`].
        blocks: Vec<BlockRef>,
    },
    /// Answers `Reserve` or `Prefill`: not taken; the order changed nothing. (A worker that holds
    /// the reservation and refuses the prefill keeps the reservation.) An order that names a
    /// hand-off and leg already taken is a repetition, and gets no answer.
    Refused {
        /// The attempt.
        handoff: HandoffId,
        /// Why.
        refusal: Refusal,
    },
    /// The sending leg drew its last token, and emitted it before this is said: the first token of
    /// a prefill leg, or the last one before a running sequence moves.
    Prefilled {
        /// The attempt.
        handoff: HandoffId,
        /// How long it took here; zero of a sequence that moves.
        timing: PrefillTiming,
    },
    /// Decode leg: everything arrived, was verified, and the sequence runs.
    Landed {
        /// The attempt.
        handoff: HandoffId,
    },
    /// Answers `Migrate`, or takes back its `Prefilled`: the sequence does not move, and goes on here
    /// under its old attempt if that is not over.
    Stayed {
        /// The new attempt, which is over for this worker.
        handoff: HandoffId,
        /// Why.
        failure: Failure,
    },
    /// Blocks are about to run out here. A wish, without an answer: this running sequence is the one to
    /// move, if another worker has room.
    Crowded {
        /// The attempt.
        handoff: HandoffId,
    },
    /// The sequence produced its last token here; emitted before this is said.
    Finished {
        /// The attempt.
        handoff: HandoffId,
        /// Why it ended.
        reason: FinishReason,
        /// Output tokens over its whole life.
        output_tokens: u32,
        /// How it began here.
        timing: DecodeTiming,
        /// Where its first token was its last one: what that took; no `Prefilled` is said of it.
        prefill: Option<PrefillTiming>,
    },
    /// This worker's leg cannot go on; `Released` follows when nothing is held.
    LegFailed {
        /// The attempt.
        handoff: HandoffId,
        /// Why.
        failure: Failure,
    },
    /// The last thing said of a hand-off that was accepted, once for both legs if both are here:
    /// nothing of it is held any more.
    Released {
        /// The attempt.
        handoff: HandoffId,
    },
    /// How busy the worker is; also said to a router that joins.
    Load(Load),
    /// What its work costs; said to a router that joins, before its first `Load`, and when it has
    /// changed.
    Prices(Prices),
    /// The worker takes nothing new and will leave.
    Draining,
    /// The worker serves these legs from now on; the answer to `Serve`, told to every router.
    Serves {
        /// Which.
        role: Role,
    },
    /// What the worker's prefix cache gained and lost; a router that joins is told all of it.
    Prefix {
        /// Blocks that can now be reused.
        stored: Vec<BlockHash>,
        /// Blocks that are gone.
        evicted: Vec<BlockHash>,
    },
    /// Another router had this told.
    PassedOn(Arc<Voice>),
}

/// Why something was not taken on.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub enum Refusal {
    /// The queue is at its limit.
    QueueFull {
        /// Earliest time worth trying again.
        retry_after: Duration,
    },
    /// Not enough blocks can become free.
    NoBlocks {
        /// Earliest time worth trying again.
        retry_after: Duration,
    },
    /// Prompt and output would exceed what any worker's pool or context can hold.
    TooLong {
        /// What it takes.
        tokens_max: u32,
    },
    /// A token of the request, or one that its sampling names, is none of the model's; or its sampling
    /// is out of range. No worker would run it.
    OutOfVocabulary {
        /// Tokens of the model: ids are below this.
        vocab_size: u32,
    },
    /// No worker (pair) for this model is connected.
    NoWorker,
    /// What was promised cannot be kept, as predicted; told before anything is done.
    Late {
        /// The target that would be missed.
        aim: Aim,
        /// What it would be.
        predicted: Duration,
        /// When that has changed, as far as can be told.
        retry_after: Duration,
    },
    /// Shutting down.
    Draining,
    /// The order names another worker or life, or a leg that this one does not serve.
    WrongWorker,
}

/// Why a leg, and in the end perhaps a flight, failed.
#[derive(Clone, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
pub enum Failure {
    /// A worker went away.
    WorkerLost,
    /// A worker answers, and makes no progress.
    WorkerStuck,
    /// The link to the other worker broke.
    LinkLost,
    /// Nobody renewed the lease.
    LeaseExpired,
    /// Blocks arrived damaged, incomplete or for another generation.
    Corrupt,
    /// The receiver would not take what was sent.
    Rejected,
    /// The engine could not run the step, or not read or write a block.
    Engine(String),
    /// The sequence alone outgrew the worker's whole pool.
    OutOfBlocks,
    /// The router stopped before the end.
    Draining,
    /// The client took nothing of what waits for it for too long.
    SlowReader,
    /// Retries are used up; the last reason.
    RetriesSpent(Box<Failure>),
}

/// Why generation stopped of its own accord.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub enum FinishReason {
    /// A stop token was drawn.
    Stop,
    /// `max_tokens` or the context's end was reached.
    Length,
}

/// How a flight ended; every flight has exactly one.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub enum Ending {
    /// Every token was produced.
    Done {
        /// Why it stopped.
        reason: FinishReason,
    },
    /// Not taken on; nothing was emitted.
    Refused(Refusal),
    /// The client no longer wanted it.
    Cancelled,
    /// Broken off; tokens may have been emitted.
    Failed(Failure),
}

/// Token counts of a flight.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Usage {
    /// Prompt length.
    pub prompt_tokens: u32,
    /// Tokens produced.
    pub output_tokens: u32,
    /// Prompt tokens that came from a prefix cache.
    pub cached_tokens: u32,
}

/// Why one end of a hand-off no longer wants it.
#[derive(Clone, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
pub enum Cause {
    /// The sequence ended before it had to move.
    Finished,
    /// The router cancelled, or the hand-off is unknown here.
    Cancelled,
    /// Something broke.
    Failed(Failure),
}

/// A token on its way to a client. What a worker emits and what it reports about a flight share one
/// ordered stream.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Emission {
    /// Which output token of the request, counted from 0, [`Request::generated`] included.
    pub index: u32,
    /// The token with its scores.
    pub sampled: Sampled,
    /// With the token that ends the prefill leg, and no other.
    pub prompt: Option<PromptFacts>,
}

/// What is known of a prompt once it has been run.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct PromptFacts {
    /// Prompt tokens that came from the prefix cache.
    pub cached_tokens: u32,
    /// Scores of the prompt's tokens from the second on, when asked for.
    pub scores: Vec<Sampled>,
    /// How long it took on its worker.
    pub timing: PrefillTiming,
}
