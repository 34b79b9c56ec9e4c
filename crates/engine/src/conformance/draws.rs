//! Tokens drawn on a device equal those that the host draws from the same logits.
//!
//! Owns: logits of many kinds, with and without ties, sampling rules in every combination, and
//! masks.
//! Never: tolerates a difference.
//! Invariant: device and host see the same logits to the bit: the logits are columns of a matrix,
//! and each input row is a unit vector that selects one.

use super::rng::ConformanceRng;
use crate::constraint::{ConstraintError, SlotConstraint, TokenMask, TokenMatcher};
use crate::ops::{BufferRole, DrawRule, Head, MaskedDraw, Ops, WeightLoader};
use crate::sampling::{SamplingSlot, TokenSampler};
use cleave_checkpoint::StoredTensor;
use cleave_domain::{OpenSlot, SamplingParams, SlotIndex, TokenId};
use std::sync::Arc;

/// Sets a buffer's values, `(rows, width)`.
pub type SetRows<'a, O> = &'a dyn Fn(&O, &mut <O as Ops>::Rows, &[f32]) -> Result<(), String>;

/// Rows of logits in a draw.
const ROWS: usize = 8;
/// Draws per vocabulary below 10,000 tokens.
const ROUNDS: u64 = 12;
/// Sizes around those in which kernels divide a vocabulary, and one as large as a real vocabulary.
const VOCABULARIES: [usize; 7] = [1, 2, 45, 513, 2049, 9001, 128_256];

/// Checks that an f32 device draws the same tokens as the host from the same logits.
///
/// # Errors
/// The first difference.
pub fn draws_match_host<O: Ops>(
    ops: &mut O,
    pack: &O::Pack,
    set: SetRows<'_, O>,
) -> Result<(), String> {
    for vocab in VOCABULARIES {
        let rounds = match vocab {
            10_000.. => 2,
            _ => ROUNDS,
        };
        for round in 0..rounds {
            let mut rng = ConformanceRng::new(vocab as u64 * 1000 + round + 1);
            round_of(ops, pack, set, vocab, &mut rng)
                .map_err(|difference| format!("vocabulary {vocab}, round {round}: {difference}"))?;
        }
    }
    Ok(())
}

fn round_of<O: Ops>(
    ops: &mut O,
    pack: &O::Pack,
    set: SetRows<'_, O>,
    vocab: usize,
    rng: &mut ConformanceRng,
) -> Result<(), String> {
    let to_text = |error: crate::EngineError| error.to_string();
    // Column `row` holds the logits of row `row`.
    let table: Vec<f32> = (0..vocab * ROWS).map(|_| rng.logit()).collect();
    let stored = StoredTensor::from_f32("head", vocab, ROWS, &table);
    let matrix = pack.matrix(&[stored.into()], None).map_err(to_text)?;
    pack.finish().map_err(to_text)?;
    let mut picks = ops
        .rows(ROWS, ROWS, BufferRole::Activations)
        .map_err(to_text)?;
    let ones: Vec<f32> = (0..ROWS * ROWS)
        .map(|at| f32::from(u8::from(at % (ROWS + 1) == 0)))
        .collect();
    set(ops, &mut picks, &ones)?;
    let opens: Vec<OpenSlot> = (0..ROWS).map(|_| rng.open(vocab)).collect();
    let masks: Vec<Option<TokenMask>> = opens.iter().map(|open| rng.mask(vocab, open)).collect();
    let slot_of = |row: usize| {
        let allowed = masks[row].clone().map(|mask| Box::new(AllowedTokens(mask)));
        SamplingSlot::open(&opens[row], allowed.map(|mask| SlotConstraint::new(mask)))
    };
    let rule = |row: usize| {
        let slot = slot_of(row);
        slot.draw_rule(slot.tokens_count())
    };
    let rules: Vec<Option<DrawRule>> = (0..ROWS)
        .map(|row| masks[row].is_none().then(|| rule(row)))
        .collect();
    let masked = (0..ROWS).filter_map(|row| masks[row].as_ref().map(|mask| (row, mask)));
    let masked: Vec<MaskedDraw<'_>> = masked
        .map(|(row, mask)| MaskedDraw {
            row: row as u32,
            rule: slot_of(row)
                .masked_rule(vocab)
                .expect("its mask is not empty"),
            mask,
        })
        .collect();
    let mut tokens = Vec::new();
    let head = Head::uncapped(&matrix);
    ops.queue_draw(head, &rules, &picks).map_err(to_text)?;
    if !masked.is_empty() {
        ops.queue_masked_draw(&masked).map_err(to_text)?;
    }
    ops.fetch_drawn(&mut tokens).map_err(to_text)?;
    let mut sampler = TokenSampler::default();
    for (row, open) in opens.iter().enumerate() {
        let mut logits: Vec<f32> = (0..vocab).map(|token| table[token * ROWS + row]).collect();
        let drawn = sampler.draw(&mut slot_of(row), &mut logits);
        let expected = drawn.ok().map(|(token, _)| token);
        if tokens.get(row) != Some(&expected) {
            let (got, rule) = (tokens.get(row), &open.sampling);
            return Err(format!("row {row}: {got:?}, not {expected:?}, by {rule:?}"));
        }
    }
    Ok(())
}

/// A constraint that allows the same tokens at every place.
struct AllowedTokens(TokenMask);

impl TokenMatcher for AllowedTokens {
    fn allow(&mut self, mask: &mut TokenMask) -> Result<(), ConstraintError> {
        mask.words_mut().copy_from_slice(self.0.words());
        Ok(())
    }

    fn push(&mut self, _: TokenId) {}

    fn valid_prefix(&mut self, tokens: &[TokenId]) -> usize {
        let allowed = tokens.iter().take_while(|token| self.0.allows(**token));
        allowed.count()
    }

    fn forced(&mut self) -> Vec<TokenId> {
        Vec::new()
    }
}

impl ConformanceRng {
    /// No mask, or one of the stop tokens alone, of a few tokens, or of many.
    fn mask(&mut self, vocab: usize, open: &OpenSlot) -> Option<TokenMask> {
        if self.chance(0.5) {
            return None;
        }
        let mut mask = TokenMask::none_of(vocab);
        let mut allow = |token: TokenId| mask.words_mut()[token as usize / 32] |= 1 << (token % 32);
        let kind = self.below(4);
        match kind {
            0 => open.stop_tokens.iter().copied().for_each(&mut allow),
            1 => (0..5).for_each(|_| allow(self.below(vocab as u64) as TokenId)),
            _ => {
                let share = self.share();
                (0..vocab as TokenId)
                    .filter(|_| self.chance(share))
                    .for_each(&mut allow);
            }
        }
        (!mask.is_empty(vocab as u32)).then_some(mask)
    }

    /// A logit from a bell-shaped distribution, often rounded to a coarse grid or 0, so that ties
    /// are frequent.
    fn logit(&mut self) -> f32 {
        let bell = (0..4).map(|_| self.share() - 0.5).sum::<f32>() * 12.0;
        match self.below(8) {
            0..3 => (bell * 2.0).round() / 2.0,
            3 => 0.0,
            _ => bell,
        }
    }

    fn open(&mut self, vocab: usize) -> OpenSlot {
        let token = |rng: &mut Self| rng.below(vocab as u64) as TokenId;
        let tokens = |rng: &mut Self, most: u64| -> Vec<TokenId> {
            (0..rng.below(most)).map(|_| token(rng)).collect()
        };
        let penalised = self.chance(0.5);
        let sampling = SamplingParams {
            temperature: if self.chance(0.15) {
                0.0
            } else {
                0.3 + 1.5 * self.share()
            },
            // None, few, or up to the vocabulary: kernels use another algorithm for a small
            // `top_k`.
            top_k: match self.below(6) {
                0..3 => 0,
                3 | 4 => 1 + self.below(vocab.min(1200) as u64) as u32,
                _ => 1 + self.below(vocab as u64) as u32,
            },
            top_p: if self.chance(0.5) {
                1.0
            } else {
                0.02 + 0.97 * self.share()
            },
            min_p: if self.chance(0.6) {
                0.0
            } else {
                0.3 * self.share()
            },
            top_n_sigma: if self.chance(0.6) {
                0.0
            } else {
                4.0 * self.share()
            },
            repetition_penalty: if penalised { 0.8 + self.share() } else { 1.0 },
            presence_penalty: f32::from(u8::from(penalised)) * self.share(),
            frequency_penalty: f32::from(u8::from(penalised)) * (self.share() - 0.3),
            logit_bias: if self.chance(0.3) {
                (0..3)
                    .map(|_| (token(self), 6.0 * self.share() - 3.0))
                    .collect()
            } else {
                Vec::new()
            },
            seed: self.next(),
            ..SamplingParams::greedy()
        };
        let mut prompt = tokens(self, 40);
        prompt.push(token(self));
        OpenSlot {
            slot: SlotIndex(0),
            sampling: Arc::new(sampling),
            prompt: prompt.into(),
            output: tokens(self, 20),
            stop_tokens: tokens(self, 3).into(),
            min_tokens: self.below(25) as u32,
            adapter: None,
        }
    }
}
