//! Series of the endpoint picker: its choices, and the routers that it knows.
//!
//! Owns: these series. Never: chooses. Invariant: every outcome is there from the start, as a zero.

use crate::series_table::{series_table, zeros};
use prometheus_client::encoding::EncodeLabelSet;
use prometheus_client::metrics::counter::Counter;
use prometheus_client::metrics::family::Family;
use prometheus_client::metrics::gauge::Gauge;
use std::net::SocketAddr;

/// The answer of an endpoint picker to one request.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum PickerChoice {
    Endpoint(SocketAddr),
    /// All ready routers are at their limits.
    Full,
    /// No allowed router is ready.
    NoneReady,
}

#[derive(Clone, Debug, Default, PartialEq, Eq, Hash, EncodeLabelSet)]
struct PickerOutcomeLabels {
    outcome: &'static str,
}

#[derive(Clone, Debug, Default, PartialEq, Eq, Hash, EncodeLabelSet)]
struct EndpointStateLabels {
    state: &'static str,
}

series_table! {
    pub struct PickerSeries;

    requests: Family<PickerOutcomeLabels, Counter>
        = zeros(["picked", "full", "nobody"].map(|outcome| PickerOutcomeLabels { outcome })),
        "cleave_picker_requests",
        "Requests for which the endpoint picker was asked: picked (a router was named), full (429: all \
         were at their limit), nobody (503: none was ready)";
    endpoints: Family<EndpointStateLabels, Gauge>, "cleave_picker_endpoints",
        "Routers that the endpoint picker knows, by their last answer: ready or away; no series without \
         --ext-proc-listen";
}

impl PickerSeries {
    pub fn count_choice(&self, choice: PickerChoice) {
        let outcome = match choice {
            PickerChoice::Endpoint(_) => "picked",
            PickerChoice::Full => "full",
            PickerChoice::NoneReady => "nobody",
        };
        self.requests
            .get_or_create(&PickerOutcomeLabels { outcome })
            .inc();
    }

    pub fn set_endpoints(&self, ready: usize, away: usize) {
        for (state, count) in [("ready", ready), ("away", away)] {
            let count = i64::try_from(count).unwrap_or(i64::MAX);
            self.endpoints
                .get_or_create(&EndpointStateLabels { state })
                .set(count);
        }
    }
}
