//! The part of the CUDA driver that Cleave uses.
//!
//! Owns: every call into libcuda, and the driver's objects: a device's context, memory, streams,
//! events, modules. Dropping one releases it.
//! Never: panics because a library or a symbol is missing (as the binding would); converts a result
//! into the binding's enum (see `dynamic`); allocates or waits on its own; knows the purpose of a
//! kernel.
//! Invariant: every object keeps its [`CudaDevice`] alive; a call binds the device's context to the
//! calling thread first where the driver needs that.

mod ipc;
mod memory;
mod module;
mod partition;
mod stream;
mod tensor_map;

pub(crate) use ipc::{HANDLE_BYTES, ImportedMemory};
pub(crate) use memory::{DeviceMemory, PinnedMemory};
pub(crate) use module::{CudaKernel, CudaModule, KernelArgs, LaunchShape};
pub(crate) use stream::{CudaEvent, CudaGraph, CudaStream};
pub(crate) use tensor_map::TensorMap;

pub(crate) use partition::GreenPartition;

use crate::error::CudaError;
use crate::options::{MultiprocessorShare, SharePart};
use cudarc::driver::sys;
use std::ffi::{CStr, c_char, c_int, c_uint};
use std::sync::{Arc, OnceLock};

/// The oldest interface version that Cleave works with: CUDA 13.0 (driver 580).
const DRIVER_MIN: c_int = 13_000;

/// The oldest compute capability that the kernels run on: Ampere's.
const CAPABILITY_MIN: (u32, u32) = (8, 0);

/// Converts a driver's result; `None` stands for a function that the driver lacks.
pub(crate) fn check(result: Option<c_int>, call: &'static str) -> Result<(), CudaError> {
    match result {
        Some(SUCCESS) => Ok(()),
        Some(code) => Err(CudaError::of_driver(call, code, describe(code))),
        None => Err(CudaError::Call {
            call,
            name: "no such function".to_owned(),
            text: "this driver is older than Cleave: update it".to_owned(),
            is_device_lost: false,
        }),
    }
}

/// Returns the driver's name and description of a result; `None` for a number that it does not
/// know.
fn describe(code: c_int) -> Option<(String, String)> {
    let mut words = [std::ptr::null::<c_char>(); 2];
    // The binding's own declarations pass the result as its enum, which may not list this number.
    type DescribeResultFn = unsafe extern "C" fn(c_int, *mut *const c_char) -> c_int;
    for (name, word) in ["cuGetErrorName", "cuGetErrorString"]
        .iter()
        .zip(&mut words)
    {
        // SAFETY: the driver is loaded; the function has that type, and writes a pointer to a
        // static string, or null.
        unsafe {
            let found = sys::culib().get::<DescribeResultFn>(name.as_bytes()).ok()?;
            found(code, word);
        }
        if word.is_null() {
            return None;
        }
    }
    // SAFETY: both are static strings that end with a zero.
    let [name, text] = words.map(|word| unsafe { CStr::from_ptr(word) });
    let owned = |text: &CStr| text.to_string_lossy().into_owned();
    Some((owned(name), owned(text)))
}

/// Calls the driver: `call!(cuInit(0))`. The driver is loaded, because only `CudaDevice::open`
/// makes a `CudaDevice`; each caller states why its arguments are valid.
macro_rules! call {
    ($function:ident($($argument:expr),* $(,)?)) => {{
        use cudarc::driver::sys as declared;
        let result = crate::dynamic::call_raw!(declared::culib, declared::$function($($argument),*));
        crate::driver::check(result, stringify!($function))
    }};
}
pub(crate) use call;

const SUCCESS: c_int = 0;

/// A GPU, with the context that all users of it in this process share.
#[derive(Debug)]
pub struct CudaDevice {
    ordinal: u32,
    handle: sys::CUdevice,
    context: sys::CUcontext,
    facts: DeviceFacts,
}

/// The properties of a GPU.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct DeviceFacts {
    /// The product's name, as the driver reports it.
    pub name: String,
    /// The compute capability, major and minor.
    pub capability: (u32, u32),
    /// The number of multiprocessors.
    pub processors_count: u32,
    /// The size of its memory in bytes.
    pub memory_bytes: usize,
    /// The most shared memory of one thread block, in bytes.
    pub shared_bytes_max: u32,
    /// Whether processes share the GPU through NVIDIA's Multi-Process Service; without it they take
    /// turns on the whole GPU.
    pub is_mps: bool,
    /// Identifies the hardware across all machines.
    pub uuid: [u8; 16],
}

// SAFETY: a context may be current in any number of threads, and the driver locks for itself.
unsafe impl Send for CudaDevice {}
// SAFETY: as above.
unsafe impl Sync for CudaDevice {}

/// Loads the driver once for the process.
fn driver() -> Result<(), CudaError> {
    static LOADED: OnceLock<Result<(), CudaError>> = OnceLock::new();
    LOADED
        .get_or_init(|| {
            // SAFETY: this opens the library, and calls none of its functions.
            if !unsafe { sys::is_culib_present() } {
                return Err(CudaError::NoDriver);
            }
            let mut found = 0;
            // This is the only call that works without initialisation, in every version of the
            // driver.
            call!(cuDriverGetVersion(&raw mut found))?;
            if found < DRIVER_MIN {
                let needed = DRIVER_MIN;
                return Err(CudaError::OldDriver { found, needed });
            }
            call!(cuInit(0))
        })
        .clone()
}

impl CudaDevice {
    /// Opens a GPU by its number among those that the process may see.
    ///
    /// # Errors
    /// If there is no driver, no such GPU, or it is too old.
    pub fn open(ordinal: u32) -> Result<Arc<Self>, CudaError> {
        driver().map_err(|error| match error {
            CudaError::Call { ref name, .. } if name == "CUDA_ERROR_NO_DEVICE" => {
                CudaError::NoDevice { ordinal, count: 0 }
            }
            other => other,
        })?;
        let mut count: c_int = 0;
        call!(cuDeviceGetCount(&raw mut count))?;
        if i64::from(ordinal) >= i64::from(count) {
            return Err(CudaError::NoDevice {
                ordinal,
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

    /// Returns the GPU's number among those that the process may see.
    pub fn ordinal(&self) -> u32 {
        self.ordinal
    }

    pub fn facts(&self) -> &DeviceFacts {
        &self.facts
    }

    /// Makes this GPU's context current on the calling thread.
    pub(crate) fn bind(&self) -> Result<(), CudaError> {
        call!(cuCtxSetCurrent(self.context))
    }

    /// Enables direct access to the other GPU's memory, so that copies do not go through the host.
    /// Returns whether the hardware allows it.
    ///
    /// # Errors
    /// If the driver fails.
    pub(crate) fn enable_peer_access(&self, other: &Self) -> Result<bool, CudaError> {
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

    /// Returns the free and the total memory in bytes.
    ///
    /// # Errors
    /// If the driver fails.
    pub fn memory(&self) -> Result<(usize, usize), CudaError> {
        self.bind()?;
        let (mut free, mut total) = (0, 0);
        call!(cuMemGetInfo_v2(&raw mut free, &raw mut total))?;
        Ok((free, total))
    }

    /// Checks that the multiprocessors can be divided, with `percent` of them in one part.
    ///
    /// # Errors
    /// If the driver cannot divide this device, or nothing would be left for the other part.
    pub fn check_divisible(self: &Arc<Self>, percent: u32) -> Result<(), CudaError> {
        for part in [SharePart::First, SharePart::Rest] {
            GreenPartition::new(self, MultiprocessorShare { percent, part })?;
        }
        Ok(())
    }

    /// Waits until the GPU has finished all queued work.
    ///
    /// # Errors
    /// If any of that work failed.
    pub fn synchronize(&self) -> Result<(), CudaError> {
        self.bind()?;
        call!(cuCtxSynchronize())
    }
}

impl Drop for CudaDevice {
    fn drop(&mut self) {
        // A drop cannot return the error of a context that does not close.
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
            // SAFETY: the driver terminates the name with a zero within the array.
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
            // A driver that does not know this attribute cannot run the service for this process.
            is_mps: attribute(Attribute::CU_DEVICE_ATTRIBUTE_MPS_ENABLED).is_ok_and(|is| is != 0),
            uuid: uuid.bytes.map(|byte| byte as u8),
        })
    }
}

/// The flag for streams that do not wait for the default stream.
const STREAM_NON_BLOCKING: c_uint = 1;
