//! Matrix products on the device: which kernel, and how the inner dimension is cut.
//!
//! Owns: the choice by rows, the spans that `kernels/matmul/matmul.cuh` tells of, and the workspace for their sums.
//! Never: waits.
//! Invariant: spans depend on a matrix's shape alone, so that a row gives the same bits from every kernel. A grid has no
//! more blocks than its stream's multiprocessors hold at once, by the driver's count for the kernel.

use crate::args::{MatmulArgs, MatmulPlainArgs};
use crate::buffers::{Contents, CudaRows, Growing};
use crate::driver::{Kernel, Stream};
use crate::error::CudaError;
use crate::images::Images;
use crate::inbox::{Inbox, Place};
use crate::library::Library;
use crate::narrow::Format;
use crate::options::{CudaOptions, Products};
use crate::pack::{CudaMatrix, NarrowParts};
use crate::wide;
use cleave_engine::ops::Precision;

/// Where spans may begin: `SPAN_UNIT` of the kernels.
const SPAN_UNIT: usize = 128;
/// Columns of a tile of the kernels for few rows: `FEW_COLUMNS`.
const FEW_COLUMNS: usize = 64;
/// Blocks that the cut into spans is made for, on every device: `BLOCKS_FILLED`.
const BLOCKS_FILLED: usize = 264;
/// `SPANS_MOST`.
const SPANS_MOST: usize = 16;
/// What a row's bytes must be a multiple of for the tensor-core kernels.
const ALIGNED_ELEMENTS: usize = 8;
/// Rows from which cublasLt is asked, where it may be: below, bandwidth decides, and it has no more of it.
const LIBRARY_ROWS: usize = 65;
/// Columns and rows of a tile of the plain kernels.
const PLAIN_TILE: usize = 64;

/// A product to be made.
#[derive(Debug)]
pub(crate) struct Product<'a> {
    pub(crate) matrix: &'a CudaMatrix,
    /// Rows that there are.
    pub(crate) rows: usize,
    /// Rows that are launched for: as many, or a recording's bucket.
    pub(crate) bucket: usize,
    pub(crate) x: &'a CudaRows,
}

/// Where a product goes, `(rows, columns)`.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Target {
    pub(crate) address: u64,
    pub(crate) stored: Precision,
}

/// A kernel for so many rows.
#[derive(Debug)]
struct Tiled {
    kernel: Kernel<MatmulArgs>,
    /// Columns and rows of a tile.
    tile: (usize, usize),
    rows_max: usize,
    /// Whether spans of one tile go to several blocks.
    merges: bool,
}

#[derive(Debug)]
pub(crate) struct Multiplying {
    plain: Kernel<MatmulPlainArgs>,
    /// By rows, fewest first; empty where all is plain.
    tiled: Vec<Tiled>,
    /// Whether the last of them is Hopper's.
    has_wgmma: bool,
    /// The same for quantised weights.
    narrow: Vec<(Format, Vec<Tiled>)>,
    library: Option<Library>,
    sums: Growing,
    arrivals: Growing,
    processors_count: usize,
    /// Numbers of rows that this pass has sent, and where they are.
    counts: Vec<(usize, u64)>,
    moves_count: u64,
}

/// Kernels with the rows they are for, the tile, and whether they merge spans.
const TILED: [(&str, usize, (usize, usize), bool); 6] = [
    ("matmul_few8_bf16", 8, (FEW_COLUMNS, 8), true),
    ("matmul_few16_bf16", 16, (FEW_COLUMNS, 16), true),
    ("matmul_few32_bf16", 32, (FEW_COLUMNS, 32), true),
    ("matmul_few64_bf16", 64, (FEW_COLUMNS, 64), true),
    ("matmul_many64_bf16", 512, (128, 64), false),
    ("matmul_many128_bf16", usize::MAX, (128, 128), false),
];

/// The same for quantised weights, of each format. Beyond 32 rows there is one kernel: a tile of more rows would
/// convert as many weights for each.
const NARROW: [(&str, usize, (usize, usize), bool); 4] = [
    ("matmul_few8", 8, (NARROW_COLUMNS, 8), true),
    ("matmul_few16", 16, (NARROW_COLUMNS, 16), true),
    ("matmul_few32", 32, (NARROW_COLUMNS, 32), true),
    ("matmul_many64", usize::MAX, (NARROW_COLUMNS, 64), false),
];
/// Columns of a tile of those.
const NARROW_COLUMNS: usize = 128;

impl Multiplying {
    pub(crate) fn new(
        images: &Images,
        stream: &Stream,
        options: &CudaOptions,
    ) -> Result<Self, CudaError> {
        let CudaOptions {
            precision,
            kv: _,
            products,
            priority: _,
            share: _,
        } = *options;
        let (mut tiled, mut narrow) = (Vec::new(), Vec::new());
        if precision == Precision::Bf16 {
            for (name, rows_max, tile, merges) in TILED {
                tiled.push(Tiled {
                    kernel: images.kernel(name)?,
                    tile,
                    rows_max,
                    merges,
                });
            }
            for format in Format::ALL {
                let mut tiled = Vec::new();
                for (name, rows_max, tile, merges) in NARROW {
                    tiled.push(Tiled {
                        kernel: images.kernel(&format!("{name}_{}", format.name()))?,
                        tile,
                        rows_max,
                        merges,
                    });
                }
                narrow.push((format, tiled));
            }
        }
        let mut has_wgmma = false;
        if let Some(last) = tiled.last_mut()
            && let Some(kernel) = wide::load(images, stream, &last.kernel)?
        {
            // The same tile, and the same bits.
            last.kernel = kernel;
            has_wgmma = true;
        }
        Ok(Self {
            plain: images.kernel(&format!("matmul_plain_{}", precision.name()))?,
            tiled,
            narrow,
            has_wgmma,
            library: match (products, precision) {
                (Products::Fast, Precision::Bf16) => Some(Library::new(stream)?),
                _ => None,
            },
            sums: Growing::new(stream, 0, "sums of products", Contents::Anything)?,
            arrivals: Growing::new(stream, 0, "counters of products", Contents::Zeros)?,
            processors_count: stream.processors_count() as usize,
            counts: Vec::new(),
            moves_count: 0,
        })
    }

    /// Whether many rows go through Hopper's wgmma.
    pub(crate) fn has_wgmma(&self) -> bool {
        self.has_wgmma
    }

    /// How often a workspace has moved.
    pub(crate) fn moves_count(&self) -> u64 {
        self.moves_count
    }

    /// Another pass begins, of so many rows.
    pub(crate) fn begin(
        &mut self,
        rows: usize,
        (stream, inbox): (&Stream, &mut Inbox),
    ) -> Result<(), CudaError> {
        self.counts.clear();
        self.count(rows, stream, inbox)?;
        Ok(())
    }

    /// `out = x · matrix + bias`.
    pub(crate) fn run(
        &mut self,
        product: &Product<'_>,
        target: Target,
        (stream, inbox): (&Stream, &mut Inbox),
    ) -> Result<(), CudaError> {
        let Product {
            matrix,
            rows: live,
            bucket: rows,
            x,
        } = *product;
        assert_eq!(x.width, matrix.width, "left side of a product");
        x.check_rows(rows);
        let library = self.library.as_mut().filter(|_| rows >= LIBRARY_ROWS);
        // A bias in f32 is not among what it adds, and of quantised weights it takes but some.
        if let (Some(library), None, None) = (library, &matrix.bias, &matrix.narrow) {
            return library.run(stream, product, target);
        }
        let rows_count = self.count(live, stream, inbox)?;
        let family = match &matrix.narrow {
            None if matrix.width.is_multiple_of(ALIGNED_ELEMENTS) => self.tiled.as_slice(),
            None => &[],
            Some(parts) => of_format(&self.narrow, parts.format),
        };
        let Some(tiled) = family.iter().find(|tiled| rows <= tiled.rows_max) else {
            let args = MatmulPlainArgs {
                weights: matrix.weight.address(),
                x: x.address(),
                bias: matrix.bias.as_ref().map_or(0, |bias| bias.address()),
                out: target.address,
                rows_count,
                columns: matrix.columns as u32,
                width: matrix.width as u32,
                is_out_f32: u32::from(target.stored == Precision::F32),
                padding: 0,
            };
            let tiles = matrix.columns.div_ceil(PLAIN_TILE) * rows.div_ceil(PLAIN_TILE);
            let grid = [
                tiles.min(self.processors_count * self.plain.blocks_each()) as u32,
                1,
                1,
            ];
            // SAFETY: rows were checked here, the target by the caller.
            return unsafe { self.plain.launch(stream, grid, args) };
        };
        let span_width = span_width(matrix.columns, matrix.width);
        let spans = matrix.width.div_ceil(span_width);
        let (tile_columns, tile_rows) = tiled.tile;
        let tiles = matrix.columns.div_ceil(tile_columns) * rows.div_ceil(tile_rows);
        let (mut sums, mut arrivals) = (0, 0);
        let mut items = tiles;
        if tiled.merges {
            items = tiles * spans;
            if spans > 1 {
                let bytes = items * tile_columns * tile_rows * size_of::<f32>();
                let (before, counters) = (self.sums.memory().at(0), self.arrivals.memory().at(0));
                sums = self.sums.at_least(stream, bytes)?.at(0);
                let bytes = tiles * size_of::<u32>();
                arrivals = self.arrivals.at_least(stream, bytes)?.at(0);
                self.moves_count += u64::from(sums != before || arrivals != counters);
            }
        }
        let (column_scales, group_scales, group_shift) = scales_of(matrix.narrow.as_ref());
        let args = MatmulArgs {
            weights: matrix.weight.address(),
            column_scales,
            group_scales,
            x: x.address(),
            bias: matrix.bias.as_ref().map_or(0, |bias| bias.address()),
            out: target.address,
            rows_count,
            sums,
            arrivals,
            columns: matrix.columns as u32,
            width: matrix.width as u32,
            span_width: span_width as u32,
            spans: spans as u32,
            group_shift,
            is_out_f32: u32::from(target.stored == Precision::F32),
        };
        let blocks = items.min(self.processors_count * tiled.kernel.blocks_each());
        // SAFETY: rows were checked here, the target by the caller; the workspace has room for all spans.
        unsafe { tiled.kernel.launch(stream, [blocks as u32, 1, 1], args) }
    }

    /// Where a number of rows lies on the device.
    fn count(&mut self, rows: usize, stream: &Stream, inbox: &mut Inbox) -> Result<u64, CudaError> {
        if let Some((_, at)) = self.counts.iter().find(|(count, _)| *count == rows) {
            return Ok(*at);
        }
        let place = Place::RowsCount(self.counts.len());
        let at = inbox.send(stream, place, &[rows as u32])?;
        self.counts.push((rows, at));
        Ok(at)
    }
}

/// The kernels of a format.
fn of_format(narrow: &[(Format, Vec<Tiled>)], format: Format) -> &[Tiled] {
    let found = narrow.iter().find(|(of, _)| *of == format);
    &found
        .expect("quantised weights are packed for bf16 alone")
        .1
}

/// Addresses of a column's and of a group's scales, and the group's size as a power of two.
fn scales_of(narrow: Option<&NarrowParts>) -> (u64, u64, u32) {
    match narrow {
        None => (0, 0, 0),
        Some(parts) => match parts.group {
            None => (parts.scales.address(), 0, 0),
            Some(group) => (0, parts.scales.address(), group.trailing_zeros()),
        },
    }
}

/// Width of a span: `span_width_of` of the kernels, where its reasons stand.
fn span_width(columns: usize, width: usize) -> usize {
    let units = width.div_ceil(SPAN_UNIT);
    let tiles = columns.div_ceil(FEW_COLUMNS);
    let mut best = (units, tiles.div_ceil(BLOCKS_FILLED) * units);
    for spans in (2..=SPANS_MOST).take_while(|spans| spans * 2 <= units) {
        let length = units.div_ceil(spans);
        let cost = (tiles * units.div_ceil(length)).div_ceil(BLOCKS_FILLED) * length;
        if cost * 25 <= best.1 * 24 {
            best = (length, cost);
        }
    }
    best.0 * SPAN_UNIT
}
