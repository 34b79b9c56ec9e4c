//! What work costs on a worker, in numbers that it measured itself.
//!
//! Owns: the amount of work in a step and the coefficients that turn it into time. Never: predicts,
//! fits or forgets; `planner` does. Invariant: plain integers, so that two brains that are told the
//! same predict the same.

use crate::{StepPlan, WorkerId};
use serde::{Deserialize, Serialize};
use std::ops::{Add, AddAssign};

/// How much a step has to do. Sums over its segments.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash, Serialize, Deserialize)]
pub struct Work {
    /// Tokens run: rows of every matrix product.
    pub rows: u32,
    /// (query, key) pairs of the attention of prompt chunks and drafts: a chunk of `n` tokens after `c` cached or
    /// computed ones has `n × c + n (n + 1) / 2`.
    pub pairs: u64,
    /// Tokens attended to by sequences that run one token: the sum of their lengths.
    pub context_tokens: u64,
    /// Sequences that draw a token: rows of the last product, and samplings.
    pub draws: u32,
}

impl Work {
    /// Of a plan.
    pub fn of(plan: &StepPlan) -> Self {
        let mut work = Self::default();
        for segment in &plan.segments {
            let tokens = segment.history_len();
            work += match tokens {
                1 => Self::decode(u64::from(segment.position) + 1),
                tokens => Self::prefill(segment.position, tokens),
            };
            work.draws -= u32::from(tokens == 1);
            work.draws += u32::from(segment.logits.samples());
            let drafts = segment.len - tokens;
            work += Self::drafts(segment.position + tokens, drafts);
        }
        work
    }

    /// `count` drafts after `before` tokens: each is a row that attends to all before it, and is drawn after.
    pub fn drafts(before: u32, count: u32) -> Self {
        Self {
            draws: count,
            ..Self::prefill(before, count)
        }
    }

    /// `tokens` prompt tokens after `before` others; draws nothing.
    pub fn prefill(before: u32, tokens: u32) -> Self {
        let (before, count) = (u64::from(before), u64::from(tokens));
        Self {
            rows: tokens,
            // Of any two numbers of 32 bits, which may be too much for 64.
            pairs: (count * before).saturating_add(count * (count + 1) / 2),
            context_tokens: 0,
            draws: 0,
        }
    }

    /// One token of a sequence that then has `context_tokens` tokens.
    pub fn decode(context_tokens: u64) -> Self {
        Self {
            rows: 1,
            pairs: 0,
            context_tokens,
            draws: 1,
        }
    }
}

impl Add for Work {
    type Output = Self;

    fn add(self, other: Self) -> Self {
        Self {
            rows: self.rows.saturating_add(other.rows),
            pairs: self.pairs.saturating_add(other.pairs),
            context_tokens: self.context_tokens.saturating_add(other.context_tokens),
            draws: self.draws.saturating_add(other.draws),
        }
    }
}

impl AddAssign for Work {
    fn add_assign(&mut self, other: Self) {
        *self = *self + other;
    }
}

/// What a worker's work costs. A step takes
/// `rows(work.rows) + pairs × pair + context_tokens × context + draws × draw`.
#[derive(Clone, Debug, Default, PartialEq, Eq, Hash, Serialize, Deserialize)]
pub struct Prices {
    /// The step itself and its matrix products by rows: knots in ascending order of rows, straight
    /// lines between them, the last one's slope beyond. Empty before anything is known.
    pub rows: Vec<RowPrice>,
    /// Picoseconds for each pair of a prompt's attention.
    pub pair_picos: u64,
    /// Picoseconds for each token that a decoding sequence attends to.
    pub context_picos: u64,
    /// Nanoseconds for each token drawn.
    pub draw_nanos: u64,
    /// To hand blocks on to a worker that is not in `links`.
    pub link: LinkPrice,
    /// To hand blocks on to these workers, as measured; in order of their ids.
    pub links: Vec<(WorkerId, LinkPrice)>,
    /// How far predictions of steps were off of late: the median of `|predicted / real - 1|`, in
    /// thousandths.
    pub error_permille: u32,
}

/// See [`Prices::rows`].
#[derive(
    Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize,
)]
pub struct RowPrice {
    /// Tokens in the step.
    pub rows: u32,
    /// What a step of so many costs without attention and drawing, in nanoseconds.
    pub nanos: u64,
}

/// What handing blocks on costs: `latency + bytes × byte`.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash, Serialize, Deserialize)]
pub struct LinkPrice {
    /// Nanoseconds before the first byte is there.
    pub latency_nanos: u64,
    /// Picoseconds for each byte.
    pub byte_picos: u64,
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Numbers of a report are whatever its sender says.
    #[test]
    fn work_without_end_was_none() {
        let most = Work::prefill(u32::MAX, u32::MAX);
        assert_eq!(most.pairs, u64::MAX);
        let twice = most + most + Work::decode(u64::MAX) + Work::decode(1);
        let all = [u64::from(twice.rows), twice.context_tokens, twice.pairs];
        assert_eq!(all, [u64::from(u32::MAX), u64::MAX, u64::MAX]);
    }
}
