//! A tile's keys and values as the right sides of products, wherever their blocks lie.
//!
//! Owns: the walk through block tables, and bringing together what does not lie as products read it.
//! Invariant: nothing past a sequence's keys has a part in a result, since a block's rest may hold anything: scores of
//! such keys are thrown away, and their values are never multiplied.

use super::attention::{TILE, Task};
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
    keys: Memory<f32>,
    /// `[step][width]` words; or one step.
    values: Memory<f32>,
    /// Stands in for keys and values that are not there.
    nothing: Memory<u32>,
}

impl Gathered {
    pub(super) fn new(width: usize) -> Result<Self, EngineError> {
        Ok(Self {
            keys: Memory::zeroed(width * TILE)?,
            values: Memory::zeroed(TILE * width)?,
            nothing: Memory::zeroed(width)?,
        })
    }
}

/// Where a head's keys and values of a tile are.
#[inline(always)]
pub(super) fn find<S: Simd, F: Format<S>>(
    s: S,
    task: &Task<'_, F::Stored>,
    (head, keys): (usize, Range<usize>),
    gathered: &mut Gathered,
) -> Sources {
    let width = task.width;
    match task.attend.layout {
        Layout::Across { .. } => {
            let mut sources = where_they_lie::<S, F>(task, head, &keys);
            if !keys.len().is_multiple_of(F::PER_STEP) {
                sources.values_last =
                    Some(last_step::<S, F>(&sources, keys.len(), width, gathered));
            }
            sources
        }
        Layout::Rows => {
            load_keys::<S, F>(s, task, (head, keys.clone()), gathered);
            load_values::<S, F>(s, task, (head, keys.clone()), gathered);
            let key = gathered.keys.as_ptr().cast::<u32>();
            let value = gathered.values.as_ptr().cast::<u32>();
            let last = keys.len() / F::PER_STEP * width;
            let group_words = KEYS_ACROSS / F::PER_STEP * width;
            Sources {
                keys: std::array::from_fn(|group| key.wrapping_add(group * KEYS_ACROSS)),
                keys_stride: TILE,
                values: std::array::from_fn(|group| value.wrapping_add(group * group_words)),
                values_stride: width,
                values_last: (!keys.len().is_multiple_of(F::PER_STEP))
                    .then(|| value.wrapping_add(last)),
            }
        }
    }
}

/// The same without bringing anything together, to be asked for ahead.
#[inline(always)]
pub(super) fn where_they_lie<S: Simd, F: Format<S>>(
    task: &Task<'_, F::Stored>,
    head: usize,
    keys: &Range<usize>,
) -> Sources {
    let attend = task.attend;
    let elements = attend.block_tokens * attend.heads.head_dim;
    let (key_offset, value_offset) = attend.layer_offsets;
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
        let (block, token) = task.place(first);
        let start = block + (task.queries.kv_heads.start + head) * elements;
        let of = |offset: usize| {
            let head = &attend.pool[start + offset..start + offset + elements];
            head.as_ptr().cast::<u32>()
        };
        sources.keys[group] = of(key_offset).wrapping_add(token);
        let steps = token / F::PER_STEP;
        sources.values[group] = of(value_offset).wrapping_add(steps * attend.heads.head_dim);
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

/// Keys across from rows. Missing ones up to a whole vector are zero.
#[inline(always)]
fn load_keys<S: Simd, F: Format<S>>(
    s: S,
    task: &Task<'_, F::Stored>,
    (head, keys): (usize, Range<usize>),
    gathered: &mut Gathered,
) {
    let steps = task.attend.heads.head_dim.div_ceil(F::PER_STEP);
    let nothing = gathered.nothing.as_ptr();
    let to = &mut gathered.keys[..steps * TILE];
    for column in (0..keys.len()).step_by(LANES) {
        let mut from = [nothing; LANES];
        for i in 0..LANES.min(keys.len() - column) {
            let key = task.row(task.attend.layer_offsets.0, (head, keys.start + column + i));
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

/// Values step by step from rows. Missing ones up to a whole vector are zero.
#[inline(always)]
fn load_values<S: Simd, F: Format<S>>(
    s: S,
    task: &Task<'_, F::Stored>,
    (head, keys): (usize, Range<usize>),
    gathered: &mut Gathered,
) {
    let dim = task.attend.heads.head_dim;
    let whole = dim / LANES * LANES;
    let nothing = as_stored::<F::Stored>(&gathered.nothing, dim);
    for step in 0..keys.len().next_multiple_of(LANES) / F::PER_STEP {
        let mut rows = [nothing; 2];
        for i in 0..F::PER_STEP {
            let key = keys.start + step * F::PER_STEP + i;
            if key < keys.end {
                rows[i] = task.row(task.attend.layer_offsets.1, (head, key));
            }
        }
        let to = &mut gathered.values[step * task.width..(step + 1) * task.width];
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
