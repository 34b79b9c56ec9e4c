//! Workers whose blocks go over NIXL, as between hosts: `CLEAVE_TEST_NIXL` names the library, and without it nothing is
//! tried. UCX carries the bytes over TCP or over shared memory here, and by network cards elsewhere.

#![allow(clippy::print_stdout)]

mod harness;

use harness::{Client, Process, wait_for};
use serde_json::{Value, json};
use std::path::{Path, PathBuf};

/// Tokens of a prompt: several blocks, and for some one that is not full.
const PROMPT_LEN: u32 = 157;

fn library() -> Option<PathBuf> {
    let library = std::env::var_os("CLEAVE_TEST_NIXL").map(PathBuf::from);
    if library.is_none() {
        println!("SKIPPED: CLEAVE_TEST_NIXL names no NIXL library (scripts/nixl/install.sh)");
    }
    library
}

/// A router and workers that see each other as if they were on different hosts.
struct Fleet {
    _router: Process,
    workers: Vec<Process>,
    client: Client,
    address: String,
    tls: &'static str,
    /// What may carry blocks.
    transports: &'static str,
}

impl Fleet {
    fn new(tls: &'static str) -> Self {
        let mut arguments = vec!["router", "--listen", "127.0.0.1:0", "--placement", "split"];
        arguments.extend(["--router-mode", "load", "--migration-limit", "9"]);
        let mut router = Process::start(&arguments);
        let address = router.address();
        Self {
            client: Client::new(&address),
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
        self.workers.push(Process::spawn(command));
        let wanted = self.workers.len() as f64;
        wait_for("worker", || {
            (self.client.metric("cleave_workers", &[]) >= wanted).then_some(())
        });
        self.workers.len() - 1
    }

    fn logs(&self, worker: usize) -> String {
        self.workers[worker].logs()
    }

    /// A client for the worker's own port.
    fn port(&self, worker: usize) -> Client {
        let address = wait_for("port of a worker", || {
            let logs = self.logs(worker);
            let (_, rest) = logs.split_once("metrics at http://")?;
            Some(rest.split_once("/metrics")?.0.to_owned())
        });
        Client::new(&address)
    }

    /// Answers to prompts that are all under way at once; `meanwhile` runs when blocks have arrived at `decode`.
    fn answers(&self, firsts: &[u32], decode: usize, meanwhile: impl FnOnce()) -> Vec<String> {
        let port = self.port(decode);
        std::thread::scope(|scope| {
            let ask = |first: &u32| {
                let body = prompt(*first);
                scope.spawn(move || Client::new(&self.address).complete(&body))
            };
            let asked: Vec<_> = firsts.iter().map(ask).collect();
            wait_for("the first blocks", || {
                (port.metric("cleave_handoff_bytes_total", &[]) > 0.0).then_some(())
            });
            meanwhile();
            let answers = asked.into_iter().map(|asked| asked.join());
            answers.map(|answer| answer.expect("an answer")).collect()
        })
    }
}

/// Waits until nobody holds a block there, nor may write to one.
fn let_go(port: &Client) {
    wait_for("blocks to be let go", || {
        let kinds = ["held", "reserved", "leased", "quarantined", "leaked"];
        let count = |kind: &&str| port.metric("cleave_pool_blocks", &[&format!("kind=\"{kind}\"")]);
        (kinds.iter().map(count).sum::<f64>() == 0.0).then_some(())
    });
}

fn ids(first: u32) -> Vec<u32> {
    (first..first + PROMPT_LEN).collect()
}

/// A prompt that nobody else has, so that every block of it is handed over.
fn prompt(first: u32) -> Value {
    json!({"prompt": ids(first), "max_tokens": 24, "temperature": 0, "ignore_eos": true})
}

/// What one worker alone says to it.
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
    let (status, said, errors) = harness::run(&arguments);
    assert!(status.success(), "{errors}");
    let answer: Value = serde_json::from_str(&said).expect("one JSON object");
    answer["text"].as_str().expect("a text").to_owned()
}

#[test]
fn a_stream_handed_over_by_rdma_is_the_one_of_a_single_worker() {
    let Some(library) = library() else {
        return;
    };
    for tls in ["tcp", "posix"] {
        let mut fleet = Fleet::new(tls);
        let prefill = fleet.worker("prefill", &library);
        let decode = fleet.worker("decode", &library);
        for first in [3, 40] {
            let text = fleet.client.complete(&prompt(first));
            assert_eq!(text, alone(first), "from {first} over {tls}");
        }
        for worker in [prefill, decode] {
            let logs = fleet.logs(worker);
            assert!(logs.contains("transport=nixl"), "{logs}");
            let port = fleet.port(worker);
            let over = port.metric("cleave_link_transport", &["transport=\"nixl\""]);
            assert_eq!(over, 1.0, "{logs}");
            assert_eq!(
                port.metric("cleave_link_fallbacks_total", &[]),
                0.0,
                "{logs}"
            );
            let_go(&port);
        }
        let bytes = fleet.port(decode).metric("cleave_handoff_bytes_total", &[]);
        assert!(bytes > 0.0, "nothing was handed over");
    }
}

/// Nobody tells the receiver that what was announced will not be written.
#[test]
fn lesson_02_a_sender_killed_while_it_writes_costs_no_stream_and_no_block() {
    let Some(library) = library() else {
        return;
    };
    let mut fleet = Fleet::new("tcp");
    let doomed = fleet.worker("prefill", &library);
    let decode = fleet.worker("decode", &library);
    fleet.worker("prefill", &library);
    let firsts: Vec<u32> = (0..8).map(|index| 3 + index * 20).collect();
    let answers = fleet.answers(&firsts, decode, || fleet.workers[doomed].signal("KILL"));
    for (first, text) in firsts.iter().zip(answers) {
        assert_eq!(text, alone(*first), "from {first}");
    }
    let_go(&fleet.port(decode));
}

#[test]
fn lesson_01_a_receiver_killed_while_it_is_written_to_costs_no_stream_and_no_block() {
    let Some(library) = library() else {
        return;
    };
    let mut fleet = Fleet::new("tcp");
    let prefill = fleet.worker("prefill", &library);
    let doomed = fleet.worker("decode", &library);
    fleet.worker("decode", &library);
    let firsts: Vec<u32> = (0..8).map(|index| 3 + index * 20).collect();
    let answers = fleet.answers(&firsts, doomed, || fleet.workers[doomed].signal("KILL"));
    for (first, text) in firsts.iter().zip(answers) {
        assert_eq!(text, alone(*first), "from {first}");
    }
    let_go(&fleet.port(prefill));
}

#[test]
fn lesson_18_a_library_that_the_sender_lacks_is_told_and_counted() {
    let Some(library) = library() else {
        return;
    };
    let mut fleet = Fleet::new("tcp");
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
    let port = fleet.port(prefill);
    assert_eq!(port.metric("cleave_link_fallbacks_total", &[]), 1.0);
    let over = port.metric("cleave_link_transport", &["transport=\"tcp\""]);
    assert_eq!(over, 1.0, "{logs}");
}

/// UCX over TCP is not what a user of RDMA asks for: it is said, and nothing is counted as NIXL.
#[test]
fn what_no_card_carries_was_counted_as_rdma() {
    let Some(library) = library() else {
        return;
    };
    let has_cards = Path::new("/sys/class/infiniband").exists();
    for tls in ["tcp", ""] {
        if tls.is_empty() && has_cards {
            continue;
        }
        let mut fleet = Fleet::new(tls);
        fleet.transports = "nixl,tcp";
        let prefill = fleet.worker("prefill", &library);
        let decode = fleet.worker("decode", &library);
        assert_eq!(fleet.client.complete(&prompt(3)), alone(3));
        for worker in [prefill, decode] {
            let logs = fleet.logs(worker);
            let port = fleet.port(worker);
            for (transport, count) in [("tcp", 1.0), ("nixl", 0.0)] {
                let label = format!("transport=\"{transport}\"");
                let over = port.metric("cleave_link_transport", &[&label]);
                assert_eq!(over, count, "{logs}");
            }
            let says = match tls {
                "tcp" => "name one in UCX_NET_DEVICES",
                _ => "UCX cannot use network cards",
            };
            assert!(logs.contains(says), "{logs}");
        }
    }
}

/// Needs no library.
#[test]
fn where_nothing_else_may_carry_blocks_a_missing_library_is_an_error() {
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

/// Nor does this: absent, it is said in one line, and nothing falls back.
#[test]
fn without_the_library_anywhere_nothing_is_worse_than_it_could_be() {
    let mut fleet = Fleet::new("tcp");
    fleet.transports = "nixl,tcp";
    let nowhere = Path::new("/nowhere/libnixl_capi.so");
    let prefill = fleet.worker("prefill", nowhere);
    fleet.worker("decode", nowhere);
    assert_eq!(fleet.client.complete(&prompt(3)), alone(3));
    let port = fleet.port(prefill);
    assert_eq!(port.metric("cleave_link_fallbacks_total", &[]), 0.0);
    assert_eq!(fleet.logs(prefill).matches("no NIXL").count(), 1);
}
