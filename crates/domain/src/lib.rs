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
mod request;
mod tape;
mod time;

pub use fleet::{Capacity, Fingerprint, Load, Progress, Role, WorkerDescription};
pub use id::{
    BlockHash, BlockIndex, BlockRef, FlightId, Generation, HandoffId, Incarnation, RouterId,
    SlotIndex, StepId, TokenId, WorkerId, WorkerRef,
};
pub use message::{
    Cause, Emission, Ending, Failure, FinishReason, Migrate, Order, Prefill, PromptFacts, Refusal,
    Report, Reserve, Target, Usage,
};
pub use plan::{LogitsWanted, OpenSlot, Sampled, Scores, Segment, StepPlan, StepResult};
pub use request::{Request, Sampling, SamplingError, Slo, StopRules};
pub use tape::{Tape, TapeLine};
pub use time::Time;
