//! The reasons why a GPU cannot be used or an operation on it failed.
//!
//! Owns: the messages that users read. Never: decides how to go on.

use cleave_engine::EngineError;
use cleave_engine::ops::{KvType, Precision};
use cudarc::driver::sys::CUresult;

/// An error of the GPU; each variant's doc says what a user can do about it.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum CudaError {
    /// A user installs the driver or chooses another device.
    #[error("no NVIDIA driver (libcuda.so.1) on this machine; install one, or use --device cpu")]
    NoDriver,
    /// A user installs a newer driver.
    #[error(
        "the NVIDIA driver speaks CUDA {}.{}, Cleave needs {}.{} or later: update the driver",
        .found / 1000, .found % 1000 / 10, .needed / 1000, .needed % 1000 / 10
    )]
    OldDriver {
        /// The driver's version number: 1000 × major + 10 × minor.
        found: i32,
        /// The oldest version that Cleave works with, in the same form.
        needed: i32,
    },
    /// A user chooses another GPU.
    #[error(
        "no GPU number {ordinal}: the driver sees {count} (CUDA_VISIBLE_DEVICES may hide some)"
    )]
    NoDevice {
        ordinal: u32,
        /// The number of GPUs that the driver sees.
        count: u32,
    },
    /// A user chooses another GPU.
    #[error("{name} has compute capability {}.{}; Cleave's kernels need 8.0 or later", .capability.0, .capability.1)]
    OldDevice {
        name: String,
        /// The compute capability, major and minor.
        capability: (u32, u32),
    },
    /// A user builds with the CUDA toolkit or installs the run-time compiler.
    #[error("{0}")]
    NoKernels(String),
    /// A user asks for less memory or takes a larger GPU.
    #[error(
        "out of GPU memory: {requested} bytes for {purpose}, {free} of {total} bytes are free; ask for less \
         (--kv-cache, --gpu-memory-utilization, --max-num-batched-tokens), or stop what else runs there"
    )]
    OutOfMemory {
        requested: usize,
        /// The purpose, as the message names it.
        purpose: &'static str,
        /// Bytes that are free.
        free: usize,
        /// Bytes that the device has.
        total: usize,
    },
    /// A user chooses another KV format.
    #[error(
        "a KV cache in {} beside weights in {} is not supported on a GPU; as wide as weights, or fp8_e4m3 beside bf16 are",
        .kv.name(), .precision.name()
    )]
    NoKvType { kv: KvType, precision: Precision },
    /// A user sets another share or none.
    #[error(
        "{percent} % of {processors} multiprocessors leave nothing for the other part; choose a share further from \
         0 and 1, or none (--gpu-decode-share)"
    )]
    NoPartition {
        /// The share of the first part.
        percent: u32,
        /// The number of multiprocessors of the whole GPU.
        processors: u32,
    },
    /// A user frees host memory.
    #[error(
        "the system lends no {requested} bytes of memory that the GPU can copy from: free some of the host's \
         memory, or raise the limit of locked memory (ulimit -l)"
    )]
    NoPinnedMemory { requested: usize },
    /// A call of the driver or of a library failed, or reported the failure of earlier work. After
    /// a failed launch this process cannot use the GPU any more.
    #[error("{call} failed: {name}: {text}{}", advice(.name, *.is_device_lost))]
    Call {
        call: &'static str,
        /// The library's name of the error.
        name: String,
        /// The library's description of the error.
        text: String,
        /// Whether every later call fails too.
        is_device_lost: bool,
    },
}

/// The driver's results that concern one call only: the context stays usable. After any other
/// result, also one that no list has, this process must assume that nothing works any more.
const PER_CALL_ERRORS: [CUresult; 67] = [
    CUresult::CUDA_SUCCESS,
    CUresult::CUDA_ERROR_INVALID_VALUE,
    CUresult::CUDA_ERROR_OUT_OF_MEMORY,
    CUresult::CUDA_ERROR_NOT_INITIALIZED,
    CUresult::CUDA_ERROR_PROFILER_DISABLED,
    CUresult::CUDA_ERROR_PROFILER_NOT_INITIALIZED,
    CUresult::CUDA_ERROR_PROFILER_ALREADY_STARTED,
    CUresult::CUDA_ERROR_PROFILER_ALREADY_STOPPED,
    CUresult::CUDA_ERROR_STUB_LIBRARY,
    CUresult::CUDA_ERROR_CALL_REQUIRES_NEWER_DRIVER,
    CUresult::CUDA_ERROR_NO_DEVICE,
    CUresult::CUDA_ERROR_INVALID_DEVICE,
    CUresult::CUDA_ERROR_DEVICE_NOT_LICENSED,
    CUresult::CUDA_ERROR_INVALID_IMAGE,
    CUresult::CUDA_ERROR_CONTEXT_ALREADY_CURRENT,
    CUresult::CUDA_ERROR_MAP_FAILED,
    CUresult::CUDA_ERROR_UNMAP_FAILED,
    CUresult::CUDA_ERROR_ARRAY_IS_MAPPED,
    CUresult::CUDA_ERROR_ALREADY_MAPPED,
    CUresult::CUDA_ERROR_NO_BINARY_FOR_GPU,
    CUresult::CUDA_ERROR_ALREADY_ACQUIRED,
    CUresult::CUDA_ERROR_NOT_MAPPED,
    CUresult::CUDA_ERROR_NOT_MAPPED_AS_ARRAY,
    CUresult::CUDA_ERROR_NOT_MAPPED_AS_POINTER,
    CUresult::CUDA_ERROR_UNSUPPORTED_LIMIT,
    CUresult::CUDA_ERROR_CONTEXT_ALREADY_IN_USE,
    CUresult::CUDA_ERROR_PEER_ACCESS_UNSUPPORTED,
    CUresult::CUDA_ERROR_INVALID_PTX,
    CUresult::CUDA_ERROR_INVALID_GRAPHICS_CONTEXT,
    CUresult::CUDA_ERROR_JIT_COMPILER_NOT_FOUND,
    CUresult::CUDA_ERROR_UNSUPPORTED_PTX_VERSION,
    CUresult::CUDA_ERROR_JIT_COMPILATION_DISABLED,
    CUresult::CUDA_ERROR_UNSUPPORTED_EXEC_AFFINITY,
    CUresult::CUDA_ERROR_UNSUPPORTED_DEVSIDE_SYNC,
    CUresult::CUDA_ERROR_INVALID_SOURCE,
    CUresult::CUDA_ERROR_FILE_NOT_FOUND,
    CUresult::CUDA_ERROR_SHARED_OBJECT_SYMBOL_NOT_FOUND,
    CUresult::CUDA_ERROR_SHARED_OBJECT_INIT_FAILED,
    CUresult::CUDA_ERROR_OPERATING_SYSTEM,
    CUresult::CUDA_ERROR_INVALID_HANDLE,
    CUresult::CUDA_ERROR_LOSSY_QUERY,
    CUresult::CUDA_ERROR_NOT_FOUND,
    CUresult::CUDA_ERROR_NOT_READY,
    CUresult::CUDA_ERROR_LAUNCH_OUT_OF_RESOURCES,
    CUresult::CUDA_ERROR_PEER_ACCESS_ALREADY_ENABLED,
    CUresult::CUDA_ERROR_PEER_ACCESS_NOT_ENABLED,
    CUresult::CUDA_ERROR_PRIMARY_CONTEXT_ACTIVE,
    CUresult::CUDA_ERROR_TOO_MANY_PEERS,
    CUresult::CUDA_ERROR_HOST_MEMORY_ALREADY_REGISTERED,
    CUresult::CUDA_ERROR_HOST_MEMORY_NOT_REGISTERED,
    CUresult::CUDA_ERROR_COOPERATIVE_LAUNCH_TOO_LARGE,
    CUresult::CUDA_ERROR_NOT_PERMITTED,
    CUresult::CUDA_ERROR_NOT_SUPPORTED,
    CUresult::CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED,
    CUresult::CUDA_ERROR_STREAM_CAPTURE_INVALIDATED,
    CUresult::CUDA_ERROR_STREAM_CAPTURE_MERGE,
    CUresult::CUDA_ERROR_STREAM_CAPTURE_UNMATCHED,
    CUresult::CUDA_ERROR_STREAM_CAPTURE_UNJOINED,
    CUresult::CUDA_ERROR_STREAM_CAPTURE_ISOLATION,
    CUresult::CUDA_ERROR_STREAM_CAPTURE_IMPLICIT,
    CUresult::CUDA_ERROR_CAPTURED_EVENT,
    CUresult::CUDA_ERROR_STREAM_CAPTURE_WRONG_THREAD,
    CUresult::CUDA_ERROR_GRAPH_EXEC_UPDATE_FAILURE,
    CUresult::CUDA_ERROR_INVALID_CLUSTER_SIZE,
    CUresult::CUDA_ERROR_FUNCTION_NOT_LOADED,
    CUresult::CUDA_ERROR_INVALID_RESOURCE_TYPE,
    CUresult::CUDA_ERROR_INVALID_RESOURCE_CONFIGURATION,
];

/// Returns whether every call after this result of the driver fails too.
fn is_device_lost(code: i32) -> bool {
    !PER_CALL_ERRORS.iter().any(|result| *result as i32 == code)
}

/// Returns the advice for a driver's error, or an empty text where none is known.
fn advice(name: &str, is_for_good: bool) -> &'static str {
    match name {
        "CUDA_ERROR_SYSTEM_NOT_READY" | "CUDA_ERROR_FABRIC_NOT_READY" => {
            "; the system's GPUs are not ready: start NVIDIA's fabric manager, then Cleave again"
        }
        _ if name.starts_with("CUDA_ERROR_MPS_") => {
            "; the MPS control daemon or server failed or is full: look at its log, then start Cleave again"
        }
        _ if is_for_good => {
            "; this process can use the GPU no more: start it again, and if that comes back look for Xid in the \
             kernel's log"
        }
        "CUDA_ERROR_NO_BINARY_FOR_GPU" | "CUDA_ERROR_UNSUPPORTED_PTX_VERSION" => {
            "; this program has no code for this GPU: build it with an nvcc of CUDA 13.0, or update the driver"
        }
        _ => "",
    }
}

impl CudaError {
    /// Makes an error from a result of the driver, with the driver's name and description where it
    /// has them.
    pub(crate) fn of_driver(
        call: &'static str,
        code: i32,
        words: Option<(String, String)>,
    ) -> Self {
        let unknown = || {
            let text = "a result that this driver does not describe".to_owned();
            (format!("result {code}"), text)
        };
        let (name, text) = words.unwrap_or_else(unknown);
        Self::Call {
            call,
            name,
            text,
            is_device_lost: is_device_lost(code),
        }
    }
}

impl From<CudaError> for EngineError {
    fn from(error: CudaError) -> Self {
        match &error {
            CudaError::Call {
                is_device_lost: true,
                ..
            } => Self::Lost(error.to_string()),
            _ => Self::Device(error.to_string()),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn is_lost(code: CUresult) -> bool {
        let error = CudaError::of_driver("cuStreamSynchronize", code as i32, None);
        matches!(EngineError::from(error), EngineError::Lost(_))
    }

    #[test]
    fn a_fatal_driver_result_ends_the_worker() {
        for code in [
            CUresult::CUDA_ERROR_DEINITIALIZED,
            CUresult::CUDA_ERROR_DEVICE_UNAVAILABLE,
            CUresult::CUDA_ERROR_INVALID_CONTEXT,
            CUresult::CUDA_ERROR_ECC_UNCORRECTABLE,
            CUresult::CUDA_ERROR_NVLINK_UNCORRECTABLE,
            CUresult::CUDA_ERROR_CONTAINED,
            CUresult::CUDA_ERROR_ILLEGAL_STATE,
            CUresult::CUDA_ERROR_ILLEGAL_ADDRESS,
            CUresult::CUDA_ERROR_LAUNCH_TIMEOUT,
            CUresult::CUDA_ERROR_CONTEXT_IS_DESTROYED,
            CUresult::CUDA_ERROR_ASSERT,
            CUresult::CUDA_ERROR_HARDWARE_STACK_ERROR,
            CUresult::CUDA_ERROR_ILLEGAL_INSTRUCTION,
            CUresult::CUDA_ERROR_MISALIGNED_ADDRESS,
            CUresult::CUDA_ERROR_INVALID_ADDRESS_SPACE,
            CUresult::CUDA_ERROR_INVALID_PC,
            CUresult::CUDA_ERROR_LAUNCH_FAILED,
            CUresult::CUDA_ERROR_TENSOR_MEMORY_LEAK,
            CUresult::CUDA_ERROR_SYSTEM_NOT_READY,
            CUresult::CUDA_ERROR_SYSTEM_DRIVER_MISMATCH,
            CUresult::CUDA_ERROR_MPS_CONNECTION_FAILED,
            CUresult::CUDA_ERROR_MPS_RPC_FAILURE,
            CUresult::CUDA_ERROR_MPS_SERVER_NOT_READY,
            CUresult::CUDA_ERROR_MPS_MAX_CLIENTS_REACHED,
            CUresult::CUDA_ERROR_MPS_MAX_CONNECTIONS_REACHED,
            CUresult::CUDA_ERROR_MPS_CLIENT_TERMINATED,
            CUresult::CUDA_ERROR_TIMEOUT,
            CUresult::CUDA_ERROR_EXTERNAL_DEVICE,
            CUresult::CUDA_ERROR_UNKNOWN,
        ] {
            assert!(is_lost(code), "{code:?}");
        }
        for code in PER_CALL_ERRORS {
            assert!(!is_lost(code), "{code:?}");
        }
    }

    #[test]
    fn an_unlisted_driver_result_is_reported_and_fatal() {
        let error = CudaError::of_driver("cuLaunchKernel", 4711, None);
        let text = error.to_string();
        assert!(text.contains("result 4711"), "{text}");
        assert!(text.contains("start it again"), "{text}");
        assert!(matches!(error.into(), EngineError::Lost(_)));
    }

    #[test]
    fn an_mps_error_names_mps() {
        let words = ("CUDA_ERROR_MPS_SERVER_NOT_READY".to_owned(), String::new());
        let error = CudaError::of_driver("cuInit", 807, Some(words));
        assert!(error.to_string().contains("MPS"), "{error}");
    }
}
