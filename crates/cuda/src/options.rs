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
        }
    }
}
