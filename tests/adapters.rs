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
    let errors = refused(
        &module("llama3-qv"),
        &["--max-loras", "4", "--max-cpu-loras", "3"],
    );
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

/// A router whose workers load adapters at run time, below a folder.
struct RunTimeFleet {
    router: CleaveProcess,
    address: String,
    client: HttpClient,
    lora_root: PathBuf,
}

impl RunTimeFleet {
    fn new(lora_root: &Path) -> Self {
        let mut router = CleaveProcess::start(&["router", "--listen", "127.0.0.1:0"]);
        let address = router.address();
        Self {
            router,
            client: HttpClient::new(&address),
            address,
            lora_root: lora_root.to_owned(),
        }
    }

    /// Starts a worker, which has `llama3-third` by a flag.
    fn worker(&self, name: &str) -> CleaveProcess {
        let plain = "worker --leg both --threads 1 --kv-cache 64MiB --dtype f32 --router";
        let (model, listed) = (checkpoint(), module("llama3-third"));
        let lora_root = self.lora_root.display().to_string();
        let model = ["--model", &model, "--served-model-name", "base"];
        let lora = ["--lora-root", &lora_root, "--lora-modules", &listed];
        let own = [&self.address[..], "--name", name];
        let plain: Vec<&str> = plain.split(' ').collect();
        CleaveProcess::start(&[&plain[..], &own, &model, &lora].concat())
    }

    /// Starts the router anew, at the same address.
    fn restart_router(self) -> Self {
        let Self {
            router,
            address,
            client,
            lora_root,
        } = self;
        drop(router);
        let mut router = CleaveProcess::start(&["router", "--listen", &address]);
        assert_eq!(router.address(), address);
        Self {
            router,
            address,
            client,
            lora_root,
        }
    }

    /// Waits until the worker's adapters are known.
    fn wait_for_adapters(&self) {
        self.client.wait_ready();
        wait_for("the adapters", || {
            let models = self.client.get("/v1/models").1;
            models.contains("llama3-third").then_some(())
        });
    }

    fn load(&self, name: &str, path: &str) {
        let body = json!({"lora_name": name, "lora_path": path});
        let (status, answer) = self.client.post("/v1/load_lora_adapter", &body);
        assert_eq!(status, 200, "{answer}");
    }

    /// The status of a request for an adapter.
    fn status(&self, name: &str) -> u16 {
        let ask = json!({"model": name, "prompt": "a", "max_tokens": 1});
        self.client.post("/v1/completions", &ask).0
    }

    fn wait_for_status(&self, name: &str, status: u16) {
        wait_for("the status of an adapter", || {
            (self.status(name) == status).then_some(())
        });
    }
}

/// Adapters that were loaded at run time come to a worker that is started anew, and to one that is
/// started for the first time; one that was unloaded goes from a worker that has it by a flag.
#[test]
fn workers_that_join_get_the_adapters_of_run_time() {
    let fleet = RunTimeFleet::new(&root().join("testdata/adapters"));
    let answers = || assert_adapter_answers(&fleet.client, "base", "tuned", "llama3-all");
    let first = fleet.worker("first");
    fleet.wait_for_adapters();
    fleet.load("tuned", "llama3-all");
    let unload = json!({"lora_name": "llama3-third"});
    let (status, answer) = fleet.client.post("/v1/unload_lora_adapter", &unload);
    assert_eq!(status, 200, "{answer}");
    answers();
    // The only worker ends, and its name comes back.
    drop(first);
    let first = fleet.worker("first");
    fleet.wait_for_status("tuned", 200);
    answers();
    fleet.wait_for_status("llama3-third", 404);
    // Another worker, which alone is left.
    let second = fleet.worker("second");
    wait_for("the second worker", || {
        let workers = fleet.client.get("/admin/workers").1;
        workers.contains("second").then_some(())
    });
    drop(first);
    fleet.wait_for_status("tuned", 200);
    answers();
    drop(second);
}

/// Makes a folder with an adapter's files, in place of those that it has.
fn put(to: &Path, from: &str) {
    std::fs::create_dir_all(to).unwrap();
    for file in ["adapter_config.json", "adapter_model.safetensors"] {
        std::fs::remove_file(to.join(file)).unwrap_or_default();
        std::fs::copy(folder(from).join(file), to.join(file)).unwrap();
    }
}

/// Code and message of a request that is refused with 503.
fn refused(client: &HttpClient, name: &str) -> (String, String) {
    let ask = json!({"model": name, "prompt": "a", "max_tokens": 1});
    let (status, answer) = client.post("/v1/completions", &ask);
    assert_eq!(status, 503, "{answer}");
    let text = |field: &str| answer["error"][field].as_str().unwrap().to_owned();
    (text("code"), text("message"))
}

/// A shorter file over the file of an adapter ends no worker, and a longer wait for it has no use:
/// its requests fail at once, with the reason, and the model is served on.
#[test]
fn a_file_that_is_written_over_fails_its_requests_at_once() {
    let folders = tempfile::tempdir().unwrap();
    let to = folders.path().join("tuned");
    put(&to, "llama3-all");
    let mut flags = flags(&[]);
    flags.push(format!("tuned={}", to.display()));
    let (process, client) = serve(&texts(&flags));
    let file = to.join("adapter_model.safetensors");
    std::fs::File::options()
        .write(true)
        .open(&file)
        .and_then(|file| file.set_len(100))
        .unwrap();
    let begun = std::time::Instant::now();
    let (code, message) = refused(&client, "tuned");
    assert_eq!(code, "no_adapter");
    let folder = to.display().to_string();
    assert!(
        message.contains(&folder) && message.contains("was written to"),
        "{message}"
    );
    assert_eq!(refused(&client, "tuned"), (code, message));
    // Far less than the 30 s that a request waits for room.
    assert!(begun.elapsed().as_secs() < 20);
    let warnings = process
        .logs()
        .matches("an adapter cannot be loaded")
        .count();
    // Both workers of a pair may begin to load it.
    assert!((1..=2).contains(&warnings), "{warnings}");
    assert_adapter_answers(&client, "base", "llama3-qv", "llama3-qv");
}

/// One router is cut off while the other one changes a name; it repeats its earlier change in vain.
#[test]
fn a_router_that_was_cut_off_undoes_no_later_change() {
    let adapters = root().join("testdata/adapters");
    let mut other = CleaveProcess::start(&["router", "--listen", "127.0.0.1:0"]);
    let address = other.address();
    let client = HttpClient::new(&address);
    let fleet = RunTimeFleet::new(&adapters);
    let fleet = RunTimeFleet {
        address: format!("{},{address}", fleet.address),
        ..fleet
    };
    let worker = fleet.worker("worker");
    fleet.wait_for_adapters();
    fleet.load("tuned", "llama3-all");
    let status = |client: &HttpClient| {
        let ask = json!({"model": "tuned", "prompt": "a", "max_tokens": 1});
        client.post("/v1/completions", &ask).0
    };
    wait_for("the other router", || {
        (status(&client) == 200).then_some(())
    });
    fleet.router.signal("STOP");
    let load = json!({"lora_name": "tuned", "lora_path": "llama3-qv"});
    let (code, answer) = client.post("/v1/load_lora_adapter", &load);
    assert_eq!(code, 200, "{answer}");
    // A new start of the worker connects to the first router once that runs again.
    drop(worker);
    let _worker = fleet.worker("worker");
    wait_for("the worker's return", || {
        (status(&client) == 200).then_some(())
    });
    fleet.router.signal("CONT");
    wait_for("the worker at the first router", || {
        let joined = fleet.router.logs().matches("worker joined").count();
        (joined >= 2).then_some(())
    });
    // The worker refuses its earlier change, unless its report was first.
    fleet.load("other", "llama3-third");
    fleet.wait_for_status("tuned", 200);
    for client in [&client, &fleet.client] {
        assert_adapter_answers(client, "base", "tuned", "llama3-qv");
    }
}

/// The folder changes while the only worker is away: no request gets the other content before an
/// operator asks for it.
#[test]
fn a_worker_that_returns_serves_no_other_content() {
    let folders = tempfile::tempdir().unwrap();
    let put = |from: &str| put(&folders.path().join("tuned"), from);
    put("llama3-all");
    let fleet = RunTimeFleet::new(folders.path());
    let worker = fleet.worker("worker");
    fleet.wait_for_adapters();
    fleet.load("tuned", "tuned");
    assert_adapter_answers(&fleet.client, "base", "tuned", "llama3-all");
    drop(worker);
    put("llama3-qv");
    let _worker = fleet.worker("worker");
    wait_for("the worker's refusal", || {
        let log = fleet.router.logs();
        log.contains("load it again to serve the new content")
            .then_some(())
    });
    assert_eq!(fleet.status("base"), 200);
    let (code, message) = refused(&fleet.client, "tuned");
    assert_eq!(code, "no_adapter");
    assert!(
        message.contains("load it again to serve the new content"),
        "{message}"
    );
    fleet.load("tuned", "tuned");
    assert_adapter_answers(&fleet.client, "base", "tuned", "llama3-qv");
}

/// A router that is started anew learns the adapters from workers that have them, so that a worker
/// that was lost later gets them again.
#[test]
fn a_new_router_learns_the_adapters_of_run_time() {
    let fleet = RunTimeFleet::new(&root().join("testdata/adapters"));
    let first = fleet.worker("first");
    fleet.wait_for_adapters();
    fleet.load("tuned", "llama3-all");
    let fleet = fleet.restart_router();
    fleet.wait_for_adapters();
    fleet.wait_for_status("tuned", 200);
    drop(first);
    let _first = fleet.worker("first");
    fleet.wait_for_status("tuned", 200);
    assert_adapter_answers(&fleet.client, "base", "tuned", "llama3-all");
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
    assert_eq!(load(&"a".repeat(4097)), 400, "the worker stays");
    assert_eq!(load("llama3-all"), 200);
}
