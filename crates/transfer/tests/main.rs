//! Links between workers over every transport, in one process and in two.
//!
//! Owns: the list of its tests, and the pair of workers that they share. Never: needs a network
//! card.
#![allow(clippy::unwrap_used, reason = "a test's helper fails by panicking")]

#[path = "../../../tests/harness/authority.rs"]
mod authority;
mod killed;
mod links;
mod pair;
mod peers;
mod pools;
mod streams;
