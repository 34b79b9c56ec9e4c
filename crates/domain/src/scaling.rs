//! How large a fleet may be, what is asked of it, and how large it is to be.
//!
//! Owns: the policy's part about scaling, the demand that routers tell each other, and the answer.
//! Never: says what is needed; `planner` does. Invariant: the demand of several routers is the sum of
//! what each of them tells.

use crate::{Role, RouterId};
use serde::{Deserialize, Serialize};
use std::ops::AddAssign;
use std::time::Duration;

/// How a fleet grows and shrinks.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Scaling {
    /// Whether anything comes of it. Default `Act`.
    pub mode: ScalingMode,
    /// Devices of all workers together at most.
    pub devices_max: u32,
    /// Workers that run prompts. Default none.
    pub prefill: PoolScaling,
    /// Workers that generate. Default none.
    pub decode: PoolScaling,
    /// Workers that do both. Default none.
    pub both: PoolScaling,
    /// Whether a worker may be given the other leg before one is added. Default yes.
    pub flip: bool,
    /// Without a request for so long pools shrink to their least. Default 10 minutes.
    pub idle_after: Duration,
    /// How long a worker may take from being wanted to serving; requests wait for the first one no
    /// longer. Default 5 minutes.
    pub start_max: Duration,
    /// Times in an hour that a pool goes from growing to shrinking or back, and workers that change their
    /// leg, at most each. Default 6.
    pub turns_max: u32,
}

/// See [`Scaling::mode`].
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
pub enum ScalingMode {
    /// Says how many workers it would want, and changes nothing.
    Advise,
    /// Whoever starts workers is told, and workers change their leg.
    Act,
}

/// Bounds of one pool, and how soon it follows.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct PoolScaling {
    /// Workers at least. Default 0.
    pub min: u32,
    /// Workers at most; 0 for a pool that there is not. Default 0.
    pub max: u32,
    /// Devices that one of its workers takes. Default 1.
    pub devices: u32,
    /// More are needed for so long before more are wanted; the first one at once. Default 10 s.
    pub up_after: Duration,
    /// Fewer are needed for so long before fewer are wanted. Default 5 minutes, 10 where streams run:
    /// those have to move.
    pub down_after: Duration,
}

impl PoolScaling {
    /// A pool that there is not.
    pub fn none(role: Role) -> Self {
        let minutes = if role.decodes() { 10 } else { 5 };
        Self {
            min: 0,
            max: 0,
            devices: 1,
            up_after: Duration::from_secs(10),
            down_after: Duration::from_secs(minutes * 60),
        }
    }
}

impl Scaling {
    /// No pool at all, so many devices.
    pub fn new(devices_max: u32) -> Self {
        Self {
            mode: ScalingMode::Act,
            devices_max,
            prefill: PoolScaling::none(Role::Prefill),
            decode: PoolScaling::none(Role::Decode),
            both: PoolScaling::none(Role::Both),
            flip: true,
            idle_after: Duration::from_secs(600),
            start_max: Duration::from_secs(300),
            turns_max: 6,
        }
    }

    /// A pool's bounds.
    pub fn pool(&self, role: Role) -> &PoolScaling {
        match role {
            Role::Prefill => &self.prefill,
            Role::Decode => &self.decode,
            Role::Both => &self.both,
        }
    }

    /// The same, to change them.
    pub fn pool_mut(&mut self, role: Role) -> &mut PoolScaling {
        match role {
            Role::Prefill => &mut self.prefill,
            Role::Decode => &mut self.decode,
            Role::Both => &mut self.both,
        }
    }

    /// Whether its workers could serve any request at all.
    pub fn serves(&self) -> bool {
        self.both.max > 0 || (self.prefill.max > 0 && self.decode.max > 0)
    }
}

/// So many of each pool.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash, Serialize, Deserialize)]
pub struct PoolCounts {
    /// Run prompts only.
    pub prefill: u32,
    /// Generate only.
    pub decode: u32,
    /// Do either.
    pub both: u32,
}

impl PoolCounts {
    /// Of that pool.
    pub fn of(&self, role: Role) -> u32 {
        match role {
            Role::Prefill => self.prefill,
            Role::Decode => self.decode,
            Role::Both => self.both,
        }
    }

    /// The same, to change it.
    pub fn of_mut(&mut self, role: Role) -> &mut u32 {
        match role {
            Role::Prefill => &mut self.prefill,
            Role::Decode => &mut self.decode,
            Role::Both => &mut self.both,
        }
    }

    /// All of them.
    pub fn total(&self) -> u32 {
        self.prefill + self.decode + self.both
    }
}

/// Requests of some span of time before now.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Flow {
    /// That arrived, those included that were refused.
    pub arrivals: u64,
    /// Tokens of their prompts.
    pub prompt_tokens: u64,
    /// Pairs of their prompts' attention, as in [`crate::Work::pairs`].
    pub pairs: u64,
    /// That were placed.
    pub placed: u64,
    /// Tokens of theirs that were found cached.
    pub cached_tokens: u64,
    /// That were answered to the end, and had not failed on the way.
    pub answers: u64,
    /// Tokens of those answers.
    pub output_tokens: u64,
}

/// What came of the promises of a class, of some span of time before now. What failed, or was tried again,
/// or came while workers were starting, is not in it.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Kept {
    /// Requests of the class that arrived.
    pub arrivals: u64,
    /// That were judged.
    pub judged: u64,
    /// Late or refused for what prefill workers could not do.
    pub missed_prefill: u64,
    /// Late or refused for what decode workers could not do.
    pub missed_decode: u64,
}

/// What is asked of a fleet through one router, or through all.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Demand {
    /// Of the last [`Demand::SLOW`].
    pub slow: Flow,
    /// Of the last [`Demand::QUICK`].
    pub quick: Flow,
    /// By class, in the order of the policy, of the last [`Demand::SLOW`].
    pub classes: Vec<Kept>,
    /// Requests that wait for a place, those included that wait for the first worker to bring its
    /// tokenizer.
    pub waiting: u32,
    /// Tokens of their prompts, as far as they are known.
    pub waiting_tokens: u64,
    /// Requests that have not ended.
    pub open: u32,
}

impl Demand {
    /// How far back the slow flow reaches.
    pub const SLOW: Duration = Duration::from_secs(60);
    /// How far back the quick flow reaches.
    pub const QUICK: Duration = Duration::from_secs(15);

    /// Whether anything is asked now.
    pub fn is_any(&self) -> bool {
        self.open > 0 || self.waiting > 0 || self.slow.arrivals > 0
    }
}

impl AddAssign for Flow {
    fn add_assign(&mut self, other: Self) {
        let Self {
            arrivals,
            prompt_tokens,
            pairs,
            placed,
            cached_tokens,
            answers,
            output_tokens,
        } = other;
        let sums = [
            (&mut self.arrivals, arrivals),
            (&mut self.prompt_tokens, prompt_tokens),
            (&mut self.pairs, pairs),
            (&mut self.placed, placed),
            (&mut self.cached_tokens, cached_tokens),
            (&mut self.answers, answers),
            (&mut self.output_tokens, output_tokens),
        ];
        for (sum, more) in sums {
            *sum = sum.saturating_add(more);
        }
    }
}

impl AddAssign for Kept {
    fn add_assign(&mut self, other: Self) {
        let Self {
            arrivals,
            judged,
            missed_prefill,
            missed_decode,
        } = other;
        let sums = [
            (&mut self.arrivals, arrivals),
            (&mut self.judged, judged),
            (&mut self.missed_prefill, missed_prefill),
            (&mut self.missed_decode, missed_decode),
        ];
        for (sum, more) in sums {
            *sum = sum.saturating_add(more);
        }
    }
}

impl AddAssign<&Self> for Demand {
    fn add_assign(&mut self, other: &Self) {
        self.slow += other.slow;
        self.quick += other.quick;
        let classes = self.classes.len().max(other.classes.len());
        self.classes.resize(classes, Kept::default());
        for (sum, more) in self.classes.iter_mut().zip(&other.classes) {
            *sum += *more;
        }
        self.waiting = self.waiting.saturating_add(other.waiting);
        self.waiting_tokens = self.waiting_tokens.saturating_add(other.waiting_tokens);
        self.open = self.open.saturating_add(other.open);
    }
}

/// What one router tells the others about scaling, through the workers that they share.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Voice {
    /// Who says it.
    pub router: RouterId,
    /// Counts what it has said, so that of two the later one counts.
    pub number: u64,
    /// What is asked through it.
    pub demand: Demand,
    /// What it makes of everybody's.
    pub wanted: Wanted,
}

/// How many workers there are to be.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Wanted {
    /// To be started, by the leg that they are started with.
    pub workers: PoolCounts,
    /// To serve each leg: some may serve another one than they were started with.
    pub legs: PoolCounts,
    /// Why so many serve each leg.
    pub reasons: Reasons,
}

/// Why so many, for each pool.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Reasons {
    /// Of prefill workers.
    pub prefill: ScalingReason,
    /// Of decode workers.
    pub decode: ScalingReason,
    /// Of workers that do both.
    pub both: ScalingReason,
}

impl Reasons {
    /// Of that pool.
    pub fn of(&self, role: Role) -> ScalingReason {
        match role {
            Role::Prefill => self.prefill,
            Role::Decode => self.decode,
            Role::Both => self.both,
        }
    }

    /// The same, to change it.
    pub fn of_mut(&mut self, role: Role) -> &mut ScalingReason {
        match role {
            Role::Prefill => &mut self.prefill,
            Role::Decode => &mut self.decode,
            Role::Both => &mut self.both,
        }
    }
}

/// See [`Wanted::reasons`].
#[derive(
    Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize,
)]
pub enum ScalingReason {
    /// Nobody asked for anything for a while.
    #[default]
    Idle,
    /// Somebody waits, and there is nobody.
    First,
    /// Prompts that come, within their time to the first token.
    Prompts,
    /// Streams, within their time for each token.
    Streams,
    /// Keys and values of streams that are there.
    Memory,
    /// Promises that were missed although the forecast saw none missed.
    Missed,
    /// Fewer would do, and have not for long enough.
    Settling,
    /// The pool's bounds.
    Bounds,
    /// More would be needed than there are devices.
    Devices,
    /// It turned often enough in this hour.
    Turns,
}

impl ScalingReason {
    /// All of them.
    pub const ALL: [Self; 10] = [
        Self::Idle,
        Self::First,
        Self::Prompts,
        Self::Streams,
        Self::Memory,
        Self::Missed,
        Self::Settling,
        Self::Bounds,
        Self::Devices,
        Self::Turns,
    ];

    /// Its name in metrics and answers.
    pub fn name(self) -> &'static str {
        match self {
            Self::Idle => "idle",
            Self::First => "first",
            Self::Prompts => "prompts",
            Self::Streams => "streams",
            Self::Memory => "memory",
            Self::Missed => "missed",
            Self::Settling => "settling",
            Self::Bounds => "bounds",
            Self::Devices => "devices",
            Self::Turns => "turns",
        }
    }
}
