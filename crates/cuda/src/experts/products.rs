//! Products of several experts' matrices with rows that are sorted by expert.
//!
//! Owns: the choice of the kernel, and the workspace for sums of slices.
//! Never: knows which rows an expert has: the device finds them.
//! Invariant: spans depend on a matrix' shape, its slices and the experts of a row alone, so that a
//! row gives the same bits from every kernel.

use super::sizes::PieceSizes;
use crate::args::{ExpertMatmulArgs, ExpertMatmulPlainArgs, ExpertRowsArgs};
use crate::args::{MatmulArgs, MatmulPlainArgs};
use crate::buffers::{GrowingMemory, MemoryContents};
use crate::driver::{CudaKernel, CudaStream};
use crate::error::CudaError;
use crate::images::KernelImages;
use crate::matmul::{
    ALIGNED_ELEMENTS, FEW_COLUMNS, MatmulTarget, PLAIN_TILE, QUANTIZED_TILE_COLUMNS, WAITING_MAX,
    plain_args, span_width, tiled_args,
};
use crate::pack::CudaMatrix;
use crate::quantized::QuantizedFormat;
use cleave_engine::ops::Precision;

/// Kernels for bf16 weights: name and tile.
const TILED: [(&str, (usize, usize)); 5] = [
    ("experts_many8_bf16", (FEW_COLUMNS, 8)),
    ("experts_many16_bf16", (FEW_COLUMNS, 16)),
    ("experts_many32_bf16", (FEW_COLUMNS, 32)),
    ("experts_many64_bf16", (128, 64)),
    ("experts_many128_bf16", (128, 128)),
];

/// The same for quantised weights, of each format.
const TILED_QUANTIZED: [(&str, (usize, usize)); 4] = [
    ("experts_many8", (QUANTIZED_TILE_COLUMNS, 8)),
    ("experts_many16", (QUANTIZED_TILE_COLUMNS, 16)),
    ("experts_many32", (QUANTIZED_TILE_COLUMNS, 32)),
    ("experts_many64", (QUANTIZED_TILE_COLUMNS, 64)),
];

/// Kernels of larger tiles wait for their turn: their grids may leave multiprocessors idle.
const EARLY_ROWS_MAX: usize = 32;

/// One matrix of each expert of a layer.
#[derive(Clone, Copy, Debug)]
pub(crate) struct ExpertMatrices<'a> {
    pub(crate) first: &'a CudaMatrix,
    /// Bytes from an expert's weights, scales or bias to the next expert's.
    stride: u64,
}

impl<'a> ExpertMatrices<'a> {
    /// Finds the distance of matrices that were loaded one after the other.
    ///
    /// # Errors
    /// The first expert whose matrix has another shape, format or distance; the text names both.
    pub(crate) fn of(matrices: impl Iterator<Item = &'a CudaMatrix>) -> Result<Self, String> {
        let mut stride = 0;
        let mut first = None;
        for (index, matrix) in matrices.enumerate() {
            let Some(first) = first else {
                first = Some(matrix);
                continue;
            };
            if index == 1 {
                stride = matrix.weight.address().wrapping_sub(first.weight.address());
            }
            if !first.is_repeated_by(matrix, stride.wrapping_mul(index as u64)) {
                return Err(format!(
                    "expert {index} has another shape or format of weights than expert 0; a GPU computes \
                     experts of one format together"
                ));
            }
        }
        let first = first.ok_or("a mixture has no experts")?;
        Ok(Self { first, stride })
    }
}

/// A product of the rows of a piece of a step.
#[derive(Clone, Copy, Debug)]
pub(crate) struct ExpertProduct<'a> {
    pub(crate) matrices: ExpertMatrices<'a>,
    pub(crate) sizes: PieceSizes,
    pub(crate) rows: SortedPlaces,
    /// Address of the rows.
    pub(crate) x: u64,
    /// Rows of this result are places.
    pub(crate) target: MatmulTarget,
}

/// Addresses of a piece's rows in the order of experts.
#[derive(Clone, Copy, Debug)]
pub(crate) struct SortedPlaces {
    pub(crate) tiles: u64,
    pub(crate) tiles_count: u64,
    /// 0 if the rows are places.
    pub(crate) rows_of: u64,
    /// Places of a tile.
    pub(crate) tile_rows: usize,
}

#[derive(Debug)]
struct ExpertKernel {
    kernel: CudaKernel<ExpertMatmulArgs>,
    tile: (usize, usize),
}

/// The kernels of one precision, and their workspace.
#[derive(Debug)]
pub(crate) struct ExpertProducts {
    plain: CudaKernel<ExpertMatmulPlainArgs>,
    /// Kernels for dense weights; empty in f32, which the plain kernel computes.
    dense: Vec<ExpertKernel>,
    quantized: Vec<(QuantizedFormat, Vec<ExpertKernel>)>,
    sums: GrowingMemory,
    processors_count: usize,
    reallocations_count: u64,
}

impl ExpertProducts {
    pub(crate) fn new(
        images: &KernelImages,
        stream: &CudaStream,
        precision: Precision,
    ) -> Result<Self, CudaError> {
        let kernel = |name: &str, tile: (usize, usize)| {
            let kernel: CudaKernel<ExpertMatmulArgs> = images.kernel(name)?;
            Ok::<_, CudaError>(ExpertKernel {
                kernel: if tile.1 <= EARLY_ROWS_MAX {
                    kernel
                } else {
                    kernel.in_turn()
                },
                tile,
            })
        };
        let (mut dense, mut quantized) = (Vec::new(), Vec::new());
        if precision == Precision::Bf16 {
            for (name, tile) in TILED {
                dense.push(kernel(name, tile)?);
            }
            for format in QuantizedFormat::ALL {
                let of_format = TILED_QUANTIZED
                    .map(|(name, tile)| kernel(&format!("{name}_{}", format.name()), tile));
                quantized.push((format, of_format.into_iter().collect::<Result<_, _>>()?));
            }
        }
        let memory = |purpose, contents| GrowingMemory::new(stream, 0, purpose, contents);
        Ok(Self {
            plain: images
                .kernel(&format!("experts_plain_{}", precision.name()))?
                .in_turn(),
            dense,
            quantized,
            sums: memory("sums of experts", MemoryContents::Undefined)?,
            processors_count: stream.processors_count() as usize,
            reallocations_count: 0,
        })
    }

    /// Counts the moves of the workspace; a move invalidates recordings.
    pub(crate) fn reallocations_count(&self) -> u64 {
        self.reallocations_count
    }

    /// Returns the places of a tile that suits both products of a piece.
    pub(crate) fn tile_rows(&self, matrices: [&CudaMatrix; 2], sizes: &PieceSizes) -> usize {
        let takes = |matrix: &CudaMatrix, rows: usize| match self.family(matrix) {
            [] => rows == PLAIN_TILE,
            family => family.iter().any(|kernel| kernel.tile.1 == rows),
        };
        let all = TILED.iter().map(|(_, tile)| tile.1);
        let mut fitting = all.filter(|rows| matrices.iter().all(|matrix| takes(matrix, *rows)));
        // Experts differ: half as many rows again as the mean still are one tile.
        let wanted = sizes.rows_of_expert() * 3 / 2;
        let largest = fitting.clone().next_back();
        let enough = fitting.find(|rows| *rows >= wanted);
        enough.or(largest).unwrap_or(PLAIN_TILE)
    }

    /// Returns the tensor-core kernels for a matrix; none if the plain kernel multiplies it.
    fn family(&self, matrix: &CudaMatrix) -> &[ExpertKernel] {
        match &matrix.quantized {
            None if matrix.width.is_multiple_of(ALIGNED_ELEMENTS) => &self.dense,
            None => &[],
            Some(parts) => {
                let mut formats = self.quantized.iter();
                let found = formats.find(|(format, _)| *format == parts.format);
                &found
                    .expect("quantised weights are packed for bf16 alone")
                    .1
            }
        }
    }

    /// Queues `out[p] = x[row of p] · matrix of p's expert + bias` for each place `p`.
    pub(crate) fn run(
        &mut self,
        product: &ExpertProduct<'_>,
        stream: &CudaStream,
    ) -> Result<(), CudaError> {
        let ExpertProduct {
            matrices,
            sizes,
            rows,
            x,
            target,
        } = *product;
        let matrix = matrices.first;
        let rows_args = ExpertRowsArgs {
            tiles: rows.tiles,
            tiles_count: rows.tiles_count,
            rows_of: rows.rows_of,
            stride: matrices.stride,
        };
        let row_tiles = sizes.tiles_max(rows.tile_rows);
        let Some(tiled) = self.kernel_of(matrix, rows.tile_rows) else {
            let args = ExpertMatmulPlainArgs {
                product: MatmulPlainArgs {
                    x,
                    ..plain_args(matrix, target)
                },
                rows: rows_args,
            };
            let tiles = matrix.columns.div_ceil(PLAIN_TILE) * row_tiles;
            let blocks = tiles.min(self.processors_count * self.plain.blocks_per_multiprocessor());
            // SAFETY: the caller's workspace has the rows, places and tiles.
            return unsafe { self.plain.launch(stream, [blocks as u32, 1, 1], args) };
        };
        // Products of one row's experts fill the device together.
        let span_width = span_width(matrix.columns * sizes.chosen, &matrix.slices);
        let (tile_columns, tile_rows) = tiled.tile;
        let tiles = matrix.columns.div_ceil(tile_columns) * row_tiles;
        let blocks = tiles.min(self.processors_count * tiled.kernel.blocks_per_multiprocessor());
        let floats = match matrix.slices.count() {
            1 => 0,
            _ => blocks * WAITING_MAX * tile_columns * tile_rows,
        };
        let before = self.sums.memory().at(0);
        let bytes = floats * size_of::<f32>();
        let sums = self.sums.ensure_bytes(stream, bytes)?.at(0);
        self.reallocations_count += u64::from(sums != before);
        let args = ExpertMatmulArgs {
            product: MatmulArgs {
                x,
                sums,
                ..tiled_args(matrix, target, span_width)
            },
            rows: rows_args,
        };
        let tiled = self.kernel_of(matrix, rows.tile_rows);
        let tiled = tiled.expect("the kernel that was found before");
        // SAFETY: as above; the workspace has room for all slices.
        unsafe { tiled.kernel.launch(stream, [blocks as u32, 1, 1], args) }
    }

    /// Returns the tensor-core kernel for tiles of so many places.
    fn kernel_of(&self, matrix: &CudaMatrix, tile_rows: usize) -> Option<&ExpertKernel> {
        let mut family = self.family(matrix).iter();
        family.find(|kernel| kernel.tile.1 == tile_rows)
    }
}
