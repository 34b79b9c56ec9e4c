//! Some of a device's multiprocessors, for the work of some streams alone (a green context).
//!
//! Owns: the split. Never: moves work that is queued; decides who gets how many.
//! Invariant: both parts of one split are disjoint, in whichever process each is taken: the driver splits the same
//! number the same way. Work of two processes runs side by side under MPS alone.

use super::{Device, call};
use crate::error::CudaError;
use crate::options::{Part, Share};
use cudarc::driver::sys;
use std::mem::MaybeUninit;
use std::sync::Arc;

/// See the module.
#[derive(Debug)]
pub(crate) struct Partition {
    device: Arc<Device>,
    handle: sys::CUgreenCtx,
    processors_count: u32,
}

// SAFETY: the driver locks for itself.
unsafe impl Send for Partition {}
// SAFETY: as above.
unsafe impl Sync for Partition {}

impl Partition {
    /// Takes one part of a split. The driver rounds it to what the hardware can keep apart.
    ///
    /// # Errors
    /// If the driver cannot split this device, or nothing would be left for the other part.
    pub(crate) fn new(device: &Arc<Device>, share: Share) -> Result<Self, CudaError> {
        device.bind()?;
        let of = device.handle;
        // Room that the driver fills: it may name a kind of resource that the binding's enum does not list.
        let (mut all, mut first, mut rest) = (empty(), empty(), empty());
        let kind = sys::CUdevResourceType::CU_DEV_RESOURCE_TYPE_SM;
        call!(cuDeviceGetDevResource(of, all.as_mut_ptr(), kind))?;
        let Share { percent, part } = share;
        let wanted = (processors(&all) * percent).div_ceil(100).max(1);
        let mut groups = 1;
        call!(cuDevSmResourceSplitByCount(
            first.as_mut_ptr(),
            &raw mut groups,
            all.as_ptr(),
            rest.as_mut_ptr(),
            0,
            wanted
        ))?;
        let mut chosen = match part {
            Part::First => first,
            Part::Rest => rest,
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

    /// Multiprocessors in it.
    pub(crate) fn processors_count(&self) -> u32 {
        self.processors_count
    }

    pub(crate) fn handle(&self) -> sys::CUgreenCtx {
        self.handle
    }
}

impl Drop for Partition {
    fn drop(&mut self) {
        let _ = self.device.bind();
        let _ = call!(cuGreenCtxDestroy(self.handle));
    }
}

fn empty() -> MaybeUninit<sys::CUdevResource> {
    MaybeUninit::zeroed()
}

fn processors(resource: &MaybeUninit<sys::CUdevResource>) -> u32 {
    // SAFETY: zeros, or a resource of multiprocessors; the one number is read, and nothing around it.
    unsafe { (&raw const (*resource.as_ptr()).__bindgen_anon_1.sm.smCount).read() }
}
