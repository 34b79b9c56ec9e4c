//! How keys and values lie in a block.
//!
//! Owns: the order of elements within one head of a block, as the kernels like to read it.
//! Invariant: it depends on the pool's shape and the precision of the model alone, never on the instruction set, so
//! all processors' blocks are alike. A head's elements stay together, whatever their order.

use crate::memory::{Plain, words_of, words_of_mut};
use crate::simd::Turned;
use cleave_engine::ops::{HeadShape, Precision};

/// Keys that lie side by side, a vector of them.
pub(crate) const KEYS_ACROSS: usize = crate::simd::LANES;

/// Bytes from the start of a head of codes to a token's scale.
pub(crate) const fn scale_offset(block_tokens: usize, head_dim: usize, token: usize) -> usize {
    block_tokens * head_dim + token * size_of::<f32>()
}

/// The order within a head of its elements, or of its codes; the scales of codes follow, token by token.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Layout {
    /// Steps of a product down and its columns across, so that a product reads them as they are: keys
    /// `[dim / per_step][token][per_step]`, values `[token / per_step][dim][per_step]`.
    Across {
        /// Elements of a step of the inner dimension: 2 where products are of bf16.
        per_step: usize,
    },
    /// Keys and values `[token][dim]`: where blocks or heads are no whole vectors.
    Rows,
}

/// One token's place in a head of a block.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Spot {
    pub layout: Layout,
    pub block_tokens: usize,
    pub head_dim: usize,
    /// Within the block.
    pub token: usize,
}

impl Layout {
    pub(crate) fn of(precision: Precision, heads: HeadShape, block_tokens: usize) -> Self {
        let whole = |count: usize| count.is_multiple_of(KEYS_ACROSS);
        match whole(heads.head_dim) && whole(block_tokens) {
            true => Self::Across {
                per_step: match precision {
                    Precision::F32 => 1,
                    Precision::Bf16 => 2,
                },
            },
            false => Self::Rows,
        }
    }
}

impl Spot {
    /// Puts the keys of consecutive tokens of a block, `(tokens, head_dim)`, into their head. `turn` is
    /// [`Simd::turn`](crate::simd::Simd::turn).
    pub(crate) fn put_keys<T: Plain>(
        self,
        keys: &[T],
        head: &mut [T],
        turn: impl Fn(&[u32], [usize; 3], Turned<'_>),
    ) {
        let tokens = keys.len() / self.head_dim;
        match self.layout {
            Layout::Across { per_step }
                if tokens > 1 && per_step * size_of::<T>() == size_of::<u32>() =>
            {
                let steps = self.head_dim / per_step;
                let to = &mut words_of_mut(head)[self.token..];
                turn(
                    words_of(keys),
                    [tokens, steps, steps],
                    (to, self.block_tokens),
                );
            }
            Layout::Across { .. } | Layout::Rows => {
                for (key, token) in keys.chunks_exact(self.head_dim).zip(self.token..) {
                    Self { token, ..self }.put_key(key, head);
                }
            }
        }
    }

    /// Puts the values of consecutive tokens of a block, `(tokens, head_dim)`, into their head.
    pub(crate) fn put_values<T: Plain>(self, values: &[T], head: &mut [T]) {
        let mut token = self.token;
        let mut values = values;
        while !values.is_empty() {
            let spot = Self { token, ..self };
            match (self.layout, values.split_at_checked(self.head_dim)) {
                (Layout::Across { per_step: 2 }, Some((first, rest)))
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

    /// Puts a key into its head, `(block_tokens × head_dim)`.
    pub(crate) fn put_key<T: Plain>(self, key: &[T], head: &mut [T]) {
        match self.layout {
            Layout::Rows => self.row(head).copy_from_slice(key),
            Layout::Across { per_step: 2 } => {
                let (pairs, _) = head.as_chunks_mut::<2>();
                let to = pairs[self.token..].iter_mut().step_by(self.block_tokens);
                for (to, pair) in to.zip(key.as_chunks::<2>().0) {
                    *to = *pair;
                }
            }
            Layout::Across { .. } => {
                let to = head[self.token..].iter_mut().step_by(self.block_tokens);
                for (to, element) in to.zip(key) {
                    *to = *element;
                }
            }
        }
    }

    /// Puts the scale of a key or a value into its head, `(block_tokens × (head_dim + 4))` bytes.
    pub(crate) fn put_scale(self, scale: f32, head: &mut [u8]) {
        let at = scale_offset(self.block_tokens, self.head_dim, self.token);
        head[at..at + size_of::<f32>()].copy_from_slice(&scale.to_le_bytes());
    }

    /// Puts a value into its head.
    pub(crate) fn put_value<T: Plain>(self, value: &[T], head: &mut [T]) {
        match self.layout {
            Layout::Rows | Layout::Across { per_step: 1 } => {
                self.row(head).copy_from_slice(value);
            }
            Layout::Across { per_step } => {
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
