//! Two devices that round differently say nearly the same.
//!
//! Owns: what "nearly" is. Never: follows two answers beyond the token where they part.
//! Invariant: every prompt of the folder's `goldens.json` is compared; nothing else of that file is looked at.

use super::Build;
use super::goldens::read;
use super::sequence::{BLOCK_TOKENS, Sequence};
use crate::EngineLimits;
use cleave_domain::{Sampled, Sampling, Scores};
use std::path::Path;
use std::sync::Arc;

/// Tokens drawn after each prompt.
const DRAWN: usize = 12;
/// Logits that are compared of each.
const TOP: u32 = 8;
/// Blocks of a sequence.
const TABLE: u32 = 12;

/// Demands that both engines' likeliest logits differ by no more than `tolerance` times the largest of them, and that
/// greedy tokens are equal until two are that close.
///
/// # Errors
/// The first difference, or if hardly any tokens could be compared.
pub fn agreement(dir: &Path, build: [Build<'_>; 2], tolerance: f32) -> Result<(), String> {
    let limits = EngineLimits {
        block_tokens: BLOCK_TOKENS,
        blocks_count: TABLE,
        slots_count: 1,
        step_tokens_max: 128,
    };
    let sampling = Arc::new(Sampling {
        logprobs: Some(TOP),
        ..Sampling::greedy()
    });
    let prompts = read(dir)?;
    let mut answers = build.map(|_| Vec::new());
    for (build, answers) in build.iter().zip(&mut answers) {
        let mut engine = build(dir, limits)?;
        for golden in &prompts {
            let mut sequence = Sequence::new(0, &golden.prompt, &sampling, 0..TABLE);
            sequence.run(&mut *engine, 128, DRAWN)?;
            answers.push(sequence.drawn);
        }
    }
    let [ours, theirs] = answers;
    let mut compared = 0;
    for (index, (ours, theirs)) in ours.iter().zip(&theirs).enumerate() {
        compared += same(ours, theirs, tolerance)
            .map_err(|difference| format!("{}: prompt {index}: {difference}", dir.display()))?;
    }
    let all = prompts.len() * DRAWN;
    match compared * 2 >= all {
        true => Ok(()),
        false => Err(format!("{compared} of {all} tokens before answers part")),
    }
}

/// How many tokens have the same before them.
fn same(ours: &[Sampled], theirs: &[Sampled], tolerance: f32) -> Result<usize, String> {
    for (at, (ours, theirs)) in ours.iter().zip(theirs).enumerate() {
        let tops = [&ours.scores, &theirs.scores].map(|scores| scores.as_ref().ok_or("no scores"));
        let [our_scores, their_scores] = tops;
        let (our_scores, their_scores) = (our_scores?, their_scores?);
        let largest = their_scores
            .top
            .first()
            .map_or(0.0, |(_, logit)| logit.abs());
        let most = tolerance * largest;
        // The likeliest are likely on both sides; the others may be beyond the list's end.
        for (token, logit) in our_scores.top.iter().take(TOP as usize / 2) {
            let other = logit_of(their_scores, *token);
            if (logit - other).abs() > most {
                return Err(format!(
                    "token {at}: the logit of {token} is {logit} and {other}, of at most {largest}"
                ));
            }
        }
        if ours.token != theirs.token {
            // A near tie, as was just seen: from here on the answers are of different texts.
            return Ok(at + 1);
        }
    }
    Ok(ours.len())
}

/// A token's logit; of one that is not listed the least that is.
fn logit_of(scores: &Scores, token: u32) -> f32 {
    let found = scores.top.iter().find(|(other, _)| *other == token);
    let last = scores.top.last();
    found.or(last).map_or(f32::NAN, |(_, logit)| *logit)
}
