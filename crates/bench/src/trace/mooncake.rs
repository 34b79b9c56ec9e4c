//! Mooncake's traces: times, lengths and the prefixes that requests share.
//!
//! Owns: the format of kvcache-ai/Mooncake, `FAST25-release/traces`. Never: changes a length.
//! Invariant: block `id` has one content; what is left of a prompt after its blocks is its own.

use super::{Lines, Row};
use crate::prompt::{Part, Prompt, own_key, shared_key};
use anyhow::{Context, ensure};
use cleave_domain::Time;
use serde::Deserialize;

/// Tokens of a block that one hash stands for.
const BLOCK_TOKENS: u32 = 512;
/// Shared blocks of a trace are those of its one class.
const CLASS: u32 = 0;

#[derive(Deserialize)]
struct Line {
    /// Milliseconds.
    timestamp: f64,
    input_length: u32,
    output_length: u32,
    #[serde(default)]
    hash_ids: Vec<u64>,
}

pub(super) fn read(first: &str, lines: Lines<'_>) -> anyhow::Result<Vec<Row>> {
    let mut rows = vec![row(first, 0).context("line 1")?];
    for line in lines {
        let (number, text) = line?;
        let row = row(&text, rows.len() as u64).with_context(|| format!("line {number}"))?;
        rows.push(row);
    }
    super::in_order(rows)
}

fn row(text: &str, index: u64) -> anyhow::Result<Row> {
    let line: Line = serde_json::from_str(text).context(
        "expected `timestamp` (ms), `input_length`, `output_length` and perhaps `hash_ids`",
    )?;
    let millis = line.timestamp;
    ensure!(
        (0.0..1e14).contains(&millis),
        "timestamp {millis} is not 0 or above"
    );
    ensure!(line.input_length > 0, "input_length is 0");
    Ok(Row {
        at: Time::from_nanos((millis * 1e6) as u64),
        prompt: prompt(&line, index),
        output: line.output_length.max(1),
    })
}

fn prompt(line: &Line, index: u64) -> Prompt {
    let mut left = line.input_length;
    let mut parts = Vec::with_capacity(line.hash_ids.len());
    for id in &line.hash_ids {
        let tokens = left.min(BLOCK_TOKENS);
        if tokens == 0 {
            break;
        }
        parts.push(Part {
            key: shared_key(CLASS, *id),
            tokens,
        });
        left -= tokens;
    }
    if left > 0 {
        parts.push(Part {
            key: own_key(index),
            tokens: left,
        });
    }
    Prompt(parts)
}
