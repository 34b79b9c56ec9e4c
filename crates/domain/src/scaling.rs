//! The scaling part of the policy, the demand on a fleet, and the target size.
//!
//! Owns: the scaling part of the policy, the demand that routers exchange, and the result. Never:
//! computes the size; `planner` does. Invariant: the demand of several routers is the sum of their
//! reports.

use crate::{Role, RouterId};
use serde::{Deserialize, Serialize};
use std::ops::AddAssign;
use std::time::Duration;

/// The policy by which a fleet grows and shrinks.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct ScalingPolicy {
    /// Whether the result is applied. Default `Act`.
    pub mode: ScalingMode,
    /// Limit of the devices of all workers together.
    pub devices_max: u32,
    /// The pool of prefill workers. Default none.
    pub prefill: PoolScaling,
    /// The pool of decode workers. Default none.
    pub decode: PoolScaling,
    /// The pool of workers for both legs. Default none.
    pub both: PoolScaling,
    /// Whether a worker may change its leg before a worker is added. Default yes.
    pub flip: bool,
    /// After this time without a request, pools shrink to their minimum at once, whatever their
    /// `down_after`. Default 10 minutes.
    pub idle_after: Duration,
    /// The time limit from the request of a worker until it serves; requests wait for the first
    /// worker no longer. Default 5 minutes.
    pub start_max: Duration,
    /// Limit per hour of changes of a pool between growing and shrinking, and of workers that
    /// change their leg; each counts alone. Default 6.
    pub turns_max: u32,
}

/// Whether a target size is applied, see [`ScalingPolicy::mode`].
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
pub enum ScalingMode {
    /// Reports the target size, and changes nothing.
    Advise,
    /// The autoscaler gets the target size, and workers change their leg.
    Act,
}

/// The bounds of one pool, and its delays.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct PoolScaling {
    /// The minimum number of workers. Default 0.
    pub min: u32,
    /// The maximum number of workers; 0 disables the pool. Default 0.
    pub max: u32,
    /// Devices of one of its workers. Default 1.
    pub devices: u32,
    /// More workers must be needed for this long before more are requested; the first one is
    /// requested at once. Default 10 s.
    pub up_after: Duration,
    /// Fewer workers must be needed for this long before fewer are requested. Default 5 minutes; 10
    /// for pools with decode streams, which have to migrate.
    pub down_after: Duration,
}

impl PoolScaling {
    /// A pool without workers, with the default delays.
    pub fn absent(role: Role) -> Self {
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

impl ScalingPolicy {
    /// A policy without pools, with this limit of devices.
    pub fn new(devices_max: u32) -> Self {
        Self {
            mode: ScalingMode::Act,
            devices_max,
            prefill: PoolScaling::absent(Role::Prefill),
            decode: PoolScaling::absent(Role::Decode),
            both: PoolScaling::absent(Role::Both),
            flip: true,
            idle_after: Duration::from_secs(600),
            start_max: Duration::from_secs(300),
            turns_max: 6,
        }
    }

    /// The bounds of a pool.
    pub fn pool(&self, role: Role) -> &PoolScaling {
        match role {
            Role::Prefill => &self.prefill,
            Role::Decode => &self.decode,
            Role::Both => &self.both,
        }
    }

    /// The bounds of a pool, mutable.
    pub fn pool_mut(&mut self, role: Role) -> &mut PoolScaling {
        match role {
            Role::Prefill => &mut self.prefill,
            Role::Decode => &mut self.decode,
            Role::Both => &mut self.both,
        }
    }

    /// Whether the pools together could serve any request.
    pub fn can_serve(&self) -> bool {
        self.both.max > 0 || (self.prefill.max > 0 && self.decode.max > 0)
    }
}

/// A number for each pool.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash, Serialize, Deserialize)]
pub struct PoolCounts {
    /// The number for prefill workers.
    pub prefill: u32,
    /// The number for decode workers.
    pub decode: u32,
    /// Workers for both legs.
    pub both: u32,
}

impl PoolCounts {
    /// The value of that pool.
    pub fn for_role(&self, role: Role) -> u32 {
        match role {
            Role::Prefill => self.prefill,
            Role::Decode => self.decode,
            Role::Both => self.both,
        }
    }

    /// The value of that pool, mutable.
    pub fn for_role_mut(&mut self, role: Role) -> &mut u32 {
        match role {
            Role::Prefill => &mut self.prefill,
            Role::Decode => &mut self.decode,
            Role::Both => &mut self.both,
        }
    }

    /// The sum of all pools.
    pub fn total(&self) -> u32 {
        self.prefill + self.decode + self.both
    }
}

/// Counts of requests in a time window before now.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct RequestFlow {
    /// Requests that arrived, refused ones included.
    pub arrivals: u64,
    /// Tokens of the prompts of those.
    pub prompt_tokens: u64,
    /// Attention pairs of those prompts, as in [`crate::StepWork::pairs`].
    pub pairs: u64,
    /// Requests that were placed.
    pub placed: u64,
    /// Prompt tokens of placed requests that were cached.
    pub cached_tokens: u64,
    /// Requests that finished without a failed attempt.
    pub answers: u64,
    /// Output tokens of those.
    pub output_tokens: u64,
}

/// The SLO outcomes of a class in a time window before now. Requests that failed, were retried, or
/// came while workers were starting are not counted.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct SloOutcomes {
    /// Requests of the class that arrived.
    pub arrivals: u64,
    /// Requests with an outcome.
    pub judged: u64,
    /// Requests late or refused because of prefill workers.
    pub missed_prefill: u64,
    /// Requests late or refused because of decode workers.
    pub missed_decode: u64,
}

/// The demand on a fleet through one router, or through all.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct FleetDemand {
    /// Requests of the last [`FleetDemand::SLOW`].
    pub slow: RequestFlow,
    /// Requests of the last [`FleetDemand::QUICK`].
    pub quick: RequestFlow,
    /// Outcomes by class, in the order of the policy, of the last [`FleetDemand::SLOW`].
    pub classes: Vec<SloOutcomes>,
    /// Requests that wait for placement, including those that wait for the first worker to send its
    /// tokenizer.
    pub waiting: u32,
    /// Tokens of the prompts of those, as far as they are known.
    pub waiting_tokens: u64,
    /// Requests that have not ended, waiting ones included.
    pub open: u32,
}

impl FleetDemand {
    /// The length of the slow window.
    pub const SLOW: Duration = Duration::from_secs(60);
    /// The length of the quick window.
    pub const QUICK: Duration = Duration::from_secs(15);

    /// Whether there are requests that have not ended.
    pub fn has_open_requests(&self) -> bool {
        self.open > 0 || self.waiting > 0
    }

    /// Whether there are requests now or in the quick window.
    pub fn has_recent_requests(&self) -> bool {
        self.has_open_requests() || self.quick.arrivals > 0
    }
}

impl AddAssign for RequestFlow {
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

impl AddAssign for SloOutcomes {
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

impl AddAssign<&Self> for FleetDemand {
    fn add_assign(&mut self, other: &Self) {
        self.slow += other.slow;
        self.quick += other.quick;
        let classes = self.classes.len().max(other.classes.len());
        self.classes.resize(classes, SloOutcomes::default());
        for (sum, more) in self.classes.iter_mut().zip(&other.classes) {
            *sum += *more;
        }
        self.waiting = self.waiting.saturating_add(other.waiting);
        self.waiting_tokens = self.waiting_tokens.saturating_add(other.waiting_tokens);
        self.open = self.open.saturating_add(other.open);
    }
}

/// The message of one router to the others about scaling, relayed by the workers that they share.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct ScalingGossip {
    /// The router that sent it.
    pub router: RouterId,
    /// The number of the message; of two the later one is valid.
    pub number: u64,
    /// The demand through this router.
    pub demand: FleetDemand,
    /// The target size that it computed from the demand of all routers.
    pub wanted: FleetTarget,
}

/// The target size of the fleet.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct FleetTarget {
    /// The number of workers to start, by the role that they are started with.
    pub workers: PoolCounts,
    /// The number of workers to serve each leg; some may serve another leg than they were started
    /// with.
    pub legs: PoolCounts,
    /// The reasons for the numbers in `legs`.
    pub reasons: ScalingReasons,
}

/// The reason for the size of each pool.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct ScalingReasons {
    /// The reason for the prefill pool.
    pub prefill: ScalingReason,
    /// The reason for the decode pool.
    pub decode: ScalingReason,
    /// The reason for the pool of both legs.
    pub both: ScalingReason,
}

impl ScalingReasons {
    /// The value of that pool.
    pub fn for_role(&self, role: Role) -> ScalingReason {
        match role {
            Role::Prefill => self.prefill,
            Role::Decode => self.decode,
            Role::Both => self.both,
        }
    }

    /// The value of that pool, mutable.
    pub fn for_role_mut(&mut self, role: Role) -> &mut ScalingReason {
        match role {
            Role::Prefill => &mut self.prefill,
            Role::Decode => &mut self.decode,
            Role::Both => &mut self.both,
        }
    }
}

/// A reason for a target size, see [`FleetTarget::reasons`].
#[derive(
    Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize,
)]
pub enum ScalingReason {
    /// No request arrived for a while.
    #[default]
    Idle,
    /// A request waits, and there is no worker.
    First,
    /// The arriving prompts, within their TTFT targets.
    Prompts,
    /// The running streams, within their TPOT targets.
    Streams,
    /// The KV memory of the running streams.
    Memory,
    /// Targets were missed although the forecast predicted none.
    Missed,
    /// Fewer workers would suffice, but not for long enough yet.
    Settling,
    /// The bounds of the pool.
    Bounds,
    /// More workers are needed than there are devices.
    Devices,
    /// The pool reached its limit of direction changes in this hour.
    Turns,
}

impl ScalingReason {
    /// All reasons, in the order of their declaration.
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
