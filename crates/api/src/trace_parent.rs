//! The client's trace, as the W3C's header `traceparent` names it.
//!
//! Owns: its reading. Never: makes one up, or sends one anywhere. Invariant: what does not follow the
//! format to the letter is as good as absent, for a half-read trace would join strangers' spans.
//!
//! Format: <https://www.w3.org/TR/trace-context/>, version 00; of later versions the part that is the same.

use axum::http::HeaderMap;
use std::fmt;

/// A span of a trace that began elsewhere.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct TraceParent {
    /// The trace; not zero.
    pub trace: u128,
    /// The span that asked; not zero.
    pub span: u64,
    /// Bit 0: the caller records this trace.
    pub flags: u8,
}

impl TraceParent {
    /// The header's, if there is one, once, and as it should be.
    pub(crate) fn of(headers: &HeaderMap) -> Option<Self> {
        let mut values = headers.get_all("traceparent").iter();
        let value = values.next().filter(|_| values.next().is_none())?;
        Self::read(value.to_str().ok()?)
    }

    /// `version-trace-span-flags` in lower-case hex: 2, 32, 16 and 2 digits.
    fn read(text: &str) -> Option<Self> {
        let mut parts = text.split('-');
        let version = digits(parts.next()?, 2)?;
        let trace = digits(parts.next()?, 32)?;
        let span = digits(parts.next()?, 16)?;
        let flags = digits(parts.next()?, 2)?;
        // Later versions may say more; version 255 is none.
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

    /// Whether spans of it are recorded.
    pub fn is_recorded(&self) -> bool {
        self.flags & 1 == 1
    }
}

impl fmt::Display for TraceParent {
    /// The trace's id.
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
    fn a_trace_that_is_none_was_joined() {
        let good = "00-4bf92f3577b34da6a3ce929d0e0e4736-00f067aa0ba902b7-01";
        let read = TraceParent::read(good).unwrap();
        assert_eq!(read.to_string(), "4bf92f3577b34da6a3ce929d0e0e4736");
        assert_eq!((read.span, read.flags), (0x00f0_67aa_0ba9_02b7, 1));
        let later = good.replacen("00-", "01-", 1);
        assert_eq!(TraceParent::read(&later), Some(read));
        assert_eq!(TraceParent::read(&(later + "-what-comes")), Some(read));
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
            assert_eq!(TraceParent::read(&bad), None, "{bad}");
        }
    }
}
