//! KV tiers with a real engine: answers do not change.

use crate::harness::{self, CleaveProcess, HttpClient, wait_for};
use serde_json::{Value, json};
use std::path::Path;

/// A server of a small trained checkpoint in bf16, and a client for it.
fn start(kv_cache: &str, more: &[&str]) -> (CleaveProcess, HttpClient) {
    let model = harness::root().join("testdata/trained");
    let model = model.to_str().expect("a readable path");
    let plain = ["serve", "--port", "0", "--threads", "2", "--model", model];
    let pool = ["--kv-cache", kv_cache];
    let mut process = CleaveProcess::start(&[&plain[..], &pool, more].concat());
    let client = HttpClient::new(&process.address());
    client.wait_ready();
    (process, client)
}

/// A server whose KV cache has room for at most three of [`prompts`], with a memory tier and a disk
/// tier.
fn serve(folder: &Path, more: &[&str]) -> (CleaveProcess, HttpClient) {
    let folder = folder.to_str().expect("a readable path");
    let memory = ["--kv-offloading-size", "32MiB"];
    let disk = ["--kv-offloading-dir", folder, "--kv-offloading-dir-size"];
    start("2MiB", &[&memory[..], &disk, &["64MiB"], more].concat())
}

fn blocks_on_disk(client: &HttpClient) -> f64 {
    client.metric("cleave_kv_tier_blocks", &["kind=\"disk\""])
}

/// Waits until this many blocks are on disk, and ends the worker.
fn end_with_blocks_on_disk(mut process: CleaveProcess, client: &HttpClient, least: f64) {
    wait_for("blocks on disk", || {
        (blocks_on_disk(client) >= least).then_some(())
    });
    process.signal("TERM");
    assert!(process.wait().success());
}

/// Prompts of about four hundred tokens with different beginnings.
fn prompts() -> Vec<Value> {
    let words = [
        "ownership",
        "a lifetime",
        "the trait",
        "an iterator",
        "this macro",
    ];
    let ask = |word: &str| {
        let text =
            format!("About {word}: the compiler checks what {word} says of memory. ").repeat(20);
        json!({"prompt": text, "max_tokens": 12, "temperature": 0.8, "seed": 11})
    };
    words.map(ask).to_vec()
}

/// Asks all prompts in turn until a block was fetched from a tier, and checks every answer.
fn ask_until_blocks_are_fetched(client: &HttpClient, answers: &[String]) {
    wait_for("block from below", || {
        for (prompt, answer) in prompts().iter().zip(answers) {
            assert_eq!(&client.complete(prompt), answer);
        }
        (client.metric("cleave_kv_tier_fetched_blocks_total", &[]) > 0.0).then_some(())
    });
    assert_eq!(
        client.metric("cleave_pool_blocks", &["kind=\"leaked\""]),
        0.0
    );
}

fn answers(more: &[&str]) -> Vec<String> {
    let (_process, client) = start("16MiB", more);
    prompts()
        .iter()
        .map(|prompt| client.complete(prompt))
        .collect()
}

fn check_tiers_across_restart(more: &[&str]) {
    let expected = answers(more);
    let folder = tempfile::tempdir().expect("a temporary folder");
    let (process, client) = serve(folder.path(), more);
    ask_until_blocks_are_fetched(&client, &expected);
    end_with_blocks_on_disk(process, &client, 40.0);
    // The next process finds the blocks on disk before it has computed any.
    let (_process, client) = serve(folder.path(), more);
    assert!(blocks_on_disk(&client) >= 40.0);
    ask_until_blocks_are_fetched(&client, &expected);
}

#[test]
fn kv_from_memory_and_disk_changes_no_token() {
    check_tiers_across_restart(&[]);
}

#[test]
fn int8_kv_from_memory_and_disk_changes_no_token() {
    check_tiers_across_restart(&["--kv-cache-dtype", "int8"]);
}

// Lesson: 7.
#[test]
fn blocks_of_another_kv_format_are_not_loaded() {
    for more in [["--quantize", "int8"], ["--kv-cache-dtype", "int8"]] {
        // A worker with another KV format empties the file.
        let folder = tempfile::tempdir().expect("a temporary folder");
        let (process, client) = serve(folder.path(), &[]);
        for prompt in prompts() {
            client.complete(&prompt);
        }
        end_with_blocks_on_disk(process, &client, 1.0);
        let (_process, client) = serve(folder.path(), &more);
        assert_eq!(blocks_on_disk(&client), 0.0, "{more:?}");
    }
}
