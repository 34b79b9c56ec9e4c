//! A mixture of experts: its steps in order.
//!
//! Owns: that order. Never: chooses a kernel.
//! Invariant: what a step leaves in the workspace is read by the next steps of the same layer
//! alone.

use super::CudaOps;
use crate::buffers::{CudaRows, RowsPlace};
use crate::experts::{ExpertProduct, Mixture, PieceSizes, SortedPlaces};
use crate::matmul::{MatmulProduct, MatmulTarget};
use crate::pack::CudaWeightLoader;
use cleave_engine::EngineError;
use cleave_engine::ops::{Experts, GatedMlpSpec, Precision};

impl CudaOps {
    /// Queues a mixture of `rows` rows.
    pub(super) fn mixture(
        &mut self,
        experts: &Experts<'_, CudaWeightLoader>,
        rows: usize,
        x: &CudaRows,
        out: &CudaRows,
    ) -> Result<(), EngineError> {
        let (hidden, stored) = (experts.router.width, self.options.precision);
        assert_eq!((x.width, x.stored), (hidden, stored));
        assert_eq!((out.width, out.stored), (hidden, stored));
        let launched = self.launched(rows);
        x.check_rows(launched);
        out.check_rows(launched);
        let (stream, messages) = (&self.stream, &mut self.messages);
        let rows_count = self.matmul.row_count_address(rows, stream, messages)?;
        let x = x.place();
        let mixture = (self.experts).prepare(experts, x, launched, rows_count, stream)?;
        self.shared_expert(&mixture, rows)?;
        for (first, sizes) in mixture.pieces() {
            self.experts.route(&mixture, first, &sizes, &self.stream)?;
            self.expert_products(&mixture, sizes)?;
            let out = out.address();
            self.experts
                .combine(&mixture, first, &sizes, out, &self.stream)?;
        }
        Ok(())
    }

    /// Queues the output of the expert that every row uses, if there is one.
    fn shared_expert(&mut self, mixture: &Mixture<'_>, rows: usize) -> Result<(), EngineError> {
        let shared = mixture.experts.shared.zip(mixture.experts.spec.shared);
        let Some((matrices, spec)) = shared else {
            return Ok(());
        };
        let buffers = mixture.shared_buffers();
        let bucket = mixture.rows;
        let stored = self.options.precision;
        let target = |address, stored| MatmulTarget { address, stored };
        let gate_up = MatmulProduct {
            matrix: &matrices.gate_up,
            rows,
            bucket,
            x: mixture.x,
        };
        let gated = RowsPlace {
            address: buffers.gated,
            width: spec.mlp.width,
            rows_max: bucket,
        };
        let down = MatmulProduct {
            matrix: &matrices.down,
            rows,
            bucket,
            x: gated,
        };
        self.queue_product(&gate_up, target(buffers.gate_up, stored))?;
        let GatedMlpSpec {
            activation, width, ..
        } = spec.mlp;
        self.launch_gate(activation, width, bucket, buffers.gate_up, buffers.gated)?;
        self.queue_product(&down, target(buffers.outputs, Precision::F32))
    }

    /// Queues the outputs of all experts for the rows of a piece.
    fn expert_products(
        &mut self,
        mixture: &Mixture<'_>,
        sizes: PieceSizes,
    ) -> Result<(), EngineError> {
        let buffers = mixture.buffers();
        let rows = mixture.sorted();
        let GatedMlpSpec {
            activation, width, ..
        } = mixture.experts.spec.expert;
        let gate_up = ExpertProduct {
            matrices: mixture.gate_up,
            sizes,
            rows,
            x: mixture.x.address,
            target: MatmulTarget {
                address: buffers.gate_up,
                stored: self.options.precision,
            },
        };
        let down = ExpertProduct {
            matrices: mixture.down,
            sizes,
            rows: SortedPlaces { rows_of: 0, ..rows },
            x: buffers.gated,
            target: MatmulTarget {
                address: buffers.outputs,
                stored: Precision::F32,
            },
        };
        self.experts.products.run(&gate_up, &self.stream)?;
        let places = sizes.places_max();
        self.launch_gate(activation, width, places, buffers.gate_up, buffers.gated)?;
        Ok(self.experts.products.run(&down, &self.stream)?)
    }
}
