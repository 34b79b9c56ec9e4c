//! What is kept below the KV cache, with a real engine: answers stay what they were.

mod harness;

use harness::{Client, Process, wait_for};
use serde_json::{Value, json};
use std::path::Path;

/// A worker whose KV cache has room for one or two of [`prompts`], which lie in memory and on disk besides.
fn serve(folder: &Path, more: &[&str]) -> (Process, Client) {
    let folder = folder.to_str().expect("a readable path");
    let plain = ["serve", "--port", "0", "--threads", "2"];
    let tier = ["--kv-cache", "2MiB", "--kv-offloading-size", "32MiB"];
    let disk = ["--kv-offloading-dir", folder, "--kv-offloading-dir-size"];
    let mut process = Process::start(&[&plain[..], &tier, &disk, &["64MiB"], more].concat());
    let client = Client::new(&process.address());
    client.wait_ready();
    (process, client)
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

/// Asks by turns until so many blocks came back, and each time expects these answers.
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
    let plain = [
        "serve",
        "--port",
        "0",
        "--threads",
        "2",
        "--kv-cache",
        "16MiB",
    ];
    let mut process = Process::start(&[&plain[..], more].concat());
    let client = Client::new(&process.address());
    client.wait_ready();
    prompts()
        .iter()
        .map(|prompt| client.complete(prompt))
        .collect()
}

fn kept_and_found_again(more: &[&str]) {
    let expected = answers(more);
    let folder = tempfile::tempdir().expect("a temporary folder");
    let (mut process, client) = serve(folder.path(), more);
    turns_until_some_came(&client, &expected);
    wait_for("a block on disk", || {
        (client.metric("cleave_kv_tier_blocks", &["kind=\"disk\""]) >= 40.0).then_some(())
    });
    process.signal("TERM");
    assert!(process.wait().success());
    // The next life finds them: nothing was computed yet.
    let (_process, client) = serve(folder.path(), more);
    assert!(client.metric("cleave_kv_tier_blocks", &["kind=\"disk\""]) >= 40.0);
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
    let folder = tempfile::tempdir().expect("a temporary folder");
    let (mut process, client) = serve(folder.path(), &[]);
    for prompt in prompts() {
        client.complete(&prompt);
    }
    wait_for("a block on disk", || {
        (client.metric("cleave_kv_tier_blocks", &["kind=\"disk\""]) > 0.0).then_some(())
    });
    process.signal("TERM");
    assert!(process.wait().success());
    for more in [["--quantize", "int8"], ["--kv-cache-dtype", "int8"]] {
        let (_process, client) = serve(folder.path(), &more);
        assert_eq!(
            client.metric("cleave_kv_tier_blocks", &["kind=\"disk\""]),
            0.0
        );
    }
}
