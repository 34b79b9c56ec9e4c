//! The shapes that `cleave bench engine` can measure.
//!
//! Owns: the notation of a shape, and the default shapes. Never: runs one.

use std::fmt;
use std::str::FromStr;

/// Number of concurrent sequences, and the context of each.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum BenchShape {
    /// One prompt without a context.
    Prefill { tokens: u32 },
    /// One token per sequence and step.
    Decode { sequences: u32, context_tokens: u32 },
}

/// Default shapes on a processor: those that a small machine measures in a minute.
pub(super) const SHAPES: [BenchShape; 6] = [
    prefill(512),
    prefill(2048),
    decode(1, 128),
    decode(1, 1024),
    decode(8, 128),
    decode(32, 128),
];

/// Default shapes on a GPU: those of servers.
pub(super) const SHAPES_GPU: [BenchShape; 12] = [
    prefill(512),
    prefill(2048),
    prefill(8192),
    prefill(32_768),
    decode(1, 1024),
    decode(8, 1024),
    decode(32, 1024),
    decode(128, 1024),
    decode(1, 8192),
    decode(8, 8192),
    decode(32, 8192),
    decode(128, 8192),
];

const fn prefill(tokens: u32) -> BenchShape {
    BenchShape::Prefill { tokens }
}

const fn decode(sequences: u32, context_tokens: u32) -> BenchShape {
    BenchShape::Decode {
        sequences,
        context_tokens,
    }
}

impl BenchShape {
    /// Name of the shape in tables.
    pub(super) fn name(self) -> String {
        match self {
            Self::Prefill { tokens } => format!("prefill {tokens}"),
            Self::Decode {
                sequences,
                context_tokens,
            } => format!("decode b{sequences}, ctx {context_tokens}"),
        }
    }

    pub(super) fn sequences(self) -> u32 {
        match self {
            Self::Prefill { .. } => 1,
            Self::Decode { sequences, .. } => sequences,
        }
    }

    /// Context of each sequence before the measurement.
    pub(super) fn context_tokens(self) -> u32 {
        match self {
            Self::Prefill { .. } => 0,
            Self::Decode { context_tokens, .. } => context_tokens,
        }
    }
}

impl FromStr for BenchShape {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        let count = |text: &str| {
            text.parse()
                .ok()
                .filter(|count: &u32| (1..1 << 24).contains(count))
        };
        let shape = match text.split_once(':') {
            Some(("prefill", tokens)) => count(tokens).map(prefill),
            Some(("decode", both)) => both
                .split_once('x')
                .and_then(|(sequences, context)| Some(decode(count(sequences)?, count(context)?))),
            _ => None,
        };
        shape.ok_or_else(|| {
            format!("unknown shape `{text}`: use prefill:TOKENS or decode:SEQUENCESxCONTEXT, such as decode:8x1024")
        })
    }
}

impl fmt::Display for BenchShape {
    fn fmt(&self, out: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Prefill { tokens } => write!(out, "prefill:{tokens}"),
            Self::Decode {
                sequences,
                context_tokens,
            } => write!(out, "decode:{sequences}x{context_tokens}"),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn shapes_parse_as_they_print() {
        for shape in SHAPES.into_iter().chain(SHAPES_GPU) {
            assert_eq!(shape.to_string().parse(), Ok(shape));
        }
        for wrong in [
            "",
            "prefill",
            "prefill:0",
            "decode:8",
            "decode:0x5",
            "decode:8x",
            "encode:5",
        ] {
            assert!(wrong.parse::<BenchShape>().is_err(), "{wrong}");
        }
    }
}
