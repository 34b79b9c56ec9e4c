//! `Ops` on NVIDIA GPUs.
//!
//! Owns: the driver (loaded at run time), hand-written kernels (`kernels/`), weights and KV on the
//! device, and the work that an engine queues there. All `unsafe` code for GPUs is in this crate.
//! Never: knows an architecture, a request, or which request a token belongs to; needs a driver to
//! be compiled, linted or tested: without one [`CudaDevice::open`] returns an error.
//! Invariant: **path independence** (see `cleave_engine::ops`). The order of every kernel's sums
//! depends on shapes alone, never on the number of rows, chunks or sequences in the step.
//!
//! Precision. In f32 everything is f32, in plain kernels that serve as a reference and are slow. In
//! bf16, weights, keys, values and all activations but the residual stream are bf16; the residual
//! stream, norms, softmax and all sums are f32. In bf16, quantised weights stay as narrow as the
//! checkpoint has them wherever a kernel takes their shape (one family of kernels then serves every
//! number of rows), and keys and values may be fp8.
#![allow(unsafe_code)] // Needed for calls of the driver and for kernels, which take addresses.

mod adapters;
mod args;
mod attention;
mod blocks;
mod buffers;
mod cublaslt;
mod driver;
mod dynamic;
mod error;
#[cfg(test)]
mod every_kernel;
mod experts;
mod idle;
mod images;
mod matmul;
mod ops;
mod options;
mod pack;
mod plan;
mod quantized;
mod recording;
mod sample;
#[cfg(test)]
mod smoke;
mod step_messages;
mod tiled;
mod upload;
mod wgmma;

pub use adapters::{CudaAdapter, CudaAdapterLoader, adapter_bytes_max};
pub use buffers::{CudaPool, CudaRows};
pub use driver::{CudaDevice, DeviceFacts};
pub use error::CudaError;
pub use experts::experts_workspace_bytes;
pub use images::has_built_kernels;
pub use ops::CudaOps;
pub use options::{CudaOptions, MatmulMode, MultiprocessorShare, SharePart, StreamPriority};
pub use pack::{CudaMatrix, CudaRotary, CudaTable, CudaVector, CudaWeightLoader};
