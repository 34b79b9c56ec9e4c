//! The whole system: tests that start processes of `cleave` and drive them from outside.
//!
//! Owns: the list of its tests. Never: reaches into a crate.
//! Invariant: ports are assigned by the kernel, and each test's files have names of their own,
//! since all tests share one process.
#![allow(clippy::unwrap_used, reason = "a test's helper fails by panicking")]

mod adapter_chaos;
mod adapters;
mod autoscale;
mod bench;
mod chaos;
mod chat;
mod configuration;
mod constrained;
mod cuda;
mod embeddings;
mod generate;
mod harness;
mod hub;
mod installed;
mod kv;
#[cfg(target_os = "linux")]
mod memory;
mod models;
mod nixl;
mod observe;
mod root;
mod scripted;
mod secure;
mod serving;
mod slo;
mod stops;
mod stored_responses;
mod tier;
mod tools;
mod windows;
