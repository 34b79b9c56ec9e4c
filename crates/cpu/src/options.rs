//! How the processor is to be used.

use crate::affinity::cores_count;
use crate::isa::Isa;
use crate::placement::Placement;
use cleave_engine::ops::{KvType, Precision};

/// How one engine uses the processor.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct CpuOptions {
    /// How weights are stored and multiplied.
    pub precision: Precision,
    /// What weights of floats are rounded to when they are loaded.
    pub quantize: Option<Quantize>,
    /// Whether weights that are f16 stay so where `precision` is bf16; they are rounded to that otherwise. They need no
    /// more memory, and activations that meet them keep 13 bits instead of eight, but there is no dot product of theirs:
    /// many rows take twice as long.
    pub keeps_f16: bool,
    /// How keys and values are stored: as weights are, or in eight bits.
    pub kv: KvType,
    /// Threads that compute, the engine's own included; 0 is one per core.
    pub threads: usize,
    /// Where the threads run and the weights lie.
    pub placement: Placement,
    /// Vector instructions; `None` takes the best there are.
    pub isa: Option<Isa>,
}

impl CpuOptions {
    /// Every core, the best instructions; the system places threads and memory.
    pub fn new(precision: Precision) -> Self {
        Self {
            precision,
            quantize: None,
            keeps_f16: false,
            kv: precision.into(),
            threads: 0,
            placement: Placement::default(),
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
        let is_known = match kv {
            KvType::F32 | KvType::Bf16 => kv == precision.into(),
            KvType::Fp8E4m3 | KvType::Int8PerTokenHead => true,
        };
        match is_known {
            true => Ok(kv),
            false => Err(CpuError::NoKvType { kv, precision }),
        }
    }

    pub(crate) fn checked_isa(&self) -> Result<Isa, CpuError> {
        let isa = self.isa.unwrap_or_else(Isa::detect);
        if isa.available() {
            Ok(isa)
        } else {
            Err(CpuError::NoIsa {
                asked: isa,
                best: Isa::detect(),
            })
        }
    }
}

/// What weights are rounded to. Activations that meet them are rounded to eight bits.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Quantize {
    /// Eight bits, a scale for each row of a weight.
    Int8,
    /// Four bits, a scale for each 128 elements of a row, or fewer where 128 do not divide it; the head in eight.
    Int4,
}

impl Quantize {
    /// As the command line spells it.
    pub const fn name(self) -> &'static str {
        match self {
            Self::Int8 => "int8",
            Self::Int4 => "int4",
        }
    }
}

/// Why the processor cannot be used as asked.
#[derive(Debug, thiserror::Error)]
pub enum CpuError {
    /// Choose another instruction set, or none.
    #[error("this processor has no {asked} instructions; the best it has is {best}")]
    NoIsa {
        /// What was asked for.
        asked: Isa,
        /// What [`Isa::detect`] chooses.
        best: Isa,
    },
    /// Choose the weights' format, or eight bits.
    #[error(
        "a KV cache in {} beside weights in {} is not supported; {}, fp8_e4m3 and int8_per_token_head are",
        .kv.name(), .precision.name(), .precision.name()
    )]
    NoKvType {
        /// What was asked for.
        kv: KvType,
        /// The weights' format.
        precision: Precision,
    },
    /// Choose among those that are there.
    #[error("this process may not use cores {asked}; it may use {there}")]
    NoCores {
        /// Those that are missing.
        asked: String,
        /// All that it may use.
        there: String,
    },
    /// Choose fewer threads, or raise the system's limit.
    #[error("cannot start {count} threads: {source}")]
    Threads {
        /// What was asked for.
        count: usize,
        /// What the system said.
        source: std::io::Error,
    },
}
