//! Options of the CPU engine.

use crate::affinity::cores_count;
use crate::placement::ThreadPlacement;
use cleave_cpu_kernels::isa::Isa;
use cleave_engine::ops::{KvType, Precision, Quantize};

/// Options of one engine on the processor.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct CpuOptions {
    /// Number format of weights and products.
    pub precision: Precision,
    /// Format to which dense weights are rounded at load.
    pub quantize: Option<Quantize>,
    /// Whether f16 weights stay f16 if `precision` is bf16; otherwise they are rounded to bf16. f16
    /// needs no more memory, and activations keep 13 bits instead of eight, but it has no
    /// dot-product instruction: products of many rows take twice as long.
    pub keeps_f16: bool,
    /// Format of keys and values: the weights' format, or eight bits.
    pub kv: KvType,
    /// Threads that compute, including the engine's own; 0 means one per core.
    pub threads: usize,
    /// Placement of threads and weights.
    pub placement: ThreadPlacement,
    /// Instruction set; `None` chooses the best available.
    pub isa: Option<Isa>,
}

impl CpuOptions {
    /// All cores and the best instruction set; the system places threads and memory.
    pub fn new(precision: Precision) -> Self {
        Self {
            precision,
            quantize: None,
            keeps_f16: false,
            kv: precision.into(),
            threads: 0,
            placement: ThreadPlacement::default(),
            isa: None,
        }
    }

    pub(crate) fn threads_count(&self) -> usize {
        match self.threads {
            0 => cores_count(),
            count => count,
        }
    }

    pub(crate) fn checked_kv(&self) -> Result<KvType, CpuError> {
        let Self { precision, kv, .. } = *self;
        let is_supported = match kv {
            KvType::F32 | KvType::Bf16 => kv == precision.into(),
            KvType::Fp8E4m3 | KvType::Int8PerTokenHead => true,
        };
        if is_supported {
            Ok(kv)
        } else {
            Err(CpuError::NoKvType { kv, precision })
        }
    }

    pub(crate) fn checked_isa(&self) -> Result<Isa, CpuError> {
        let isa = self.isa.unwrap_or_else(Isa::detect);
        if isa.available() {
            Ok(isa)
        } else {
            Err(CpuError::NoIsa {
                requested: isa,
                best: Isa::detect(),
            })
        }
    }
}

/// Errors of the options. Each variant's doc names the remedy.
#[derive(Debug, thiserror::Error)]
pub enum CpuError {
    /// Remedy: choose another instruction set, or none.
    #[error("this processor has no {requested} instructions; the best it has is {best}")]
    NoIsa {
        requested: Isa,
        /// Best set that [`Isa::detect`] finds.
        best: Isa,
    },
    /// Remedy: choose the weights' format, or eight bits.
    #[error(
        "a KV cache in {} beside weights in {} is not supported; {}, fp8_e4m3 and int8_per_token_head are",
        .kv.name(), .precision.name(), .precision.name()
    )]
    NoKvType {
        /// KV format that was requested.
        kv: KvType,
        /// Number format of the weights.
        precision: Precision,
    },
    /// Remedy: choose cores that the process may use.
    #[error("this process may not use cores {requested}; it may use {there}")]
    NoCores {
        /// Requested cores that the process may not use.
        requested: String,
        /// Cores that the process may use.
        there: String,
    },
    /// Remedy: choose fewer threads, or raise the system's limit.
    #[error("cannot start {count} threads: {source}")]
    Threads {
        count: usize,
        source: std::io::Error,
    },
}
