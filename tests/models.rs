//! Two models behind one router, as processes: the bundled demo and a reference checkpoint.

use crate::harness::{CleaveProcess, HttpClient, wait_for};
use crate::root::root;
use crate::serving::streamed;
use serde_json::{Value, json};
use std::collections::BTreeMap;

const TEXT: &str = "/v1/completions";
/// The served name of the bundled checkpoint.
const DEMO: &str = "cleave-demo";

/// A router, and workers of each model by their names.
struct ModelsFleet {
    _demo: BTreeMap<String, CleaveProcess>,
    llama: BTreeMap<String, CleaveProcess>,
    client: HttpClient,
    _router: CleaveProcess,
}

/// Workers of these legs, each with a name that begins with `prefix`.
fn workers(
    router: &str,
    prefix: &str,
    legs: &[&str],
    model: &[&str],
) -> BTreeMap<String, CleaveProcess> {
    let start = |(index, leg): (usize, &&str)| {
        let name = format!("{prefix}-{index}");
        let plain = ["worker", "--leg", leg, "--router", router, "--name", &name];
        let more = ["--threads", "1", "--kv-cache", "16MiB"];
        let process = CleaveProcess::start(&[&plain[..], &more, model].concat());
        (name, process)
    };
    legs.iter().enumerate().map(start).collect()
}

fn fleet(legs: &[&str]) -> ModelsFleet {
    let listen = ["router", "--listen", "127.0.0.1:0", "--placement", "split"];
    let mut router = CleaveProcess::start(&listen);
    let address = router.address();
    let folder = root().join("testdata/llama3");
    let folder = folder.to_str().unwrap();
    // The reference ran in f32.
    let llama = ["--model", folder, "--dtype", "f32"];
    let demo = workers(&address, "demo", legs, &[]);
    let llama = workers(&address, "llama", legs, &llama);
    let client = HttpClient::new(&address);
    for model in [DEMO, "llama3"] {
        let label = format!("model=\"{model}\"");
        wait_for("workers of a model", || {
            let joined = client.metric("cleave_workers", &[&label]);
            (joined >= legs.len() as f64).then_some(())
        });
        wait_for("a pair of a model", || {
            let (_, ready) = client.get("/ready");
            let ready: Value = serde_json::from_str(&ready).ok()?;
            (ready["models"][model] == true).then_some(())
        });
    }
    ModelsFleet {
        _demo: demo,
        llama,
        client,
        _router: router,
    }
}

/// Greedy continuations that transformers computed with the reference checkpoint.
fn golden_prompts() -> Vec<Value> {
    let file = root().join("testdata/llama3/goldens.json");
    let goldens: Value = serde_json::from_slice(&std::fs::read(file).unwrap()).unwrap();
    goldens["prompts"].as_array().unwrap().clone()
}

/// Streams the golden prompts through the router, and compares the tokens with the reference.
fn assert_reference_tokens(client: &HttpClient) {
    for golden in golden_prompts() {
        let expected = golden["tokens"].as_array().unwrap();
        let body = json!({
            "model": "llama3",
            "prompt": golden["prompt_tokens"],
            "max_tokens": expected.len(),
            "temperature": 0,
            "ignore_eos": true,
            "repetition_penalty": 1,
            "skip_special_tokens": false,
        });
        let (status, answer) = client.post(TEXT, &body);
        assert_eq!(status, 200, "{answer}");
        assert_eq!(answer["model"], "llama3");
        let text = answer["choices"][0]["text"].as_str().unwrap();
        let tokens = json!({"model": "llama3", "tokens": expected});
        let (_, decoded) = client.post("/detokenize", &tokens);
        assert_eq!(decoded["prompt"], text, "{golden}");
        assert_eq!(streamed(client, &body), text);
    }
}

fn demo_body() -> Value {
    json!({"model": DEMO, "prompt": "The borrow checker", "max_tokens": 24, "temperature": 0})
}

// Invariant: I55.
#[test]
fn two_models_stream_behind_one_router() {
    let fleet = fleet(&["prefill", "decode"]);
    let client = &fleet.client;
    let (_alone, alone) = crate::serving::serve(&[]);
    assert_eq!(streamed(client, &demo_body()), alone.complete(&demo_body()));
    assert_reference_tokens(client);
    // Every hand-off landed within its model: the two fingerprints differ anyway.
    let landed = client.metric("cleave_router_handoffs_total", &["landed"]);
    assert_eq!(landed, (1 + 2 * golden_prompts().len()) as f64);

    let (_, list) = client.get("/v1/models");
    let list: Value = serde_json::from_str(&list).unwrap();
    let names: Vec<&Value> = list["data"]
        .as_array()
        .unwrap()
        .iter()
        .map(|one| &one["id"])
        .collect();
    assert_eq!(names, [DEMO, "llama3"]);
    assert_eq!(list["data"][1]["max_model_len"], 512);

    let (status, unknown) = client.post(TEXT, &json!({"model": "gpt-9", "prompt": "a"}));
    assert_eq!(
        (status, &unknown["error"]["code"]),
        (404, &json!("model_not_found"))
    );
    let (status, unnamed) = client.post(TEXT, &json!({"prompt": "a"}));
    assert_eq!((status, &unnamed["error"]["param"]), (400, &json!("model")));

    for (model, count) in [(DEMO, 1.0), ("llama3", 2.0 * golden_prompts().len() as f64)] {
        let label = format!("model=\"{model}\"");
        let done = client.metric("cleave_flights_ended_total", &[&label, "done"]);
        assert_eq!(done, count, "{model}");
        assert_eq!(client.metric("cleave_workers", &[&label]), 2.0);
        let judged = client.metric("cleave_slo_requests_total", &[&label]);
        assert_eq!(judged, count, "{model}");
    }
    let (_, workers) = client.get("/admin/workers");
    let workers: Value = serde_json::from_str(&workers).unwrap();
    let of = |model: &str| {
        let all = workers["data"].as_array().unwrap().iter();
        all.filter(|worker| worker["model"] == model).count()
    };
    assert_eq!((of(DEMO), of("llama3")), (2, 2), "{workers}");
}

#[test]
fn a_stream_fails_over_within_its_model() {
    let mut fleet = fleet(&["prefill", "decode", "decode"]);
    let long = json!({
        "model": "llama3",
        "prompt": golden_prompts()[0]["prompt_tokens"],
        "max_tokens": 400,
        "temperature": 0,
        "ignore_eos": true,
    });
    let expected = fleet.client.complete(&long);
    // Whichever decode worker has the stream is killed in the middle of it.
    let mut body = long.clone();
    body["stream"] = json!(true);
    let events = fleet.client.stream(TEXT, &body);
    let mut text = String::new();
    let mut killed = false;
    for event in events {
        if event == "[DONE]" {
            break;
        }
        let chunk: Value = serde_json::from_str(&event).unwrap();
        text.push_str(chunk["choices"][0]["text"].as_str().unwrap());
        if !killed && text.len() > 20 {
            killed = true;
            let busy = busy_worker(&fleet.client, "llama3");
            drop(fleet.llama.remove(&busy).expect("one of the model's"));
        }
    }
    assert!(killed, "the answer was long enough");
    assert_eq!(text, expected);
    // The other model noticed nothing, and the first one is known without its decode workers.
    assert!(!fleet.client.complete(&demo_body()).is_empty());
    fleet.llama.clear();
    wait_for("the workers' leaving", || {
        let left = fleet.client.metric("cleave_workers", &["model=\"llama3\""]);
        (left == 0.0).then_some(())
    });
    let (status, headers, answer) = fleet.client.post_with(TEXT, &long, &[]);
    assert_eq!(
        (status, &answer["error"]["code"]),
        (503, &json!("no_worker")),
        "{answer}"
    );
    assert_eq!(headers["retry-after"], "1");
    assert_eq!(fleet.client.get("/ready").0, 200, "demo is served");
    assert!(fleet.client.complete(&demo_body()).len() > 4);
}

/// The name of the decode worker that runs a sequence of this model.
fn busy_worker(client: &HttpClient, model: &str) -> String {
    wait_for("a running sequence", || {
        let (_, workers) = client.get("/admin/workers");
        let workers: Value = serde_json::from_str(&workers).ok()?;
        let all = workers["data"].as_array()?.iter();
        let mut busy = all.filter(|worker| {
            let runs = worker["load"]["sequences_running"].as_u64();
            worker["model"] == model && worker["role"] == "decode" && runs > Some(0)
        });
        Some(busy.next()?["name"].as_str()?.to_owned())
    })
}

/// Flags of `serve` for the bundled checkpoint and the reference one, with an adapter on that one.
fn both_models() -> [String; 4] {
    let path = |name: &str| root().join("testdata").join(name).display().to_string();
    let reference = json!({
        "model": path("llama3"),
        "dtype": "f32",
        "kv-cache": "8MiB",
        "prefill": 1,
        "decode": 1,
        "lora-modules": [format!("all={}", path("adapters/llama3-all"))],
    });
    let [model, other] = ["--model"; 2].map(str::to_owned);
    [model, DEMO.to_owned(), other, reference.to_string()]
}

/// The ids that `/v1/models` lists, each with its parent.
fn listed(client: &HttpClient) -> Vec<(String, Value)> {
    let (_, list) = client.get("/v1/models");
    let list: Value = serde_json::from_str(&list).unwrap();
    let of = |one: &Value| {
        (
            one["id"].as_str().unwrap().to_owned(),
            one["parent"].clone(),
        )
    };
    list["data"].as_array().unwrap().iter().map(of).collect()
}

// Invariant: I55.
#[test]
fn one_process_serves_two_models_and_an_adapter() {
    let flags = both_models();
    let flags: Vec<&str> = flags.iter().map(String::as_str).collect();
    let mut process = crate::harness::serve(&flags);
    let client = HttpClient::new(&process.address());
    // Every model is ready where the address is printed.
    let (_, ready) = client.get("/ready");
    let ready: Value = serde_json::from_str(&ready).unwrap();
    assert_eq!(ready["models"], json!({DEMO: true, "llama3": true}));

    let (_alone, alone) = crate::serving::serve(&[]);
    assert_eq!(
        streamed(&client, &demo_body()),
        alone.complete(&demo_body())
    );
    assert_reference_tokens(&client);
    crate::adapters::assert_adapter_answers(&client, "llama3", "all", "llama3-all");

    let expected = [
        ("all", json!("llama3")),
        (DEMO, Value::Null),
        ("llama3", Value::Null),
    ];
    let mut names = listed(&client);
    names.sort_by(|a, b| a.0.cmp(&b.0));
    assert_eq!(
        names,
        expected.map(|(name, parent)| (name.to_owned(), parent))
    );
    let (status, unknown) = client.post(TEXT, &json!({"model": "gpt-9", "prompt": "a"}));
    let code = &unknown["error"]["code"];
    assert_eq!((status, code), (404, &json!("model_not_found")));
    let (status, unnamed) = client.post(TEXT, &json!({"prompt": "a"}));
    assert_eq!((status, &unnamed["error"]["param"]), (400, &json!("model")));

    let (_, workers) = client.get("/admin/workers");
    let workers: Value = serde_json::from_str(&workers).unwrap();
    let workers = workers["data"].as_array().unwrap().iter();
    let workers = workers.map(|one| {
        (
            one["name"].as_str().unwrap(),
            one["model"].as_str().unwrap(),
        )
    });
    let workers: BTreeMap<_, _> = workers.collect();
    let expected = [
        ("both-0", DEMO),
        ("decode-0", "llama3"),
        ("prefill-0", "llama3"),
    ];
    assert_eq!(workers, BTreeMap::from(expected));
    // The size of all models, and that of one.
    let log = process.logs();
    for part in ["mib=64", "mib=8"] {
        assert!(log.contains(part), "{part}: {log}");
    }
}

#[test]
fn a_bad_model_ends_serve_before_a_port_is_bound() {
    let taken = std::net::TcpListener::bind("127.0.0.1:0").unwrap();
    let port = taken.local_addr().unwrap().port().to_string();
    let folder = tempfile::tempdir().unwrap();
    let empty = format!("b={}", folder.path().display());
    for (bad, reason) in [
        ("b=/no/such/folder", "no such folder"),
        (empty.as_str(), "config.json"),
        (
            r#"{"model":"cleave-demo","served-model-name":"b","kv-cache":"900TiB"}"#,
            "a: KV caches of 1 workers",
        ),
    ] {
        let words = [
            "serve",
            "--port",
            &port,
            "--model",
            "a=cleave-demo",
            "--model",
            bad,
        ];
        let (status, out, log) = crate::harness::run(&words);
        assert!(!status.success() && out.is_empty(), "{bad}: {out}");
        // The port is taken, and nothing says so.
        assert!(log.contains(reason) && !log.contains(&port), "{bad}: {log}");
        assert!(
            !log.contains("KV cache ") && !log.contains("loading"),
            "{log}"
        );
        if reason != "a: KV caches of 1 workers" {
            assert!(log.contains(&format!("--model {bad}: ")), "{bad}: {log}");
            assert!(!log.contains("a=cleave-demo"), "{log}");
        }
    }
}

/// Two models of equal weights: only the name keeps their prefixes apart.
// Invariant: I55.
#[test]
fn equal_prompts_of_two_models_share_no_cache() {
    let same = [&*format!("a={DEMO}"), &*format!("b={DEMO}")];
    let mut process = crate::harness::serve(&["--model", same[0], "--model", same[1]]);
    let client = HttpClient::new(&process.address());
    let prompt = "The borrow checker keeps references valid. ".repeat(12);
    let cached = |model: &str| {
        let body = json!({"model": model, "prompt": prompt, "max_tokens": 1, "temperature": 0});
        let (status, answer) = client.post(TEXT, &body);
        assert_eq!(status, 200, "{answer}");
        answer["usage"]["prompt_tokens_details"]["cached_tokens"]
            .as_u64()
            .unwrap_or(0)
    };
    assert_eq!((cached("a"), cached("b")), (0, 0));
    assert!(cached("a") > 0 && cached("b") > 0);
}
