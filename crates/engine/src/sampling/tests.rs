//! Draws compared with a naive reference in double precision.

use super::philox::draw_bits;
use super::slot::StopBan;
use super::{DrawError, SamplingSlot, TokenSampler};
use crate::constraint::{ConstraintError, SlotConstraint, TokenMask, TokenMatcher};
use cleave_domain::{OpenSlot, SamplingParams, SlotIndex, TokenId};
use proptest::prelude::*;
use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;

fn open(sampling: SamplingParams, prompt: &[TokenId], output: &[TokenId]) -> OpenSlot {
    OpenSlot {
        slot: SlotIndex(0),
        sampling: Arc::new(sampling),
        prompt: Arc::from(prompt),
        output: output.to_vec(),
        stop_tokens: Arc::from([]),
        min_tokens: 0,
        adapter: None,
    }
}

/// The random number at this share of the range.
fn bits_at(share: f64) -> u64 {
    (share * (1u64 << 53) as f64) as u64
}

fn seeded(temperature: f32) -> SamplingParams {
    SamplingParams {
        temperature,
        ..SamplingParams::greedy()
    }
}

/// Bias and penalties as documented, in double precision.
fn adjusted(open: &OpenSlot, logits: &[f32]) -> Vec<f64> {
    let sampling = &open.sampling;
    let mut values: Vec<f64> = logits.iter().map(|l| f64::from(*l)).collect();
    for (token, bias) in &sampling.logit_bias {
        values[*token as usize] += f64::from(*bias);
    }
    let tokens: BTreeSet<TokenId> = open.prompt.iter().chain(&open.output).copied().collect();
    for token in tokens {
        let value = &mut values[token as usize];
        let penalty = f64::from(sampling.repetition_penalty);
        *value = if *value > 0.0 {
            *value / penalty
        } else {
            *value * penalty
        };
        let count = open.output.iter().filter(|t| **t == token).count() as f64;
        *value -= f64::from(sampling.frequency_penalty) * count;
        if count > 0.0 {
            *value -= f64::from(sampling.presence_penalty);
        }
    }
    values
}

/// Probabilities after top-n-sigma, temperature, top-k, top-p and min-p, by a full sort. Also the
/// distance of the closest decision: if it is below rounding errors, either outcome is right.
fn probabilities(sampling: &SamplingParams, adjusted: &[f64]) -> (BTreeMap<TokenId, f64>, f64) {
    let mut order: Vec<(TokenId, f64)> = adjusted
        .iter()
        .enumerate()
        .map(|(id, l)| (id as u32, *l))
        .collect();
    order.sort_by(|a, b| b.1.total_cmp(&a.1).then(a.0.cmp(&b.0)));
    let mut closest = f64::INFINITY;
    let top_k = sampling.top_k as usize;
    if (1..order.len()).contains(&top_k) {
        closest = order[top_k - 1].1 - order[top_k].1;
        order.truncate(top_k);
    }
    let most = order[0].1;
    if sampling.top_n_sigma > 0.0 {
        let count = adjusted.len() as f64;
        let mean = adjusted.iter().sum::<f64>() / count;
        let squares = adjusted.iter().map(|logit| (logit - mean).powi(2));
        let sigma = (squares.sum::<f64>() / count).sqrt();
        let least = most - f64::from(sampling.top_n_sigma) * sigma;
        // Distances are counted in 2^-16 of a logit, coarser than other decisions.
        let decisions = order.iter().map(|(_, logit)| (logit - least).abs() / 10.0);
        closest = decisions.fold(closest, f64::min);
        order.retain(|(_, logit)| *logit >= least);
    }
    for (_, logit) in &mut order {
        *logit = ((*logit - most) / f64::from(sampling.temperature)).exp();
    }
    let total: f64 = order.iter().map(|(_, weight)| weight).sum();
    if sampling.top_p < 1.0 {
        let (mut reached, mut nucleus_count) = (0.0, 0);
        for (_, weight) in &order {
            reached += weight / total;
            nucleus_count += 1;
            closest = closest.min((reached - f64::from(sampling.top_p)).abs());
            if reached >= f64::from(sampling.top_p) {
                break;
            }
        }
        order.truncate(nucleus_count);
    }
    for (_, weight) in order.iter().filter(|_| sampling.min_p > 0.0) {
        closest = closest.min((weight - f64::from(sampling.min_p)).abs());
    }
    order.retain(|(_, weight)| *weight >= f64::from(sampling.min_p));
    let total: f64 = order.iter().map(|(_, weight)| weight).sum();
    let shares = order.into_iter().map(|(id, weight)| (id, weight / total));
    (shares.collect(), closest)
}

fn draw(open: &OpenSlot, logits: &[f32]) -> TokenId {
    let mut slot = SamplingSlot::open(open, None);
    let (token, _) = TokenSampler::default()
        .draw(&mut slot, &mut logits.to_vec())
        .unwrap();
    assert_eq!(slot.history.last(), Some(&token));
    token
}

fn rules() -> impl Strategy<Value = SamplingParams> {
    (
        0.3f32..1.8,
        prop_oneof![Just(0u32), 1u32..200],
        prop_oneof![Just(1.0f32), 0.05f32..0.999],
        prop_oneof![Just(0.0f32), 0.001f32..0.5],
        prop_oneof![Just(0.0f32), 0.1f32..4.0],
        prop_oneof![Just(1.0f32), 0.8f32..1.6],
        (0.0f32..0.8, -0.5f32..0.8),
        prop::collection::vec((0u32..40, -5.0f32..5.0), 0..4),
    )
        .prop_map(
            |(temperature, top_k, top_p, min_p, top_n_sigma, repetition, penalties, logit_bias)| {
                SamplingParams {
                    temperature,
                    top_k,
                    top_p,
                    min_p,
                    top_n_sigma,
                    repetition_penalty: repetition,
                    presence_penalty: penalties.0,
                    frequency_penalty: penalties.1,
                    logit_bias,
                    ..SamplingParams::greedy()
                }
            },
        )
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(192))]

    /// With the random number swept from 0 to 1, exactly the tokens of the support are drawn, each
    /// as often as its probability says.
    #[test]
    fn draws_match_the_probabilities_of_a_naive_reference(
        logits in prop::collection::vec(-8.0f32..8.0, 40..700),
        rules in rules(),
        history in prop::collection::vec(0u32..40, 1..30),
    ) {
        let prompt_count = history.len() / 2;
        let (prompt, output) = history.split_at(prompt_count);
        let open = open(rules, prompt, output);
        let (probabilities_by_token, closest) = probabilities(&open.sampling, &adjusted(&open, &logits));
        prop_assume!(closest > 1e-5);
        let mut values = logits;
        let slot = SamplingSlot::open(&open, None);
        slot.apply_edits(&mut values, &mut Vec::new(), StopBan::InForce);
        let mut sampler = TokenSampler::default();
        const SWEEP: usize = 4000;
        let mut counts: BTreeMap<TokenId, usize> = BTreeMap::new();
        for step in 0..SWEEP {
            let bits = bits_at((step as f64 + 0.5) / SWEEP as f64);
            *counts.entry(sampler.sample_token(&open.sampling, &values, bits)).or_default() += 1;
        }
        for (token, count) in &counts {
            let share = probabilities_by_token.get(token).copied();
            let share = share.expect("picked a token outside the support");
            prop_assert!((*count as f64 / SWEEP as f64 - share).abs() < 1.5 / SWEEP as f64 + 1e-5);
        }
        for (token, share) in &probabilities_by_token {
            prop_assert!(*share < 2.0 / SWEEP as f64 || counts.contains_key(token));
        }
    }

    /// A draw depends on seed and position, and equals the draw with their random number.
    #[test]
    fn a_draw_is_keyed_by_seed_and_position(
        logits in prop::collection::vec(-4.0f32..4.0, 50..300),
        seed: u64,
        len in 1usize..40,
    ) {
        let prompt: Vec<TokenId> = (0..len as u32).collect();
        let open = open(SamplingParams { seed, ..seeded(1.0) }, &prompt, &[]);
        let token = draw(&open, &logits);
        // Earlier draws in other slots must have no effect.
        let mut sampler = TokenSampler::default();
        for other in 0..3 {
            let mut slot = SamplingSlot::open(&super::tests::open(seeded(0.7), &[other], &[]), None);
            sampler.draw(&mut slot, &mut logits.clone()).unwrap();
        }
        let mut slot = SamplingSlot::open(&open, None);
        let (again, _) = sampler.draw(&mut slot, &mut logits.clone()).unwrap();
        prop_assert_eq!(token, again);
        let expected = sampler.sample_token(&open.sampling, &logits, draw_bits(seed, len as u64));
        prop_assert_eq!(token, expected);
    }

    /// Penalties updated token by token equal those of a slot opened with the whole history.
    #[test]
    fn a_grown_slot_equals_one_opened_with_its_history(
        logits in prop::collection::vec(-4.0f32..4.0, 30..60),
        rules in rules(),
        seed: u64,
    ) {
        let opened = open(SamplingParams { seed, ..rules }, &[1, 2, 2, 3], &[]);
        let mut grown = SamplingSlot::open(&opened, None);
        let mut sampler = TokenSampler::default();
        for _ in 0..12 {
            let reopened = OpenSlot { output: grown.history[4..].to_vec(), ..opened.clone() };
            let expected = draw(&reopened, &logits);
            let (token, _) = sampler.draw(&mut grown, &mut logits.clone()).unwrap();
            prop_assert_eq!(token, expected);
        }
    }
}

#[test]
fn greedy_breaks_ties_by_the_smallest_token_id() {
    let mut logits = vec![0.0f32; 300];
    for id in [17, 40, 255] {
        logits[id] = 2.5;
    }
    assert_eq!(
        draw(&open(SamplingParams::greedy(), &[1], &[]), &logits),
        17
    );
}

#[test]
fn stop_tokens_are_banned_until_min_tokens() {
    let logits: Vec<f32> = (0..50).map(|id| id as f32).collect();
    for temperature in [0.0, 1.0] {
        let mut opened = open(seeded(temperature), &[1, 2], &[]);
        opened.sampling = Arc::new(SamplingParams {
            top_k: 1,
            ..seeded(temperature)
        });
        opened.stop_tokens = Arc::from([49, 48]);
        opened.min_tokens = 2;
        let mut slot = SamplingSlot::open(&opened, None);
        let mut sampler = TokenSampler::default();
        let drawn = [(); 3].map(|()| sampler.draw(&mut slot, &mut logits.clone()).unwrap().0);
        assert_eq!(drawn, [47, 47, 49]);
    }
}

#[test]
fn logprobs_are_those_of_the_unmodified_logits() {
    let logits: Vec<f32> = vec![1.0, 3.0, 2.0, 3.0, -1.0];
    let sampling = SamplingParams {
        logprobs: Some(3),
        logit_bias: vec![(4, 50.0), (4, 1.0)],
        ..SamplingParams::greedy()
    };
    let mut slot = SamplingSlot::open(&open(sampling, &[0], &[]), None);
    let drawn = TokenSampler::default().draw(&mut slot, &mut logits.clone());
    let (token, scores) = drawn.unwrap();
    let scores = scores.unwrap();
    assert_eq!(token, 4);
    assert_eq!(scores.chosen, -1.0);
    assert_eq!(scores.top, [(1, 3.0), (3, 3.0), (2, 2.0)]);
    let sum: f64 = logits.iter().map(|l| f64::from(*l).exp()).sum();
    assert!((f64::from(scores.normalizer) - sum.ln()).abs() < 1e-6);
}

#[test]
fn non_finite_logits_are_an_error() {
    for bad in [f32::NAN, f32::INFINITY, f32::NEG_INFINITY] {
        let mut logits = vec![0.5; 100];
        logits[99] = bad;
        let mut slot = SamplingSlot::open(&open(seeded(1.0), &[0], &[]), None);
        assert!(
            TokenSampler::default()
                .draw(&mut slot, &mut logits)
                .is_err()
        );
        assert_eq!(slot.history, [0]);
    }
}

/// The cut is made in logits: a higher temperature makes the rest more alike, and adds no token.
#[test]
fn top_n_sigma_keeps_its_tokens_at_any_temperature() {
    // The deviation of 0.0, 0.1 … 9.9 is 2.89, so that 7.1 is the least logit that stays.
    let logits: Vec<f32> = (0..1000).map(|id| (id % 100) as f32 * 0.1).collect();
    let kept: BTreeSet<TokenId> = (0..1000).filter(|id| id % 100 > 70).collect();
    let mut sampler = TokenSampler::default();
    for temperature in [1.0, 2.0, 8.0] {
        let sampling = SamplingParams {
            top_n_sigma: 1.0,
            ..seeded(temperature)
        };
        let draws = (0..4000).map(|step| bits_at((f64::from(step) + 0.5) / 4000.0));
        let drawn = draws.map(|bits| sampler.sample_token(&sampling, &logits, bits));
        assert_eq!(drawn.collect::<BTreeSet<_>>(), kept, "{temperature}");
    }
}

/// In a flat distribution the nucleus is nearly the whole vocabulary.
#[test]
fn top_p_keeps_a_wide_nucleus() {
    let logits: Vec<f32> = (0..5000).map(|id| (id % 7) as f32 * 1e-3).collect();
    let sampling = SamplingParams {
        top_p: 0.9,
        ..seeded(1.0)
    };
    let mut sampler = TokenSampler::default();
    let last = sampler.sample_token(&sampling, &logits, bits_at(1.0 - 1e-12));
    let values: Vec<f64> = logits.iter().map(|l| f64::from(*l)).collect();
    let (support, _) = probabilities(&sampling, &values);
    assert!(support.contains_key(&last) && support.len() > 4000);
}

/// The vocabulary is larger than a chunk of summed weights.
#[test]
fn a_uniform_draw_is_the_token_at_that_share() {
    let logits = vec![1.5f32; 4096];
    let mut sampler = TokenSampler::default();
    for token in 0..4096u32 {
        let bits = bits_at((f64::from(token) + 0.5) / 4096.0);
        assert_eq!(sampler.sample_token(&seeded(1.0), &logits, bits), token);
    }
}

/// Allows these tokens at every place; fails without any.
struct AllowList(Vec<TokenId>);

impl TokenMatcher for AllowList {
    fn allow(&mut self, mask: &mut TokenMask) -> Result<(), ConstraintError> {
        for token in &self.0 {
            mask.words_mut()[*token as usize / 32] |= 1 << (token % 32);
        }
        Ok(())
    }

    fn push(&mut self, token: TokenId) {
        assert!(self.0.contains(&token), "token {token} was not allowed");
    }

    fn valid_prefix(&mut self, _: &[TokenId]) -> usize {
        0
    }

    fn forced(&mut self) -> Vec<TokenId> {
        Vec::new()
    }
}

fn allowing(open: &OpenSlot, tokens: &[TokenId]) -> SamplingSlot {
    let matcher = Box::new(AllowList(tokens.to_vec()));
    SamplingSlot::open(open, Some(SlotConstraint::new(matcher)))
}

/// The other parameters would all choose token 3.
#[test]
fn a_constraint_comes_before_every_other_parameter() {
    let logits = [0.5, -2.0, 1.0, 9.0];
    let rules = SamplingParams {
        top_k: 1,
        top_p: 0.1,
        min_p: 0.9,
        top_n_sigma: 1.0,
        logit_bias: vec![(3, 100.0), (1, 2.5)],
        logprobs: Some(2),
        ..seeded(1.0)
    };
    for rules in [SamplingParams::greedy(), rules] {
        let has_bias = !rules.logit_bias.is_empty();
        let open = open(rules, &[3], &[]);
        let mut slot = allowing(&open, &[0, 1]);
        let drawn = TokenSampler::default().draw(&mut slot, &mut logits.to_vec());
        let (token, scores) = drawn.unwrap();
        assert_eq!(token, 0, "bias makes token 1 as likely as 0");
        // Scores are those of the model, the tokens that were not allowed included.
        if has_bias {
            let scores = scores.unwrap();
            assert_eq!(scores.top, [(3, 9.0), (2, 1.0)]);
            assert_eq!(scores.chosen, 0.5);
            assert!(scores.normalizer > 9.0);
        }
    }
}

#[test]
fn stop_tokens_are_banned_unless_nothing_else_is_allowed() {
    let early = OpenSlot {
        stop_tokens: Arc::from([2]),
        min_tokens: 4,
        ..open(SamplingParams::greedy(), &[0], &[])
    };
    let logits = [0.0, 1.0, 5.0, 9.0];
    let draw = |tokens: &[TokenId]| {
        let drawn =
            TokenSampler::default().draw(&mut allowing(&early, tokens), &mut logits.to_vec());
        drawn.map(|(token, _)| token)
    };
    assert_eq!(draw(&[1, 2]), Ok(1));
    assert_eq!(draw(&[2]), Ok(2));
    let none = ConstraintError::Unenforceable("it allows no token of the model here".to_owned());
    assert_eq!(draw(&[]), Err(DrawError::Constraint(none.clone())));
    // Beyond the vocabulary.
    assert_eq!(draw(&[20]), Err(DrawError::Constraint(none)));
}
