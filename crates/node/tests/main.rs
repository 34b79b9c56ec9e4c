//! Routers and workers over real sockets, and fleets under a virtual clock.
//!
//! Owns: the list of its tests. Never: loads a model, since its engines only hash.
#![allow(clippy::unwrap_used, reason = "a test's helper fails by panicking")]

#[path = "../../../tests/harness/authority.rs"]
mod authority;
mod fleet;
#[path = "../../../tests/chaos/proxy.rs"]
mod proxy;
mod virtual_time;
