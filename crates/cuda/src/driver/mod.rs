//! The CUDA driver, as much of it as Cleave uses.
//!
//! Owns: every call into libcuda, and what the driver hands out: a device's context, memory, streams,
//! events, modules. Each is given back when dropped.
//! Never: panics because a library or a symbol is missing (the binding below would), allocates or waits
//! on its own, or knows what a kernel computes.
//! Invariant: whatever is alive keeps its [`Device`] alive; a call binds the device's context to the
//! calling thread first where the driver needs that.

mod ipc;
mod memory;
mod module;
mod partition;
mod stream;

pub(crate) use ipc::{HANDLE_BYTES, ImportedMemory};
pub(crate) use memory::{DeviceMemory, PinnedMemory};
pub(crate) use module::{Kernel, KernelArgs, Module, Shape};
pub(crate) use stream::{Event, Graph, Stream};

pub(crate) use partition::Partition;

use crate::error::CudaError;
use cudarc::driver::sys;
use std::ffi::{CStr, c_char, c_int, c_uint};
use std::sync::{Arc, OnceLock};

/// The oldest driver whose interface is used: CUDA 13.0 (driver 580).
const DRIVER_MIN: c_int = 13_000;

/// Computes on every GPU since Ampere.
const CAPABILITY_MIN: (u32, u32) = (8, 0);

/// Turns a driver's answer into a result.
pub(crate) fn check(result: sys::CUresult, call: &'static str) -> Result<(), CudaError> {
    if result == sys::CUresult::CUDA_SUCCESS {
        return Ok(());
    }
    let describe = |of: unsafe fn(sys::CUresult, *mut *const c_char) -> sys::CUresult| {
        let mut text: *const c_char = std::ptr::null();
        // SAFETY: writes a pointer to a static string, or null for a number it does not know.
        unsafe {
            of(result, &raw mut text);
            match text.is_null() {
                true => String::new(),
                false => CStr::from_ptr(text).to_string_lossy().into_owned(),
            }
        }
    };
    Err(CudaError::Call {
        call,
        name: describe(sys::cuGetErrorName),
        text: describe(sys::cuGetErrorString),
    })
}

/// Calls the driver: `call!(cuInit(0))`.
macro_rules! call {
    ($function:ident($($argument:expr),* $(,)?)) => {{
        // SAFETY: the driver is there, since a `Device` is made by `Device::open` alone; what the
        // arguments promise is said where this is used.
        let result = unsafe { cudarc::driver::sys::$function($($argument),*) };
        crate::driver::check(result, stringify!($function))
    }};
}
pub(crate) use call;

/// A GPU, with the context that all users of it in this process share.
#[derive(Debug)]
pub struct Device {
    ordinal: u32,
    handle: sys::CUdevice,
    context: sys::CUcontext,
    facts: DeviceFacts,
}

/// What a GPU is.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct DeviceFacts {
    /// As NVIDIA sells it.
    pub name: String,
    /// Major and minor.
    pub capability: (u32, u32),
    /// Multiprocessors.
    pub processors_count: u32,
    /// Bytes of memory.
    pub memory_bytes: usize,
    /// Bytes of shared memory that one block may ask for.
    pub shared_bytes_max: u32,
    /// Names the hardware, in this machine and any other.
    pub uuid: [u8; 16],
}

// SAFETY: a context may be current in any number of threads, and the driver locks for itself.
unsafe impl Send for Device {}
// SAFETY: as above.
unsafe impl Sync for Device {}

/// Loads the driver once for the process.
fn driver() -> Result<(), CudaError> {
    static LOADED: OnceLock<Result<(), CudaError>> = OnceLock::new();
    LOADED
        .get_or_init(|| {
            // SAFETY: opens the library, and calls nothing of it.
            if !unsafe { sys::is_culib_present() } {
                return Err(CudaError::NoDriver);
            }
            let mut found = 0;
            // The one call that needs no initialisation, in every driver there is.
            call!(cuDriverGetVersion(&raw mut found))?;
            if found < DRIVER_MIN {
                let needed = DRIVER_MIN;
                return Err(CudaError::OldDriver { found, needed });
            }
            call!(cuInit(0))
        })
        .clone()
}

impl Device {
    /// Takes a GPU by its number among those that the process may see.
    ///
    /// # Errors
    /// If there is no driver, no such GPU, or it is too old.
    pub fn open(ordinal: u32) -> Result<Arc<Self>, CudaError> {
        driver().map_err(|error| match error {
            CudaError::Call { ref name, .. } if name == "CUDA_ERROR_NO_DEVICE" => {
                let (wanted, count) = (ordinal, 0);
                CudaError::NoDevice { wanted, count }
            }
            other => other,
        })?;
        let mut count = 0;
        call!(cuDeviceGetCount(&raw mut count))?;
        if i64::from(ordinal) >= i64::from(count) {
            return Err(CudaError::NoDevice {
                wanted: ordinal,
                count: count.unsigned_abs(),
            });
        }
        let mut handle = 0;
        call!(cuDeviceGet(&raw mut handle, ordinal as c_int))?;
        let facts = DeviceFacts::of(handle)?;
        if facts.capability < CAPABILITY_MIN {
            return Err(CudaError::OldDevice {
                name: facts.name,
                capability: facts.capability,
            });
        }
        let mut context = std::ptr::null_mut();
        call!(cuDevicePrimaryCtxRetain(&raw mut context, handle))?;
        let device = Self {
            ordinal,
            handle,
            context,
            facts,
        };
        device.bind()?;
        Ok(Arc::new(device))
    }

    /// Its number among those that the process may see.
    pub fn ordinal(&self) -> u32 {
        self.ordinal
    }

    /// What it is.
    pub fn facts(&self) -> &DeviceFacts {
        &self.facts
    }

    /// Makes this GPU the one that the calling thread's calls are about.
    pub(crate) fn bind(&self) -> Result<(), CudaError> {
        call!(cuCtxSetCurrent(self.context))
    }

    /// Bytes free and bytes in all.
    ///
    /// # Errors
    /// If the driver does not say.
    pub fn memory(&self) -> Result<(usize, usize), CudaError> {
        self.bind()?;
        let (mut free, mut total) = (0, 0);
        call!(cuMemGetInfo_v2(&raw mut free, &raw mut total))?;
        Ok((free, total))
    }

    /// Waits until the GPU has done everything that was asked of it.
    ///
    /// # Errors
    /// What failed on the way.
    pub fn synchronize(&self) -> Result<(), CudaError> {
        self.bind()?;
        call!(cuCtxSynchronize())
    }
}

impl Drop for Device {
    fn drop(&mut self) {
        // Nothing can be done about a context that does not close.
        let _ = call!(cuDevicePrimaryCtxRelease_v2(self.handle));
    }
}

impl DeviceFacts {
    fn of(handle: sys::CUdevice) -> Result<Self, CudaError> {
        use sys::CUdevice_attribute_enum as Attribute;
        let attribute = |which| -> Result<u32, CudaError> {
            let mut value = 0;
            call!(cuDeviceGetAttribute(&raw mut value, which, handle))?;
            Ok(value.unsigned_abs())
        };
        let mut name = [0 as c_char; 256];
        call!(cuDeviceGetName(
            name.as_mut_ptr(),
            name.len() as c_int,
            handle
        ))?;
        let mut uuid = sys::CUuuid_st { bytes: [0; 16] };
        call!(cuDeviceGetUuid_v2(&raw mut uuid, handle))?;
        let mut memory_bytes = 0;
        call!(cuDeviceTotalMem_v2(&raw mut memory_bytes, handle))?;
        Ok(Self {
            // SAFETY: the driver ends the name with a zero within the array.
            name: unsafe { CStr::from_ptr(name.as_ptr()) }
                .to_string_lossy()
                .into_owned(),
            capability: (
                attribute(Attribute::CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MAJOR)?,
                attribute(Attribute::CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MINOR)?,
            ),
            processors_count: attribute(Attribute::CU_DEVICE_ATTRIBUTE_MULTIPROCESSOR_COUNT)?,
            memory_bytes,
            shared_bytes_max: attribute(
                Attribute::CU_DEVICE_ATTRIBUTE_MAX_SHARED_MEMORY_PER_BLOCK_OPTIN,
            )?,
            uuid: uuid.bytes.map(|byte| byte as u8),
        })
    }
}

/// No waiting for the default stream, and no timing, which would make events slower.
const STREAM_NON_BLOCKING: c_uint = 1;
