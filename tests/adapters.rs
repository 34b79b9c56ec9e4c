//! LoRA adapters in real processes, one and several: answers are those of PEFT, whatever runs
//! beside them.

use crate::harness::{CleaveProcess, HttpClient, run, wait_for};
use crate::root::root;
use crate::serving::{fleet_of_legs, serve};
use serde_json::{Value, json};
use std::path::{Path, PathBuf};

/// Adapters of the checkpoint `testdata/llama3`.
const ADAPTERS: [&str; 3] = ["llama3-all", "llama3-qv", "llama3-third"];

fn checkpoint() -> String {
    root().join("testdata/llama3").display().to_string()
}

fn folder(name: &str) -> PathBuf {
    root().join("testdata/adapters").join(name)
}

fn module(name: &str) -> String {
    format!("{name}={}", folder(name).display())
}

/// Flags of the model, in f32, with its adapters.
fn flags(more: &[&str]) -> Vec<String> {
    let model = checkpoint();
    let plain = [
        "--model",
        &model,
        "--served-model-name",
        "base",
        "--dtype",
        "f32",
    ];
    let mut flags: Vec<String> = plain.iter().map(|flag| (*flag).to_owned()).collect();
    flags.push("--lora-modules".to_owned());
    flags.extend(ADAPTERS.iter().map(|name| module(name)));
    flags.extend(more.iter().map(|flag| (*flag).to_owned()));
    flags
}

fn texts(flags: &[String]) -> Vec<&str> {
    flags.iter().map(String::as_str).collect()
}

/// Prompts with the tokens that the reference drew after each.
fn goldens(folder: &Path) -> Vec<(Value, Vec<u64>)> {
    let text = std::fs::read(folder.join("goldens.json")).unwrap();
    let goldens: Value = serde_json::from_slice(&text).unwrap();
    let prompts = goldens["prompts"].as_array().unwrap();
    let case = |case: &Value| {
        let tokens = case["tokens"].as_array().unwrap().iter();
        let tokens = tokens.map(|token| token.as_u64().unwrap()).collect();
        (case["prompt_tokens"].clone(), tokens)
    };
    prompts.iter().map(case).collect()
}

/// The text of a greedy answer of as many tokens, special tokens included.
fn completion(client: &HttpClient, model: &str, prompt: &Value, tokens: usize) -> String {
    client.complete(&json!({
        "model": model, "prompt": prompt, "max_tokens": tokens, "temperature": 0,
        "ignore_eos": true, "skip_special_tokens": false,
    }))
}

/// Compares some goldens of an adapter of this folder, served as `name` on `base`.
pub(crate) fn assert_adapter_answers(client: &HttpClient, base: &str, name: &str, of: &str) {
    for (prompt, tokens) in goldens(&folder(of)).iter().rev().take(3) {
        let expected = detokenized(client, base, tokens);
        let text = completion(client, name, prompt, tokens.len());
        assert_eq!(text, expected, "{name} {prompt}");
    }
}

/// The text of the reference's tokens.
fn detokenized(client: &HttpClient, base: &str, tokens: &[u64]) -> String {
    let body = json!({"model": base, "tokens": tokens});
    let (status, answer) = client.post("/detokenize", &body);
    assert_eq!(status, 200, "{answer}");
    answer["prompt"].as_str().unwrap().to_owned()
}

/// Compares every golden of the model and of its adapters, several requests at a time.
fn check_goldens(client: &HttpClient) {
    let adapters = ADAPTERS.iter().map(|name| (*name, folder(name)));
    let base = ("base", root().join("testdata/llama3"));
    let all: Vec<(&str, PathBuf)> = adapters.chain([base]).collect();
    std::thread::scope(|scope| {
        for (model, folder) in &all {
            scope.spawn(move || {
                for (prompt, tokens) in goldens(folder).iter().rev().take(6) {
                    let expected = detokenized(client, "base", tokens);
                    let text = completion(client, model, prompt, tokens.len());
                    assert_eq!(text, expected, "{model} {prompt}");
                }
            });
        }
    });
}

// Invariant: I11.
#[test]
fn adapters_answer_as_the_reference_in_one_process() {
    let (_process, client) = serve(&texts(&flags(&[])));
    check_goldens(&client);
}

#[test]
fn adapters_answer_as_the_reference_in_a_fleet() {
    // One place, so that adapters come and go.
    let flags = flags(&["--max-loras", "1"]);
    let fleet = fleet_of_legs([2, 1], &texts(&flags), &[]);
    check_goldens(&fleet.client);
}

#[test]
fn answers_are_the_same_from_host_memory_and_read_again() {
    // One place for three adapters; two of them in host memory, so that one is dropped each round.
    let flags = flags(&["--both", "1", "--max-loras", "1", "--max-cpu-loras", "2"]);
    let (_process, client) = serve(&texts(&flags));
    for name in [
        "llama3-all",
        "llama3-qv",
        "llama3-all",
        "llama3-third",
        "llama3-all",
        "llama3-qv",
    ] {
        assert_adapter_answers(&client, "base", name, name);
    }
    let loads =
        |kind: &str| client.metric("cleave_adapter_loads_total", &[&format!("kind=\"{kind}\"")]);
    assert_eq!(loads("loaded"), 6.0);
    // The one that was used just before the last one.
    assert_eq!(loads("from_host"), 2.0);
    assert_eq!(loads("dropped"), 2.0);
    assert_eq!(client.metric("cleave_adapters", &["kind=\"in_host\""]), 1.0);
}

#[test]
fn an_adapter_is_listed_as_a_child_of_its_model() {
    let (_process, client) = serve(&texts(&flags(&["--both", "1"])));
    let list: Value = serde_json::from_str(&client.get("/v1/models").1).unwrap();
    let data = list["data"].as_array().unwrap();
    let models: Vec<(&str, &Value)> = data
        .iter()
        .map(|model| (model["id"].as_str().unwrap(), &model["parent"]))
        .collect();
    let base = json!("base");
    let expected = [
        ("base", &Value::Null),
        (ADAPTERS[0], &base),
        (ADAPTERS[1], &base),
        (ADAPTERS[2], &base),
    ];
    assert_eq!(models, expected);
    let one: Value = serde_json::from_str(&client.get("/v1/models/llama3-qv").1).unwrap();
    assert_eq!(
        one["root"],
        json!(folder("llama3-qv").display().to_string())
    );
    let body = json!({"model": "llama3-qv", "messages": [{"role": "user", "content": "Hi"}], "max_tokens": 2});
    let (status, answer) = client.post("/v1/chat/completions", &body);
    assert_eq!(
        (status, &answer["model"]),
        (200, &json!("llama3-qv")),
        "{answer}"
    );
    let unknown = json!({"model": "llama3-none", "prompt": "Hi", "max_tokens": 1});
    let (status, answer) = client.post("/v1/completions", &unknown);
    let message = answer["error"]["message"].as_str().unwrap();
    assert_eq!(status, 404);
    let expected = "this server has `base`, `llama3-all`, `llama3-qv`, `llama3-third`.";
    assert!(message.ends_with(expected), "{message}");
}

#[test]
fn an_adapter_that_cannot_be_served_stops_the_start() {
    let refused = |module: &str, more: &[&str]| {
        let model = checkpoint();
        let plain = ["serve", "--port", "0", "--threads", "1", "--model", &model];
        let (status, _, errors) = run(&[&plain[..], &["--lora-modules", module], more].concat());
        assert!(!status.success(), "{module}");
        errors
    };
    let other = module("qwen2").replace("qwen2=", "q=");
    let errors = refused(&other, &[]);
    assert!(
        errors.contains("lora_A.weight") && errors.contains("shape"),
        "{errors}"
    );
    let errors = refused(&module("llama3-third"), &["--max-lora-rank", "32"]);
    assert!(
        errors.contains("rank 40") && errors.contains("--max-lora-rank"),
        "{errors}"
    );
    let errors = refused("a=/nonexistent", &[]);
    assert!(errors.contains("/nonexistent"), "{errors}");
    let errors = refused(&module("llama3-qv"), &["--max-loras", "4", "--max-cpu-loras", "3"]);
    assert!(
        errors.contains("--max-cpu-loras 3") && errors.contains("the 4 of --max-loras"),
        "{errors}"
    );
    let errors = refused(&module("llama3-qv"), &["--engine", "mock"]);
    assert!(errors.contains("applies none"), "{errors}");
}

/// Equal prompts of two adapters have different KV, whoever ran first.
// Invariant: I56.
// Lesson: 7.
#[test]
fn equal_prompts_of_two_adapters_share_no_cache() {
    let (_process, client) = serve(&texts(&flags(&["--both", "1"])));
    let (prompt, tokens) = goldens(&folder(ADAPTERS[0])).pop().unwrap();
    let expected = detokenized(&client, "base", &tokens);
    let ask = |model: &str| completion(&client, model, &prompt, tokens.len());
    let first: Vec<String> = ["base", ADAPTERS[1], ADAPTERS[0]].map(ask).into();
    assert_eq!(first[2], expected);
    assert_ne!(first[0], first[1]);
    // The second time every answer has its own cached prefix.
    let again: Vec<String> = ["base", ADAPTERS[1], ADAPTERS[0]].map(ask).into();
    assert_eq!(again, first);
}

/// Workers that join a running router bring their adapters.
#[test]
fn a_router_learns_adapters_from_its_workers() {
    let mut router = CleaveProcess::start(&["router", "--listen", "127.0.0.1:0"]);
    let address = router.address();
    let client = HttpClient::new(&address);
    let flags = flags(&[]);
    let plain = "worker --leg both --threads 1 --kv-cache 64MiB --router";
    let plain: Vec<&str> = plain.split(' ').chain([address.as_str()]).collect();
    let worker = CleaveProcess::start(&[&plain[..], &texts(&flags)].concat());
    client.wait_ready();
    let is_listed = || client.get("/v1/models").1.contains("llama3-all");
    wait_for("the adapters", || is_listed().then_some(()));
    drop(worker);
    // A name stays known while its workers are away, as the model's does.
    assert!(is_listed());
}

/// Adapters that were loaded at run time come to a worker that is started anew, and to one that is
/// started for the first time; one that was unloaded goes from a worker that has it by a flag.
#[test]
fn workers_that_join_get_the_adapters_of_run_time() {
    let mut router = CleaveProcess::start(&["router", "--listen", "127.0.0.1:0"]);
    let address = router.address();
    let client = HttpClient::new(&address);
    let (model, adapters) = (checkpoint(), root().join("testdata/adapters"));
    let adapters = adapters.display().to_string();
    let listed = module("llama3-third");
    let start = |name: &str| {
        let plain = "worker --leg both --threads 1 --kv-cache 64MiB --dtype f32 --router";
        let model = ["--model", &model, "--served-model-name", "base"];
        let lora = ["--lora-root", &adapters, "--lora-modules", &listed];
        let own = [&address[..], "--name", name];
        let plain: Vec<&str> = plain.split(' ').collect();
        CleaveProcess::start(&[&plain[..], &own, &model, &lora].concat())
    };
    let change = |verb: &str, body: Value| {
        let (status, answer) = client.post(&format!("/v1/{verb}_lora_adapter"), &body);
        assert_eq!(status, 200, "{answer}");
    };
    let (prompt, tokens) = goldens(&folder("llama3-all")).pop().unwrap();
    let first = start("first");
    client.wait_ready();
    wait_for("the adapters", || {
        let models = client.get("/v1/models").1;
        models.contains("llama3-third").then_some(())
    });
    change(
        "load",
        json!({"lora_name": "tuned", "lora_path": "llama3-all"}),
    );
    change("unload", json!({"lora_name": "llama3-third"}));
    let expected = detokenized(&client, "base", &tokens);
    assert_eq!(
        completion(&client, "tuned", &prompt, tokens.len()),
        expected
    );
    // The only worker ends, and its name comes back.
    drop(first);
    let first = start("first");
    let is_served = || {
        let ask = json!({"model": "tuned", "prompt": prompt, "max_tokens": 1});
        (client.post("/v1/completions", &ask).0 == 200).then_some(())
    };
    let answer = || completion(&client, "tuned", &prompt, tokens.len());
    wait_for("the adapter to be loaded again", is_served);
    assert_eq!(answer(), expected);
    let unloaded = json!({"model": "llama3-third", "prompt": prompt, "max_tokens": 1});
    wait_for("the unloaded adapter to go", || {
        (client.post("/v1/completions", &unloaded).0 == 404).then_some(())
    });
    // Another worker, which alone is left.
    let second = start("second");
    wait_for("the second worker", || {
        let fleet = client.get("/admin/workers").1;
        fleet.contains("second").then_some(())
    });
    drop(first);
    wait_for("the other worker to serve the adapter", is_served);
    assert_eq!(answer(), expected);
    drop(second);
}

// Invariant: I56.
/// `/v1/load_lora_adapter` and unload: every worker has it when the answer comes.
#[test]
fn adapters_come_and_go_at_run_time() {
    let model = checkpoint();
    let adapters = root().join("testdata/adapters").display().to_string();
    let flags = [
        "--model",
        &model,
        "--served-model-name",
        "base",
        "--dtype",
        "f32",
        "--lora-root",
        &adapters,
    ];
    let fleet = fleet_of_legs([1, 1], &flags, &[]);
    let client = &fleet.client;
    let change = |verb: &str, body: Value| client.post(&format!("/v1/{verb}_lora_adapter"), &body);
    let (prompt, tokens) = goldens(&folder("llama3-all")).pop().unwrap();
    let expected = detokenized(client, "base", &tokens);
    let ask = json!({"model": "tuned", "prompt": prompt, "max_tokens": 1});
    assert_eq!(client.post("/v1/completions", &ask).0, 404);
    for (path, reason) in [
        ("../llama3", "not a folder below --lora-root"),
        ("/etc", "not a folder below --lora-root"),
        ("qwen2", "shape"),
    ] {
        let (status, answer) = change("load", json!({"lora_name": "tuned", "lora_path": path}));
        let message = answer["error"]["message"].as_str().unwrap();
        assert!(status == 400 && message.contains(reason), "{answer}");
    }
    let load = |path: &str| change("load", json!({"lora_name": "tuned", "lora_path": path})).0;
    assert_eq!(load("llama3-all"), 200);
    assert_eq!(completion(client, "tuned", &prompt, tokens.len()), expected);
    // The same name with another content: nothing of the old one is found in a cache.
    assert_eq!(load("llama3-qv"), 200);
    let (other, tokens) = goldens(&folder("llama3-qv")).pop().unwrap();
    let replaced = completion(client, "tuned", &other, tokens.len());
    assert_eq!(replaced, detokenized(client, "base", &tokens));
    assert_ne!(completion(client, "tuned", &prompt, 16), expected);
    assert_eq!(load("llama3-all"), 200);
    assert_eq!(completion(client, "tuned", &prompt, 16), expected);
    let named = json!({"lora_name": "tuned"});
    assert_eq!(change("unload", named.clone()).0, 200);
    assert_eq!(client.post("/v1/completions", &ask).0, 404);
    assert_eq!(change("unload", named).0, 400, "it is gone");
    let taken = json!({"lora_name": "base", "lora_path": "llama3-all"});
    assert_eq!(change("load", taken).0, 400, "the model's name");
}
