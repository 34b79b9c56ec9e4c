//! What one operation reads and writes, where that is more than two buffers.
//!
//! Owns: these groups. Never: outlives a call.

use super::Ops;

/// The residual stream and what a layer adds to it, both `(rows, width)`.
#[derive(Debug)]
pub struct Residual<'a, R> {
    /// Grows by `delta`.
    pub residual: &'a mut R,
    /// What is added.
    pub delta: &'a R,
}

/// Rows of the residual stream on their way through a norm, all `(rows, width)`.
#[derive(Debug)]
pub struct Normed<'a, R> {
    /// Grows by `delta`, if there is any.
    pub residual: &'a mut R,
    /// What is added.
    pub delta: Option<&'a R>,
    /// Left with anything: for a device that writes normed rows down.
    pub normed: &'a mut R,
}

/// What a gated product writes.
#[derive(Debug)]
pub struct Gated<'a, R> {
    /// `(rows, gate | up)`: left with anything.
    pub gate_up: &'a mut R,
    /// `(rows, width)`.
    pub out: &'a mut R,
}

/// One layer of a pool, to be written.
#[derive(Debug)]
pub struct LayerOf<'a, P> {
    /// The pool.
    pub pool: &'a mut P,
    /// Which layer.
    pub layer: usize,
}

/// What attention reads and writes.
#[derive(Debug)]
pub struct AttentionIo<'a, O: Ops + ?Sized> {
    /// `(rows, q | k | v)`, queries rotated.
    pub qkv: &'a O::Rows,
    /// Keys and values.
    pub pool: &'a O::Pool,
    /// `(rows, query_heads × head_dim)`.
    pub out: &'a mut O::Rows,
}
