//! Vectors of an engine that computes no tensors.
//!
//! Owns: the hidden state that stands for a token. Never: reads the pool.
//! Invariant: the parts of a prompt give the vector of the whole.

use crate::KvHash;
use cleave_domain::{Pooling, Segment, SegmentPooling, TokenId};
use std::sync::Arc;

/// The hidden state that stands for a token: a number below 2^20, so that sums are exact.
fn hidden_of(cell: KvHash) -> f64 {
    (cell.0 & 0xf_ffff) as f64
}

/// The vector of a prompt, `(1)`: what an engine that runs it as one chunk gives.
pub fn pooled_vector(pooling: &Pooling, prompt: &[TokenId]) -> Arc<[f32]> {
    let mut last = KvHash::default();
    let cells: Vec<f64> = prompt
        .iter()
        .map(|token| {
            last = last.extend(*token);
            hidden_of(last)
        })
        .collect();
    let value = match pooling {
        Pooling::LastToken | Pooling::Logits(_) => cells.last().copied(),
        Pooling::FirstToken => cells.first().copied(),
        Pooling::Mean => Some(cells.iter().sum()),
    };
    pooling.finish(&[value.unwrap_or_default()], prompt.len() as u32)
}

/// The values of a segment that pools. A sum must be that of the tokens before.
pub(crate) fn pool_cells(
    wanted: &SegmentPooling,
    segment: &Segment,
    run: &[TokenId],
    history_len: usize,
) -> Result<Arc<[f64]>, String> {
    let mut last = KvHash::default();
    let cells: Vec<f64> = run
        .iter()
        .map(|token| {
            last = last.extend(*token);
            hidden_of(last)
        })
        .collect();
    let before = segment.position as usize;
    let misplaced = || format!("{} pools at {before} of {history_len}", segment.slot);
    let value = match &wanted.pooling {
        Pooling::LastToken | Pooling::Logits(_) if run.len() == history_len => cells.last(),
        Pooling::FirstToken if before == 0 => cells.first(),
        Pooling::LastToken | Pooling::Logits(_) | Pooling::FirstToken => None,
        Pooling::Mean => {
            let sum: f64 = cells[..before].iter().sum();
            let given = wanted.sum.as_ref().and_then(|sum| sum.first().copied());
            if given.unwrap_or_default() != sum || given.is_some() != (before > 0) {
                return Err(format!("{} continues another sum", segment.slot));
            }
            return Ok([cells.iter().sum()].into());
        }
    };
    Ok([*value.ok_or_else(misplaced)?].into())
}
