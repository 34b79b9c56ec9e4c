//! Rows times a packed matrix.
//!
//! Owns: the walk over panels, blocks and tiles, and what a form of weights has to say about each.
//! Never: knows where rows come from or who else computes.
//! Invariant: an element of the result is summed block after block and step after step, in one order, whatever rows
//! and columns are computed beside it; between blocks its sum is kept to the bit. The bias is added after the sum.
//!
//! A panel of [`PANEL`] columns and a tile of rows meet in blocks of [`BLOCK_STEPS`] steps of the inner dimension: a
//! block of a panel is at most 16 KiB and stays in the first cache while every tile passes by, and the same block of
//! all tiles stays in the second while a group of panels does. What the next block needs of memory is asked for on the
//! way.

pub(crate) mod bytes;
pub(crate) mod dense;
pub(crate) mod groups;
pub(crate) mod halves;
pub(crate) mod left;
pub(crate) mod nibbles;
mod pairs;

use super::rows::silu;
use super::tile::{Tiles, with_rows};
use crate::memory::Parts;
use crate::simd::{LANES, Simd};
use groups::Units;
use std::ops::Range;

/// Columns of a panel of packed weights.
pub(crate) const PANEL: usize = 2 * LANES;
/// Steps of a block.
pub(crate) const BLOCK_STEPS: usize = 128;
/// Panels that pass by the same rows, block by block, where there are many rows.
const GROUP_PANELS: usize = 4;
/// Bytes of the left side up to which it stays in the second cache without that.
const LEFT_BYTES_MAX: usize = 384 << 10;
/// Rows that are taken together: their block is to stay in the second cache.
const ROWS_TOGETHER: usize = 512;
/// Cache lines ahead that a tile which meets every panel alone asks for its right side.
const LINES_AHEAD: usize = 128;

/// Words of sums between blocks.
const SUMS_WORDS: usize = GROUP_PANELS * (ROWS_TOGETHER + 2 * LANES) * PANEL;
/// Words that one thread needs on the way: sums, and a block of a panel that was spread out or the last sums of a tile.
pub(crate) const SCRATCH_WORDS: usize = SUMS_WORDS + BLOCK_STEPS * PANEL;

/// A form of weights.
pub(crate) trait Form<S: Simd>: Copy + 'static {
    /// Words of the left side per step and row.
    const PHASES: usize;
    /// Whether sums are taken up and left once a block, and so may come from nowhere and go elsewhere.
    const IS_CHAIN: bool = true;
    /// Tiles have no fewer rows than this.
    const ROWS_MIN: usize = 1;

    /// Words of a panel's first `steps` steps, which end where a block or the panel does.
    #[inline(always)]
    fn words(_: &Product<'_>, steps: usize) -> usize {
        steps * PANEL
    }

    /// Sums before the first block, of sixteen columns from `column` on.
    #[inline(always)]
    fn start(s: S, _: &Product<'_>, _column: usize) -> S::V {
        s.splat(0.0)
    }

    /// A block of a panel as [`Form::add`] likes it, which may be in `spread`: of a form that is no chain, since the last
    /// sums of chains go there.
    #[inline(always)]
    fn prepare(_: S, _: &Product<'_>, right: &[u32], _spread: &mut [f32]) -> *const u32 {
        right.as_ptr()
    }

    /// Adds one block to the sums of R rows and 16·C columns. Those of the first block of a chain are not taken up: they
    /// are what [`Form::start`] says.
    ///
    /// # Safety
    /// The sides hold what [`Sides`] claims; 16·C words at each of R times [`PANEL`] from each of `sums` on are this task's.
    unsafe fn add<const R: usize, const C: usize>(
        s: S,
        product: &Product<'_>,
        sides: Sides,
        sums: Sums,
    );

    /// Sums after the last block as floats.
    #[inline(always)]
    fn finish(_: S, _: &Product<'_>, sum: S::V, _place: (usize, usize)) -> S::V {
        sum
    }
}

/// Where the sums of a tile are kept, `[row][PANEL]`; one place for both, unless they are a chain.
#[derive(Clone, Copy)]
pub(crate) struct Sums {
    pub from: *const f32,
    pub to: *mut f32,
}

/// A block of a panel and of a tile.
#[derive(Clone, Copy)]
pub(crate) struct Sides {
    /// `[step][phase][R]`.
    pub left: *const u32,
    /// What [`Form::prepare`] made of the block.
    pub right: *const u32,
    /// The block as it is packed.
    pub packed: *const u32,
    /// First step of the block, and how many.
    pub first: usize,
    pub steps: usize,
    /// First row of the tile.
    pub row: usize,
    /// First column of the panel, in panels that are whole.
    pub column: usize,
    /// Which vector of the panel is the tile's first: 0, or 1 where it has but one.
    pub vector: usize,
    /// What to ask memory for.
    pub ahead: Ahead,
}

/// Right sides that are needed soon.
#[derive(Clone, Copy)]
pub(crate) struct Ahead {
    start: *const u32,
    /// Cache lines each time, 1 or 2.
    lines: usize,
    /// Every so many steps, as a power of two.
    pause: u32,
}

impl Ahead {
    /// Asks for this step's part.
    #[inline(always)]
    pub(crate) fn ask<S: Simd>(self, s: S, step: usize) {
        let turn = step >> self.pause;
        if turn << self.pause == step {
            let address = self.start.wrapping_add(turn * self.lines * LANES);
            s.prefetch(address);
            if self.lines == 2 {
                s.prefetch(address.wrapping_add(LANES));
            }
        }
    }
}

/// One product, seen by all its tasks.
pub(crate) struct Product<'a> {
    /// `[panel][…]`: see the forms.
    pub right: &'a [u32],
    /// Steps of the inner dimension.
    pub steps: usize,
    /// Columns of the result.
    pub columns: usize,
    /// Whether a panel's first vector is the gate of its second, and [`LANES`] columns are what comes of both.
    pub is_gated: bool,
    /// `(panels × PANEL)`.
    pub bias: Option<&'a [f32]>,
    /// What weights that are whole numbers have beside them.
    pub whole: Whole<'a>,
    /// See [`left::Left::words`].
    pub left: &'a [u32],
    /// See [`left::Left::scales`] and [`left::Left::sums`].
    pub left_scales: &'a [f32],
    pub left_sums: &'a [u32],
    /// Rows of the result.
    pub rows: usize,
    /// `(rows, columns)`.
    pub out: Parts<'a, f32>,
}

/// See [`Product::whole`].
#[derive(Clone, Copy, Default)]
pub(crate) struct Whole<'a> {
    /// Of each column, `(panels × PANEL)`: eight bits.
    pub scales: &'a [f32],
    /// −128 × the sum of each column's codes, `(panels × PANEL)`: eight bits.
    pub starts: &'a [u32],
    /// How groups lie.
    pub units: Units,
}

impl Product<'_> {
    /// Columns of the result that a panel makes; the last may make fewer.
    #[inline(always)]
    fn panel_columns(&self) -> usize {
        match self.is_gated {
            true => LANES,
            false => PANEL,
        }
    }
}

/// A task: these panels of these tiles.
#[derive(Clone)]
pub(crate) struct Piece {
    pub panels: Range<usize>,
    pub tiles: Range<usize>,
}

/// Runs of at most `each`.
fn runs(of: Range<usize>, each: usize) -> impl Iterator<Item = Range<usize>> {
    let end = of.end;
    of.step_by(each)
        .map(move |start| start..end.min(start + each))
}

/// Panels and tiles that pass by each other, block by block.
struct Walk<'a, 'p> {
    product: &'a Product<'p>,
    cut: Tiles,
    panels: Range<usize>,
    tiles: Range<usize>,
}

/// Computes one piece; `scratch` is [`SCRATCH_WORDS`] long.
#[inline(always)]
pub(crate) fn multiply<S: Simd, F: Form<S>>(
    s: S,
    product: &Product<'_>,
    piece: &Piece,
    scratch: &mut [f32],
) {
    let tiles_each = ROWS_TOGETHER.div_ceil(S::ROWS);
    let panels_each = match size_of_val(product.left) > LEFT_BYTES_MAX {
        true => GROUP_PANELS,
        false => 1,
    };
    for tiles in runs(piece.tiles.clone(), tiles_each) {
        for panels in runs(piece.panels.clone(), panels_each) {
            let walk = Walk {
                product,
                cut: Tiles::new(product.rows, S::ROWS),
                panels,
                tiles: tiles.clone(),
            };
            walk.run::<S, F>(s, scratch);
        }
    }
}

impl Walk<'_, '_> {
    #[inline(always)]
    fn run<S: Simd, F: Form<S>>(&self, s: S, scratch: &mut [f32]) {
        let Self {
            product,
            cut,
            panels,
            tiles,
        } = self;
        let (scratch, spread) = scratch.split_at_mut(SUMS_WORDS);
        let first_row = cut.start(tiles.start);
        let rows = cut.start(tiles.end) - first_row;
        let mut first = 0;
        loop {
            let end = product.steps.min(first + BLOCK_STEPS);
            for panel in panels.clone() {
                let packed = self.block::<S, F>(panel, first..end);
                let packed = &product.right[packed];
                let right = F::prepare(s, product, packed, spread);
                let next = self.next::<S, F>(panel, first..end);
                for tile in tiles.clone() {
                    let rows_at = cut.start(tile)..cut.start(tile + 1);
                    let kept = (panel - panels.start) * rows + rows_at.start - first_row;
                    let kept = &mut scratch[kept * PANEL..(kept + rows_at.len()) * PANEL];
                    let words = rows_at.len() * (end - first) * F::PHASES;
                    let left = (first * product.rows + rows_at.start * (end - first)) * F::PHASES;
                    let sides = Sides {
                        left: product.left[left..left + words].as_ptr(),
                        right,
                        packed: packed.as_ptr(),
                        first,
                        steps: end - first,
                        row: rows_at.start,
                        column: panel * PANEL,
                        vector: 0,
                        ahead: self.ahead(packed, &next, tile - tiles.start),
                    };
                    if first == 0 && !F::IS_CHAIN {
                        begin::<S, F>(s, product, panel, kept);
                    }
                    let from = kept.as_mut_ptr();
                    let is_last = end == product.steps;
                    // The last sums go to one place for all tiles, which stays in the first cache. What is spread out is no
                    // chain.
                    let to = match is_last && F::IS_CHAIN {
                        true => spread[..kept.len()].as_mut_ptr(),
                        false => from,
                    };
                    if is_last {
                        expect_out(s, product, &rows_at, panel);
                    }
                    // SAFETY: the slices above hold exactly what the sides claim.
                    with_rows!(rows_at.len(), R => unsafe {
                        one::<S, F, R>(s, product, sides, Sums { from, to });
                    });
                    if is_last {
                        // SAFETY: as above; and no other task has these rows of these panels.
                        unsafe {
                            let sums = std::slice::from_raw_parts(to, rows_at.len() * PANEL);
                            put::<S, F>(s, product, &rows_at, panel, sums);
                        }
                    }
                }
            }
            first = end;
            if first >= product.steps {
                break;
            }
        }
    }

    /// Words of the block that comes after these steps of a panel; past the last panel there may be none.
    #[inline(always)]
    fn next<S: Simd, F: Form<S>>(&self, panel: usize, steps: Range<usize>) -> Range<usize> {
        let all = self.product.steps;
        let following = steps.end..all.min(steps.end + BLOCK_STEPS);
        match (panel + 1 < self.panels.end, steps.end < all) {
            (true, _) => self.block::<S, F>(panel + 1, steps),
            (false, true) => self.block::<S, F>(self.panels.start, following),
            (false, false) => self.block::<S, F>(self.panels.end, 0..all.min(BLOCK_STEPS)),
        }
    }

    /// Words of a block of a panel, of which there may be none.
    #[inline(always)]
    fn block<S: Simd, F: Form<S>>(&self, panel: usize, steps: Range<usize>) -> Range<usize> {
        let start = panel * F::words(self.product, self.product.steps);
        start + F::words(self.product, steps.start)..start + F::words(self.product, steps.end)
    }

    /// What a tile asks for while it meets the block at hand: a tile alone the lines to come, one of several its share
    /// of the next block, as evenly as powers of two allow.
    #[inline(always)]
    fn ahead(&self, packed: &[u32], next: &Range<usize>, index: usize) -> Ahead {
        let count = self.tiles.len();
        if count == 1 {
            return Ahead {
                start: packed.as_ptr().wrapping_add(LINES_AHEAD * LANES),
                lines: (packed.len() / LANES / BLOCK_STEPS).clamp(1, 2),
                pause: 0,
            };
        }
        let lines = next.len().div_ceil(LANES * count).max(1);
        let start = next.start + index * lines * LANES;
        Ahead {
            start: self.product.right.as_ptr().wrapping_add(start),
            lines: 1,
            pause: (BLOCK_STEPS / lines).max(1).ilog2(),
        }
    }
}

/// One block of a tile of R rows.
///
/// # Safety
/// As [`Form::add`].
#[inline(always)]
unsafe fn one<S: Simd, F: Form<S>, const R: usize>(
    s: S,
    product: &Product<'_>,
    sides: Sides,
    sums: Sums,
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
            let sums = Sums {
                from: sums.from.add(LANES),
                to: sums.to.add(LANES),
            };
            F::add::<R, 1>(s, product, Sides { vector: 1, ..sides }, sums);
        }
    }
}

/// Sums of a tile before its first block.
#[inline(always)]
fn begin<S: Simd, F: Form<S>>(s: S, product: &Product<'_>, panel: usize, sums: &mut [f32]) {
    let starts = [0, LANES].map(|column| F::start(s, product, panel * PANEL + column));
    for row in sums.as_chunks_mut::<LANES>().0.chunks_exact_mut(2) {
        s.store(starts[0], &mut row[0]);
        s.store(starts[1], &mut row[1]);
    }
}

/// Asks for the lines that a tile's results go to: rows are far apart, and stores that wait for memory one after the
/// other would hold up the tiles to come.
#[inline(always)]
fn expect_out<S: Simd>(s: S, product: &Product<'_>, rows: &Range<usize>, panel: usize) {
    for row in rows.clone() {
        let at = row * product.columns + panel * product.panel_columns();
        s.prefetch(product.out.address(at).cast());
        if !product.is_gated {
            s.prefetch(product.out.address(at + LANES).cast());
        }
    }
}

/// Writes a tile's results.
///
/// # Safety
/// No other task writes these rows of this panel.
#[inline(always)]
unsafe fn put<S: Simd, F: Form<S>>(
    s: S,
    product: &Product<'_>,
    rows: &Range<usize>,
    panel: usize,
    sums: &[f32],
) {
    for (row, sums) in rows
        .clone()
        .zip(sums.as_chunks::<LANES>().0.chunks_exact(2))
    {
        let mut values = [s.splat(0.0); 2];
        for (vector, sum) in sums.iter().enumerate() {
            let column = panel * PANEL + vector * LANES;
            values[vector] = F::finish(s, product, s.load(sum), (row, column));
            if let Some(bias) = product.bias {
                let bias = s.load_part(&bias[column..column + LANES]);
                values[vector] = s.add(values[vector], bias);
            }
        }
        let whole = product.panel_columns();
        let columns = (panel * whole).min(product.columns)..product.columns;
        let start = row * product.columns + columns.start;
        // SAFETY: as the caller promises.
        let out = unsafe { product.out.part(start..start + columns.len().min(whole)) };
        if product.is_gated {
            let [gate, up] = values;
            put_vector(s, silu(s, gate, up), out);
        } else {
            let (first, second) = out.split_at_mut(out.len().min(LANES));
            put_vector(s, values[0], first);
            put_vector(s, values[1], second);
        }
    }
}

/// Writes sixteen columns of a row, or as many as there are.
#[inline(always)]
fn put_vector<S: Simd>(s: S, value: S::V, out: &mut [f32]) {
    if let Some(out) = out.first_chunk_mut::<LANES>() {
        s.store(value, out);
    } else if !out.is_empty() {
        s.store_part(value, out);
    }
}

/// The sums of a register tile of a chain, from where they are kept, or before the first block.
///
/// # Safety
/// As [`Form::add`].
#[inline(always)]
unsafe fn load_sums<S: Simd, F: Form<S>, const R: usize, const C: usize>(
    s: S,
    product: &Product<'_>,
    sides: Sides,
    kept: *const f32,
) -> [[S::V; C]; R] {
    let mut sums = [[s.splat(0.0); C]; R];
    if sides.first == 0 {
        for c in 0..C {
            let column = sides.column + (sides.vector + c) * LANES;
            let start = F::start(s, product, column);
            for row in &mut sums {
                row[c] = start;
            }
        }
        return sums;
    }
    for r in 0..R {
        for c in 0..C {
            // SAFETY: as the caller promises.
            sums[r][c] = s.load(unsafe { &*kept.add(r * PANEL + c * LANES).cast() });
        }
    }
    sums
}

/// The sums of a register tile, to where they are kept.
///
/// # Safety
/// As [`Form::add`].
#[inline(always)]
unsafe fn store_sums<S: Simd, const R: usize, const C: usize>(
    s: S,
    sums: [[S::V; C]; R],
    kept: *mut f32,
) {
    for r in 0..R {
        for c in 0..C {
            // SAFETY: as the caller promises.
            s.store(sums[r][c], unsafe {
                &mut *kept.add(r * PANEL + c * LANES).cast()
            });
        }
    }
}

/// Puts a panel of weights together from its columns: `[PANEL][stride]` words to `[step][PANEL]`.
#[inline(always)]
pub(crate) fn interleave<S: Simd>(s: S, columns: &[u32], stride: usize, panel: &mut [u32]) {
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
