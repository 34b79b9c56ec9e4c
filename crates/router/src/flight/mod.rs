//! Flights, and their way from submission to their one end.
//!
//! Owns: the flights with their attempts, failures, refusals and moves (`state`, `timers`,
//! `losses`, `refusals`, `move_history`, `releases`), and the rules of their way in layers: `legs`,
//! `end`, `resume` with `pass_over` and `failover`, `migrate`, and `steps` with `waits`. Never:
//! chooses a worker; `placement` does. Invariant: every flight that is entered ends once, and a
//! layer calls none above it.

pub(crate) mod end;
mod failover;
pub(crate) mod legs;
pub(crate) mod losses;
pub(crate) mod migrate;
pub(crate) mod move_history;
mod pass_over;
pub(crate) mod refusals;
pub(crate) mod releases;
pub(crate) mod resume;
pub(crate) mod state;
pub(crate) mod steps;
pub(crate) mod timers;
mod waits;
