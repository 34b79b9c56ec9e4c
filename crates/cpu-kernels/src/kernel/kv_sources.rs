//! A tile's keys and values as the right sides of products, from blocks anywhere in the pool.
//!
//! Owns: looking up block tables, and gathering keys and values that are not in the products'
//! layout.
//! Invariant: keys and values past a sequence's end affect no result, since the rest of a block is
//! undefined: their scores are masked, and their values are never multiplied.

use super::attention::{AttentionTask, PoolContents, TILE};
use super::kv_codes::{TileScales, widen, widen_row};
use super::tile::ElementFormat;
use crate::layout::{KEYS_ACROSS, KvLayout};
use crate::memory::{PageMemory, PlainData};
use crate::simd::{LANES, Simd};
use cleave_engine::EngineError;
use std::ops::Range;

/// Groups of adjacent keys in a tile.
pub(super) const GROUPS: usize = TILE / KEYS_ACROSS;

/// One head's keys and values of a tile.
#[derive(Clone, Copy)]
pub(super) struct KvSources {
    /// First step's word of the first key of each group; missing groups repeat the first one.
    pub(super) keys: [*const u32; GROUPS],
    /// Distance in words from one step to the next.
    pub(super) keys_stride: usize,
    /// First step's words of each group's values.
    pub(super) values: [*const u32; GROUPS],
    /// Distance in words from one step to the next.
    pub(super) values_stride: usize,
    /// Words of the last step if only its first half is used.
    pub(super) values_last: Option<*const u32>,
}

/// One head's keys and values of a tile, and the addresses to prefetch while they are read.
#[derive(Clone, Copy)]
pub(super) struct LocatedKv {
    pub(super) sources: KvSources,
    pub(super) ahead: KvSources,
}

/// Scratch memory for gathered keys and values.
pub(super) struct GatheredKv {
    /// Words of the gathered keys, `[step][TILE]`.
    pub(super) keys: PageMemory<f32>,
    /// `[step][width]` words; or one step.
    pub(super) values: PageMemory<f32>,
    /// Zeros in place of missing keys and values.
    zeros: PageMemory<u32>,
    /// Scales, if the pool has codes.
    pub(super) scales: TileScales,
    /// Widened codes of layout `Rows`: `[TILE][width]` elements.
    rows: PageMemory<u32>,
}

impl GatheredKv {
    pub(super) fn new(width: usize) -> Result<Self, EngineError> {
        Ok(Self {
            keys: PageMemory::zeroed(width * TILE)?,
            values: PageMemory::zeroed(TILE * width)?,
            zeros: PageMemory::zeroed(width)?,
            scales: TileScales::new()?,
            rows: PageMemory::zeroed(TILE * width)?,
        })
    }

    /// Scales of a tile's keys and of its values, in vectors.
    #[inline(always)]
    pub(super) fn scales(&self) -> (&[[f32; LANES]], &[[f32; LANES]]) {
        let TileScales { keys, values } = &self.scales;
        (keys.as_chunks().0, values.as_chunks().0)
    }
}

/// Locates or gathers a head's keys and values of a tile; also returns the addresses to prefetch
/// while they are read.
#[inline(always)]
pub(super) fn locate_kv<S: Simd, F: ElementFormat<S>>(
    s: S,
    task: &AttentionTask<'_, F::Stored>,
    head: usize,
    keys: Range<usize>,
    ahead: KvSources,
    gathered: &mut GatheredKv,
) -> LocatedKv {
    let width = task.width;
    match (task.attend.layout, task.attend.pool) {
        (KvLayout::Interleaved { .. }, PoolContents::Elements(_)) => {
            let mut sources = sources_in_pool::<S, F>(task, head, &keys);
            if !keys.len().is_multiple_of(F::PER_STEP) {
                sources.values_last = Some(copy_odd_last_value::<S, F>(
                    &sources,
                    keys.len(),
                    width,
                    gathered,
                ));
            }
            LocatedKv { sources, ahead }
        }
        (KvLayout::Interleaved { .. }, PoolContents::Codes(codes)) => {
            widen::<S, F>(s, task, head, keys.clone(), codes, ahead, gathered);
            let sources = gathered_sources::<S, F>(gathered, keys.len(), width);
            // `widen` has already prefetched the next tile.
            LocatedKv {
                sources,
                ahead: sources,
            }
        }
        (KvLayout::Rows, _) => {
            gather_rows::<S, F>(s, task, head, keys.clone(), gathered);
            let sources = gathered_sources::<S, F>(gathered, keys.len(), width);
            LocatedKv { sources, ahead }
        }
    }
}

/// Pointers to gathered keys and values, of so many keys.
#[inline(always)]
fn gathered_sources<S: Simd, F: ElementFormat<S>>(
    gathered: &GatheredKv,
    count: usize,
    width: usize,
) -> KvSources {
    let key = gathered.keys.as_ptr().cast::<u32>();
    let value = gathered.values.as_ptr().cast::<u32>();
    let last = count / F::PER_STEP * width;
    let group_words = KEYS_ACROSS / F::PER_STEP * width;
    KvSources {
        keys: std::array::from_fn(|group| key.wrapping_add(group * KEYS_ACROSS)),
        keys_stride: TILE,
        values: std::array::from_fn(|group| value.wrapping_add(group * group_words)),
        values_stride: width,
        values_last: (!count.is_multiple_of(F::PER_STEP)).then(|| value.wrapping_add(last)),
    }
}

/// Pointers to a head's keys and values in the pool, to be read in place or prefetched.
#[inline(always)]
pub(super) fn sources_in_pool<S: Simd, F: ElementFormat<S>>(
    task: &AttentionTask<'_, F::Stored>,
    head: usize,
    keys: &Range<usize>,
) -> KvSources {
    let attend = task.attend;
    let mut sources = KvSources {
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
        let ([key, value], token) = task.element_offsets(head, first);
        let step = token / F::PER_STEP * attend.heads.head_dim;
        (sources.keys[group], sources.values[group]) = match attend.pool {
            PoolContents::Elements(pool) => {
                let of = |start: usize| {
                    let head = &pool[start..start + attend.head_elements];
                    head.as_ptr().cast::<u32>()
                };
                (of(key).wrapping_add(token), of(value).wrapping_add(step))
            }
            PoolContents::Codes(pool) => {
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

/// Copies the step that has the last value in its first half, with zeros in the second.
#[inline(always)]
fn copy_odd_last_value<S: Simd, F: ElementFormat<S>>(
    sources: &KvSources,
    count: usize,
    width: usize,
    gathered: &mut GatheredKv,
) -> *const u32 {
    let group = count / KEYS_ACROSS;
    let step = count % KEYS_ACROSS / F::PER_STEP;
    let from = sources.values[group].wrapping_add(step * sources.values_stride);
    for (column, to) in gathered.values[..width].iter_mut().enumerate() {
        // SAFETY: the group's values are in the pool, of which `sources_in_pool` took a slice; a
        // head is whole vectors.
        let word = unsafe { *from.add(column) };
        *to = f32::from_bits(word & 0xffff);
    }
    gathered.values.as_ptr().cast()
}

/// Gathers keys and values of layout `Rows`.
#[inline(always)]
fn gather_rows<S: Simd, F: ElementFormat<S>>(
    s: S,
    task: &AttentionTask<'_, F::Stored>,
    head: usize,
    keys: Range<usize>,
    gathered: &mut GatheredKv,
) {
    let GatheredKv {
        keys: to_keys,
        values: to_values,
        zeros: nothing,
        scales,
        rows,
    } = gathered;
    let (dim, width, count) = (task.attend.heads.head_dim, task.width, keys.len());
    match task.attend.pool {
        PoolContents::Elements(pool) => {
            let row = |which: usize, index: usize| {
                let (starts, token) = task.element_offsets(head, keys.start + index);
                &pool[starts[which] + token * dim..][..dim]
            };
            load_keys::<S, F>(s, count, dim, |i| row(0, i), nothing, to_keys);
            load_values::<S, F>(s, count, dim, |i| row(1, i), nothing, to_values);
        }
        PoolContents::Codes(pool) => {
            for which in 0..2 {
                for index in 0..count {
                    let (starts, token) = task.element_offsets(head, keys.start + index);
                    let codes = &pool[starts[which]..starts[which] + task.attend.head_elements];
                    let to = &mut as_stored_mut(rows, TILE * width)[index * width..][..width];
                    let scale = widen_row::<S, F>(s, task, codes, token, to);
                    scales.set_scale(which, index, scale);
                }
                let widened = as_stored::<F::Stored>(rows, TILE * width);
                let row = |index: usize| &widened[index * width..][..dim];
                match which {
                    0 => load_keys::<S, F>(s, count, dim, row, nothing, to_keys),
                    _ => load_values::<S, F>(s, count, dim, row, nothing, to_values),
                }
            }
            scales.zero_missing(count);
        }
    }
}

/// Transposes rows of keys. Missing keys up to a whole vector are zero.
#[inline(always)]
fn load_keys<'a, S: Simd, F: ElementFormat<S>>(
    s: S,
    count: usize,
    dim: usize,
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

/// Arranges rows of values step by step. Missing values up to a whole vector are zero.
#[inline(always)]
fn load_values<'a, S: Simd, F: ElementFormat<S>>(
    s: S,
    count: usize,
    dim: usize,
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

/// Gathers the last columns of a head whose width is not a whole number of vectors.
#[inline(always)]
fn gather_tail<S: Simd, F: ElementFormat<S>>(s: S, parts: [&[F::Stored]; 2]) -> S::V {
    let zero = as_stored::<F::Stored>(&[0; LANES], LANES)[0];
    let mut rows = [[zero; LANES]; 2];
    for i in 0..rows.len() {
        rows[i][..parts[i].len()].copy_from_slice(parts[i]);
    }
    F::gather(s, [&rows[0], &rows[1]])
}

/// Words seen as stored elements.
fn as_stored<T: PlainData>(words: &[u32], len: usize) -> &[T] {
    assert!(len * size_of::<T>() <= size_of_val(words) && align_of::<T>() <= align_of::<u32>());
    // SAFETY: within the words, aligned, and every bit pattern is a value.
    unsafe { std::slice::from_raw_parts(words.as_ptr().cast(), len) }
}

/// Words seen as stored elements, for writing.
fn as_stored_mut<T: PlainData>(words: &mut [u32], len: usize) -> &mut [T] {
    assert!(len * size_of::<T>() <= size_of_val(words) && align_of::<T>() <= align_of::<u32>());
    // SAFETY: as above, and borrowed mutably.
    unsafe { std::slice::from_raw_parts_mut(words.as_mut_ptr().cast(), len) }
}
