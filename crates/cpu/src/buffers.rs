//! Activations and the KV pool, in host memory.
//!
//! Invariant: a pool's bytes are its elements in the machine's byte order, which is little-endian
//! on every supported machine.

use cleave_cpu_kernels::memory::{PageMemory, PlainData};
use cleave_domain::BlockIndex;
use cleave_engine::ops::KvPoolShape;
use std::ops::Range;

/// An activation buffer `(rows_max, width)`.
#[derive(Debug)]
pub struct CpuRows {
    pub(crate) values: PageMemory<f32>,
    pub(crate) width: usize,
}

#[derive(Debug)]
pub struct CpuPool {
    pub(crate) bytes: PageMemory<u8>,
    pub(crate) shape: KvPoolShape,
}

impl CpuRows {
    /// Shape: `(rows_max, width)`, row by row.
    pub fn values(&self) -> &[f32] {
        &self.values
    }

    /// Shape: `(rows_max, width)`, row by row.
    pub fn values_mut(&mut self) -> &mut [f32] {
        &mut self.values
    }

    /// Number of elements in a row.
    pub fn width(&self) -> usize {
        self.width
    }

    pub(crate) fn head(&self, rows: usize) -> &[f32] {
        &self.values[..rows * self.width]
    }

    pub(crate) fn head_mut(&mut self, rows: usize) -> &mut [f32] {
        &mut self.values[..rows * self.width]
    }
}

impl CpuPool {
    pub(crate) fn elements<T: PlainData>(&self) -> &[T] {
        assert_eq!(size_of::<T>(), self.shape.kv.element_bytes());
        let len = self.bytes.len() / size_of::<T>();
        // SAFETY: memory is page-aligned, and every bit pattern is a value.
        unsafe { std::slice::from_raw_parts(self.bytes.as_ptr().cast(), len) }
    }

    pub(crate) fn elements_mut<T: PlainData>(&mut self) -> &mut [T] {
        assert_eq!(size_of::<T>(), self.shape.kv.element_bytes());
        let len = self.bytes.len() / size_of::<T>();
        // SAFETY: as in `elements`, and borrowed mutably.
        unsafe { std::slice::from_raw_parts_mut(self.bytes.as_mut_ptr().cast(), len) }
    }

    pub(crate) fn span(&self, block: BlockIndex) -> Range<usize> {
        let size = self.shape.block_bytes();
        let start = block.0 as usize * size;
        start..start + size
    }
}
