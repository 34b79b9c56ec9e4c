//! Reading a tile of keys and values from a pool of eight-bit codes with a scale per token and
//! head.
//!
//! Owns: widening codes to the products' number format, and the position of scales.
//! Never: applies scales: attention multiplies scores with the keys' scales, and weights with the
//! values'.
//! Invariant: every format represents a code exactly, so that the result does not depend on how
//! often or beside what it is widened. Any byte of a block's unused rest is a valid code, but its
//! scales may be NaN: scales past a sequence's keys are never read.

use super::attention::{AttentionTask, TILE};
use super::kv_sources::{GatheredKv, KvSources};
use super::tile::ElementFormat;
use crate::layout::{KEYS_ACROSS, scale_offset};
use crate::memory::PageMemory;
use crate::simd::{LANES, Simd};
use cleave_engine::EngineError;
use std::ops::Range;

/// Scales of a tile's keys and values, `(TILE)` each; missing ones up to a whole vector are zero.
pub(super) struct TileScales {
    pub(super) keys: PageMemory<f32>,
    pub(super) values: PageMemory<f32>,
}

impl TileScales {
    pub(super) fn new() -> Result<Self, EngineError> {
        Ok(Self {
            keys: PageMemory::zeroed(TILE)?,
            values: PageMemory::zeroed(TILE)?,
        })
    }

    /// Sets the scale of a key (`which` = 0) or of a value (1).
    pub(super) fn set_scale(&mut self, which: usize, index: usize, scale: f32) {
        [&mut self.keys, &mut self.values][which][index] = scale;
    }

    /// Zeroes the scales behind `count` keys, up to a whole vector.
    pub(super) fn zero_missing(&mut self, count: usize) {
        let missing = count..count.next_multiple_of(LANES);
        self.keys[missing.clone()].fill(0.0);
        self.values[missing].fill(0.0);
    }

    /// Reads sixteen scales of keys and of values from their heads' bytes.
    #[inline(always)]
    fn read_group(&mut self, group: usize, from: [&[u8]; 2]) {
        let to = [&mut self.keys, &mut self.values];
        for (to, from) in to.into_iter().zip(from) {
            let to = &mut to[group * KEYS_ACROSS..(group + 1) * KEYS_ACROSS];
            for (to, scale) in to.iter_mut().zip(from.as_chunks().0) {
                *to = f32::from_le_bytes(*scale);
            }
        }
    }
}

/// Widens a tile of layout `Interleaved`, and prefetches the next one's codes.
#[inline(always)]
pub(super) fn widen<S: Simd, F: ElementFormat<S>>(
    s: S,
    task: &AttentionTask<'_, F::Stored>,
    head: usize,
    keys: Range<usize>,
    codes: &[u8],
    ahead: KvSources,
    gathered: &mut GatheredKv,
) {
    let attend = task.attend;
    let (dim, block_tokens) = (attend.heads.head_dim, attend.block_tokens);
    let steps = dim / F::PER_STEP;
    let group_words = KEYS_ACROSS / F::PER_STEP * dim;
    assert!(task.width == dim && gathered.keys.len() >= steps * TILE);
    assert!(gathered.values.len() >= TILE / KEYS_ACROSS * group_words);
    for group in 0..keys.len().div_ceil(KEYS_ACROSS) {
        let (starts, token) = task.element_offsets(head, keys.start + group * KEYS_ACROSS);
        let [key, value] = starts.map(|start| &codes[start..start + attend.head_elements]);
        let scales = scale_offset(block_tokens, dim, token);
        gathered
            .scales
            .read_group(group, [&key[scales..], &value[scales..]]);
        let next = (ahead.keys[group], ahead.values[group]);
        let next = (next.0.cast::<u8>(), next.1.cast::<u8>());
        assert!(token + KEYS_ACROSS <= block_tokens);
        // SAFETY: a head has the codes of `block_tokens` tokens, of which these are sixteen; the
        // scratch space has room for a tile. A prefetch may point anywhere.
        unsafe {
            let from = key.as_ptr().add(token * F::PER_STEP);
            let to = gathered.keys.as_mut_ptr().add(group * KEYS_ACROSS);
            for step in 0..steps {
                let at = step * block_tokens * F::PER_STEP;
                s.prefetch(next.0.wrapping_add(at).cast());
                let words = F::widen(s, from.add(at));
                s.store(words, &mut *to.add(step * TILE).cast());
            }
            let from = value.as_ptr().add(token * dim);
            let to = gathered.values.as_mut_ptr().add(group * group_words);
            for at in (0..group_words).step_by(LANES) {
                s.prefetch(next.1.wrapping_add(at * F::PER_STEP).cast());
                let words = F::widen(s, from.add(at * F::PER_STEP));
                s.store(words, &mut *to.add(at).cast());
            }
        }
    }
    gathered.scales.zero_missing(keys.len());
}

/// Widens one token of a head of layout `Rows`; returns its scale. `codes` are the head's.
#[inline(always)]
pub(super) fn widen_row<S: Simd, F: ElementFormat<S>>(
    s: S,
    task: &AttentionTask<'_, F::Stored>,
    codes: &[u8],
    token: usize,
    to: &mut [F::Stored],
) -> f32 {
    let dim = task.attend.heads.head_dim;
    let row = &codes[token * dim..(token + 1) * dim];
    for (codes, to) in row.chunks(LANES).zip(to.as_chunks_mut::<LANES>().0) {
        let mut sixteen = [0; LANES];
        sixteen[..codes.len()].copy_from_slice(codes);
        F::store(s, s.widen_codes(&sixteen), to);
    }
    let mut scale = [0; size_of::<f32>()];
    let at = scale_offset(task.attend.block_tokens, dim, token);
    scale.copy_from_slice(&codes[at..at + size_of::<f32>()]);
    f32::from_le_bytes(scale)
}
