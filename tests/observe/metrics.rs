//! `/metrics`: documented, bounded, and in the format that was asked for.

use crate::Fleet;
use crate::harness::{root, run};
use serde_json::json;
use std::collections::{BTreeMap, BTreeSet};

/// Names of all that is told, as a reader of the older format sees it.
fn families(text: &str) -> BTreeSet<String> {
    let name = |line: &str| {
        line.strip_prefix("# TYPE ")?
            .split(' ')
            .next()
            .map(str::to_owned)
    };
    text.lines().filter_map(name).collect()
}

#[test]
fn the_page_of_metrics_is_what_the_binary_says() {
    let (status, page, error) = run(&["metrics"]);
    assert!(status.success(), "{error}");
    let path = root().join("docs/metrics.md");
    if std::env::var_os("UPDATE_METRICS").is_some() {
        std::fs::create_dir_all(root().join("docs")).expect("a folder");
        std::fs::write(&path, &page).expect("a file that can be written");
    }
    let kept = std::fs::read_to_string(&path).unwrap_or_default();
    assert!(
        kept == page,
        "docs/metrics.md is old: UPDATE_METRICS=1 cargo test -p cleave-cli --test observe page"
    );
}

/// Times that strangers come with names of their own.
const ROUNDS: usize = 40;

#[test]
fn strangers_names_made_series_without_end() {
    let fleet = Fleet::start(&["prefill", "decode"], &[], &["--engine", "mock"]);
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
        pages.extend(fleet.of_workers().iter().map(|one| one.get("/metrics").1));
        pages.concat()
    };
    (0..3).for_each(ask);
    let before = series(&read());
    (3..3 + ROUNDS).for_each(ask);
    let text = read();
    assert!(!text.contains("odd-"), "{text}");
    let after = series(&text);
    // What happens late for the first time is shown late; a name that were kept would be one in each round.
    let mut new: BTreeMap<&str, usize> = BTreeMap::new();
    for series in after.difference(&before) {
        let name = series.split('{').next().unwrap_or_default();
        *new.entry(name).or_default() += 1;
    }
    let most = new.values().max().copied().unwrap_or_default();
    assert!(most < ROUNDS, "{new:?}");

    let page = std::fs::read_to_string(root().join("docs/metrics.md")).expect("the page");
    for name in families(&text) {
        assert!(
            page.contains(&format!("| `{name}` |")),
            "{name} is not on the page"
        );
    }
    assert!(text.contains("vllm:cache_config_info{"));
}

/// Each series' name and labels; processes that have one in common count once.
fn series(text: &str) -> BTreeSet<String> {
    let lines = text.lines().filter(|line| !line.starts_with('#'));
    let named = lines.filter_map(|line| line.rsplit_once(' '));
    named.map(|(series, _)| series.to_owned()).collect()
}
