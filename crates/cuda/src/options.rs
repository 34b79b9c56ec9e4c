//! How a GPU is to be used.

use cleave_engine::ops::{KvType, Precision};

/// How one engine uses a GPU.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct CudaOptions {
    /// How dense weights are stored, and activations that meet weights.
    pub precision: Precision,
    /// How keys and values are stored: as activations are, or beside bf16 in fp8.
    pub kv: KvType,
    /// Who makes large matrix products.
    pub products: Products,
    /// Beside other engines of this process on the same GPU.
    pub priority: Priority,
    /// The multiprocessors that it keeps to; all if none are named.
    pub share: Option<Share>,
}

/// Whose work comes first where two engines of a process want the same multiprocessors, between kernels: one that runs keeps its
/// multiprocessors until it ends.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Priority {
    /// Nobody's.
    Normal,
    /// This one's, as soon as another's kernel ends.
    High,
}

/// One of the two parts that a GPU's multiprocessors are split into. The driver splits equal shares the same way, so
/// that two engines with the two parts of one split share none. Two processes do so under MPS alone: else they take turns on
/// the whole GPU.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Share {
    /// How much of the whole the first part is, 1 to 99; the driver rounds it up to what the hardware can keep apart.
    pub percent: u32,
    /// Which part.
    pub part: Part,
}

/// See [`Share`].
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Part {
    /// That many percent.
    First,
    /// What is left.
    Rest,
}

/// Who makes large matrix products.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Products {
    /// Cleave's kernels, which add in the same order whatever else is in the step: answers do not depend on the
    /// path.
    PathIndependent,
    /// cublasLt, which chooses by the number of rows: faster, and the last bits of an answer may depend on what
    /// else was in its steps.
    Fast,
}

impl CudaOptions {
    /// Answers that do not depend on the path.
    pub fn new(precision: Precision) -> Self {
        Self {
            precision,
            kv: precision.into(),
            products: Products::PathIndependent,
            priority: Priority::Normal,
            share: None,
        }
    }
}
