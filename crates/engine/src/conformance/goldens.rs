//! Agreement with the goldens of a reference implementation.
//!
//! Owns: reading `goldens.json`, and the tolerance of logits.
//! Never: accepts another token: the goldens' paths have no near ties.
//! Invariant: every prompt of the file is compared.

use super::BuildEngine;
use super::sequence::{BLOCK_TOKENS, DrivenSequence};
use crate::EngineLimits;
use cleave_domain::{SampledToken, SamplingParams, TokenScores};
use serde_json::Value;
use std::path::Path;
use std::sync::Arc;

/// Tolerance of logits in f32: the reference sums in another order.
pub(super) const LOGIT_TOLERANCE: f32 = 1e-3;

/// One prompt of `goldens.json`.
#[derive(Clone, Debug)]
pub(super) struct Golden {
    pub(super) prompt: Vec<u32>,
    tokens: Vec<u32>,
    pub(super) first_top: Vec<(u32, f32)>,
    last_top: Vec<(u32, f32)>,
}

impl Golden {
    /// Tokens that the reference drew.
    pub(super) fn tokens_count(&self) -> usize {
        self.tokens.len()
    }

    /// Most likely tokens to ask for: a few more than the golden has, so that a tie at the end of
    /// the list cannot leave an id out.
    pub(super) fn top_count(&self) -> usize {
        self.first_top.len() + 4
    }
}

/// Compares an f32 engine with the folder's `goldens.json`: greedy tokens must be equal, and the
/// top logits of the first and the last of them within 1e-3. Returns the largest difference of a
/// logit.
///
/// # Errors
/// The first difference, or the failure that prevented the comparison.
pub fn goldens(dir: &Path, build: BuildEngine<'_>) -> Result<f32, String> {
    let list = read(dir)?;
    let mut most = 0.0_f32;
    let mut engine = build(
        dir,
        EngineLimits {
            block_tokens: BLOCK_TOKENS,
            blocks_count: 16,
            states_count: 0,
            slots_count: 1,
            step_tokens_max: 256,
            windows_count: 0,
        },
    )?;
    for (index, golden) in list.iter().enumerate() {
        let sampling = Arc::new(SamplingParams {
            logprobs: Some(golden.top_count() as u32),
            ..SamplingParams::greedy()
        });
        let mut sequence = DrivenSequence::new(0, &golden.prompt, &sampling, 0..16);
        sequence.run(&mut *engine, 256, golden.tokens.len())?;
        let difference = compare(golden, &sequence.drawn)
            .map_err(|difference| format!("{}: prompt {index}: {difference}", dir.display()))?;
        most = most.max(difference);
    }
    Ok(most)
}

/// Compares an answer with its golden; returns the largest difference of a logit.
pub(super) fn compare(golden: &Golden, drawn: &[SampledToken]) -> Result<f32, String> {
    let first = compare_top("first", drawn.first(), &golden.first_top)?;
    let tokens: Vec<u32> = drawn.iter().map(|sampled| sampled.token).collect();
    if tokens != golden.tokens {
        return Err(format!("tokens {tokens:?}, not {:?}", golden.tokens));
    }
    let last = compare_top("last", drawn.last(), &golden.last_top)?;
    Ok(first.max(last))
}

fn compare_top(
    context: &str,
    sampled: Option<&SampledToken>,
    expected: &[(u32, f32)],
) -> Result<f32, String> {
    let mut most = 0.0_f32;
    let scores: Option<&TokenScores> = sampled.and_then(|sampled| sampled.scores.as_ref());
    let top = &scores.ok_or("no scores")?.top;
    for (id, logit) in expected {
        let computed = top.iter().find(|(other, _)| other == id);
        match computed {
            Some((_, computed)) if (computed - logit).abs() <= LOGIT_TOLERANCE => {
                most = most.max((computed - logit).abs());
            }
            Some((_, computed)) => {
                return Err(format!(
                    "{context} logit of {id} is {computed}, not {logit}"
                ));
            }
            None => return Err(format!("{context}: {id} is not among the top")),
        }
    }
    Ok(most)
}

/// Limit of a file of goldens, in bytes.
const GOLDENS_BYTES_MAX: u64 = 64 << 20;

/// Reads a file of goldens.
pub(super) fn read_json(file: &Path) -> Result<Value, String> {
    let at = |problem: String| format!("{}: {problem}", file.display());
    let bytes =
        cleave_files::read(file, GOLDENS_BYTES_MAX).map_err(|error| at(error.to_string()))?;
    serde_json::from_slice(&bytes).map_err(|error| at(error.to_string()))
}

/// Reads the goldens of `goldens.json`.
pub(super) fn read(dir: &Path) -> Result<Vec<Golden>, String> {
    let file = dir.join("goldens.json");
    let json = read_json(&file)?;
    let prompts = json["prompts"].as_array();
    let list: Option<Vec<Golden>> =
        prompts.and_then(|prompts| prompts.iter().map(golden).collect());
    match list {
        Some(list) if !list.is_empty() => Ok(list),
        _ => {
            let file = file.display();
            Err(format!("{file}: prompts are missing or misshapen"))
        }
    }
}

fn golden(value: &Value) -> Option<Golden> {
    let ids = |name: &str| -> Option<Vec<u32>> {
        let list = value[name].as_array()?;
        list.iter()
            .map(|id| u32::try_from(id.as_u64()?).ok())
            .collect()
    };
    let top = |name: &str| -> Option<Vec<(u32, f32)>> {
        let list = value[name].as_array()?;
        list.iter()
            .map(|pair| {
                let id = u32::try_from(pair[0].as_u64()?).ok()?;
                Some((id, pair[1].as_f64()? as f32))
            })
            .collect()
    };
    Some(Golden {
        prompt: ids("prompt_tokens")?,
        tokens: ids("tokens")?,
        first_top: top("first_top_logits")?,
        last_top: top("last_top_logits")?,
    })
}
