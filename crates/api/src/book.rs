//! A registry of metrics that can describe itself.
//!
//! Owns: that each series can be shown once with its labels, whether it was counted or not, and both text
//! formats. Never: a name or a help text: they are where the series is. Invariant: what is registered is
//! described.

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

/// See the module.
#[derive(Default)]
pub struct Book {
    registry: Registry,
    shows: Vec<Box<dyn Fn() + Send + Sync>>,
}

impl fmt::Debug for Book {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.registry.fmt(f)
    }
}

impl Book {
    /// One whose names all begin with `prefix` and an underscore.
    pub(crate) fn with_prefix(prefix: &str) -> Self {
        Self {
            registry: Registry::with_prefix(prefix),
            shows: Vec::new(),
        }
    }

    /// Puts a series into the registry.
    pub fn register(&mut self, name: &str, help: &str, metric: impl Metric + Shown + Clone) {
        self.registry.register(name, help, metric.clone());
        self.shows.push(Box::new(move || metric.show()));
    }

    /// The same of one that is counted in this unit, which ends its name.
    pub(crate) fn register_with_unit(
        &mut self,
        (name, unit): (&str, Unit),
        help: &str,
        metric: impl Metric + Shown + Clone,
    ) {
        let registered = metric.clone();
        self.registry
            .register_with_unit(name, help, unit, registered);
        self.shows.push(Box::new(move || metric.show()));
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

    /// The same with one series, of empty labels, of each family: for a registry that counts nothing.
    pub fn described(&self) -> String {
        self.shows.iter().for_each(|show| show());
        self.text()
    }
}

/// What can be shown before it was counted.
pub trait Shown: Send + Sync + 'static {
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

/// OpenMetrics text in Prometheus's older format (version 0.0.4): there a counter's family is called as its
/// series is, units and the end are not said.
/// Source: <https://prometheus.io/docs/instrumenting/exposition_formats/>
pub fn plain_metrics(open: &str) -> String {
    let counter = |line: &str| -> Option<String> {
        let rest = line.strip_prefix("# TYPE ")?;
        rest.strip_suffix(" counter").map(str::to_owned)
    };
    let counters: BTreeSet<String> = open.lines().filter_map(counter).collect();
    let mut plain = String::with_capacity(open.len());
    for line in open.lines() {
        let mut words = line.splitn(4, ' ');
        let head = (words.next(), words.next(), words.next());
        let said = match head {
            (Some("#"), Some("UNIT" | "EOF"), _) => continue,
            (Some("#"), Some(kind), Some(name)) if counters.contains(name) => {
                let rest = words.next().unwrap_or_default();
                writeln!(plain, "# {kind} {name}_total {rest}")
            }
            _ => writeln!(plain, "{line}"),
        };
        // Writing to a string does not fail.
        let _ = said;
    }
    plain
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn counters_had_no_type_for_those_who_read_the_older_format() {
        let mut book = Book::with_prefix("x");
        book.register("asked", "How often", Counter::<u64>::default());
        book.register("open", "How many", <Gauge>::default());
        let wait = Histogram::new([1.0]);
        book.register_with_unit(("wait", Unit::Seconds), "How long", wait);
        let plain = plain_metrics(&(book.text() + "# EOF\n"));
        let wanted = "# HELP x_asked_total How often.\n# TYPE x_asked_total counter\nx_asked_total 0\n\
            # HELP x_open How many.\n# TYPE x_open gauge\nx_open 0\n\
            # HELP x_wait_seconds How long.\n# TYPE x_wait_seconds histogram\nx_wait_seconds_sum 0.0\n\
            x_wait_seconds_count 0\nx_wait_seconds_bucket{le=\"1.0\"} 0\n\
            x_wait_seconds_bucket{le=\"+Inf\"} 0\n";
        assert_eq!(plain, wanted);
    }
}
