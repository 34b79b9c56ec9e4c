//! Why a GPU could not do what was asked.
//!
//! Owns: the sentences that users read. Never: decides what to do instead.

use cleave_engine::EngineError;
use cleave_engine::ops::{KvType, Precision};

/// Why the GPU cannot be used, by what a user can do about it.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum CudaError {
    /// Install the driver, or compute elsewhere.
    #[error("no NVIDIA driver (libcuda.so.1) on this machine; install one, or use --device cpu")]
    NoDriver,
    /// Install a newer driver.
    #[error(
        "the NVIDIA driver speaks CUDA {}.{}, Cleave needs {}.{} or later: update the driver",
        .found / 1000, .found % 1000 / 10, .needed / 1000, .needed % 1000 / 10
    )]
    OldDriver {
        /// As the driver says it: 1000 × major + 10 × minor.
        found: i32,
        /// The same.
        needed: i32,
    },
    /// Choose another GPU.
    #[error("no GPU number {wanted}: the driver sees {count} (CUDA_VISIBLE_DEVICES may hide some)")]
    NoDevice {
        /// What was asked for.
        wanted: u32,
        /// How many there are.
        count: u32,
    },
    /// Choose another GPU.
    #[error("{name} has compute capability {}.{}; Cleave's kernels need 8.0 or later", .capability.0, .capability.1)]
    OldDevice {
        /// The GPU.
        name: String,
        /// Major and minor.
        capability: (u32, u32),
    },
    /// Build with a toolkit, or install the run-time compiler.
    #[error("{0}")]
    NoKernels(String),
    /// Ask for less, or use a larger GPU.
    #[error(
        "out of GPU memory: {wanted} bytes for {what}, {free} of {total} bytes are free; ask for less \
         (--kv-cache, --gpu-memory-utilization, --max-num-batched-tokens), or stop what else runs there"
    )]
    OutOfMemory {
        /// Bytes asked for.
        wanted: usize,
        /// For what.
        what: &'static str,
        /// Bytes that are free.
        free: usize,
        /// Bytes that the device has.
        total: usize,
    },
    /// Choose another format.
    #[error(
        "a KV cache in {} beside weights in {} is not supported on a GPU; as wide as weights, or fp8_e4m3 beside bf16 are",
        .kv.name(), .precision.name()
    )]
    NoKvType {
        /// What was asked for.
        kv: KvType,
        /// The weights' format.
        precision: Precision,
    },
    /// Give another share, or none.
    #[error(
        "{percent} % of {processors} multiprocessors leave nothing for the other part; choose a share further from \
         0 and 1, or leave --gpu-decode-share out"
    )]
    NoPartition {
        /// The first part.
        percent: u32,
        /// Of how many.
        processors: u32,
    },
    /// Give the host's memory some room.
    #[error(
        "the system lends no {wanted} bytes of memory that the GPU can copy from: free some of the host's \
         memory, or raise the limit of locked memory (ulimit -l)"
    )]
    NoPinnedMemory {
        /// Bytes asked for.
        wanted: usize,
    },
    /// A call of the driver or of a library failed, or told of what failed before it. After a failed launch
    /// nothing on this GPU works any more in this process.
    #[error("{call} failed: {name}: {text}{}", advice(.name))]
    Call {
        /// Which.
        call: &'static str,
        /// As the library names its error.
        name: String,
        /// As the library describes it.
        text: String,
    },
}

/// Whether every call after it fails too.
fn is_for_good(name: &str) -> bool {
    matches!(
        name,
        "CUDA_ERROR_LAUNCH_FAILED"
            | "CUDA_ERROR_ILLEGAL_ADDRESS"
            | "CUDA_ERROR_MISALIGNED_ADDRESS"
            | "CUDA_ERROR_INVALID_ADDRESS_SPACE"
            | "CUDA_ERROR_ILLEGAL_INSTRUCTION"
            | "CUDA_ERROR_HARDWARE_STACK_ERROR"
            | "CUDA_ERROR_INVALID_PC"
            | "CUDA_ERROR_ASSERT"
            | "CUDA_ERROR_LAUNCH_TIMEOUT"
            | "CUDA_ERROR_ECC_UNCORRECTABLE"
            | "CUDA_ERROR_NVLINK_UNCORRECTABLE"
            | "CUDA_ERROR_CONTAINED"
            | "CUDA_ERROR_TENSOR_MEMORY_LEAK"
            | "CUDA_ERROR_CONTEXT_IS_DESTROYED"
    )
}

/// What to do about a driver's error, where that is known.
fn advice(name: &str) -> &'static str {
    match name {
        _ if is_for_good(name) => {
            "; this process can use the GPU no more: start it again, and if that comes back look for Xid in the \
             kernel's log"
        }
        "CUDA_ERROR_NO_BINARY_FOR_GPU" | "CUDA_ERROR_UNSUPPORTED_PTX_VERSION" => {
            "; this program has no code for this GPU: build it with an nvcc of CUDA 13.0, or update the driver"
        }
        _ => "",
    }
}

impl From<CudaError> for EngineError {
    fn from(error: CudaError) -> Self {
        match &error {
            CudaError::Call { name, .. } if is_for_good(name) => Self::Lost(error.to_string()),
            _ => Self::Device(error.to_string()),
        }
    }
}
