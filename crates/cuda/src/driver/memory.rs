//! Memory of the device, and memory of the host that the device can reach.
//!
//! Owns: allocations. Never: copies.
//! Invariant: an address handed out lies within an allocation that is alive.

use super::{Device, call};
use crate::error::CudaError;
use std::ffi::c_void;
use std::sync::Arc;

/// A piece of the device's memory, `[bytes]`, aligned to 256 bytes at least.
#[derive(Debug)]
pub(crate) struct DeviceMemory {
    pub(super) device: Arc<Device>,
    pub(super) address: u64,
    bytes: usize,
}

impl DeviceMemory {
    /// Allocates; what is in it is unknown.
    ///
    /// # Errors
    /// [`CudaError::OutOfMemory`].
    pub(crate) fn new(
        device: &Arc<Device>,
        bytes: usize,
        what: &'static str,
    ) -> Result<Self, CudaError> {
        device.bind()?;
        let mut address = 0;
        // The driver refuses nothing at all, which callers need not care about.
        match call!(cuMemAlloc_v2(&raw mut address, bytes.max(1))) {
            Ok(()) => Ok(Self {
                device: Arc::clone(device),
                address,
                bytes,
            }),
            Err(CudaError::Call { name, .. }) if name == "CUDA_ERROR_OUT_OF_MEMORY" => {
                let (free, total) = device.memory().unwrap_or_default();
                Err(CudaError::OutOfMemory {
                    wanted: bytes,
                    what,
                    free,
                    total,
                })
            }
            Err(other) => Err(other),
        }
    }

    /// Where it is.
    pub(crate) fn device(&self) -> &Arc<Device> {
        &self.device
    }

    /// Size in bytes.
    pub(crate) fn bytes(&self) -> usize {
        self.bytes
    }

    /// Address of the byte at `offset`, which is within the allocation or its end.
    ///
    /// # Panics
    /// If it is not.
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
        // A context that failed gives its memory back when the process ends.
        let _ = self.device.bind();
        let _ = call!(cuMemFree_v2(self.address));
    }
}

/// Host memory that does not move, so that the device copies from and to it by itself, `[bytes]`.
#[derive(Debug)]
pub(crate) struct PinnedMemory {
    device: Arc<Device>,
    pointer: *mut u8,
    bytes: usize,
}

// SAFETY: plain memory with one owner.
unsafe impl Send for PinnedMemory {}
// SAFETY: read through `&self` only as bytes.
unsafe impl Sync for PinnedMemory {}

/// Any context may copy with it, and the host may read it at full speed.
const PORTABLE: u32 = 1;

impl PinnedMemory {
    /// Allocates, zeroed.
    ///
    /// # Errors
    /// If the system does not lend so much.
    pub(crate) fn new(device: &Arc<Device>, bytes: usize) -> Result<Self, CudaError> {
        device.bind()?;
        let mut pointer: *mut c_void = std::ptr::null_mut();
        match call!(cuMemHostAlloc(&raw mut pointer, bytes.max(1), PORTABLE)) {
            Err(CudaError::Call { name, .. }) if name == "CUDA_ERROR_OUT_OF_MEMORY" => {
                return Err(CudaError::NoPinnedMemory { wanted: bytes });
            }
            allocated => allocated?,
        }
        // SAFETY: so many bytes were just given.
        unsafe { pointer.cast::<u8>().write_bytes(0, bytes.max(1)) };
        Ok(Self {
            device: Arc::clone(device),
            pointer: pointer.cast(),
            bytes,
        })
    }

    /// Size in bytes.
    pub(crate) fn bytes(&self) -> usize {
        self.bytes
    }

    /// What is in it. Whoever lets the device write here waits before looking.
    pub(crate) fn as_slice(&self) -> &[u8] {
        // SAFETY: alive, initialised, `bytes` long.
        unsafe { std::slice::from_raw_parts(self.pointer, self.bytes) }
    }

    /// To write into. Whoever lets the device read here waits before writing again.
    pub(crate) fn as_mut_slice(&mut self) -> &mut [u8] {
        // SAFETY: as above, and borrowed alone.
        unsafe { std::slice::from_raw_parts_mut(self.pointer, self.bytes) }
    }
}

impl Drop for PinnedMemory {
    fn drop(&mut self) {
        let _ = self.device.bind();
        let _ = call!(cuMemFreeHost(self.pointer.cast()));
    }
}
