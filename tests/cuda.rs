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

/// As scripts/gpu reads it.
#[test]
fn how_long_the_device_stands_still_between_decode_steps_is_measured() {
    let cache = tempfile::tempdir().expect("a temporary folder");
    let folders = harness::golden_folders();
    let model = folders[0].to_str().expect("a path");
    let mut arguments = vec!["bench", "engine", "--device", "cuda", "--model", model];
    arguments.extend([
        "--shapes",
        "decode:2x16,prefill:20",
        "--dtype",
        "f32",
        "--json",
    ]);
    arguments.extend(["--kv-cache", "16MiB", "--max-num-seqs", "4"]);
    let Some(mut command) = on_stand_in(&arguments, cache.path()) else {
        return;
    };
    let rows = answer(&mut command)["rows"].clone();
    let seconds = |row: usize, what: &str| rows[row][what].as_f64();
    let idle = seconds(0, "idle_seconds_median").expect("of decode steps");
    assert!(idle <= seconds(0, "seconds_median").expect("as long as they take"));
    assert_eq!(seconds(1, "idle_seconds_median"), None, "of a prompt");
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

/// Two workers, of which one's GPU fails in the middle of streams: it says so and ends, and its streams go on at the
/// other one, from the token where they were.
#[test]
fn a_gpu_that_fails_costs_its_worker_and_no_stream() {
    let cache = tempfile::tempdir().expect("a temporary folder");
    let folder = harness::root().join("testdata/llama3");
    let model = folder.to_str().expect("a readable path");
    let mut router = harness::Process::start(&["router", "--listen", "127.0.0.1:0"]);
    let address = router.address();
    let worker = |faults: &str| {
        let mut arguments = vec!["worker", "--leg", "both", "--router", &address];
        arguments.extend([
            "--kv-cache",
            "4MiB",
            "--no-prefix-cache",
            "--metrics-listen",
            "127.0.0.1:0",
        ]);
        arguments.extend(["--device", "cuda", "--dtype", "f32", "--model", model]);
        let mut command = on_stand_in(&arguments, cache.path())?;
        command.env("CLEAVE_STANDIN_FAULTS", faults);
        Some(harness::Process::spawn(command))
    };
    // One embedding a step: more steps than a worker measures itself with before it joins.
    let (Some(_sound), Some(mut sick)) = (worker(""), worker("launch:embed_f32@600")) else {
        return;
    };
    let client = harness::Client::new(&address);
    client.wait_ready();
    harness::wait_for("two workers", || {
        (client.metric("cleave_workers", &[]) >= 2.0).then_some(())
    });
    // So many at once that both workers have some.
    let bodies = [3, 4, 5, 6].map(|first| {
        json!({
            "model": "llama3", "prompt": (first..20).collect::<Vec<u32>>(), "max_tokens": 60,
            "temperature": 0.9, "seed": 5, "ignore_eos": true,
        })
    });
    let round = || {
        std::thread::scope(|scope| {
            let post = |body| client.post("/v1/completions", body);
            let posts = bodies
                .each_ref()
                .map(|body| scope.spawn(move || post(body)));
            posts.map(|post| {
                let (status, answer) = post.join().expect("a client does not panic");
                assert_eq!(status, 200, "{answer}");
                answer["choices"][0]["text"].clone()
            })
        })
    };
    let first = round();
    let mut rounds = 1;
    while !sick.logs().contains("device lost") {
        assert!(rounds < 60, "the fault never struck: {}", sick.logs());
        assert_eq!(round(), first, "round {rounds}");
        rounds += 1;
    }
    let told = sick.logs();
    assert!(told.contains("CUDA_ERROR_LAUNCH_FAILED"), "{told}");
    assert!(told.contains("start it again"), "{told}");
    assert!(!sick.wait().success(), "whoever starts it again is told");
    assert_eq!(round(), first, "the other worker has them all");
}
