//! Adapters in a pass: added to a product, and between a gate's product and its activation.
//!
//! Owns: that order. Never: knows which rows have one.
//! Invariant: a product is rounded to the activations' type before an adapter's is added, in every
//! pass alike, so that rows without one have the bits of a pass without adapters.

use super::CudaOps;
use crate::adapters::CudaAdapter;
use crate::buffers::CudaRows;
use crate::pack::CudaMatrix;
use cleave_engine::EngineError;
use cleave_engine::ops::{AdaptedStack, GatedIo};

impl CudaOps {
    /// Queues the products of a stack's adapters, added to `out`.
    pub(super) fn add_adapters(
        &self,
        stack: &AdaptedStack<'_, CudaAdapter>,
        x: &CudaRows,
        out: &CudaRows,
    ) -> Result<(), EngineError> {
        assert_eq!(x.stored, self.options.precision);
        assert_eq!(out.stored, self.options.precision);
        Ok(self.adapters.run(stack, x, out, &self.stream)?)
    }

    /// Queues a product of gate and up projection, the products of adapters, and the gate.
    pub(super) fn gated_with_adapters(
        &mut self,
        matrix: &CudaMatrix,
        rows: usize,
        x: &CudaRows,
        to: GatedIo<'_, CudaRows>,
        stack: &AdaptedStack<'_, CudaAdapter>,
    ) -> Result<(), EngineError> {
        self.product(matrix, rows, x, to.gate_up)?;
        self.add_adapters(stack, x, to.gate_up)?;
        self.gate(rows, to)
    }
}
