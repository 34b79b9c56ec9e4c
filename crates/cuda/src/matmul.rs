//! Matrix products on the device: the choice of the kernel, and the cut of slices of the inner
//! dimension into spans.
//!
//! Owns: the choice by the number of rows, the spans that `kernels/matmul/matmul.cuh` describes,
//! and the workspace for their sums.
//! Never: waits for the device.
//! Invariant: spans depend on a product's shape and slices alone, so that a row gives the same bits
//! from every kernel, and a rank that has some of the slices cuts them as one that has all.

use crate::args::{self, MatmulArgs, MatmulPlainArgs};
use crate::buffers::{GrowingMemory, MemoryContents, RowsPlace};
use crate::cublaslt::CublasLt;
use crate::driver::{CudaKernel, CudaStream};
use crate::error::CudaError;
use crate::images::KernelImages;
use crate::options::{CudaOptions, MatmulMode};
use crate::pack::{CudaMatrix, QuantizedParts};
use crate::quantized::QuantizedFormat;
use crate::step_messages::{StepMessage, StepMessages};
use crate::tiled::{MatrixInstruction, TiledCode, TiledKernel};
use crate::wgmma;
use cleave_engine::ops::{InnerSlices, Precision};

/// Spans begin at multiples of this many elements: `SPAN_UNIT` of the kernels.
const SPAN_UNIT: usize = 128;
/// Columns of a tile in the kernels for few rows: `FEW_COLUMNS` of the kernels.
pub(crate) const FEW_COLUMNS: usize = 64;
/// The number of thread blocks that the cut into spans fills, the same on every device so that bits
/// do not depend on its size: `BLOCKS_FILLED` of the kernels.
const BLOCKS_FILLED: usize = 264;
/// The most spans of a slice: `SPANS_MOST` of the kernels.
const SPANS_MAX: usize = 16;
/// The least spans of all slices together, where a span still has two units: `SPANS_LEAST` of the
/// kernels.
const SPANS_MIN: usize = 4;
/// Sums of slices that wait at once in a thread block's workspace: `WAITING_MOST` of the kernels.
pub(crate) const WAITING_MAX: usize = 3;
/// The tensor-core kernels take rows whose width is a multiple of this many elements.
pub(crate) const ALIGNED_ELEMENTS: usize = 8;
/// The number of rows from which an allowed cublasLt computes the product. With fewer rows the
/// memory's bandwidth is the limit, which cublasLt cannot raise.
const LIBRARY_ROWS: usize = 65;
/// Columns, and also rows, of a tile in the plain kernels.
pub(crate) const PLAIN_TILE: usize = 64;

/// A product to compute.
#[derive(Debug)]
pub(crate) struct MatmulProduct<'a> {
    pub(crate) matrix: &'a CudaMatrix,
    /// The number of real rows.
    pub(crate) rows: usize,
    /// The number of rows that the launch covers: the same, or a recording's bucket.
    pub(crate) bucket: usize,
    pub(crate) x: RowsPlace,
}

/// The destination of a product, `(rows, columns)`.
#[derive(Clone, Copy, Debug)]
pub(crate) struct MatmulTarget {
    pub(crate) address: u64,
    pub(crate) stored: Precision,
}

#[derive(Debug)]
pub(crate) struct CudaMatmul {
    plain: CudaKernel<MatmulPlainArgs>,
    /// Kernels for dense weights, fewest rows first; empty in f32, which the plain kernels compute.
    tiled: Vec<TiledKernel>,
    /// Whether the last of them use Hopper's wgmma.
    has_wgmma: bool,
    /// Kernels for quantised weights of each format, in the same order.
    quantized: Vec<(QuantizedFormat, Vec<TiledKernel>)>,
    library: Option<CublasLt>,
    sums: GrowingMemory,
    processors_count: usize,
    /// The numbers of rows that this pass has sent, with their addresses.
    counts: Vec<(usize, u64)>,
    reallocations_count: u64,
}

/// Kernels for dense weights: name, most rows, and tile.
const TILED: [(&str, usize, (usize, usize)); 6] = [
    ("matmul_few8_bf16", 8, (FEW_COLUMNS, 8)),
    ("matmul_few16_bf16", 16, (FEW_COLUMNS, 16)),
    ("matmul_few32_bf16", 32, (FEW_COLUMNS, 32)),
    ("matmul_few64_bf16", 64, (FEW_COLUMNS, 64)),
    ("matmul_many64_bf16", usize::MAX, (128, 64)),
    ("matmul_many128_bf16", usize::MAX, (128, 128)),
];

/// The same for quantised weights, of each format. One kernel serves all numbers beyond 32 rows,
/// because a tile of more rows would convert as many weights for each row.
const TILED_QUANTIZED: [(&str, usize, (usize, usize)); 4] = [
    ("matmul_few8", 8, (QUANTIZED_TILE_COLUMNS, 8)),
    ("matmul_few16", 16, (QUANTIZED_TILE_COLUMNS, 16)),
    ("matmul_few32", 32, (QUANTIZED_TILE_COLUMNS, 32)),
    ("matmul_many64", usize::MAX, (QUANTIZED_TILE_COLUMNS, 64)),
];
/// Columns of a tile in the kernels for quantised weights.
pub(crate) const QUANTIZED_TILE_COLUMNS: usize = 128;

impl CudaMatmul {
    pub(crate) fn new(
        images: &KernelImages,
        stream: &CudaStream,
        options: &CudaOptions,
    ) -> Result<Self, CudaError> {
        let CudaOptions {
            precision,
            kv: _,
            products,
            priority: _,
            share: _,
        } = *options;
        let (mut tiled, mut quantized) = (Vec::new(), Vec::new());
        if precision == Precision::Bf16 {
            for (name, rows_max, tile) in TILED {
                tiled.push(TiledKernel {
                    code: TiledCode::alone(images, name)?,
                    tile,
                    rows_max,
                    instruction: MatrixInstruction::Mma,
                });
            }
            for format in QuantizedFormat::ALL {
                let mut tiled = Vec::new();
                for (name, rows_max, tile) in TILED_QUANTIZED {
                    tiled.push(TiledKernel {
                        code: TiledCode::alone(images, &format!("{name}_{}", format.name()))?,
                        tile,
                        rows_max,
                        instruction: MatrixInstruction::Mma,
                    });
                }
                quantized.push((format, tiled));
            }
        }
        let mut has_wgmma = false;
        if let Some(last) = tiled.last() {
            let replacements = wgmma::load_wgmma_kernels(images, stream, last)?;
            if !replacements.is_empty() {
                // They give the same bits, as `wgmma::load_wgmma_kernels` compared.
                tiled.retain(|kernel| kernel.rows_max < usize::MAX);
                tiled.extend(replacements);
                has_wgmma = true;
            }
        }
        Ok(Self {
            plain: images
                .kernel(&format!("matmul_plain_{}", precision.name()))?
                .in_turn(),
            tiled,
            quantized,
            has_wgmma,
            library: match (products, precision) {
                (MatmulMode::Fast, Precision::Bf16) => Some(CublasLt::new(stream)?),
                _ => None,
            },
            sums: GrowingMemory::new(stream, 0, "sums of products", MemoryContents::Undefined)?,
            processors_count: stream.processors_count() as usize,
            counts: Vec::new(),
            reallocations_count: 0,
        })
    }

    /// Returns whether products of many rows use Hopper's wgmma.
    pub(crate) fn has_wgmma(&self) -> bool {
        self.has_wgmma
    }

    /// Counts the moves of the workspace; a move invalidates recordings.
    pub(crate) fn reallocations_count(&self) -> u64 {
        self.reallocations_count
    }

    /// Begins a pass of `rows` rows, whose number goes to the device first.
    pub(crate) fn begin_pass(
        &mut self,
        rows: usize,
        stream: &CudaStream,
        messages: &mut StepMessages,
    ) -> Result<(), CudaError> {
        self.counts.clear();
        self.row_count_address(rows, stream, messages)?;
        Ok(())
    }

    /// Queues `out = x · matrix + bias`.
    pub(crate) fn run(
        &mut self,
        product: &MatmulProduct<'_>,
        target: MatmulTarget,
        stream: &CudaStream,
        messages: &mut StepMessages,
    ) -> Result<(), CudaError> {
        let MatmulProduct {
            matrix,
            rows: live,
            bucket: rows,
            x,
        } = *product;
        assert_eq!(x.width, matrix.width, "left side of a product");
        assert!(rows <= x.rows_max, "{rows} rows of a smaller buffer");
        let library = self.library.as_mut().filter(|_| rows >= LIBRARY_ROWS);
        // cublasLt adds no bias in f32 and takes only some kinds of quantised weights.
        if let (Some(library), None, None) = (library, &matrix.bias, &matrix.quantized) {
            return library.run(stream, product, target);
        }
        let rows_count = self.row_count_address(live, stream, messages)?;
        let family = match &matrix.quantized {
            None if matrix.width.is_multiple_of(ALIGNED_ELEMENTS) => self.tiled.as_slice(),
            None => &[],
            Some(parts) => kernels_of_format(&self.quantized, parts.format),
        };
        // The plain kernels take everything that no tensor-core kernel takes.
        let Some(tiled) = kernel_of(family, rows, matrix.columns, self.processors_count) else {
            let args = MatmulPlainArgs {
                x: x.address,
                rows_count,
                ..plain_args(matrix, target)
            };
            let tiles = matrix.columns.div_ceil(PLAIN_TILE) * rows.div_ceil(PLAIN_TILE);
            let grid = [
                tiles.min(self.processors_count * self.plain.blocks_per_multiprocessor()) as u32,
                1,
                1,
            ];
            // SAFETY: rows were checked here, the target by the caller.
            return unsafe { self.plain.launch(stream, grid, args) };
        };
        let span_width = span_width(matrix.columns, &matrix.slices);
        let (tile_columns, tile_rows) = tiled.tile;
        let tiles = tiled.tiles(rows, matrix.columns);
        let blocks = tiled.blocks(tiles, self.processors_count);
        let mut sums = 0;
        if matrix.slices.count() > 1 {
            let before = self.sums.memory().at(0);
            let floats = blocks * WAITING_MAX * tile_columns * tile_rows;
            sums = self
                .sums
                .ensure_bytes(stream, floats * size_of::<f32>())?
                .at(0);
            self.reallocations_count += u64::from(sums != before);
        }
        let args = MatmulArgs {
            x: x.address,
            rows_count,
            sums,
            ..tiled_args(matrix, target, span_width)
        };
        // SAFETY: rows were checked here, the target by the caller; the workspace has room for all
        // slices.
        unsafe { tiled.launch(stream, blocks, args, rows) }
    }

    /// Returns the address of a number of rows on the device, and sends the number if this pass has
    /// not.
    pub(crate) fn row_count_address(
        &mut self,
        rows: usize,
        stream: &CudaStream,
        messages: &mut StepMessages,
    ) -> Result<u64, CudaError> {
        if let Some((_, at)) = self.counts.iter().find(|(count, _)| *count == rows) {
            return Ok(*at);
        }
        let message = StepMessage::RowsCount(self.counts.len());
        let at = messages.send(stream, message, &[rows as u32])?;
        self.counts.push((rows, at));
        Ok(at)
    }
}

/// Returns the kernel for so many rows: of those with the least limit above them, the fastest.
fn kernel_of(
    family: &[TiledKernel],
    rows: usize,
    columns: usize,
    processors_count: usize,
) -> Option<&TiledKernel> {
    let meant = family.iter().filter(|tiled| rows <= tiled.rows_max);
    meant.min_by_key(|tiled| tiled.time(rows, columns, processors_count))
}

/// Returns the kernels of a format.
fn kernels_of_format(
    kernels: &[(QuantizedFormat, Vec<TiledKernel>)],
    format: QuantizedFormat,
) -> &[TiledKernel] {
    let found = kernels.iter().find(|(of, _)| *of == format);
    &found
        .expect("quantised weights are packed for bf16 alone")
        .1
}

/// Returns the arguments of a product in tensor-core kernels, but for its rows and its workspace.
pub(crate) fn tiled_args(
    matrix: &CudaMatrix,
    target: MatmulTarget,
    span_width: usize,
) -> MatmulArgs {
    let (column_scales, group_scales, group_shift) = scales_of(matrix.quantized.as_ref());
    MatmulArgs {
        weights: matrix.weight.address(),
        column_scales,
        group_scales,
        x: 0,
        bias: matrix.bias.as_ref().map_or(0, |bias| bias.address()),
        out: target.address,
        rows_count: 0,
        sums: 0,
        columns: matrix.columns as u32,
        width: matrix.width as u32,
        span_width: span_width as u32,
        group_shift,
        is_out_f32: u32::from(target.stored == Precision::F32),
        slices: matrix.slices.count() as u32,
        slice_ends: args::slice_ends(matrix.slices.ends()),
    }
}

/// Returns the arguments of a product in plain kernels, but for its rows.
pub(crate) fn plain_args(matrix: &CudaMatrix, target: MatmulTarget) -> MatmulPlainArgs {
    MatmulPlainArgs {
        weights: matrix.weight.address(),
        x: 0,
        bias: matrix.bias.as_ref().map_or(0, |bias| bias.address()),
        out: target.address,
        rows_count: 0,
        columns: matrix.columns as u32,
        width: matrix.width as u32,
        is_out_f32: u32::from(target.stored == Precision::F32),
        slices: matrix.slices.count() as u32,
        slice_ends: args::slice_ends(matrix.slices.ends()),
    }
}

/// Returns the addresses of the columns' and of the groups' scales, and the base-2 logarithm of the
/// group's size.
fn scales_of(quantized: Option<&QuantizedParts>) -> (u64, u64, u32) {
    match quantized {
        None => (0, 0, 0),
        Some(parts) => match parts.group {
            None => (parts.scales.address(), 0, 0),
            Some(group) => (0, parts.scales.address(), group.trailing_zeros()),
        },
    }
}

/// Returns the width of a span, the same for every matrix that has some of a product's slices. It
/// must equal `span_width_of` of the kernels, whose comment gives the reasons.
pub(crate) fn span_width(columns: usize, slices: &InnerSlices) -> usize {
    let ends = slices.ends_of_all();
    let starts = std::iter::once(&0).chain(ends);
    let widths = starts.zip(ends).map(|(start, end)| end - start);
    let units = widths.map(|width| width.div_ceil(SPAN_UNIT)).max();
    let units = units.expect("a product has slices");
    let tiles = columns.div_ceil(FEW_COLUMNS) * ends.len();
    let most = (units / 2).clamp(1, SPANS_MAX);
    let least = SPANS_MIN.div_ceil(ends.len()).min(most);
    let mut best: Option<(usize, usize)> = None;
    for spans in least..=most {
        let length = units.div_ceil(spans);
        let cost = (tiles * units.div_ceil(length)).div_ceil(BLOCKS_FILLED) * length;
        // More spans cost the merge of their sums, so they must save a twenty-fifth of the time at
        // least.
        if best.is_none_or(|(_, least_cost)| cost * 25 <= least_cost * 24) {
            best = Some((length, cost));
        }
    }
    let (length, _) = best.expect("there is at least one number of spans");
    length * SPAN_UNIT
}
