//! `Ops` on the processor: AVX-512, AVX2, NEON and plain Rust, chosen at run time.
//!
//! Owns: vector kernels, packed weights and the files that keep them, the threads that share an operation, and the KV pool in
//! host memory. With the shared-memory transport and the GPU, the only place of `unsafe` code.
//! Never: knows an architecture, a request, or which tokens belong to whom.
//! Invariant: **path independence** (see `cleave_engine::ops`). Products and attention sum each
//! element in one fixed order, whatever rows, threads, segments and chunks are computed beside it.
//!
//! Precision. In f32 everything is f32. In bf16, weights, keys and values are stored in bf16; the
//! activations, queries and attention weights that meet them are rounded to bf16 (halves to even),
//! on every instruction set; the residual stream, norms, softmax and all sums are f32. A product of
//! two bf16 numbers is exact in f32, so all instruction sets add the same numbers; all of them add
//! the odd element of a pair before the even one, as the AVX-512 instruction does, and so their
//! matrix products agree to the bit (down to numbers of 1e-38, which that instruction takes for
//! zero). Where weights are f16 and stay so, activations that meet them have 13 bits, and again
//! products are exact. Where weights have eight or four bits, the activations that meet them are rounded to eight, with a scale for
//! each row, or for each group of a row where weights have groups; sums of products are whole numbers, and what follows
//! is rounded alike everywhere, so there all sets agree to the bit, too. In f32, and in the exponential, the plain set rounds after multiplying where the others
//! fuse; there results agree within a bound.
#![allow(unsafe_code)]
// Vector instructions, and slices shared between threads.
// Vectors are arrays in the plain set: indexing shows which lane goes where.
#![allow(clippy::needless_range_loop)]

mod affinity;
mod buffers;
mod cache;
mod ceiling;
mod grid;
mod isa;
mod kernel;
mod layout;
mod memory;
mod ops;
mod options;
mod pack;
mod placement;
mod plan;
mod simd;
mod threads;
mod widened;

pub use affinity::cores_count;
pub use buffers::{CpuPool, CpuRows};
pub use ceiling::{Dot, Reader, operations_per_second};
pub use isa::Isa;
pub use memory::give_back_freed;
pub use ops::CpuOps;
pub use options::{CpuError, CpuOptions, Quantize};
pub use pack::{CpuMatrix, CpuPack, CpuRotary, CpuTable, CpuVector};
pub use placement::{Binding, Machine, Placement, WorkerThreads};
pub use threads::{Threads, Turn};
