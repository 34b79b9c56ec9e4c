//! A worker's brain.
//!
//! Owns: the worker's sequences, their blocks and leases, and the choice of what the next step
//! runs. Never: sees text, sockets, a clock, or a KV byte.
//! Invariant: every hand-off accepted ends in exactly one `Report::Released`, and by then holds no
//! block.
//!
//! How to drive it: tell it what happened with [`Brain::handle`], then do everything that
//! [`Brain::poll`] hands out, in order, until it is `None`, then sleep until the next fact or
//! [`Brain::deadline`], whichever comes first (at the deadline the fact is [`Input::Woke`]).
//! [`Brain::limits`], [`Brain::load`], [`Brain::pool`], [`Brain::idle`] and [`Brain::draining`] look
//! and change nothing; [`Brain::check`] asserts every invariant and [`Brain::fingerprint`] tells
//! states apart, both for tests.

mod admit;
mod ahead;
mod audit;
mod batch;
mod brain;
mod check;
mod close;
mod crowd;
mod deadline;
mod event;
mod fingerprint;
mod late;
mod load;
mod moves;
mod outcome;
mod pace;
mod past;
mod peer;
mod plan;
mod policy;
mod resend;
mod sequence;
mod settle;
mod severed;
mod speculate;
mod swap;
mod tier;

pub use brain::Brain;
pub use cleave_kv::{Condition, Place, Writer};
pub use event::{Drafting, Export, ExportOutcome, ImportOutcome, Input, Limits, Note, Output};
pub use outcome::{FetchOutcome, KeepOutcome, SwapOutcome};
pub use speculate::Lookup;
