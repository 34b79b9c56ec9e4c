//! The arithmetic of the CPU backend, compiled once for each instruction set.
//!
//! Owns: vector kernels for AVX-512, AVX2, NEON and plain Rust, the layouts of packed weights and
//! of keys and values that they read, and memory that suits every vector.
//! Never: starts a thread, or chooses what is computed.
//! Invariant: **path independence** (see `cleave_engine::ops`). Products and attention sum each
//! element in one fixed order, whatever rows, segments and chunks are computed beside it.
//!
//! Precision. In f32, all numbers are f32. In bf16, weights, keys and values are stored in bf16;
//! the activations, queries and attention weights that meet them are rounded to bf16 (halves to
//! even), on every instruction set; the residual stream, norms, softmax and all sums are f32. A
//! product of two bf16 numbers is exact in f32, so all instruction sets add the same numbers; all
//! of them add the odd element of a pair before the even one, as the AVX-512 instruction does, and
//! so their matrix products agree to the bit (down to numbers of 1e-38, which that instruction
//! treats as zero). With weights kept in f16, the activations that multiply them have 13 bits, and
//! again products are exact. With weights of eight or four bits, the activations that multiply them
//! are rounded to eight bits, with a scale per row, or per group of a row if the weights have
//! groups; sums of products are integers, and later roundings are the same on every set, so that
//! all sets agree to the bit, too. In f32, and in the exponential, the plain set rounds after
//! multiplying while the others fuse; there, results agree within a bound.
#![allow(unsafe_code)]
// Vector instructions, and slices shared between threads.
// Vectors are arrays in the plain set: indexing shows which lane goes where.
#![allow(clippy::needless_range_loop)]

pub mod isa;
pub mod kernel;
pub mod layout;
pub mod memory;
pub mod simd;
