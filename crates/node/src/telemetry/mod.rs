//! Metrics of one process: what the brains note, and what the body measures.
//!
//! Owns: names, labels and buckets. Never: counts anything that a brain could have noted; the
//! simulator counts the same notes. Invariant: base units; every series of the hand-off exists from
//! the start, so that a zero is a zero and not an absence.

mod policy;
mod promises;
mod router;
mod scaling;
mod worker;

pub(crate) use policy::PolicySeries;
pub(crate) use promises::{PromiseMeters, Series as PromiseSeries};
pub(crate) use router::RouterMeters;
pub(crate) use scaling::ScalingSeries;
pub use worker::Ceilings;
pub(crate) use worker::WorkerMeters;

use prometheus_client::encoding::EncodeLabelSet;
use prometheus_client::encoding::text::encode_registry;
use prometheus_client::metrics::family::Family;
use prometheus_client::metrics::gauge::Gauge;
use prometheus_client::metrics::histogram::{Histogram, exponential_buckets};
use prometheus_client::registry::Registry;
use std::sync::Arc;
use std::sync::atomic::AtomicU64;

/// All series of a process. Clones are the same ones.
#[derive(Clone, Debug)]
pub(crate) struct Telemetry {
    registry: Arc<Registry>,
    pub(crate) workers: worker::Series,
    pub(crate) router: router::Series,
    pub(crate) promises: PromiseSeries,
    pub(crate) policy: PolicySeries,
    pub(crate) scaling: ScalingSeries,
}

impl Default for Telemetry {
    fn default() -> Self {
        let mut registry = Registry::default();
        let workers = worker::Series::register(&mut registry);
        let router = router::Series::register(&mut registry);
        let promises = PromiseSeries::register(&mut registry);
        let policy = PolicySeries::register(&mut registry);
        let scaling = ScalingSeries::register(&mut registry);
        Self {
            registry: Arc::new(registry),
            workers,
            router,
            promises,
            policy,
            scaling,
        }
    }
}

impl Telemetry {
    /// The OpenMetrics text, without the closing `# EOF`.
    pub(crate) fn text(&self) -> String {
        self.promises.refresh();
        let mut text = String::new();
        encode_registry(&mut text, &self.registry).expect("a string takes all that is written");
        text
    }
}

/// From 0.1 ms to about 100 s, three per decade: steps, transfers and waits all fall inside.
fn seconds() -> Histogram {
    const BOUNDS: [f64; 19] = [
        0.0001, 0.0002, 0.0005, 0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1.0, 2.0,
        5.0, 10.0, 20.0, 50.0, 100.0,
    ];
    Histogram::new(BOUNDS)
}

/// From 0.01 ms to 100 ms, in steps of about a quarter: what takes a part of a millisecond.
fn split_seconds() -> Histogram {
    Histogram::new(exponential_buckets(0.000_01, 10_f64.powf(0.1), 41))
}

type FloatGauge = Gauge<f64, AtomicU64>;

/// Of real times by predicted ones: about right is the middle; a factor of two either way is seen.
fn ratios() -> Histogram {
    const BOUNDS: [f64; 14] = [
        0.1, 0.25, 0.5, 0.67, 0.8, 0.9, 1.0, 1.1, 1.25, 1.5, 2.0, 4.0, 10.0, 100.0,
    ];
    Histogram::new(BOUNDS)
}

type Histograms<L> = Family<L, Histogram, fn() -> Histogram>;

fn ratio_histograms<L>() -> Histograms<L>
where
    L: Clone + std::hash::Hash + Eq + EncodeLabelSet,
{
    Family::new_with_constructor(ratios as fn() -> Histogram)
}

fn histograms<L>() -> Histograms<L>
where
    L: Clone + std::hash::Hash + Eq + EncodeLabelSet,
{
    Family::new_with_constructor(seconds as fn() -> Histogram)
}
