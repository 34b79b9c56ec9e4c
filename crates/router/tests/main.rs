//! The router's brain from outside.
//!
//! Owns: the list of its tests, and the worlds that they share. Never: reads a clock or a socket.

mod absurd_reports;
mod fingerprint;
mod pools;
mod priced_world;
mod random;
mod scenarios;
mod slo_targets;
