//! The kernels that operations launch by themselves.
//!
//! Owns: which of each there is for a precision. Never: launches one.
//! Invariant: all of them take the same formats of activations, keys and values.

use crate::args::{EmbedArgs, GateArgs, GatherArgs, HeadNormArgs, NormArgs, RotateArgs};
use crate::attention::kernel_name;
use crate::driver::Kernel;
use crate::error::CudaError;
use crate::images::Images;
use crate::options::CudaOptions;
use cleave_engine::ops::{KvType, Precision};

/// Kernels of one precision.
#[derive(Debug)]
pub(super) struct Kernels {
    pub(super) embed: Kernel<EmbedArgs>,
    pub(super) norm: Kernel<NormArgs>,
    pub(super) head_norm: Kernel<HeadNormArgs>,
    pub(super) rotate: Kernel<RotateArgs>,
    pub(super) gate: Kernel<GateArgs>,
    pub(super) gather: Kernel<GatherArgs>,
}

impl Kernels {
    /// # Errors
    /// If there is no code for this GPU, or for keys and values in that format beside such weights.
    pub(super) fn load(images: &Images, options: &CudaOptions) -> Result<Self, CudaError> {
        let (precision, kv) = (options.precision, options.kv);
        let is_narrow = (precision, kv) == (Precision::Bf16, KvType::Fp8E4m3);
        if kv != precision.into() && !is_narrow {
            return Err(CudaError::NoKvType { kv, precision });
        }
        let of = |name: &str| format!("{name}_{}", precision.name());
        Ok(Self {
            embed: images.kernel(&of("embed"))?,
            norm: images.kernel(&of("norm"))?,
            head_norm: images.kernel(&of("head_norm"))?,
            rotate: images.kernel(&format!("rotate_{}", kernel_name(kv)))?,
            gate: images.kernel(&of("silu_gate"))?,
            gather: images.kernel("gather_rows")?,
        })
    }
}
