//! A worker's brain.
//!
//! Owns: the worker's sequences, their blocks and leases, and the choice of what the next step
//! runs. Never: sees text, sockets, a clock, or a KV byte.
//! Invariant: every hand-off accepted ends in exactly one `Report::Released`, and by then holds no
//! block.

mod event;

pub use event::{Condition, Damage, ExportOutcome, ImportOutcome, Input, Limits, Note, Output};
