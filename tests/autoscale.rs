//! `cleave autoscale --local` under load: a router's wanted size, and the workers started and
//! stopped for it.

use crate::harness::keda::{KedaClient, PoolAnswer};
use crate::harness::{self, CleaveProcess, HttpClient, wait_for};
use serde_json::{Value, json};
use std::path::Path;
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};

const STREAMS: usize = 12;
/// About twenty seconds of decode steps of the mock engine.
const TOKENS: u32 = 3000;

fn write_policy(path: &Path, decode_min: u32, idle_after: &str) {
    write_policy_with(path, decode_min, idle_after, "2s");
}

fn write_policy_with(path: &Path, decode_min: u32, idle_after: &str, down_after: &str) {
    let text = format!(
        "classes:
- name: only
scaling:
  devices_max: 5
  idle_after: {idle_after}
  start_max: 2m
  turns_max: 60
  pools:
    prefill: {{max: 2, up_after: 500ms, down_after: {down_after}}}
    decode: {{min: {decode_min}, max: 3, up_after: 500ms, down_after: {down_after}}}
"
    );
    let fresh = path.with_extension("new");
    std::fs::write(&fresh, text).expect("it can be written");
    std::fs::rename(&fresh, path).expect("it can be swapped");
}

/// Ready workers that prefill and that decode.
fn workers(client: &HttpClient) -> (usize, usize) {
    let (status, text) = client.get("/admin/workers");
    assert_eq!(status, 200, "{text}");
    let answer: Value = serde_json::from_str(&text).expect("JSON");
    let all = answer["data"].as_array().expect("a list");
    let of = |role: &str| {
        let ready = all.iter().filter(|one| one["state"] == "ready");
        ready.filter(|one| one["role"] == role).count()
    };
    (of("prefill"), of("decode"))
}

fn ask(client: &HttpClient) -> String {
    client
        .complete(&json!({"prompt": "A fleet is", "max_tokens": 20, "ignore_eos": true, "seed": 7}))
}

/// Checks that `top` shows three decode workers, as wanted.
fn assert_shown(address: &str) {
    let url = format!("http://{address}");
    let (status, text, errors) = harness::run(&["top", "--url", &url, "--once", "--json"]);
    assert!(status.success(), "{errors}");
    let board: Value = serde_json::from_str(&text).expect("one line of JSON");
    let scaling = &board["scaling"];
    let pools = scaling["pools"].as_array().expect("pools");
    let decode = pools.iter().find(|pool| pool["pool"] == "decode");
    let decode = decode.expect("the decode pool");
    let numbers = [&scaling["advisory"], &decode["workers"], &decode["wanted"]];
    assert_eq!(numbers, [&json!(false), &json!(3), &json!(3)], "{scaling}");
    let steps = scaling["recent"].as_array().expect("changes of mind");
    let grown = |step: &Value| step["pool"] == "decode" && step["to"] == 3;
    assert!(steps.iter().any(grown), "{scaling}");
}

/// Running sequences of each ready decode worker.
fn streams_of_decode(client: &HttpClient) -> Vec<u64> {
    let (_, text) = client.get("/admin/workers");
    let answer: Value = serde_json::from_str(&text).expect("JSON");
    let all = answer["data"].as_array().expect("a list").iter();
    let ready = all.filter(|one| one["state"] == "ready");
    ready
        .filter(|one| one["role"] == "decode")
        .map(|one| one["load"]["sequences_running"].as_u64().expect("a number"))
        .collect()
}

/// The text of a stream, and its finish reason.
fn read(events: harness::StreamedEvents, began: &AtomicUsize) -> (String, String) {
    let (mut text, mut reason) = (String::new(), String::new());
    for event in events {
        if event == "[DONE]" {
            return (text, reason);
        }
        let event: Value = serde_json::from_str(&event).expect("JSON");
        let choice = &event["choices"][0];
        if text.is_empty() {
            began.fetch_add(1, Ordering::SeqCst);
        }
        text += choice["text"].as_str().unwrap_or_default();
        reason = choice["finish_reason"]
            .as_str()
            .unwrap_or(&reason)
            .to_owned();
    }
    panic!("a stream broke off after {} letters", text.len());
}

/// Shrinks three decode workers to one while each has streams; all streams must end as they should.
fn shrink_under_streams(client: &Arc<HttpClient>, policy: &Path) {
    write_policy(policy, 3, "10m");
    wait_for("three decode workers", || {
        (workers(client).1 == 3).then_some(())
    });
    let body = json!({
        "prompt": "A stream is", "max_tokens": TOKENS, "ignore_eos": true, "seed": 7, "stream": true,
        "temperature": 1.0,
    });
    let began = Arc::new(AtomicUsize::new(0));
    let start = || {
        let (client, body, began) = (Arc::clone(client), body.clone(), Arc::clone(&began));
        std::thread::spawn(move || read(client.stream("/v1/completions", &body), &began))
    };
    let mut readers: Vec<_> = (0..STREAMS).map(|_| start()).collect();
    wait_for("first tokens", || {
        (began.load(Ordering::SeqCst) == STREAMS).then_some(())
    });
    // One worker may have been given all streams, and those may end before the others have some, so
    // more streams start until each worker has some to move.
    wait_for("a stream on every decode worker", || {
        let everywhere = streams_of_decode(client).iter().all(|count| *count > 0);
        let unfinished = readers.iter().filter(|reader| !reader.is_finished());
        if !everywhere && unfinished.count() < 4 * STREAMS {
            readers.push(start());
        }
        everywhere.then_some(())
    });
    write_policy(policy, 1, "10m");
    wait_for("fewer decode workers", || {
        (workers(client).1 == 1).then_some(())
    });
    let answers: Vec<_> = readers
        .into_iter()
        .map(|reader| reader.join().expect("a whole stream"))
        .collect();
    for (text, reason) in &answers {
        assert_eq!(reason, "length");
        assert!(*text == answers[0].0, "one of the streams had other tokens");
    }
}

// Invariant: I41.
// Lesson: 27.
#[test]
fn scaling_to_zero_and_back_loses_no_stream() {
    let folder = tempfile::tempdir().expect("a folder");
    let policy = folder.path().join("policy.yaml");
    write_policy(&policy, 0, "10m");
    let path = policy.to_str().expect("UTF-8");
    let mut router = CleaveProcess::start(&["router", "--listen", "127.0.0.1:0", "--policy", path]);
    let address = router.address();
    let client = Arc::new(HttpClient::new(&address));
    let mut local = CleaveProcess::start(&[
        "autoscale",
        "--local",
        "--router",
        &address,
        "--",
        "--engine",
        "mock",
    ]);
    // No worker ever brought a tokenizer: this request makes the first workers start.
    assert_eq!(client.get("/ready").0, 200);
    let first = ask(&client);
    wait_for("workers of both legs", || {
        let (prefill, decode) = workers(&client);
        (prefill >= 1 && decode >= 1).then_some(())
    });
    // The model has series from the first decision about it, which may follow its first workers.
    wait_for("a wanted decode worker", || {
        let wanted = client.metric("cleave_workers_wanted", &["pool=\"decode\""]);
        (wanted >= 1.0).then_some(())
    });

    write_policy(&policy, 3, "10m");
    wait_for("third decode worker", || {
        (workers(&client).1 == 3).then_some(())
    });
    assert_shown(&address);
    // On a slow machine the streams of leaving workers may end before they have to move, so the
    // test tries again.
    let is_moved = (0..4).any(|_| {
        shrink_under_streams(&client, &policy);
        client.metric("cleave_moves_total", &[]) > 0.0
    });
    assert!(is_moved, "no stream had to move");

    // Without requests `idle_after` counts alone.
    write_policy_with(&policy, 0, "1s", "60m");
    wait_for("empty fleet", || (workers(&client) == (0, 0)).then_some(()));
    assert_eq!(ask(&client), first, "the same question, from nothing");
    local.signal("TERM");
    assert!(local.wait().success(), "{}", local.logs());
    router.signal("TERM");
    assert!(router.wait().success(), "{}", router.logs());
    let logs = router.logs();
    assert!(logs.contains("INFO worker left"), "{logs}");
    assert!(!logs.contains("worker lost"), "each drained: {logs}");
}

/// The answer of both routers, once they agree and it `fits`.
fn wait_for_agreement(
    condition: &str,
    routers: &mut [KedaClient; 2],
    fits: impl Fn(&[PoolAnswer]) -> bool,
) -> Vec<PoolAnswer> {
    wait_for(condition, || {
        let [one, other] = routers.each_mut().map(|router| router.pools().ok());
        one.filter(|answer| Some(answer) == other.as_ref() && fits(answer))
    })
}

/// Two routers over the same workers, of which only one gets requests: the other learns of them
/// through the workers.
fn routers_answer_alike(router_index: usize) {
    let folder = tempfile::tempdir().expect("a folder");
    let policy = folder.path().join("policy.yaml");
    write_policy(&policy, 0, "1s");
    let path = policy.to_str().expect("UTF-8");
    let start = || CleaveProcess::start(&["router", "--listen", "127.0.0.1:0", "--policy", path]);
    let mut processes = [start(), start()];
    let addresses = processes.each_mut().map(CleaveProcess::address);
    let clients = addresses.each_ref().map(|address| HttpClient::new(address));
    let mut routers = addresses.each_ref().map(|address| KedaClient::new(address));
    let both = addresses.join(",");
    let worker = |leg: &str| {
        CleaveProcess::start(&[
            "worker", "--leg", leg, "--router", &both, "--engine", "mock",
        ])
    };
    let _workers = [worker("prefill"), worker("decode")];
    for client in &clients {
        client.wait_ready();
        wait_for("both workers", || (workers(client) == (1, 1)).then_some(()));
    }
    let no_demand = vec![(false, 0); 3];
    wait_for_agreement("fleet of nobody", &mut routers, |answer| {
        answer == no_demand
    });
    let (client, began) = (&clients[router_index], AtomicUsize::new(0));
    std::thread::scope(|scope| {
        for _ in 0..STREAMS {
            scope.spawn(|| {
                let body = json!({
                    "prompt": "A stream is", "max_tokens": 500, "ignore_eos": true, "stream": true,
                });
                read(client.stream("/v1/completions", &body), &began)
            });
        }
    });
    let answer = wait_for_agreement("fleet that is needed", &mut routers, |answer| {
        answer[0].0 && answer[1].0
    });
    assert!(answer[0].1 >= 1 && answer[1].1 >= 1, "{answer:?}");
    assert_eq!(answer[2], (false, 0), "there is no such pool");
}

#[test]
fn two_routers_give_an_autoscaler_one_answer() {
    // The router with the smaller name decides; the other one repeats its decision.
    std::thread::scope(|scope| {
        for router_index in [0, 1] {
            scope.spawn(move || routers_answer_alike(router_index));
        }
    });
}

// Invariant: I42.
#[test]
fn demand_at_one_router_is_known_to_its_peers() {
    let folder = tempfile::tempdir().expect("a folder");
    let policy = folder.path().join("policy.yaml");
    write_policy(&policy, 0, "10m");
    let path = policy.to_str().expect("UTF-8");
    let start = |more: &[&str]| {
        let words = ["router", "--listen", "127.0.0.1:0", "--policy", path];
        CleaveProcess::start(&[&words, more].concat())
    };
    let mut first = start(&[]);
    let here = first.address();
    let mut second = start(&["--fellow-routers", &here]);
    let second_address = second.address();
    // The two routers share no worker: there is none. The autoscaler asks the second router only.
    let both = format!("{second_address},{here}");
    let client = HttpClient::new(&here);
    let waits = std::thread::spawn(move || ask(&client));
    let second_client = HttpClient::new(&second_address);
    wait_for("demand at the other router", || {
        (second_client.metric("cleave_workers_wanted", &["pool=\"decode\""]) >= 1.0).then_some(())
    });
    let mut workers: Vec<_> = ["prefill", "decode"]
        .map(|leg| {
            CleaveProcess::start(&[
                "worker", "--engine", "mock", "--leg", leg, "--router", &both,
            ])
        })
        .into();
    assert!(!waits.join().expect("an answer").is_empty());
    for process in workers.iter_mut().chain([&mut first, &mut second]) {
        process.signal("TERM");
        assert!(process.wait().success(), "{}", process.logs());
    }
}
