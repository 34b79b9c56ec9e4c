//! A part of a device's multiprocessors (a green context), to which some streams are limited.
//!
//! Owns: the split. Never: moves queued work; decides the size of a part.
//! Invariant: the two parts of one split are disjoint even in different processes, because the
//! driver splits the same number the same way. Work of two processes runs side by side only under
//! MPS.

use super::{CudaDevice, call};
use crate::error::CudaError;
use crate::options::{MultiprocessorShare, SharePart};
use cudarc::driver::sys;
use std::mem::MaybeUninit;
use std::sync::Arc;

#[derive(Debug)]
pub(crate) struct GreenPartition {
    device: Arc<CudaDevice>,
    handle: sys::CUgreenCtx,
    processors_count: u32,
}

// SAFETY: the driver synchronises its own calls.
unsafe impl Send for GreenPartition {}
// SAFETY: as above.
unsafe impl Sync for GreenPartition {}

impl GreenPartition {
    /// Takes one part of a split. The driver rounds its size to one that the hardware can separate.
    ///
    /// # Errors
    /// If the driver cannot split this device, or nothing would be left for the other part.
    pub(crate) fn new(
        device: &Arc<CudaDevice>,
        share: MultiprocessorShare,
    ) -> Result<Self, CudaError> {
        device.bind()?;
        let of = device.handle;
        // The driver fills uninitialised memory instead of structs: it may write a kind of resource
        // that the binding's enum does not list.
        let (mut all, mut first, mut rest) = (empty(), empty(), empty());
        let kind = sys::CUdevResourceType::CU_DEV_RESOURCE_TYPE_SM;
        call!(cuDeviceGetDevResource(of, all.as_mut_ptr(), kind))?;
        let MultiprocessorShare { percent, part } = share;
        let target_count = (processors(&all) * percent).div_ceil(100).max(1);
        let mut groups = 1;
        call!(cuDevSmResourceSplitByCount(
            first.as_mut_ptr(),
            &raw mut groups,
            all.as_ptr(),
            rest.as_mut_ptr(),
            0,
            target_count
        ))?;
        let mut chosen = match part {
            SharePart::First => first,
            SharePart::Rest => rest,
        };
        let processors_count = processors(&chosen);
        if groups == 0 || processors_count == 0 {
            return Err(CudaError::NoPartition {
                percent,
                processors: processors(&all),
            });
        }
        let mut description = std::ptr::null_mut();
        call!(cuDevResourceGenerateDesc(
            &raw mut description,
            chosen.as_mut_ptr(),
            1
        ))?;
        let flags = sys::CUgreenCtxCreate_flags::CU_GREEN_CTX_DEFAULT_STREAM as u32;
        let mut handle = std::ptr::null_mut();
        call!(cuGreenCtxCreate(&raw mut handle, description, of, flags))?;
        Ok(Self {
            device: Arc::clone(device),
            handle,
            processors_count,
        })
    }

    pub(crate) fn processors_count(&self) -> u32 {
        self.processors_count
    }

    pub(crate) fn handle(&self) -> sys::CUgreenCtx {
        self.handle
    }
}

impl Drop for GreenPartition {
    fn drop(&mut self) {
        let _ = self.device.bind();
        let _ = call!(cuGreenCtxDestroy(self.handle));
    }
}

fn empty() -> MaybeUninit<sys::CUdevResource> {
    MaybeUninit::zeroed()
}

fn processors(resource: &MaybeUninit<sys::CUdevResource>) -> u32 {
    // SAFETY: the memory holds zeros or a resource of multiprocessors; only that one number is
    // read.
    unsafe { (&raw const (*resource.as_ptr()).__bindgen_anon_1.sm.smCount).read() }
}
