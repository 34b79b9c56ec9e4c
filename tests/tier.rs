//! What is kept below the KV cache, with a real engine: answers stay what they were.

mod harness;

use harness::{Client, Process, wait_for};
use serde_json::{Value, json};
use std::path::Path;

/// A worker, and who asks it.
fn start(kv_cache: &str, more: &[&str]) -> (Process, Client) {
    let plain = ["serve", "--port", "0", "--threads", "2", "--kv-cache"];
    let mut process = Process::start(&[&plain[..], &[kv_cache], more].concat());
    let client = Client::new(&process.address());
    client.wait_ready();
    (process, client)
}

/// One whose KV cache has room for two or three of [`prompts`] at most, which lie in memory and on disk besides.
fn serve(folder: &Path, more: &[&str]) -> (Process, Client) {
    let folder = folder.to_str().expect("a readable path");
    let memory = ["--kv-offloading-size", "32MiB"];
    let disk = ["--kv-offloading-dir", folder, "--kv-offloading-dir-size"];
    start("2MiB", &[&memory[..], &disk, &["64MiB"], more].concat())
}

fn blocks_on_disk(client: &Client) -> f64 {
    client.metric("cleave_kv_tier_blocks", &["kind=\"disk\""])
}

/// Waits until so many blocks are on disk, and ends the worker.
fn end_with_blocks_on_disk(mut process: Process, client: &Client, least: f64) {
    wait_for("blocks on disk", || {
        (blocks_on_disk(client) >= least).then_some(())
    });
    process.signal("TERM");
    assert!(process.wait().success());
}

/// Of some four hundred tokens each; no two begin alike.
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

/// Asks by turns until a block came back, and each time expects these answers.
fn turns_until_some_came(client: &Client, answers: &[String]) {
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

fn kept_and_found_again(more: &[&str]) {
    let expected = answers(more);
    let folder = tempfile::tempdir().expect("a temporary folder");
    let (process, client) = serve(folder.path(), more);
    turns_until_some_came(&client, &expected);
    end_with_blocks_on_disk(process, &client, 40.0);
    // The next life finds them: nothing was computed yet.
    let (_process, client) = serve(folder.path(), more);
    assert!(blocks_on_disk(&client) >= 40.0);
    turns_until_some_came(&client, &expected);
}

#[test]
fn keys_and_values_come_back_from_memory_and_disk_and_no_token_changes() {
    kept_and_found_again(&[]);
}

#[test]
fn keys_and_values_in_int8_come_back_with_their_scales_and_no_token_changes() {
    kept_and_found_again(&["--kv-cache-dtype", "int8"]);
}

#[test]
fn lesson_07_blocks_of_another_form_were_found() {
    for more in [["--quantize", "int8"], ["--kv-cache-dtype", "int8"]] {
        // Whoever finds blocks of another form empties the file.
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
