//! A tile's keys and values where the pool has codes of eight bits, with a scale for each token and head.
//!
//! Owns: widening codes into what products of floats read, and where scales are.
//! Never: multiplies: scales of keys are for scores, those of values for weights.
//! Invariant: every format has a code exactly, so it does not matter how often or beside what it is widened. Whatever
//! bytes a block's rest holds are codes, but its scales may be no numbers: those past a sequence's keys are never read.

use super::attention::{TILE, Task};
use super::keys::{Gathered, Sources};
use super::tile::Format;
use crate::layout::{KEYS_ACROSS, scale_offset};
use crate::memory::Memory;
use crate::simd::{LANES, Simd};
use cleave_engine::EngineError;
use std::ops::Range;

/// Of a tile's keys and of its values, `(TILE)` each; up to a whole vector they are zero where keys are missing.
pub(super) struct Scales {
    pub(super) keys: Memory<f32>,
    pub(super) values: Memory<f32>,
}

impl Scales {
    pub(super) fn new() -> Result<Self, EngineError> {
        Ok(Self {
            keys: Memory::zeroed(TILE)?,
            values: Memory::zeroed(TILE)?,
        })
    }

    /// Of a key, or of a value.
    pub(super) fn put(&mut self, which: usize, index: usize, scale: f32) {
        [&mut self.keys, &mut self.values][which][index] = scale;
    }

    /// There are so many keys.
    pub(super) fn end(&mut self, count: usize) {
        let missing = count..count.next_multiple_of(LANES);
        self.keys[missing.clone()].fill(0.0);
        self.values[missing].fill(0.0);
    }

    /// Sixteen of each, from so many heads' bytes on.
    #[inline(always)]
    fn take(&mut self, group: usize, from: [&[u8]; 2]) {
        let to = [&mut self.keys, &mut self.values];
        for (to, from) in to.into_iter().zip(from) {
            let to = &mut to[group * KEYS_ACROSS..(group + 1) * KEYS_ACROSS];
            for (to, scale) in to.iter_mut().zip(from.as_chunks().0) {
                *to = f32::from_le_bytes(*scale);
            }
        }
    }
}

/// Widens a tile that lies across, and asks for the next one's codes.
#[inline(always)]
pub(super) fn widen<S: Simd, F: Format<S>>(
    s: S,
    task: &Task<'_, F::Stored>,
    (head, keys): (usize, Range<usize>),
    (codes, ahead): (&[u8], Sources),
    gathered: &mut Gathered,
) {
    let attend = task.attend;
    let (dim, block_tokens) = (attend.heads.head_dim, attend.block_tokens);
    let steps = dim / F::PER_STEP;
    let group_words = KEYS_ACROSS / F::PER_STEP * dim;
    assert!(task.width == dim && gathered.keys.len() >= steps * TILE);
    assert!(gathered.values.len() >= TILE / KEYS_ACROSS * group_words);
    for group in 0..keys.len().div_ceil(KEYS_ACROSS) {
        let (starts, token) = task.place(head, keys.start + group * KEYS_ACROSS);
        let [key, value] = starts.map(|start| &codes[start..start + attend.head_elements]);
        let scales = scale_offset(block_tokens, dim, token);
        gathered
            .scales
            .take(group, [&key[scales..], &value[scales..]]);
        let next = (ahead.keys[group], ahead.values[group]);
        let next = (next.0.cast::<u8>(), next.1.cast::<u8>());
        assert!(token + KEYS_ACROSS <= block_tokens);
        // SAFETY: a head has the codes of `block_tokens` tokens, of which these are sixteen; the scratch space has room
        // for a tile. A prefetch may point anywhere.
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
    gathered.scales.end(keys.len());
}

/// Widens one token of a head that lies in rows; gives its scale.
#[inline(always)]
pub(super) fn widen_row<S: Simd, F: Format<S>>(
    s: S,
    task: &Task<'_, F::Stored>,
    (head, token): (&[u8], usize),
    to: &mut [F::Stored],
) -> f32 {
    let dim = task.attend.heads.head_dim;
    let row = &head[token * dim..(token + 1) * dim];
    for (codes, to) in row.chunks(LANES).zip(to.as_chunks_mut::<LANES>().0) {
        let mut sixteen = [0; LANES];
        sixteen[..codes.len()].copy_from_slice(codes);
        F::store(s, s.widen_codes(&sixteen), to);
    }
    let mut scale = [0; size_of::<f32>()];
    let at = scale_offset(task.attend.block_tokens, dim, token);
    scale.copy_from_slice(&head[at..at + size_of::<f32>()]);
    f32::from_le_bytes(scale)
}
