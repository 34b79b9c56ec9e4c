//! The CUDA driver, as much of it as Cleave uses.
//!
//! Owns: every call into libcuda, and what the driver hands out: a device's context, memory, streams,
//! events, modules. Each is given back when dropped.
//! Never: panics because a library or a symbol is missing (the binding below would), takes a result for one of the
//! binding's enum (see `dynamic`), allocates or waits on its own, or knows what a kernel computes.
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
use crate::options::{Part, Share};
use cudarc::driver::sys;
use std::ffi::{CStr, c_char, c_int, c_uint};
use std::sync::{Arc, OnceLock};

/// The oldest driver whose interface is used: CUDA 13.0 (driver 580).
const DRIVER_MIN: c_int = 13_000;

/// Computes on every GPU since Ampere.
const CAPABILITY_MIN: (u32, u32) = (8, 0);

/// Turns a driver's answer into a result; `None` if it lacks the function.
pub(crate) fn check(result: Option<c_int>, call: &'static str) -> Result<(), CudaError> {
    match result {
        Some(SUCCESS) => Ok(()),
        Some(code) => Err(CudaError::of_driver(call, code, describe(code))),
        None => Err(CudaError::Call {
            call,
            name: "no such function".to_owned(),
            text: "this driver is older than Cleave: update it".to_owned(),
            is_for_good: false,
        }),
    }
}

/// The driver's name and description of a result; `None` of a number that it does not know.
fn describe(code: c_int) -> Option<(String, String)> {
    let mut words = [std::ptr::null::<c_char>(); 2];
    // The binding's own declarations take the result as its enum.
    type Describe = unsafe extern "C" fn(c_int, *mut *const c_char) -> c_int;
    for (name, word) in ["cuGetErrorName", "cuGetErrorString"]
        .iter()
        .zip(&mut words)
    {
        // SAFETY: the driver is there; the function is of that type, and writes a pointer to a static string, or null.
        unsafe {
            let found = sys::culib().get::<Describe>(name.as_bytes()).ok()?;
            found(code, word);
        }
        if word.is_null() {
            return None;
        }
    }
    // SAFETY: static strings that end with a zero.
    let [name, text] = words.map(|word| unsafe { CStr::from_ptr(word) });
    let owned = |text: &CStr| text.to_string_lossy().into_owned();
    Some((owned(name), owned(text)))
}

/// Calls the driver: `call!(cuInit(0))`. It is there, since a `Device` is made by `Device::open` alone; callers say
/// what arguments promise.
macro_rules! call {
    ($function:ident($($argument:expr),* $(,)?)) => {{
        use cudarc::driver::sys as declared;
        let result = crate::dynamic::call_raw!(declared::culib, declared::$function($($argument),*));
        crate::driver::check(result, stringify!($function))
    }};
}
pub(crate) use call;

/// `CUDA_SUCCESS`.
const SUCCESS: c_int = 0;

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
    /// Whether processes share it by NVIDIA's Multi-Process Service; else they take turns on all of it.
    pub is_mps: bool,
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
        let mut count: c_int = 0;
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

    /// Lets this GPU reach the other one's memory by itself, where hardware allows it: copies then do not go by way of
    /// the host. Whether it can.
    ///
    /// # Errors
    /// If the driver fails at it.
    pub(crate) fn reach(&self, other: &Self) -> Result<bool, CudaError> {
        if self.handle == other.handle {
            return Ok(true);
        }
        let mut can: c_int = 0;
        call!(cuDeviceCanAccessPeer(
            &raw mut can,
            self.handle,
            other.handle
        ))?;
        if can == 0 {
            return Ok(false);
        }
        self.bind()?;
        match call!(cuCtxEnablePeerAccess(other.context, 0)) {
            Err(CudaError::Call { ref name, .. })
                if name == "CUDA_ERROR_PEER_ACCESS_ALREADY_ENABLED" =>
            {
                Ok(true)
            }
            enabled => enabled.map(|()| true),
        }
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

    /// Whether its multiprocessors can be divided, so many percent for one part.
    ///
    /// # Errors
    /// If the driver cannot divide this device, or nothing would be left for the other part.
    pub fn can_divide(self: &Arc<Self>, percent: u32) -> Result<(), CudaError> {
        for part in [Part::First, Part::Rest] {
            Partition::new(self, Share { percent, part })?;
        }
        Ok(())
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
            let mut value: c_int = 0;
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
            // A driver that does not know the question has no such service running for us to see.
            is_mps: attribute(Attribute::CU_DEVICE_ATTRIBUTE_MPS_ENABLED).is_ok_and(|is| is != 0),
            uuid: uuid.bytes.map(|byte| byte as u8),
        })
    }
}

/// No waiting for the default stream, and no timing, which would make events slower.
const STREAM_NON_BLOCKING: c_uint = 1;
