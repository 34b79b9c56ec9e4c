//! Products of rows with a packed matrix.
//!
//! Owns: the loops over panels, blocks and tiles, and the trait of a weight format.
//! Never: knows the source of the rows, or other threads.
//! Invariant: an element of the result is summed slice by slice, each from zero, block after block
//! and step after step, in one order, whatever rows and columns are computed beside it; between
//! blocks its sum is stored exactly. The sums of slices are added as a balanced binary tree, and
//! the bias is added last.
//!
//! A panel of [`PANEL`] columns and a tile of rows are multiplied in blocks of [`BLOCK_STEPS`]
//! steps of the inner dimension. A panel's block is at most 16 KiB, and stays in the L1 cache while
//! all tiles use it; the same block of all tiles stays in the L2 cache while a group of panels uses
//! it. The next block is prefetched meanwhile.

pub mod bytes;
pub mod dense;
pub mod groups;
pub mod halves;
pub mod left;
pub mod nibbles;
mod pairs;
mod results;
mod scratch;
pub mod slices;

use super::tile::{Tiles, with_rows};
use crate::memory::SliceParts;
use crate::simd::{LANES, Simd};
use cleave_engine::ops::Activation;
use groups::GroupLayout;
use results::{EndedSlice, end_slice};
pub use scratch::SCRATCH_WORDS;
use scratch::{PAGE_WORDS, SPREAD_WORDS, SUMS_WORDS, WAITING_GAP_WORDS};
use slices::{SliceBlock, SliceBlocks};
use std::ops::Range;

/// Columns of a panel of packed weights.
pub const PANEL: usize = 2 * LANES;
/// Steps of a block.
pub const BLOCK_STEPS: usize = 128;
/// Panels per group: with many rows, a group shares each block of the left side.
const GROUP_PANELS: usize = 4;
/// Size of the left side up to which it stays in the L2 cache without grouping.
const LEFT_BYTES_MAX: usize = 384 << 10;
/// Rows per pass: their block must fit the L2 cache.
const ROWS_PER_PASS: usize = 512;
/// Rows per pass of a product with several slices: sums of slices must fit there, too.
const ROWS_PER_SLICED_PASS: usize = 256;
/// Prefetch distance in cache lines of a single tile that is at least half full: it streams every
/// panel once.
const PREFETCH_LINES_AHEAD: usize = 64;

/// A format of packed weights.
pub trait WeightForm<S: Simd>: Copy + 'static {
    /// Words of the left side per step and row.
    const PHASES: usize;
    /// Whether sums are loaded and stored once per block, so that a slice's first block need not
    /// load them and its last may store them elsewhere.
    const IS_CHAIN: bool = true;
    /// Least number of rows of a tile.
    const ROWS_MIN: usize = 1;

    /// Words of a panel's first `steps` steps; `steps` ends at a block's or the panel's end.
    #[inline(always)]
    fn words(_: &PackedProduct<'_>, steps: usize) -> usize {
        steps * PANEL
    }

    /// Initial sums of a slice of R rows from `row` on, the same for all columns; zero unless the
    /// format is a chain.
    #[inline(always)]
    fn starts<const R: usize>(
        s: S,
        _: &PackedProduct<'_>,
        _slice: usize,
        _row: usize,
    ) -> [S::V; R] {
        [s.splat(0.0); R]
    }

    /// Prepares a block of a panel for [`WeightForm::add`], possibly unpacked into `spread`. Only
    /// formats that are no chain may do so: final sums of chains use that memory.
    #[inline(always)]
    fn prepare(_: S, _: &PackedProduct<'_>, right: &[u32], _spread: &mut [f32]) -> *const u32 {
        right.as_ptr()
    }

    /// Adds one block to the sums of R rows and 16·C columns. For the first block of a slice of a
    /// chain, sums are not loaded but start from [`WeightForm::starts`].
    ///
    /// # Safety
    /// The sides hold what [`BlockSides`] describes; this task owns 16·C words at each of R rows of
    /// [`PANEL`] words from each pointer of `sums` on.
    unsafe fn add<const R: usize, const C: usize>(
        s: S,
        product: &PackedProduct<'_>,
        sides: BlockSides,
        sums: TileSums,
    );

    /// Scales of sixteen columns from `column` on, counting every panel as full.
    #[inline(always)]
    fn column_scales(s: S, _: &PackedProduct<'_>, _column: usize) -> S::V {
        s.splat(1.0)
    }

    /// Scale of a row in a slice.
    #[inline(always)]
    fn row_scale(s: S, _: &PackedProduct<'_>, _slice: usize, _row: usize) -> S::V {
        s.splat(1.0)
    }

    /// Converts a slice's final sums of sixteen columns to floats, scaled if the format has scales
    /// of columns.
    #[inline(always)]
    fn finish(_: S, sum: S::V, _column_scales: S::V, _row_scale: S::V) -> S::V {
        sum
    }
}

/// Pointers to a tile's sums, `[row][PANEL]`, before and after a block; equal unless the format is
/// a chain.
#[derive(Clone, Copy)]
pub struct TileSums {
    pub from: *const f32,
    pub to: *mut f32,
}

/// Operands of one block: a panel and a tile.
#[derive(Clone, Copy)]
pub struct BlockSides {
    /// Packed rows of the tile, `[step][phase][R]`.
    pub left: *const u32,
    /// The block as [`WeightForm::prepare`] returned it.
    pub right: *const u32,
    /// The block as it is packed.
    pub packed: *const u32,
    /// First step of the block, and number of steps.
    pub first: usize,
    pub steps: usize,
    /// Slice that the block is part of, and whether it is the slice's first block.
    pub slice: usize,
    pub begins_slice: bool,
    /// First row of the tile.
    pub row: usize,
    /// First column of the panel, counting every panel as full.
    pub column: usize,
    /// First vector of the panel that is computed: 0, or 1 for the second half of a panel that is
    /// computed in two.
    pub vector: usize,
    pub prefetch: PrefetchAhead,
}

/// Prefetch plan of the right side.
#[derive(Clone, Copy)]
pub struct PrefetchAhead {
    start: *const u32,
    /// Cache lines per prefetch, 1 or 2.
    lines: usize,
    /// Steps between prefetches, as a power of two.
    steps_between_log2: u32,
    /// Words that each tile prefetches.
    tile_words: usize,
}

impl PrefetchAhead {
    /// The plan of a tile, from that of the first one.
    #[inline(always)]
    fn of_tile(self, index: usize) -> Self {
        Self {
            start: self.start.wrapping_add(index * self.tile_words),
            ..self
        }
    }

    /// Prefetches this step's part in a tile of R rows.
    #[inline(always)]
    pub fn prefetch_step<S: Simd, const R: usize>(self, s: S, step: usize) {
        // A tile of fewer than half the rows is the only one. Its panels stream from memory, where
        // the processor prefetches too. Without ours, nine of twelve products in int4 and int8 were
        // faster (AVX-512 of Zen 4; other processors were not measured).
        if const { 2 * R < S::ROWS } {
            return;
        }
        let turn = step >> self.steps_between_log2;
        if turn << self.steps_between_log2 == step {
            let address = self.start.wrapping_add(turn * self.lines * LANES);
            s.prefetch(address);
            if self.lines == 2 {
                s.prefetch(address.wrapping_add(LANES));
            }
        }
    }
}

/// One product, seen by all its tasks.
pub struct PackedProduct<'a> {
    /// Packed weights `[panel][…]`; the formats define the rest.
    pub right: &'a [u32],
    /// Steps of the inner dimension.
    pub steps: usize,
    /// End of each slice in steps; the last is `steps`. Their number is a power of two, at most
    /// eight.
    pub slices: &'a [usize],
    /// Columns of the result.
    pub columns: usize,
    /// Activation of a panel's first vector if that is the gate of its second; such a panel gives
    /// [`LANES`] columns.
    pub gate: Option<Activation>,
    /// Numbers added to some rows before the gate, after the bias; only with a gate.
    pub addends: Option<RowAddends<'a>>,
    /// Bias of each column, `(panels × PANEL)`.
    pub bias: Option<&'a [f32]>,
    /// Scales of integer weights.
    pub integer: IntegerWeights<'a>,
    /// Packed rows, laid out as [`left::LeftSide::words`].
    pub left: &'a [u32],
    /// See [`left::LeftSide::scales`] and [`left::LeftSide::sums`].
    pub left_scales: &'a [f32],
    pub left_sums: &'a [u32],
    /// Rows of the result.
    pub rows: usize,
    /// Shape: `(rows, columns)`, row by row.
    pub out: SliceParts<'a, f32>,
}

/// Numbers added to gate and up of some rows.
#[derive(Clone, Copy)]
pub struct RowAddends<'a> {
    /// Shape: `(rows, gate | up)`, in the order of the stored tensors.
    pub values: &'a [f32],
    /// Rows to which their numbers are added, `(rows)`; the others' are not read.
    pub is_adapted: &'a [bool],
}

/// Scales of integer weights.
#[derive(Clone, Copy, Default)]
pub struct IntegerWeights<'a> {
    /// Scale of each column, `(panels × PANEL)`, for eight bits without groups, and for groups with
    /// scales in e4m3.
    pub scales: &'a [f32],
    pub units: GroupLayout,
}

impl PackedProduct<'_> {
    /// Columns of the result per panel; the last panel may have fewer.
    #[inline(always)]
    fn panel_columns(&self) -> usize {
        if self.gate.is_some() { LANES } else { PANEL }
    }
}

/// A task: some panels of some tiles.
#[derive(Clone)]
pub struct ProductPiece {
    pub panels: Range<usize>,
    pub tiles: Range<usize>,
}

/// Divides a range into runs of at most `each`.
fn runs(of: Range<usize>, each: usize) -> impl Iterator<Item = Range<usize>> {
    let end = of.end;
    of.step_by(each)
        .map(move |start| start..end.min(start + each))
}

/// Loop of panels and tiles, block by block.
struct PanelWalk<'a, 'p> {
    product: &'a PackedProduct<'p>,
    cut: Tiles,
    panels: Range<usize>,
    tiles: Range<usize>,
}

/// Computes one piece; `scratch` is [`SCRATCH_WORDS`] long.
#[inline(always)]
pub fn multiply<S: Simd, F: WeightForm<S>>(
    s: S,
    product: &PackedProduct<'_>,
    piece: &ProductPiece,
    scratch: &mut [f32],
) {
    let rows_each = if product.slices.len() > 1 {
        ROWS_PER_SLICED_PASS
    } else {
        ROWS_PER_PASS
    };
    let tiles_each = rows_each.div_ceil(S::ROWS);
    // A left side that does not fit the L2 cache is read block by block for a group of panels; one
    // that fits stays there, and needs no grouping.
    let panels_each = if size_of_val(product.left) > LEFT_BYTES_MAX {
        GROUP_PANELS
    } else {
        1
    };
    for tiles in runs(piece.tiles.clone(), tiles_each) {
        for panels in runs(piece.panels.clone(), panels_each) {
            let walk = PanelWalk {
                product,
                cut: Tiles::new(product.rows, S::ROWS),
                panels,
                tiles: tiles.clone(),
            };
            walk.run::<S, F>(s, scratch);
        }
    }
}

impl PanelWalk<'_, '_> {
    #[inline(always)]
    fn run<S: Simd, F: WeightForm<S>>(&self, s: S, scratch: &mut [f32]) {
        let Self {
            product,
            cut,
            panels,
            tiles,
        } = self;
        let (scratch, waiting) = scratch.split_at_mut(SUMS_WORDS + SPREAD_WORDS);
        let waiting = &mut waiting[WAITING_GAP_WORDS..];
        let (scratch, spread) = scratch.split_at_mut(SUMS_WORDS);
        let first_row = cut.start(tiles.start);
        let rows = cut.start(tiles.end) - first_row;
        let mut blocks = SliceBlocks::new(product.slices);
        let mut block = blocks.next();
        while let Some(at) = block {
            let following = blocks.next();
            for panel in panels.clone() {
                // One block of one panel is used by all tiles while it is in the L1 cache.
                let packed = self.block_words::<S, F>(panel, &at.steps);
                let packed = &product.right[packed];
                let right = F::prepare(s, product, packed, spread);
                let next = self.next_block_words::<S, F>(panel, &at, following.as_ref());
                let ahead = self.prefetch_of_panel(packed, at.steps.len(), &next);
                for tile in tiles.clone() {
                    let rows_at = cut.start(tile)..cut.start(tile + 1);
                    // Sums of every panel and tile of the walk have their own place in the scratch
                    // memory.
                    let sums_at = (panel - panels.start) * rows + rows_at.start - first_row;
                    let sums_words = sums_at * PANEL..(sums_at + rows_at.len()) * PANEL;
                    // An even slice's sums are added up where they wait for the next slice's, as
                    // they are: nothing is left to do when it ends.
                    let waits = at.slice.is_multiple_of(2) && at.slice + 1 < product.slices.len();
                    let panel_sums = if waits {
                        &mut waiting[sums_words.clone()]
                    } else {
                        &mut scratch[sums_words.clone()]
                    };
                    let steps = at.steps.len();
                    let words = rows_at.len() * steps * F::PHASES;
                    let left = (at.steps.start * product.rows + rows_at.start * steps) * F::PHASES;
                    let sides = BlockSides {
                        left: product.left[left..left + words].as_ptr(),
                        right,
                        packed: packed.as_ptr(),
                        first: at.steps.start,
                        steps,
                        slice: at.slice,
                        begins_slice: at.begins_slice,
                        row: rows_at.start,
                        column: panel * PANEL,
                        vector: 0,
                        prefetch: ahead.of_tile(tile - tiles.start),
                    };
                    // Chains start from `F::starts` in registers; other formats add to sums in
                    // memory, which must be zero.
                    if at.begins_slice && !F::IS_CHAIN {
                        clear_sums(s, panel_sums);
                    }
                    let from = panel_sums.as_mut_ptr();
                    // Final sums of all tiles go to the same pages, which stay in the L1 cache.
                    // It is free: only formats that are no chain unpack blocks there.
                    let to = if at.ends_slice && !waits && F::IS_CHAIN {
                        let at = sums_words.start % PAGE_WORDS;
                        spread[at..at + panel_sums.len()].as_mut_ptr()
                    } else {
                        from
                    };
                    if at.ends_slice && following.is_none() {
                        prefetch_out(s, product, &rows_at, panel);
                    }
                    // SAFETY: the slices above hold exactly what the sides describe.
                    with_rows!(rows_at.len(), R => unsafe {
                        add_block::<S, F, R>(s, product, sides, TileSums { from, to });
                    });
                    if at.ends_slice && !waits {
                        let ended = EndedSlice {
                            slice: at.slice,
                            rows: rows_at,
                            panel,
                            waiting_at: sums_words.start,
                        };
                        // SAFETY: as above; and no other task has these rows of these panels.
                        unsafe {
                            let sums = std::slice::from_raw_parts(to, sums_words.len());
                            end_slice::<S, F>(s, product, &ended, sums, waiting);
                        }
                    }
                }
            }
            block = following;
        }
    }

    /// Words of the block that is computed after this one of a panel; empty after the last panel.
    #[inline(always)]
    fn next_block_words<S: Simd, F: WeightForm<S>>(
        &self,
        panel: usize,
        block: &SliceBlock,
        following: Option<&SliceBlock>,
    ) -> Range<usize> {
        if panel + 1 < self.panels.end {
            return self.block_words::<S, F>(panel + 1, &block.steps);
        }
        match following {
            Some(following) => self.block_words::<S, F>(self.panels.start, &following.steps),
            None => {
                let first = 0..self.product.steps.min(BLOCK_STEPS);
                self.block_words::<S, F>(self.panels.end, &first)
            }
        }
    }

    /// Words of a block of a panel; possibly empty.
    #[inline(always)]
    fn block_words<S: Simd, F: WeightForm<S>>(
        &self,
        panel: usize,
        steps: &Range<usize>,
    ) -> Range<usize> {
        let start = panel * F::words(self.product, self.product.steps);
        start + F::words(self.product, steps.start)..start + F::words(self.product, steps.end)
    }

    /// Prefetch plan of the first tile for the current block: a single tile prefetches the
    /// following lines, one of several its share of the next block, as evenly as powers of two
    /// allow.
    #[inline(always)]
    fn prefetch_of_panel(
        &self,
        packed: &[u32],
        steps: usize,
        next: &Range<usize>,
    ) -> PrefetchAhead {
        let count = self.tiles.len();
        if count == 1 {
            return PrefetchAhead {
                start: packed.as_ptr().wrapping_add(PREFETCH_LINES_AHEAD * LANES),
                lines: (packed.len() / LANES / steps).clamp(1, 2),
                steps_between_log2: 0,
                tile_words: 0,
            };
        }
        let lines = next.len().div_ceil(LANES * count).max(1);
        PrefetchAhead {
            start: self.product.right.as_ptr().wrapping_add(next.start),
            lines: 1,
            steps_between_log2: (steps / lines).max(1).ilog2(),
            tile_words: lines * LANES,
        }
    }
}

/// Adds one block to a tile of R rows.
///
/// # Safety
/// As [`WeightForm::add`].
#[inline(always)]
unsafe fn add_block<S: Simd, F: WeightForm<S>, const R: usize>(
    s: S,
    product: &PackedProduct<'_>,
    sides: BlockSides,
    sums: TileSums,
) {
    // SAFETY: as the caller promises.
    unsafe {
        // Decided when compiled: no set carries another's tiles.
        if const { R > S::ROWS || R < F::ROWS_MIN } {
            unreachable!("tiles are cut for this set");
        } else if const { S::COLUMNS == 2 || 2 * R <= S::ROWS } {
            F::add::<R, 2>(s, product, sides, sums);
        } else {
            F::add::<R, 1>(s, product, sides, sums);
            let sums = TileSums {
                from: sums.from.add(LANES),
                to: sums.to.add(LANES),
            };
            F::add::<R, 1>(s, product, BlockSides { vector: 1, ..sides }, sums);
        }
    }
}

/// Clears a tile's sums before a slice's first block.
#[inline(always)]
fn clear_sums<S: Simd>(s: S, sums: &mut [f32]) {
    for vector in sums.as_chunks_mut::<LANES>().0 {
        s.store(s.splat(0.0), vector);
    }
}

/// Prefetches the cache lines of a tile's results: rows are far apart, and stores that each wait
/// for memory would stall the following tiles.
#[inline(always)]
fn prefetch_out<S: Simd>(s: S, product: &PackedProduct<'_>, rows: &Range<usize>, panel: usize) {
    for row in rows.clone() {
        let at = row * product.columns + panel * product.panel_columns();
        s.prefetch(product.out.address(at).cast());
        if product.gate.is_none() {
            s.prefetch(product.out.address(at + LANES).cast());
        }
    }
}

/// Loads a register tile's sums, or their initial values before a slice's first block.
///
/// # Safety
/// As [`WeightForm::add`].
#[inline(always)]
unsafe fn load_sums<S: Simd, F: WeightForm<S>, const R: usize, const C: usize>(
    s: S,
    product: &PackedProduct<'_>,
    sides: BlockSides,
    from: *const f32,
) -> [[S::V; C]; R] {
    let mut sums = [[s.splat(0.0); C]; R];
    if sides.begins_slice {
        let starts = F::starts::<R>(s, product, sides.slice, sides.row);
        for r in 0..R {
            sums[r] = [starts[r]; C];
        }
        return sums;
    }
    for r in 0..R {
        for c in 0..C {
            // SAFETY: as the caller promises.
            sums[r][c] = s.load(unsafe { &*from.add(r * PANEL + c * LANES).cast() });
        }
    }
    sums
}

/// Stores a register tile's sums.
///
/// # Safety
/// As [`WeightForm::add`].
#[inline(always)]
unsafe fn store_sums<S: Simd, const R: usize, const C: usize>(
    s: S,
    sums: [[S::V; C]; R],
    to: *mut f32,
) {
    for r in 0..R {
        for c in 0..C {
            // SAFETY: as the caller promises.
            s.store(sums[r][c], unsafe {
                &mut *to.add(r * PANEL + c * LANES).cast()
            });
        }
    }
}

/// Transposes a panel's columns, `[PANEL][stride]` words, to `[step][PANEL]`.
#[inline(always)]
pub fn interleave<S: Simd>(s: S, columns: &[u32], stride: usize, panel: &mut [u32]) {
    let steps = panel.len() / PANEL;
    assert!(steps <= stride && columns.len() >= PANEL * stride);
    let whole = steps / LANES * LANES;
    for step in (0..whole).step_by(LANES) {
        for first in [0, LANES] {
            let mut from = [columns.as_ptr(); LANES];
            for i in 0..LANES {
                from[i] = from[i].wrapping_add((first + i) * stride + step);
            }
            // SAFETY: sixteen steps of sixteen columns are there on both sides.
            unsafe {
                let to = panel.as_mut_ptr().add(step * PANEL + first);
                s.transpose(&from, to, PANEL);
            }
        }
    }
    for step in whole..steps {
        for column in 0..PANEL {
            panel[step * PANEL + column] = columns[column * stride + step];
        }
    }
}
