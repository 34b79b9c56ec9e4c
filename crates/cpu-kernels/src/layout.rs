//! Layout of keys and values in a block.
//!
//! Owns: the order of elements within one head of a block, as the kernels read it.
//! Invariant: the order depends only on the pool's shape and the model's precision, never on the
//! instruction set, so that blocks of all processors are alike. A head's elements are contiguous in
//! any order.

use crate::memory::{PlainData, words_of, words_of_mut};
use crate::simd::TransposeTarget;
use cleave_engine::ops::{HeadShape, Precision};

/// Adjacent keys: the lanes of a vector.
pub const KEYS_ACROSS: usize = crate::simd::LANES;

/// Byte offset of a token's scale in a head of codes.
pub const fn scale_offset(block_tokens: usize, head_dim: usize, token: usize) -> usize {
    block_tokens * head_dim + token * size_of::<f32>()
}

/// Order of a head's elements, or of its codes; the scales of codes follow, token by token.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum KvLayout {
    /// The layout of a product's right side, so that products read it in place: keys
    /// `[dim / per_step][token][per_step]`, values `[token / per_step][dim][per_step]`.
    Interleaved {
        /// Elements per step of the inner dimension: 2 for products of bf16.
        per_step: usize,
    },
    /// Keys and values `[token][dim]`, if blocks or heads are not whole vectors.
    Rows,
}

/// One token's place in a head of a block.
#[derive(Clone, Copy, Debug)]
pub struct TokenSpot {
    pub layout: KvLayout,
    pub block_tokens: usize,
    pub head_dim: usize,
    /// Token's index in the block.
    pub token: usize,
}

impl KvLayout {
    pub fn of(precision: Precision, heads: HeadShape, block_tokens: usize) -> Self {
        let whole = |count: usize| count.is_multiple_of(KEYS_ACROSS);
        if whole(heads.head_dim) && whole(block_tokens) {
            Self::Interleaved {
                per_step: match precision {
                    Precision::F32 => 1,
                    Precision::Bf16 => 2,
                },
            }
        } else {
            Self::Rows
        }
    }
}

impl TokenSpot {
    /// Stores the keys of consecutive tokens of a block, `(tokens, head_dim)`, in their head.
    /// `turn` is [`Simd::turn`](crate::simd::Simd::turn).
    pub fn put_keys<T: PlainData>(
        self,
        keys: &[T],
        head: &mut [T],
        turn: impl Fn(&[u32], [usize; 3], TransposeTarget<'_>),
    ) {
        let tokens = keys.len() / self.head_dim;
        match self.layout {
            KvLayout::Interleaved { per_step }
                if tokens > 1 && per_step * size_of::<T>() == size_of::<u32>() =>
            {
                let steps = self.head_dim / per_step;
                let to = TransposeTarget {
                    words: &mut words_of_mut(head)[self.token..],
                    stride: self.block_tokens,
                };
                turn(words_of(keys), [tokens, steps, steps], to);
            }
            KvLayout::Interleaved { .. } | KvLayout::Rows => {
                for (key, token) in keys.chunks_exact(self.head_dim).zip(self.token..) {
                    Self { token, ..self }.put_key(key, head);
                }
            }
        }
    }

    /// Stores the values of consecutive tokens of a block, `(tokens, head_dim)`, in their head.
    pub fn put_values<T: PlainData>(self, values: &[T], head: &mut [T]) {
        let mut token = self.token;
        let mut values = values;
        while !values.is_empty() {
            let spot = Self { token, ..self };
            match (self.layout, values.split_at_checked(self.head_dim)) {
                (KvLayout::Interleaved { per_step: 2 }, Some((first, rest)))
                    if token.is_multiple_of(2) && !rest.is_empty() =>
                {
                    let (second, rest) = rest.split_at(self.head_dim);
                    let to = &mut head[token * self.head_dim..][..2 * self.head_dim];
                    let pairs = to.as_chunks_mut::<2>().0.iter_mut();
                    for ((to, first), second) in pairs.zip(first).zip(second) {
                        *to = [*first, *second];
                    }
                    (values, token) = (rest, token + 2);
                }
                (_, both) => {
                    let (first, rest) = both.expect("whole heads");
                    spot.put_value(first, head);
                    (values, token) = (rest, token + 1);
                }
            }
        }
    }

    /// Stores a key in its head, `(block_tokens × head_dim)`.
    pub fn put_key<T: PlainData>(self, key: &[T], head: &mut [T]) {
        match self.layout {
            KvLayout::Rows => self.row(head).copy_from_slice(key),
            KvLayout::Interleaved { per_step: 2 } => {
                let (pairs, _) = head.as_chunks_mut::<2>();
                let to = pairs[self.token..].iter_mut().step_by(self.block_tokens);
                for (to, pair) in to.zip(key.as_chunks::<2>().0) {
                    *to = *pair;
                }
            }
            KvLayout::Interleaved { .. } => {
                let to = head[self.token..].iter_mut().step_by(self.block_tokens);
                for (to, element) in to.zip(key) {
                    *to = *element;
                }
            }
        }
    }

    /// Stores the scale of a key or a value in its head, `(block_tokens × (head_dim + 4))` bytes.
    pub fn put_scale(self, scale: f32, head: &mut [u8]) {
        let at = scale_offset(self.block_tokens, self.head_dim, self.token);
        head[at..at + size_of::<f32>()].copy_from_slice(&scale.to_le_bytes());
    }

    /// Stores a value in its head, `(block_tokens × head_dim)`.
    pub fn put_value<T: PlainData>(self, value: &[T], head: &mut [T]) {
        match self.layout {
            KvLayout::Rows | KvLayout::Interleaved { per_step: 1 } => {
                self.row(head).copy_from_slice(value);
            }
            KvLayout::Interleaved { per_step } => {
                let start = self.token / per_step * per_step * self.head_dim;
                let to = head[start..start + per_step * self.head_dim].chunks_exact_mut(per_step);
                for (to, element) in to.zip(value) {
                    to[self.token % per_step] = *element;
                }
            }
        }
    }

    fn row<T>(self, head: &mut [T]) -> &mut [T] {
        &mut head[self.token * self.head_dim..(self.token + 1) * self.head_dim]
    }
}
