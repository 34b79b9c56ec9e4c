//! Agreement with the vectors of sentence-transformers.
//!
//! Owns: reading `testdata/vectors`. Never: tokenizes: the file has the tokens.
//! Invariant: every text that is not left out for its length is compared, by every pooling.

use super::BuildEngine;
use super::goldens::{LOGIT_TOLERANCE, read_json};
use super::pooling::alone;
use super::sequence::BLOCK_TOKENS;
use crate::EngineLimits;
use cleave_domain::{Pooling, TokenId};
use serde_json::Value;
use std::path::Path;

/// Tokens of a step: the longest text takes several.
const STEP_TOKENS: u32 = 100;

/// Compares an f32 engine with the vectors of the checkpoint's file in `testdata/vectors`, where a
/// normalised vector is compared with the engine's divided by its length. Texts of more than
/// `tokens_max` tokens are left out, for engines that take seconds for them.
///
/// # Errors
/// The first difference above 1e-3, or the failure that prevented the comparison.
pub fn vectors(dir: &Path, tokens_max: usize, build: BuildEngine<'_>) -> Result<(), String> {
    let goldens = read(dir)?;
    let tokens = |row: &Vec<f64>| row.iter().map(|token| *token as TokenId).collect();
    let prompts: Vec<Vec<TokenId>> = rows(&goldens["prompts"])?.iter().map(tokens).collect();
    let is_normalised = goldens["normalised"] == true;
    let longest = prompts.iter().map(Vec::len).max();
    let longest = longest.ok_or("no prompts")? as u32;
    let mut engine = build(
        dir,
        EngineLimits {
            block_tokens: BLOCK_TOKENS,
            blocks_count: longest.div_ceil(BLOCK_TOKENS),
            states_count: 0,
            slots_count: 1,
            step_tokens_max: STEP_TOKENS,
            windows_count: 0,
        },
    )?;
    for (pooling, name) in [
        (Pooling::LastToken, "lasttoken"),
        (Pooling::Mean, "mean"),
        (Pooling::FirstToken, "cls"),
    ] {
        let expected = rows(&goldens["poolings"][name])?;
        if expected.len() != prompts.len() {
            return Err(format!("{name}: {} vectors", expected.len()));
        }
        let pairs = prompts.iter().zip(&expected).enumerate();
        for (index, (prompt, expected)) in pairs.filter(|(_, (p, _))| p.len() <= tokens_max) {
            let vector = alone(&mut *engine, prompt, &pooling, STEP_TOKENS as usize)?;
            let scale = if is_normalised {
                1.0 / length(&vector)
            } else {
                1.0
            };
            let computed = vector.iter().map(|value| value * scale);
            let mut pairs = computed.zip(expected.iter().map(|value| *value as f32));
            let is_close = pairs.all(|(a, b)| (a - b).abs() <= LOGIT_TOLERANCE);
            if vector.len() != expected.len() || !is_close {
                let folder = dir.display();
                return Err(format!("{folder}: {name} of prompt {index} differs"));
            }
        }
    }
    Ok(())
}

fn length(vector: &[f32]) -> f32 {
    vector.iter().map(|value| value * value).sum::<f32>().sqrt()
}

fn read(dir: &Path) -> Result<Value, String> {
    let name = dir.file_name().ok_or("a folder without a name")?;
    let file = dir.with_file_name("vectors").join(name);
    read_json(&file.with_extension("json"))
}

/// The rows of a member.
fn rows(member: &Value) -> Result<Vec<Vec<f64>>, String> {
    serde_json::from_value(member.clone()).map_err(|error| error.to_string())
}
