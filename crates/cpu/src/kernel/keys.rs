//! A tile's keys and values, from wherever their blocks lie to the right side of a product.
//!
//! Owns: the walk through block tables, and asking for memory before it is needed.
//! Invariant: what is not there, up to a whole vector, is zero; nothing past a sequence's keys is
//! ever read, since a block's rest may hold anything.

use super::attention::{Scratch, TILE, Task};
use super::tile::Format;
use crate::memory::Plain;
use crate::simd::{LANES, Simd};
use std::ops::Range;

/// Looks up the blocks of a tile's keys, once for keys and values.
pub(super) fn find_keys<T>(task: &Task<'_, T>, keys: Range<usize>, places: &mut [usize; TILE]) {
    let mut position = keys.start;
    while position < keys.end {
        let (place, rest) = task.place(position);
        let count = rest.min(keys.end - position);
        for i in 0..count {
            places[position - keys.start + i] = place + i * task.attend.heads.head_dim;
        }
        position += count;
    }
}

/// Asks for the first keys and values of the next tile, while this one is computed. Blocks lie
/// anywhere, so the processor cannot guess.
#[inline(always)]
pub(super) fn expect_keys<S: Simd, F: Format<S>>(
    s: S,
    task: &Task<'_, F::Stored>,
    keys: Range<usize>,
) {
    let line = 64 / size_of::<F::Stored>();
    let mut position = keys.start;
    while position < keys.end {
        let (place, rest) = task.place(position);
        let count = rest.min(keys.end - position);
        let (key, value) = task.attend.layer_offsets;
        for element in (0..count * task.attend.heads.head_dim).step_by(line) {
            for layer_offset in [key, value] {
                let start = task.attend.pool.as_ptr();
                s.prefetch_far(start.wrapping_add(place + layer_offset + element).cast());
            }
        }
        position += count;
    }
}

/// Keys across, as the right side of `queries · keysᵀ`. Missing ones up to a whole vector are zero.
#[inline(always)]
pub(super) fn load_keys<S: Simd, F: Format<S>>(
    s: S,
    task: &Task<'_, F::Stored>,
    count: usize,
    scratch: &mut Scratch,
) {
    let steps = task.attend.heads.head_dim.div_ceil(F::PER_STEP);
    let nothing = scratch.nothing.as_ptr();
    let to = &mut scratch.keys[..steps * TILE];
    for column in (0..count).step_by(LANES) {
        let mut from = [nothing; LANES];
        for i in 0..LANES.min(count - column) {
            let key = task.stored(task.attend.layer_offsets.0, scratch.places[column + i]);
            from[i] = key.as_ptr().cast();
        }
        let whole = steps / LANES * LANES;
        for step in (0..whole).step_by(LANES) {
            // SAFETY: a head has `steps` words from each of `from`, and `to` has TILE columns.
            unsafe {
                let to = to.as_mut_ptr().add(step * TILE + column);
                s.transpose(&from, to.cast(), TILE);
            }
            for at in &mut from {
                *at = at.wrapping_add(LANES);
            }
        }
        for step in whole..steps {
            for i in 0..LANES {
                // SAFETY: as above; head_dim is even, so a head is whole words.
                let word = unsafe { from[i].add(step - whole).read_unaligned() };
                to[step * TILE + column + i] = f32::from_bits(word);
            }
        }
    }
}

/// Values as the right side of `weights · values`. Missing ones up to a whole vector are zero.
#[inline(always)]
pub(super) fn load_values<S: Simd, F: Format<S>>(
    s: S,
    task: &Task<'_, F::Stored>,
    count: usize,
    scratch: &mut Scratch,
) {
    let dim = task.attend.heads.head_dim;
    let whole = dim / LANES * LANES;
    let nothing = as_stored::<F::Stored>(&scratch.nothing, dim);
    for step in 0..count.next_multiple_of(LANES) / F::PER_STEP {
        let mut rows = [nothing; 2];
        for i in 0..F::PER_STEP {
            let key = step * F::PER_STEP + i;
            if key < count {
                rows[i] = task.stored(task.attend.layer_offsets.1, scratch.places[key]);
            }
        }
        let to = &mut scratch.values[step * task.width..(step + 1) * task.width];
        let mut column = 0;
        while column < whole {
            // SAFETY: each row has `dim` elements, and `to` has `width`, which is no less.
            unsafe {
                let a = &*rows[0].as_ptr().add(column).cast();
                let b = &*rows[1].as_ptr().add(column).cast();
                let to = &mut *to.as_mut_ptr().add(column).cast();
                s.store(F::gather(s, [a, b]), to);
            }
            column += LANES;
        }
        if column < dim {
            let tails = [&rows[0][column..], &rows[1][column..]];
            s.store_part(gather_tail::<S, F>(s, tails), &mut to[column..]);
        }
    }
}

/// The last columns of a head that is not whole vectors wide.
#[inline(always)]
fn gather_tail<S: Simd, F: Format<S>>(s: S, parts: [&[F::Stored]; 2]) -> S::V {
    let zero = as_stored::<F::Stored>(&[0; LANES], LANES)[0];
    let mut rows = [[zero; LANES]; 2];
    for i in 0..rows.len() {
        rows[i][..parts[i].len()].copy_from_slice(parts[i]);
    }
    F::gather(s, [&rows[0], &rows[1]])
}

/// Words seen as stored elements.
fn as_stored<T: Plain>(words: &[u32], len: usize) -> &[T] {
    assert!(len * size_of::<T>() <= size_of_val(words) && align_of::<T>() <= align_of::<u32>());
    // SAFETY: within the words, aligned, and every bit pattern is a value.
    unsafe { std::slice::from_raw_parts(words.as_ptr().cast(), len) }
}
