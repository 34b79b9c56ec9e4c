//! Memory of the device, and memory of the host that the device can reach.
//!
//! Owns: allocations. Never: copies.
//! Invariant: a returned address lies within a live allocation.

use super::{CudaDevice, call};
use crate::error::CudaError;
use std::ffi::c_void;
use std::sync::Arc;

/// An allocation of the device's memory, aligned to at least 256 bytes.
#[derive(Debug)]
pub(crate) struct DeviceMemory {
    pub(super) device: Arc<CudaDevice>,
    pub(super) address: u64,
    bytes: usize,
}

impl DeviceMemory {
    /// Allocates memory with undefined contents.
    ///
    /// # Errors
    /// [`CudaError::OutOfMemory`].
    pub(crate) fn new(
        device: &Arc<CudaDevice>,
        bytes: usize,
        purpose: &'static str,
    ) -> Result<Self, CudaError> {
        device.bind()?;
        let mut address = 0;
        // The driver refuses an allocation of zero bytes, which callers need not special-case.
        match call!(cuMemAlloc_v2(&raw mut address, bytes.max(1))) {
            Ok(()) => Ok(Self {
                device: Arc::clone(device),
                address,
                bytes,
            }),
            Err(CudaError::Call { name, .. }) if name == "CUDA_ERROR_OUT_OF_MEMORY" => {
                let (free, total) = device.memory().unwrap_or_default();
                Err(CudaError::OutOfMemory {
                    requested: bytes,
                    purpose,
                    free,
                    total,
                })
            }
            Err(other) => Err(other),
        }
    }

    pub(crate) fn device(&self) -> &Arc<CudaDevice> {
        &self.device
    }

    pub(crate) fn bytes(&self) -> usize {
        self.bytes
    }

    /// Returns the address of the byte at `offset`, which is within the allocation or its end.
    ///
    /// # Panics
    /// If the offset is beyond the end.
    pub(crate) fn at(&self, offset: usize) -> u64 {
        assert!(
            offset <= self.bytes,
            "byte {offset} of {} on the device",
            self.bytes
        );
        self.address + offset as u64
    }
}

impl Drop for DeviceMemory {
    fn drop(&mut self) {
        // A failed context frees its memory when the process ends, so errors are ignored.
        let _ = self.device.bind();
        let _ = call!(cuMemFree_v2(self.address));
    }
}

/// Page-locked host memory, which the device copies from and to without the processor's help.
#[derive(Debug)]
pub(crate) struct PinnedMemory {
    device: Arc<CudaDevice>,
    pointer: *mut u8,
    bytes: usize,
}

// SAFETY: the pointer owns plain memory, which no other object refers to.
unsafe impl Send for PinnedMemory {}
// SAFETY: shared references only read bytes.
unsafe impl Sync for PinnedMemory {}

/// The flag for memory that every context may copy with; host reads are cached, unlike
/// write-combined memory's.
const PORTABLE: u32 = 1;

impl PinnedMemory {
    /// Allocates zeroed memory.
    ///
    /// # Errors
    /// If the system cannot lock that much memory.
    pub(crate) fn new(device: &Arc<CudaDevice>, bytes: usize) -> Result<Self, CudaError> {
        device.bind()?;
        let mut pointer: *mut c_void = std::ptr::null_mut();
        match call!(cuMemHostAlloc(&raw mut pointer, bytes.max(1), PORTABLE)) {
            Err(CudaError::Call { name, .. }) if name == "CUDA_ERROR_OUT_OF_MEMORY" => {
                return Err(CudaError::NoPinnedMemory { requested: bytes });
            }
            allocated => allocated?,
        }
        // SAFETY: the driver has just allocated so many bytes.
        unsafe { pointer.cast::<u8>().write_bytes(0, bytes.max(1)) };
        Ok(Self {
            device: Arc::clone(device),
            pointer: pointer.cast(),
            bytes,
        })
    }

    pub(crate) fn bytes(&self) -> usize {
        self.bytes
    }

    /// Returns the contents. A caller that lets the device write here waits before it reads.
    pub(crate) fn as_slice(&self) -> &[u8] {
        // SAFETY: the memory is alive, initialised and `bytes` long.
        unsafe { std::slice::from_raw_parts(self.pointer, self.bytes) }
    }

    /// Returns the contents for writing. A caller that lets the device read here waits before it
    /// writes again.
    pub(crate) fn as_mut_slice(&mut self) -> &mut [u8] {
        // SAFETY: as above, and the borrow is exclusive.
        unsafe { std::slice::from_raw_parts_mut(self.pointer, self.bytes) }
    }
}

impl Drop for PinnedMemory {
    fn drop(&mut self) {
        let _ = self.device.bind();
        let _ = call!(cuMemFreeHost(self.pointer.cast()));
    }
}
