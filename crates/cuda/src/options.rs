//! The options of an engine on a GPU.

use cleave_engine::ops::{KvType, Precision};

/// The options of one engine on a GPU.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct CudaOptions {
    /// The format of dense weights and of the activations that are multiplied with weights.
    pub precision: Precision,
    /// The format of keys and values: that of activations, or fp8 where those are bf16.
    pub kv: KvType,
    /// The implementation of large matrix products.
    pub products: MatmulMode,
    /// The priority among the engines of this process on the same GPU.
    pub priority: StreamPriority,
    /// The multiprocessors that the engine is limited to; `None` stands for all.
    pub share: Option<MultiprocessorShare>,
}

/// The priority of an engine where two engines of a process want the same multiprocessors. It
/// decides between kernels only: a running kernel keeps its multiprocessors until it ends.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum StreamPriority {
    /// No engine goes first.
    Normal,
    /// This engine's kernels go first as soon as a kernel of another engine ends.
    High,
}

/// One of the two parts that a GPU's multiprocessors are split into. The driver splits equal shares
/// the same way, so that two engines with the two parts of one split have no multiprocessor in
/// common. Two processes run side by side like this only under MPS; without it they take turns on
/// the whole GPU.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct MultiprocessorShare {
    /// The size of the first part in percent, 1 to 99; the driver rounds it up to a size that the
    /// hardware can separate.
    pub percent: u32,
    pub part: SharePart,
}

/// One of the two parts of a [`MultiprocessorShare`].
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum SharePart {
    /// The part of `percent` percent.
    First,
    /// All multiprocessors outside the first part.
    Rest,
}

/// The implementation of large matrix products.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum MatmulMode {
    /// Cleave's kernels, which add in the same order whatever else is in the step, so that answers
    /// do not depend on the path.
    PathIndependent,
    /// cublasLt, which chooses its algorithm by the number of rows: it is faster, but the last bits
    /// of an answer may depend on the other requests in its steps.
    Fast,
}

impl CudaOptions {
    /// Returns options under which answers do not depend on the path, on a whole GPU.
    pub fn new(precision: Precision) -> Self {
        Self {
            precision,
            kv: precision.into(),
            products: MatmulMode::PathIndependent,
            priority: StreamPriority::Normal,
            share: None,
        }
    }
}
