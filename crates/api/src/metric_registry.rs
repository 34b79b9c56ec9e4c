//! A registry of metrics that can list every series it may have.
//!
//! Owns: the two text formats, and the listing of each family with one series of empty labels.
//! Never: names a metric or writes its help text. Invariant: every registered metric is listed.

use prometheus_client::encoding::text::encode_registry;
use prometheus_client::encoding::{EncodeLabelSet, EncodeMetric};
use prometheus_client::metrics::TypedMetric;
use prometheus_client::metrics::counter::Counter;
use prometheus_client::metrics::family::{Family, MetricConstructor};
use prometheus_client::metrics::gauge::Gauge;
use prometheus_client::metrics::histogram::Histogram;
use prometheus_client::registry::{Metric, Registry, Unit};
use std::collections::BTreeSet;
use std::fmt;
use std::fmt::Write;
use std::hash::Hash;

#[derive(Default)]
pub struct MetricRegistry {
    registry: Registry,
    add_empty_series: Vec<Box<dyn Fn() + Send + Sync>>,
}

impl fmt::Debug for MetricRegistry {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.registry.fmt(f)
    }
}

impl MetricRegistry {
    /// Creates a registry whose names all begin with `prefix` and an underscore.
    pub(crate) fn with_prefix(prefix: &str) -> Self {
        Self {
            registry: Registry::with_prefix(prefix),
            add_empty_series: Vec::new(),
        }
    }

    pub fn register(
        &mut self,
        name: &str,
        help: &str,
        metric: impl Metric + DescribedMetric + Clone,
    ) {
        self.registry.register(name, help, metric.clone());
        self.add_empty_series
            .push(Box::new(move || metric.add_empty_series()));
    }

    /// Registers a metric with a unit; the unit ends its name.
    pub(crate) fn register_with_unit(
        &mut self,
        name: &str,
        unit: Unit,
        help: &str,
        metric: impl Metric + DescribedMetric + Clone,
    ) {
        let registered = metric.clone();
        self.registry
            .register_with_unit(name, help, unit, registered);
        self.add_empty_series
            .push(Box::new(move || metric.add_empty_series()));
    }

    /// The OpenMetrics text, without the closing `# EOF`.
    pub fn text(&self) -> String {
        let mut text = String::new();
        // Writing to a string does not fail.
        if encode_registry(&mut text, &self.registry).is_err() {
            text.clear();
        }
        text
    }

    /// Renders the registry after adding one series with empty labels to each family; for
    /// documentation.
    pub fn text_with_empty_series(&self) -> String {
        self.add_empty_series.iter().for_each(|show| show());
        self.text()
    }
}

/// A metric that can add a series with empty labels to itself.
pub trait DescribedMetric: Send + Sync + 'static {
    /// Adds a series with empty labels, so that the family appears before its first count.
    fn add_empty_series(&self);
}

impl<N: Send + Sync + 'static, A: Send + Sync + 'static> DescribedMetric for Counter<N, A> {
    fn add_empty_series(&self) {}
}

impl<N: Send + Sync + 'static, A: Send + Sync + 'static> DescribedMetric for Gauge<N, A> {
    fn add_empty_series(&self) {}
}

impl DescribedMetric for Histogram {
    fn add_empty_series(&self) {}
}

impl<S, M, C> DescribedMetric for Family<S, M, C>
where
    S: Clone + Default + Eq + Hash + EncodeLabelSet + fmt::Debug + Send + Sync + 'static,
    M: EncodeMetric + TypedMetric + Send + Sync + 'static,
    C: MetricConstructor<M> + Send + Sync + 'static,
{
    fn add_empty_series(&self) {
        drop(self.get_or_create(&S::default()));
    }
}

/// Converts OpenMetrics text to Prometheus's text format 0.0.4, in which the family of a counter
/// has the name of its series and there is neither `# UNIT` nor `# EOF`.
///
/// Source: <https://prometheus.io/docs/instrumenting/exposition_formats/>
pub fn prometheus_text(open: &str) -> String {
    let counter = |line: &str| -> Option<String> {
        let rest = line.strip_prefix("# TYPE ")?;
        rest.strip_suffix(" counter").map(str::to_owned)
    };
    let counters: BTreeSet<String> = open.lines().filter_map(counter).collect();
    let mut plain = String::with_capacity(open.len());
    for line in open.lines() {
        let mut words = line.splitn(4, ' ');
        let head = (words.next(), words.next(), words.next());
        let written = match head {
            (Some("#"), Some("UNIT" | "EOF"), _) => continue,
            (Some("#"), Some(kind), Some(name)) if counters.contains(name) => {
                let rest = words.next().unwrap_or_default();
                writeln!(plain, "# {kind} {name}_total {rest}")
            }
            _ => writeln!(plain, "{line}"),
        };
        // Writing to a string does not fail.
        let _ = written;
    }
    plain
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn prometheus_text_declares_the_type_of_counters() {
        let mut book = MetricRegistry::with_prefix("x");
        book.register("asked", "How often", Counter::<u64>::default());
        book.register("open", "How many", <Gauge>::default());
        let wait = Histogram::new([1.0]);
        book.register_with_unit("wait", Unit::Seconds, "How long", wait);
        let plain = prometheus_text(&(book.text() + "# EOF\n"));
        let expected = "# HELP x_asked_total How often.\n# TYPE x_asked_total counter\nx_asked_total 0\n\
            # HELP x_open How many.\n# TYPE x_open gauge\nx_open 0\n\
            # HELP x_wait_seconds How long.\n# TYPE x_wait_seconds histogram\nx_wait_seconds_sum 0.0\n\
            x_wait_seconds_count 0\nx_wait_seconds_bucket{le=\"1.0\"} 0\n\
            x_wait_seconds_bucket{le=\"+Inf\"} 0\n";
        assert_eq!(plain, expected);
    }
}
