//! The beginning of a pass: the messages to the device, and the choice whether it is run, recorded
//! or replayed.
//!
//! Owns: that choice. Never: queues an operation.
//! Invariant: the padding rows of a recording store nothing: they have no slot, and the counts on
//! the device exclude them.

use super::{CudaOps, StepAddresses};
use crate::adapters::CudaAdapter;
use crate::attention::CudaAttention;
use crate::recording::{GraphUse, RecordedStep, bucket};
use crate::step_messages::StepMessage;
use cleave_domain::{BlockIndex, KvPlane};
use cleave_engine::EngineError;
use cleave_engine::ops::{AdapterGroup, Batch, PassMode, PassPurpose};

/// The slot of a padding row: `NO_SLOT` of the kernels.
const NO_SLOT: u32 = u32::MAX;

/// Marks a token that the previous step draws; the other bits are its row there: `FED` of the
/// kernels.
const FED: u32 = 1 << 31;

impl CudaOps {
    /// Sends the batch, and decides whether the caller queues the operations or a recording is
    /// replayed.
    pub(super) fn begin_pass(
        &mut self,
        batch: &Batch,
        purpose: PassPurpose<'_>,
        adapters: &[AdapterGroup<CudaAdapter>],
    ) -> Result<PassMode, EngineError> {
        self.stream.bind()?;
        self.end_failed_recording();
        self.messages.switch_half(&self.stream)?;
        let rows = batch.rows_count();
        let rules = match purpose {
            PassPurpose::DrawEveryRow(rules) if batch.segments.len() == rows => Some(rules),
            _ => None,
        };
        // Only a decode step that draws tokens can be recorded: every segment has one row.
        let decode = rules.and_then(|rules| Some((rules, bucket(rows, self.rows_max.get())?)));
        let launched = decode.map_or(rows, |(_, bucket)| bucket);
        // All messages go before a recording begins, which must contain none.
        self.send_batch(batch, launched)?;
        let recorded = decode.map(|(_, bucket)| bucket);
        (self.adapters).send(adapters, recorded, &self.stream, &mut self.messages)?;
        let Some((rules, bucket)) = decode else {
            self.idle.pass_begins(&self.stream)?;
            return Ok(PassMode::Execute);
        };
        self.sampling
            .send_rules(rules, bucket, &self.stream, &mut self.messages)?;
        self.idle.pass_begins(&self.stream)?;
        let step = RecordedStep {
            bucket,
            has_adapters: !adapters.is_empty(),
        };
        let recording_use = self.recordings.next_use(step, self.moves_count());
        self.step.decode = Some((step, recording_use));
        match recording_use {
            GraphUse::RunUnrecorded => Ok(PassMode::Execute),
            GraphUse::Record => {
                self.stream.begin_recording()?;
                Ok(PassMode::Execute)
            }
            GraphUse::Replay => Ok(PassMode::Replay),
        }
    }

    /// Ends the recording of a pass that failed before its draw; a draw ends the recording itself.
    pub(super) fn end_failed_recording(&mut self) {
        if let Some((_, GraphUse::Record)) = self.step.decode.take() {
            drop(self.stream.end_recording());
        }
    }

    /// Sends the description of a batch, padded to the rows that are launched.
    fn send_batch(&mut self, batch: &Batch, launched: usize) -> Result<(), EngineError> {
        let block_tokens = self.block_tokens.get().unwrap_or(1);
        let padded = |values: &[u32], with: u32| {
            let mut values = values.to_vec();
            values.resize(launched.max(values.len()), with);
            values
        };
        let slots_in = |plane| padded(&row_slots(batch, plane, block_tokens), NO_SLOT);
        let slots = slots_in(KvPlane::Blocks);
        let window_slots = batch.windows_start.map(|_| slots_in(KvPlane::Window));
        let (mut tokens, positions) = (padded(&batch.tokens, 0), padded(&batch.positions, 0));
        for fed in &batch.fed_rows {
            tokens[fed.row as usize] = FED | fed.draw_row;
        }
        let (stream, messages) = (&self.stream, &mut self.messages);
        self.step = StepAddresses {
            tokens: messages.send(stream, StepMessage::Tokens, &tokens)?,
            positions: messages.send(stream, StepMessage::Positions, &positions)?,
            row_slots: messages.send(stream, StepMessage::RowSlots, &slots)?,
            window_slots: match window_slots {
                Some(slots) => messages.send(stream, StepMessage::WindowRowSlots, &slots)?,
                None => 0,
            },
            decode: None,
        };
        self.matmul
            .begin_pass(batch.rows_count(), stream, messages)?;
        if let Some(attending) = self.attention.get_mut() {
            attending.begin_pass(batch, stream, messages)?;
        }
        Ok(())
    }

    /// Counts the moves of all memory whose addresses a recording contains.
    pub(super) fn moves_count(&self) -> u64 {
        let attending = self.attention.borrow();
        self.messages.reallocations_count()
            + self.matmul.reallocations_count()
            + self.experts.reallocations_count()
            + self.adapters.reallocations_count()
            + self.sampling.reallocations_count()
            + attending
                .as_ref()
                .map_or(0, CudaAttention::reallocations_count)
    }

    /// Returns the rows to launch for `rows` rows: a decode step launches its whole bucket.
    pub(super) fn launched(&self, rows: usize) -> usize {
        self.step
            .decode
            .map_or(rows, |(step, _)| step.bucket.max(rows))
    }
}

/// Returns the slot of each row's keys and values in a plane: `block × block_tokens + token`.
fn row_slots(batch: &Batch, plane: KvPlane, block_tokens: usize) -> Vec<u32> {
    let slot = |table: &[BlockIndex], position: usize| {
        table[position / block_tokens].0 * block_tokens as u32 + (position % block_tokens) as u32
    };
    let of_segment = |segment: &cleave_engine::ops::BatchSegment| {
        let table = batch.table(segment, plane);
        let first = segment.position;
        (first..first + segment.rows.len())
            .map(|position| slot(table, position))
            .collect::<Vec<u32>>()
    };
    batch.segments.iter().flat_map(of_segment).collect()
}
