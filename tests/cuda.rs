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

/// A disk that fails, or whoever writes there, must not keep a program from starting.
#[test]
fn a_damaged_file_of_compiled_kernels_is_compiled_again() {
    let cache = tempfile::tempdir().expect("a temporary folder");
    let folder = harness::root().join("testdata/llama3");
    let model = folder.to_str().expect("a readable path");
    let arguments = ["generate", "--json", "--device", "cuda", "--model", model];
    let arguments = [
        &arguments[..],
        &["--max-tokens", "4", "--prompt-tokens", "3,4,5"],
    ]
    .concat();
    let Some(mut command) = on_stand_in(&arguments, cache.path()) else {
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
        let mut command = on_stand_in(&arguments, cache.path()).expect("it ran before");
        let output = command.output().expect("cleave starts");
        let err = String::from_utf8_lossy(&output.stderr);
        assert!(output.status.success(), "{err}");
        let answer: Value = serde_json::from_slice(&output.stdout).expect("one JSON object");
        assert_eq!(answer["tokens"], expected);
        assert!(err.contains("compiled again"), "{err}");
        assert_eq!(std::fs::read(&files[0]).expect("a readable file"), good);
    }
}

/// A prefill and a decode worker on one GPU; each request is handed over; answers are those of one process alone.
#[test]
fn a_stream_handed_over_between_two_workers_of_a_gpu_is_the_one_of_a_single_worker() {
    let folder = harness::root().join("testdata/llama3");
    handed_over_within(&folder, &[]);
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
    handed_over_within(&out, &["--kv-cache-dtype", "fp8"]);
}

fn handed_over_within(folder: &Path, flags: &[&str]) {
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

/// Legs that share a GPU keep to multiprocessors of their own, and answer as before.
#[test]
fn legs_of_a_gpu_divide_its_multiprocessors() {
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
        let mut command = on_stand_in(&arguments, cache.path())?;
        command.env("CLEAVE_STANDIN_MULTIPROCESSORS", "12");
        Some(command)
    };
    let Some(command) = divided("0.3") else {
        return;
    };
    let mut server = harness::Process::spawn(command);
    let client = harness::Client::new(&server.address());
    assert_eq!(client.complete(&prompt(3)), alone(3, cache.path()));
    let logs = server.logs();
    // 3.6 of 12, and what is kept apart here are pairs.
    for (worker, part) in [("decode-0: ", "4 of 12"), ("prefill-0: ", "8 of 12")] {
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

/// Kernels of a prompt have a block on each of their multiprocessors until they end, so decode steps need some of their own.
#[test]
fn legs_of_a_gpu_divide_it_unless_told_not_to() {
    let cache = tempfile::tempdir().expect("a temporary folder");
    let folder = harness::root().join("testdata/llama3");
    let model = folder.to_str().expect("a readable path");
    let started = |flags: &[&str]| {
        let mut arguments = vec!["serve", "--port", "0", "--prefill", "1", "--decode", "1"];
        arguments.extend(["--kv-cache", "4MiB", "--calibrate", "0"]);
        arguments.extend(["--device", "cuda", "--model", model]);
        arguments.extend(flags);
        let mut command = on_stand_in(&arguments, cache.path())?;
        command.env("CLEAVE_STANDIN_MULTIPROCESSORS", "20");
        let mut server = harness::Process::spawn(command);
        server.address();
        Some(server.logs())
    };
    let Some(logs) = started(&[]) else {
        return;
    };
    for (worker, part) in [("decode-0: ", "8 of 20"), ("prefill-0: ", "12 of 20")] {
        let mut lines = logs.lines().filter(|line| line.contains(worker));
        assert!(lines.any(|line| line.contains(part)), "{logs}");
    }
    // Neither takes what the other computes with, so both are placed on.
    let shared = "compute on the same hardware";
    assert!(!logs.contains(shared), "{logs}");
    for off in ["none", "0"] {
        let logs = started(&["--gpu-decode-share", off]).expect("it ran before");
        assert!(!logs.contains("of 20 multiprocessors"), "{off}: {logs}");
        assert!(logs.contains(shared), "{off}: {logs}");
    }
}

/// The bundled checkpoint's weights are 10.3 MiB, and each leg needs two beside them.
#[test]
fn legs_of_a_gpu_have_its_weights_once() {
    let cache = tempfile::tempdir().expect("a temporary folder");
    let mut arguments = vec!["serve", "--port", "0", "--prefill", "1", "--decode", "1"];
    arguments.extend(["--placement", "split", "--calibrate", "0"]);
    arguments.extend(["--device", "cuda", "--kv-cache", "1MiB"]);
    arguments.extend(["--max-num-seqs", "2", "--max-num-batched-tokens", "32"]);
    let Some(mut command) = on_stand_in(&arguments, cache.path()) else {
        return;
    };
    command.env("CLEAVE_STANDIN_MEMORY_MIB", "20");
    let mut server = harness::Process::spawn(command);
    server.address();
}

/// A router and workers of their own processes, all on the stand-in.
struct Fleet {
    router: harness::Process,
    workers: Vec<harness::Process>,
    client: harness::Client,
    cache: tempfile::TempDir,
    address: String,
    /// Of every worker.
    flags: Vec<String>,
    /// Of the devices of workers to come, if it is not the stand-in's.
    capability: Option<String>,
}

impl Fleet {
    /// No worker yet; `None` where nothing can be emulated.
    fn new(more: &[&str]) -> Option<Self> {
        cleave_emulator::library(Variant::Plain)?;
        let mut arguments = vec!["router", "--listen", "127.0.0.1:0", "--placement", "split"];
        arguments.extend(["--router-mode", "load"]);
        arguments.extend(more);
        let mut router = harness::Process::start(&arguments);
        let address = router.address();
        Some(Self {
            client: harness::Client::new(&address),
            cache: tempfile::tempdir().expect("a temporary folder"),
            workers: Vec::new(),
            flags: Vec::new(),
            capability: None,
            router,
            address,
        })
    }

    /// Starts a worker with these faults planned, and waits until it has joined; gives its number.
    fn worker(&mut self, leg: &str, faults: &str) -> usize {
        self.worker_on("cuda:0", leg, faults)
    }

    /// As [`Fleet::worker`], on this one of two devices.
    fn worker_on(&mut self, device: &str, leg: &str, faults: &str) -> usize {
        let folder = harness::root().join("testdata/llama3");
        let model = folder.to_str().expect("a readable path").to_owned();
        let name = format!("{leg}-{}", self.workers.len());
        let mut arguments = vec!["worker", "--leg", leg, "--router", &self.address];
        arguments.extend(["--device", device, "--model", &model, "--kv-cache", "4MiB"]);
        arguments.extend(["--calibrate", "0", "--name", &name]);
        arguments.extend(["--metrics-listen", "127.0.0.1:0"]);
        arguments.extend(self.flags.iter().map(String::as_str));
        let mut command = on_stand_in(&arguments, self.cache.path()).expect("it is emulated");
        if let Some(capability) = &self.capability {
            command.env("CLEAVE_STANDIN_CAPABILITY", capability);
        }
        command
            .env("CLEAVE_STANDIN_DEVICES", "2")
            .env("CLEAVE_STANDIN_FAULTS", faults)
            // What NIXL goes over where there is no network card.
            .env("UCX_TLS", "tcp");
        self.workers.push(harness::Process::spawn(command));
        let wanted = self.workers.len() as f64;
        harness::wait_for("worker", || {
            (self.client.metric("cleave_workers", &[]) >= wanted).then_some(())
        });
        self.workers.len() - 1
    }

    fn logs(&self, worker: usize) -> String {
        self.workers[worker].logs()
    }

    /// A client for the worker's own port.
    fn port(&self, worker: usize) -> harness::Client {
        let address = harness::wait_for("port of a worker", || {
            let logs = self.logs(worker);
            let (_, rest) = logs.split_once("metrics at http://")?;
            Some(rest.split_once("/metrics")?.0.to_owned())
        });
        harness::Client::new(&address)
    }

    /// Waits until a worker's log says so.
    fn says(&self, worker: usize, what: &str) {
        harness::wait_for(what, || self.logs(worker).contains(what).then_some(()));
    }
}

/// Another GPU may round a step of its tensor cores in another way, so keys and values of one mean nothing to the other.
#[test]
fn workers_of_two_kinds_of_gpu_are_not_paired() {
    let Some(mut fleet) = Fleet::new(&[]) else {
        return;
    };
    fleet.worker_on("cuda:0", "prefill", "");
    fleet.capability = Some("8.0".to_owned());
    fleet.worker_on("cuda:1", "decode", "");
    let logs = fleet.router.logs();
    assert!(logs.contains("no worker has the fingerprint"), "{logs}");
    assert!(logs.contains("-sm90-") && logs.contains("-sm80-"), "{logs}");
    let (status, body) = fleet.client.get("/ready");
    assert_ne!(status, 200, "no pair of legs has one fingerprint: {body}");
    // Another worker of the first kind makes a pair.
    fleet.capability = None;
    fleet.worker_on("cuda:1", "decode", "");
    harness::wait_for("a pair", || {
        (fleet.client.get("/ready").0 == 200).then_some(())
    });
}

/// Their work is time-sliced, whatever share each keeps to.
#[test]
fn two_processes_on_one_gpu_are_warned_of() {
    let Some(mut fleet) = Fleet::new(&[]) else {
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
fn blocks(port: &harness::Client, kind: &str) -> f64 {
    port.metric("cleave_pool_blocks", &[&format!("kind=\"{kind}\"")])
}

/// Waits until nobody holds a block there, nor may write to one.
fn let_go(port: &harness::Client) {
    harness::wait_for("blocks to be let go", || {
        let kinds = ["held", "reserved", "leased", "quarantined", "leaked"];
        let held: f64 = kinds.iter().map(|kind| blocks(port, kind)).sum();
        (held == 0.0).then_some(())
    });
}

/// A prompt that nobody else has, so that every block of it is handed over.
fn prompt(first: u32) -> Value {
    let ids: Vec<u32> = (first..first + 57).collect();
    json!({
        "model": "llama3", "prompt": ids, "max_tokens": 12, "temperature": 0, "ignore_eos": true,
    })
}

/// What one worker alone says to such a prompt.
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
    let mut command = on_stand_in(&arguments, cache).expect("it is emulated");
    let text = answer(&mut command)["text"].clone();
    text.as_str().expect("a text").to_owned()
}

/// The sender's device copies into the receiver's pool, which verifies the bytes where they are.
#[test]
fn a_stream_handed_over_between_processes_of_a_gpu_is_the_one_of_a_single_worker() {
    handed_over_directly(["cuda:0", "cuda:0"]);
}

/// The same from one GPU of the host to another.
#[test]
fn a_stream_handed_over_between_gpus_of_a_host_is_the_one_of_a_single_worker() {
    handed_over_directly(["cuda:0", "cuda:1"]);
}

/// As from host to host: NIXL writes what left one GPU into a ring of the other's host.
#[test]
fn a_stream_handed_over_by_rdma_between_gpus_is_the_one_of_a_single_worker() {
    let Some(library) = std::env::var_os("CLEAVE_TEST_NIXL") else {
        return eprintln!("SKIPPED: CLEAVE_TEST_NIXL names no library");
    };
    let library = library.into_string().expect("a readable path");
    let flags = ["--kv-transport", "nixl", "--nixl-library", &library];
    handed_over("nixl", ["cuda:0", "cuda:1"], &flags);
}

fn handed_over_directly(devices: [&str; 2]) {
    handed_over("cuda-ipc", devices, &[]);
}

fn handed_over(transport: &str, [prefill, decode]: [&str; 2], flags: &[&str]) {
    let Some(mut fleet) = Fleet::new(&[]) else {
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
        let port = fleet.port(worker);
        let named = format!("transport=\"{transport}\"");
        let direct = port.metric("cleave_link_transport", &[&named]);
        assert_eq!(direct, 1.0, "{logs}");
        assert_eq!(port.metric("cleave_link_fallbacks_total", &[]), 0.0);
        let_go(&port);
    }
    let port = fleet.port(decode);
    let bytes = port.metric("cleave_handoff_bytes_total", &[]);
    assert!(bytes > 0.0, "nothing was handed over");
    drop(fleet.router);
}

/// A pool that cannot be opened is no reason to go without the other ways.
#[test]
fn a_pool_that_cannot_be_opened_is_told_of_and_blocks_go_another_way() {
    let Some(mut fleet) = Fleet::new(&[]) else {
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
    let port = fleet.port(prefill);
    assert_eq!(port.metric("cleave_link_fallbacks_total", &[]), 1.0);
    assert_eq!(
        port.metric("cleave_link_transport", &["transport=\"shm\""]),
        1.0
    );
}

/// The device of a prefill worker fails in the middle of a hand-off: its prompts are computed elsewhere.
#[test]
fn lesson_05_a_copy_that_failed_cost_a_stream_or_a_block() {
    let Some(mut fleet) = Fleet::new(&["--migration-limit", "9"]) else {
        return;
    };
    // Nine copies measure the link; the second block of the first prompt is the eleventh.
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
    let_go(&fleet.port(decode));
}

/// Blocks that a sender may still write to are nobody's until it is known to be dead; then they are free.
#[test]
fn lesson_02_blocks_of_a_sender_that_died_in_a_write_stayed_in_use_or_were_freed_too_early() {
    let Some(mut fleet) = Fleet::new(&["--migration-limit", "0"]) else {
        return;
    };
    // In the middle of the second block: nine copies measure the link.
    let prefill = fleet.worker("prefill", "ipc_wait@11");
    let decode = fleet.worker("decode", "");
    let port = fleet.port(decode);
    let mut body = prompt(3);
    body["stream"] = json!(true);
    let client = harness::Client::new(&fleet.address);
    let asked = std::thread::spawn(move || client.stream("/v1/completions", &body).count());
    // The write has begun, and does not end.
    fleet.says(prefill, "a copy waits for the end of process");
    assert!(blocks(&port, "reserved") > 0.0);
    assert_eq!(blocks(&port, "quarantined"), 0.0);
    // Alive, it may go on with it: neither what the router says of it nor a link that broke makes its blocks free.
    fleet.workers[prefill].signal("STOP");
    harness::wait_for("quarantine", || {
        (blocks(&port, "quarantined") > 0.0).then_some(())
    });
    fleet.says(decode, "link lost");
    assert!(blocks(&port, "quarantined") > 0.0);
    fleet.workers[prefill].signal("KILL");
    fleet.workers[prefill].wait();
    fleet.says(decode, "its process has ended");
    let_go(&port);
    drop(asked.join());
    // The pool is as good as new.
    fleet.workers.remove(prefill);
    fleet.worker("prefill", "");
    assert_eq!(
        fleet.client.complete(&prompt(3)),
        alone(3, fleet.cache.path())
    );
}

/// A write into the pool of a worker that died ends nowhere, and its blocks are let go when it is over.
#[test]
fn lesson_02_a_receiver_that_died_in_a_write_cost_its_sender_blocks() {
    let Some(mut fleet) = Fleet::new(&[]) else {
        return;
    };
    let prefill = fleet.worker("prefill", "ipc_wait@11");
    let decode = fleet.worker("decode", "");
    let request = prompt(3);
    let answered = std::thread::scope(|scope| {
        let client = harness::Client::new(&fleet.address);
        let asked = scope.spawn(move || client.complete(&request));
        fleet.says(prefill, "a copy waits for the end of process");
        let mut dead = fleet.workers.remove(decode);
        dead.signal("KILL");
        dead.wait();
        fleet.worker("decode", "");
        asked.join().expect("an answer")
    });
    assert_eq!(answered, alone(3, fleet.cache.path()));
    let port = fleet.port(prefill);
    let_go(&port);
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
    let worker = |device: &str, faults: &str, seats: &str| {
        let mut arguments = vec!["worker", "--leg", "both", "--router", &address];
        arguments.extend(["--max-num-seqs", seats]);
        arguments.extend([
            "--kv-cache",
            "4MiB",
            "--no-prefix-cache",
            "--metrics-listen",
            "127.0.0.1:0",
        ]);
        arguments.extend(["--device", device, "--dtype", "f32", "--model", model]);
        let mut command = on_stand_in(&arguments, cache.path())?;
        command
            .env("CLEAVE_STANDIN_DEVICES", "2")
            .env("CLEAVE_STANDIN_FAULTS", faults);
        Some(harness::Process::spawn(command))
    };
    // One embedding a step: more steps than a worker measures itself with before it joins. Each has a device of its
    // own, and the sound one has one seat, so that the other is asked, however fast the two found themselves.
    let sick = "launch:embed_f32@600";
    let (Some(_sound), Some(mut sick)) = (worker("cuda:1", "", "1"), worker("cuda:0", sick, "8"))
    else {
        return;
    };
    let client = harness::Client::new(&address);
    client.wait_ready();
    harness::wait_for("two workers", || {
        (client.metric("cleave_workers", &[]) >= 2.0).then_some(())
    });
    // More at once than the sound worker has seats.
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
