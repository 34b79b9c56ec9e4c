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

const CLOSE_HEAD: &str = "
## Names that are close

";

/// Series that are easily mixed up, with what tells them apart.
const CLOSE_NAMES: [[(&str, &str); 2]; 14] = [
    [
        (
            "cleave_http_time_to_first_token_seconds",
            "from the arrival of the HTTP request, of all of them",
        ),
        (
            "cleave_ttft_seconds",
            "from the submission, by class and model, of completed ones",
        ),
    ],
    [
        (
            "cleave_http_inter_token_latency_seconds",
            "each gap between tokens",
        ),
        (
            "cleave_tpot_seconds",
            "the mean of a sequence, by class and model",
        ),
    ],
    [
        (
            "cleave_http_e2e_request_latency_seconds",
            "a whole HTTP request",
        ),
        (
            "cleave_e2e_seconds",
            "each of its sequences, by class and model",
        ),
    ],
    [
        (
            "cleave_http_requests_total",
            "answers of all routes by HTTP status",
        ),
        (
            "cleave_request_endings_total",
            "requests to generate by how they ended",
        ),
    ],
    [
        ("cleave_flights_ended_total", "sequences by how they ended"),
        (
            "cleave_slo_requests_total",
            "by class, and whether they met their targets",
        ),
    ],
    [
        (
            "cleave_router_prompt_tokens_total",
            "each sequence's prompt once, at the router",
        ),
        (
            "cleave_prefix_looked_up_tokens_total",
            "each lookup in a prefix cache, at a worker",
        ),
    ],
    [
        (
            "cleave_router_cached_tokens_total",
            "found in a cache, each sequence once",
        ),
        (
            "cleave_prefix_cached_tokens_total",
            "found in a worker's cache, each lookup",
        ),
    ],
    [
        (
            "cleave_placement_cached_tokens_total",
            "expected by the router before the attempt",
        ),
        ("cleave_router_cached_tokens_total", "found"),
    ],
    [
        (
            "cleave_router_handoffs_total",
            "each hand-off once, by outcome",
        ),
        ("cleave_worker_handoffs_total", "at each of its two workers"),
    ],
    [
        (
            "cleave_router_handoff_bytes_total",
            "landed bytes of this router's hand-offs",
        ),
        (
            "cleave_worker_handoff_bytes_total",
            "all bytes that a worker sent and received",
        ),
    ],
    [
        (
            "cleave_router_cancel_to_free_seconds",
            "from the client's departure until both workers are free",
        ),
        (
            "cleave_worker_cancel_to_free_seconds",
            "from the order until one worker is",
        ),
    ],
    [
        (
            "cleave_router_move_seconds",
            "a migration as its router measures it",
        ),
        ("cleave_worker_move_seconds", "as its sender does"),
    ],
    [
        (
            "cleave_resumed_tokens_total",
            "computed again on another worker after a failure",
        ),
        (
            "cleave_recomputed_tokens_total",
            "on the same worker after a preemption",
        ),
    ],
    [
        (
            "cleave_router_workers_stuck_total",
            "how often a router found a worker stuck",
        ),
        ("cleave_worker_stuck", "whether this worker is stuck now"),
    ],
];

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
    page += CLOSE_HEAD;
    for [(one, of_one), (other, of_other)] in CLOSE_NAMES {
        let _ = writeln!(page, "- `{one}`: {of_one}; `{other}`: {of_other}.");
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

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn close_names_are_names_of_series() {
        let page = metrics_page();
        let (series, _) = page.split_once(CLOSE_HEAD).expect("the list follows");
        for (name, _) in CLOSE_NAMES.iter().flatten() {
            assert!(series.contains(&format!("\n| `{name}` | ")), "{name}");
        }
    }
}
