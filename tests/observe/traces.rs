//! Traces: one for each request, across all its processes.

use crate::harness::authority::TestAuthority;
use crate::harness::{CleaveProcess, HttpClient, wait_for};
use crate::observe::ObservedFleet;
use crate::observe::collector::{OtlpCollector, ReceivedSpan};
use serde_json::{Value, json};
use std::collections::{BTreeMap, BTreeSet};

const TRACE: &str = "4bf92f3577b34da6a3ce929d0e0e4736";
const CLIENT: &str = "00f067aa0ba902b7";

/// All spans, once each of these names has come this often.
fn wait_for_spans(collector: &OtlpCollector, expected: &[(&str, usize)]) -> Vec<ReceivedSpan> {
    wait_for("the spans of all processes", || {
        let spans = collector.spans();
        let of = |name: &str| spans.iter().filter(|span| span.name == name).count();
        let all = expected.iter().all(|(name, count)| of(name) >= *count);
        all.then_some(spans)
    })
}

/// Checks that children lie within their parents; gives pairs of parent's and child's names.
fn check_nesting(spans: &[ReceivedSpan]) -> Vec<(String, String)> {
    let spans_by_id: BTreeMap<&str, &ReceivedSpan> =
        spans.iter().map(|span| (&*span.span, span)).collect();
    let mut pairs = Vec::new();
    for span in spans {
        assert!(span.began <= span.ended, "{span:?}");
        let parent = spans_by_id.get(&*span.parent);
        if let Some(parent) = parent {
            let within = parent.began <= span.began && span.ended <= parent.ended;
            assert!(within, "{span:#?}\nis not within\n{parent:#?}");
        }
        let parent = parent.map_or(span.parent.clone(), |parent| parent.name.clone());
        pairs.push((parent, span.name.clone()));
    }
    pairs.sort();
    pairs
}

// Invariant: I38.
#[test]
fn a_request_over_three_processes_is_one_trace() {
    let collector = OtlpCollector::start();
    let flags = ["--otlp-endpoint", &collector.url];
    let fleet = ObservedFleet::start(&["prefill", "decode"], &flags, &flags);
    let body = json!({"prompt": "A trait describes behaviour that types share, so", "max_tokens": 9, "temperature": 0, "ignore_eos": true});
    let parent = format!("00-{TRACE}-{CLIENT}-01");
    let headers = [("traceparent", &*parent), ("x-request-id", "asked-1")];
    let (status, _, answer) = fleet.client.post_with("/v1/completions", &body, &headers);
    assert_eq!(status, 200, "{answer}");

    let names = ["POST /v1/completions", "flight", "attempt"];
    let legs = ["prefill", "transfer.send", "decode", "transfer.receive"];
    let expected: Vec<_> = names.iter().chain(&legs).map(|name| (*name, 1)).collect();
    let spans = wait_for_spans(&collector, &expected);
    assert!(spans.iter().all(|span| span.trace == TRACE), "{spans:#?}");
    for span in &spans {
        let expected = match span.name.as_str() {
            "prefill" | "transfer.send" => "cleave-prefill",
            "decode" | "transfer.receive" => "cleave-decode",
            _ => "cleave-router",
        };
        assert_eq!(span.resource["service.name"], expected, "{span:?}");
        let version = env!("CARGO_PKG_VERSION");
        assert_eq!(span.resource["service.version"], version);
        let instance = &span.resource["service.instance.id"];
        if let Some(worker) = span.attributes.get("cleave.worker.name") {
            assert_eq!(instance, worker);
        }
        assert!(!instance.is_empty());
    }
    let of_model = |span: &&ReceivedSpan| !span.get("gen_ai.request.model").is_empty();
    let named = spans.iter().filter(of_model).map(|span| span.name.as_str());
    let named: BTreeSet<&str> = named.collect();
    assert_eq!(
        named,
        BTreeSet::from([names[0], "flight", "prefill", "decode"])
    );
    assert!(spans.iter().all(|span| !span.is_error), "{spans:#?}");
    let pairs = [
        (CLIENT, names[0]),
        ("POST /v1/completions", "flight"),
        ("attempt", "decode"),
        ("attempt", "prefill"),
        ("decode", "transfer.receive"),
        ("flight", "attempt"),
        ("prefill", "transfer.send"),
    ];
    let mut pairs = pairs.map(|(parent, child)| (parent.to_owned(), child.to_owned()));
    pairs.sort();
    assert_eq!(check_nesting(&spans), pairs);

    let of = |name: &str| {
        spans
            .iter()
            .find(|span| span.name == name)
            .expect("it came")
    };
    let usage = &answer["usage"];
    let tokens = |key: &str| usage[key].to_string();
    for name in ["POST /v1/completions", "flight"] {
        let (input, output) = ("gen_ai.usage.input_tokens", "gen_ai.usage.output_tokens");
        assert_eq!(of(name).get(input), tokens("prompt_tokens"), "{name}");
        assert_eq!(of(name).get(output), tokens("completion_tokens"), "{name}");
    }
    assert_eq!(of(names[0]).get("http.response.status_code"), "200");
    assert_eq!(of(names[0]).get("cleave.request_id"), "asked-1");
    assert_eq!(of("decode").get("cleave.request_id"), "asked-1");
    assert_eq!(of("attempt").get("cleave.placement"), "disaggregated");
    assert_eq!(of("flight").get("cleave.retries"), "0");
    let sent = of("transfer.send").get("cleave.transfer.bytes");
    assert!(sent.parse::<u64>().is_ok_and(|bytes| bytes > 0), "{sent}");
    assert_eq!(of("transfer.receive").get("cleave.transfer.bytes"), sent);
    assert!(of("prefill").events.contains(&"first_token".to_owned()));

    // A client that does not sample its trace is not traced here either, and no span is lost.
    let silent = parent.replace("-01", "-00");
    let headers = [("traceparent", &*silent)];
    fleet.client.post_with("/v1/completions", &body, &headers);
    let one = json!({"prompt": "Note", "max_tokens": 1});
    fleet.client.post_with("/v1/completions", &one, &[]);
    let spans = wait_for_spans(&collector, &[("POST /v1/completions", 2), ("prefill", 2)]);
    let of_client = spans.iter().filter(|span| span.trace == TRACE);
    assert_eq!(of_client.count(), 7, "{spans:#?}");
    let dropped = |outcome| fleet.client.metric("cleave_trace_spans_total", &[outcome]);
    assert_eq!(dropped("dropped") + dropped("lost"), 0.0);
    assert!(dropped("exported") > 0.0);
}

// Invariant: I38.
#[test]
fn a_killed_workers_request_keeps_its_trace() {
    let collector = OtlpCollector::start();
    let flags = ["--otlp-endpoint", &collector.url, "--engine", "mock"];
    let mut fleet = ObservedFleet::start(&["prefill", "decode"], &flags[..2], &flags);
    let body = json!({"prompt": "Go on", "max_tokens": 400, "ignore_eos": true, "stream": true});
    let mut stream = fleet.client.stream("/v1/completions", &body);
    let event: Value = serde_json::from_str(&stream.next().expect("a token")).expect("JSON");
    assert!(event["choices"].is_array());
    fleet.join("decode", &flags);
    fleet.workers[1].signal("KILL");
    let rest: Vec<String> = stream.collect();
    assert_eq!(rest.last().map(String::as_str), Some("[DONE]"));

    let spans = wait_for_spans(
        &collector,
        &[("POST /v1/completions", 1), ("attempt", 2), ("decode", 1)],
    );
    let trace = &spans[0].trace;
    assert!(spans.iter().all(|span| span.trace == *trace), "{spans:#?}");
    check_nesting(&spans);
    let of = |name: &str| {
        spans
            .iter()
            .filter(|span| span.name == name)
            .collect::<Vec<_>>()
    };
    let mut attempts = of("attempt");
    attempts.sort_by_key(|span| span.get("cleave.attempt").to_owned());
    let flight = of("flight")[0];
    assert!(attempts.iter().all(|span| span.parent == flight.span));
    assert!(attempts[0].is_error, "{attempts:#?}");
    assert_eq!(attempts[0].get("error.type"), "worker_lost");
    assert!(!attempts[1].is_error, "{attempts:#?}");
    assert!(attempts[0].ended <= attempts[1].ended);
    assert_eq!(flight.get("cleave.retries"), "1");
    assert!(flight.events.contains(&"resumed".to_owned()));
    let decode = of("decode");
    assert_eq!(decode[0].parent, attempts[1].span, "the other one died");
}

#[test]
fn sampling_nothing_records_only_client_traces() {
    let collector = OtlpCollector::start();
    let flags = ["--otlp-endpoint", &collector.url, "--engine", "mock"];
    let router = [&flags[..2], &["--trace-sample", "0"]].concat();
    let fleet = ObservedFleet::start(&["prefill", "decode"], &router, &flags);
    let body = json!({"prompt": "Go on", "max_tokens": 2});
    for _ in 0..5 {
        fleet.client.complete(&body);
    }
    // A trace that the client samples is recorded; its spans are exported after all earlier ones.
    let parent = format!("00-{TRACE}-{CLIENT}-01");
    let headers = [("traceparent", &*parent)];
    fleet.client.post_with("/v1/completions", &body, &headers);
    let spans = wait_for_spans(&collector, &[("POST /v1/completions", 1), ("decode", 1)]);
    assert!(spans.iter().all(|span| span.trace == TRACE), "{spans:#?}");
}

#[test]
fn the_environment_names_the_service_of_traces() {
    let collector = OtlpCollector::start();
    let flags = [
        "serve",
        "--engine",
        "mock",
        "--port",
        "0",
        "--otlp-endpoint",
    ];
    let mut command = crate::harness::cleave(&[&flags[..], &[&collector.url]].concat());
    command.env("OTEL_SERVICE_NAME", "shop");
    command.env(
        "OTEL_RESOURCE_ATTRIBUTES",
        "service.name=other,service.instance.id=pod-7,deployment.environment.name=test",
    );
    let mut process = CleaveProcess::spawn(command);
    let client = HttpClient::new(&process.address());
    client.complete(&json!({"prompt": "a", "max_tokens": 2}));
    let spans = wait_for_spans(&collector, &[("POST /v1/completions", 1)]);
    for (key, expected) in [
        ("service.name", "shop"),
        ("service.instance.id", "pod-7"),
        ("deployment.environment.name", "test"),
        ("cleave.role", "fleet"),
    ] {
        assert_eq!(spans[0].resource[key], expected, "{key}");
    }
}

/// The endpoint has no scheme, which OpenTelemetry's specification reads as https.
#[test]
fn traces_reach_a_collector_over_tls() {
    let folder = tempfile::tempdir().expect("a folder");
    TestAuthority::new().sign(folder.path(), "localhost");
    let read = |name: &str| std::fs::read_to_string(folder.path().join(name)).expect("a file");
    let collector = OtlpCollector::start_tls(&read("tls.crt"), &read("tls.key"));
    let authority = folder.path().join("ca.crt").display().to_string();
    let endpoint = collector.url.replace("https://", "");
    let flags = [
        "--engine",
        "mock",
        "--port",
        "0",
        "--otlp-certificate",
        &authority,
    ];
    let flags = [&["serve", "--otlp-endpoint", &endpoint], &flags[..]].concat();
    let mut process = CleaveProcess::start(&flags);
    let client = HttpClient::new(&process.address());
    client.complete(&json!({"prompt": "a", "max_tokens": 2}));
    wait_for_spans(&collector, &[("POST /v1/completions", 1)]);
}
