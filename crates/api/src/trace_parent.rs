//! The client's trace context, from the W3C header `traceparent`.
//!
//! Owns: parsing the header. Never: creates a trace, or sends one. Invariant: a header that does
//! not follow the format exactly is ignored, because a wrong id would join unrelated spans.
//!
//! Format: <https://www.w3.org/TR/trace-context/>, version 00; of later versions the common part.

use axum::http::HeaderMap;
use serde::{Deserialize, Serialize};
use std::fmt;

/// Header of W3C's trace context.
pub(crate) const TRACE_PARENT_HEADER: &str = "traceparent";

/// A span of a trace.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct TraceParent {
    /// Trace id; not zero.
    pub trace: u128,
    /// Id of the calling span; not zero.
    pub span: u64,
    /// Trace flags. Bit 0: the caller records this trace.
    pub flags: u8,
}

impl TraceParent {
    /// Parses the header, if there is exactly one and it is valid.
    pub(crate) fn from_headers(headers: &HeaderMap) -> Option<Self> {
        let mut values = headers.get_all(TRACE_PARENT_HEADER).iter();
        let value = values.next().filter(|_| values.next().is_none())?;
        Self::parse(value.to_str().ok()?)
    }

    /// Parses `version-trace-span-flags`, 2, 32, 16 and 2 digits of lower-case hexadecimal.
    fn parse(text: &str) -> Option<Self> {
        let mut parts = text.split('-');
        let version = digits(parts.next()?, 2)?;
        let trace = digits(parts.next()?, 32)?;
        let span = digits(parts.next()?, 16)?;
        let flags = digits(parts.next()?, 2)?;
        // Later versions may append fields; version 255 is invalid.
        let whole = match version {
            0 => parts.next().is_none(),
            version => version != 0xff,
        };
        (whole && trace != 0 && span != 0).then_some(Self {
            trace,
            span: u64::try_from(span).ok()?,
            flags: u8::try_from(flags).ok()?,
        })
    }

    /// Whether spans of the trace are recorded.
    pub fn is_recorded(&self) -> bool {
        self.flags & 1 == 1
    }
}

impl fmt::Display for TraceParent {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{:032x}", self.trace)
    }
}

fn digits(text: &str, count: usize) -> Option<u128> {
    let lower = |byte: u8| matches!(byte, b'0'..=b'9' | b'a'..=b'f');
    let sound = text.len() == count && text.bytes().all(lower);
    sound.then(|| u128::from_str_radix(text, 16).ok()).flatten()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn invalid_traceparent_is_ignored() {
        let good = "00-4bf92f3577b34da6a3ce929d0e0e4736-00f067aa0ba902b7-01";
        let read = TraceParent::parse(good).unwrap();
        assert_eq!(read.to_string(), "4bf92f3577b34da6a3ce929d0e0e4736");
        assert_eq!((read.span, read.flags), (0x00f0_67aa_0ba9_02b7, 1));
        let later = good.replacen("00-", "01-", 1);
        assert_eq!(TraceParent::parse(&later), Some(read));
        assert_eq!(TraceParent::parse(&(later + "-what-comes")), Some(read));
        let bad = [
            String::new(),
            good.replacen("00-", "ff-", 1),
            good.to_uppercase(),
            good.replace("4bf92f3577b34da6a3ce929d0e0e4736", &"0".repeat(32)),
            good.replace("00f067aa0ba902b7", &"0".repeat(16)),
            good.replace("4b", "+b"),
            format!("{good}-"),
            format!("{good}0"),
            good[..good.len() - 3].to_owned(),
            good.replace('-', "_"),
        ];
        for bad in bad {
            assert_eq!(TraceParent::parse(&bad), None, "{bad}");
        }
    }
}
