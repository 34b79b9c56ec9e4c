//! Instruction sets with vector instructions.
//!
//! Owns: detection, names, and the processor features that each set needs.
//! Never: chosen at compile time: one binary runs everywhere, and reports the set that it uses.

use std::fmt;
use std::str::FromStr;

/// A set of vector instructions. All compute the same operations in the same order.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Isa {
    /// x86-64 with AVX-512 F, BW, DQ, VL and the dot products of bytes (VNNI) and of bfloat16.
    Avx512Bf16,
    /// x86-64 with AVX-512 F, BW, DQ, VL and VNNI.
    Avx512Vnni,
    /// x86-64 with AVX-512 F, BW, DQ and VL.
    Avx512,
    /// x86-64 with AVX2, FMA, F16C and AVX-VNNI.
    Avx2Vnni,
    /// x86-64 with AVX2, FMA and F16C.
    Avx2,
    /// 64-bit Arm with the dot product of bytes, bfloat16, and products of two rows of bytes with
    /// two columns (i8mm).
    NeonI8mm,
    /// 64-bit Arm with the dot product of bytes and bfloat16.
    NeonBf16,
    /// 64-bit Arm with the dot product of bytes.
    NeonDot,
    /// 64-bit Arm with NEON, without these extensions.
    Neon,
    /// No vector instructions beyond what the compiler chooses.
    Plain,
}

impl Isa {
    /// All sets, best first.
    pub const ALL: [Self; 10] = [
        Self::Avx512Bf16,
        Self::Avx512Vnni,
        Self::Avx512,
        Self::Avx2Vnni,
        Self::Avx2,
        Self::NeonI8mm,
        Self::NeonBf16,
        Self::NeonDot,
        Self::Neon,
        Self::Plain,
    ];

    /// The best set that this processor has.
    pub fn detect() -> Self {
        let best = Self::ALL.into_iter().find(|isa| isa.available());
        best.unwrap_or(Self::Plain)
    }

    /// Whether this processor has the set.
    #[cfg(target_arch = "x86_64")]
    pub fn available(self) -> bool {
        let avx2 = is_x86_feature_detected!("avx2")
            && is_x86_feature_detected!("fma")
            && is_x86_feature_detected!("f16c");
        let avx512 = avx2
            && is_x86_feature_detected!("avx512f")
            && is_x86_feature_detected!("avx512bw")
            && is_x86_feature_detected!("avx512dq")
            && is_x86_feature_detected!("avx512vl");
        match self {
            Self::Avx512Bf16 => {
                Self::Avx512Vnni.available() && is_x86_feature_detected!("avx512bf16")
            }
            Self::Avx512Vnni => avx512 && is_x86_feature_detected!("avx512vnni"),
            Self::Avx512 => avx512,
            Self::Avx2Vnni => avx2 && is_x86_feature_detected!("avxvnni"),
            Self::Avx2 => avx2,
            Self::NeonI8mm | Self::NeonBf16 | Self::NeonDot | Self::Neon => false,
            Self::Plain => true,
        }
    }

    /// Whether this processor has the set.
    #[cfg(target_arch = "aarch64")]
    pub fn available(self) -> bool {
        match self {
            Self::NeonI8mm => {
                Self::NeonBf16.available() && std::arch::is_aarch64_feature_detected!("i8mm")
            }
            Self::NeonBf16 => {
                Self::NeonDot.available() && std::arch::is_aarch64_feature_detected!("bf16")
            }
            Self::NeonDot => {
                Self::Neon.available() && std::arch::is_aarch64_feature_detected!("dotprod")
            }
            Self::Neon => std::arch::is_aarch64_feature_detected!("neon"),
            Self::Plain => true,
            Self::Avx512Bf16 | Self::Avx512Vnni | Self::Avx512 | Self::Avx2Vnni | Self::Avx2 => {
                false
            }
        }
    }

    /// Whether this processor has the set.
    #[cfg(not(any(target_arch = "x86_64", target_arch = "aarch64")))]
    pub fn available(self) -> bool {
        self == Self::Plain
    }

    /// Name as the command line spells it.
    pub const fn name(self) -> &'static str {
        match self {
            Self::Avx512Bf16 => "avx512-bf16",
            Self::Avx512Vnni => "avx512-vnni",
            Self::Avx512 => "avx512",
            Self::Avx2Vnni => "avx2-vnni",
            Self::Avx2 => "avx2",
            Self::NeonI8mm => "neon-i8mm",
            Self::NeonBf16 => "neon-bf16",
            Self::NeonDot => "neon-dot",
            Self::Neon => "neon",
            Self::Plain => "plain",
        }
    }

    /// Name for logs and descriptions.
    pub const fn title(self) -> &'static str {
        match self {
            Self::Avx512Bf16 => "AVX-512 with bf16 dot",
            Self::Avx512Vnni => "AVX-512 with VNNI",
            Self::Avx512 => "AVX-512",
            Self::Avx2Vnni => "AVX2 with VNNI",
            Self::Avx2 => "AVX2",
            Self::NeonI8mm => "NEON with dot, bf16 and i8mm",
            Self::NeonBf16 => "NEON with bf16 and dot",
            Self::NeonDot => "NEON with dot",
            Self::Neon => "NEON",
            Self::Plain => "plain",
        }
    }
}

impl fmt::Display for Isa {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.name())
    }
}

impl FromStr for Isa {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        let found = Self::ALL.into_iter().find(|isa| isa.name() == text);
        found.ok_or_else(|| {
            let names: Vec<&str> = Self::ALL.iter().map(|isa| isa.name()).collect();
            format!(
                "no instruction set {text:?}; choose one of {}",
                names.join(", ")
            )
        })
    }
}
