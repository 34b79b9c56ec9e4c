//! The page that documents every metric.
//!
//! Owns: the page's form. Never adds anything to the registries' texts. Invariant: every metric
//! that `/metrics` may have is on it, since it is read from the same registries, with one series
//! shown of each family.

use super::Telemetry;
use std::collections::{BTreeMap, BTreeSet};
use std::fmt::Write;

const HEAD: &str = "# Metrics

Everything that `/metrics` of a router (and of `cleave serve`) or of a worker (`--metrics-listen`) may have. Made by
`cleave metrics`; a test holds it against the binary.

Labels are bounded: `worker` and `peer` by the fleet, `class` by the policy (others count as `other`), `route` by the
routes there are; no other label has values that a client can choose. Names of tenants are in labels only if the policy
has them. `vllm:` series repeat ours under the names that autoscalers and pickers of other systems read.

| metric | type | labels | what it is |
|---|---|---|---|
";

#[derive(Default)]
struct MetricEntry {
    kind: String,
    help: String,
    labels: BTreeSet<String>,
}

/// Returns the content of `docs/metrics.md`.
pub fn metrics_page() -> String {
    let text =
        cleave_api::metrics_described() + &Telemetry::default().registry.text_with_empty_series();
    let mut entries: BTreeMap<String, MetricEntry> = BTreeMap::new();
    let mut family = String::new();
    for line in text.lines() {
        let mut words = line.splitn(4, ' ');
        match (words.next(), words.next(), words.next(), words.next()) {
            (Some("#"), Some("HELP"), Some(name), Some(help)) => {
                family = name.to_owned();
                entries.entry(family.clone()).or_default().help = help.replace('|', "\\|");
            }
            (Some("#"), Some("TYPE"), Some(name), Some(kind)) => {
                entries.entry(name.to_owned()).or_default().kind = kind.to_owned();
            }
            (Some("#"), ..) => {}
            _ => {
                if let Some(entry) = entries.get_mut(&family) {
                    entry.labels.extend(labels(line));
                }
            }
        }
    }
    let mut page = HEAD.to_owned();
    for (name, entry) in entries {
        let MetricEntry { kind, help, labels } = entry;
        let suffix = if kind == "counter" { "_total" } else { "" };
        let labels: Vec<String> = labels.iter().map(|label| format!("`{label}`")).collect();
        let labels = labels.join(", ");
        // Writing to a string does not fail.
        let _ = writeln!(page, "| `{name}{suffix}` | {kind} | {labels} | {help} |");
    }
    page
}

/// The names of a series' labels; a bucket's bound is none.
fn labels(series: &str) -> impl Iterator<Item = String> {
    let inside = series
        .split_once('{')
        .and_then(|(_, rest)| rest.split_once('}'));
    let inside = inside.map_or("", |(inside, _)| inside);
    let names = inside.split(',').filter_map(|pair| pair.split_once('='));
    names
        .map(|(name, _)| name.to_owned())
        .filter(|name| name != "le")
}
