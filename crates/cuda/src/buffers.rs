//! Activations and the KV pool on the device.

use crate::blocks::PoolRegions;
use crate::driver::{CudaStream, DeviceMemory};
use crate::error::CudaError;
use cleave_domain::KvPlane;
use cleave_engine::ops::{KvPoolShape, Precision};
use std::sync::Arc;

/// A buffer of activations, `(rows_max, width)`.
#[derive(Debug)]
pub struct CudaRows {
    pub(crate) memory: DeviceMemory,
    pub(crate) width: usize,
    /// The elements' format in memory.
    pub(crate) stored: Precision,
}

/// Rows in memory, of a buffer or of a workspace, `(rows_max, width)`.
#[derive(Clone, Copy, Debug)]
pub(crate) struct RowsPlace {
    pub(crate) address: u64,
    pub(crate) width: usize,
    pub(crate) rows_max: usize,
}

impl CudaRows {
    /// Returns the rows' place.
    pub(crate) fn place(&self) -> RowsPlace {
        RowsPlace {
            address: self.address(),
            width: self.width,
            rows_max: self.memory.bytes() / self.row_bytes().max(1),
        }
    }

    /// Returns the address of the first row.
    pub(crate) fn address(&self) -> u64 {
        self.memory.at(0)
    }

    /// Returns the size of one row in bytes.
    pub(crate) fn row_bytes(&self) -> usize {
        self.width * self.stored.element_bytes()
    }

    /// # Panics
    /// If the buffer has fewer rows.
    pub(crate) fn check_rows(&self, rows: usize) {
        let bytes = rows * self.row_bytes();
        assert!(
            bytes <= self.memory.bytes(),
            "{rows} rows of a smaller buffer"
        );
    }
}

/// A KV pool. Clones refer to the same memory.
#[derive(Clone, Debug)]
pub struct CudaPool {
    pub(crate) memory: Arc<DeviceMemory>,
    pub(crate) shape: KvPoolShape,
    /// Where blocks and state slots lie in the memory.
    pub(crate) regions: PoolRegions,
}

impl CudaPool {
    /// Returns the address of a plane's first block or slot.
    pub(crate) fn plane_address(&self, plane: KvPlane) -> u64 {
        self.memory.at(self.regions.first(plane))
    }
}

/// Memory that grows when a step needs more, and never shrinks.
#[derive(Debug)]
pub(crate) struct GrowingMemory {
    memory: DeviceMemory,
    purpose: &'static str,
    initial: MemoryContents,
}

/// The contents of newly allocated memory.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum MemoryContents {
    Undefined,
    Zeros,
    /// Arbitrary at first; growing copies the old contents.
    Preserved,
}

impl GrowingMemory {
    pub(crate) fn new(
        stream: &CudaStream,
        bytes: usize,
        purpose: &'static str,
        initial: MemoryContents,
    ) -> Result<Self, CudaError> {
        let memory = DeviceMemory::new(stream.device(), bytes, purpose)?;
        if initial == MemoryContents::Zeros {
            stream.zero(&memory, 0..bytes)?;
        }
        Ok(Self {
            memory,
            purpose,
            initial,
        })
    }

    pub(crate) fn memory(&self) -> &DeviceMemory {
        &self.memory
    }

    /// Returns the memory after growing it to at least `bytes` bytes.
    pub(crate) fn ensure_bytes(
        &mut self,
        stream: &CudaStream,
        bytes: usize,
    ) -> Result<&DeviceMemory, CudaError> {
        if bytes > self.memory.bytes() {
            let larger = bytes.next_power_of_two();
            let larger = Self::new(stream, larger, self.purpose, self.initial)?;
            if self.initial == MemoryContents::Preserved {
                let bytes = self.memory.bytes();
                stream.copy_within((&self.memory, 0), (&larger.memory, 0), bytes)?;
            }
            // Queued work may still use the old memory, which is freed here.
            stream.synchronize()?;
            *self = larger;
        }
        Ok(&self.memory)
    }
}
