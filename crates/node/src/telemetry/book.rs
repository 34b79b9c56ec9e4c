//! The registry, and what is needed to describe it.
//!
//! Owns: that each series can be shown once with its labels, whether it has been counted or not. Never: a
//! name or a help text: they are where the series is. Invariant: what is registered is described.

use prometheus_client::encoding::{EncodeLabelSet, EncodeMetric};
use prometheus_client::metrics::TypedMetric;
use prometheus_client::metrics::counter::Counter;
use prometheus_client::metrics::family::{Family, MetricConstructor};
use prometheus_client::metrics::gauge::Gauge;
use prometheus_client::metrics::histogram::Histogram;
use prometheus_client::registry::{Metric, Registry};
use std::fmt;
use std::hash::Hash;

/// See the module.
#[derive(Default)]
pub(crate) struct Book {
    registry: Registry,
    shows: Vec<Box<dyn Fn() + Send + Sync>>,
}

impl fmt::Debug for Book {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.registry.fmt(f)
    }
}

impl Book {
    /// Puts a series into the registry.
    pub(crate) fn register(&mut self, name: &str, help: &str, metric: impl Metric + Shown + Clone) {
        self.registry.register(name, help, metric.clone());
        self.shows.push(Box::new(move || metric.show()));
    }

    pub(crate) fn registry(&self) -> &Registry {
        &self.registry
    }

    /// Gives every family one series, with empty labels: for a registry that counts nothing.
    pub(crate) fn show_all(&self) {
        self.shows.iter().for_each(|show| show());
    }
}

/// What can be shown before it was counted.
pub(crate) trait Shown: Send + Sync + 'static {
    /// One series, of empty labels, is there from now on.
    fn show(&self);
}

impl<N: Send + Sync + 'static, A: Send + Sync + 'static> Shown for Counter<N, A> {
    fn show(&self) {}
}

impl<N: Send + Sync + 'static, A: Send + Sync + 'static> Shown for Gauge<N, A> {
    fn show(&self) {}
}

impl Shown for Histogram {
    fn show(&self) {}
}

impl<S, M, C> Shown for Family<S, M, C>
where
    S: Clone + Default + Eq + Hash + EncodeLabelSet + fmt::Debug + Send + Sync + 'static,
    M: EncodeMetric + TypedMetric + Send + Sync + 'static,
    C: MetricConstructor<M> + Send + Sync + 'static,
{
    fn show(&self) {
        drop(self.get_or_create(&S::default()));
    }
}
