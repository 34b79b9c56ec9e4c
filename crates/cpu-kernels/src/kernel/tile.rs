//! The innermost loop: a few rows times a few columns, summed in the order of the inner dimension.
//!
//! Owns: the layout of both sides of a product in either number format.
//! Invariant: an element of the result is one chain of multiply-adds in the order of the inner
//! dimension, one *step* after the other, whatever rows and columns are computed beside it.
//!
//! The inner dimension goes in steps: one element in f32, two in bf16. The left side (activations,
//! queries, attention weights) is packed per register tile as `[step][phase][row]` words, the right
//! side (weights, keys, values) as `[step][column]` words. See [`Simd::pair_phase`] for phases.

use crate::memory::PlainData;
use crate::simd::{LANES, Simd};

/// A number format of weights, keys and values.
pub trait ElementFormat<S: Simd>: Copy + 'static {
    /// An element of the KV pool.
    type Stored: PlainData;
    /// Elements of the inner dimension per step.
    const PER_STEP: usize;
    /// Words of the left side per step and row.
    const PHASES: usize;

    /// Part of the right side that one phase multiplies.
    fn phase(s: S, right: S::V, phase: usize) -> S::V;
    /// Adds one phase of a step.
    fn dot(s: S, acc: S::V, left: S::V, right: S::V) -> S::V;
    /// Converts sixteen elements of a row to the left side's words, in order of step and phase.
    fn words(s: S, x: S::V, to: &mut [u32; LANES]) -> usize;
    /// Stores sixteen elements in the pool's element type.
    fn store(s: S, x: S::V, to: &mut [Self::Stored; LANES]);
    /// Builds sixteen columns of one step of the right side, from one row per element of the step.
    fn gather(s: S, rows: [&[Self::Stored; LANES]; 2]) -> S::V;
    /// The same from signed bytes, column by column.
    ///
    /// # Safety
    /// `16 × PER_STEP` bytes are readable.
    unsafe fn widen(s: S, codes: *const u8) -> S::V;
}

#[derive(Clone, Copy)]
pub struct F32Format;

/// bfloat16; sums are f32.
#[derive(Clone, Copy)]
pub struct Bf16Format;

impl<S: Simd> ElementFormat<S> for F32Format {
    type Stored = f32;
    const PER_STEP: usize = 1;
    const PHASES: usize = 1;

    #[inline(always)]
    fn phase(_: S, right: S::V, _: usize) -> S::V {
        right
    }

    #[inline(always)]
    fn dot(s: S, acc: S::V, left: S::V, right: S::V) -> S::V {
        s.fma(left, right, acc)
    }

    #[inline(always)]
    fn words(s: S, x: S::V, to: &mut [u32; LANES]) -> usize {
        let mut lanes = [0.0; LANES];
        s.store(x, &mut lanes);
        for i in 0..LANES {
            to[i] = lanes[i].to_bits();
        }
        LANES
    }

    #[inline(always)]
    fn store(s: S, x: S::V, to: &mut [f32; LANES]) {
        s.store(x, to);
    }

    #[inline(always)]
    fn gather(s: S, rows: [&[f32; LANES]; 2]) -> S::V {
        s.load(rows[0])
    }

    #[inline(always)]
    unsafe fn widen(s: S, codes: *const u8) -> S::V {
        // SAFETY: as the caller promises.
        s.widen_codes(unsafe { &*codes.cast() })
    }
}

impl<S: Simd> ElementFormat<S> for Bf16Format {
    type Stored = u16;
    const PER_STEP: usize = 2;
    const PHASES: usize = S::PHASES;

    #[inline(always)]
    fn phase(s: S, right: S::V, phase: usize) -> S::V {
        s.pair_phase(right, phase)
    }

    #[inline(always)]
    fn dot(s: S, acc: S::V, left: S::V, right: S::V) -> S::V {
        s.pair_dot(acc, left, right)
    }

    #[inline(always)]
    fn words(s: S, x: S::V, to: &mut [u32; LANES]) -> usize {
        s.pair_words(x, to)
    }

    #[inline(always)]
    fn store(s: S, x: S::V, to: &mut [u16; LANES]) {
        s.store_upper_halves(s.round_bf16(x), to);
    }

    #[inline(always)]
    fn gather(s: S, rows: [&[u16; LANES]; 2]) -> S::V {
        s.zip_bf16(rows[0], rows[1])
    }

    #[inline(always)]
    unsafe fn widen(s: S, codes: *const u8) -> S::V {
        // SAFETY: as the caller promises.
        s.widen_code_pairs(unsafe { &*codes.cast() })
    }
}

/// The two sides of a tile's product.
#[derive(Clone, Copy)]
pub struct TileSides<const C: usize> {
    /// `[step][phase][R]`, or `[R][step][phase]`: see [`accumulate`].
    pub left: *const u32,
    /// First step's words of each vector of columns.
    pub right: [*const u32; C],
    /// Words from one step of the right side to the next.
    pub right_stride: usize,
    /// Steps of the inner dimension.
    pub steps: usize,
    /// The next right side, which is prefetched step by step.
    pub prefetch: [*const u32; C],
}

/// `acc + left · right` for R rows and 16·C columns. Rows of the left side are `ROW` words apart,
/// phases `PHASE` words.
///
/// # Safety
/// `left` holds the words of `steps × PHASES` phases of R rows, and sixteen words are readable at
/// each step of each of `right`.
#[inline(always)]
pub unsafe fn accumulate<
    S: Simd,
    F: ElementFormat<S>,
    const R: usize,
    const C: usize,
    const ROW: usize,
    const PHASE: usize,
>(
    s: S,
    sides: TileSides<C>,
    mut acc: [[S::V; C]; R],
) -> [[S::V; C]; R] {
    for step in 0..sides.steps {
        // SAFETY: within the sides, as the caller promises; a prefetch may point anywhere.
        unsafe {
            let at = step * sides.right_stride;
            for c in 0..C {
                s.prefetch(sides.prefetch[c].wrapping_add(at));
            }
            for phase in 0..F::PHASES {
                let left = sides.left.add((step * F::PHASES + phase) * PHASE);
                let mut columns = [s.splat(0.0); C];
                for c in 0..C {
                    let words = &*sides.right[c].add(at).cast::<[f32; LANES]>();
                    columns[c] = F::phase(s, s.load(words), phase);
                }
                for r in 0..R {
                    let row = s.splat_word(*left.add(r * ROW));
                    for c in 0..C {
                        acc[r][c] = F::dot(s, acc[r][c], row, columns[c]);
                    }
                }
            }
        }
    }
    acc
}

/// Runs a body with the number of rows of a tile, 1 to 14, as a constant.
macro_rules! with_rows {
    ($rows:expr, $r:ident => $body:expr) => {
        with_rows!(@ $rows, $r, $body, 1 2 3 4 5 6 7 8 9 10 11 12 13 14)
    };
    (@ $rows:expr, $r:ident, $body:expr, $($n:literal)+) => {
        match $rows {
            $($n => {
                const $r: usize = $n;
                $body
            })+
            rows => unreachable!("a register tile of {rows} rows"),
        }
    };
}
pub(crate) use with_rows;

/// Rows that a register tile of `rows` rows computes, rounded up to a compiled size; the results of
/// padding rows are never read.
pub const fn rows_compiled(rows: usize, rows_max: usize) -> usize {
    match rows {
        1 | 2 => rows,
        3 | 4 => 4,
        5..=8 if rows_max > 8 => 8,
        _ => rows_max,
    }
}

/// Runs a body with a size that [`filled`] gives as a constant.
macro_rules! with_filled {
    ($rows:expr, $r:ident => $body:expr) => {
        with_filled!(@ $rows, $r, $body, 1 2 4 6 8 14)
    };
    (@ $rows:expr, $r:ident, $body:expr, $($n:literal)+) => {
        match $rows {
            $($n => {
                const $r: usize = $n;
                $body
            })+
            rows => unreachable!("a register tile of {rows} rows"),
        }
    };
}

/// Runs a body with the number of vectors across a register tile of R rows as a constant: 4, 2 or
/// 1, as many as the registers and the columns left allow. Gives the columns done.
macro_rules! wide {
    ($simd:ty, $rows:ident, $left:expr, $c:ident => $body:expr) => {
        if const { 4 * $rows <= <$simd>::ROWS * <$simd>::COLUMNS } && $left >= 4 * LANES {
            const $c: usize = 4;
            $body;
            4 * LANES
        } else if const { 2 * $rows <= <$simd>::ROWS * <$simd>::COLUMNS } && $left >= 2 * LANES {
            const $c: usize = 2;
            $body;
            2 * LANES
        } else {
            const $c: usize = 1;
            $body;
            LANES
        }
    };
}
pub(crate) use {wide, with_filled};

/// Division of `rows` rows into register tiles: as few as possible, as even as possible.
#[derive(Clone, Copy)]
pub struct Tiles {
    rows: usize,
    count: usize,
}

impl Tiles {
    pub const fn new(rows: usize, rows_max: usize) -> Self {
        Self {
            rows,
            count: rows.div_ceil(rows_max),
        }
    }

    pub const fn count(self) -> usize {
        self.count
    }

    /// First row of a tile; `rows` for the tile past the last.
    pub const fn start(self, tile: usize) -> usize {
        tile * self.rows / self.count
    }
}

/// Packs one row of the left side: row `row` of a tile of `rows`.
///
/// `to` is the tile's `[step][phase][rows]`, `x` has at most `steps × PER_STEP` elements; missing
/// ones are zero.
#[inline(always)]
pub fn pack_row<S: Simd, F: ElementFormat<S>>(
    s: S,
    x: &[f32],
    row: usize,
    rows: usize,
    to: &mut [u32],
) {
    let (chunks, tail) = x.as_chunks::<LANES>();
    let chunk_words = LANES / F::PER_STEP * F::PHASES * rows;
    let whole = chunks.len() * chunk_words;
    assert!(row < rows && whole <= to.len());
    for i in 0..chunks.len() {
        // SAFETY: `to` has room for every whole chunk of every row.
        unsafe {
            let to = to.as_mut_ptr().add(i * chunk_words + row);
            write_strided::<S, F>(s, s.load(&chunks[i]), to, rows);
        }
    }
    if !tail.is_empty() {
        let mut words = [0; LANES];
        F::words(s, s.load_part(tail), &mut words);
        let count = tail.len().div_ceil(F::PER_STEP) * F::PHASES;
        for i in 0..count {
            to[whole + i * rows + row] = words[i];
        }
    }
}

/// Writes sixteen elements' words of the left side, `stride` words apart.
///
/// # Safety
/// `to + i × stride` is writable for as many words as sixteen elements have.
#[inline(always)]
unsafe fn write_strided<S: Simd, F: ElementFormat<S>>(s: S, x: S::V, to: *mut u32, stride: usize) {
    let mut words = [0; LANES];
    let count = F::words(s, x, &mut words);
    for i in 0..count {
        // SAFETY: as the caller promises.
        unsafe { *to.add(i * stride) = words[i] };
    }
}
