//! Activations and the KV pool on the device.

use crate::driver::{DeviceMemory, Stream};
use crate::error::CudaError;
use cleave_engine::ops::{PoolShape, Precision};
use std::sync::Arc;

/// An activation buffer `(rows_max, width)`.
#[derive(Debug)]
pub struct CudaRows {
    pub(crate) memory: DeviceMemory,
    pub(crate) width: usize,
    /// How its elements lie in memory.
    pub(crate) stored: Precision,
}

impl CudaRows {
    /// Address of the first row.
    pub(crate) fn address(&self) -> u64 {
        self.memory.at(0)
    }

    /// Bytes of one row.
    pub(crate) fn row_bytes(&self) -> usize {
        self.width * self.stored.element_bytes()
    }

    /// # Panics
    /// If there are not so many rows.
    pub(crate) fn check_rows(&self, rows: usize) {
        let bytes = rows * self.row_bytes();
        assert!(
            bytes <= self.memory.bytes(),
            "{rows} rows of a smaller buffer"
        );
    }
}

/// A KV pool. Clones are the same.
#[derive(Clone, Debug)]
pub struct CudaPool {
    /// The blocks, and room beside them for bytes that mean nothing (see `blocks`).
    pub(crate) memory: Arc<DeviceMemory>,
    pub(crate) shape: PoolShape,
}

/// Memory that grows when a step needs more, and then stays.
#[derive(Debug)]
pub(crate) struct Growing {
    memory: DeviceMemory,
    what: &'static str,
    begins: Contents,
}

/// What is in memory that was just made.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Contents {
    Anything,
    Zeros,
    /// Anything at first; what was written survives growing.
    Kept,
}

impl Growing {
    pub(crate) fn new(
        stream: &Stream,
        bytes: usize,
        what: &'static str,
        begins: Contents,
    ) -> Result<Self, CudaError> {
        let memory = DeviceMemory::new(stream.device(), bytes, what)?;
        if begins == Contents::Zeros {
            stream.zero(&memory, 0..bytes)?;
        }
        Ok(Self {
            memory,
            what,
            begins,
        })
    }

    /// What there is.
    pub(crate) fn memory(&self) -> &DeviceMemory {
        &self.memory
    }

    /// At least so many bytes.
    pub(crate) fn at_least(
        &mut self,
        stream: &Stream,
        bytes: usize,
    ) -> Result<&DeviceMemory, CudaError> {
        if bytes > self.memory.bytes() {
            let larger = bytes.next_power_of_two();
            let larger = Self::new(stream, larger, self.what, self.begins)?;
            if self.begins == Contents::Kept {
                let bytes = self.memory.bytes();
                stream.copy_within((&self.memory, 0), (&larger.memory, 0), bytes)?;
            }
            // Work that is queued may still use what is given back here.
            stream.synchronize()?;
            *self = larger;
        }
        Ok(&self.memory)
    }
}
