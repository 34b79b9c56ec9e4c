//! A tile's keys and values as the right sides of products, wherever their blocks lie.
//!
//! Owns: the walk through block tables, and bringing together what does not lie as products read it.
//! Invariant: nothing past a sequence's keys has a part in a result, since a block's rest may hold anything: scores of
//! such keys are thrown away, and their values are never multiplied.

use super::attention::{Pool, TILE, Task};
use super::codes::{Scales, widen, widen_row};
use super::tile::Format;
use crate::layout::{KEYS_ACROSS, Layout};
use crate::memory::{Memory, Plain};
use crate::simd::{LANES, Simd};
use cleave_engine::EngineError;
use std::ops::Range;

/// Groups of keys side by side in a tile.
pub(super) const GROUPS: usize = TILE / KEYS_ACROSS;

/// One head's keys and values of a tile.
#[derive(Clone, Copy)]
pub(super) struct Sources {
    /// The first step's word of the first key of each group; groups that are not there repeat the first.
    pub(super) keys: [*const u32; GROUPS],
    /// Words from one step to the next.
    pub(super) keys_stride: usize,
    /// The first step's words of each group's values.
    pub(super) values: [*const u32; GROUPS],
    /// Words from one step to the next.
    pub(super) values_stride: usize,
    /// The last step's words, where its second half is nothing.
    pub(super) values_last: Option<*const u32>,
}

/// Space to bring them together.
pub(super) struct Gathered {
    /// `[step][TILE]` words.
    pub(super) keys: Memory<f32>,
    /// `[step][width]` words; or one step.
    pub(super) values: Memory<f32>,
    /// Stands in for keys and values that are not there.
    nothing: Memory<u32>,
    /// Where the pool has codes.
    pub(super) scales: Scales,
    /// Codes in rows, widened: `[TILE][width]` elements.
    rows: Memory<u32>,
}

impl Gathered {
    pub(super) fn new(width: usize) -> Result<Self, EngineError> {
        Ok(Self {
            keys: Memory::zeroed(width * TILE)?,
            values: Memory::zeroed(TILE * width)?,
            nothing: Memory::zeroed(width)?,
            scales: Scales::new()?,
            rows: Memory::zeroed(TILE * width)?,
        })
    }

    /// Of a tile's keys and of its values.
    #[inline(always)]
    pub(super) fn scales(&self) -> (&[[f32; LANES]], &[[f32; LANES]]) {
        let Scales { keys, values } = &self.scales;
        (keys.as_chunks().0, values.as_chunks().0)
    }
}

/// Where a head's keys and values of a tile are, and what is to be asked for while they are read.
#[inline(always)]
pub(super) fn find<S: Simd, F: Format<S>>(
    s: S,
    task: &Task<'_, F::Stored>,
    (head, keys): (usize, Range<usize>),
    ahead: Sources,
    gathered: &mut Gathered,
) -> (Sources, Sources) {
    let width = task.width;
    match (task.attend.layout, task.attend.pool) {
        (Layout::Across { .. }, Pool::Elements(_)) => {
            let mut sources = where_they_lie::<S, F>(task, head, &keys);
            if !keys.len().is_multiple_of(F::PER_STEP) {
                sources.values_last =
                    Some(last_step::<S, F>(&sources, keys.len(), width, gathered));
            }
            (sources, ahead)
        }
        (Layout::Across { .. }, Pool::Codes(codes)) => {
            widen::<S, F>(s, task, (head, keys.clone()), (codes, ahead), gathered);
            let sources = gathered_sources::<S, F>(gathered, keys.len(), width);
            // What comes next was asked for already.
            (sources, sources)
        }
        (Layout::Rows, _) => {
            load::<S, F>(s, task, (head, keys.clone()), gathered);
            (gathered_sources::<S, F>(gathered, keys.len(), width), ahead)
        }
    }
}

/// What was brought together, of so many keys.
#[inline(always)]
fn gathered_sources<S: Simd, F: Format<S>>(
    gathered: &Gathered,
    count: usize,
    width: usize,
) -> Sources {
    let key = gathered.keys.as_ptr().cast::<u32>();
    let value = gathered.values.as_ptr().cast::<u32>();
    let last = count / F::PER_STEP * width;
    let group_words = KEYS_ACROSS / F::PER_STEP * width;
    Sources {
        keys: std::array::from_fn(|group| key.wrapping_add(group * KEYS_ACROSS)),
        keys_stride: TILE,
        values: std::array::from_fn(|group| value.wrapping_add(group * group_words)),
        values_stride: width,
        values_last: (!count.is_multiple_of(F::PER_STEP)).then(|| value.wrapping_add(last)),
    }
}

/// Where a head's keys and values are in the pool, to be read there or asked for ahead.
#[inline(always)]
pub(super) fn where_they_lie<S: Simd, F: Format<S>>(
    task: &Task<'_, F::Stored>,
    head: usize,
    keys: &Range<usize>,
) -> Sources {
    let attend = task.attend;
    let mut sources = Sources {
        keys: [std::ptr::null(); GROUPS],
        keys_stride: attend.block_tokens,
        values: [std::ptr::null(); GROUPS],
        values_stride: attend.heads.head_dim,
        values_last: None,
    };
    for group in 0..GROUPS {
        let first = keys.start + group * KEYS_ACROSS;
        if first >= keys.end {
            sources.keys[group] = sources.keys[0];
            sources.values[group] = sources.values[0];
            continue;
        }
        let ([key, value], token) = task.place(head, first);
        let step = token / F::PER_STEP * attend.heads.head_dim;
        (sources.keys[group], sources.values[group]) = match attend.pool {
            Pool::Elements(pool) => {
                let of = |start: usize| {
                    let head = &pool[start..start + attend.head_elements];
                    head.as_ptr().cast::<u32>()
                };
                (of(key).wrapping_add(token), of(value).wrapping_add(step))
            }
            Pool::Codes(pool) => {
                let of = |start: usize| pool[start..start + attend.head_elements].as_ptr();
                (
                    of(key).wrapping_add(token * F::PER_STEP).cast(),
                    of(value).wrapping_add(step * F::PER_STEP).cast(),
                )
            }
        };
    }
    sources
}

/// A copy of the step whose first half is the last value, with nothing in the second.
#[inline(always)]
fn last_step<S: Simd, F: Format<S>>(
    sources: &Sources,
    count: usize,
    width: usize,
    gathered: &mut Gathered,
) -> *const u32 {
    let group = count / KEYS_ACROSS;
    let step = count % KEYS_ACROSS / F::PER_STEP;
    let from = sources.values[group].wrapping_add(step * sources.values_stride);
    for (column, to) in gathered.values[..width].iter_mut().enumerate() {
        // SAFETY: the group's values are in the pool, of which `where_they_lie` took a slice; a head is whole vectors.
        let word = unsafe { *from.add(column) };
        *to = f32::from_bits(word & 0xffff);
    }
    gathered.values.as_ptr().cast()
}

/// Brings keys and values together that lie in rows.
#[inline(always)]
fn load<S: Simd, F: Format<S>>(
    s: S,
    task: &Task<'_, F::Stored>,
    (head, keys): (usize, Range<usize>),
    gathered: &mut Gathered,
) {
    let Gathered {
        keys: to_keys,
        values: to_values,
        nothing,
        scales,
        rows,
    } = gathered;
    let (dim, width, count) = (task.attend.heads.head_dim, task.width, keys.len());
    match task.attend.pool {
        Pool::Elements(pool) => {
            let row = |which: usize, index: usize| {
                let (starts, token) = task.place(head, keys.start + index);
                &pool[starts[which] + token * dim..][..dim]
            };
            load_keys::<S, F>(s, (count, dim), |i| row(0, i), nothing, to_keys);
            load_values::<S, F>(s, (count, dim), |i| row(1, i), nothing, to_values);
        }
        Pool::Codes(pool) => {
            for which in 0..2 {
                for index in 0..count {
                    let (starts, token) = task.place(head, keys.start + index);
                    let codes = &pool[starts[which]..starts[which] + task.attend.head_elements];
                    let to = &mut as_stored_mut(rows, TILE * width)[index * width..][..width];
                    let scale = widen_row::<S, F>(s, task, (codes, token), to);
                    scales.put(which, index, scale);
                }
                let widened = as_stored::<F::Stored>(rows, TILE * width);
                let row = |index: usize| &widened[index * width..][..dim];
                match which {
                    0 => load_keys::<S, F>(s, (count, dim), row, nothing, to_keys),
                    _ => load_values::<S, F>(s, (count, dim), row, nothing, to_values),
                }
            }
            scales.end(count);
        }
    }
}

/// Keys across from rows. Missing ones up to a whole vector are zero.
#[inline(always)]
fn load_keys<'a, S: Simd, F: Format<S>>(
    s: S,
    (count, dim): (usize, usize),
    row: impl Fn(usize) -> &'a [F::Stored],
    nothing: &[u32],
    to: &mut [f32],
) {
    let steps = dim.div_ceil(F::PER_STEP);
    let to = &mut to[..steps * TILE];
    for column in (0..count).step_by(LANES) {
        let mut from = [nothing.as_ptr(); LANES];
        for i in 0..LANES.min(count - column) {
            from[i] = row(column + i).as_ptr().cast();
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

/// Values step by step from rows. Missing ones up to a whole vector are zero.
#[inline(always)]
fn load_values<'a, S: Simd, F: Format<S>>(
    s: S,
    (count, dim): (usize, usize),
    row: impl Fn(usize) -> &'a [F::Stored],
    nothing: &'a [u32],
    to: &mut [f32],
) {
    let (whole, width) = (dim / LANES * LANES, dim.next_multiple_of(LANES));
    let nothing = as_stored::<F::Stored>(nothing, dim);
    for step in 0..count.next_multiple_of(LANES) / F::PER_STEP {
        let mut rows = [nothing; 2];
        for i in 0..F::PER_STEP {
            if step * F::PER_STEP + i < count {
                rows[i] = row(step * F::PER_STEP + i);
            }
        }
        let to = &mut to[step * width..(step + 1) * width];
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

/// The same, to be written.
fn as_stored_mut<T: Plain>(words: &mut [u32], len: usize) -> &mut [T] {
    assert!(len * size_of::<T>() <= size_of_val(words) && align_of::<T>() <= align_of::<u32>());
    // SAFETY: as above, and borrowed mutably.
    unsafe { std::slice::from_raw_parts_mut(words.as_mut_ptr().cast(), len) }
}
