//! Agreement of two devices that round differently, within a tolerance.
//!
//! Owns: the comparison. Never: compares two answers beyond the token where they diverge.
//! Invariant: every prompt of the folder's `goldens.json` is compared; the file's expected outputs
//! are not read.

use super::BuildEngine;
use super::goldens::read;
use super::sequence::{BLOCK_TOKENS, DrivenSequence};
use crate::EngineLimits;
use cleave_domain::{SampledToken, SamplingParams, TokenScores};
use std::path::Path;
use std::sync::Arc;

/// Tokens drawn after each prompt.
const DRAWN: usize = 12;
/// Logits compared per token.
const TOP: u32 = 8;
/// Blocks of a sequence.
const TABLE: u32 = 12;

/// Checks that both engines' likeliest logits differ by at most `tolerance` times the largest of
/// them, and that greedy tokens are equal up to the first near tie.
///
/// # Errors
/// The first difference; or if fewer than half of the tokens could be compared.
pub fn agreement(dir: &Path, build: [BuildEngine<'_>; 2], tolerance: f32) -> Result<(), String> {
    let limits = EngineLimits {
        block_tokens: BLOCK_TOKENS,
        blocks_count: TABLE,
        states_count: 0,
        slots_count: 1,
        step_tokens_max: 128,
        windows_count: 0,
    };
    let sampling = Arc::new(SamplingParams {
        logprobs: Some(TOP),
        ..SamplingParams::greedy()
    });
    let prompts = read(dir)?;
    let mut answers = build.map(|_| Vec::new());
    for (build, answers) in build.iter().zip(&mut answers) {
        let mut engine = build(dir, limits)?;
        for golden in &prompts {
            let mut sequence = DrivenSequence::new(0, &golden.prompt, &sampling, 0..TABLE);
            sequence.run(&mut *engine, 128, DRAWN)?;
            answers.push(sequence.drawn);
        }
    }
    let [first, second] = answers;
    let mut compared = 0;
    for (index, (first, second)) in first.iter().zip(&second).enumerate() {
        compared += compare_answers(first, second, tolerance)
            .map_err(|difference| format!("{}: prompt {index}: {difference}", dir.display()))?;
    }
    let all = prompts.len() * DRAWN;
    if compared * 2 >= all {
        Ok(())
    } else {
        Err(format!("{compared} of {all} tokens before answers part"))
    }
}

/// Compares two answers; returns the number of tokens up to the point where they diverge.
fn compare_answers(
    first: &[SampledToken],
    second: &[SampledToken],
    tolerance: f32,
) -> Result<usize, String> {
    for (at, (first, second)) in first.iter().zip(second).enumerate() {
        let tops = [&first.scores, &second.scores].map(|scores| scores.as_ref().ok_or("no scores"));
        let [first_scores, second_scores] = tops;
        let (first_scores, second_scores) = (first_scores?, second_scores?);
        let largest = second_scores
            .top
            .first()
            .map_or(0.0, |(_, logit)| logit.abs());
        let most = tolerance * largest;
        // Only the upper half of the list: a token near its end on one side may be beyond it on the
        // other.
        for (token, logit) in first_scores.top.iter().take(TOP as usize / 2) {
            let other = logit_of(second_scores, *token);
            if (logit - other).abs() > most {
                return Err(format!(
                    "token {at}: the logit of {token} is {logit} and {other}, of at most {largest}"
                ));
            }
        }
        if first.token != second.token {
            // A near tie, since the logits above are close. From here on the two texts differ.
            return Ok(at + 1);
        }
    }
    Ok(first.len())
}

/// A token's logit; for a token that is not listed, the smallest listed one.
fn logit_of(scores: &TokenScores, token: u32) -> f32 {
    let found = scores.top.iter().find(|(other, _)| *other == token);
    let last = scores.top.last();
    found.or(last).map_or(f32::NAN, |(_, logit)| *logit)
}
