//! From logits to a token.
//!
//! Owns: temperature, top-k, top-p, min-p, the draw itself, and log-probabilities.
//! Never: sorts the vocabulary.
//! Invariant: sums are made in an order that depends on the number of tokens alone.

use super::philox::uniform;
use super::select::{Candidate, order, top};
use super::slot::Slot;
use super::softmax;
use cleave_domain::{Sampling, Scores, TokenId};

/// Weights are in 0..=1 and fall into one bucket for each of their exponents and of the next three
/// bits, the largest last.
const BUCKETS: usize = bucket(1.0) + 1;

const fn bucket(weight: f32) -> usize {
    (weight.to_bits() >> 20) as usize
}

/// Scratch space for drawing, shared by all slots.
#[derive(Debug, Default)]
pub(crate) struct Sampler {
    undo: Vec<(TokenId, f32)>,
    candidates: Vec<Candidate>,
    /// `exp((logit − max) / temperature)`, of every token or of every candidate.
    weights: Vec<f32>,
    /// Sums of weights, `(BUCKETS)`.
    buckets: Vec<f64>,
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
            let uniform = uniform(slot.sampling.seed, slot.history.len() as u64);
            self.pick(&slot.sampling, logits, uniform)
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

    /// Temperature, top-k, top-p, min-p, and the draw with `uniform` in `[0, 1)`.
    pub(super) fn pick(&mut self, sampling: &Sampling, logits: &[f32], uniform: f64) -> TokenId {
        let most = softmax::max(logits);
        if most == f32::NEG_INFINITY {
            return 0;
        }
        let heat = 1.0 / sampling.temperature;
        let power = |logit: f32| softmax::exp((logit - most) * heat);
        let top_k = match sampling.top_k as usize {
            0 => logits.len(),
            k => k.min(logits.len()),
        };
        if top_k == logits.len() {
            self.weights.clear();
            self.weights
                .extend(logits.iter().map(|logit| power(*logit)));
            if sampling.top_p >= 1.0 {
                drop_unlikely(&mut self.weights, sampling.min_p);
                return draw_index(&self.weights, uniform) as TokenId;
            }
            let total = sum(&self.weights);
            self.nucleus(logits, total, f64::from(sampling.top_p) * total);
        } else {
            top(logits, top_k, &mut self.candidates);
        }
        self.weights.clear();
        self.weights
            .extend(self.candidates.iter().map(|(_, logit)| power(*logit)));
        if top_k < logits.len() && sampling.top_p < 1.0 {
            let share = f64::from(sampling.top_p) * sum(&self.weights);
            let kept = prefix_reaching(&self.weights, share).unwrap_or(self.weights.len());
            self.weights.truncate(kept);
        }
        drop_unlikely(&mut self.weights, sampling.min_p);
        self.candidates[draw_index(&self.weights, uniform)].0
    }

    /// Leaves in `candidates`, by id, the smallest set of most likely tokens whose weights reach
    /// `share` of `total`. `weights` are those of the whole vocabulary. A flat distribution's set
    /// has nearly every token, so nothing is sorted but the bucket in which the set ends.
    fn nucleus(&mut self, logits: &[f32], total: f64, share: f64) {
        // All tokens below this together weigh less than what the set may leave out, so none of
        // them is in it. (Somewhat less, for the rounding of the sums.)
        let least = ((total - share) / logits.len() as f64 * 0.999) as f32;
        let weights = &self.weights;
        let candidates = &mut self.candidates;
        let likely = (0..).zip(logits).zip(weights);
        candidates.clear();
        candidates.extend(
            likely
                .filter(|(_, weight)| **weight >= least)
                .map(|((token, logit), _)| (token, *logit)),
        );
        let weight_of = |candidate: &Candidate| weights[candidate.0 as usize];
        self.buckets.clear();
        self.buckets.resize(BUCKETS, 0.0);
        for candidate in &*candidates {
            let weight = weight_of(candidate);
            self.buckets[bucket(weight)] += f64::from(weight);
        }
        let mut reached = 0.0;
        let mut last = 0;
        for (index, sum) in self.buckets.iter().enumerate().rev() {
            if *sum > 0.0 && reached < share {
                last = index;
                reached += sum;
            }
        }
        reached -= self.buckets[last];
        let is_in_last = |candidate: &Candidate| bucket(weight_of(candidate)) == last;
        let mut border: Vec<Candidate> = candidates.iter().copied().filter(is_in_last).collect();
        border.sort_unstable_by(order);
        let end = border.iter().position(|candidate| {
            reached += f64::from(weight_of(candidate));
            reached >= share
        });
        let bar = border[end.unwrap_or(border.len() - 1)];
        candidates.retain(|candidate| {
            let in_bucket = bucket(weight_of(candidate));
            in_bucket > last || (in_bucket == last && order(candidate, &bar).is_le())
        });
    }
}

/// The sum of weights, in an order that depends on nothing but their number.
fn sum(weights: &[f32]) -> f64 {
    weights.chunks(CHUNK).map(chunk_sum).sum()
}

/// Weights whose sum is made at once.
const CHUNK: usize = 1024;

fn chunk_sum(chunk: &[f32]) -> f64 {
    let mut lanes = [0.0f64; 8];
    let (eights, rest) = chunk.as_chunks::<8>();
    for eight in eights {
        for (lane, weight) in lanes.iter_mut().zip(eight) {
            *lane += f64::from(*weight);
        }
    }
    let rest: f64 = rest.iter().map(|weight| f64::from(*weight)).sum();
    lanes.into_iter().sum::<f64>() + rest
}

/// How many leading weights reach `share`.
fn prefix_reaching(weights: &[f32], share: f64) -> Option<usize> {
    let mut reached = 0.0;
    let last = weights.iter().position(|weight| {
        reached += f64::from(*weight);
        reached >= share
    })?;
    Some(last + 1)
}

/// Min-p: the most likely token's weight is 1, so the share is the weight.
fn drop_unlikely(weights: &mut [f32], min_p: f32) {
    if min_p > 0.0 {
        for weight in weights {
            if *weight < min_p {
                *weight = 0.0;
            }
        }
    }
}

/// The index at which the running sum first passes `uniform` of the total.
fn draw_index(weights: &[f32], uniform: f64) -> usize {
    let goal = uniform * sum(weights);
    let mut reached = 0.0;
    for (index, chunk) in weights.chunks(CHUNK).enumerate() {
        let after = reached + chunk_sum(chunk);
        if after > goal {
            let passing = chunk.iter().position(|weight| {
                reached += f64::from(*weight);
                reached > goal
            });
            // One by one the chunk may sum to a little less than at once.
            let within = passing.unwrap_or_else(|| last_with_weight(chunk));
            return index * CHUNK + within;
        }
        reached = after;
    }
    last_with_weight(weights)
}

fn last_with_weight(weights: &[f32]) -> usize {
    weights
        .iter()
        .rposition(|weight| *weight > 0.0)
        .unwrap_or(0)
}
