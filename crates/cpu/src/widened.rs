//! A pool of eight-bit floats, widened for one layer's attention.
//!
//! Owns: one layer's widened keys and values of a batch's sequences, and a copy of the batch whose
//! tables point to them.
//! Never: stored or sent: the pool and transfers between workers keep eight bits.
//! Invariant: widening is exact, so that the result does not depend on how often or beside what a
//! block is widened.

use crate::buffers::CpuPool;
use crate::threads::Threads;
use cleave_cpu_kernels::kernel::StoredElement;
use cleave_cpu_kernels::memory::{PageMemory, SliceParts};
use cleave_domain::{BlockIndex, KvPlane};
use cleave_engine::EngineError;
use cleave_engine::ops::{Batch, PoolLayerShape};

/// Widened keys and values of the current batch.
#[derive(Default)]
pub(crate) struct WidenedKv {
    /// Copy of the batch; its block `i` stands for the `i`th entry of the real batch's tables.
    batch: Batch,
    /// The real blocks in the pool.
    blocks: Vec<BlockIndex>,
    bytes: Option<PageMemory<u8>>,
}

impl WidenedKv {
    pub(crate) fn begin(&mut self, batch: &Batch) {
        self.batch.clone_from(batch);
        self.blocks.clone_from(&batch.blocks);
        for (index, block) in (0..).zip(&mut self.batch.blocks) {
            *block = BlockIndex(index);
        }
    }

    /// Widens one layer; returns the batch, and the layer's blocks `[block][K|V][kv_head]`.
    ///
    /// # Errors
    /// `Device` if memory is short.
    pub(crate) fn widen<T: StoredElement>(
        &mut self,
        threads: &mut Threads,
        pool: &CpuPool,
        layer: &PoolLayerShape,
    ) -> Result<(&Batch, &[T]), EngineError> {
        let each = layer.layer_elements();
        let bytes = self.blocks.len() * each * size_of::<T>();
        if self.bytes.as_ref().is_none_or(|there| there.len() < bytes) {
            self.bytes = Some(PageMemory::zeroed(bytes.next_power_of_two())?);
        }
        let Some(memory) = &mut self.bytes else {
            return Ok((&self.batch, &[]));
        };
        let to = memory.as_mut_slice_of::<T>(self.blocks.len() * each);
        let parts = SliceParts::new(to);
        let (blocks, stored) = (&self.blocks, pool.elements::<u8>(layer.plane));
        let first = self.batch.tables_start(layer.plane);
        let last = match layer.plane {
            KvPlane::Blocks => self.batch.windows_start.unwrap_or(blocks.len()),
            _ => blocks.len(),
        };
        threads.run(blocks.len(), &|turn| {
            // The other plane's tables name other blocks.
            if !(first..last).contains(&turn.task) {
                return;
            }
            let start = blocks[turn.task].0 as usize * layer.block_elements;
            let from = &stored[start + layer.key_offset(0)..][..each];
            // SAFETY: only one task writes a block.
            let to = unsafe { parts.part(turn.task * each..(turn.task + 1) * each) };
            for (to, bits) in to.iter_mut().zip(from) {
                *to = T::from_e4m3(*bits);
            }
        });
        Ok((&self.batch, to))
    }
}
