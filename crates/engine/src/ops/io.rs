//! Buffers of operations that read and write more than two.
//!
//! Owns: these groups of buffers. Never: outlives a call.

use super::{Activation, Ops, VectorOf};

/// The residual stream and a layer's addend, both `(rows, width)`.
#[derive(Debug)]
pub struct ResidualIo<'a, R> {
    /// Residual stream, to which `delta` is added.
    pub residual: &'a mut R,
    /// Addend, which is only read.
    pub delta: &'a R,
}

/// Buffers of a norm of the residual stream, all `(rows, width)`.
#[derive(Debug)]
pub struct NormIo<'a, R> {
    /// The residual stream, to which `delta` is added if there is one.
    pub residual: &'a mut R,
    /// Addend, if there is one.
    pub delta: Option<&'a R>,
    /// Scratch for a device that stores normed rows; its contents are undefined afterwards.
    pub normed: &'a mut R,
}

/// Activation and outputs of a gated product.
#[derive(Debug)]
pub struct GatedIo<'a, R> {
    /// Activation of the gate.
    pub activation: Activation,
    /// `(rows, gate | up)`: scratch, undefined afterwards.
    pub gate_up: &'a mut R,
    /// Result of the product, `(rows, width)`.
    pub out: &'a mut R,
}

/// One layer of a pool, to be written.
#[derive(Debug)]
pub struct PoolLayer<'a, P> {
    /// Pool that is written to.
    pub pool: &'a mut P,
    /// Index of the layer.
    pub layer: usize,
}

/// Buffers that attention reads, and its result.
pub struct AttentionIo<'a, O: Ops + ?Sized> {
    /// `(rows, q | k | v)`, queries rotated.
    pub qkv: &'a O::Rows,
    /// Pool with the keys and values.
    pub pool: &'a O::Pool,
    /// Sinks, `(query_heads)`, if there are any: one more score in each head's softmax, which is
    /// neither scaled nor capped and has no value.
    pub sinks: Option<&'a VectorOf<O>>,
    /// `(rows, query_heads × head_dim)`.
    pub out: &'a mut O::Rows,
}
