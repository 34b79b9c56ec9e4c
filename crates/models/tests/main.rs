//! The registry beside the golden checkpoints of `testdata`, and the page that is made of both.
//!
//! Owns: the list of its tests. Never: opens a weight.
#![allow(clippy::unwrap_used, reason = "a test's helper fails by panicking")]

mod page;
mod spellings;
