//! Downloads from a hub on this machine, with every fault that a network has.
#![allow(clippy::unwrap_used, reason = "a test's helper fails by panicking")]

mod cache;
mod faults;
mod proxies;
mod refusals;

use cleave_hub::{
    Hub, HubError, HubModel, HubSettings, HubToken, NetworkUse, ProxySettings, PullCounts,
    PullObserver, PulledSnapshot, RetryOptions,
};
use cleave_test_hub::TestHub;
use std::collections::BTreeMap;
use std::path::{Path, PathBuf};
use std::time::Duration;
use tempfile::TempDir;

/// The file of weights, and its size: several reads of the client.
const WEIGHTS: &str = "model.safetensors";
const WEIGHTS_BYTES: usize = 3_000_000;

/// Keeps the last counts of a download.
#[derive(Default)]
struct LastCounts(PullCounts);

impl PullObserver for LastCounts {
    fn show(&mut self, counts: PullCounts) {
        self.0 = counts;
    }
}

/// A hub, and a client with an empty cache.
struct Pair {
    hub: TestHub,
    cache: TempDir,
    settings: HubSettings,
}

/// Bytes that differ everywhere, so that a part in the wrong place is found.
fn content(bytes: usize) -> Vec<u8> {
    let mut x = 1_u32;
    let mut next = || {
        x = x.wrapping_mul(1_664_525).wrapping_add(1_013_904_223);
        (x >> 24) as u8
    };
    (0..bytes).map(|_| next()).collect()
}

fn files(names: &[&str]) -> BTreeMap<String, Vec<u8>> {
    let size = |name: &str| {
        if name.ends_with(".safetensors") {
            WEIGHTS_BYTES
        } else {
            500
        }
    };
    let file = |name: &&str| ((*name).to_owned(), content(size(name) + name.len()));
    names.iter().map(file).collect()
}

fn model_files() -> BTreeMap<String, Vec<u8>> {
    files(&[
        "config.json",
        "tokenizer.json",
        "1_Pooling/config.json",
        WEIGHTS,
        "README.md",
        "original/consolidated.00.pth",
    ])
}

impl Pair {
    fn new() -> Self {
        Self::of(model_files())
    }

    fn of(files: BTreeMap<String, Vec<u8>>) -> Self {
        let hub = TestHub::start(files);
        let cache = TempDir::new().unwrap();
        let settings = HubSettings {
            endpoint: hub.endpoint(),
            cache: cache.path().join("hub"),
            token: HubToken::of("secret"),
            network: NetworkUse::Allowed,
            retry: RetryOptions {
                failures_max: 4,
                contacts_max: 2,
                wait_first: Duration::from_millis(1),
                wait_max: Duration::from_millis(5),
                silence_max: Duration::from_secs(20),
            },
            proxies: ProxySettings::default(),
            authorities: None,
        };
        Self {
            hub,
            cache,
            settings,
        }
    }

    fn client(&self) -> Hub {
        Hub::new(self.settings.clone())
    }

    fn pull(&self, name: &str) -> Result<PulledSnapshot, HubError> {
        self.client().pull(&model(name), &mut LastCounts::default())
    }

    /// Pulls the model, which succeeds, and compares every file with the hub's.
    #[track_caller]
    fn pull_whole(&self) -> PathBuf {
        let folder = self.pull(cleave_test_hub::MODEL).unwrap().folder;
        for (name, content) in model_files() {
            let found = std::fs::read(folder.join(&name)).ok();
            let is_read = !name.ends_with(".md") && !name.starts_with("original");
            assert!(found == is_read.then_some(content), "{name}");
        }
        assert_eq!(self.incomplete(), Vec::<String>::new());
        folder
    }

    /// The requests for the weights, as the ranges that they asked for.
    fn weight_ranges(&self) -> Vec<Option<String>> {
        let requests = self.hub.requests(WEIGHTS).into_iter();
        requests.map(|request| request.range).collect()
    }

    fn blobs(&self) -> PathBuf {
        self.settings.cache.join("models--org--tiny/blobs")
    }

    /// Names of the parts of blobs that did not arrive whole.
    fn incomplete(&self) -> Vec<String> {
        let names = names_in(&self.blobs()).into_iter();
        names.filter(|name| name.ends_with(".incomplete")).collect()
    }
}

/// Pulls the model in vain; returns the error, which has these words.
#[track_caller]
fn refusal_text(pair: &Pair, words: &str) -> String {
    let text = pair.pull(cleave_test_hub::MODEL).unwrap_err().to_string();
    assert!(text.contains(words), "{words}: {text}");
    text
}

fn names_in(folder: &Path) -> Vec<String> {
    let entries = std::fs::read_dir(folder).unwrap().flatten();
    let mut names: Vec<String> = entries
        .map(|entry| entry.file_name().into_string().unwrap())
        .collect();
    names.sort();
    names
}

fn model(name: &str) -> HubModel {
    name.parse().unwrap()
}
