//! The words every part of Cleave shares.
//!
//! Owns: identifiers, [`Time`], [`Request`], the [`StepPlan`] a scheduler hands to an engine, the
//! [`Order`]s a router sends to a worker and the [`Report`]s that come back.
//! Never: reads a clock, touches I/O, holds a decision. Everything here is plain data.
//! Invariant: every type serialises, so that any conversation can be taped and replayed.

mod fleet;
mod id;
mod message;
mod plan;
mod price;
mod request;
mod resolve;
mod scaling;
mod slo;
mod tape;
mod time;
mod timing;

pub use fleet::{
    Backlog, Capacity, DeviceId, Fingerprint, Load, Progress, Role, WorkerDescription,
};
pub use id::{
    BlockHash, BlockIndex, BlockRef, FlightId, Generation, HandoffId, Incarnation, RouterId,
    SlotIndex, StepId, TokenId, WorkerId, WorkerRef,
};
pub use message::{
    Cause, Due, DueUnmet, Emission, Ending, Failure, FinishReason, Migrate, Order, Prefill,
    PromptFacts, Refusal, Report, Reserve, Target, Usage,
};
pub use plan::{LogitsWanted, OpenSlot, Sampled, Scores, Segment, StepPlan, StepResult};
pub use price::{LinkPrice, Prices, RowPrice, Work};
pub use request::{Request, Sampling, SamplingError, StopRules};
pub use resolve::{CLASS_HEADER, UnknownClass};
pub use scaling::{
    Demand, Flow, Kept, PoolCounts, PoolScaling, Reasons, Scaling, ScalingMode, ScalingReason,
    Voice, Wanted,
};
pub use slo::{Origin, Quota, Rule, Slo, SloClass, SloPolicy, Tenant, Trust, Unmet};
pub use tape::{Tape, TapeLine};
pub use time::{SPAN_MAX, Time};
pub use timing::{Aim, DecodeTiming, PrefillTiming, Stage, Timing, Verdict};
