//! Memory that large hostile bodies take comes back, in `cleave serve` and in a router.

use crate::harness::{self, CleaveProcess, HttpClient, wait_for};
use serde_json::json;

/// Resident memory of a process in bytes.
fn resident_bytes(process: &CleaveProcess) -> u64 {
    let path = format!("/proc/{}/status", process.id());
    let status = std::fs::read_to_string(path).expect("the process runs");
    let mut lines = status.lines();
    let line = lines.find_map(|line| line.strip_prefix("VmRSS:"));
    let kilobytes = line
        .expect("every process has the line")
        .trim()
        .trim_end_matches(" kB");
    kilobytes.parse::<u64>().expect("a number") << 10
}

/// JSON of nearly eight megabytes: many copies of an item between two texts.
fn large_body(before: &str, item: &str, after: &str) -> String {
    const BYTES: usize = 8_000_000;
    let count = (BYTES - before.len() - after.len()) / (item.len() + 1);
    let mut text = before.to_owned() + item;
    for _ in 1..count {
        text.push(',');
        text.push_str(item);
    }
    text + after
}

/// Bodies whose values take many times their bytes while they are read.
fn hostile_bodies() -> Vec<(&'static str, String)> {
    const TEXT: &str = "/v1/completions";
    const CHAT: &str = "/v1/chat/completions";
    let nested = "[".repeat(100) + &"]".repeat(100);
    let unknown = r#"{"prompt":"a","max_tokens":1,"zzz":["#;
    let messages = r#"{"messages":["#;
    let long = format!(
        r#"{messages}{{"role":"user","content":"{}"}}]}}"#,
        "word ".repeat(1_200_000)
    );
    vec![
        (TEXT, large_body(unknown, &nested, "]}")),
        (TEXT, large_body(unknown, "{}", "]}")),
        (
            CHAT,
            large_body(messages, r#"{"role":"user","content":""}"#, "]}"),
        ),
        (CHAT, long),
    ]
}

/// Posts each hostile body from several clients at once; the memory of the process that reads them
/// comes back.
#[track_caller]
fn check_memory_is_released(name: &str, process: &mut CleaveProcess) {
    const CLIENTS: usize = 3;
    const LEFT_BYTES_MAX: u64 = 32 << 20;
    let address = process.address();
    let client = HttpClient::new(&address);
    client.wait_ready();
    client.complete(&json!({"prompt": "a", "max_tokens": 1}));
    let before = resident_bytes(process);
    let http = reqwest::blocking::Client::builder().timeout(harness::LIMIT);
    let http = http.build().expect("client builds");
    for (path, body) in hostile_bodies() {
        std::thread::scope(|scope| {
            for _ in 0..CLIENTS {
                scope.spawn(|| {
                    let request = http.post(format!("http://{address}{path}"));
                    let request = request.header("content-type", "application/json");
                    let answer = request.body(body.clone()).send().expect("it answers");
                    assert!(answer.status().as_u16() < 500, "{}", answer.status());
                    answer.bytes().expect("a whole answer");
                });
            }
        });
    }
    let allowed = before + LEFT_BYTES_MAX;
    let mut last = 0;
    wait_for("memory back from large bodies", || {
        let now = resident_bytes(process);
        if now != last {
            eprintln!("{name}: {} MiB, at first {}", now >> 20, before >> 20);
            last = now;
        }
        (now < allowed).then_some(())
    });
}

#[test]
fn memory_of_hostile_bodies_is_released() {
    let mut alone = CleaveProcess::start(&["serve", "--port", "0", "--threads", "1"]);
    check_memory_is_released("serve", &mut alone);
    let mut router = CleaveProcess::start(&["router", "--listen", "127.0.0.1:0"]);
    let address = router.address();
    let worker = ["worker", "--leg", "both", "--router", &address];
    let _worker = CleaveProcess::start(&[&worker[..], &["--threads", "1"]].concat());
    check_memory_is_released("router", &mut router);
}
