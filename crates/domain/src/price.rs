//! The cost of work on a worker, as measured by the worker.
//!
//! Owns: the amount of work in a step, and the coefficients that convert it into time. Never:
//! predicts, fits or discards; `planner` does. Invariant: plain integers, so that two brains with
//! the same inputs make the same predictions.

use crate::{StepPlan, WorkerId};
use serde::{Deserialize, Serialize};
use std::ops::{Add, AddAssign};

/// The amount of work of a step: a sum over its segments.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash, Serialize, Deserialize)]
pub struct StepWork {
    /// Tokens run: the rows of every matrix product.
    pub rows: u32,
    /// (query, key) pairs in the attention of prompt chunks and drafts: a chunk of `n` tokens after
    /// `c` cached or computed ones has `n × c + n (n + 1) / 2`.
    pub pairs: u64,
    /// Tokens attended to by sequences that run one token: the sum of their lengths.
    pub context_tokens: u64,
    /// Tokens drawn: rows of the last product, and samplings.
    pub draws: u32,
}

impl StepWork {
    /// The work of a plan.
    pub fn of_plan(plan: &StepPlan) -> Self {
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

    /// The work of `count` drafts after `before` tokens: each is a row that attends to all tokens
    /// before it, and a token drawn after it.
    pub fn drafts(before: u32, count: u32) -> Self {
        Self {
            draws: count,
            ..Self::prefill(before, count)
        }
    }

    /// The work of `tokens` prompt tokens after `before` others; draws nothing.
    pub fn prefill(before: u32, tokens: u32) -> Self {
        let (before, count) = (u64::from(before), u64::from(tokens));
        Self {
            rows: tokens,
            // The product of two 32-bit numbers can exceed 64 bits after the addition, so it
            // saturates.
            pairs: (count * before).saturating_add(count * (count + 1) / 2),
            context_tokens: 0,
            draws: 0,
        }
    }

    /// The work of one token of a sequence that then has `context_tokens` tokens.
    pub fn decode(context_tokens: u64) -> Self {
        Self {
            rows: 1,
            pairs: 0,
            context_tokens,
            draws: 1,
        }
    }
}

impl Add for StepWork {
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

impl AddAssign for StepWork {
    fn add_assign(&mut self, other: Self) {
        *self = *self + other;
    }
}

/// The prices of work on a worker. A step takes `rows(work.rows) + pairs × pair + context_tokens ×
/// context + draws × draw`.
#[derive(Clone, Debug, Default, PartialEq, Eq, Hash, Serialize, Deserialize)]
pub struct Prices {
    /// The fixed cost of a step and its matrix products, by rows: points in ascending order of
    /// rows, interpolated linearly; beyond the last point its slope continues. Empty before
    /// anything is measured.
    pub rows: Vec<RowPrice>,
    /// Picoseconds for each pair of a prompt's attention.
    pub pair_picos: u64,
    /// Picoseconds for each token that a decoding sequence attends to.
    pub context_picos: u64,
    /// Nanoseconds for each token drawn.
    pub draw_nanos: u64,
    /// The price of sending blocks to a worker that is not in `links`.
    pub link: LinkPrice,
    /// The measured prices of sending blocks to these workers; in order of their ids.
    pub links: Vec<(WorkerId, LinkPrice)>,
    /// The recent error of step predictions: the median of `|predicted / real - 1|`, in
    /// thousandths.
    pub error_permille: u32,
}

/// One point of [`Prices::rows`].
#[derive(
    Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize,
)]
pub struct RowPrice {
    /// Tokens in the step.
    pub rows: u32,
    /// The time of a step with this many rows, without attention and drawing, in nanoseconds.
    pub nanos: u64,
}

/// The price of sending blocks: `latency + bytes × byte`.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash, Serialize, Deserialize)]
pub struct LinkPrice {
    /// Nanoseconds until the first byte arrives.
    pub latency_nanos: u64,
    /// Picoseconds for each byte.
    pub byte_picos: u64,
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Numbers in a report are chosen by its sender, so sums saturate.
    #[test]
    fn sums_of_work_saturate() {
        let most = StepWork::prefill(u32::MAX, u32::MAX);
        assert_eq!(most.pairs, u64::MAX);
        let twice = most + most + StepWork::decode(u64::MAX) + StepWork::decode(1);
        let all = [u64::from(twice.rows), twice.context_tokens, twice.pairs];
        assert_eq!(all, [u64::from(u32::MAX), u64::MAX, u64::MAX]);
    }
}
