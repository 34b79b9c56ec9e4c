//! The sequences that a worker has accepted and not released.
//!
//! Owns: the record of each, and its progress against its client's targets. Never: decides which of
//! them runs or ends.

mod client_timing;
mod sequence;

pub(crate) use client_timing::prompt_due;
pub(crate) use sequence::{SequencePhase, SequenceStage, SequenceTimes, WorkerSequence};
