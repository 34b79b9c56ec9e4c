//! The engine from outside, over the reference implementation of its operations.
//!
//! Owns: the list of its tests, and the reference and the copies of checkpoints that they share.
//! Never: needs a device.
#![allow(clippy::unwrap_used, reason = "a test's helper fails by panicking")]

mod damaged;
mod damaged_experts;
mod folder;
mod goldens;
mod overlap;
mod plans;
mod quantized;
mod reference;
mod states;
mod synth;
