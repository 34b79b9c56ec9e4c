//! The whole system: real processes on loopback, one and five of them.

use crate::harness::{self, CleaveProcess, HttpClient, run, wait_for};
use serde_json::{Value, json};

/// One process with a prefill and a decode worker, on the bundled checkpoint.
pub(crate) fn serve(more: &[&str]) -> (CleaveProcess, HttpClient) {
    let mut arguments = Vec::new();
    if !more.contains(&"--both") {
        arguments.extend(["--prefill", "1", "--decode", "1"]);
    }
    arguments.extend(more);
    let mut process = harness::serve(&arguments);
    let client = HttpClient::new(&process.address());
    (process, client)
}

/// A router, two prefill and two decode workers, each a process.
pub(crate) struct ServingFleet {
    pub(crate) router: CleaveProcess,
    pub(crate) prefill: Vec<CleaveProcess>,
    pub(crate) decode: Vec<CleaveProcess>,
    pub(crate) client: HttpClient,
}

pub(crate) fn fleet() -> ServingFleet {
    fleet_of(&[])
}

/// A fleet whose workers get additional flags.
pub(crate) fn fleet_of(more: &[&str]) -> ServingFleet {
    fleet_of_model(&[], more)
}

/// A fleet whose workers get the flags of a model, and others.
pub(crate) fn fleet_of_model(model: &[&str], more: &[&str]) -> ServingFleet {
    fleet_of_legs([2, 2], model, more)
}

/// A fleet of so many prefill and decode workers.
pub(crate) fn fleet_of_legs(counts: [usize; 2], model: &[&str], more: &[&str]) -> ServingFleet {
    // Split placement makes every request a hand-off.
    let mut router =
        CleaveProcess::start(&["router", "--listen", "127.0.0.1:0", "--placement", "split"]);
    let address = router.address();
    let worker = |leg: &str| {
        let plain = [
            "worker",
            "--leg",
            leg,
            "--router",
            &address,
            "--threads",
            "1",
            "--kv-cache",
            "64MiB",
            "--metrics-listen",
            "127.0.0.1:0",
        ];
        CleaveProcess::start(&[&plain[..], model, more].concat())
    };
    let [prefill, decode] = counts;
    let workers = (prefill + decode) as f64;
    let prefill = (0..prefill).map(|_| worker("prefill")).collect();
    let decode = (0..decode).map(|_| worker("decode")).collect();
    let client = HttpClient::new(&address);
    client.wait_ready();
    wait_for("all workers", || {
        (client.metric("cleave_workers", &[]) >= workers).then_some(())
    });
    ServingFleet {
        router,
        prefill,
        decode,
        client,
    }
}

/// Requests of every kind with deterministic answers.
pub(crate) fn requests() -> Vec<Value> {
    let long = "The borrow checker follows each reference to the value it came from. ".repeat(12);
    vec![
        json!({"prompt": "A vector is", "max_tokens": 24, "temperature": 0}),
        json!({"prompt": "Ownership means that", "max_tokens": 32, "temperature": 1.0, "seed": 7}),
        json!({"prompt": long, "max_tokens": 16, "temperature": 0}),
        json!({"prompt": long, "max_tokens": 16, "temperature": 0.9, "top_p": 0.9, "seed": 1}),
        json!({"prompt": "fn main", "max_tokens": 20, "temperature": 0, "repetition_penalty": 1.3, "presence_penalty": 0.5}),
        json!({"prompt": "Note", "max_tokens": 1, "temperature": 0}),
        json!({"prompt": [65, 66, 67], "max_tokens": 12, "temperature": 1.5, "top_k": 40, "min_p": 0.05, "seed": 3}),
        json!({"prompt": "é 漢 🦀", "max_tokens": 12, "temperature": 0, "ignore_eos": true}),
    ]
}

/// The text of a streamed answer.
pub(crate) fn streamed(client: &HttpClient, body: &Value) -> String {
    let mut body = body.clone();
    body["stream"] = json!(true);
    let mut text = String::new();
    let mut finished = false;
    let mut done = false;
    for event in client.stream("/v1/completions", &body) {
        if event == "[DONE]" {
            done = true;
            continue;
        }
        let chunk: Value = serde_json::from_str(&event).expect("each event is JSON");
        let choice = &chunk["choices"][0];
        text.push_str(choice["text"].as_str().expect("a text"));
        finished |= choice["finish_reason"].is_string();
    }
    assert!(finished && done, "a stream says how it ends");
    text
}

// Invariant: I11.
#[test]
fn one_process_and_five_answer_alike() {
    check_same_answers(&[]);
}

/// The hand-off carries int8 codes and scales.
#[test]
fn one_process_and_five_agree_with_int8_kv() {
    check_same_answers(&["--kv-cache-dtype", "int8"]);
}

fn check_same_answers(more: &[&str]) {
    let (_one, one) = serve(more);
    let alone = ["--prefill", "0", "--decode", "0", "--both", "1"];
    let (_aggregated, aggregated) = serve(&[&alone, more].concat());
    let five = fleet_of(more);
    for body in requests() {
        let text = one.complete(&body);
        assert_eq!(text, aggregated.complete(&body), "{body}");
        assert_eq!(text, five.client.complete(&body), "{body}");
        assert_eq!(text, streamed(&one, &body), "{body}");
        assert_eq!(text, streamed(&five.client, &body), "{body}");
    }
}

/// Drafts of up to six tokens wherever one is likely to be accepted. Nothing is measured, so the
/// result does not depend on the machine's load.
pub(crate) const GUESSES: [&str; 4] = [
    "--calibrate",
    "0",
    "--speculative-config",
    r#"{"method":"ngram","num_speculative_tokens":6,"prompt_lookup_min":1}"#,
];

/// Repetitive prompts, greedy and sampled, some of which end within a draft.
fn repetitive() -> Vec<Value> {
    let list = "one two three four five six seven eight. ".repeat(6);
    let drawn = json!({"prompt": list, "max_tokens": 40, "temperature": 0.7, "seed": 5});
    vec![
        json!({"prompt": list, "max_tokens": 60, "temperature": 0, "ignore_eos": true}),
        json!({"prompt": list, "max_tokens": 60, "temperature": 0, "stop": ["three"]}),
        json!({"prompt": list, "max_tokens": 40, "temperature": 0, "logprobs": 2}),
        json!({"prompt": list, "max_tokens": 40, "temperature": 0, "frequency_penalty": 0.3}),
        json!({"prompt": list, "max_tokens": 30, "min_tokens": 12, "temperature": 0}),
        drawn,
    ]
}

/// Text and scores, without ids and times, which differ between equal answers.
pub(crate) fn choices(client: &HttpClient, body: &Value) -> Value {
    let (status, answer) = client.post("/v1/completions", body);
    assert_eq!(status, 200, "{answer}");
    json!([answer["choices"], answer["usage"]["completion_tokens"]])
}

// Invariant: I48.
#[test]
fn speculation_changes_no_answer() {
    // It repeats itself, as the bundled one does not.
    let model = harness::root().join("testdata/trained");
    let model = ["--model", model.to_str().expect("a readable path")];
    let off = ["--calibrate", "0", "--speculative-config", "off"];
    let (_plain, plain) = serve(&[&model[..], &off].concat());
    let guesses = [&model[..], &GUESSES].concat();
    let (_split, split) = serve(&guesses);
    let both = ["--prefill", "0", "--decode", "0", "--both", "1"];
    let (_whole, whole) = serve(&[&both[..], &guesses].concat());
    let bodies: Vec<Value> = requests().into_iter().chain(repetitive()).collect();
    let expected: Vec<Value> = bodies.iter().map(|body| choices(&plain, body)).collect();
    for client in [&split, &whole] {
        let together: Vec<Value> = std::thread::scope(|scope| {
            let ask = |body| scope.spawn(move || choices(client, body));
            let handles: Vec<_> = bodies.iter().map(ask).collect();
            let answers = handles.into_iter();
            answers
                .map(|answer| answer.join().expect("an answer"))
                .collect()
        });
        for ((body, expected), answer) in bodies.iter().zip(&expected).zip(together) {
            assert_eq!(answer, *expected, "{body}");
        }
        let tokens = |kind| client.metric("cleave_draft_tokens_total", &[kind]);
        let (drafted, accepted) = (tokens("\"drafted\""), tokens("\"accepted\""));
        assert!(
            accepted > 20.0 && accepted <= drafted,
            "{accepted} of {drafted}"
        );
    }
    assert_eq!(plain.metric("cleave_draft_tokens_total", &[]), 0.0);
}

/// A client for a worker's metrics.
pub(crate) fn metrics_client(worker: &CleaveProcess) -> HttpClient {
    HttpClient::new(&wait_for("metrics' address", || {
        let logs = worker.logs();
        let rest = logs.split("metrics are served url=http://").nth(1)?;
        Some(rest.split('/').next()?.to_owned())
    }))
}

// Invariant: I48.
/// Eight speculating streams on two decode workers, of which one dies or drains.
#[test]
fn speculating_streams_survive_resumes_and_migrations() {
    let list = "one two three four five six seven eight. ";
    let body = |stream: u32| {
        let prompt = format!("{stream} {}", list.repeat(5));
        let (temperature, seed) = (f64::from(stream % 2) * 0.6, stream);
        json!({"prompt": prompt, "max_tokens": 600, "temperature": temperature, "seed": seed, "ignore_eos": true})
    };
    let bodies: Vec<Value> = (0..8).map(body).collect();
    check_streams_survive(&bodies, |remaining| {
        let accepted = remaining.metric("cleave_draft_tokens_total", &["\"accepted\""]);
        assert!(accepted > 0.0, "it drafts too");
    });
}

#[test]
fn sixteen_concurrent_requests_answer_as_alone() {
    let (_process, client) = serve(&["--max-num-batched-tokens", "48"]);
    let bodies: Vec<Value> = requests().into_iter().cycle().take(16).collect();
    let alone: Vec<String> = bodies.iter().map(|body| client.complete(body)).collect();
    let together: Vec<String> = std::thread::scope(|scope| {
        let handles: Vec<_> = bodies
            .iter()
            .map(|body| scope.spawn(|| client.complete(body)))
            .collect();
        handles
            .into_iter()
            .map(|answer| answer.join().expect("an answer"))
            .collect()
    });
    assert_eq!(alone, together);
}

#[test]
fn the_startup_log_names_workers_and_devices() {
    let (process, _client) = serve(&["--dtype", "f32"]);
    let logs = process.logs();
    for expected in [
        "cleave-demo",
        "f32",
        "prefill-0",
        "decode-0",
        "1 thread",
        "KV cache",
        "tokens",
    ] {
        assert!(logs.contains(expected), "no `{expected}` in: {logs}");
    }
}

/// Lines of a log that warn or report an error.
fn complaints(process: &CleaveProcess) -> Vec<String> {
    let logs = process.logs();
    let lines = logs.lines().filter(|line| {
        let mut words = line.split_whitespace();
        words.any(|word| word == "WARN" || word == "ERROR")
    });
    lines.map(str::to_owned).collect()
}

/// A process as on a new machine, where no earlier one left a cache or a configuration.
fn first_start(home: &std::path::Path, arguments: &[&str]) -> CleaveProcess {
    let mut command = harness::cleave(arguments);
    command.env("HOME", home).env_remove("RUST_LOG");
    for folder in ["XDG_CACHE_HOME", "XDG_CONFIG_HOME", "XDG_DATA_HOME"] {
        command.env_remove(folder);
    }
    CleaveProcess::spawn(command)
}

#[test]
fn a_first_start_logs_no_warning() {
    let home = tempfile::tempdir().expect("a folder");
    let body = json!({"prompt": "A vector is", "max_tokens": 4, "temperature": 0});
    let mut alone = first_start(home.path(), &["serve", "--port", "0"]);
    let client = HttpClient::new(&alone.address());
    client.wait_ready();
    client.complete(&body);
    let logs = alone.logs();
    assert!(logs.contains("INFO"), "levels are shown: {logs}");
    assert_eq!(complaints(&alone), [""; 0], "cleave serve");

    let home = tempfile::tempdir().expect("a folder");
    let mut router = first_start(home.path(), &["router", "--listen", "127.0.0.1:0"]);
    let address = router.address();
    let client = HttpClient::new(&address);
    let workers = ["prefill", "decode"].map(|leg| {
        let worker = ["worker", "--leg", leg, "--router", &address];
        first_start(home.path(), &worker)
    });
    wait_for("two workers", || {
        (client.metric("cleave_workers", &[]) == 2.0).then_some(())
    });
    client.wait_ready();
    client.complete(&body);
    for process in workers.iter().chain([&router]) {
        assert_eq!(complaints(process), [""; 0], "{}", process.logs());
    }
}

/// Compute threads are bound to their core; threads for I/O, tokenizing and block copies are not.
#[test]
#[cfg(target_os = "linux")]
fn cpu_bind_binds_compute_threads_only() {
    let cores_of = |path: std::path::PathBuf| {
        let status = std::fs::read_to_string(path.join("status")).ok()?;
        let line = status
            .lines()
            .find_map(|line| line.strip_prefix("Cpus_allowed_list:"))?;
        Some(line.trim().to_owned())
    };
    let all = cores_of("/proc/self".into()).expect("Linux says which cores there are");
    let first = all.split(['-', ',']).next().expect("one core at least");
    let (server, client) = serve(&["--both", "1", "--cpu-bind", first]);
    client.complete(&json!({"prompt": "Ownership is", "max_tokens": 4}));
    let folder = format!("/proc/{}/task", server.id());
    let tasks = std::fs::read_dir(folder).expect("the server's threads");
    let mut cores: Vec<_> = tasks
        .filter_map(|task| cores_of(task.expect("a thread").path()))
        .collect();
    let count = cores.len();
    cores.retain(|cores| *cores == first);
    assert!(!cores.is_empty(), "nobody computes where it was told to");
    assert!(
        all == first || 2 * cores.len() < count,
        "{} of {count}",
        cores.len()
    );
}

#[test]
fn split_requests_use_prefill_hand_off_and_decode() {
    let (_process, client) = serve(&["--placement", "split"]);
    let before = client.metric("cleave_worker_handoffs_total", &["landed"]);
    let text = client.complete(&json!({"prompt": "A trait describes behaviour that types share, so", "max_tokens": 12, "temperature": 0, "ignore_eos": true}));
    assert!(!text.is_empty());
    wait_for("a landed hand-off", || {
        (client.metric("cleave_worker_handoffs_total", &["landed"]) >= before + 1.0).then_some(())
    });
    wait_for("the router's count of it", || {
        let landed = client.metric("cleave_router_handoffs_total", &["outcome=\"landed\""]);
        (landed > 0.0).then_some(())
    });
    assert!(client.metric("cleave_worker_handoff_bytes_total", &["received"]) > 0.0);
    assert!(
        client.metric(
            "cleave_step_tokens_total",
            &["role=\"prefill\"", "kind=\"prefill\""]
        ) > 0.0
    );
    assert!(
        client.metric(
            "cleave_step_tokens_total",
            &["role=\"decode\"", "kind=\"decode\""]
        ) >= 11.0
    );
    assert_eq!(
        client.metric(
            "cleave_step_tokens_total",
            &["role=\"prefill\"", "kind=\"decode\""]
        ),
        0.0
    );
}

#[test]
fn router_overhead_metrics_exclude_worker_time() {
    for placement in ["split", "whole"] {
        let (_process, client) = serve(&["--placement", placement]);
        let body = json!({"prompt": "An enum is ".repeat(60), "max_tokens": 2, "temperature": 0, "ignore_eos": true});
        client.complete(&body);
        let of = |name: &str, labels: &[&str]| client.metric(name, labels);
        assert_eq!(of("cleave_router_added_seconds_count", &[]), 1.0);
        assert_eq!(of("cleave_request_read_seconds_count", &[]), 1.0);
        let added = of("cleave_router_added_seconds_sum", &[]);
        let read = of("cleave_request_read_seconds_sum", &[]);
        let prefill = of("cleave_stage_seconds_sum", &["stage=\"prefill\""]);
        let first = of("cleave_http_time_to_first_token_seconds_sum", &[]);
        assert!(added > 0.0 && read > 0.0 && prefill > 0.0);
        assert!(
            read + added + prefill <= first,
            "{read} + {added} + {prefill} > {first}"
        );
    }
}

// Lesson: 1.
#[test]
fn a_client_that_leaves_strands_no_block() {
    let (_process, client) = serve(&["--placement", "split"]);
    let idle = || client.metric("cleave_pool_blocks", &["kind=\"held\""]) == 0.0;
    for _ in 0..4 {
        let body = json!({"prompt": "A loop that never ends", "max_tokens": 900, "ignore_eos": true, "stream": true});
        let mut events = client.stream("/v1/completions", &body);
        events.next().expect("a first event");
        drop(events);
    }
    wait_for("free blocks on both pools", || idle().then_some(()));
}

// Lesson: 1.
#[test]
fn leaving_five_processes_frees_every_pool() {
    let fleet = fleet();
    let pages: Vec<HttpClient> = fleet
        .prefill
        .iter()
        .chain(&fleet.decode)
        .map(metrics_client)
        .collect();
    for _ in 0..6 {
        let body = json!({"prompt": "A loop that never ends", "max_tokens": 900, "ignore_eos": true, "stream": true});
        let mut events = fleet.client.stream("/v1/completions", &body);
        // The first token comes from the prefill worker, the others from the decode worker.
        events.nth(3).expect("a few events");
        drop(events);
    }
    let held = |page: &HttpClient| page.metric("cleave_pool_blocks", &["kind=\"held\""]);
    wait_for("free blocks in all four pools", || {
        pages.iter().all(|page| held(page) == 0.0).then_some(())
    });
    let landed = |page: &HttpClient| page.metric("cleave_worker_handoffs_total", &["landed"]);
    assert!(
        pages.iter().map(landed).sum::<f64>() >= 6.0,
        "the streams had begun"
    );
    wait_for("the router's count of hand-offs", || {
        let outcome = ["outcome=\"landed\""];
        let landed = fleet
            .client
            .metric("cleave_router_handoffs_total", &outcome);
        (landed > 0.0).then_some(())
    });
}

// Invariant: I15.
#[test]
fn bad_input_is_a_4xx_that_names_the_field() {
    let (_process, client) = serve(&[]);
    let text = client.complete(&requests()[0]);
    let bad = [
        (json!({"prompt": "a", "max_tokens": -1}), 400, "max_tokens"),
        (json!({"prompt": "a", "temperature": 9}), 400, "temperature"),
        (json!({"prompt": "a", "top_p": "x"}), 400, "top_p"),
        (json!({"prompt": {"a": 1}}), 400, "prompt"),
        (json!({"max_tokens": 3}), 400, "prompt"),
        (json!({"prompt": [4_000_000_000u64]}), 400, "prompt"),
        (json!({"prompt": "word ".repeat(20_000)}), 400, "prompt"),
        (json!({"prompt": "a", "model": "nonesuch"}), 404, "model"),
        (json!([1, 2]), 400, ""),
    ];
    for (body, status, field) in bad {
        let (got, answer) = client.post("/v1/completions", &body);
        assert_eq!(got, status, "{answer}");
        let error = &answer["error"];
        assert!(
            error["message"]
                .as_str()
                .is_some_and(|message| !message.is_empty()),
            "{answer}"
        );
        assert!(
            field.is_empty()
                || error["param"]
                    .as_str()
                    .is_some_and(|param| param.starts_with(field)),
            "{answer}"
        );
    }
    let huge = json!({"prompt": "x".repeat(10 << 20)});
    assert!([400, 413].contains(&client.post("/v1/completions", &huge).0));
    assert_eq!(client.complete(&requests()[0]), text);
}

// Lesson: 20.
#[test]
fn too_long_or_malformed_requests_are_answered() {
    // The pool holds fewer tokens than the context.
    let mut process = CleaveProcess::start(&["serve", "--port", "0", "--kv-cache", "2MiB"]);
    let client = HttpClient::new(&process.address());
    let fits = json!({"prompt": "A slice is", "max_tokens": 8, "temperature": 0});
    let text = client.complete(&fits);
    let tokens = |count: usize| vec![65; count];
    // Longer than the context; longer with its output; within the context, but more than the pool
    // holds.
    let bodies = [
        json!({"prompt": tokens(5000), "max_tokens": 1}),
        json!({"prompt": tokens(1000), "max_tokens": 500}),
        json!({"prompt": tokens(900), "max_tokens": 100, "ignore_eos": true}),
        json!({"prompt": []}),
        json!({"prompt": [-1]}),
        json!({"prompt": null}),
        json!("prompt"),
    ];
    for body in bodies {
        for stream in [false, true] {
            let mut body = body.clone();
            if body.is_object() {
                body["stream"] = json!(stream);
            }
            let (status, answer) = client.post("/v1/completions", &body);
            assert_eq!(status, 400, "{answer}");
            let error = &answer["error"];
            assert!(error["code"].is_string(), "{answer}");
            assert!(
                error["message"]
                    .as_str()
                    .is_some_and(|text| text.len() > 10)
            );
        }
    }
    assert_eq!(client.complete(&fits), text);
    assert!(!process.logs().contains("panicked"), "{}", process.logs());
}

#[test]
fn the_openai_client_works() {
    let (mut process, _client) = serve(&[]);
    let url = format!("http://{}", process.address());
    harness::openai::run_client("client.py", &url);
}

#[test]
fn top_needs_the_admin_key_and_shows_counts() {
    let mut process = CleaveProcess::start(&[
        "serve",
        "--engine",
        "mock",
        "--port",
        "0",
        "--prefill",
        "1",
        "--decode",
        "1",
        "--placement",
        "split",
        "--admin-key",
        "letmein",
    ]);
    let address = process.address();
    let client = HttpClient::new(&address);
    let body = json!({"prompt": "A vector is", "max_tokens": 7, "ignore_eos": true});
    let (status, answer) = client.post("/v1/completions", &body);
    assert_eq!(status, 200, "{answer}");
    let url = format!("http://{address}");
    let words = ["top", "--url", &url, "--once", "--json"];
    let (status, _, errors) = harness::run(&words);
    assert!(
        !status.success() && errors.contains("admin key"),
        "{errors}"
    );
    let folder = tempfile::tempdir().expect("a folder");
    let file = folder.path().join("key");
    std::fs::write(&file, "letmein\n").expect("a file of the key");
    let file = file.to_str().expect("UTF-8");
    let words = [&words[..], &["--admin-key-file", file]].concat();
    // The answer may arrive before the router has counted it.
    let board = wait_for("board with the request", || {
        let (status, text, errors) = harness::run(&words);
        assert!(status.success(), "{errors}");
        let board: Value = serde_json::from_str(&text).expect("one line of JSON");
        (board["classes"][0]["total"]["good"] == 1).then_some(board)
    });
    let names: Vec<&Value> = board["workers"]
        .as_array()
        .expect("workers")
        .iter()
        .map(|row| &row["name"])
        .collect();
    assert_eq!(names, ["decode-0", "prefill-0"]);
    let handoffs = &board["handoffs"];
    assert_eq!(
        (&handoffs["landed_total"], &handoffs["joined_total"]),
        (&json!(1), &json!(0))
    );
    let (_, metrics) = client.get("/metrics");
    let sent = metrics
        .lines()
        .filter(|line| line.starts_with("cleave_worker_handoff_bytes_total{"));
    let sent = sent.filter(|line| line.contains("kind=\"sent\""));
    let sent: u64 = sent
        .filter_map(|line| line.rsplit_once(' ')?.1.parse::<u64>().ok())
        .sum();
    assert_eq!(handoffs["bytes_total"], sent);
    assert_eq!(board["flights"]["decode"], 0, "{}", board["flights"]);
    let text = board.to_string();
    assert!(!text.contains("vector"), "a prompt is shown: {text}");
}

/// The error of `cleave`, which ends before it loads the weights of its model.
fn error_before_loading(arguments: &[&str]) -> String {
    let folder = harness::root().join("testdata/llama3");
    let model = folder.to_str().expect("a readable path");
    let (status, _, stderr) = run(&[arguments, &["--model", model]].concat());
    assert!(!status.success(), "{arguments:?}");
    assert!(!stderr.contains("model loaded"), "{stderr}");
    stderr
}

#[test]
fn addresses_and_folders_are_checked_before_weights_load() {
    let listener = std::net::TcpListener::bind("127.0.0.1:0").expect("a free port");
    let address = listener.local_addr().expect("it is bound").to_string();
    let port = address.rsplit(':').next().expect("a port");
    let worker = ["worker", "--leg", "both", "--router", "127.0.0.1:1"];
    let worker = |more: &[&str]| error_before_loading(&[&worker[..], more].concat());
    let tier = [
        "--kv-offloading-size",
        "1MiB",
        "--kv-offloading-dir",
        "/dev/null",
    ];
    let serve_tier = [&["serve", "--port", "0"], &tier[..]].concat();
    for (error, names) in [
        (error_before_loading(&["serve", "--port", port]), &address),
        (
            error_before_loading(&["serve", "--port", "0", "--admin-listen", &address]),
            &address,
        ),
        (
            error_before_loading(&[
                "serve",
                "--port",
                "0",
                "--external-metrics-listen",
                &address,
            ]),
            &address,
        ),
        (worker(&["--data-listen", &address]), &address),
        (worker(&["--metrics-listen", &address]), &address),
        (
            error_before_loading(&serve_tier),
            &"--kv-offloading-dir".to_owned(),
        ),
        (worker(&tier), &"/dev/null".to_owned()),
        (
            error_before_loading(&["serve", "--port", "0", "--peer-tls", "/nowhere/tls"]),
            &"/nowhere/tls".to_owned(),
        ),
        (
            worker(&["--peer-tls", "/nowhere/tls"]),
            &"/nowhere/tls".to_owned(),
        ),
        (
            error_before_loading(&["serve", "--port", "0", "--tape", "/dev/null/x"]),
            &"--tape /dev/null/x".to_owned(),
        ),
        (
            worker(&["--tape", "/dev/null/x"]),
            &"--tape /dev/null/x".to_owned(),
        ),
    ] {
        assert!(error.contains(names), "{error}");
    }
}

#[test]
fn a_chat_without_max_tokens_fits_a_small_cache() {
    let flags = [
        "serve",
        "--port",
        "0",
        "--threads",
        "1",
        "--kv-cache",
        "1MiB",
    ];
    let mut process = CleaveProcess::start(&flags);
    let client = HttpClient::new(&process.address());
    let warning = "fewer than the context of";
    assert!(process.logs().contains(warning), "{}", process.logs());
    let (_, models) = client.get("/v1/models");
    let models: Value = serde_json::from_str(&models).expect("JSON");
    let served = models["data"][0]["max_model_len"].as_u64();
    let body = json!({"messages": [{"role": "user", "content": "hi"}], "ignore_eos": true});
    let (status, answer) = client.post("/v1/chat/completions", &body);
    assert_eq!(status, 200, "{answer}");
    assert_eq!(answer["usage"]["total_tokens"].as_u64(), served);
    assert!(served < Some(1024), "{served:?}");
}

/// Compares streams on two decode workers, of which one dies or drains once a draft was accepted,
/// with those of one process without drafts; `check_others` gets the metrics of the worker that
/// stays.
pub(crate) fn check_streams_survive(bodies: &[Value], check_others: impl Fn(&HttpClient)) {
    let asked = AskedStreams {
        model: &[],
        whole: HttpClient::complete,
        streamed,
    };
    asked.check_survival(bodies, check_others);
}

/// Streams of a model, and how their answers become comparable texts.
pub(crate) struct AskedStreams<'a> {
    /// Flags of every server and worker.
    pub(crate) model: &'a [&'a str],
    pub(crate) whole: fn(&HttpClient, &Value) -> String,
    pub(crate) streamed: fn(&HttpClient, &Value) -> String,
}

impl AskedStreams<'_> {
    pub(crate) fn check_survival(&self, bodies: &[Value], check_others: impl Fn(&HttpClient)) {
        let off = ["--calibrate", "0", "--speculative-config", "off"];
        let (_plain, plain) = serve(&[&off[..], self.model].concat());
        let expected: Vec<String> = bodies
            .iter()
            .map(|body| (self.whole)(&plain, body))
            .collect();
        for (signal, counter) in [
            ("KILL", "cleave_streams_resumed_total"),
            ("TERM", "cleave_moves_done_total"),
        ] {
            let fleet = fleet_of_model(self.model, &GUESSES);
            let remaining = metrics_client(&fleet.decode[1]);
            let texts: Vec<String> = std::thread::scope(|scope| {
                let client = &fleet.client;
                let ask = |body| scope.spawn(move || (self.streamed)(client, body));
                let handles: Vec<_> = bodies.iter().map(ask).collect();
                let leaving = metrics_client(&fleet.decode[0]);
                wait_for("drafts that were accepted", || {
                    let accepted = leaving.metric("cleave_draft_tokens_total", &["\"accepted\""]);
                    (accepted > 0.0).then_some(())
                });
                fleet.decode[0].signal(signal);
                let texts = handles.into_iter();
                texts.map(|text| text.join().expect("a text")).collect()
            });
            assert_eq!(texts, expected, "SIG{signal}");
            assert!(fleet.client.metric(counter, &[]) > 0.0, "SIG{signal}");
            check_others(&remaining);
        }
    }
}
