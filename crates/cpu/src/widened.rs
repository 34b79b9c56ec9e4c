//! A pool of eight-bit floats, widened for attention.
//!
//! Owns: one layer's keys and values of a batch's sequences, as the kernels read them, and the batch with tables that
//! lead there.
//! Never: outlives a layer's attention; what is stored, and what workers send each other, stays narrow.
//! Invariant: widening is exact, so it does not matter how often or beside what a block is widened.

use crate::buffers::CpuPool;
use crate::kernel::Stored;
use crate::memory::{Memory, Parts};
use crate::threads::Threads;
use cleave_domain::BlockIndex;
use cleave_engine::EngineError;
use cleave_engine::ops::Batch;

/// See the module.
#[derive(Default)]
pub(crate) struct Widened {
    /// The batch at hand; its block `i` is the `i`th that the real one names.
    batch: Batch,
    /// What those are in the pool.
    blocks: Vec<BlockIndex>,
    bytes: Option<Memory<u8>>,
}

impl Widened {
    /// Another batch comes.
    pub(crate) fn begin(&mut self, batch: &Batch) {
        self.batch.clone_from(batch);
        self.blocks.clone_from(&batch.blocks);
        for (index, block) in (0..).zip(&mut self.batch.blocks) {
            *block = BlockIndex(index);
        }
    }

    /// The batch, and one layer of its blocks, `[block][K|V][kv_head]`.
    ///
    /// # Errors
    /// `Device` if memory is short.
    pub(crate) fn widen<T: Stored>(
        &mut self,
        threads: &mut Threads,
        pool: &CpuPool,
        layer: usize,
    ) -> Result<(&Batch, &[T]), EngineError> {
        let shape = pool.shape;
        let each = shape.layer_elements();
        let bytes = self.blocks.len() * each * size_of::<T>();
        if self.bytes.as_ref().is_none_or(|there| there.len() < bytes) {
            self.bytes = Some(Memory::zeroed(bytes.next_power_of_two())?);
        }
        let Some(memory) = &mut self.bytes else {
            return Ok((&self.batch, &[]));
        };
        let to = memory.seen_as_mut::<T>(self.blocks.len() * each);
        let parts = Parts::new(to);
        let (blocks, stored) = (&self.blocks, pool.elements::<u8>());
        threads.run(blocks.len(), &|turn| {
            let start = blocks[turn.task].0 as usize * shape.block_elements();
            let from = &stored[start + shape.key_offset(layer, 0)..][..each];
            // SAFETY: every block is taken by one task.
            let to = unsafe { parts.part(turn.task * each..(turn.task + 1) * each) };
            for (to, bits) in to.iter_mut().zip(from) {
                *to = T::of_e4m3(*bits);
            }
        });
        Ok((&self.batch, to))
    }
}
