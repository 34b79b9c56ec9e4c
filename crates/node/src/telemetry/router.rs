//! A router's series.

use super::seconds;
use cleave_domain::{Ending, Failure, Role};
use cleave_router::{Census, Note};
use prometheus_client::encoding::EncodeLabelSet;
use prometheus_client::metrics::counter::Counter;
use prometheus_client::metrics::family::Family;
use prometheus_client::metrics::gauge::Gauge;
use prometheus_client::metrics::histogram::Histogram;
use prometheus_client::registry::Registry;
use tracing::{debug, info};

#[derive(Clone, Debug, PartialEq, Eq, Hash, EncodeLabelSet)]
struct Kind {
    kind: &'static str,
}

#[derive(Clone, Debug, PartialEq, Eq, Hash, EncodeLabelSet)]
struct Connected {
    role: String,
}

/// The series of this process's router, if it has one.
#[derive(Clone, Debug)]
pub(crate) struct Series {
    flights: Gauge,
    flights_waiting: Gauge,
    workers: Family<Connected, Gauge>,
    placed: Family<Kind, Counter>,
    cached_tokens: Counter,
    placement_wait: Histogram,
    retries: Family<Kind, Counter>,
    passed_over: Counter,
    stale: Counter,
    ended: Family<Kind, Counter>,
    cancel_seconds: Histogram,
}

impl Series {
    pub(super) fn register(registry: &mut Registry) -> Self {
        let series = Self {
            flights: Gauge::default(),
            flights_waiting: Gauge::default(),
            workers: Family::default(),
            placed: Family::default(),
            cached_tokens: Counter::default(),
            placement_wait: seconds(),
            retries: Family::default(),
            passed_over: Counter::default(),
            stale: Counter::default(),
            ended: Family::default(),
            cancel_seconds: seconds(),
        };
        series.register_flights(registry);
        series.register_placement(registry);
        series
    }

    fn register_flights(&self, registry: &mut Registry) {
        registry.register(
            "cleave_flights",
            "Flights that have not ended",
            self.flights.clone(),
        );
        registry.register(
            "cleave_flights_waiting",
            "Flights waiting for room",
            self.flights_waiting.clone(),
        );
        registry.register(
            "cleave_flights_ended",
            "Flights by how they ended",
            self.ended.clone(),
        );
        registry.register(
            "cleave_cancel_to_free_seconds",
            "From the client's leaving to every block free on both pools",
            self.cancel_seconds.clone(),
        );
    }

    fn register_placement(&self, registry: &mut Registry) {
        registry.register(
            "cleave_workers",
            "Connected workers by role",
            self.workers.clone(),
        );
        registry.register(
            "cleave_placements",
            "Attempts placed: on two workers, or both legs on one",
            self.placed.clone(),
        );
        registry.register(
            "cleave_placement_cached_tokens",
            "Prompt tokens believed cached where they were placed",
            self.cached_tokens.clone(),
        );
        registry.register(
            "cleave_placement_wait_seconds",
            "From submission to placement",
            self.placement_wait.clone(),
        );
        registry.register(
            "cleave_retries",
            "Attempts that failed and were followed by another, by reason",
            self.retries.clone(),
        );
        registry.register(
            "cleave_workers_passed_over",
            "Workers that refused a leg or did not answer in time",
            self.passed_over.clone(),
        );
        registry.register(
            "cleave_stale_reports",
            "Reports of past attempts or lives, ignored",
            self.stale.clone(),
        );
    }
}

/// The router's hand on its series.
#[derive(Clone, Debug)]
pub(crate) struct RouterMeters {
    series: Series,
}

impl RouterMeters {
    pub(crate) fn new(series: &Series) -> Self {
        for kind in ["done", "refused", "cancelled", "failed"] {
            drop(series.ended.get_or_create(&Kind { kind }));
        }
        for kind in ["disaggregated", "aggregated"] {
            drop(series.placed.get_or_create(&Kind { kind }));
        }
        Self {
            series: series.clone(),
        }
    }

    /// Counts what the brain noted, and logs it.
    pub(crate) fn count(&self, note: &Note) {
        debug!(?note);
        let series = &self.series;
        match note {
            Note::Placed {
                handoff: _,
                prefill,
                decode,
                cached_tokens,
                waited,
            } => {
                let kind = match prefill == decode {
                    true => "aggregated",
                    false => "disaggregated",
                };
                series.placed.get_or_create(&Kind { kind }).inc();
                series.cached_tokens.inc_by(u64::from(*cached_tokens));
                series.placement_wait.observe(waited.as_secs_f64());
            }
            Note::PassedOver { .. } => drop(series.passed_over.inc()),
            Note::Stale { .. } => drop(series.stale.inc()),
            Note::Retried { handoff, failure } => {
                info!(%handoff, ?failure, "attempt failed, trying again");
                let kind = reason(failure);
                series.retries.get_or_create(&Kind { kind }).inc();
            }
            Note::CancelFreed { flight: _, took } => {
                series.cancel_seconds.observe(took.as_secs_f64());
            }
            Note::Fleet {
                workers,
                flights,
                flights_waiting,
            } => {
                self.workers(*workers);
                series.flights.set(i64::from(*flights));
                series.flights_waiting.set(i64::from(*flights_waiting));
            }
        }
    }

    fn workers(&self, census: Census) {
        let Census {
            prefill,
            decode,
            both,
        } = census;
        let counts = [
            (Role::Prefill, prefill),
            (Role::Decode, decode),
            (Role::Both, both),
        ];
        for (role, count) in counts {
            let role = role.to_string();
            let gauge = self.series.workers.get_or_create(&Connected { role });
            gauge.set(i64::from(count));
        }
    }

    pub(crate) fn ended(&self, ending: &Ending) {
        let kind = match ending {
            Ending::Done { .. } => "done",
            Ending::Refused(_) => "refused",
            Ending::Cancelled => "cancelled",
            Ending::Failed(_) => "failed",
        };
        self.series.ended.get_or_create(&Kind { kind }).inc();
    }
}

fn reason(failure: &Failure) -> &'static str {
    match failure {
        Failure::WorkerLost => "worker_lost",
        Failure::LinkLost => "link_lost",
        Failure::LeaseExpired => "lease_expired",
        Failure::Corrupt => "corrupt",
        Failure::Rejected => "rejected",
        Failure::Engine(_) => "engine",
        Failure::OutOfBlocks => "out_of_blocks",
        Failure::Draining => "draining",
        Failure::RetriesSpent(last) => reason(last),
    }
}
