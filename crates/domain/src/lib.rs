//! The shared data types of all crates.
//!
//! Owns: identifiers, [`Time`], [`Request`], the [`StepPlan`] that a scheduler gives to an engine,
//! the [`Order`]s that a router sends to a worker, the [`Report`]s that a worker sends back, and
//! [`SplitMix64`], the numbers from a seed.
//! Never: reads a clock, touches I/O, holds a decision. Everything here is plain data.
//! Invariant: every type serialises, so that any conversation can be taped and replayed.

#![warn(missing_docs)]

mod adapter;
mod constraint;
mod fleet;
mod id;
mod kv;
mod message;
mod plan;
mod pooling;
mod price;
mod request;
mod resolve;
mod scaling;
mod slo;
mod splitmix;
mod tape;
mod time;
mod timing;

pub use adapter::{
    AdapterChangeId, AdapterCommand, AdapterId, AdapterOffer, AdapterPlace, AdapterReport,
    CacheScope, UnloadedAdapter,
};
pub use constraint::{Constraint, ConstraintEnd, GRAMMAR_BYTES_MAX, Grammar};
pub use fleet::{
    Capacity, DeviceId, Fingerprint, PrefillBacklog, Role, StateCapacity, StepProgress,
    WindowCapacity, WorkerDescription, WorkerLoad,
};
pub use id::{
    BlockHash, BlockIndex, BlockRef, FlightId, Generation, HandoffId, Incarnation, RouterId,
    SlotIndex, StepId, TokenId, WorkerId, WorkerRef,
};
pub use kv::{
    KvPlane, KvSpec, KvSpecError, KvUnit, KvWindow, LayerSpan, PlaneLayout, WindowLayout,
};
pub use message::{
    AbandonCause, Deadline, Emission, Ending, Failure, FinishReason, HandoffTarget, MigrateOrder,
    OnDeadlineMiss, Order, PrefillOrder, PromptFacts, Refusal, Report, ReserveOrder, RunOrder,
    TokenUsage, WindowTarget,
};
pub use plan::{
    LogitsWanted, OpenSlot, SampledToken, Segment, SegmentPooling, SegmentState, StepPlan,
    StepResult, TokenScores, WindowTable,
};
pub use pooling::{POOLED_LOGITS_MAX, POOLED_TOKEN, Pooling};
pub use price::{LinkPrice, Prices, RowPrice, StepWork};
pub use request::{Request, SamplingError, SamplingParams, StopRules};
pub use resolve::{CLASS_HEADER, UnknownSloClass};
pub use scaling::{
    FleetDemand, FleetTarget, PoolCounts, PoolScaling, RequestFlow, ScalingGossip, ScalingMode,
    ScalingPolicy, ScalingReason, ScalingReasons, SloOutcomes,
};
pub use slo::{
    HeaderTrust, ModelPolicy, OnSloMiss, RequestOrigin, RequestSlo, SloClass, SloPolicy, SloRule,
    Tenant, TenantQuota,
};
pub use splitmix::SplitMix64;
pub use tape::{Tape, TapeRecord};
pub use time::{SPAN_MAX, Time};
pub use timing::{
    DecodeTiming, PrefillTiming, RequestStage, RequestStageTimes, SloMetric, SloVerdict,
};
