//! The CPU backend from outside: operations on every instruction set, and whole checkpoints.
//!
//! Owns: the list of its tests. Never: needs a checkpoint that is not in the repository.
#![allow(clippy::unwrap_used, reason = "a test's helper fails by panicking")]

mod accuracy;
mod adapters;
mod chunks;
mod conformance;
mod experts;
mod halves;
mod harness;
mod operations;
mod packed;
mod quantized;
mod slices;
