//! Models with sliding windows: given-up blocks, hand-offs, cached prefixes and lost workers change
//! no answer. `cleave generate`, whose engine keeps every block, gives the expected texts.

use crate::harness::{self, HttpClient};
use crate::root::root;
use crate::serving::{AskedStreams, fleet_of_model, serve, streamed};
use serde_json::{Value, json};

/// Both alternate layers with a window of 24 tokens and whole ones, in a context of 512.
const MODELS: [&str; 2] = ["gemma3", "gpt-oss"];

/// Limits with which the window plane has fewer blocks than one of the streams.
const LIMITS: [&str; 4] = ["--max-num-seqs", "2", "--max-num-batched-tokens", "48"];

/// Blocks of the window plane under those limits: for each of two sequences 3, twice, and 6 for a
/// chunk of 48 tokens.
const WINDOW_BLOCKS: f64 = 18.0;

/// Where `bodies` has its longest prompt.
const LONG_PROMPT: usize = 3;

fn folder(name: &str) -> String {
    let folder = root().join("testdata").join(name);
    folder.to_str().expect("a readable path").to_owned()
}

/// The tokens of a prompt whose first half is the same for every number.
fn prompt(number: u64, len: u64) -> Vec<u64> {
    let token = |at: u64| {
        let stream = if at < len / 2 { 0 } else { number + 1 };
        20 + (at * 37 + stream * 101) % 200
    };
    (0..len).map(token).collect()
}

/// Long and short prompts and streams, greedy and drawn.
fn bodies() -> Vec<Value> {
    let body = |(number, len, tokens): (u64, u64, u64)| {
        let temperature = (number % 2) as f64 * 0.8;
        json!({"prompt": prompt(number, len), "max_tokens": tokens, "temperature": temperature,
            "seed": number, "ignore_eos": true})
    };
    [
        (0, 8, 480),
        (1, 200, 300),
        (2, 200, 40),
        (3, 400, 100),
        (4, 23, 60),
    ]
    .map(body)
    .to_vec()
}

/// The text of `cleave generate`, which has all keys and values of a sequence.
fn generated(model: &str, body: &Value) -> String {
    let tokens = body["prompt"].as_array().expect("tokens");
    let tokens: Vec<String> = tokens.iter().map(Value::to_string).collect();
    let number = |name: &str| body[name].to_string();
    let arguments = [
        "generate",
        "--json",
        "--ignore-eos",
        "--model",
        model,
        "--prompt-tokens",
        &tokens.join(","),
        "--max-tokens",
        &number("max_tokens"),
        "--temperature",
        &number("temperature"),
        "--seed",
        &number("seed"),
    ];
    let (status, out, err) = harness::run(&arguments);
    assert!(status.success(), "{err}");
    let answer: Value = serde_json::from_str(&out).expect("one JSON object");
    answer["text"].as_str().expect("a text").to_owned()
}

fn window_blocks(client: &HttpClient, kind: &str) -> f64 {
    client.metric("cleave_window_blocks", &[&format!("kind=\"{kind}\"")])
}

/// Asks all bodies at once, then again, so that cached prefixes are used.
fn check_answers(client: &HttpClient, expected: &[String]) {
    let bodies = bodies();
    for round in 0..2 {
        let texts: Vec<String> = std::thread::scope(|scope| {
            let ask = |body| scope.spawn(move || streamed(client, body));
            let streams: Vec<_> = bodies.iter().map(ask).collect();
            let texts = streams.into_iter();
            texts.map(|text| text.join().expect("a text")).collect()
        });
        assert_eq!(texts, expected, "round {round}");
    }
}

/// Asks one long prompt until its prefix is used again. Nothing runs beside it that could evict the
/// blocks; the router may choose each worker once before it chooses one that has them.
fn check_prefix(client: &HttpClient, expected: &[String]) {
    let cached = || client.metric("cleave_prefix_cached_tokens_total", &[]);
    let before = cached();
    harness::wait_for("a prefix that is used again", || {
        let text = streamed(client, &bodies()[LONG_PROMPT]);
        assert_eq!(text, expected[LONG_PROMPT]);
        (cached() > before).then_some(())
    });
}

// Invariant: I58.
#[test]
fn given_up_windows_change_no_answer() {
    for name in MODELS {
        let folder = folder(name);
        let expected: Vec<String> = bodies()
            .iter()
            .map(|body| generated(&folder, body))
            .collect();
        let model = ["--model", &folder];
        for roles in [&[][..], &["--prefill", "0", "--decode", "0", "--both", "1"]] {
            let (_process, client) = serve(&[&model[..], &LIMITS, roles].concat());
            let workers = if roles.is_empty() { 2.0 } else { 1.0 };
            let all = window_blocks(&client, "free");
            assert_eq!(all, workers * WINDOW_BLOCKS, "{name}");
            check_answers(&client, &expected);
            check_prefix(&client, &expected);
            harness::wait_for("free blocks", || {
                (window_blocks(&client, "free") == all).then_some(())
            });
            assert_eq!(window_blocks(&client, "leaked"), 0.0);
        }
        let fleet = fleet_of_model(&model, &LIMITS);
        check_answers(&fleet.client, &expected);
    }
}

// Invariant: I48.
/// Eight speculating streams on two decode workers, of which one dies or drains.
#[test]
fn streams_with_windows_survive_lost_workers() {
    let folder = folder("gemma3");
    let asked = AskedStreams {
        model: &["--model", &folder],
        whole: HttpClient::complete,
        streamed,
    };
    // Of four tokens alone, so that drafts are accepted, and by what the layers read.
    let bias = json!({"20": 80, "21": 80, "22": 80, "23": 80});
    let body = |number: u64| {
        json!({"prompt": prompt(number, 60), "max_tokens": 400, "temperature": 0.5, "seed": number,
            "ignore_eos": true, "logit_bias": bias})
    };
    let bodies: Vec<Value> = (0..8).map(body).collect();
    asked.check_survival(&bodies, |_| ());
}
