//! How a pass begins: what the device is told of it, and whether it is run, recorded or replayed.
//!
//! Owns: that choice. Never: queues an operation.
//! Invariant: what a recording launches for padding stores nothing: its rows have no slot, and counts on the device
//! leave them out.

use super::{CudaOps, StepAddresses};
use crate::attention::Attending;
use crate::inbox::Place;
use crate::recording::{Way, bucket};
use cleave_domain::BlockIndex;
use cleave_engine::EngineError;
use cleave_engine::ops::{Batch, Pass, Wanted};

/// Of a row that is padding: `NO_SLOT` of the kernels.
const NO_SLOT: u32 = u32::MAX;

/// Of a token that is drawn by the step before, in which row is what follows: `FED` of the kernels.
const FED: u32 = 1 << 31;

impl CudaOps {
    /// Sends the batch, and says who runs the pass.
    pub(super) fn begin_pass(
        &mut self,
        batch: &Batch,
        wanted: Wanted<'_>,
    ) -> Result<Pass, EngineError> {
        self.stream.bind()?;
        self.end_failed_recording();
        self.inbox.turn(&self.stream)?;
        let rows = batch.rows_count();
        let rules = match wanted {
            Wanted::Tokens(rules) if batch.segments.len() == rows => Some(rules),
            _ => None,
        };
        let decode = rules.and_then(|rules| Some((rules, bucket(rows, self.rows_max.get())?)));
        let launched = decode.map_or(rows, |(_, bucket)| bucket);
        self.send_batch(batch, launched)?;
        let Some((rules, bucket)) = decode else {
            self.idle.begins(&self.stream)?;
            return Ok(Pass::Run);
        };
        let queue = (&self.stream, &mut self.inbox);
        self.sampling.send(rules, bucket, queue)?;
        self.idle.begins(&self.stream)?;
        let way = self.recordings.way(bucket, self.moves_count());
        self.step.decode = Some((bucket, way));
        match way {
            Way::Run => Ok(Pass::Run),
            Way::Record => {
                self.stream.begin_recording()?;
                Ok(Pass::Run)
            }
            Way::Replay => Ok(Pass::Recorded),
        }
    }

    /// If the pass that was being recorded failed half-way: else the draw has taken the recording.
    pub(super) fn end_failed_recording(&mut self) {
        if let Some((_, Way::Record)) = self.step.decode.take() {
            drop(self.stream.end_recording());
        }
    }

    /// Sends what kernels must know of a batch, padded to the rows that are launched.
    fn send_batch(&mut self, batch: &Batch, launched: usize) -> Result<(), EngineError> {
        let shape = *self.pool_shape.borrow();
        let block_tokens = shape.map_or(1, |shape| shape.block_tokens);
        let padded = |values: &[u32], with: u32| {
            let mut values = values.to_vec();
            values.resize(launched.max(values.len()), with);
            values
        };
        let slots = padded(&row_slots(batch, block_tokens), NO_SLOT);
        let (mut tokens, positions) = (padded(&batch.tokens, 0), padded(&batch.positions, 0));
        for fed in &batch.fed {
            tokens[fed.row as usize] = FED | fed.drawn;
        }
        let (stream, inbox) = (&self.stream, &mut self.inbox);
        self.step = StepAddresses {
            tokens: inbox.send(stream, Place::Tokens, &tokens)?,
            positions: inbox.send(stream, Place::Positions, &positions)?,
            row_slots: inbox.send(stream, Place::RowSlots, &slots)?,
            decode: None,
        };
        self.multiplying
            .begin(batch.rows_count(), (stream, inbox))?;
        if let Some(attending) = self.attending.get_mut() {
            attending.begin(batch, stream, inbox)?;
        }
        Ok(())
    }

    /// How often something moved that a recording names.
    pub(super) fn moves_count(&self) -> u64 {
        let attending = self.attending.borrow();
        self.inbox.moves_count()
            + self.multiplying.moves_count()
            + self.sampling.moves_count()
            + attending.as_ref().map_or(0, Attending::moves_count)
    }

    /// Rows that are launched where so many are asked for: all of a decode step's bucket.
    pub(super) fn launched(&self, rows: usize) -> usize {
        self.step
            .decode
            .map_or(rows, |(bucket, _)| bucket.max(rows))
    }
}

/// Where each row's keys and values go: `block × block_tokens + token`.
fn row_slots(batch: &Batch, block_tokens: usize) -> Vec<u32> {
    let slot = |table: &[BlockIndex], position: usize| {
        table[position / block_tokens].0 * block_tokens as u32 + (position % block_tokens) as u32
    };
    let of_segment = |segment: &cleave_engine::ops::BatchSegment| {
        let table = batch.table(segment);
        let first = segment.position;
        (first..first + segment.rows.len())
            .map(|position| slot(table, position))
            .collect::<Vec<u32>>()
    };
    batch.segments.iter().flat_map(of_segment).collect()
}
