//! A product on all threads: the left side is packed, then panels are multiplied.
//!
//! Owns: the choice of kernels for each format of weights.
//! Never: does arithmetic itself; see `kernel`.
//! Invariant: see [`ProductGrid`].

use super::{CpuOps, PIECE_ELEMENTS, ensure_len, normalize_row};
use crate::buffers::CpuRows;
use crate::grid::{ProductGrid, run_range};
use crate::pack::{CpuMatrix, CpuVector, StackForm};
use cleave_cpu_kernels::kernel::product::groups::{GroupCodes, GroupLayout};
use cleave_cpu_kernels::kernel::product::left::LeftSide;
use cleave_cpu_kernels::kernel::product::{
    IntegerWeights, PackedProduct, RowAddends, SCRATCH_WORDS,
};
use cleave_cpu_kernels::kernel::tile::Tiles;
use cleave_cpu_kernels::kernel::{CpuKernels, IntegerKernels, ProductKernels};
use cleave_cpu_kernels::memory::SliceParts;
use cleave_engine::EngineError;
use cleave_engine::ops::Activation;
use cleave_engine::ops::{Norm, NormIo, Precision};

/// Source of a product's rows.
#[derive(Clone, Copy)]
pub(super) enum RowsSource<'a> {
    /// Existing rows, `(rows, width)`.
    Rows(&'a [f32]),
    /// Normalised rows of the residual stream, after adding `delta`; computed tile by tile and not
    /// stored.
    Normed {
        residual: SliceParts<'a, f32>,
        delta: Option<&'a [f32]>,
        norm: &'a Norm<'a, CpuVector>,
    },
}

impl<'a> RowsSource<'a> {
    pub(super) fn normed(
        norm: &'a Norm<'a, CpuVector>,
        rows: usize,
        from: NormIo<'a, CpuRows>,
    ) -> Self {
        let NormIo {
            residual,
            delta,
            normed: _,
        } = from;
        assert_eq!(norm.weight.0.len(), residual.width, "width of a norm");
        if let Some(delta) = delta {
            assert_eq!(delta.width, residual.width, "width of what is added");
        }
        Self::Normed {
            residual: SliceParts::new(residual.head_mut(rows)),
            delta: delta.map(|delta| delta.head(rows)),
            norm,
        }
    }

    /// Elements of all rows.
    fn len(&self) -> usize {
        match self {
            Self::Rows(x) => x.len(),
            Self::Normed { residual, .. } => residual.elements_count(),
        }
    }
}

/// The gate of a product of gate and up.
#[derive(Clone, Copy)]
pub(super) struct ProductGate<'a> {
    pub(super) activation: Activation,
    /// Numbers added to gate and up of some rows, before the activation.
    pub(super) addends: Option<RowAddends<'a>>,
}

impl ProductGate<'_> {
    /// A gate to which nothing is added.
    pub(super) const fn of(activation: Activation) -> Self {
        Self {
            activation,
            addends: None,
        }
    }
}

/// Sizes of the packed left side of a product.
#[derive(Clone, Copy, Default)]
pub(super) struct LeftSizes {
    /// Words of packed rows.
    pub(super) words: usize,
    /// Scales of packed rows, and as many sums.
    pub(super) groups: usize,
}

impl LeftSizes {
    pub(super) fn of(
        matrix: &CpuMatrix,
        rows: usize,
        kernels: &ProductKernels,
        group_steps: Option<usize>,
    ) -> Self {
        let groups = group_steps.map_or(matrix.slices.len(), |each| matrix.steps() / each);
        Self {
            words: rows * matrix.steps() * kernels.phases,
            groups: rows * groups,
        }
    }
}

/// A packed left side.
#[derive(Clone, Copy)]
pub(super) struct PackedLeft<'a> {
    pub(super) words: &'a [u32],
    pub(super) scales: &'a [f32],
    pub(super) sums: &'a [u32],
    pub(super) rows: usize,
}

/// The product of a packed left side and a matrix, `out` `(rows, columns)`.
pub(super) fn packed_product<'a>(
    matrix: &'a CpuMatrix,
    gate: Option<Activation>,
    left: PackedLeft<'a>,
    out: SliceParts<'a, f32>,
) -> PackedProduct<'a> {
    assert_eq!(matrix.is_gated, gate.is_some(), "gate of a matrix");
    PackedProduct {
        right: &matrix.words,
        steps: matrix.steps(),
        slices: &matrix.slices,
        columns: matrix.columns,
        gate,
        addends: None,
        bias: matrix.bias.as_deref(),
        integer: IntegerWeights {
            units: match matrix.form {
                StackForm::Groups(units) => units,
                StackForm::F32 | StackForm::Bf16 | StackForm::F16 | StackForm::Int8 => {
                    GroupLayout::default()
                }
            },
            scales: matrix.column_scales.as_deref().unwrap_or_default(),
        },
        left: left.words,
        left_scales: left.scales,
        left_sums: left.sums,
        rows: left.rows,
        out,
    }
}

/// Division of a product with this matrix among threads.
pub(super) fn product_grid(matrix: &CpuMatrix, cut: Tiles, threads: usize) -> ProductGrid {
    let panels = matrix.panels();
    let panel_words = matrix.words.len() / panels.max(1);
    ProductGrid::new(panels, panel_words, cut, threads)
}

/// Kernels for every format of weights.
#[derive(Clone, Copy)]
pub(super) struct KernelTables {
    kernels: &'static CpuKernels,
    bytes_kernels: &'static IntegerKernels,
    precision: Precision,
}

impl KernelTables {
    /// Kernels for a matrix of this format, and the steps of its groups; `None` without groups.
    pub(super) fn of(self, matrix: &CpuMatrix) -> (&'static ProductKernels, Option<usize>) {
        const OTHER: &str = "a matrix of another pack";
        match &matrix.form {
            // Routers are in f32 whatever the precision.
            StackForm::F32 => (&self.kernels.of_f32.product, None),
            StackForm::Bf16 => {
                assert_eq!(self.precision, Precision::Bf16, "{OTHER}");
                (&self.kernels.of_bf16.product, None)
            }
            StackForm::F16 => {
                assert_eq!(self.precision, Precision::Bf16, "{OTHER}");
                (&self.kernels.of_f16, None)
            }
            StackForm::Int8 => (&self.bytes_kernels.int8, None),
            StackForm::Groups(units) => match units.codes {
                GroupCodes::Eight => (&self.bytes_kernels.int8_groups, Some(units.steps)),
                GroupCodes::Four | GroupCodes::Float4 => {
                    (&self.bytes_kernels.nibbles, Some(units.steps))
                }
            },
        }
    }
}

impl CpuOps {
    pub(super) fn tables(&self) -> KernelTables {
        KernelTables {
            kernels: self.kernels,
            bytes_kernels: self.bytes_kernels,
            precision: self.precision,
        }
    }

    /// Computes `out = x · matrix + bias`, `x` `(rows, width)`, `out` `(rows, columns)`.
    pub(super) fn product(
        &mut self,
        matrix: &CpuMatrix,
        gate: Option<ProductGate<'_>>,
        rows: usize,
        from: RowsSource<'_>,
        out: &mut [f32],
    ) -> Result<(), EngineError> {
        assert_eq!(from.len(), rows * matrix.width, "left side of a product");
        assert_eq!(out.len(), rows * matrix.columns, "result of a product");
        let (kernels, group_steps) = self.tables().of(matrix);
        let LeftSizes { words, groups } = LeftSizes::of(matrix, rows, kernels, group_steps);
        ensure_len(&mut self.left, words)?;
        ensure_len(&mut self.left_scales, groups)?;
        ensure_len(&mut self.left_sums, groups)?;
        let cut = Tiles::new(rows, self.kernels.rows_max);
        let tile_elements = self.kernels.rows_max * matrix.width;
        ensure_len(&mut self.normed, self.threads.count() * tile_elements)?;
        let normed = SliceParts::new(&mut self.normed);
        let left = LeftSide {
            x: match from {
                RowsSource::Rows(x) => x,
                RowsSource::Normed { .. } => &[],
            },
            first: 0,
            width: matrix.width,
            rows,
            slices: &matrix.slices,
            group_steps,
            words: SliceParts::new(&mut self.left[..words]),
            scales: SliceParts::new(&mut self.left_scales[..groups]),
            sums: SliceParts::new(&mut self.left_sums[..groups]),
        };
        let tiles_each = PIECE_ELEMENTS.div_ceil(matrix.width.max(1) * self.kernels.rows_max);
        let of_rows = self.kernels;
        self.threads.run(cut.count().div_ceil(tiles_each), &|turn| {
            let tiles = run_range(turn.task, tiles_each, cut.count());
            let RowsSource::Normed {
                residual,
                delta,
                norm,
            } = &from
            else {
                // SAFETY: `CpuKernels::of` checked the instructions.
                return unsafe { (kernels.pack)(&left, tiles) };
            };
            for tile in tiles {
                let rows = cut.start(tile)..cut.start(tile + 1);
                // SAFETY: each worker has its own part, and a tile's rows belong to one task; the
                // instructions as above.
                unsafe {
                    let start = turn.worker * tile_elements;
                    let x = normed.part(start..start + rows.len() * left.width);
                    for (row, x) in rows.clone().zip(x.chunks_exact_mut(left.width)) {
                        let range = row * left.width..(row + 1) * left.width;
                        let residual = residual.part(range.clone());
                        if let Some(delta) = delta {
                            (of_rows.add)(residual, &delta[range]);
                        }
                        x.copy_from_slice(residual);
                        normalize_row(of_rows, norm, x);
                    }
                    let first = rows.start;
                    (kernels.pack)(&LeftSide { x, first, ..left }, tile..tile + 1);
                }
            }
        });
        let packed = PackedLeft {
            words: &self.left[..words],
            scales: &self.left_scales[..groups],
            sums: &self.left_sums[..groups],
            rows,
        };
        let activation = gate.map(|gate| gate.activation);
        let product = PackedProduct {
            addends: gate.and_then(|gate| gate.addends),
            ..packed_product(matrix, activation, packed, SliceParts::new(out))
        };
        let grid = product_grid(matrix, cut, self.threads.count());
        let scratch = SliceParts::new(&mut self.products_scratch);
        self.threads.run(grid.tasks_count(), &|turn| {
            let own_scratch = turn.worker * SCRATCH_WORDS..(turn.worker + 1) * SCRATCH_WORDS;
            // SAFETY: each worker has its own scratch; `CpuKernels::of` checked the instructions.
            unsafe {
                (kernels.multiply)(&product, &grid.piece(turn.task), scratch.part(own_scratch))
            }
        });
        Ok(())
    }
}
