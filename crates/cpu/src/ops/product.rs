//! A product as the threads do it: the left side is packed, then panels are multiplied.
//!
//! Owns: which kernels go with which form of weights.
//! Never: does arithmetic itself; see `kernel`.
//! Invariant: see [`Grid`].

use super::{CpuOps, PIECE_ELEMENTS, grow};
use crate::buffers::CpuRows;
use crate::grid::{Grid, piece};
use crate::kernel::ProductKernels;
use crate::kernel::product::groups::Bits;
use crate::kernel::product::left::Left;
use crate::kernel::product::{Product, SCRATCH_WORDS, Whole};
use crate::kernel::tile::Tiles;
use crate::memory::Parts;
use crate::pack::{Columns, CpuMatrix, CpuVector, Form};
use cleave_engine::EngineError;
use cleave_engine::ops::{Norm, Normed, Precision};

/// What rows of a product are made of.
#[derive(Clone, Copy)]
pub(super) enum Source<'a> {
    /// They are there, `(rows, width)`.
    Rows(&'a [f32]),
    /// Rows of the residual stream, to which something is added first, normed. They are not kept.
    Normed {
        residual: Parts<'a, f32>,
        delta: Option<&'a [f32]>,
        weight: &'a [f32],
        epsilon: f32,
    },
}

impl<'a> Source<'a> {
    pub(super) fn normed(
        norm: &Norm<'a, CpuVector>,
        rows: usize,
        from: Normed<'a, CpuRows>,
    ) -> Self {
        let Normed {
            residual,
            delta,
            normed: _,
        } = from;
        assert_eq!(norm.weight.0.len(), residual.width, "width of a norm");
        if let Some(delta) = delta {
            assert_eq!(delta.width, residual.width, "width of what is added");
        }
        Self::Normed {
            residual: Parts::new(residual.head_mut(rows)),
            delta: delta.map(|delta| delta.head(rows)),
            weight: &norm.weight.0,
            epsilon: norm.epsilon,
        }
    }

    /// Elements of all rows.
    fn len(&self) -> usize {
        match self {
            Self::Rows(x) => x.len(),
            Self::Normed { residual, .. } => residual.len(),
        }
    }
}

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

    /// `out = x · matrix + bias`, `x` `(rows, width)` from there, `out` `(rows, columns)`.
    pub(super) fn product(
        &mut self,
        matrix: &CpuMatrix,
        rows: usize,
        from: Source<'_>,
        out: &mut [f32],
    ) -> Result<(), EngineError> {
        assert_eq!(from.len(), rows * matrix.width, "left side of a product");
        assert_eq!(out.len(), rows * matrix.columns, "result of a product");
        let (kernels, group_steps) = self.product_kernels(matrix);
        let words = rows * matrix.steps * kernels.phases;
        let groups = rows * matrix.steps.div_ceil(group_steps.max(1));
        grow(&mut self.left, words)?;
        grow(&mut self.left_scales, groups)?;
        grow(&mut self.left_sums, groups)?;
        let cut = Tiles::new(rows, self.kernels.rows_max);
        let tile_elements = self.kernels.rows_max * matrix.width;
        grow(&mut self.normed, self.threads.count() * tile_elements)?;
        let normed = Parts::new(&mut self.normed);
        let left = Left {
            x: match from {
                Source::Rows(x) => x,
                Source::Normed { .. } => &[],
            },
            first: 0,
            width: matrix.width,
            rows,
            steps: matrix.steps,
            group_steps,
            words: Parts::new(&mut self.left[..words]),
            scales: Parts::new(&mut self.left_scales[..groups]),
            sums: Parts::new(&mut self.left_sums[..groups]),
        };
        let tiles_each = PIECE_ELEMENTS.div_ceil(matrix.width.max(1) * self.kernels.rows_max);
        let (norm, add) = (self.kernels.norm, self.kernels.add);
        self.threads.run(cut.count().div_ceil(tiles_each), &|turn| {
            let tiles = piece(turn.task, tiles_each, cut.count());
            let Source::Normed {
                residual,
                delta,
                weight,
                epsilon,
            } = &from
            else {
                // SAFETY: `Kernels::of` checked the instructions.
                return unsafe { (kernels.pack)(&left, tiles) };
            };
            for tile in tiles {
                let rows = cut.start(tile)..cut.start(tile + 1);
                // SAFETY: each worker has its own part, and a tile's rows are of one task; the instructions as above.
                unsafe {
                    let start = turn.worker * tile_elements;
                    let x = normed.part(start..start + rows.len() * left.width);
                    for (row, x) in rows.clone().zip(x.chunks_exact_mut(left.width)) {
                        let range = row * left.width..(row + 1) * left.width;
                        let residual = residual.part(range.clone());
                        if let Some(delta) = delta {
                            add(residual, &delta[range]);
                        }
                        x.copy_from_slice(residual);
                        norm(x, weight, *epsilon);
                    }
                    let first = rows.start;
                    (kernels.pack)(&Left { x, first, ..left }, tile..tile + 1);
                }
            }
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
