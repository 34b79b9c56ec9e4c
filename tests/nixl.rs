//! Hand-offs over NIXL, as between hosts. `CLEAVE_TEST_NIXL` names the library; without it the
//! tests are skipped. UCX carries the bytes over TCP or shared memory here, and over network cards
//! elsewhere.

#![allow(clippy::print_stdout)]

use crate::harness::{self, CleaveProcess, HttpClient, wait_for};
use serde_json::{Value, json};
use std::path::{Path, PathBuf};

/// Tokens of a prompt: several blocks, the last one not full.
const PROMPT_LEN: u32 = 157;

fn library() -> Option<PathBuf> {
    let library = std::env::var_os("CLEAVE_TEST_NIXL").map(PathBuf::from);
    if library.is_none() {
        println!("SKIPPED: CLEAVE_TEST_NIXL names no NIXL library (scripts/install/nixl.sh)");
    }
    library
}

/// A router and workers that treat each other as on different hosts.
struct NixlFleet {
    _router: CleaveProcess,
    workers: Vec<CleaveProcess>,
    client: HttpClient,
    address: String,
    tls: &'static str,
    /// Value of `--kv-transport` of the workers.
    transports: &'static str,
}

impl NixlFleet {
    fn new(tls: &'static str) -> Self {
        let mut arguments = vec!["router", "--listen", "127.0.0.1:0", "--placement", "split"];
        arguments.extend(["--router-mode", "load", "--migration-limit", "9"]);
        let mut router = CleaveProcess::start(&arguments);
        let address = router.address();
        Self {
            client: HttpClient::new(&address),
            _router: router,
            workers: Vec::new(),
            address,
            tls,
            transports: "nixl",
        }
    }

    /// Starts a worker, and waits until it has joined; gives its number.
    fn worker(&mut self, leg: &str, library: &Path) -> usize {
        let name = format!("{leg}-{}", self.workers.len());
        let mut arguments = vec!["worker", "--leg", leg, "--router", &self.address];
        arguments.extend(["--threads", "1", "--kv-cache", "32MiB", "--name", &name]);
        arguments.extend(["--calibrate", "0", "--metrics-listen", "127.0.0.1:0"]);
        arguments.extend(["--kv-transport", self.transports, "--nixl-library"]);
        arguments.push(library.to_str().expect("a readable path"));
        let mut command = harness::cleave(&arguments);
        command.env("UCX_TLS", self.tls);
        if self.tls.is_empty() {
            command.env_remove("UCX_TLS");
        }
        self.workers.push(CleaveProcess::spawn(command));
        let expected_count = self.workers.len() as f64;
        wait_for("worker", || {
            (self.client.metric("cleave_workers", &[]) >= expected_count).then_some(())
        });
        self.workers.len() - 1
    }

    fn logs(&self, worker: usize) -> String {
        self.workers[worker].logs()
    }

    /// A client for the worker's own port.
    fn metrics_client(&self, worker: usize) -> HttpClient {
        let address = wait_for("port of a worker", || {
            let logs = self.logs(worker);
            let (_, rest) = logs.split_once("metrics are served url=http://")?;
            Some(rest.split_once("/metrics")?.0.to_owned())
        });
        HttpClient::new(&address)
    }

    /// Kills a worker once blocks of concurrent prompts have arrived at `decode`; every answer is
    /// whole.
    fn check_answers_past_a_kill(&self, doomed: usize, decode: usize) {
        let firsts: Vec<u32> = (0..8).map(|index| 3 + index * 20).collect();
        let port = self.metrics_client(decode);
        std::thread::scope(|scope| {
            let ask = |first: &u32| {
                let body = prompt(*first);
                scope.spawn(move || HttpClient::new(&self.address).complete(&body))
            };
            let handles: Vec<_> = firsts.iter().map(ask).collect();
            wait_for("the first blocks", || {
                (port.metric("cleave_worker_handoff_bytes_total", &[]) > 0.0).then_some(())
            });
            self.workers[doomed].signal("KILL");
            for (first, handle) in firsts.iter().zip(handles) {
                let text = handle.join().expect("an answer");
                assert_eq!(text, alone(*first), "from {first}");
            }
        });
    }
}

/// Waits until no block is held, or writable by a peer.
fn wait_until_blocks_are_free(port: &HttpClient) {
    wait_for("blocks to be let go", || {
        let kinds = ["held", "reserved", "leased", "quarantined", "leaked"];
        let count = |kind: &&str| port.metric("cleave_pool_blocks", &[&format!("kind=\"{kind}\"")]);
        (kinds.iter().map(count).sum::<f64>() == 0.0).then_some(())
    });
}

fn ids(first: u32) -> Vec<u32> {
    (first..first + PROMPT_LEN).collect()
}

/// A prompt with a prefix of its own, so that every block is handed over.
fn prompt(first: u32) -> Value {
    json!({"prompt": ids(first), "max_tokens": 24, "temperature": 0, "ignore_eos": true})
}

/// The text that one worker alone gives for it.
fn alone(first: u32) -> String {
    let ids: Vec<String> = ids(first).iter().map(u32::to_string).collect();
    let ids = ids.join(",");
    let mut arguments = vec!["generate", "--json", "--max-tokens", "24", "--ignore-eos"];
    arguments.extend([
        "--threads",
        "1",
        "--temperature",
        "0",
        "--prompt-tokens",
        &ids,
    ]);
    let (status, stdout, errors) = harness::run(&arguments);
    assert!(status.success(), "{errors}");
    let answer: Value = serde_json::from_str(&stdout).expect("one JSON object");
    answer["text"].as_str().expect("a text").to_owned()
}

#[test]
fn rdma_hand_offs_change_no_token() {
    let Some(library) = library() else {
        return;
    };
    for tls in ["tcp", "posix"] {
        let mut fleet = NixlFleet::new(tls);
        let prefill = fleet.worker("prefill", &library);
        let decode = fleet.worker("decode", &library);
        for first in [3, 40] {
            let text = fleet.client.complete(&prompt(first));
            assert_eq!(text, alone(first), "from {first} over {tls}");
        }
        for worker in [prefill, decode] {
            let logs = fleet.logs(worker);
            assert!(logs.contains("transport=nixl"), "{logs}");
            let port = fleet.metrics_client(worker);
            let over = port.metric("cleave_link_transport", &["transport=\"nixl\""]);
            assert_eq!(over, 1.0, "{logs}");
            assert_eq!(
                port.metric("cleave_link_fallbacks_total", &[]),
                0.0,
                "{logs}"
            );
            wait_until_blocks_are_free(&port);
        }
        let bytes = fleet
            .metrics_client(decode)
            .metric("cleave_worker_handoff_bytes_total", &[]);
        assert!(bytes > 0.0, "nothing was handed over");
    }
}

// Lesson: 2.
/// The receiver gets no message that announced writes will not come.
#[test]
fn a_sender_killed_mid_rdma_costs_no_stream_and_no_block() {
    let Some(library) = library() else {
        return;
    };
    let mut fleet = NixlFleet::new("tcp");
    let doomed = fleet.worker("prefill", &library);
    let decode = fleet.worker("decode", &library);
    fleet.worker("prefill", &library);
    fleet.check_answers_past_a_kill(doomed, decode);
    wait_until_blocks_are_free(&fleet.metrics_client(decode));
}

// Lesson: 1.
#[test]
fn a_receiver_killed_mid_rdma_costs_no_stream_and_no_block() {
    let Some(library) = library() else {
        return;
    };
    let mut fleet = NixlFleet::new("tcp");
    let prefill = fleet.worker("prefill", &library);
    let doomed = fleet.worker("decode", &library);
    fleet.worker("decode", &library);
    fleet.check_answers_past_a_kill(doomed, doomed);
    wait_until_blocks_are_free(&fleet.metrics_client(prefill));
}

// Lesson: 18.
#[test]
fn a_missing_nixl_library_is_logged_as_a_fallback() {
    let Some(library) = library() else {
        return;
    };
    let mut fleet = NixlFleet::new("tcp");
    fleet.transports = "nixl,tcp";
    let prefill = fleet.worker("prefill", Path::new("/nowhere/libnixl_capi.so"));
    fleet.worker("decode", &library);
    assert_eq!(fleet.client.complete(&prompt(3)), alone(3));
    let logs = fleet.logs(prefill);
    assert!(logs.contains("from=nixl to=tcp"), "{logs}");
    assert!(
        logs.contains("no NIXL") && logs.contains("/nowhere/"),
        "{logs}"
    );
    let port = fleet.metrics_client(prefill);
    assert_eq!(port.metric("cleave_link_fallbacks_total", &[]), 1.0);
    let over = port.metric("cleave_link_transport", &["transport=\"tcp\""]);
    assert_eq!(over, 1.0, "{logs}");
}

/// UCX over TCP is not RDMA: the worker logs it, and no link counts as NIXL.
#[test]
fn ucx_without_a_network_card_is_not_counted_as_nixl() {
    let Some(library) = library() else {
        return;
    };
    let has_cards = Path::new("/sys/class/infiniband").exists();
    for tls in ["tcp", ""] {
        if tls.is_empty() && has_cards {
            continue;
        }
        let mut fleet = NixlFleet::new(tls);
        fleet.transports = "nixl,tcp";
        let prefill = fleet.worker("prefill", &library);
        let decode = fleet.worker("decode", &library);
        assert_eq!(fleet.client.complete(&prompt(3)), alone(3));
        for worker in [prefill, decode] {
            let logs = fleet.logs(worker);
            let port = fleet.metrics_client(worker);
            for (transport, count) in [("tcp", 1.0), ("nixl", 0.0)] {
                let label = format!("transport=\"{transport}\"");
                let over = port.metric("cleave_link_transport", &[&label]);
                assert_eq!(over, count, "{logs}");
            }
            let expected = match tls {
                "tcp" => "name one interface in UCX_NET_DEVICES",
                _ => "UCX cannot use network cards",
            };
            assert!(logs.contains(expected), "{logs}");
        }
    }
}

/// This test needs no library.
#[test]
fn a_missing_library_of_the_only_transport_is_an_error() {
    let mut arguments = vec!["worker", "--leg", "both", "--router", "127.0.0.1:1"];
    arguments.extend(["--calibrate", "0", "--kv-cache", "4MiB"]);
    arguments.extend(["--kv-transport", "nixl"]);
    arguments.extend(["--nixl-library", "/nowhere/libnixl_capi.so"]);
    let (status, _, errors) = harness::run(&arguments);
    assert!(!status.success());
    assert!(
        errors.contains("--kv-transport") && errors.contains("/nowhere/"),
        "{errors}"
    );
}

/// This test needs no library: its absence is one log line, and no fallback is counted.
#[test]
fn a_library_missing_everywhere_is_no_fallback() {
    let mut fleet = NixlFleet::new("tcp");
    fleet.transports = "nixl,tcp";
    let nowhere = Path::new("/nowhere/libnixl_capi.so");
    let prefill = fleet.worker("prefill", nowhere);
    fleet.worker("decode", nowhere);
    assert_eq!(fleet.client.complete(&prompt(3)), alone(3));
    let port = fleet.metrics_client(prefill);
    assert_eq!(port.metric("cleave_link_fallbacks_total", &[]), 0.0);
    assert_eq!(fleet.logs(prefill).matches("NIXL not loaded").count(), 1);
}
