//! The vectors of pooled sequences: hidden states and single logits, brought to the host.
//!
//! Owns: the rows that each vector reads, and their sums. Never: keeps anything between steps.
//! Invariant: a sum adds the rows of a sequence one after the other in f64, in the order of their
//! positions, so that its bits do not depend on the chunks of the prompt.

use super::ModelEngine;
use crate::EngineError;
use crate::forward::ForwardPass;
use crate::ops::Ops;
use cleave_domain::{Pooling, Segment, SegmentPooling, StepPlan, StepResult, TokenId};
use std::ops::Range;
use std::sync::Arc;

/// Rows of hidden states that are copied to the host at once.
const HOST_ROWS_MAX: usize = 64;

/// A vector's rows among those whose final norm is computed.
#[derive(Debug)]
pub(super) struct PooledRows {
    wanted: SegmentPooling,
    /// Numbers of the wanted rows.
    rows: Range<usize>,
}

/// Rows of a segment that its vector reads.
pub(super) fn pooled_rows(segment: &Segment, pooling: &Pooling) -> Range<usize> {
    let len = segment.len as usize;
    match pooling {
        Pooling::LastToken | Pooling::Logits(_) => len - 1..len,
        Pooling::FirstToken => 0..1,
        Pooling::Mean => 0..len,
    }
}

/// The vector of a segment in a plan.
pub(crate) fn pooling_of<'a>(plan: &'a StepPlan, segment: &Segment) -> Option<&'a SegmentPooling> {
    plan.poolings.iter().find(|at| at.slot == segment.slot)
}

impl<O: Ops> ModelEngine<O> {
    /// Adds the rows of a segment that pools behind those whose logits are needed.
    pub(super) fn add_pooled_rows(
        pooled: &mut Vec<PooledRows>,
        wanted_rows: &mut Vec<u32>,
        rows: Range<usize>,
        wanted: &SegmentPooling,
    ) {
        let first = wanted_rows.len();
        wanted_rows.extend(rows.map(|row| row as u32));
        pooled.push(PooledRows {
            wanted: wanted.clone(),
            rows: first..wanted_rows.len(),
        });
    }

    /// Computes the vectors of the pass that has run.
    pub(super) fn pool_on_host(&mut self, result: &mut StepResult) -> Result<(), EngineError> {
        let first = self.logit_rows.purposes.len();
        let mut not_finite = Vec::new();
        for PooledRows { wanted, rows } in std::mem::take(&mut self.pooled) {
            let rows = first + rows.start..first + rows.end;
            let values = match &wanted.pooling {
                Pooling::Logits(tokens) => self.named_logits(rows.start, tokens)?,
                Pooling::LastToken | Pooling::FirstToken | Pooling::Mean => {
                    self.sum_of_rows(rows, wanted.sum.as_deref())?
                }
            };
            if !values.iter().all(|value| value.is_finite()) {
                not_finite.push(wanted.slot);
            }
            result.pooled.push((wanted.slot, values));
        }
        if not_finite.is_empty() {
            Ok(())
        } else {
            Err(EngineError::NotFinite(not_finite))
        }
    }

    fn named_logits(&mut self, row: usize, tokens: &[TokenId]) -> Result<Arc<[f64]>, EngineError> {
        let vocab = self.weights.spec().vocab_size;
        let mut pass = ForwardPass {
            ops: &mut self.ops,
            weights: &self.weights,
            pool: &mut self.pool,
            buffers: &mut self.buffers,
            adapters: &mut self.step_adapters,
        };
        pass.logits(row, &mut self.logits[..vocab])?;
        let logit = |token: &TokenId| f64::from(self.logits[*token as usize]);
        Ok(tokens.iter().map(logit).collect())
    }

    /// The sum of hidden states `(hidden)`, added to `sum`; one row alone is the row itself.
    fn sum_of_rows(
        &mut self,
        rows: Range<usize>,
        sum: Option<&[f64]>,
    ) -> Result<Arc<[f64]>, EngineError> {
        let hidden = self.weights.spec().hidden_size;
        let factor = f64::from(self.weights.norm_factor);
        let mut sum = sum.map_or_else(|| vec![0.0; hidden], <[f64]>::to_vec);
        let mut values = vec![0.0; rows.len().min(HOST_ROWS_MAX) * hidden];
        let mut first = rows.start;
        while first < rows.end {
            let count = (rows.end - first).min(HOST_ROWS_MAX);
            let read = &mut values[..count * hidden];
            self.ops.read_rows(self.buffers.final_rows(), first, read)?;
            add_rows(&mut sum, read, factor);
            first += count;
        }
        Ok(sum.into())
    }
}

/// Adds rows `(rows, hidden)`, each divided by `factor`, to a sum `(hidden)`, in their order.
fn add_rows(sum: &mut [f64], rows: &[f32], factor: f64) {
    for row in rows.chunks_exact(sum.len()) {
        let sums = sum.iter_mut().zip(row);
        sums.for_each(|(sum, value)| *sum += f64::from(*value) / factor);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn rows_are_added_in_their_order() {
        // The 1 is lost where it meets the large number, and kept where it comes last.
        let rows = [[1.0, 1e30], [1e30, -1e30], [-1e30, 1.0]].concat();
        for count in 1..=3 {
            let mut sum = [0.0; 2];
            for part in rows.chunks(2 * count) {
                add_rows(&mut sum, part, 2.0);
            }
            assert_eq!(sum, [0.0, 0.5], "{count} rows at a time");
        }
    }
}
