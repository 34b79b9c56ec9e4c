//! A request's id and trace.

use super::proto;
use cleave_api::TraceParent;
use cleave_telemetry::RequestContext;

/// The longest id that is taken from another process.
const ID_BYTES_MAX: usize = 256;

impl From<&RequestContext> for proto::Mark {
    fn from(context: &RequestContext) -> Self {
        let RequestContext { request_id, trace } = context;
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

impl From<proto::Mark> for RequestContext {
    /// Never fails: an id that is too long counts as empty, and a trace of zeros as none.
    fn from(context: proto::Mark) -> Self {
        let proto::Mark {
            mut request_id,
            trace_high,
            trace_low,
            span,
            flags,
        } = context;
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
    fn a_request_context_round_trips_and_a_bad_one_is_empty() {
        let context = RequestContext {
            request_id: "r-1".into(),
            trace: Some(TraceParent {
                trace: (7 << 64) | 9,
                span: 5,
                flags: 1,
            }),
        };
        assert_eq!(RequestContext::from(proto::Mark::from(&context)), context);
        let none = RequestContext::default();
        assert_eq!(RequestContext::from(proto::Mark::from(&none)), none);
        let long = proto::Mark {
            request_id: "é".repeat(400),
            trace_high: 1,
            ..proto::Mark::default()
        };
        let read = RequestContext::from(long);
        assert_eq!((&*read.request_id, read.trace), ("", None));
    }
}
