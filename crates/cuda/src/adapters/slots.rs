//! Memory for adapters: slots of equal size, as many as are loaded at once.
//!
//! Owns: which slot is free, and the sizes.
//! Never: writes into a slot.
//! Invariant: a slot has one adapter at most. Its memory is allocated once, so that no step waits
//! for an allocation.

use crate::driver::{CudaDevice, DeviceMemory};
use crate::error::CudaError;
use cleave_checkpoint::ADAPTED_STACKS;
use cleave_engine::EngineError;
use cleave_engine::ops::ModelSpec;
use parking_lot::{Condvar, Mutex};
use std::sync::Arc;
use std::time::Duration;

/// The alignment of matrices in a slot in bytes, for the widest loads.
const ALIGNMENT: usize = 256;
/// Bytes of `AdapterChange` of the kernels.
pub(super) const CHANGE_BYTES: usize = 24;
/// The longest wait for a slot whose adapter was unloaded: the host's part of a step may hold it.
const SLOT_WAIT_MAX: Duration = Duration::from_secs(2);

/// Slots of one engine.
#[derive(Debug)]
pub(super) struct AdapterSlots {
    memory: Arc<DeviceMemory>,
    slot_bytes: usize,
    count: usize,
    free: Mutex<Vec<usize>>,
    freed: Condvar,
}

/// A slot that an adapter has until this is dropped.
#[derive(Debug)]
pub(super) struct SlotLease {
    slots: Arc<AdapterSlots>,
    slot: usize,
}

/// Returns the most bytes of an adapter of this model with ranks up to `rank_max`.
pub fn adapter_bytes_max(spec: &ModelSpec, rank_max: usize) -> usize {
    let matrix = |elements: usize| aligned(elements * size_of::<f32>());
    let layers = spec.layers.iter().flat_map(|layer| {
        ADAPTED_STACKS.iter().map(move |stack| {
            let ranks = stack.len() * rank_max;
            let shape = layer.stack_shape(stack, spec.hidden_size);
            shape.map_or(0, |(rows, columns)| {
                matrix(ranks * rows) + matrix(ranks * columns)
            })
        })
    });
    table_bytes(spec.layers.len()) + layers.sum::<usize>()
}

/// Returns the bytes of the table of changes at the beginning of a slot.
pub(super) fn table_bytes(layers_count: usize) -> usize {
    aligned(layers_count * ADAPTED_STACKS.len() * CHANGE_BYTES)
}

pub(super) fn aligned(bytes: usize) -> usize {
    bytes.next_multiple_of(ALIGNMENT)
}

impl AdapterSlots {
    pub(super) fn new(
        device: &Arc<CudaDevice>,
        slot_bytes: usize,
        count: usize,
    ) -> Result<Self, CudaError> {
        let slot_bytes = aligned(slot_bytes);
        let memory = DeviceMemory::new(device, slot_bytes * count, "adapters")?;
        Ok(Self {
            memory: Arc::new(memory),
            slot_bytes,
            count,
            free: Mutex::new((0..count).rev().collect()),
            freed: Condvar::new(),
        })
    }

    /// Takes a free slot. Waits for one that is about to be freed.
    pub(super) fn take(self: &Arc<Self>) -> Result<SlotLease, EngineError> {
        let mut free = self.free.lock();
        let is_taken = |free: &mut Vec<usize>| free.is_empty();
        if self.count > 0 {
            self.freed
                .wait_while_for(&mut free, is_taken, SLOT_WAIT_MAX);
        }
        let Some(slot) = free.pop() else {
            return Err(EngineError::Device(format!(
                "all {} places for adapters on the GPU are taken; raise --max-loras",
                self.count
            )));
        };
        Ok(SlotLease {
            slots: Arc::clone(self),
            slot,
        })
    }
}

impl SlotLease {
    /// Returns the memory of all slots, and where this one lies.
    pub(super) fn place(&self) -> (&Arc<DeviceMemory>, std::ops::Range<usize>) {
        let bytes = self.slots.slot_bytes;
        let first = self.slot * bytes;
        (&self.slots.memory, first..first + bytes)
    }
}

impl Drop for SlotLease {
    fn drop(&mut self) {
        self.slots.free.lock().push(self.slot);
        self.slots.freed.notify_one();
    }
}
