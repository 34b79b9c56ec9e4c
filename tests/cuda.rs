//! `--device cuda` in real processes on the CUDA emulator: the kernels' own source runs on the
//! processor, and all other code is the same as on a GPU.

use crate::harness;
use cleave_emulator::SanitizerVariant;
use serde_json::{Value, json};
use std::path::Path;
use std::process::Command;

/// `cleave` with the emulated driver and run-time compiler in its library path; none without an
/// emulator.
fn cleave_on_emulator(arguments: &[&str], cache: &Path) -> Option<Command> {
    let libraries = [
        cleave_emulator::driver_library(SanitizerVariant::Plain),
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
fn a_missing_driver_is_a_one_line_error() {
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
fn an_unknown_device_name_is_refused() {
    let (status, _, err) = harness::run(&["generate", "--device", "gpu", "--prompt", "x"]);
    assert!(!status.success());
    assert!(err.contains("cuda:N"), "{err}");
}

#[test]
fn a_missing_gpu_number_is_refused() {
    let cache = tempfile::tempdir().expect("a temporary folder");
    let arguments = ["generate", "--device", "cuda:7", "--prompt", "x"];
    let Some(mut command) = cleave_on_emulator(&arguments, cache.path()) else {
        return;
    };
    let output = command.output().expect("cleave starts");
    assert!(!output.status.success());
    let err = String::from_utf8_lossy(&output.stderr);
    assert!(err.contains("no GPU number 7"), "{err}");
}

/// Checks the JSON that scripts/gpu reads.
#[test]
fn bench_engine_measures_idle_time_between_decode_steps() {
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
    let Some(mut command) = cleave_on_emulator(&arguments, cache.path()) else {
        return;
    };
    let rows = answer(&mut command)["rows"].clone();
    let seconds = |row: usize, field: &str| rows[row][field].as_f64();
    let idle = seconds(0, "idle_seconds_median").expect("of decode steps");
    assert!(idle <= seconds(0, "seconds_median").expect("as long as they take"));
    assert_eq!(seconds(1, "idle_seconds_median"), None, "of a prompt");
}

#[test]
fn tokens_on_cuda_match_transformers() {
    let cache = tempfile::tempdir().expect("a temporary folder");
    let mut folders = harness::golden_folders();
    folders.retain(|folder| !harness::has_experts(folder));
    for folder in folders {
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
        let Some(mut command) = cleave_on_emulator(&arguments, cache.path()) else {
            return;
        };
        let tokens = answer(&mut command);
        assert_eq!(tokens["tokens"], golden["tokens"], "{model}");
    }
}

/// A disk error or a foreign write must not keep a program from starting.
#[test]
fn a_damaged_kernel_cache_is_compiled_again() {
    let cache = tempfile::tempdir().expect("a temporary folder");
    let folder = harness::root().join("testdata/llama3");
    let model = folder.to_str().expect("a readable path");
    let arguments = ["generate", "--json", "--device", "cuda", "--model", model];
    let arguments = [
        &arguments[..],
        &["--max-tokens", "4", "--prompt-tokens", "3,4,5"],
    ]
    .concat();
    let Some(mut command) = cleave_on_emulator(&arguments, cache.path()) else {
        return;
    };
    let expected = answer(&mut command)["tokens"].clone();
    let kernels = cache.path().join("cleave/kernels");
    let Ok(entries) = std::fs::read_dir(&kernels) else {
        return eprintln!("skipped: this build has its kernels inside");
    };
    let mut files: Vec<_> = entries.map(|entry| entry.expect("a file").path()).collect();
    files.sort();
    let good = std::fs::read(&files[0]).expect("a readable file");
    let mut flipped = good.clone();
    *flipped.last_mut().expect("code") ^= 1;
    for damage in [flipped, good[..good.len() / 2].to_vec(), Vec::new()] {
        std::fs::write(&files[0], damage).expect("a file can be written");
        let mut command = cleave_on_emulator(&arguments, cache.path()).expect("it ran before");
        let output = command.output().expect("cleave starts");
        let err = String::from_utf8_lossy(&output.stderr);
        assert!(output.status.success(), "{err}");
        let answer: Value = serde_json::from_slice(&output.stdout).expect("one JSON object");
        assert_eq!(answer["tokens"], expected);
        assert!(err.contains("compiled again"), "{err}");
        assert_eq!(std::fs::read(&files[0]).expect("a readable file"), good);
    }
}

/// A prefill and a decode worker of one process share a GPU; answers equal those of `generate`.
#[test]
fn hand_offs_within_one_gpu_process_change_no_token() {
    let folder = harness::root().join("testdata/llama3");
    check_hand_off_in_process(&folder, &[]);
}

/// The same with 4-bit weights and an fp8 KV cache.
#[test]
fn hand_offs_of_fp8_kv_and_quantized_weights_change_no_token() {
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
    check_hand_off_in_process(&out, &["--kv-cache-dtype", "fp8"]);
}

fn check_hand_off_in_process(folder: &Path, flags: &[&str]) {
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
    let Some(mut command) = cleave_on_emulator(&alone, cache.path()) else {
        return;
    };
    let alone = answer(&mut command);
    let mut serve = vec!["serve", "--port", "0", "--prefill", "1", "--decode", "1"];
    serve.extend(["--placement", "split", "--kv-cache", "4MiB"]);
    serve.extend(common);
    let command = cleave_on_emulator(&serve, cache.path()).expect("it ran before");
    let mut server = harness::CleaveProcess::spawn(command);
    let client = harness::HttpClient::new(&server.address());
    let body = json!({
        "model": "llama3", "prompt": prompt, "max_tokens": 24, "temperature": 0.9, "seed": 5,
        // The checkpoint's own default of top_p, which `generate` does not use, is overridden.
        "top_p": 1.0, "ignore_eos": true,
    });
    let (status, answer) = client.post("/v1/completions", &body);
    assert_eq!(status, 200, "{answer}");
    assert_eq!(answer["choices"][0]["text"], alone["text"], "{answer}");
    let (_, metrics) = client.get("/metrics");
    let landed = metrics.lines().find(|line| {
        line.starts_with("cleave_worker_handoff_bytes_total") && !line.ends_with(" 0")
    });
    assert!(landed.is_some(), "nothing was handed over: {metrics}");
}

/// Legs that share a GPU use separate multiprocessors, and answer as before.
#[test]
fn the_decode_share_divides_the_multiprocessors() {
    let cache = tempfile::tempdir().expect("a temporary folder");
    let folder = harness::root().join("testdata/llama3");
    let model = folder.to_str().expect("a readable path");
    let mut arguments = vec!["serve", "--port", "0", "--prefill", "1", "--decode", "1"];
    arguments.extend([
        "--placement",
        "split",
        "--kv-cache",
        "4MiB",
        "--calibrate",
        "0",
    ]);
    arguments.extend(["--device", "cuda", "--model", model]);
    let divided = |share| {
        let mut arguments = arguments.clone();
        arguments.extend(["--gpu-decode-share", share]);
        let mut command = cleave_on_emulator(&arguments, cache.path())?;
        command.env("CLEAVE_STANDIN_MULTIPROCESSORS", "12");
        Some(command)
    };
    let Some(command) = divided("0.3") else {
        return;
    };
    let mut server = harness::CleaveProcess::spawn(command);
    let client = harness::HttpClient::new(&server.address());
    assert_eq!(client.complete(&prompt(3)), alone(3, cache.path()));
    let logs = server.logs();
    // 0.3 of 12 is 3.6; the emulator partitions in pairs.
    for (worker, part) in [
        ("worker=\"decode-0\"", "4 of 12"),
        ("worker=\"prefill-0\"", "8 of 12"),
    ] {
        let mut lines = logs.lines().filter(|line| line.contains(worker));
        assert!(lines.any(|line| line.contains(part)), "{logs}");
    }
    // Workers of one process hand over from pool to pool.
    assert!(logs.contains("transport=local"), "{logs}");
    let output = divided("0.95")
        .expect("it ran before")
        .output()
        .expect("cleave starts");
    let err = String::from_utf8_lossy(&output.stderr);
    assert!(
        !output.status.success() && err.contains("--gpu-decode-share"),
        "{err}"
    );
}

/// Prompt kernels occupy their multiprocessors until they end, so decode steps need some of their
/// own.
#[test]
fn the_decode_share_is_on_by_default() {
    let cache = tempfile::tempdir().expect("a temporary folder");
    let folder = harness::root().join("testdata/llama3");
    let model = folder.to_str().expect("a readable path");
    let started = |flags: &[&str]| {
        let mut arguments = vec!["serve", "--port", "0", "--prefill", "1", "--decode", "1"];
        arguments.extend(["--kv-cache", "4MiB", "--calibrate", "0"]);
        arguments.extend(["--device", "cuda", "--model", model]);
        arguments.extend(flags);
        let mut command = cleave_on_emulator(&arguments, cache.path())?;
        command.env("CLEAVE_STANDIN_MULTIPROCESSORS", "20");
        let mut server = harness::CleaveProcess::spawn(command);
        server.address();
        Some(server.logs())
    };
    let Some(logs) = started(&[]) else {
        return;
    };
    for (worker, part) in [
        ("worker=\"decode-0\"", "8 of 20"),
        ("worker=\"prefill-0\"", "12 of 20"),
    ] {
        let mut lines = logs.lines().filter(|line| line.contains(worker));
        assert!(lines.any(|line| line.contains(part)), "{logs}");
    }
    // The legs use separate multiprocessors, so the router may place work on both.
    let shared = "compute on the same hardware";
    assert!(!logs.contains(shared), "{logs}");
    for off in ["none", "0"] {
        let logs = started(&["--gpu-decode-share", off]).expect("it ran before");
        assert!(!logs.contains("of 20 multiprocessors"), "{off}: {logs}");
        assert!(logs.contains(shared), "{off}: {logs}");
    }
}

/// The checkpoint's weights take 10.3 MiB, and each leg needs two MiB more, so they fit only once.
#[test]
fn legs_of_one_gpu_share_its_weights() {
    let cache = tempfile::tempdir().expect("a temporary folder");
    let model = harness::root().join("testdata/trained");
    let model = model.to_str().expect("a readable path");
    let mut arguments = vec!["serve", "--port", "0", "--prefill", "1", "--decode", "1"];
    arguments.extend(["--model", model]);
    arguments.extend(["--placement", "split", "--calibrate", "0"]);
    arguments.extend(["--device", "cuda", "--kv-cache", "1MiB"]);
    arguments.extend(["--max-num-seqs", "2", "--max-num-batched-tokens", "32"]);
    let Some(mut command) = cleave_on_emulator(&arguments, cache.path()) else {
        return;
    };
    command.env("CLEAVE_STANDIN_MEMORY_MIB", "20");
    let mut server = harness::CleaveProcess::spawn(command);
    server.address();
}

/// A router and workers as separate processes on the emulator.
struct CudaFleet {
    router: harness::CleaveProcess,
    workers: Vec<harness::CleaveProcess>,
    client: harness::HttpClient,
    cache: tempfile::TempDir,
    address: String,
    /// Flags of every worker.
    flags: Vec<String>,
    /// Compute capability of later workers' devices, if it is not the emulator's default.
    capability: Option<String>,
}

impl CudaFleet {
    /// A fleet without workers; `None` without an emulator.
    fn new(more: &[&str]) -> Option<Self> {
        cleave_emulator::driver_library(SanitizerVariant::Plain)?;
        let mut arguments = vec!["router", "--listen", "127.0.0.1:0", "--placement", "split"];
        arguments.extend(["--router-mode", "load"]);
        arguments.extend(more);
        let mut router = harness::CleaveProcess::start(&arguments);
        let address = router.address();
        Some(Self {
            client: harness::HttpClient::new(&address),
            cache: tempfile::tempdir().expect("a temporary folder"),
            workers: Vec::new(),
            flags: Vec::new(),
            capability: None,
            router,
            address,
        })
    }

    /// Starts a worker with planned device faults, and waits until it has joined; gives its number.
    fn worker(&mut self, leg: &str, faults: &str) -> usize {
        self.worker_on("cuda:0", leg, faults)
    }

    /// Starts a worker as [`CudaFleet::worker`] does, on one of two devices.
    fn worker_on(&mut self, device: &str, leg: &str, faults: &str) -> usize {
        let folder = harness::root().join("testdata/llama3");
        let model = folder.to_str().expect("a readable path").to_owned();
        let name = format!("{leg}-{}", self.workers.len());
        let mut arguments = vec!["worker", "--leg", leg, "--router", &self.address];
        arguments.extend(["--device", device, "--model", &model, "--kv-cache", "4MiB"]);
        arguments.extend(["--calibrate", "0", "--name", &name]);
        arguments.extend(["--metrics-listen", "127.0.0.1:0"]);
        arguments.extend(self.flags.iter().map(String::as_str));
        let mut command =
            cleave_on_emulator(&arguments, self.cache.path()).expect("it is emulated");
        if let Some(capability) = &self.capability {
            command.env("CLEAVE_STANDIN_CAPABILITY", capability);
        }
        command
            .env("CLEAVE_STANDIN_DEVICES", "2")
            .env("CLEAVE_STANDIN_FAULTS", faults)
            // UCX carries NIXL over TCP where there is no network card.
            .env("UCX_TLS", "tcp");
        self.workers.push(harness::CleaveProcess::spawn(command));
        let expected_count = self.workers.len() as f64;
        harness::wait_for("worker", || {
            (self.client.metric("cleave_workers", &[]) >= expected_count).then_some(())
        });
        self.workers.len() - 1
    }

    fn logs(&self, worker: usize) -> String {
        self.workers[worker].logs()
    }

    /// A client for the worker's own port.
    fn metrics_client(&self, worker: usize) -> harness::HttpClient {
        let address = harness::wait_for("port of a worker", || {
            let logs = self.logs(worker);
            let (_, rest) = logs.split_once("metrics are served url=http://")?;
            Some(rest.split_once("/metrics")?.0.to_owned())
        });
        harness::HttpClient::new(&address)
    }

    /// Waits until a worker's log contains the text.
    fn wait_for_log(&self, worker: usize, text: &str) {
        harness::wait_for(text, || self.logs(worker).contains(text).then_some(()));
    }
}

/// Another GPU model may round tensor-core steps differently, so KV of one is invalid on the other.
#[test]
fn workers_on_different_gpu_models_are_not_paired() {
    let Some(mut fleet) = CudaFleet::new(&[]) else {
        return;
    };
    fleet.worker_on("cuda:0", "prefill", "");
    fleet.capability = Some("8.0".to_owned());
    fleet.worker_on("cuda:1", "decode", "");
    let logs = harness::wait_for("the router's warning", || {
        let logs = fleet.router.logs();
        logs.contains("no worker has the fingerprint")
            .then_some(logs)
    });
    assert!(logs.contains("-sm90-") && logs.contains("-sm80-"), "{logs}");
    let (status, body) = fleet.client.get("/ready");
    assert_ne!(status, 200, "no pair of legs has one fingerprint: {body}");
    // A second worker on the first GPU model makes a pair.
    fleet.capability = None;
    fleet.worker_on("cuda:1", "decode", "");
    harness::wait_for("a pair", || {
        (fleet.client.get("/ready").0 == 200).then_some(())
    });
}

/// The GPU time-slices the work of two processes, whatever share each is given.
#[test]
fn two_processes_on_one_gpu_log_a_warning() {
    let Some(mut fleet) = CudaFleet::new(&[]) else {
        return;
    };
    fleet.worker("prefill", "");
    assert!(!fleet.router.logs().contains("time-sliced"));
    fleet.worker("decode", "");
    harness::wait_for("a warning", || {
        fleet.router.logs().contains("time-sliced").then_some(())
    });
    fleet.flags = ["--gpu-decode-share", "0.5"].map(str::to_owned).to_vec();
    let divided = fleet.worker("decode", "");
    let logs = fleet.logs(divided);
    assert!(logs.contains("take turns on the whole GPU"), "{logs}");
}

/// Blocks of a worker's pool of this kind.
fn blocks(port: &harness::HttpClient, kind: &str) -> f64 {
    port.metric("cleave_pool_blocks", &[&format!("kind=\"{kind}\"")])
}

/// Waits until no block is held, or writable by a peer.
fn wait_until_blocks_are_free(port: &harness::HttpClient) {
    harness::wait_for("blocks to be let go", || {
        let kinds = ["held", "reserved", "leased", "quarantined", "leaked"];
        let held: f64 = kinds.iter().map(|kind| blocks(port, kind)).sum();
        (held == 0.0).then_some(())
    });
}

/// A prompt with a prefix of its own, so that every block is handed over.
fn prompt(first: u32) -> Value {
    let ids: Vec<u32> = (first..first + 57).collect();
    json!({
        "model": "llama3", "prompt": ids, "max_tokens": 12, "temperature": 0, "ignore_eos": true,
    })
}

/// The text that one worker alone gives for such a prompt.
fn alone(first: u32, cache: &Path) -> String {
    let folder = harness::root().join("testdata/llama3");
    let ids: Vec<String> = (first..first + 57).map(|id| id.to_string()).collect();
    let ids = ids.join(",");
    let mut arguments = vec!["generate", "--json", "--max-tokens", "12", "--ignore-eos"];
    arguments.extend([
        "--device",
        "cuda",
        "--model",
        folder.to_str().expect("a readable path"),
    ]);
    arguments.extend(["--prompt-tokens", &ids]);
    let mut command = cleave_on_emulator(&arguments, cache).expect("it is emulated");
    let text = answer(&mut command)["text"].clone();
    text.as_str().expect("a text").to_owned()
}

/// The sender's device copies into the receiver's pool, which verifies the bytes in place.
#[test]
fn hand_offs_between_processes_of_a_gpu_change_no_token() {
    check_direct_hand_off(["cuda:0", "cuda:0"]);
}

/// The same from one GPU of the host to another.
#[test]
fn hand_offs_between_gpus_of_a_host_change_no_token() {
    check_direct_hand_off(["cuda:0", "cuda:1"]);
}

/// As between hosts: NIXL writes the sender's blocks into a ring in the receiver's host memory.
#[test]
fn rdma_hand_offs_between_gpus_change_no_token() {
    let Some(library) = std::env::var_os("CLEAVE_TEST_NIXL") else {
        return eprintln!("SKIPPED: CLEAVE_TEST_NIXL names no library");
    };
    let library = library.into_string().expect("a readable path");
    let flags = ["--kv-transport", "nixl", "--nixl-library", &library];
    check_hand_off("nixl", ["cuda:0", "cuda:1"], &flags);
}

fn check_direct_hand_off(devices: [&str; 2]) {
    check_hand_off("cuda-ipc", devices, &[]);
}

fn check_hand_off(transport: &str, [prefill, decode]: [&str; 2], flags: &[&str]) {
    let Some(mut fleet) = CudaFleet::new(&[]) else {
        return;
    };
    fleet.flags = flags.iter().map(ToString::to_string).collect();
    let prefill = fleet.worker_on(prefill, "prefill", "");
    let decode = fleet.worker_on(decode, "decode", "");
    for first in [3, 40] {
        let text = fleet.client.complete(&prompt(first));
        assert_eq!(text, alone(first, fleet.cache.path()), "from {first}");
    }
    for worker in [prefill, decode] {
        let logs = fleet.logs(worker);
        assert!(logs.contains(&format!("transport={transport}")), "{logs}");
        let port = fleet.metrics_client(worker);
        let named = format!("transport=\"{transport}\"");
        let direct = port.metric("cleave_link_transport", &[&named]);
        assert_eq!(direct, 1.0, "{logs}");
        assert_eq!(port.metric("cleave_link_fallbacks_total", &[]), 0.0);
        wait_until_blocks_are_free(&port);
    }
    let port = fleet.metrics_client(decode);
    let bytes = port.metric("cleave_worker_handoff_bytes_total", &[]);
    assert!(bytes > 0.0, "nothing was handed over");
    drop(fleet.router);
}

/// A worker that cannot open its peer's pool uses another transport.
#[test]
fn an_unopened_ipc_pool_falls_back_to_shared_memory() {
    let Some(mut fleet) = CudaFleet::new(&[]) else {
        return;
    };
    let prefill = fleet.worker("prefill", "ipc_open@1");
    fleet.worker("decode", "");
    let text = fleet.client.complete(&prompt(3));
    assert_eq!(text, alone(3, fleet.cache.path()));
    let logs = fleet.logs(prefill);
    assert!(
        logs.contains("from=cuda-ipc") && logs.contains("to=shm"),
        "{logs}"
    );
    assert!(logs.contains("cannot reach memory of GPU"), "{logs}");
    let port = fleet.metrics_client(prefill);
    assert_eq!(port.metric("cleave_link_fallbacks_total", &[]), 1.0);
    assert_eq!(
        port.metric("cleave_link_transport", &["transport=\"shm\""]),
        1.0
    );
}

// Lesson: 5.
/// A prefill worker's device fails in mid-hand-off: another worker computes its prompts.
#[test]
fn a_failed_ipc_copy_costs_no_stream_and_no_block() {
    let Some(mut fleet) = CudaFleet::new(&["--migration-limit", "9"]) else {
        return;
    };
    // Nine copies measure the link; the second block of the first prompt is the eleventh copy.
    let broken = fleet.worker("prefill", "ipc_copy@11");
    let decode = fleet.worker("decode", "");
    fleet.worker("prefill", "");
    for first in (3..).step_by(57) {
        let text = fleet.client.complete(&prompt(first));
        assert_eq!(text, alone(first, fleet.cache.path()), "from {first}");
        if fleet.logs(broken).contains("cannot read blocks") {
            break;
        }
        assert!(first < 400, "the broken worker was never asked");
    }
    wait_until_blocks_are_free(&fleet.metrics_client(decode));
}

// Invariant: I21.
// Lesson: 2.
/// Blocks that a sender may still write to stay in quarantine until its process has ended; then
/// they are free.
#[test]
fn blocks_of_a_sender_killed_mid_write_wait_for_its_exit() {
    let Some(mut fleet) = CudaFleet::new(&["--migration-limit", "0"]) else {
        return;
    };
    // The fault stops the copy of the second block: nine copies measure the link.
    let prefill = fleet.worker("prefill", "ipc_wait@11");
    let decode = fleet.worker("decode", "");
    let port = fleet.metrics_client(decode);
    let mut body = prompt(3);
    body["stream"] = json!(true);
    let client = harness::HttpClient::new(&fleet.address);
    let handle = std::thread::spawn(move || client.stream("/v1/completions", &body).count());
    // The write has begun, and does not end.
    fleet.wait_for_log(prefill, "a copy waits for the end of process");
    assert!(blocks(&port, "reserved") > 0.0);
    assert_eq!(blocks(&port, "quarantined"), 0.0);
    // The stopped sender may continue its write: neither the router's loss of it nor a broken link
    // frees its blocks.
    fleet.workers[prefill].signal("STOP");
    harness::wait_for("quarantine", || {
        (blocks(&port, "quarantined") > 0.0).then_some(())
    });
    fleet.wait_for_log(decode, "link lost");
    assert!(blocks(&port, "quarantined") > 0.0);
    fleet.workers[prefill].signal("KILL");
    fleet.workers[prefill].wait();
    fleet.wait_for_log(decode, "peer process has ended");
    wait_until_blocks_are_free(&port);
    drop(handle.join());
    // The pool serves as before.
    fleet.workers.remove(prefill);
    fleet.worker("prefill", "");
    assert_eq!(
        fleet.client.complete(&prompt(3)),
        alone(3, fleet.cache.path())
    );
}

// Lesson: 2.
/// A write into a dead worker's pool ends nowhere, and its blocks are freed when it is over.
#[test]
fn a_receiver_killed_mid_write_costs_its_sender_no_block() {
    let Some(mut fleet) = CudaFleet::new(&[]) else {
        return;
    };
    let prefill = fleet.worker("prefill", "ipc_wait@11");
    let decode = fleet.worker("decode", "");
    let request = prompt(3);
    let answered = std::thread::scope(|scope| {
        let client = harness::HttpClient::new(&fleet.address);
        let handle = scope.spawn(move || client.complete(&request));
        fleet.wait_for_log(prefill, "a copy waits for the end of process");
        let mut killed = fleet.workers.remove(decode);
        killed.signal("KILL");
        killed.wait();
        fleet.worker("decode", "");
        handle.join().expect("an answer")
    });
    assert_eq!(answered, alone(3, fleet.cache.path()));
    let port = fleet.metrics_client(prefill);
    wait_until_blocks_are_free(&port);
}

/// The GPU of one of two workers fails in mid-stream: the worker reports it and ends, and its
/// streams continue on the other one at the same token.
#[test]
fn a_failed_gpu_ends_its_worker_and_no_stream() {
    let cache = tempfile::tempdir().expect("a temporary folder");
    let folder = harness::root().join("testdata/llama3");
    let model = folder.to_str().expect("a readable path");
    let mut router = harness::CleaveProcess::start(&["router", "--listen", "127.0.0.1:0"]);
    let address = router.address();
    let worker = |device: &str, faults: &str, max_num_seqs: &str| {
        let mut arguments = vec!["worker", "--leg", "both", "--router", &address];
        arguments.extend(["--max-num-seqs", max_num_seqs]);
        arguments.extend([
            "--kv-cache",
            "4MiB",
            "--no-prefix-cache",
            "--metrics-listen",
            "127.0.0.1:0",
        ]);
        arguments.extend(["--device", device, "--dtype", "f32", "--model", model]);
        let mut command = cleave_on_emulator(&arguments, cache.path())?;
        command
            .env("CLEAVE_STANDIN_DEVICES", "2")
            .env("CLEAVE_STANDIN_FAULTS", faults);
        Some(harness::CleaveProcess::spawn(command))
    };
    // The embedding kernel runs once a step: 600 is past the steps of a worker's calibration. Each
    // worker has a device of its own, and the sound one has one slot, so that the other gets
    // requests, whatever prices the two measured.
    let failing = "launch:embed_f32@600";
    let (Some(_sound), Some(mut failing)) =
        (worker("cuda:1", "", "1"), worker("cuda:0", failing, "8"))
    else {
        return;
    };
    let client = harness::HttpClient::new(&address);
    client.wait_ready();
    harness::wait_for("two workers", || {
        (client.metric("cleave_workers", &[]) >= 2.0).then_some(())
    });
    // More concurrent requests than the sound worker has slots.
    let bodies = [3, 4, 5, 6, 7, 8, 9, 10].map(|first| {
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
    while !failing.logs().contains("device lost") {
        assert!(rounds < 60, "the fault never struck: {}", failing.logs());
        assert_eq!(round(), first, "round {rounds}");
        rounds += 1;
    }
    let logs = failing.logs();
    assert!(logs.contains("CUDA_ERROR_LAUNCH_FAILED"), "{logs}");
    assert!(logs.contains("start it again"), "{logs}");
    assert!(!failing.wait().success(), "whoever starts it again is told");
    assert_eq!(round(), first, "the other worker has them all");
}
