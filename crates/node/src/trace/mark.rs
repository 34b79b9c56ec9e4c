//! What a request is known by, from process to process: in every log line about it, and in its trace.
//!
//! Never: reaches a brain, or decides anything. Invariant: it travels with the order that it is about, so a
//! worker never hears of a request whose name it does not know.

use crate::wire::proto;
use cleave_api::TraceParent;
use std::sync::Arc;

/// The longest id that is taken from another process.
const ID_BYTES_MAX: usize = 256;

/// See the module.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(crate) struct Mark {
    /// As its client, or the HTTP face, named it.
    pub(crate) request_id: Arc<str>,
    /// The span that the work belongs to.
    pub(crate) trace: Option<TraceParent>,
}

impl Mark {
    /// The same request, as work under another span.
    pub(crate) fn under(&self, span: u64) -> Self {
        let trace = self.trace.map(|trace| TraceParent { span, ..trace });
        Self {
            request_id: Arc::clone(&self.request_id),
            trace,
        }
    }
}

impl From<&Mark> for proto::Mark {
    fn from(mark: &Mark) -> Self {
        let Mark { request_id, trace } = mark;
        let trace = trace.unwrap_or_default();
        Self {
            request_id: request_id.to_string(),
            trace_high: (trace.trace >> 64) as u64,
            trace_low: trace.trace as u64,
            span: trace.span,
            flags: u32::from(trace.flags),
        }
    }
}

impl From<proto::Mark> for Mark {
    /// Nothing of it can be wrong in a way that matters: what is too long for an id is none, and a trace of zeros
    /// is none.
    fn from(mark: proto::Mark) -> Self {
        let proto::Mark {
            mut request_id,
            trace_high,
            trace_low,
            span,
            flags,
        } = mark;
        if request_id.len() > ID_BYTES_MAX {
            request_id.clear();
        }
        let trace = TraceParent {
            trace: u128::from(trace_high) << 64 | u128::from(trace_low),
            span,
            flags: u8::from(flags & 1 == 1),
        };
        Self {
            request_id: request_id.into(),
            trace: (trace.trace != 0 && span != 0).then_some(trace),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_mark_travels_whole_and_a_bad_one_does_no_harm() {
        let mark = Mark {
            request_id: "r-1".into(),
            trace: Some(TraceParent {
                trace: (7 << 64) | 9,
                span: 5,
                flags: 1,
            }),
        };
        assert_eq!(Mark::from(proto::Mark::from(&mark)), mark);
        let none = Mark::default();
        assert_eq!(Mark::from(proto::Mark::from(&none)), none);
        let long = proto::Mark {
            request_id: "é".repeat(400),
            trace_high: 1,
            ..proto::Mark::default()
        };
        let read = Mark::from(long);
        assert_eq!((&*read.request_id, read.trace), ("", None));
    }
}
