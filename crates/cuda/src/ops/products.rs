//! Products of one matrix, and the gate of an MLP.
//!
//! Owns: the grid of the gate. Never: chooses a kernel of a product.
//! Invariant: products and gates cover the rows that are launched, padding included.

use super::CudaOps;
use crate::args::{DeviceAddress, GateArgs};
use crate::buffers::CudaRows;
use crate::matmul::{MatmulProduct, MatmulTarget};
use crate::pack::CudaMatrix;
use cleave_engine::EngineError;
use cleave_engine::ops::{Activation, GatedIo};

/// Elements of a row that one thread block of the gate computes: eight at a time, or one at a time.
const GATE_ELEMENTS: (usize, usize) = (2048, 256);

impl CudaOps {
    /// Queues `out = matrix · x + bias`.
    pub(super) fn product(
        &mut self,
        matrix: &CudaMatrix,
        rows: usize,
        x: &CudaRows,
        out: &CudaRows,
    ) -> Result<(), EngineError> {
        assert_eq!(
            (out.width, out.stored),
            (matrix.columns, self.options.precision)
        );
        let bucket = self.launched(rows);
        out.check_rows(bucket);
        let target = MatmulTarget {
            address: out.address(),
            stored: out.stored,
        };
        let product = MatmulProduct {
            matrix,
            rows,
            bucket,
            x: x.place(),
        };
        self.queue_product(&product, target)
    }

    /// Queues a product of gate and up projection, and the gate.
    pub(super) fn gated_product(
        &mut self,
        matrix: &CudaMatrix,
        rows: usize,
        x: &CudaRows,
        to: GatedIo<'_, CudaRows>,
    ) -> Result<(), EngineError> {
        self.product(matrix, rows, x, to.gate_up)?;
        self.gate(rows, to)
    }

    /// Queues the gate of products in `to.gate_up`.
    pub(super) fn gate(&self, rows: usize, to: GatedIo<'_, CudaRows>) -> Result<(), EngineError> {
        let GatedIo {
            activation,
            gate_up,
            out,
        } = to;
        let width = out.width;
        assert_eq!(
            (gate_up.width, gate_up.stored),
            (2 * width, self.options.precision)
        );
        assert_eq!(out.stored, self.options.precision);
        let rows = self.launched(rows);
        gate_up.check_rows(rows);
        out.check_rows(rows);
        self.launch_gate(activation, width, rows, gate_up.address(), out.address())
    }

    /// Queues a product of rows of any place.
    pub(super) fn queue_product(
        &mut self,
        product: &MatmulProduct<'_>,
        target: MatmulTarget,
    ) -> Result<(), EngineError> {
        let (stream, messages) = (&self.stream, &mut self.messages);
        Ok(self.matmul.run(product, target, stream, messages)?)
    }

    /// Queues `out = act(gate) · up` of rows `gate | up`.
    pub(super) fn launch_gate(
        &self,
        activation: Activation,
        width: usize,
        rows: usize,
        gate_up: DeviceAddress,
        out: DeviceAddress,
    ) -> Result<(), EngineError> {
        let (activation, limit) = match activation {
            Activation::Silu => (0, 0.0),
            Activation::GeluTanh => (1, 0.0),
            Activation::ClampedSwiGlu { limit } => (2, limit),
        };
        let args = GateArgs {
            gate_up,
            out,
            width: width as u32,
            activation,
            limit,
            padding: 0,
        };
        let each = if width.is_multiple_of(8) {
            GATE_ELEMENTS.0
        } else {
            GATE_ELEMENTS.1
        };
        let grid = [rows as u32, width.div_ceil(each) as u32, 1];
        // SAFETY: as in `launch_norm`.
        unsafe { self.kernels.gate.launch(&self.stream, grid, args) }?;
        Ok(())
    }
}
