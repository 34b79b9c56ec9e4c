//! The largest error of a prompt's logits.
//!
//! Owns: the measure. Never: judges it.
//! Invariant: every prompt of the folder's `goldens.json` is measured; the file's expected outputs
//! are not read.

use super::BuildEngine;
use super::goldens::read;
use super::sequence::{BLOCK_TOKENS, DrivenSequence};
use crate::EngineLimits;
use cleave_domain::SamplingParams;
use std::path::Path;
use std::sync::Arc;

/// Logits compared per prompt, the likeliest of the second engine.
const COMPARED: usize = 8;
/// Blocks of a sequence.
const TABLE: u32 = 12;

/// Largest difference of the logits after a prompt between two engines, as a share of the largest
/// of these logits in the second engine. The second is the reference: its eight likeliest tokens of
/// each prompt are compared.
///
/// # Errors
/// The failure that prevented the comparison.
pub fn logit_error(dir: &Path, build: [BuildEngine<'_>; 2]) -> Result<f32, String> {
    let limits = EngineLimits {
        block_tokens: BLOCK_TOKENS,
        blocks_count: TABLE,
        states_count: 0,
        windows_count: 0,
        slots_count: 1,
        step_tokens_max: 128,
    };
    let prompts = read(dir)?;
    let mut logits = build.map(|_| Vec::new());
    for (build, logits) in build.iter().zip(&mut logits) {
        let mut engine = build(dir, limits)?;
        let sampling = Arc::new(SamplingParams {
            logprobs: Some(engine.describe().vocab_size),
            ..SamplingParams::greedy()
        });
        for golden in &prompts {
            let mut sequence = DrivenSequence::new(0, &golden.prompt, &sampling, 0..TABLE);
            sequence.run(&mut *engine, 128, 1)?;
            let scores = sequence.drawn.pop().and_then(|drawn| drawn.scores);
            logits.push(scores.ok_or("no scores")?.top);
        }
    }
    let [found, reference] = logits;
    let mut most = 0.0_f32;
    for (found, reference) in found.iter().zip(&reference) {
        let largest = reference.iter().map(|(_, logit)| logit.abs());
        let largest = largest.fold(f32::MIN_POSITIVE, f32::max);
        for (token, logit) in reference.iter().take(COMPARED) {
            let same = found.iter().find(|(other, _)| other == token);
            let (_, found) = same.ok_or_else(|| format!("token {token} has no logit"))?;
            most = most.max((found - logit).abs() / largest);
        }
    }
    Ok(most)
}
