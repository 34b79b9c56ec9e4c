//! The emulator from outside: kernels, streams, graphs, limits, mistakes, products and processes.
//!
//! Owns: the list of its tests, and the driver's calls that they share. Never: needs a GPU.
//! Invariant: one test at a time uses the stand-in driver, whose seed and faults are global.
#![allow(unsafe_code, reason = "drivers have a C interface")]

mod device;
mod graphs;
mod kernels;
mod limits;
mod mistakes;
mod processes;
mod products;
mod streams;
