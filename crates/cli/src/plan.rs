//! `cleave plan`: the times of a worker's steps, computed from parts, fitted, or measured.
//!
//! Owns: nothing but the list of its commands. Never: simulates a fleet.

pub(crate) mod calibrate;
pub(crate) mod fit;
pub(crate) mod prices;
