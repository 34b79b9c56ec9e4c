//! Constrained output of real processes: it matches, and no path changes a byte of it.

use crate::harness::{CleaveProcess, HttpClient};
use crate::serving::{GUESSES, check_streams_survive, choices, fleet, serve, streamed};
use serde_json::{Value, json};

const PERSON: &str = r#"{
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 20},
        "born": {"type": "integer", "minimum": 1000, "maximum": 2000},
        "kind": {"enum": ["child", "grown-up"]}
    },
    "required": ["name", "born", "kind"],
    "additionalProperties": false
}"#;

fn is_person(text: &str) -> bool {
    let Ok(Value::Object(person)) = serde_json::from_str(text) else {
        return false;
    };
    let has_name = person["name"]
        .as_str()
        .is_some_and(|name| name.chars().count() <= 20);
    let born = person["born"]
        .as_i64()
        .filter(|born| (1000..=2000).contains(born));
    let has_kind = ["child", "grown-up"]
        .map(Value::from)
        .contains(&person["kind"]);
    person.len() == 3 && has_name && born.is_some() && has_kind
}

fn is_date(text: &str) -> bool {
    let parts: Vec<&str> = text.split('-').collect();
    let are_digits = parts
        .iter()
        .all(|part| part.chars().all(|c| c.is_ascii_digit()));
    are_digits && parts.iter().map(|part| part.len()).collect::<Vec<_>>() == [4, 2, 2]
}

fn is_nested(text: &str) -> bool {
    let half = text.len() / 2;
    text.len().is_multiple_of(2) && half > 0 && text == "(".repeat(half) + &")".repeat(half)
}

type IsMatch = fn(&str) -> bool;

/// Requests of every kind, each with the texts that it allows.
fn constrained() -> Vec<(Value, IsMatch)> {
    let schema = json!({"type": "json_schema", "json_schema": {"name": "person", "strict": true,
        "schema": serde_json::from_str::<Value>(PERSON).expect("it is JSON")}});
    vec![
        (
            json!({"prompt": "A person:", "max_tokens": 300, "temperature": 0, "response_format": schema}),
            is_person,
        ),
        (
            json!({"prompt": "A person:", "max_tokens": 300, "temperature": 1.0, "seed": 7, "guided_json": PERSON,
                "logprobs": 2, "repetition_penalty": 1.2}),
            is_person,
        ),
        (
            json!({"prompt": "Is it? Answer:", "max_tokens": 20, "temperature": 0, "guided_choice": ["yes", "no", "perhaps"]}),
            |text| ["yes", "no", "perhaps"].contains(&text),
        ),
        (
            json!({"prompt": "Today is", "max_tokens": 40, "temperature": 1.5, "seed": 2,
                "structured_outputs": {"regex": "[0-9]{4}-[0-9]{2}-[0-9]{2}"}}),
            is_date,
        ),
        (
            json!({"prompt": "Today is", "max_tokens": 40, "min_tokens": 30, "temperature": 0, "ignore_eos": true,
                "regex": "[0-9]{4}-[0-9]{2}-[0-9]{2}"}),
            is_date,
        ),
        (
            json!({"prompt": "Brackets", "max_tokens": 90, "temperature": 0.5, "seed": 5,
                "guided_grammar": "start: \"(\" start? \")\""}),
            is_nested,
        ),
        (
            json!({"prompt": "An object", "max_tokens": 12, "temperature": 0, "response_format": {"type": "json_object"}}),
            |text| text.starts_with('{'),
        ),
    ]
}

// Invariant: I11, I54.
// Lesson: 35.
#[test]
fn constrained_answers_match_and_are_alike_everywhere() {
    let off = ["--calibrate", "0", "--speculative-config", "off"];
    let (_one, one) = serve(&off);
    let both = ["--prefill", "0", "--decode", "0", "--both", "1"];
    let (_guessing, guessing) = serve(&[&both[..], &GUESSES].concat());
    let five = fleet();
    for (body, is_match) in constrained() {
        let expected = choices(&one, &body);
        let answer = &expected[0][0];
        let text = answer["text"].as_str().expect("a text");
        if answer["finish_reason"] == "stop" {
            assert!(is_match(text), "{body}: {text}");
        }
        assert_eq!(expected, choices(&five.client, &body), "{body}");
        assert_eq!(expected, choices(&guessing, &body), "{body}");
        assert_eq!(text, streamed(&five.client, &body), "{body}");
        let logs = [&five.router, &five.prefill[0], &five.decode[0]].map(CleaveProcess::logs);
        assert!(
            logs.iter().all(|logs| !logs.contains("grown-up")),
            "no grammar is logged"
        );
    }
    let accepted = guessing.metric("cleave_draft_tokens_total", &["\"accepted\""]);
    assert!(accepted > 0.0, "what a constraint forces is drafted");
}

/// Long outputs, each of a constraint of its own, beside two without.
fn long_streams() -> Vec<Value> {
    let body = |stream: u32| {
        let mut body = json!({"prompt": format!("{stream} counts:"), "max_tokens": 500, "seed": stream,
            "temperature": f64::from(stream % 2) * 0.8, "ignore_eos": true});
        if stream > 1 {
            body["guided_regex"] = json!(format!("(({stream}|one|two|number twelve), ){{600}}"));
        }
        body
    };
    (0..8).map(body).collect()
}

// Invariant: I11, I54.
// Lesson: 35.
/// A decode worker dies, or drains, in the middle of constrained and other streams.
#[test]
fn constrained_streams_survive_resumes_and_migrations() {
    check_streams_survive(&long_streams(), |_| {});
}

// Invariant: I54.
// Lesson: 36.
#[test]
fn a_grammar_that_grows_too_complex_fails_its_request_alone() {
    let (_process, client): (CleaveProcess, HttpClient) = serve(&["--calibrate", "0"]);
    let free =
        json!({"prompt": "A vector is", "max_tokens": 300, "temperature": 0, "ignore_eos": true});
    let expected = client.complete(&free);
    let ambiguous = json!({"prompt": "a", "max_tokens": 900, "temperature": 0, "ignore_eos": true,
        "guided_grammar": "start: start start | \"a\""});
    let (failed, text) = std::thread::scope(|scope| {
        let failed = scope.spawn(|| client.post("/v1/completions", &ambiguous));
        let text = client.complete(&free);
        (failed.join().expect("an answer"), text)
    });
    assert_eq!(text, expected);
    let (status, answer) = failed;
    assert_eq!(status, 400, "{answer}");
    assert_eq!(answer["error"]["param"], "guided_grammar");
    let message = answer["error"]["message"].as_str().expect("a message");
    assert!(message.contains("too complex"), "{message}");
    let retries_count = client.metric("cleave_retries_total", &[]);
    assert_eq!(retries_count, 0.0, "it would fail on every worker");
    assert_eq!(client.complete(&free), expected, "the worker goes on");
}
