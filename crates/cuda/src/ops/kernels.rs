//! The kernels that the operations launch directly.
//!
//! Owns: the choice of each kernel by precision. Never: launches one.
//! Invariant: all of them take the same formats of activations, keys and values.

use crate::args::{
    AddRowsArgs, EmbedArgs, GateArgs, GatherArgs, HeadNormArgs, NormAddArgs, NormArgs,
    ProjectionNormArgs, RotateArgs, RoundArgs,
};
use crate::attention::kernel_name;
use crate::driver::CudaKernel;
use crate::error::CudaError;
use crate::images::KernelImages;
use crate::options::CudaOptions;
use cleave_engine::ops::{KvType, Precision};

/// The kernels of one precision.
#[derive(Debug)]
pub(super) struct OpsKernels {
    pub(super) embed: CudaKernel<EmbedArgs>,
    pub(super) norm: CudaKernel<NormArgs>,
    pub(super) norm_add: CudaKernel<NormAddArgs>,
    pub(super) add_rows: CudaKernel<AddRowsArgs>,
    pub(super) projection_norm: CudaKernel<ProjectionNormArgs>,
    /// None where activations have the type of the residual stream.
    pub(super) round_rows: Option<CudaKernel<RoundArgs>>,
    pub(super) head_norm: CudaKernel<HeadNormArgs>,
    pub(super) rotate: CudaKernel<RotateArgs>,
    pub(super) gate: CudaKernel<GateArgs>,
    pub(super) gather: CudaKernel<GatherArgs>,
}

impl OpsKernels {
    /// # Errors
    /// If there is no code for this GPU, or for keys and values in that format beside such weights.
    pub(super) fn load(images: &KernelImages, options: &CudaOptions) -> Result<Self, CudaError> {
        let (precision, kv) = (options.precision, options.kv);
        let is_fp8_beside_bf16 = (precision, kv) == (Precision::Bf16, KvType::Fp8E4m3);
        if kv != precision.into() && !is_fp8_beside_bf16 {
            return Err(CudaError::NoKvType { kv, precision });
        }
        let of = |name: &str| format!("{name}_{}", precision.name());
        Ok(Self {
            embed: images.kernel(&of("embed"))?,
            norm: images.kernel(&of("norm"))?,
            norm_add: images.kernel(&of("norm_add"))?,
            add_rows: images.kernel(&of("add_rows"))?,
            projection_norm: images.kernel(&of("projection_norm"))?,
            round_rows: match precision {
                Precision::F32 => None,
                Precision::Bf16 => Some(images.kernel(&of("round_rows"))?),
            },
            head_norm: images.kernel(&of("head_norm"))?,
            rotate: images.kernel(&format!("rotate_{}", kernel_name(kv)))?,
            gate: images.kernel(&of("silu_gate"))?,
            gather: images.kernel("gather_rows")?,
        })
    }
}
