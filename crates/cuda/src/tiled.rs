//! A tensor-core kernel of products: its tile, its grid and its launch.
//!
//! Owns: the grid, and the tensor maps of kernels that copy by them.
//! Never: chooses a kernel.
//! Invariant: a grid has no more thread blocks than the stream's multiprocessors hold at once, and
//! whole clusters.

use crate::args::{MatmulArgs, MatmulClusterArgs};
use crate::driver::{CudaKernel, CudaStream, TensorMap};
use crate::error::CudaError;
use crate::images::KernelImages;

/// Thread blocks of a cluster, side by side: `COLUMN_BLOCKS` of `Cluster192` in
/// `kernels/matmul/cluster.cu`.
const CLUSTER_BLOCKS: usize = 2;

/// The time of a thread block's tile beside that of its rows, in rows: the time to begin and to end
/// it, and that of its weights, which narrow tiles copy more often.
const TILE_OVERHEAD_ROWS: usize = 16;

/// A kernel for at most `rows_max` rows.
#[derive(Debug)]
pub(crate) struct TiledKernel {
    pub(crate) code: TiledCode,
    /// Columns and rows of a thread block's tile.
    pub(crate) tile: (usize, usize),
    pub(crate) rows_max: usize,
    pub(crate) instruction: MatrixInstruction,
}

/// The instruction of the tensor cores that a kernel multiplies with.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum MatrixInstruction {
    Mma,
    /// Hopper's, whose operands lie in shared memory.
    Wgmma,
}

impl MatrixInstruction {
    /// Returns the time of a product in no unit: the kernels with `mma` reach about half of the
    /// speed of those with `wgmma` on the same chip.
    fn time(self) -> usize {
        match self {
            Self::Mma => 2,
            Self::Wgmma => 1,
        }
    }
}

#[derive(Debug)]
pub(crate) enum TiledCode {
    /// Each thread block copies its own operands. A grid for all multiprocessors begins early, any
    /// other in turn (see [`CudaKernel::in_turn`]).
    Alone {
        early: CudaKernel<MatmulArgs>,
        in_turn: CudaKernel<MatmulArgs>,
    },
    /// The thread blocks of a cluster have the same rows, and each copies a part of them for all.
    Clusters(CudaKernel<MatmulClusterArgs>),
}

impl TiledCode {
    /// Loads a kernel whose thread blocks copy for themselves.
    pub(crate) fn alone(images: &KernelImages, name: &str) -> Result<Self, CudaError> {
        Ok(Self::Alone {
            early: images.kernel(name)?,
            in_turn: images.kernel(name)?.in_turn(),
        })
    }
}

impl TiledKernel {
    /// Returns the number of tiles of a product, for whole clusters.
    pub(crate) fn tiles(&self, rows: usize, columns: usize) -> usize {
        let across = match self.code {
            TiledCode::Alone { .. } => 1,
            TiledCode::Clusters(_) => CLUSTER_BLOCKS,
        };
        columns.div_ceil(self.tile.0 * across) * across * rows.div_ceil(self.tile.1)
    }

    /// Returns the number of thread blocks for so many items of work on so many multiprocessors.
    /// More would only wait; each walks several items instead.
    pub(crate) fn blocks(&self, items: usize, processors_count: usize) -> usize {
        match &self.code {
            TiledCode::Alone { early, .. } => {
                items.min(processors_count * early.blocks_per_multiprocessor())
            }
            TiledCode::Clusters(_) => {
                let clusters = (processors_count / CLUSTER_BLOCKS).max(1);
                clusters.min(items.div_ceil(CLUSTER_BLOCKS)) * CLUSTER_BLOCKS
            }
        }
    }

    /// Returns the time of a product in no unit, to compare kernels that differ in their tiles:
    /// that of the tiles that the busiest multiprocessor computes.
    pub(crate) fn time(&self, rows: usize, columns: usize, processors_count: usize) -> usize {
        let tiles = self.tiles(rows, columns);
        let tile = (self.tile.1 + TILE_OVERHEAD_ROWS) * self.tile.0 * self.instruction.time();
        tiles.div_ceil(processors_count) * tile
    }

    /// Queues a product of at most `rows` rows.
    ///
    /// # Safety
    /// As for [`CudaKernel::launch`]; `args.x` has `rows` rows.
    ///
    /// # Errors
    /// If the driver refuses.
    pub(crate) unsafe fn launch(
        &self,
        stream: &CudaStream,
        blocks: usize,
        args: MatmulArgs,
        rows: usize,
    ) -> Result<(), CudaError> {
        let grid = [blocks as u32, 1, 1];
        match &self.code {
            // SAFETY: as the caller says.
            TiledCode::Alone { early, in_turn } => unsafe {
                let fills = blocks >= stream.processors_count() as usize;
                let kernel = if fills { early } else { in_turn };
                kernel.launch(stream, grid, args)
            },
            TiledCode::Clusters(kernel) => {
                let (columns, width) = (args.columns as usize, args.width as usize);
                // A thread block copies all of its columns, and its part of the rows.
                let (box_columns, box_rows) = (self.tile.0, self.tile.1 / CLUSTER_BLOCKS);
                let map = |address, count, box_rows: usize| {
                    TensorMap::new(stream.device(), address, count, width, box_rows as u32)
                };
                let args = MatmulClusterArgs {
                    weights: map(args.weights, columns, box_columns)?,
                    x: map(args.x, rows, box_rows)?,
                    product: args,
                    padding: [0; 34],
                };
                // SAFETY: as the caller says.
                unsafe { kernel.launch(stream, grid, args) }
            }
        }
    }
}
