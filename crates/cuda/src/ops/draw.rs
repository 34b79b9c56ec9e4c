//! The head's product, and the draw of tokens from its logits.
//!
//! Owns: the end of a pass, where a recording ends or is replayed. Never: chooses between both.
//! Invariant: a recording contains the head's product and the draw of a whole bucket; the copy of
//! the tokens is queued after it.

use super::CudaOps;
use super::host::HOST_COPY_BYTES;
use crate::buffers::CudaRows;
use crate::matmul::MatmulProduct;
use crate::pack::CudaMatrix;
use crate::recording::GraphUse;
use cleave_engine::EngineError;
use cleave_engine::ops::{DrawRule, Head, MaskedDraw};

impl CudaOps {
    /// Computes rows' logits, copies them to the host, and waits.
    pub(super) fn fetch_logits(
        &mut self,
        head: Head<'_, CudaMatrix>,
        rows: usize,
        x: &CudaRows,
        out: &mut [f32],
    ) -> Result<(), EngineError> {
        assert_eq!(out.len(), rows * head.matrix.columns);
        let product = MatmulProduct {
            matrix: head.matrix,
            rows,
            bucket: rows,
            x: x.place(),
        };
        let target = self
            .sampling
            .logits_target(&self.stream, rows, head.matrix.columns)?;
        self.matmul
            .run(&product, target, &self.stream, &mut self.messages)?;
        self.sampling.queue_cap(head.soft_cap, rows, &self.stream)?;
        let mut piece = self.staging.borrow_mut();
        let each = HOST_COPY_BYTES / size_of::<f32>();
        for (index, chunk) in out.chunks_mut(each).enumerate() {
            let bytes = size_of_val(chunk);
            let from = (self.sampling.logits(), index * HOST_COPY_BYTES);
            self.stream.copy_out(from, (&mut piece, 0..bytes))?;
            self.stream.synchronize()?;
            let words = piece.as_slice()[..bytes].as_chunks::<4>().0;
            for (value, word) in chunk.iter_mut().zip(words) {
                *value = f32::from_le_bytes(*word);
            }
        }
        Ok(())
    }

    /// Queues the head's product and the draw of a token per rule, or replays the recording that
    /// ends with them, and queues the copy of the tokens.
    pub(super) fn queue_head_and_draw(
        &mut self,
        head: Head<'_, CudaMatrix>,
        rules: &[Option<DrawRule>],
        x: &CudaRows,
    ) -> Result<(), EngineError> {
        let rows = rules.len();
        if rows == 0 {
            self.sampling.queue_token_copy(0, &self.stream)?;
            return Ok(self.idle.pass_drawn(&self.stream)?);
        }
        let decode = self.step.decode.take();
        let bucket = match decode {
            Some((step, _)) => step.bucket,
            None => {
                self.sampling
                    .send_rules(rules, rows, &self.stream, &mut self.messages)?;
                rows
            }
        };
        if !matches!(decode, Some((_, GraphUse::Replay))) {
            let target = self
                .sampling
                .logits_target(&self.stream, bucket, head.matrix.columns)?;
            let product = MatmulProduct {
                matrix: head.matrix,
                rows,
                bucket,
                x: x.place(),
            };
            let queued = self
                .matmul
                .run(&product, target, &self.stream, &mut self.messages);
            let sampling = &self.sampling;
            let queued = queued
                .and_then(|()| sampling.queue_cap(head.soft_cap, bucket, &self.stream))
                .and_then(|()| sampling.queue_draw(bucket, &self.stream));
            if let Some((step, GraphUse::Record)) = decode {
                let graph = self.stream.end_recording();
                queued?;
                self.recordings.keep(step, graph?, self.moves_count());
            } else {
                queued?;
            }
        }
        if let Some((step, GraphUse::Record | GraphUse::Replay)) = decode {
            self.stream.replay(self.recordings.graph(step))?;
        }
        self.sampling.queue_token_copy(rows, &self.stream)?;
        Ok(self.idle.pass_drawn(&self.stream)?)
    }

    /// Queues the draws under masks after the newest draw, whose logits are still on the device: no
    /// recording has them, because the masks come after its replay began.
    pub(super) fn queue_draws_under_masks(
        &mut self,
        draws: &[MaskedDraw<'_>],
    ) -> Result<(), EngineError> {
        self.sampling
            .queue_masked_draw(draws, &self.stream, &mut self.messages)?;
        Ok(self.idle.draw_extended(&self.stream)?)
    }
}
