//! Formats of stored weights, keys and values.
//!
//! Owns: bytes of each, and the format of the products that they are multiplied in. Never: rounds.

use super::hardware::ProductFormat;
use std::fmt;
use std::str::FromStr;

/// Format of a model's projections. Embedding and head have 16 bits in every format.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum WeightFormat {
    /// Floats of 16 bits: bf16, or f16 in two bytes as well.
    #[default]
    Bf16,
    Fp8,
    Int8,
    /// Four bits with a scale and a zero for each 128, multiplied as bf16 (AWQ, GPTQ).
    Int4,
    /// Four-bit floats with an exponent for each 32, multiplied as bf16.
    Mxfp4,
    /// Four-bit floats with a float 8 for each 16.
    Nvfp4,
}

impl WeightFormat {
    /// All formats, in the order in which flags list them.
    pub const ALL: [Self; 6] = [
        Self::Bf16,
        Self::Fp8,
        Self::Int8,
        Self::Int4,
        Self::Mxfp4,
        Self::Nvfp4,
    ];

    /// Bytes of so many weights, scales included.
    pub fn bytes(self, weights: u64) -> f64 {
        let each = match self {
            Self::Bf16 => 2.0,
            Self::Fp8 | Self::Int8 => 1.0,
            // A scale of two bytes and a zero of half a byte.
            Self::Int4 => 0.5 + 2.5 / 128.0,
            Self::Mxfp4 => 0.5 + 1.0 / 32.0,
            Self::Nvfp4 => 0.5 + 1.0 / 16.0,
        };
        weights as f64 * each
    }

    /// Format of the products with these weights, where a device has it.
    pub fn product(self) -> ProductFormat {
        match self {
            Self::Bf16 | Self::Int4 | Self::Mxfp4 => ProductFormat::Bf16,
            Self::Fp8 => ProductFormat::Fp8,
            Self::Int8 => ProductFormat::Int8,
            Self::Nvfp4 => ProductFormat::Fp4,
        }
    }

    /// Name as in flags.
    pub fn name(self) -> &'static str {
        match self {
            Self::Bf16 => "bf16",
            Self::Fp8 => "fp8",
            Self::Int8 => "int8",
            Self::Int4 => "int4",
            Self::Mxfp4 => "mxfp4",
            Self::Nvfp4 => "nvfp4",
        }
    }
}

impl fmt::Display for WeightFormat {
    fn fmt(&self, out: &mut fmt::Formatter<'_>) -> fmt::Result {
        out.write_str(self.name())
    }
}

impl FromStr for WeightFormat {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        let found = Self::ALL.into_iter().find(|format| format.name() == text);
        let names = Self::ALL.map(Self::name).join(", ");
        found.ok_or_else(|| format!("expected one of {names}"))
    }
}

/// Format of keys and values.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum KvFormat {
    /// Floats of 16 bits: bf16, or f16 in two bytes as well.
    #[default]
    Bf16,
    /// One byte without scales.
    Fp8,
}

impl KvFormat {
    /// Bytes of an element.
    pub fn element_bytes(self) -> u64 {
        match self {
            Self::Bf16 => 2,
            Self::Fp8 => 1,
        }
    }

    /// Name as in flags.
    pub fn name(self) -> &'static str {
        match self {
            Self::Bf16 => "bf16",
            Self::Fp8 => "fp8",
        }
    }
}

impl fmt::Display for KvFormat {
    fn fmt(&self, out: &mut fmt::Formatter<'_>) -> fmt::Result {
        out.write_str(self.name())
    }
}

impl FromStr for KvFormat {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        let found = [Self::Bf16, Self::Fp8]
            .into_iter()
            .find(|format| format.name() == text);
        found.ok_or_else(|| "expected bf16 or fp8".to_owned())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// gpt-oss's experts take 17 bytes for 32 weights, as its checkpoints have them.
    #[test]
    fn bytes_include_scales() {
        let each = WeightFormat::ALL.map(|format| format.bytes(128));
        assert_eq!(each, [256.0, 128.0, 128.0, 66.5, 68.0, 72.0]);
    }

    #[test]
    fn names_parse_as_they_print() {
        for format in WeightFormat::ALL {
            assert_eq!(format.to_string().parse(), Ok(format));
        }
        for format in [KvFormat::Bf16, KvFormat::Fp8] {
            assert_eq!(format.to_string().parse(), Ok(format));
        }
        assert!("fp7".parse::<WeightFormat>().unwrap_err().contains("nvfp4"));
        assert!("int4".parse::<KvFormat>().is_err());
    }
}
