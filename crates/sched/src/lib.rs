//! A worker's brain.
//!
//! Owns: the worker's sequences, their blocks and leases, and the choice of what the next step
//! runs; beside it, the places of its adapters. Never: sees text, sockets, a clock, or a KV byte.
//! Invariant: every hand-off accepted ends in exactly one `Report::Released`, and by then holds no
//! block.
//!
//! To drive it: give it each fact with [`WorkerBrain::handle`], perform everything that
//! [`WorkerBrain::poll`] returns, in order, until it is `None`, then sleep until the next fact or
//! [`WorkerBrain::deadline`], whichever comes first (at the deadline the fact is
//! [`WorkerInput::Woke`]). [`WorkerBrain::limits`], [`WorkerBrain::load`], [`WorkerBrain::pool`],
//! [`WorkerBrain::idle`] and [`WorkerBrain::draining`] read and change nothing;
//! [`WorkerBrain::check`] asserts every invariant and [`WorkerBrain::fingerprint`] distinguishes
//! states, both for tests.

mod actions;
mod adapters;
mod admission;
mod batch;
mod brain;
mod check;
mod context;
mod deadline;
mod event;
mod fingerprint;
mod forecast;
mod handoff;
mod machines;
mod memory;
mod note;
mod outcome;
mod policy;
mod report;
mod sequences;
mod snapshot;
mod speculate;

pub use actions::WorkerActions;
pub use adapters::{
    AdapterAdmission, AdapterLimits, AdapterLoads, AdapterPassage, AdapterState, AdapterWork,
    LoadOutcome, LoadSource,
};
pub use brain::WorkerBrain;
pub use cleave_kv::{PayloadCondition, PoolWriter, TierLevel};
pub use event::{
    BlockExport, ExportOutcome, ImportOutcome, SnapshotPiece, StateFetch, WindowFetch, WorkerInput,
    WorkerLimits, WorkerOutput,
};
pub use note::{DraftOutcome, WorkerNote};
pub use outcome::{FetchOutcome, OffloadOutcome, StepFault, SwapOutcome};
pub use speculate::LookupLimits;

#[cfg(test)]
mod test_worker;
