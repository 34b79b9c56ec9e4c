//! The simulator: worlds by seed and by search, goodput and fleets, and published measurements.
//!
//! Owns: the list of its tests. Never: reads a clock or a socket.

mod chaos;
mod explore;
mod goodput;
mod measured;
mod scale;
