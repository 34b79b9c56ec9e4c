//! `Ops` on NVIDIA GPUs.
//!
//! Owns: the driver (loaded at run time), hand-written kernels (`kernels/`), weights and KV on the device, and what
//! an engine queues there. The only GPU `unsafe`.
//! Never: knows an architecture, a request, or which tokens belong to whom; is needed to compile, lint or test
//! anything: without a driver [`Device::open`] says so.
//! Invariant: **path independence** (see `cleave_engine::ops`). Every kernel adds in an order that shapes decide, not
//! how many rows, chunks or sequences are computed beside.
//!
//! Precision. In f32 everything is f32, in plain kernels: a reference, not fast. In bf16, weights, keys, values and
//! all activations but the residual stream are bf16; the residual stream, norms, softmax and all sums are f32. There
//! quantised weights stay as narrow as checkpoints have them wherever a kernel takes their shape (any number of rows
//! goes through the same family of kernels), and keys and values may be fp8.
#![allow(unsafe_code)] // Calls of the driver, and kernels that get addresses.

mod args;
mod attention;
mod blocks;
mod buffers;
mod driver;
mod dynamic;
mod error;
#[cfg(test)]
mod every_kernel;
mod idle;
mod images;
mod inbox;
mod library;
mod matmul;
mod narrow;
mod ops;
mod options;
mod pack;
mod plan;
mod recording;
mod sample;
#[cfg(test)]
mod smoke;
mod upload;
mod wide;

pub use buffers::{CudaPool, CudaRows};
pub use driver::{Device, DeviceFacts};
pub use error::CudaError;
pub use ops::CudaOps;
pub use options::{CudaOptions, Part, Priority, Products, Share};
pub use pack::{CudaMatrix, CudaPack, CudaRotary, CudaTable, CudaVector};
