//! Logs: lines have ids, and never contain a client's text.

use crate::harness::{CleaveProcess, HttpClient, wait_for};
use crate::observe::ObservedFleet;
use crate::observe::collector::OtlpCollector;
use serde_json::{Value, json};
use std::io::{Read, Write};
use std::net::TcpStream;

const SECRET: &str = "the combination of the vault is xylophone-4711";

/// Log lines of a process that logs JSON.
fn lines(process: &CleaveProcess) -> Vec<Value> {
    let parsed = |line: &str| serde_json::from_str(line).unwrap_or_else(|_| panic!("{line}"));
    process.logs().lines().map(parsed).collect()
}

/// Sends a secret prompt in every way, valid and invalid; gives the texts that must not appear.
fn send_secret(fleet: &ObservedFleet) -> Vec<String> {
    let prompt = json!({"prompt": SECRET, "max_tokens": 24, "temperature": 0, "ignore_eos": true, "logprobs": 2});
    let headers = [("x-request-id", "asked-1")];
    let (status, _, answer) = fleet.client.post_with("/v1/completions", &prompt, &headers);
    assert_eq!(status, 200, "{answer}");
    let text = answer["choices"][0]["text"].as_str().expect("a text");
    let mut secrets = vec!["xylophone".to_owned(), text.trim().to_owned()];
    let chat =
        json!({"messages": [{"role": "user", "content": SECRET}], "max_tokens": 4, "stream": true});
    assert!(fleet.client.stream("/v1/chat/completions", &chat).count() > 1);
    let wrong = [
        json!({"prompt": SECRET, "temperature": SECRET}),
        json!({"prompt": {"x": SECRET}}),
        json!({"messages": [{"role": SECRET, "content": SECRET}]}),
        json!({"prompt": SECRET, "stop": [SECRET, 7]}),
        json!(SECRET),
    ];
    for body in &wrong {
        for path in ["/v1/completions", "/v1/chat/completions", "/tokenize"] {
            assert_ne!(fleet.client.post(path, body).0, 500, "{body}");
        }
    }
    let (_, tokens) = fleet.client.post("/tokenize", &json!({"prompt": SECRET}));
    let tokens: Vec<String> = tokens["tokens"]
        .as_array()
        .expect("tokens")
        .iter()
        .map(Value::to_string)
        .collect();
    for separator in [",", ", "] {
        secrets.push(tokens[2..6].join(separator));
    }
    secrets
}

// Invariant: I37.
#[test]
fn prompts_are_not_in_logs_spans_or_metrics() {
    let collector = OtlpCollector::start();
    let flags = ["--otlp-endpoint", &collector.url, "--log-level", "trace"];
    let flags = [&flags[..], &["--log-format", "json"]].concat();
    let fleet = ObservedFleet::start(&["prefill", "decode"], &flags, &flags);
    let secrets = send_secret(&fleet);
    wait_for("spans of both workers", || {
        let spans = collector.spans();
        let has = |name: &str| spans.iter().any(|span| span.name == name);
        (has("prefill") && has("decode")).then_some(())
    });
    let mut texts = vec![fleet.router.logs(), fleet.client.get("/metrics").1];
    texts.extend(fleet.workers.iter().map(CleaveProcess::logs));
    texts.extend(
        fleet
            .worker_metrics()
            .iter()
            .map(|one| one.get("/metrics").1),
    );
    texts.push(format!("{:?}", collector.spans()));
    for secret in &secrets {
        assert!(secret.len() > 4, "{secrets:?}");
        for text in &texts {
            let line = text.lines().find(|line| line.contains(secret.as_str()));
            assert_eq!(line, None, "`{secret}` was told");
        }
    }

    // Every process logs the request's id.
    let processes = fleet.workers.iter().chain([&fleet.router]);
    for process in processes {
        let about: Vec<Value> = lines(process)
            .into_iter()
            .filter(|line| line["request_id"] == "asked-1")
            .collect();
        assert!(!about.is_empty(), "{}", process.logs());
        let traced = |line: &Value| line["trace_id"].as_str().is_some_and(|id| id.len() == 32);
        assert!(about.iter().all(traced), "{about:#?}");
    }
}

#[test]
fn log_prompts_logs_prompts() {
    let flags = ["--log-prompts", "--log-format", "json"];
    let fleet = ObservedFleet::start(&["prefill", "decode"], &flags, &[]);
    send_secret(&fleet);
    let log_lines = lines(&fleet.router);
    let shows = |line: &&Value| {
        line["body"]
            .as_str()
            .is_some_and(|body| body.contains(SECRET))
    };
    let shown: Vec<_> = log_lines.iter().filter(shows).collect();
    assert_eq!(
        shown.first().map(|line| &line["request_id"]),
        Some(&json!("asked-1"))
    );
}

/// Access lines of a process that logs JSON, once there are so many of them.
fn access_lines(process: &CleaveProcess, count: usize) -> Vec<Value> {
    wait_for("the access lines", || {
        let all = lines(process).into_iter();
        let found: Vec<_> = all.filter(|line| line["target"] == "access").collect();
        (found.len() >= count).then_some(found)
    })
}

#[test]
fn each_request_is_one_access_line() {
    let flags = ["--access-log", "--log-format", "json"];
    let fleet = ObservedFleet::start(&["prefill", "decode"], &flags, &["--engine", "mock"]);
    let headers = [("x-request-id", "asked-1")];
    let body = json!({"prompt": "Go on and on, and on", "max_tokens": 5, "ignore_eos": true});
    let (status, _, answer) = fleet
        .client
        .post_with("/v1/completions?x=1", &body, &headers);
    assert_eq!(status, 200, "{answer}");
    let streamed = json!({"prompt": "Go on and on, and on", "max_tokens": 5, "ignore_eos": true, "stream": true});
    assert!(fleet.client.stream("/v1/completions", &streamed).count() > 5);
    assert_eq!(fleet.client.get("/v1/models").0, 200);
    let wrong = json!({"prompt": "Go", "max_tokens": 0});
    assert_eq!(fleet.client.post("/v1/completions", &wrong).0, 400);
    for probe in ["/health", "/live", "/load", "/metrics", "/ping", "/ready"] {
        assert_eq!(fleet.client.get(probe).0, 200, "{probe}");
    }
    // The lines of earlier requests are before that of the last one.
    assert_eq!(fleet.client.get("/version").0, 200);

    let access = access_lines(&fleet.router, 5);
    assert_eq!(access.len(), 5, "none for probes: {access:#?}");
    assert_eq!(access[4]["path"], "/version");
    let usage = &answer["usage"];
    for (line, is_streamed) in [(&access[0], false), (&access[1], true)] {
        assert_eq!(line["message"], "request over");
        assert_eq!(line["level"], "INFO");
        assert_eq!(line["method"], "POST");
        assert_eq!(line["path"], "/v1/completions");
        assert_eq!(line["status"], 200);
        assert_eq!(line["ending"], "completed");
        assert_eq!(line["model"], answer["model"]);
        assert_eq!(line["prompt_tokens"], usage["prompt_tokens"]);
        assert_eq!(line["output_tokens"], usage["completion_tokens"]);
        assert!(line["cached_tokens"].is_u64(), "{line}");
        let workers = line["workers"].as_str().expect("names");
        assert_eq!(workers.matches(',').count(), 1, "{workers}");
        assert!(workers.starts_with("prefill-"), "{workers}");
        let ms = |key: &str| {
            line[key]
                .as_f64()
                .unwrap_or_else(|| panic!("{key}: {line}"))
        };
        assert!(0.0 < ms("ttft_ms") && ms("ttft_ms") + 4.0 * ms("tpot_ms") <= ms("total_ms"));
        let is_first = line["request_id"] == "asked-1";
        assert_eq!(is_first, !is_streamed, "{line}");
    }
    let about = |line: &Value| (line["path"].clone(), line["status"].clone());
    assert_eq!(about(&access[2]), (json!("/v1/models"), json!(200)));
    assert_eq!(access[3]["status"], 400);
    assert_eq!(access[3]["ending"], "invalid");
    assert_eq!(access[3]["param"], "max_tokens");
    assert_eq!(access[3]["workers"], Value::Null);
}

#[test]
fn json_lines_have_values_as_fields() {
    let mut command = crate::harness::cleave(&["serve", "--engine", "mock", "--port", "0"]);
    command.args(["--log-format", "json"]);
    command.env("RUST_LOG", "info,decision=debug,note=debug");
    let mut process = CleaveProcess::spawn(command);
    let client = HttpClient::new(&process.address());
    client.complete(&json!({"prompt": "Note", "max_tokens": 2}));
    let all = lines(&process);
    let one = |target: &str, field: &str| {
        let mut of_target = all.iter().filter(|line| line["target"] == target);
        let found = of_target.find(|line| line[field].is_object());
        found
            .unwrap_or_else(|| panic!("{target}: {all:#?}"))
            .clone()
    };
    let decision = one("decision", "record");
    assert!(decision["record"]["considered"].is_array(), "{decision}");
    one("note", "note");
    let cache = all.iter().find(|line| line["message"] == "KV cache");
    let cache = cache.expect("each worker says its size");
    assert!(
        cache["tokens"].is_u64() && cache["worker"].is_string(),
        "{cache}"
    );
    // No event's text has the values of its fields.
    for line in &all {
        let message = line["message"].as_str().unwrap_or_default();
        assert!(!message.contains(['{', '=']), "{line}");
    }
}

/// One frame of HTTP/2 on stream 1, or on the connection.
fn frame(kind: u8, flags: u8, stream: u8, payload: &[u8]) -> Vec<u8> {
    let length = u32::try_from(payload.len()).expect("a short frame");
    let head = [&length.to_be_bytes()[1..], &[kind, flags, 0, 0, 0, stream]].concat();
    [&head[..], payload].concat()
}

/// A header field as a literal that no table holds.
fn header(name: &str, value: &str) -> Vec<u8> {
    let text = |text: &str| [&[text.len() as u8][..], text.as_bytes()].concat();
    [vec![0], text(name), text(value)].concat()
}

/// Reads one frame of HTTP/2 and returns its type.
fn read_frame(stream: &mut TcpStream) -> u8 {
    let mut head = [0; 9];
    stream.read_exact(&mut head).expect("the router answers");
    let [high, middle, low, kind, ..] = head;
    let mut payload = vec![0; u32::from_be_bytes([0, high, middle, low]) as usize];
    stream.read_exact(&mut payload).expect("a whole frame");
    kind
}

/// A worker's stream that breaks: its own error says only that a body could not be read.
#[test]
fn the_log_names_the_cause_of_a_broken_worker_stream() {
    const SETTINGS: u8 = 4;
    const HEADERS: u8 = 1;
    const DATA: u8 = 0;
    const END_HEADERS: u8 = 4;
    const PADDED: u8 = 8;
    let mut router = CleaveProcess::start(&["router", "--listen", "127.0.0.1:0"]);
    let address = router.address();
    let fields = [
        header(":method", "POST"),
        header(":scheme", "http"),
        header(":path", "/cleave.fleet.v1.Fleet/Join"),
        header(":authority", "router"),
        header("content-type", "application/grpc"),
        header("te", "trailers"),
    ];
    let request = [
        b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n".to_vec(),
        frame(SETTINGS, 0, 0, &[]),
        frame(HEADERS, END_HEADERS, 1, &fields.concat()),
    ];
    // More padding than the frame has bytes; and a frame that is longer than any may be.
    let padded = frame(DATA, PADDED, 1, &[255, 0, 0]);
    let too_long = [vec![0xff, 0xff, 0xff, DATA, 0, 0, 0, 0, 1], vec![0; 64]].concat();
    for (broken, cause) in [
        (padded, "unspecific protocol error detected"),
        (too_long, "frame with invalid size"),
    ] {
        let mut stream = TcpStream::connect(&address).expect("the router listens");
        stream.write_all(&request.concat()).expect("it reads");
        // The head of the router's answer shows that it serves the stream; settings come before.
        while read_frame(&mut stream) != HEADERS {}
        stream.write_all(&broken).expect("it reads");
        wait_for(cause, || {
            let logs = router.logs();
            let mut lines = logs.lines();
            let is_logged = lines.any(|line| line.contains("stream ended") && line.contains(cause));
            is_logged.then_some(())
        });
    }
}

#[test]
fn log_level_and_rust_log_both_apply() {
    let start = |level: &str, rust_log: Option<&str>| {
        let mut command = crate::harness::cleave(&["serve", "--engine", "mock", "--port", "0"]);
        command.args(["--log-level", level]).env_remove("RUST_LOG");
        if let Some(rust_log) = rust_log {
            command.env("RUST_LOG", rust_log);
        }
        let mut process = CleaveProcess::spawn(command);
        process.address();
        process
    };
    assert_eq!(start("error", None).logs(), "");
    for (level, rust_log) in [("info", None), ("error", Some("cleave_node=info"))] {
        let process = start(level, rust_log);
        wait_for("a line", || process.logs().contains("INFO").then_some(()));
    }
}
