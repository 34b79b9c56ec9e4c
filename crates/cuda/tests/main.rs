//! The CUDA backend from outside: operations, engines, and blocks of pools.
//!
//! Owns: the list of its tests, and the device that they share. Never: needs a GPU, unless
//! `CLEAVE_TEST_DEVICE` asks for it.
#![allow(clippy::unwrap_used, reason = "a test's helper fails by panicking")]

mod adapters;
mod blocks;
mod engine;
mod experts;
mod harness;
mod operations;
mod slices;
