//! A device that draws draws what the host does.
//!
//! Owns: logits of many kinds, with ties and without, and rules of every combination.
//! Never: tolerates a difference.
//! Invariant: device and host see the same bits: logits are the columns of a matrix, picked by rows of zeros and
//! one 1.

use super::dice::Dice;
use crate::checkpoint::StoredTensor;
use crate::ops::{DrawRule, Holds, Ops, Pack};
use crate::sampling::{Sampler, Slot};
use cleave_domain::{OpenSlot, Sampling, SlotIndex, TokenId};
use std::sync::Arc;

/// Sets a buffer's values, `(rows, width)`.
pub type SetRows<'a, O> = &'a dyn Fn(&O, &mut <O as Ops>::Rows, &[f32]) -> Result<(), String>;

/// Rows drawn at once.
const ROWS: usize = 8;
/// Calls for each vocabulary.
const ROUNDS: u64 = 12;
/// Around the sizes in which kernels cut a vocabulary, and one as large as real ones.
const VOCABULARIES: [usize; 7] = [1, 2, 45, 513, 2049, 9001, 128_256];

/// Demands of an f32 device the tokens that the host draws from the same logits.
///
/// # Errors
/// The first difference.
pub fn draws<O: Ops>(ops: &mut O, pack: &O::Pack, set: SetRows<'_, O>) -> Result<(), String> {
    for vocab in VOCABULARIES {
        let rounds = match vocab {
            10_000.. => 2,
            _ => ROUNDS,
        };
        for round in 0..rounds {
            let mut dice = Dice(vocab as u64 * 1000 + round + 1);
            round_of(ops, pack, set, (vocab, &mut dice))
                .map_err(|difference| format!("vocabulary {vocab}, round {round}: {difference}"))?;
        }
    }
    Ok(())
}

fn round_of<O: Ops>(
    ops: &mut O,
    pack: &O::Pack,
    set: SetRows<'_, O>,
    (vocab, dice): (usize, &mut Dice),
) -> Result<(), String> {
    let told = |error: crate::EngineError| error.to_string();
    // Column `row` holds the logits of row `row`.
    let table: Vec<f32> = (0..vocab * ROWS).map(|_| dice.logit()).collect();
    let stored = StoredTensor::from_f32("head", (vocab, ROWS), &table);
    let matrix = pack.matrix(&[stored.into()], None).map_err(told)?;
    pack.finish().map_err(told)?;
    let mut picks = ops.rows(ROWS, ROWS, Holds::Activations).map_err(told)?;
    let ones: Vec<f32> = (0..ROWS * ROWS)
        .map(|at| f32::from(u8::from(at % (ROWS + 1) == 0)))
        .collect();
    set(ops, &mut picks, &ones)?;
    let opens: Vec<OpenSlot> = (0..ROWS).map(|_| dice.open(vocab)).collect();
    let rule = |open: &OpenSlot| {
        let slot = Slot::open(open);
        slot.rule(slot.known())
    };
    let rules: Vec<DrawRule> = opens.iter().map(rule).collect();
    let mut tokens = Vec::new();
    ops.draw(&matrix, &rules, &picks).map_err(told)?;
    ops.drawn(&mut tokens).map_err(told)?;
    let mut sampler = Sampler::default();
    for (row, open) in opens.iter().enumerate() {
        let mut logits: Vec<f32> = (0..vocab).map(|token| table[token * ROWS + row]).collect();
        let drawn = sampler.draw(&mut Slot::open(open), &mut logits);
        let expected = drawn.ok().map(|(token, _)| token);
        if tokens.get(row) != Some(&expected) {
            let (got, rule) = (tokens.get(row), &open.sampling);
            return Err(format!("row {row}: {got:?}, not {expected:?}, by {rule:?}"));
        }
    }
    Ok(())
}

impl Dice {
    /// From a bell of some width, sometimes on a coarse grid, so that ties are many, rarely not a number.
    fn logit(&mut self) -> f32 {
        let bell = (0..4).map(|_| self.share() - 0.5).sum::<f32>() * 12.0;
        match self.below(8) {
            0..3 => (bell * 2.0).round() / 2.0,
            3 => 0.0,
            _ => bell,
        }
    }

    fn open(&mut self, vocab: usize) -> OpenSlot {
        let token = |dice: &mut Self| dice.below(vocab as u64) as TokenId;
        let tokens = |dice: &mut Self, most: u64| -> Vec<TokenId> {
            (0..dice.below(most)).map(|_| token(dice)).collect()
        };
        let penalised = self.chance(0.5);
        let sampling = Sampling {
            temperature: match self.chance(0.15) {
                true => 0.0,
                false => 0.3 + 1.5 * self.share(),
            },
            // None, few, and as many as there may be: kernels look for the last of few in another way.
            top_k: match self.below(6) {
                0..3 => 0,
                3 | 4 => 1 + self.below(vocab.min(1200) as u64) as u32,
                _ => 1 + self.below(vocab as u64) as u32,
            },
            top_p: match self.chance(0.5) {
                true => 1.0,
                false => 0.02 + 0.97 * self.share(),
            },
            min_p: match self.chance(0.6) {
                true => 0.0,
                false => 0.3 * self.share(),
            },
            repetition_penalty: match penalised {
                true => 0.8 + self.share(),
                false => 1.0,
            },
            presence_penalty: f32::from(u8::from(penalised)) * self.share(),
            frequency_penalty: f32::from(u8::from(penalised)) * (self.share() - 0.3),
            logit_bias: match self.chance(0.3) {
                true => (0..3)
                    .map(|_| (token(self), 6.0 * self.share() - 3.0))
                    .collect(),
                false => Vec::new(),
            },
            seed: self.next(),
            ..Sampling::greedy()
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
        }
    }
}
