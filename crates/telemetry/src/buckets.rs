//! Histograms, each with the buckets of what it measures.
//!
//! Owns: the bounds. Never: names a series.
//! Invariant: seconds and ratios, never another unit.

use prometheus_client::encoding::EncodeLabelSet;
use prometheus_client::metrics::family::Family;
use prometheus_client::metrics::gauge::Gauge;
use prometheus_client::metrics::histogram::{Histogram, exponential_buckets};
use std::sync::atomic::AtomicU64;

/// From 0.1 ms to about 100 s, three per decade: steps, transfers and waits all fall inside.
pub(crate) fn seconds() -> Histogram {
    const BOUNDS: [f64; 19] = [
        0.0001, 0.0002, 0.0005, 0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1.0, 2.0,
        5.0, 10.0, 20.0, 50.0, 100.0,
    ];
    Histogram::new(BOUNDS)
}

/// From 0.01 ms to 100 ms, in steps of about a quarter: for times below a millisecond.
pub(crate) fn submillisecond_seconds() -> Histogram {
    Histogram::new(exponential_buckets(0.000_01, 10_f64.powf(0.1), 41))
}

pub(crate) type FloatGauge = Gauge<f64, AtomicU64>;

/// Times to the first token: a class's target is some tenths of a second to some seconds, and a
/// bound is near each that is usual.
pub(crate) fn first_token_seconds() -> Histogram {
    const BOUNDS: [f64; 20] = [
        0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.15, 0.2, 0.25, 0.3, 0.4, 0.5, 0.75, 1.0, 2.0,
        5.0, 10.0, 30.0, 120.0,
    ];
    Histogram::new(BOUNDS)
}

/// Gaps between tokens: targets are some hundredths of a second.
pub(crate) fn gap_seconds() -> Histogram {
    const BOUNDS: [f64; 18] = [
        0.001, 0.0025, 0.005, 0.0075, 0.01, 0.015, 0.02, 0.025, 0.03, 0.04, 0.05, 0.06, 0.08, 0.1,
        0.2, 0.5, 1.0, 5.0,
    ];
    Histogram::new(BOUNDS)
}

/// Ratios of real times to predicted ones: 1 is in the middle, and a factor of two either way is
/// visible.
pub(crate) fn ratios() -> Histogram {
    const BOUNDS: [f64; 14] = [
        0.1, 0.25, 0.5, 0.67, 0.8, 0.9, 1.0, 1.1, 1.25, 1.5, 2.0, 4.0, 10.0, 100.0,
    ];
    Histogram::new(BOUNDS)
}

pub(crate) type HistogramFamily<L> = Family<L, Histogram, fn() -> Histogram>;

pub(crate) fn ratio_histograms<L>() -> HistogramFamily<L>
where
    L: Clone + std::hash::Hash + Eq + EncodeLabelSet,
{
    Family::new_with_constructor(ratios as fn() -> Histogram)
}

pub(crate) fn histograms<L>() -> HistogramFamily<L>
where
    L: Clone + std::hash::Hash + Eq + EncodeLabelSet,
{
    Family::new_with_constructor(seconds as fn() -> Histogram)
}
