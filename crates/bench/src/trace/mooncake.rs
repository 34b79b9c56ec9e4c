//! Mooncake's traces: times, lengths and shared prefixes.
//!
//! Owns: the format of kvcache-ai/Mooncake, `FAST25-release/traces`. Never: changes a length.
//! Invariant: block `id` has one content; the rest of a prompt after its blocks belongs to it
//! alone.

use super::{TraceLines, TraceRow};
use crate::prompt::{PromptPart, PromptPlan, shared_key, unique_key};
use anyhow::{Context, ensure};
use cleave_domain::Time;
use serde::Deserialize;

/// Tokens of a block that one hash stands for.
const BLOCK_TOKENS: u32 = 512;
/// Key class of a trace's shared blocks.
const CLASS: u32 = 0;

#[derive(Deserialize)]
struct MooncakeLine {
    /// Arrival time in milliseconds.
    timestamp: f64,
    input_length: u32,
    output_length: u32,
    #[serde(default)]
    hash_ids: Vec<u64>,
}

pub(super) fn read(first: &str, lines: TraceLines<'_>) -> anyhow::Result<Vec<TraceRow>> {
    let mut rows = vec![row(first, 0).context("line 1")?];
    for line in lines {
        let (number, text) = line?;
        let row = row(&text, rows.len() as u64).with_context(|| format!("line {number}"))?;
        rows.push(row);
    }
    super::sorted_from_zero(rows)
}

fn row(text: &str, index: u64) -> anyhow::Result<TraceRow> {
    let line: MooncakeLine = serde_json::from_str(text).context(
        "expected `timestamp` (ms), `input_length`, `output_length` and perhaps `hash_ids`",
    )?;
    let millis = line.timestamp;
    ensure!(
        (0.0..1e14).contains(&millis),
        "timestamp {millis} is not 0 or above"
    );
    ensure!(line.input_length > 0, "input_length is 0");
    Ok(TraceRow {
        at: Time::from_nanos((millis * 1e6) as u64),
        prompt: prompt(&line, index),
        output: line.output_length.max(1),
    })
}

fn prompt(line: &MooncakeLine, index: u64) -> PromptPlan {
    let mut left = line.input_length;
    let mut parts = Vec::with_capacity(line.hash_ids.len());
    for id in &line.hash_ids {
        let tokens = left.min(BLOCK_TOKENS);
        if tokens == 0 {
            break;
        }
        parts.push(PromptPart {
            key: shared_key(CLASS, *id),
            tokens,
        });
        left -= tokens;
    }
    if left > 0 {
        parts.push(PromptPart {
            key: unique_key(index),
            tokens: left,
        });
    }
    PromptPlan(parts)
}
