//! Processes that stop or are lost: a signal, a kill, idle workers that leave.

use crate::harness::{CleaveProcess, HttpClient, wait_for};
use crate::serving::{fleet, requests, serve};
use serde_json::json;

#[test]
fn lost_workers_fail_no_request() {
    let mut fleet = fleet();
    let body = &requests()[0];
    let text = fleet.client.complete(body);
    fleet.prefill[0].signal("KILL");
    fleet.prefill[0].wait();
    for _ in 0..8 {
        assert_eq!(fleet.client.complete(body), text);
    }
    fleet.decode[1].signal("KILL");
    fleet.decode[1].wait();
    wait_for("two workers", || {
        (fleet.client.metric("cleave_workers", &[]) == 2.0).then_some(())
    });
    assert_eq!(fleet.client.complete(body), text);
    let logs = fleet.router.logs();
    let parts = ["WARN worker lost", "name=", "reason="];
    let has = |line: &str| parts.map(|part| line.contains(part));
    assert!(
        logs.lines().any(|line| has(line) == [true; 3]),
        "a loss is logged with the worker's name and the reason: {logs}"
    );
}

/// A process that ends at once takes what it has not yet written to its sockets with it.
#[test]
fn idle_workers_that_stop_have_left_and_are_not_lost() {
    let mut router = CleaveProcess::start(&["router", "--listen", "127.0.0.1:0"]);
    let address = router.address();
    let client = HttpClient::new(&address);
    let mut workers: Vec<CleaveProcess> = (0..8)
        .map(|number| {
            let name = format!("w{number}");
            let worker = [
                "worker", "--leg", "both", "--router", &address, "--name", &name,
            ];
            let engine = ["--engine", "mock", "--metrics-listen", "127.0.0.1:0"];
            CleaveProcess::start(&[&worker[..], &engine].concat())
        })
        .collect();
    let connected = |count: f64| {
        wait_for("the workers", || {
            (client.metric("cleave_workers", &[]) == count).then_some(())
        });
    };
    connected(8.0);
    for worker in &workers {
        worker.signal("TERM");
    }
    for worker in &mut workers {
        assert!(worker.wait().success(), "{}", worker.logs());
    }
    connected(0.0);
    let logs = router.logs();
    assert_eq!(logs.matches("INFO worker left").count(), 8, "{logs}");
    assert!(!logs.contains("worker lost"), "{logs}");
}

#[test]
fn sigterm_and_sigint_let_streams_end() {
    for signal in ["TERM", "INT"] {
        let (mut process, client) = serve(&[]);
        let body = json!({"prompt": "A stream", "max_tokens": 300, "temperature": 0, "ignore_eos": true, "stream": true});
        let mut events = client.stream("/v1/completions", &body);
        events.next().expect("a first event");
        process.signal(signal);
        assert_eq!(
            events.last().as_deref(),
            Some("[DONE]"),
            "SIG{signal} drains"
        );
        assert!(process.wait().success());
    }
}
