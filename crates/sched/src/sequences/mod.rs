//! The sequences that a worker has accepted and not released.
//!
//! Owns: the record of each, their stages, slots and leases, and the progress of each against its
//! client's targets. Never: decides which of them runs or ends, or holds a block.
//! Invariant: the stage, the slot and the steps of a sequence are changed by [`SequenceTable`]
//! alone, together with the lists that depend on them.

mod client_timing;
mod fingerprint;
mod pooled;
#[cfg(test)]
pub(crate) mod sample;
mod sequence;
mod table;

pub(crate) use client_timing::prompt_due;
pub(crate) use sequence::{SequencePhase, SequenceStage, SequenceTimes, WorkerSequence};
pub(crate) use table::SequenceTable;
