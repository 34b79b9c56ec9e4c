//! `--device cuda` in real processes, over the stand-in driver: what computes is the kernels' own source, run on
//! the processor; everything around it is what runs on a GPU.

mod harness;

use cleave_emulator::Variant;
use serde_json::{Value, json};
use std::path::Path;
use std::process::Command;

/// `cleave` with the stand-in driver and run-time compiler where it looks for NVIDIA's.
fn on_stand_in(arguments: &[&str], cache: &Path) -> Option<Command> {
    let libraries = [
        cleave_emulator::library(Variant::Plain),
        cleave_emulator::nvrtc(),
    ];
    let folders: Option<Vec<&Path>> = libraries
        .iter()
        .map(|library| library.and_then(Path::parent))
        .collect();
    let Some(folders) = folders else {
        eprintln!("skipped: the emulator needs g++ on x86-64 Linux");
        return None;
    };
    let mut command = harness::cleave(arguments);
    command
        .env(
            "LD_LIBRARY_PATH",
            std::env::join_paths(folders).expect("paths"),
        )
        .env("XDG_CACHE_HOME", cache);
    Some(command)
}

fn answer(command: &mut Command) -> Value {
    let output = command.output().expect("cleave starts");
    let err = String::from_utf8_lossy(&output.stderr);
    assert!(output.status.success(), "{err}");
    serde_json::from_slice(&output.stdout).expect("one JSON object")
}

#[test]
fn a_machine_without_a_driver_is_told_in_one_line() {
    let output = harness::cleave(&["generate", "--device", "cuda", "--prompt", "x"])
        .env("LD_LIBRARY_PATH", "/nonexistent")
        .output()
        .expect("cleave starts");
    let err = String::from_utf8_lossy(&output.stderr);
    if output.status.success() {
        return eprintln!("skipped: this machine has a GPU");
    }
    assert!(err.contains("no NVIDIA driver"), "{err}");
    assert!(err.contains("--device cpu"), "{err}");
    assert_eq!(err.trim().lines().count(), 1, "{err}");
}

#[test]
fn a_device_that_is_none_is_told() {
    let (status, _, err) = harness::run(&["generate", "--device", "gpu", "--prompt", "x"]);
    assert!(!status.success());
    assert!(err.contains("cuda:N"), "{err}");
}

#[test]
fn a_gpu_that_is_not_there_is_told() {
    let cache = tempfile::tempdir().expect("a temporary folder");
    let arguments = ["generate", "--device", "cuda:7", "--prompt", "x"];
    let Some(mut command) = on_stand_in(&arguments, cache.path()) else {
        return;
    };
    let output = command.output().expect("cleave starts");
    assert!(!output.status.success());
    let err = String::from_utf8_lossy(&output.stderr);
    assert!(err.contains("no GPU number 7"), "{err}");
}

#[test]
fn tokens_are_those_of_transformers() {
    let cache = tempfile::tempdir().expect("a temporary folder");
    for folder in harness::golden_folders() {
        let text = std::fs::read_to_string(folder.join("goldens.json")).expect("readable goldens");
        let goldens: Value = serde_json::from_str(&text).expect("goldens are JSON");
        let golden = &goldens["prompts"][9];
        let ids = golden["prompt_tokens"].as_array().expect("a list of ids");
        let prompt: Vec<String> = ids.iter().map(Value::to_string).collect();
        let prompt = prompt.join(",");
        let model = folder.to_str().expect("a readable path");
        let mut arguments = vec!["generate", "--json", "--dtype", "f32", "--ignore-eos"];
        arguments.extend(["--device", "cuda", "--model", model]);
        arguments.extend(["--max-tokens", "32", "--prompt-tokens", &prompt]);
        let Some(mut command) = on_stand_in(&arguments, cache.path()) else {
            return;
        };
        let ours = answer(&mut command);
        assert_eq!(ours["tokens"], golden["tokens"], "{model}");
    }
}

/// A prefill and a decode worker on one GPU; each request is handed over; answers are those of one process alone.
#[test]
fn a_stream_handed_over_between_two_workers_of_a_gpu_is_the_one_of_a_single_worker() {
    let folder = harness::root().join("testdata/llama3");
    handed_over(&folder, &[]);
}

/// The same with weights of four bits and fp8 keys and values.
#[test]
fn a_stream_of_quantised_weights_over_fp8_keys_handed_over_is_the_one_of_a_single_worker() {
    let folder = tempfile::tempdir().expect("a temporary folder");
    let out = folder.path().join("llama3");
    let dense = harness::root().join("testdata/llama3");
    let (from, to) = (dense.to_str(), out.to_str());
    let (status, _, err) = harness::run(&[
        "synth",
        "--model",
        from.expect("a readable path"),
        "--quantization",
        "gptq",
        "--group-size",
        "32",
        "--out",
        to.expect("a readable path"),
    ]);
    assert!(status.success(), "{err}");
    handed_over(&out, &["--kv-cache-dtype", "fp8"]);
}

fn handed_over(folder: &Path, flags: &[&str]) {
    let cache = tempfile::tempdir().expect("a temporary folder");
    let model = folder.to_str().expect("a readable path");
    let common = [&["--device", "cuda", "--model", model], flags].concat();
    let prompt: Vec<u32> = (3..60).collect();
    let ids: Vec<String> = prompt.iter().map(u32::to_string).collect();
    let ids = ids.join(",");
    let mut alone = vec!["generate", "--json", "--max-tokens", "24", "--ignore-eos"];
    alone.extend(&common);
    alone.extend([
        "--temperature",
        "0.9",
        "--seed",
        "5",
        "--prompt-tokens",
        &ids,
    ]);
    let Some(mut command) = on_stand_in(&alone, cache.path()) else {
        return;
    };
    let alone = answer(&mut command);
    let mut serve = vec!["serve", "--port", "0", "--prefill", "1", "--decode", "1"];
    serve.extend(["--placement", "split", "--kv-cache", "4MiB"]);
    serve.extend(common);
    let command = on_stand_in(&serve, cache.path()).expect("it ran before");
    let mut server = harness::Process::spawn(command);
    let client = harness::Client::new(&server.address());
    let body = json!({
        "model": "llama3", "prompt": prompt, "max_tokens": 24, "temperature": 0.9, "seed": 5,
        // The checkpoint has a default of its own, which `generate` does not take.
        "top_p": 1.0, "ignore_eos": true,
    });
    let (status, answer) = client.post("/v1/completions", &body);
    assert_eq!(status, 200, "{answer}");
    assert_eq!(answer["choices"][0]["text"], alone["text"], "{answer}");
    let (_, metrics) = client.get("/metrics");
    let landed = metrics
        .lines()
        .find(|line| line.starts_with("cleave_handoff_bytes_total") && !line.ends_with(" 0"));
    assert!(landed.is_some(), "nothing was handed over: {metrics}");
}
