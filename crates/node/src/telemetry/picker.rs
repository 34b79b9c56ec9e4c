//! What the endpoint picker chose, and among whom.
//!
//! Owns: these series. Never: chooses. Invariant: every outcome is there from the start, as a zero.

use crate::picker::Choice;
use cleave_api::Book;
use prometheus_client::encoding::EncodeLabelSet;
use prometheus_client::metrics::counter::Counter;
use prometheus_client::metrics::family::Family;
use prometheus_client::metrics::gauge::Gauge;

#[derive(Clone, Debug, Default, PartialEq, Eq, Hash, EncodeLabelSet)]
struct Outcome {
    outcome: &'static str,
}

#[derive(Clone, Debug, Default, PartialEq, Eq, Hash, EncodeLabelSet)]
struct Standing {
    state: &'static str,
}

/// See the module.
#[derive(Clone, Debug)]
pub(crate) struct PickerSeries {
    requests: Family<Outcome, Counter>,
    endpoints: Family<Standing, Gauge>,
}

impl PickerSeries {
    pub(super) fn register(book: &mut Book) -> Self {
        let series = Self {
            requests: Family::default(),
            endpoints: Family::default(),
        };
        for outcome in ["picked", "full", "nobody"] {
            drop(series.requests.get_or_create(&Outcome { outcome }));
        }
        book.register(
            "cleave_picker_requests",
            "Requests for which the endpoint picker was asked: picked (a router was named), full (429: all \
             were at their limit), nobody (503: none was ready)",
            series.requests.clone(),
        );
        book.register(
            "cleave_picker_endpoints",
            "Routers that the endpoint picker knows: ready or away, when last asked; none without \
             --ext-proc-listen",
            series.endpoints.clone(),
        );
        series
    }

    pub(crate) fn chose(&self, choice: Choice) {
        let outcome = match choice {
            Choice::Endpoint(_) => "picked",
            Choice::Full => "full",
            Choice::Nobody => "nobody",
        };
        self.requests.get_or_create(&Outcome { outcome }).inc();
    }

    pub(crate) fn knows(&self, ready: usize, away: usize) {
        for (state, count) in [("ready", ready), ("away", away)] {
            let count = i64::try_from(count).unwrap_or(i64::MAX);
            self.endpoints.get_or_create(&Standing { state }).set(count);
        }
    }
}
