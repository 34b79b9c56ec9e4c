//! `Ops` on the processor: AVX-512, AVX2, NEON and plain Rust, chosen at run time.
//!
//! Owns: packed weights and their files, the threads that share an operation, and
//! the KV pool in host memory.
//! Never: knows an architecture, a request, or which tokens belong to whom.
//! Invariant: **path independence** (see `cleave_engine::ops`). Products and attention sum each
//! element in one fixed order, whatever rows, threads, segments and chunks are computed beside it.
//!
//! Precision: see `cleave_cpu_kernels`.
#![allow(unsafe_code)]
// Slices shared between threads, mapped files, and the placement of threads and memory.

mod affinity;
mod buffers;
mod cache;
mod ceiling;
mod grid;
mod ops;
mod options;
mod pack;
mod placement;
mod plan;
mod threads;
mod widened;

pub use affinity::cores_count;
pub use buffers::{CpuPool, CpuRows};
pub use ceiling::{BandwidthReader, DotType, operations_per_second};
pub use cleave_cpu_kernels::isa::Isa;
pub use cleave_cpu_kernels::memory::{limit_allocator_slack, trim_allocator};
pub use cleave_engine::ops::Quantize;
pub use ops::CpuOps;
pub use options::{CpuError, CpuOptions};
pub use pack::{CpuMatrix, CpuRotary, CpuTable, CpuVector, CpuWeightLoader};
pub use placement::{CoreBinding, CoreTopology, ThreadPlacement, WorkerThreads};
pub use threads::{TaskTurn, Threads};
