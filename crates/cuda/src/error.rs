//! Why a GPU could not do what was asked.
//!
//! Owns: the sentences that users read. Never: decides what to do instead.

use cleave_engine::EngineError;

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
    #[error("out of GPU memory: {wanted} bytes for {what}, {free} of {total} bytes are free")]
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
    /// A call of the driver or of a library failed. After a failed launch nothing on this GPU works
    /// any more in this process.
    #[error("{call} failed: {name}: {text}")]
    Call {
        /// Which.
        call: &'static str,
        /// As the library names its error.
        name: String,
        /// As the library describes it.
        text: String,
    },
}

impl From<CudaError> for EngineError {
    fn from(error: CudaError) -> Self {
        Self::Device(error.to_string())
    }
}
