//! Memory of another process of this machine.
//!
//! Owns: the handles by which processes name their memory to each other, and what was opened by one.
//! Never: sends a handle: it is bytes, and whoever has a way to the other process carries them.
//! Invariant: what was opened stays mapped until it is dropped, also when the process that made it has ended; what
//! lies there means nothing any more then.

use super::{Device, DeviceMemory, call};
use crate::error::CudaError;
use cudarc::driver::sys;
use std::sync::Arc;

/// Bytes of a handle.
pub(crate) const HANDLE_BYTES: usize = 64;

/// Memory that another process allocated, `[bytes]`.
#[derive(Debug)]
pub(crate) struct ImportedMemory {
    device: Arc<Device>,
    address: u64,
    bytes: usize,
}

impl DeviceMemory {
    /// By what another process opens it.
    ///
    /// # Errors
    /// If the driver cannot share memory here.
    pub(crate) fn export(&self) -> Result<[u8; HANDLE_BYTES], CudaError> {
        self.device.bind()?;
        let mut handle = sys::CUipcMemHandle_st {
            reserved: [0; HANDLE_BYTES],
        };
        call!(cuIpcGetMemHandle(&raw mut handle, self.address))?;
        Ok(handle.reserved.map(|byte| byte.cast_unsigned()))
    }
}

impl ImportedMemory {
    /// Opens `bytes` bytes of another process. They may lie on another device than this one.
    ///
    /// # Errors
    /// If the process has ended, or this one cannot reach the memory.
    pub(crate) fn open(
        device: &Arc<Device>,
        handle: [u8; HANDLE_BYTES],
        bytes: usize,
    ) -> Result<Self, CudaError> {
        device.bind()?;
        let handle = sys::CUipcMemHandle_st {
            reserved: handle.map(|byte| byte.cast_signed()),
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

    /// Address of `bytes` bytes from an offset on.
    ///
    /// # Panics
    /// If they are not all in it.
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
