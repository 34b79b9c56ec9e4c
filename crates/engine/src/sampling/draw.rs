//! Drawing a token from logits.
//!
//! Owns: temperature, top-k, top-p, min-p, the draw itself, and log-probabilities. (`sigma` has the
//! measure of top-n-sigma.)
//! Never: sorts the vocabulary.
//! Invariant: weights are summed as whole numbers ([`fixed_point`]), so that a sum does not depend
//! on its order, and the same logits give the same token on one core or on a thousand.

use super::philox::draw_bits;
use super::select::{TokenLogit, order, top};
use super::sigma::{distance, greatest_distance};
use super::slot::SamplingSlot;
use super::softmax;
use crate::constraint::ConstraintError;
use cleave_domain::{SamplingParams, TokenId, TokenScores};

/// Scratch space for drawing, shared by all slots.
#[derive(Debug, Default)]
pub(crate) struct TokenSampler {
    logits_before: Vec<(TokenId, f32)>,
    candidates: Vec<TokenLogit>,
    /// `exp((logit − max) / temperature)` of every token, 0 if a rule excludes it, `(vocab)`.
    weights: Vec<f32>,
}

/// A token cannot be drawn.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) enum DrawError {
    /// A logit is not a finite number.
    NotFinite,
    /// The slot's constraint fails, or allows no token.
    Constraint(ConstraintError),
}

impl TokenSampler {
    /// A sampler whose draws of this vocabulary allocate nothing.
    pub(crate) fn for_vocabulary(vocab_size: usize) -> Self {
        Self {
            logits_before: Vec::with_capacity(vocab_size),
            candidates: Vec::with_capacity(vocab_size),
            weights: Vec::with_capacity(vocab_size),
        }
    }

    /// Draws a slot's next token and appends it to the slot's history. `logits` `(vocab)` are
    /// scratch afterwards.
    pub(crate) fn draw(
        &mut self,
        slot: &mut SamplingSlot,
        logits: &mut [f32],
    ) -> Result<(TokenId, Option<TokenScores>), DrawError> {
        if !softmax::all_finite(logits) {
            return Err(DrawError::NotFinite);
        }
        let mut scores = slot
            .sampling
            .logprobs
            .map(|count| self.scores_of(logits, count));
        // Scores are taken before: they are the model's.
        let stop_ban = slot
            .apply_constraint(logits)
            .map_err(DrawError::Constraint)?;
        slot.apply_edits(logits, &mut self.logits_before, stop_ban);
        let token = if slot.is_greedy() {
            softmax::argmax(logits) as TokenId
        } else {
            let bits = draw_bits(slot.sampling.seed, slot.history.len() as u64);
            self.sample_token(&slot.sampling, logits, bits)
        };
        if let Some(scores) = &mut scores {
            // Scores are those of the unmodified logits: undo the first change of the drawn token.
            let before = self
                .logits_before
                .iter()
                .find(|(changed, _)| *changed == token);
            scores.chosen = before.map_or(logits[token as usize], |(_, logit)| *logit);
        }
        slot.push(token);
        Ok((token, scores))
    }

    /// Scores of a token that is already known.
    pub(crate) fn score(
        &mut self,
        logits: &[f32],
        token: TokenId,
        top_count: u32,
    ) -> Result<TokenScores, DrawError> {
        if !softmax::all_finite(logits) {
            return Err(DrawError::NotFinite);
        }
        let mut scores = self.scores_of(logits, top_count);
        scores.chosen = logits[token as usize];
        Ok(scores)
    }

    fn scores_of(&mut self, logits: &[f32], top_count: u32) -> TokenScores {
        top(logits, top_count as usize, &mut self.candidates);
        TokenScores {
            normalizer: softmax::log_sum_exp(logits),
            chosen: 0.0,
            top: self.candidates.clone(),
        }
    }

    /// Applies top-n-sigma, temperature, top-k, top-p and min-p, and draws with a random number
    /// below 2^53.
    pub(super) fn sample_token(
        &mut self,
        sampling: &SamplingParams,
        logits: &[f32],
        bits: u64,
    ) -> TokenId {
        let most = softmax::max(logits);
        if most == f32::NEG_INFINITY {
            return 0;
        }
        let inverse_temperature = 1.0 / sampling.temperature;
        self.weights.clear();
        self.weights.extend(
            logits
                .iter()
                .map(|logit| softmax::exp((logit - most) * inverse_temperature)),
        );
        let top_k = sampling.top_k as usize;
        if (1..logits.len()).contains(&top_k) {
            top(logits, top_k, &mut self.candidates);
            self.zero_after_last_candidate(logits);
        }
        if sampling.top_n_sigma > 0.0 {
            // Both cuts keep the likeliest tokens, so their order does not matter.
            let greatest = greatest_distance(logits, most, sampling.top_n_sigma);
            for (logit, weight) in logits.iter().zip(&mut self.weights) {
                if distance(most, *logit) > greatest {
                    *weight = 0.0;
                }
            }
        }
        if let Some(share) = top_p_threshold(sampling.top_p) {
            self.keep_nucleus(logits, share);
        }
        if sampling.min_p > 0.0 {
            // The most likely token's weight is 1, so a weight is its own ratio to it.
            for weight in &mut self.weights {
                if *weight < sampling.min_p {
                    *weight = 0.0;
                }
            }
        }
        draw_index(&self.weights, bits) as TokenId
    }

    /// Keeps the smallest set of most likely tokens whose weights reach `share` of the remaining
    /// weight, in parts of 2^53. The set of a flat distribution has nearly every token, so it is
    /// found by repeated partitioning into halves instead of a full sort.
    fn keep_nucleus(&mut self, logits: &[f32], share: u64) {
        let total = fixed_point_sum(&self.weights);
        let target_weight = fraction_of(total, share).max(1);
        // All tokens below this weight together weigh less than the weight outside the set, so none
        // of them is needed to reach it.
        let least = (total - target_weight) / logits.len() as u64;
        let weights = &self.weights;
        let likely = (0..).zip(logits).zip(weights);
        self.candidates.clear();
        self.candidates.extend(
            likely
                .filter(|(_, weight)| **weight > 0.0 && fixed_point(**weight) >= least)
                .map(|((token, logit), _)| (token, *logit)),
        );
        let weigh = |part: &[TokenLogit]| -> u64 {
            let unit = |(token, _): &TokenLogit| fixed_point(weights[*token as usize]);
            part.iter().map(unit).sum()
        };
        // The set's last token is within `first..end`; candidates before `first` weigh `reached`
        // together.
        let (mut first, mut end, mut reached) = (0, self.candidates.len(), 0);
        while end - first > 1 {
            let half = (end - first) / 2;
            let rest = &mut self.candidates[first..end];
            rest.select_nth_unstable_by(half, order);
            let weight = weigh(&rest[..half]);
            if reached + weight >= target_weight {
                end = first + half;
            } else {
                reached += weight;
                first += half;
            }
        }
        self.candidates.truncate(end);
        self.zero_after_last_candidate(logits);
    }

    /// Sets the weights of tokens less likely than the last candidate to 0.
    fn zero_after_last_candidate(&mut self, logits: &[f32]) {
        let Some(threshold) = self.candidates.iter().copied().max_by(order) else {
            return;
        };
        for ((token, logit), weight) in (0..).zip(logits).zip(&mut self.weights) {
            if order(&(token, *logit), &threshold).is_gt() {
                *weight = 0.0;
            }
        }
    }
}

/// A weight in 0..=1 in units of 2^-44: the sum of a million tokens of weight 1 fits, and the
/// probability lost to rounding is below 2^-44 per token.
fn fixed_point(weight: f32) -> u64 {
    const UNITS: f32 = (1u64 << 44) as f32;
    (weight * UNITS) as u64
}

/// The sum of weights, in the unit of [`fixed_point`].
fn fixed_point_sum(weights: &[f32]) -> u64 {
    weights.iter().map(|weight| fixed_point(*weight)).sum()
}

/// `whole × share / 2^53`, rounded down; `share` is at most 2^53.
fn fraction_of(whole: u64, share: u64) -> u64 {
    ((u128::from(whole) * u128::from(share)) >> 53) as u64
}

/// A `top_p` below 1 in parts of 2^53; `None` if all tokens are kept.
pub(super) fn top_p_threshold(top_p: f32) -> Option<u64> {
    (top_p < 1.0).then(|| (f64::from(top_p) * (1u64 << 53) as f64) as u64)
}

/// Weights that are summed at once before the search for the drawn token looks inside.
const CHUNK: usize = 1024;

/// The index at which the running sum first passes `bits / 2^53` of the total; 0 if there is no
/// weight.
fn draw_index(weights: &[f32], bits: u64) -> usize {
    let goal = fraction_of(fixed_point_sum(weights), bits);
    let mut reached = 0;
    for (index, chunk) in weights.chunks(CHUNK).enumerate() {
        let after = reached + fixed_point_sum(chunk);
        if after > goal {
            let passing = chunk.iter().position(|weight| {
                reached += fixed_point(*weight);
                reached > goal
            });
            return index * CHUNK + passing.expect("the chunk's sum passes the goal");
        }
        reached = after;
    }
    0
}
