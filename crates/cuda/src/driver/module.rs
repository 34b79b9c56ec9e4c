//! Kernels as the driver knows them.
//!
//! Owns: loaded code, and the check that a kernel takes what it is given.
//! Never: knows what one computes.
//! Invariant: a [`Kernel`] is launched with the one struct it takes, whose size the driver confirmed.

use super::{Device, Stream, call};
use crate::error::CudaError;
use cudarc::driver::sys;
use std::ffi::{CString, c_void};
use std::marker::PhantomData;
use std::sync::Arc;

/// Code on the device.
#[derive(Debug)]
pub(crate) struct Module {
    device: Arc<Device>,
    handle: sys::CUmodule,
}

// SAFETY: the driver locks for itself.
unsafe impl Send for Module {}
// SAFETY: as above.
unsafe impl Sync for Module {}

/// The one argument of a kernel, as its C++ declares it.
///
/// # Safety
/// `#[repr(C)]`, plain numbers and device addresses only, the same fields in the same order.
pub(crate) unsafe trait KernelArgs: Copy {}

/// How a kernel is launched, always the same.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Shape {
    /// Threads of a block.
    pub(crate) threads: u32,
    /// Bytes of dynamic shared memory of a block.
    pub(crate) shared_bytes: u32,
}

/// A kernel and how it is launched.
#[derive(Debug)]
pub(crate) struct Kernel<A> {
    module: Arc<Module>,
    handle: sys::CUfunction,
    shape: Shape,
    /// Blocks that a multiprocessor holds at once.
    blocks_each: u32,
    args: PhantomData<fn(A)>,
}

// SAFETY: the driver locks for itself.
unsafe impl<A> Send for Kernel<A> {}
// SAFETY: as above.
unsafe impl<A> Sync for Kernel<A> {}

impl Module {
    /// Loads a cubin or fatbin, or PTX that ends with a zero.
    ///
    /// # Errors
    /// If the driver cannot take it, as when nothing in it is for this device.
    pub(crate) fn load(device: &Arc<Device>, image: &[u8]) -> Result<Arc<Self>, CudaError> {
        device.bind()?;
        let mut handle = std::ptr::null_mut();
        // The driver reads headers in whole words. Code that was built in begins on 16 bytes; any other is copied there.
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
    /// If there is none, if it takes another argument, or if the device has not the shared memory.
    pub(crate) fn kernel<A: KernelArgs>(
        self: &Arc<Self>,
        name: &'static str,
        shape: Shape,
    ) -> Result<Kernel<A>, CudaError> {
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
        Ok(Kernel {
            module: Arc::clone(self),
            handle,
            shape,
            blocks_each: blocks_each.unsigned_abs(),
            args: PhantomData,
        })
    }
}

impl Drop for Module {
    fn drop(&mut self) {
        let _ = self.device.bind();
        let _ = call!(cuModuleUnload(self.handle));
    }
}

/// The bytes as words, zeros after the last.
fn words_of(bytes: &[u8]) -> Vec<u128> {
    let words = bytes.chunks(size_of::<u128>()).map(|chunk| {
        let mut word = [0; size_of::<u128>()];
        word[..chunk.len()].copy_from_slice(chunk);
        u128::from_ne_bytes(word)
    });
    words.collect()
}

impl<A: KernelArgs> Kernel<A> {
    /// Blocks of it that a multiprocessor holds at once, by their registers, threads and shared memory.
    pub(crate) fn blocks_each(&self) -> usize {
        self.blocks_each as usize
    }

    /// Queues the kernel over a grid of blocks; nothing happens if a side is 0.
    ///
    /// # Safety
    /// Every address in `args` lies in memory that stays alive until the work is done, and as many
    /// bytes from it on as the kernel touches.
    ///
    /// # Errors
    /// If the driver refuses.
    pub(crate) unsafe fn launch(
        &self,
        stream: &Stream,
        grid: [u32; 3],
        mut args: A,
    ) -> Result<(), CudaError> {
        if grid.contains(&0) {
            return Ok(());
        }
        debug_assert!(Arc::ptr_eq(&self.module.device, stream.device()));
        let mut pointers: [*mut c_void; 1] = [(&raw mut args).cast()];
        call!(cuLaunchKernel(
            self.handle,
            grid[0],
            grid[1],
            grid[2],
            self.shape.threads,
            1,
            1,
            self.shape.shared_bytes,
            stream.handle(),
            pointers.as_mut_ptr(),
            std::ptr::null_mut()
        ))
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::args::{AttendArgs, MatmulArgs};
    use crate::images::Images;
    use cleave_emulator::Variant;

    #[test]
    fn code_that_begins_anywhere_is_copied_to_whole_words() {
        let bytes: Vec<u8> = (0..35).collect();
        let words = words_of(&bytes);
        assert_eq!(words.as_ptr().addr() % 16, 0);
        let copied: Vec<u8> = words.iter().flat_map(|word| word.to_ne_bytes()).collect();
        assert_eq!(copied[..35], bytes);
        assert!(copied[35..].iter().all(|byte| *byte == 0));
    }

    /// The stand-in counts as the driver does: by threads, registers and shared memory.
    #[test]
    fn a_grid_has_the_blocks_that_the_driver_counts() {
        if !cleave_emulator::preload(Variant::of_environment()) {
            return eprintln!("skipped: the emulator needs g++ on x86-64 Linux");
        }
        let device = Device::open(0).expect("a stand-in");
        let images = Images::load(&device).expect("code");
        let matmul = |name| images.kernel::<MatmulArgs>(name).map(|it| it.blocks_each());
        let attend = |name| images.kernel::<AttendArgs>(name).map(|it| it.blocks_each());
        // 228 KiB of shared memory, of which a block takes 97 and 193; then 91, 162 and 40.
        assert_eq!(matmul("matmul_few64_bf16"), Ok(2));
        assert_eq!(matmul("matmul_wide128_bf16"), Ok(1));
        assert_eq!(attend("attend_decode_bf16_128"), Ok(2));
        assert_eq!(attend("attend_prefill_bf16_256"), Ok(1));
        // By registers: 168 for each of 128 threads.
        assert_eq!(attend("attend_decode_fp8_64"), Ok(3));
    }
}
