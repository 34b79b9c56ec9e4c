//! `/metrics`: documented, bounded, and in the format that was asked for.

use crate::harness::{HttpClient, root, run};
use crate::observe::ObservedFleet;
use serde_json::json;
use std::collections::{BTreeMap, BTreeSet};

/// Names of all metrics, in the Prometheus text format.
fn metric_names(text: &str) -> BTreeSet<String> {
    let name = |line: &str| {
        line.strip_prefix("# TYPE ")?
            .split(' ')
            .next()
            .map(str::to_owned)
    };
    text.lines().filter_map(name).collect()
}

// Invariant: I39.
#[test]
fn metrics_page_matches_the_binary() {
    let (status, page, error) = run(&["metrics"]);
    assert!(status.success(), "{error}");
    let path = root().join("docs/metrics.md");
    if std::env::var_os("UPDATE_METRICS").is_some() {
        std::fs::create_dir_all(root().join("docs")).expect("a folder");
        std::fs::write(&path, &page).expect("a file that can be written");
    }
    let stored = std::fs::read_to_string(&path).unwrap_or_default();
    assert!(
        stored == page,
        "docs/metrics.md is old: UPDATE_METRICS=1 cargo test -p cleave-cli --test system metrics_page"
    );
}

#[test]
fn metrics_of_routers_and_workers_are_compressed() {
    let admin = ["--admin-listen", "127.0.0.1:0"];
    let mut fleet = ObservedFleet::start(&["prefill", "decode"], &admin, &["--engine", "mock"]);
    let mut pages = fleet.worker_metrics();
    pages.push(HttpClient::new(&fleet.router.admin_address()));
    pages.push(fleet.client);
    for page in pages {
        let plain = page.get("/metrics").1;
        assert!(plain.starts_with("# "), "{plain}");
        let answer = page.get_with("/metrics", &[("accept-encoding", "gzip")]);
        let encoding = answer.headers().get("content-encoding").cloned();
        assert_eq!(encoding.expect("an encoding"), "gzip");
        let bytes = answer.bytes().expect("a body");
        assert!(bytes.len() * 3 < plain.len(), "{} bytes", bytes.len());
    }
}

/// Requests with new client-chosen names.
const ROUNDS: usize = 40;

// Invariant: I39.
#[test]
fn client_labels_create_no_metric_series() {
    let fleet = ObservedFleet::start(&["prefill", "decode"], &[], &["--engine", "mock"]);
    let ask = |number: usize| {
        let odd = format!("odd-{number}\u{e9}\"}} 1");
        let plain = format!("odd-{number}");
        let body = json!({"model": odd, "prompt": odd, "user": odd, "max_tokens": 1});
        let own = json!({"prompt": odd, "user": odd, "max_tokens": 1});
        for name in [
            "x-tenant-id",
            "x-slo-class",
            "x-request-id",
            "x-llm-d-inference-objective",
            "x-api-key",
            "user-agent",
        ] {
            let headers = [(name, &*plain)];
            fleet.client.post_with("/v1/completions", &body, &headers);
            fleet.client.post_with("/v1/completions", &own, &headers);
        }
        fleet.client.get(&format!("/{plain}"));
        fleet.client.get(&format!("/v1/models/{plain}"));
    };
    let read = || {
        let mut pages = vec![fleet.client.get("/metrics").1];
        pages.extend(
            fleet
                .worker_metrics()
                .iter()
                .map(|one| one.get("/metrics").1),
        );
        pages.concat()
    };
    (0..3).for_each(ask);
    let before = series(&read());
    (3..3 + ROUNDS).for_each(ask);
    let text = read();
    assert!(!text.contains("odd-"), "{text}");
    let after = series(&text);
    // Some series appear late; a series for each client name would appear in every round.
    let mut new: BTreeMap<&str, usize> = BTreeMap::new();
    for series in after.difference(&before) {
        let name = series.split('{').next().unwrap_or_default();
        *new.entry(name).or_default() += 1;
    }
    let most = new.values().max().copied().unwrap_or_default();
    assert!(most < ROUNDS, "{new:?}");

    let page = std::fs::read_to_string(root().join("docs/metrics.md")).expect("the page");
    for name in metric_names(&text) {
        assert!(
            page.contains(&format!("| `{name}` |")),
            "{name} is not on the page"
        );
    }
    assert!(text.contains("vllm:cache_config_info{"));
}

/// Name and labels of each series; equal series of several processes count once.
fn series(text: &str) -> BTreeSet<String> {
    let lines = text.lines().filter(|line| !line.starts_with('#'));
    let named = lines.filter_map(|line| line.rsplit_once(' '));
    named.map(|(series, _)| series.to_owned()).collect()
}
