//! Loading of adapters while steps run.
//!
//! Owns: the layout of an adapter in its slot: a table of changes, then the matrices.
//! Never: waits for a step that is queued after the load began.
//! Invariant: a slot is written only after every step that used its last adapter has ended.

use super::adapter_bytes_max;
use super::slots::{AdapterSlots, CHANGE_BYTES, SlotLease, aligned, table_bytes};
use crate::driver::{CudaDevice, CudaStream, PinnedMemory};
use crate::error::CudaError;
use cleave_checkpoint::ADAPTED_STACKS;
use cleave_engine::ops::{AdapterLoader, ModelSpec, Projection};
use cleave_engine::{EngineError, StoredChanges, StoredLowRank};
use parking_lot::Mutex;
use std::ops::Range;
use std::sync::Arc;

/// The size of one copy to the device, in bytes.
const PIECE_BYTES: usize = 4 << 20;

/// Loads adapters of one engine into slots.
#[derive(Debug)]
pub struct CudaAdapterLoader {
    device: Arc<CudaDevice>,
    slots: Arc<AdapterSlots>,
    upload: Mutex<AdapterUpload>,
}

/// The stream and the memory of the copies, which one load uses at a time.
#[derive(Debug)]
struct AdapterUpload {
    stream: CudaStream,
    piece: PinnedMemory,
}

/// An adapter in its slot.
#[derive(Debug)]
pub struct CudaAdapter {
    lease: SlotLease,
    /// Stacks that it changes in any layer, as bits of their numbers in `ADAPTED_STACKS`.
    pub(super) stacks: u32,
    /// The most ranks of a stack.
    pub(super) ranks_max: usize,
}

impl CudaAdapter {
    /// Returns the address of its table of changes.
    pub(super) fn changes(&self) -> u64 {
        let (memory, range) = self.lease.place();
        memory.at(range.start)
    }
}

/// Returns a stack's number among those that adapters change.
pub(super) fn stack_number(stack: &[Projection]) -> usize {
    let found = ADAPTED_STACKS.iter().position(|of| *of == stack);
    found.expect("an adapter changes stacks of this list alone")
}

impl CudaAdapterLoader {
    /// Allocates memory for `loras_max` adapters with ranks up to `rank_max`.
    ///
    /// # Errors
    /// If memory is short.
    pub fn new(
        device: &Arc<CudaDevice>,
        spec: &ModelSpec,
        loras_max: usize,
        rank_max: usize,
    ) -> Result<Self, CudaError> {
        let slots = AdapterSlots::new(device, adapter_bytes_max(spec, rank_max), loras_max)?;
        Ok(Self {
            device: Arc::clone(device),
            slots: Arc::new(slots),
            upload: Mutex::new(AdapterUpload {
                stream: CudaStream::new(device)?,
                piece: PinnedMemory::new(device, PIECE_BYTES)?,
            }),
        })
    }
}

impl AdapterLoader for CudaAdapterLoader {
    type Adapter = CudaAdapter;

    fn supports(&self, changes: &StoredChanges<'_>) -> Result<(), &'static str> {
        if changes.changes_experts() {
            return Err(
                "adapters of experts run on the processor only; on a GPU, merge it into the model",
            );
        }
        Ok(())
    }

    fn load(&self, changes: &StoredChanges<'_>) -> Result<CudaAdapter, EngineError> {
        let lease = self.slots.take()?;
        // Steps that are queued may still read what the slot had; later ones do not.
        self.device.synchronize()?;
        let mut upload = self.upload.lock();
        let (memory, range) = lease.place();
        let mut writer = SlotWriter {
            upload: &mut upload,
            lease: &lease,
            used: range.start + table_bytes(changes.layers_count()),
            end: range.end,
        };
        let mut table = vec![0; changes.layers_count() * ADAPTED_STACKS.len() * CHANGE_BYTES];
        let (mut stacks, mut ranks_max) = (0, 0);
        for layer in 0..changes.layers_count() {
            for (place, stack) in changes.places(layer) {
                let Some(stored) = changes.of(place, stack) else {
                    continue;
                };
                let number = stack_number(stack);
                let ranks = stored.expand.columns();
                let [shrink, expand] = writer.write_pair(&stored)?;
                let entry = (layer * ADAPTED_STACKS.len() + number) * CHANGE_BYTES;
                let entry = &mut table[entry..entry + CHANGE_BYTES];
                entry[..8].copy_from_slice(&memory.at(shrink).to_le_bytes());
                entry[8..16].copy_from_slice(&memory.at(expand).to_le_bytes());
                entry[16..20].copy_from_slice(&(ranks as u32).to_le_bytes());
                stacks |= 1 << number;
                ranks_max = ranks_max.max(ranks);
            }
        }
        writer.copy(range.start, &table)?;
        Ok(CudaAdapter {
            lease,
            stacks,
            ranks_max,
        })
    }
}

/// Writes an adapter into its slot.
struct SlotWriter<'a> {
    upload: &'a mut AdapterUpload,
    lease: &'a SlotLease,
    used: usize,
    end: usize,
}

impl SlotWriter<'_> {
    /// Writes both matrices of a change, the second one transposed, and returns their offsets.
    fn write_pair(&mut self, stored: &StoredLowRank) -> Result<[usize; 2], EngineError> {
        let shrink: Vec<f32> = stored.shrink.iter().flat_map(|of| of.to_f32()).collect();
        let (rows, ranks) = (stored.expand.rows(), stored.expand.columns());
        let by_row = stored.expand.to_f32();
        let mut expand = vec![0.0; by_row.len()];
        for (row, of_row) in by_row.chunks_exact(ranks.max(1)).enumerate() {
            for (rank, value) in of_row.iter().enumerate() {
                expand[rank * rows + row] = *value;
            }
        }
        Ok([self.write(&shrink)?, self.write(&expand)?])
    }

    /// Writes numbers behind those before, and returns their offset.
    fn write(&mut self, values: &[f32]) -> Result<usize, EngineError> {
        let offset = self.used;
        let range = offset..offset + size_of_val(values);
        assert!(
            range.end <= self.end,
            "an adapter of the ranks that were checked"
        );
        let bytes: Vec<u8> = values
            .iter()
            .flat_map(|value| value.to_le_bytes())
            .collect();
        self.copy(offset, &bytes)?;
        self.used = offset + aligned(bytes.len());
        Ok(offset)
    }

    /// Copies bytes to the device, and waits.
    fn copy(&mut self, offset: usize, bytes: &[u8]) -> Result<(), EngineError> {
        let AdapterUpload { stream, piece } = &mut *self.upload;
        let (memory, _) = self.lease.place();
        stream.bind()?;
        for (index, chunk) in bytes.chunks(PIECE_BYTES).enumerate() {
            let used: Range<usize> = 0..chunk.len();
            piece.as_mut_slice()[used.clone()].copy_from_slice(chunk);
            stream.copy_in((piece, used), (memory, offset + index * PIECE_BYTES))?;
            stream.synchronize()?;
        }
        Ok(())
    }
}
