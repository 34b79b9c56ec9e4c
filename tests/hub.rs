//! Models by name: `serve` downloads, answers, and answers again without the hub.

use crate::harness::{CleaveProcess, HttpClient, cleave, root};
use cleave_test_hub::{HubFault, MODEL, TestHub};
use serde_json::{Value, json};
use std::path::Path;
use std::process::{Command, Output};
use tempfile::TempDir;

/// `cleave` with a hub and an empty cache, whatever variables this process has.
fn with_hub(arguments: &[&str], hub: &TestHub, cache: &Path) -> Command {
    let mut command = cleave(arguments);
    for name in [
        "HF_TOKEN",
        "HF_HUB_CACHE",
        "HF_HUB_OFFLINE",
        "TRANSFORMERS_OFFLINE",
    ] {
        command.env_remove(name);
    }
    command
        .env("HF_HOME", cache)
        .env("HF_ENDPOINT", hub.endpoint());
    command
}

fn tiny_hub() -> TestHub {
    TestHub::of_folder(&root().join("testdata/llama3"))
}

#[track_caller]
fn stdout(output: &Output) -> String {
    let error = String::from_utf8_lossy(&output.stderr);
    assert!(output.status.success(), "{error}");
    String::from_utf8(output.stdout.clone()).unwrap()
}

#[test]
fn a_model_is_served_by_name_and_then_offline() {
    let (hub, cache) = (tiny_hub(), TempDir::new().unwrap());
    let arguments = [
        "serve",
        "--model",
        MODEL,
        "--port",
        "0",
        "--threads",
        "2",
        "--kv-cache",
        "64MiB",
    ];
    let answer = |command: Command| {
        let mut process = CleaveProcess::spawn(command);
        let client = HttpClient::new(&process.address());
        client.wait_ready();
        let (status, models) = client.get("/v1/models");
        assert_eq!(status, 200);
        let models: Value = serde_json::from_str(&models).unwrap();
        assert_eq!(models["data"][0]["id"], MODEL);
        client.complete(
            &json!({"model": MODEL, "prompt": "A slice is", "max_tokens": 8, "temperature": 0}),
        )
    };
    let first = answer(with_hub(&arguments, &hub, cache.path()));
    let asked = hub.requests("").len();
    assert!(asked > 3, "the hub was asked");
    let mut offline = with_hub(&arguments, &hub, cache.path());
    offline.env("HF_HUB_OFFLINE", "1");
    assert_eq!(answer(offline), first);
    assert_eq!(hub.requests("").len(), asked);
}

#[test]
fn models_are_pulled_listed_and_removed() {
    let (hub, cache) = (tiny_hub(), TempDir::new().unwrap());
    let run = |arguments: &[&str]| with_hub(arguments, &hub, cache.path()).output().unwrap();
    let folder = stdout(&run(&["pull", MODEL]));
    assert!(
        Path::new(folder.trim()).join("config.json").is_file(),
        "{folder}"
    );
    let listings = hub.requests("blobs=true").len();
    assert_eq!(stdout(&run(&["pull", "--if-absent", MODEL])), folder);
    assert_eq!(
        hub.requests("blobs=true").len(),
        listings,
        "the hub is not asked"
    );
    let list: Value = serde_json::from_str(&stdout(&run(&["list", "--json"]))).unwrap();
    assert_eq!(list[0]["name"], MODEL);
    assert_eq!(list[0]["revisions"], json!(["main"]));
    assert_eq!(list[0]["complete"], true);
    let table = stdout(&run(&["list"]));
    assert!(table.contains(MODEL) && table.contains("main"), "{table}");
    let freed = stdout(&run(&["rm", MODEL]));
    assert!(freed.contains("freed"), "{freed}");
    assert_eq!(stdout(&run(&["list", "--json"])).trim(), "[]");
}

#[test]
fn an_error_names_both_readings_of_a_name() {
    let (hub, cache) = (tiny_hub(), TempDir::new().unwrap());
    let generate = |model: &str| {
        let arguments = ["generate", "--model", model, "--prompt", "x"];
        let output = with_hub(&arguments, &hub, cache.path()).output().unwrap();
        assert!(!output.status.success());
        String::from_utf8(output.stderr).unwrap()
    };
    let error = generate("org/other");
    assert!(error.contains("no folder of this path"), "{error}");
    assert!(error.contains("no such model"), "{error}");
    let error = generate("/no/such/folder");
    assert!(error.contains("no such folder"), "{error}");
    hub.fault(
        "blobs=true",
        HubFault::Status(403, "x-error-code: GatedRepo\r\n"),
    );
    let error = generate(MODEL);
    assert!(error.contains("accept its licence"), "{error}");
}

/// Two processes share one download; the second one waits for the first one's lock.
#[test]
fn two_processes_download_a_model_once() {
    let (hub, cache) = (tiny_hub(), TempDir::new().unwrap());
    let weights = "model-00001-of-00003.safetensors";
    hub.fault(weights, HubFault::Gate);
    let pull = || {
        let mut command = with_hub(&["pull", MODEL], &hub, cache.path());
        command.stdout(std::process::Stdio::null());
        command.spawn().unwrap()
    };
    let mut first = pull();
    hub.wait_for_request(weights);
    let mut second = pull();
    // The second one has asked for the listing, and looks at locks from then on.
    crate::harness::wait_for("a second listing", || {
        (hub.requests("blobs=true").len() == 2).then_some(())
    });
    hub.open_gate();
    assert!(first.wait().unwrap().success() && second.wait().unwrap().success());
    assert_eq!(hub.requests(weights).len(), 1);
}
