//! Modules of machine code and their kernels.
//!
//! Owns: loaded code, and the check that a kernel takes the arguments of its type.
//! Never: knows the purpose of a kernel.
//! Invariant: a [`CudaKernel`] is launched with the one struct that it takes, whose size the driver
//! confirmed.

use super::{CudaDevice, CudaStream, call};
use crate::error::CudaError;
use cudarc::driver::sys;
use std::ffi::{CString, c_void};
use std::marker::PhantomData;
use std::sync::Arc;

/// A module of code that is loaded on the device.
#[derive(Debug)]
pub(crate) struct CudaModule {
    device: Arc<CudaDevice>,
    handle: sys::CUmodule,
}

// SAFETY: the driver synchronises its own calls.
unsafe impl Send for CudaModule {}
// SAFETY: as above.
unsafe impl Sync for CudaModule {}

/// The one argument of a kernel, laid out as its C++ struct.
///
/// # Safety
/// The type must be `#[repr(C)]`, contain only plain numbers, device addresses and tensor maps, and
/// have the fields of the C++ struct in the same order.
pub(crate) unsafe trait KernelArgs: Copy {}

/// The major compute capability from which a launch may begin before the one in front of it is
/// over: its kernels wait by themselves (`wait_for_previous` in `kernels/include/prims.cuh`).
const EARLY_LAUNCH_CAPABILITY: u32 = 9;

/// The fixed launch parameters of a kernel.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct LaunchShape {
    /// Threads of a thread block.
    pub(crate) threads: u32,
    /// Dynamic shared memory of a thread block in bytes.
    pub(crate) shared_bytes: u32,
}

/// A kernel with its launch parameters.
#[derive(Debug)]
pub(crate) struct CudaKernel<A> {
    module: Arc<CudaModule>,
    handle: sys::CUfunction,
    shape: LaunchShape,
    /// Thread blocks that a multiprocessor holds at once.
    blocks_per_multiprocessor: u32,
    /// Whether its launches may begin before the one in front of them is over.
    begins_early: bool,
    args: PhantomData<fn(A)>,
}

// SAFETY: the driver synchronises its own calls.
unsafe impl<A> Send for CudaKernel<A> {}
// SAFETY: as above.
unsafe impl<A> Sync for CudaKernel<A> {}

impl CudaModule {
    /// Loads a cubin, a fatbin, or PTX that ends with a zero.
    ///
    /// # Errors
    /// If the driver refuses the code, for example because it has none for this device.
    pub(crate) fn load(device: &Arc<CudaDevice>, image: &[u8]) -> Result<Arc<Self>, CudaError> {
        device.bind()?;
        let mut handle = std::ptr::null_mut();
        // The driver reads headers in whole words. Built-in code is aligned to 16 bytes; all other
        // code is copied to aligned memory.
        let copy: Vec<u128>;
        let image = match image.as_ptr().addr() % align_of::<u128>() {
            0 => image.as_ptr(),
            _ => {
                copy = words_of(image);
                copy.as_ptr().cast()
            }
        };
        call!(cuModuleLoadData(&raw mut handle, image.cast()))?;
        Ok(Arc::new(Self {
            device: Arc::clone(device),
            handle,
        }))
    }

    /// Finds a kernel by name.
    ///
    /// # Errors
    /// If there is none, if it takes another argument, or if the device lacks the shared memory.
    pub(crate) fn kernel<A: KernelArgs>(
        self: &Arc<Self>,
        name: &'static str,
        shape: LaunchShape,
    ) -> Result<CudaKernel<A>, CudaError> {
        self.device.bind()?;
        let text = CString::new(name).expect("a kernel's name has no zero in it");
        let mut handle = std::ptr::null_mut();
        call!(cuModuleGetFunction(
            &raw mut handle,
            self.handle,
            text.as_ptr()
        ))?;
        let (mut offset, mut bytes) = (0, 0);
        call!(cuFuncGetParamInfo(
            handle,
            0,
            &raw mut offset,
            &raw mut bytes
        ))?;
        if bytes != size_of::<A>() {
            return Err(CudaError::NoKernels(format!(
                "the kernel {name} takes {bytes} bytes, not {}: it was built from other sources than \
                 this program; build both again",
                size_of::<A>()
            )));
        }
        if shape.shared_bytes > 0 {
            let which =
                sys::CUfunction_attribute_enum::CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES;
            call!(cuFuncSetAttribute(
                handle,
                which,
                shape.shared_bytes.cast_signed()
            ))?;
        }
        let mut blocks_each = 0;
        call!(cuOccupancyMaxActiveBlocksPerMultiprocessor(
            &raw mut blocks_each,
            handle,
            shape.threads.cast_signed(),
            shape.shared_bytes as usize
        ))?;
        if blocks_each < 1 {
            return Err(CudaError::NoKernels(format!(
                "a block of the kernel {name} ({} threads, {} bytes of shared memory) does not fit a multiprocessor of {}",
                shape.threads,
                shape.shared_bytes,
                self.device.facts().name
            )));
        }
        Ok(CudaKernel {
            module: Arc::clone(self),
            handle,
            shape,
            blocks_per_multiprocessor: blocks_each.unsigned_abs(),
            // Kernels for older chips do not wait by themselves.
            begins_early: self.device.facts().capability.0 >= EARLY_LAUNCH_CAPABILITY,
            args: PhantomData,
        })
    }
}

impl Drop for CudaModule {
    fn drop(&mut self) {
        let _ = self.device.bind();
        let _ = call!(cuModuleUnload(self.handle));
    }
}

/// Returns the bytes as aligned words, padded with zeros.
fn words_of(bytes: &[u8]) -> Vec<u128> {
    let words = bytes.chunks(size_of::<u128>()).map(|chunk| {
        let mut word = [0; size_of::<u128>()];
        word[..chunk.len()].copy_from_slice(chunk);
        u128::from_ne_bytes(word)
    });
    words.collect()
}

impl<A: KernelArgs> CudaKernel<A> {
    /// Returns the number of thread blocks that a multiprocessor holds at once, by their registers,
    /// threads and shared memory.
    pub(crate) fn blocks_per_multiprocessor(&self) -> usize {
        self.blocks_per_multiprocessor as usize
    }

    /// Makes launches begin after everything in front of them. A grid that leaves multiprocessors
    /// idle must: blocks that come early are put beside each other where there is room, and share a
    /// multiprocessor while others have nothing to do.
    pub(crate) fn in_turn(self) -> Self {
        Self {
            begins_early: false,
            ..self
        }
    }

    /// Queues the kernel over a grid of thread blocks; does nothing if a side is 0.
    ///
    /// # Safety
    /// Every address in `args` must lie in memory that stays alive until the work is done, and so
    /// must all bytes from it on that the kernel touches.
    ///
    /// # Errors
    /// If the driver refuses.
    pub(crate) unsafe fn launch(
        &self,
        stream: &CudaStream,
        grid: [u32; 3],
        mut args: A,
    ) -> Result<(), CudaError> {
        if grid.contains(&0) {
            return Ok(());
        }
        debug_assert!(Arc::ptr_eq(&self.module.device, stream.device()));
        let mut pointers: [*mut c_void; 1] = [(&raw mut args).cast()];
        let mut early = sys::CUlaunchAttribute {
            id:
                sys::CUlaunchAttributeID_enum::CU_LAUNCH_ATTRIBUTE_PROGRAMMATIC_STREAM_SERIALIZATION,
            pad: [0; 4],
            value: sys::CUlaunchAttributeValue {
                programmaticStreamSerializationAllowed: 1,
            },
        };
        let config = sys::CUlaunchConfig {
            gridDimX: grid[0],
            gridDimY: grid[1],
            gridDimZ: grid[2],
            blockDimX: self.shape.threads,
            blockDimY: 1,
            blockDimZ: 1,
            sharedMemBytes: self.shape.shared_bytes,
            hStream: stream.handle(),
            attrs: &raw mut early,
            numAttrs: u32::from(self.begins_early),
        };
        call!(cuLaunchKernelEx(
            &raw const config,
            self.handle,
            pointers.as_mut_ptr(),
            std::ptr::null_mut()
        ))
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::args::{AttendArgs, MatmulArgs};
    use crate::every_kernel;
    use crate::images::KernelImages;

    #[test]
    fn unaligned_code_is_copied_to_aligned_words() {
        let bytes: Vec<u8> = (0..35).collect();
        let words = words_of(&bytes);
        assert_eq!(words.as_ptr().addr() % 16, 0);
        let copied: Vec<u8> = words.iter().flat_map(|word| word.to_ne_bytes()).collect();
        assert_eq!(copied[..35], bytes);
        assert!(copied[35..].iter().all(|byte| *byte == 0));
    }

    /// The stand-in counts thread blocks as the driver does: by threads, registers and shared
    /// memory.
    #[test]
    fn a_grid_has_as_many_blocks_as_the_driver_counts() {
        let Some(device) = every_kernel::stand_in_device() else {
            return;
        };
        let images = KernelImages::load(&device).expect("code");
        let matmul = |name| {
            images
                .kernel::<MatmulArgs>(name)
                .map(|it| it.blocks_per_multiprocessor())
        };
        let attend = |name| {
            images
                .kernel::<AttendArgs>(name)
                .map(|it| it.blocks_per_multiprocessor())
        };
        // The multiprocessor has 228 KiB of shared memory. Thread blocks of the first two kernels
        // take 97 and 193 KiB, those of the next two 91 and 162, and of the last 40.
        assert_eq!(matmul("matmul_few64_bf16"), Ok(2));
        assert_eq!(matmul("matmul_wide128_bf16"), Ok(1));
        assert_eq!(attend("attend_decode_bf16_128"), Ok(2));
        assert_eq!(attend("attend_prefill_bf16_256"), Ok(1));
        // Registers are the limit here: 168 for each of 128 threads.
        assert_eq!(attend("attend_decode_fp8_64"), Ok(3));
    }
}
