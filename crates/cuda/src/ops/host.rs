//! Copies to and from the host, besides a step's own messages.
//!
//! Owns: copies through one piece of pinned memory. Never: returns before a copy has ended.
//! Invariant: a copy sees the results of all work that was queued before it, because it uses the
//! same stream.

use super::CudaOps;
use crate::buffers::CudaRows;
use crate::driver::DeviceMemory;
use cleave_engine::EngineError;
use cleave_engine::ops::Precision;

/// The size of one copy to or from the host, in bytes.
pub(super) const HOST_COPY_BYTES: usize = 4 << 20;

impl CudaOps {
    /// Copies rows' values to the host, widened to f32, `(rows, width)`.
    ///
    /// # Errors
    /// If the copy or earlier work failed.
    pub fn values(&self, rows: &CudaRows) -> Result<Vec<f32>, EngineError> {
        let mut values = vec![0.0; rows.memory.bytes() / rows.stored.element_bytes()];
        self.fetch_values(rows, 0, &mut values)?;
        Ok(values)
    }

    /// Copies values from byte `offset` on to the host, widened to f32, and waits.
    pub(super) fn fetch_values(
        &self,
        rows: &CudaRows,
        offset: usize,
        out: &mut [f32],
    ) -> Result<(), EngineError> {
        let mut bytes = vec![0; out.len() * rows.stored.element_bytes()];
        self.fetch(&rows.memory, offset, &mut bytes)?;
        let words = bytes.chunks_exact(rows.stored.element_bytes());
        for (value, word) in out.iter_mut().zip(words) {
            *value = match rows.stored {
                Precision::F32 => f32::from_le_bytes([word[0], word[1], word[2], word[3]]),
                Precision::Bf16 => half::bf16::from_le_bytes([word[0], word[1]]).to_f32(),
            };
        }
        Ok(())
    }

    /// Sets rows' values, rounded to the buffer's format, `(rows, width)`.
    ///
    /// # Errors
    /// If the copy or earlier work failed.
    pub fn set_values(&self, rows: &CudaRows, values: &[f32]) -> Result<(), EngineError> {
        let bytes: Vec<u8> = match rows.stored {
            Precision::F32 => values.iter().flat_map(|v| v.to_le_bytes()).collect(),
            Precision::Bf16 => values
                .iter()
                .flat_map(|v| half::bf16::from_f32(*v).to_le_bytes())
                .collect(),
        };
        self.put(&rows.memory, 0, &bytes)
    }

    /// Copies to the host and waits.
    pub(super) fn fetch(
        &self,
        memory: &DeviceMemory,
        offset: usize,
        out: &mut [u8],
    ) -> Result<(), EngineError> {
        self.stream.bind()?;
        let mut piece = self.staging.borrow_mut();
        for (index, chunk) in out.chunks_mut(HOST_COPY_BYTES).enumerate() {
            let from = (memory, offset + index * HOST_COPY_BYTES);
            self.stream.copy_out(from, (&mut piece, 0..chunk.len()))?;
            self.stream.synchronize()?;
            chunk.copy_from_slice(&piece.as_slice()[..chunk.len()]);
        }
        Ok(())
    }

    /// Copies from the host and waits.
    pub(super) fn put(
        &self,
        memory: &DeviceMemory,
        offset: usize,
        bytes: &[u8],
    ) -> Result<(), EngineError> {
        self.stream.bind()?;
        let mut piece = self.staging.borrow_mut();
        for (index, chunk) in bytes.chunks(HOST_COPY_BYTES).enumerate() {
            piece.as_mut_slice()[..chunk.len()].copy_from_slice(chunk);
            let to = (memory, offset + index * HOST_COPY_BYTES);
            self.stream.copy_in((&piece, 0..chunk.len()), to)?;
            self.stream.synchronize()?;
        }
        Ok(())
    }
}
