//! A product as the threads do it: the left side is packed, then panels are multiplied.
//!
//! Owns: which kernels go with which form of weights.
//! Never: does arithmetic itself; see `kernel`.
//! Invariant: see [`Grid`].

use super::{CpuOps, PIECE_ELEMENTS, grow};
use crate::grid::{Grid, piece};
use crate::kernel::ProductKernels;
use crate::kernel::product::groups::Bits;
use crate::kernel::product::left::Left;
use crate::kernel::product::{Product, SCRATCH_WORDS, Whole};
use crate::kernel::tile::Tiles;
use crate::memory::Parts;
use crate::pack::{Columns, CpuMatrix, Form};
use cleave_engine::EngineError;
use cleave_engine::ops::Precision;

impl CpuOps {
    /// What multiplies with a matrix of this form, and the steps of its groups.
    fn product_kernels(&self, matrix: &CpuMatrix) -> (&'static ProductKernels, usize) {
        const OTHER: &str = "a matrix of another pack";
        match &matrix.form {
            Form::F32 => {
                assert_eq!(self.precision, Precision::F32, "{OTHER}");
                (&self.kernels.single.product, matrix.steps)
            }
            Form::Bf16 => {
                assert_eq!(self.precision, Precision::Bf16, "{OTHER}");
                (&self.kernels.brain.product, matrix.steps)
            }
            Form::F16 => {
                assert_eq!(self.precision, Precision::Bf16, "{OTHER}");
                (&self.kernels.half, matrix.steps)
            }
            Form::Int8(_) => (&self.bytes_kernels.int8, matrix.steps),
            Form::Groups(units) => match units.bits {
                Bits::Eight => (&self.bytes_kernels.int8_groups, units.steps),
                Bits::Four => (&self.bytes_kernels.int4, units.steps),
            },
        }
    }

    /// `out = x · matrix + bias`, `x` `(rows, width)`, `out` `(rows, columns)`.
    pub(super) fn product(
        &mut self,
        matrix: &CpuMatrix,
        rows: usize,
        x: &[f32],
        out: &mut [f32],
    ) -> Result<(), EngineError> {
        assert_eq!(x.len(), rows * matrix.width, "left side of a product");
        assert_eq!(out.len(), rows * matrix.columns, "result of a product");
        let (kernels, group_steps) = self.product_kernels(matrix);
        let words = rows * matrix.steps * kernels.phases;
        let groups = rows * matrix.steps.div_ceil(group_steps.max(1));
        grow(&mut self.left, words)?;
        grow(&mut self.left_scales, groups)?;
        grow(&mut self.left_sums, groups)?;
        let cut = Tiles::new(rows, self.kernels.rows_max);
        let left = Left {
            x,
            width: matrix.width,
            rows,
            steps: matrix.steps,
            group_steps,
            words: Parts::new(&mut self.left[..words]),
            scales: Parts::new(&mut self.left_scales[..groups]),
            sums: Parts::new(&mut self.left_sums[..groups]),
        };
        let tiles_each = PIECE_ELEMENTS.div_ceil(matrix.width.max(1) * self.kernels.rows_max);
        self.threads.run(cut.count().div_ceil(tiles_each), &|turn| {
            let tiles = piece(turn.task, tiles_each, cut.count());
            // SAFETY: `Kernels::of` checked the instructions.
            unsafe { (kernels.pack)(&left, tiles) }
        });
        let product = Product {
            right: &matrix.words,
            steps: matrix.steps,
            columns: matrix.columns,
            is_gated: matrix.is_gated,
            bias: matrix.bias.as_deref(),
            whole: match &matrix.form {
                Form::F32 | Form::Bf16 | Form::F16 => Whole::default(),
                Form::Int8(Columns { scales, starts }) => Whole {
                    scales,
                    starts,
                    ..Whole::default()
                },
                Form::Groups(units) => Whole {
                    units: *units,
                    ..Whole::default()
                },
            },
            left: &self.left[..words],
            left_scales: &self.left_scales[..groups],
            left_sums: &self.left_sums[..groups],
            rows,
            out: Parts::new(out),
        };
        let panels = matrix.panels();
        let panel_words = matrix.words.len() / panels.max(1);
        let grid = Grid::new((panels, panel_words), cut, self.threads.count());
        let scratch = Parts::new(&mut self.products_scratch);
        self.threads.run(grid.tasks_count(), &|turn| {
            let mine = turn.worker * SCRATCH_WORDS..(turn.worker + 1) * SCRATCH_WORDS;
            // SAFETY: each worker has its own scratch; `Kernels::of` checked the instructions.
            unsafe { (kernels.multiply)(&product, &grid.piece(turn.task), scratch.part(mine)) }
        });
        Ok(())
    }
}
