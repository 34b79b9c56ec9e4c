//! From logits to a token.
//!
//! Owns: temperature, top-k, top-p, min-p, the draw itself, and log-probabilities.
//! Never: sorts the vocabulary.
//! Invariant: weights are added as whole numbers ([`units`]), so a sum is the same in any order, and
//! whoever draws from the same logits draws the same token, on one core or on a thousand.

use super::philox::draw_bits;
use super::select::{Candidate, order, top};
use super::slot::Slot;
use super::softmax;
use cleave_domain::{Sampling, Scores, TokenId};

/// Scratch space for drawing, shared by all slots.
#[derive(Debug, Default)]
pub(crate) struct Sampler {
    undo: Vec<(TokenId, f32)>,
    candidates: Vec<Candidate>,
    /// `exp((logit − max) / temperature)` of every token, 0 where a rule leaves it out, `(vocab)`.
    weights: Vec<f32>,
}

/// The logits hold something that is not a finite number.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct NotFinite;

impl Sampler {
    /// Draws a slot's next token and appends it to the slot's history. `logits` `(vocab)` are
    /// scratch afterwards.
    pub(crate) fn draw(
        &mut self,
        slot: &mut Slot,
        logits: &mut [f32],
    ) -> Result<(TokenId, Option<Scores>), NotFinite> {
        if !softmax::all_finite(logits) {
            return Err(NotFinite);
        }
        let mut scores = slot
            .sampling
            .logprobs
            .map(|count| self.describe(logits, count));
        slot.adjust(logits, &mut self.undo);
        let token = if slot.is_greedy() {
            softmax::argmax(logits) as TokenId
        } else {
            let bits = draw_bits(slot.sampling.seed, slot.history.len() as u64);
            self.pick(&slot.sampling, logits, bits)
        };
        if let Some(scores) = &mut scores {
            let before = self.undo.iter().find(|(changed, _)| *changed == token);
            scores.chosen = before.map_or(logits[token as usize], |(_, logit)| *logit);
        }
        slot.push(token);
        Ok((token, scores))
    }

    /// What the model thinks of a token that is already there.
    pub(crate) fn score(
        &mut self,
        logits: &[f32],
        token: TokenId,
        top_count: u32,
    ) -> Result<Scores, NotFinite> {
        if !softmax::all_finite(logits) {
            return Err(NotFinite);
        }
        let mut scores = self.describe(logits, top_count);
        scores.chosen = logits[token as usize];
        Ok(scores)
    }

    fn describe(&mut self, logits: &[f32], top_count: u32) -> Scores {
        top(logits, top_count as usize, &mut self.candidates);
        Scores {
            normalizer: softmax::log_sum_exp(logits),
            chosen: 0.0,
            top: self.candidates.clone(),
        }
    }

    /// Temperature, top-k, top-p, min-p, and the draw with a number below 2^53.
    pub(super) fn pick(&mut self, sampling: &Sampling, logits: &[f32], bits: u64) -> TokenId {
        let most = softmax::max(logits);
        if most == f32::NEG_INFINITY {
            return 0;
        }
        let heat = 1.0 / sampling.temperature;
        self.weights.clear();
        self.weights.extend(
            logits
                .iter()
                .map(|logit| softmax::exp((logit - most) * heat)),
        );
        let top_k = sampling.top_k as usize;
        if (1..logits.len()).contains(&top_k) {
            top(logits, top_k, &mut self.candidates);
            self.keep_to_last_candidate(logits);
        }
        if let Some(share) = share_of(sampling.top_p) {
            self.nucleus(logits, share);
        }
        if sampling.min_p > 0.0 {
            // The most likely token's weight is 1, so the share of its weight is the weight.
            for weight in &mut self.weights {
                if *weight < sampling.min_p {
                    *weight = 0.0;
                }
            }
        }
        draw_index(&self.weights, bits) as TokenId
    }

    /// Leaves the smallest set of most likely tokens whose weights reach `share` of all weights left
    /// so far, in parts of 2^53. A flat distribution's set has nearly every token, so candidates are
    /// taken in halves of what is left, not sorted at once.
    fn nucleus(&mut self, logits: &[f32], share: u64) {
        let total = sum(&self.weights);
        let wanted = part(total, share).max(1);
        // All tokens that weigh less than this together weigh less than what the set leaves out.
        let least = (total - wanted) / logits.len() as u64;
        let weights = &self.weights;
        let likely = (0..).zip(logits).zip(weights);
        self.candidates.clear();
        self.candidates.extend(
            likely
                .filter(|(_, weight)| **weight > 0.0 && units(**weight) >= least)
                .map(|((token, logit), _)| (token, *logit)),
        );
        let weigh = |part: &[Candidate]| -> u64 {
            let unit = |(token, _): &Candidate| units(weights[*token as usize]);
            part.iter().map(unit).sum()
        };
        // The set ends within `first..end`; what is before `first` weighs `reached`.
        let (mut first, mut end, mut reached) = (0, self.candidates.len(), 0);
        while end - first > 1 {
            let half = (end - first) / 2;
            let rest = &mut self.candidates[first..end];
            rest.select_nth_unstable_by(half, order);
            let weight = weigh(&rest[..half]);
            if reached + weight >= wanted {
                end = first + half;
            } else {
                reached += weight;
                first += half;
            }
        }
        self.candidates.truncate(end);
        self.keep_to_last_candidate(logits);
    }

    /// Weights of tokens after the last candidate, in the order of likelihood, become 0.
    fn keep_to_last_candidate(&mut self, logits: &[f32]) {
        let Some(bar) = self.candidates.iter().copied().max_by(order) else {
            return;
        };
        for ((token, logit), weight) in (0..).zip(logits).zip(&mut self.weights) {
            if order(&(token, *logit), &bar).is_gt() {
                *weight = 0.0;
            }
        }
    }
}

/// A weight in 0..=1 as a whole number of 2^-44: a million tokens of weight 1 do not overflow a sum, and
/// what is cut off is less likely than one draw in 2^44.
fn units(weight: f32) -> u64 {
    const UNITS: f32 = (1u64 << 44) as f32;
    (weight * UNITS) as u64
}

/// The sum of weights, in [`units`].
fn sum(weights: &[f32]) -> u64 {
    weights.iter().map(|weight| units(*weight)).sum()
}

/// `whole × share / 2^53`, rounded down; `share` is at most 2^53.
fn part(whole: u64, share: u64) -> u64 {
    ((u128::from(whole) * u128::from(share)) >> 53) as u64
}

/// A share below 1 in parts of 2^53; `None` if all is kept.
pub(super) fn share_of(top_p: f32) -> Option<u64> {
    (top_p < 1.0).then(|| (f64::from(top_p) * (1u64 << 53) as f64) as u64)
}

/// Weights whose sum is made before it is asked whether the draw is among them.
const CHUNK: usize = 1024;

/// The index at which the running sum first passes `bits / 2^53` of the total; 0 if there is no weight.
fn draw_index(weights: &[f32], bits: u64) -> usize {
    let goal = part(sum(weights), bits);
    let mut reached = 0;
    for (index, chunk) in weights.chunks(CHUNK).enumerate() {
        let after = reached + sum(chunk);
        if after > goal {
            let passing = chunk.iter().position(|weight| {
                reached += units(*weight);
                reached > goal
            });
            return index * CHUNK + passing.expect("the chunk's sum passes the goal");
        }
        reached = after;
    }
    0
}
