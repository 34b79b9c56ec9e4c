//! Memory of other processes on this machine.
//!
//! Owns: the handles by which processes name their memory to each other, and the memory that was
//! opened by one.
//! Never: sends a handle: callers transmit its bytes to the other process.
//! Invariant: opened memory stays mapped until it is dropped, even after its process has ended; its
//! contents are undefined then.

use super::{CudaDevice, DeviceMemory, call};
use crate::error::CudaError;
use cudarc::driver::sys;
use std::ffi::c_char;
use std::sync::Arc;

/// The size of a handle in bytes.
pub(crate) const HANDLE_BYTES: usize = 64;

/// Memory that another process allocated.
#[derive(Debug)]
pub(crate) struct ImportedMemory {
    device: Arc<CudaDevice>,
    address: u64,
    bytes: usize,
}

impl DeviceMemory {
    /// Returns the handle by which another process opens this memory.
    ///
    /// # Errors
    /// If the driver cannot share memory here.
    pub(crate) fn export(&self) -> Result<[u8; HANDLE_BYTES], CudaError> {
        self.device.bind()?;
        let mut handle = sys::CUipcMemHandle_st {
            reserved: [0; HANDLE_BYTES],
        };
        call!(cuIpcGetMemHandle(&raw mut handle, self.address))?;
        // C's characters have a sign on some processors only.
        Ok(handle.reserved.map(|byte| byte.to_ne_bytes()[0]))
    }
}

impl ImportedMemory {
    /// Opens `bytes` bytes of another process's memory, which may lie on another device than this
    /// one.
    ///
    /// # Errors
    /// If the process has ended, or this one cannot reach the memory.
    pub(crate) fn open(
        device: &Arc<CudaDevice>,
        handle: [u8; HANDLE_BYTES],
        bytes: usize,
    ) -> Result<Self, CudaError> {
        device.bind()?;
        let handle = sys::CUipcMemHandle_st {
            reserved: handle.map(|byte| c_char::from_ne_bytes([byte])),
        };
        let flags = sys::CUipcMem_flags_enum::CU_IPC_MEM_LAZY_ENABLE_PEER_ACCESS as u32;
        let mut address = 0;
        call!(cuIpcOpenMemHandle_v2(&raw mut address, handle, flags))?;
        Ok(Self {
            device: Arc::clone(device),
            address,
            bytes,
        })
    }

    /// Returns the address of `bytes` bytes from an offset on.
    ///
    /// # Panics
    /// If they are not all within the memory.
    pub(crate) fn span(&self, offset: usize, bytes: usize) -> u64 {
        let end = offset
            .checked_add(bytes)
            .expect("a range of imported memory");
        assert!(end <= self.bytes, "bytes {offset}..{end} of {}", self.bytes);
        self.address + offset as u64
    }
}

impl Drop for ImportedMemory {
    fn drop(&mut self) {
        let _ = self.device.bind();
        let _ = call!(cuIpcCloseMemHandle(self.address));
    }
}
