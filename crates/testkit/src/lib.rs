//! One kit for driving the brains without processes: what the simulator's worlds and the worlds of
//! tests share.
//!
//! Owns: an engine and a worker of cells, which detect wrong KV ([`CellEngine`], [`CellWorker`]);
//! what a worker of cells reaches ([`CellHost`]); constraints ([`CellConstraint`]); events in the
//! order of time ([`EventQueue`], [`WakeTimer`]); plain values ([`build`]). Never: decides what a
//! brain decides, or when something happens: each world schedules its own events. Invariant: the
//! same inputs give the same results.
//!
//! `sched` and `router` use this crate in their folders `tests`. A unit test of `sched` sees a
//! second copy of the crate's own types here, so it takes types of `domain` only.

pub mod build;
mod cells;
mod constraint;
mod engine;
mod event_queue;
mod frames;
mod kv_hash;
mod pooling;
mod wake;

pub use cells::{
    AnswerTime, CellHost, CellWorker, EngineOp, EngineOpResult, FetchPart, FetchSource, FrameCells,
    OpFault, carry_out,
};
pub use constraint::{CellConstraint, CellMatcher, CellThinking, MatcherFault};
pub use engine::{CellEngine, DrawToken, EngineCosts, KvCell, TokenDraw};
pub use event_queue::EventQueue;
pub use frames::BlockFrames;
pub use kv_hash::KvHash;
pub use pooling::pooled_vector;
pub use wake::WakeTimer;
