//! A request's id and trace, in every process: for all log lines about it, and for its spans.
//!
//! Never reaches a brain, or decides anything. Invariant: it travels with the order that it is
//! about, so that a worker has it before any work for the request.

use cleave_api::TraceParent;
use serde::{Deserialize, Serialize};
use std::sync::Arc;

/// A request as log lines and spans name it.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct RequestContext {
    /// The id from the client, or from the HTTP server.
    pub request_id: Arc<str>,
    /// The span that the work belongs to.
    pub trace: Option<TraceParent>,
}

impl RequestContext {
    /// The same request, under another span.
    pub(crate) fn under_span(&self, span: u64) -> Self {
        let trace = self.trace.map(|trace| TraceParent { span, ..trace });
        Self {
            request_id: Arc::clone(&self.request_id),
            trace,
        }
    }
}
