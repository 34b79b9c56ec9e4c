//! A router and workers over real sockets, in one process and apart, with an engine whose tokens
//! need the KV that was handed over.

mod failover;
mod hash_chain;
mod loading;
mod names;
mod policy;
mod secure;
mod states;
mod tier;

use cleave_api::{FlightEvent, FlightStream, Frontend, ServingReadiness};
use cleave_domain::{
    Ending, Failure, FinishReason, Refusal, Request, Role, TapeRecord, TokenId, TokenUsage,
};
use cleave_node::{
    FleetModel, FleetNode, RouterNode, RouterOptions, RunningFleet, RunningRouter, RunningWorker,
    WorkerNode,
};
use cleave_router::{PoolInput, PoolOutput, RouterLimits, RouterPools};
use cleave_sched::{WorkerBrain, WorkerInput, WorkerLimits, WorkerOutput};
use cleave_telemetry::TraceOptions;
use cleave_testkit::build;
use cleave_text::ModelFiles;
use cleave_worker::WorkerOptions;
use futures::StreamExt;
use hash_chain::{BLOCK_BYTES, BLOCKS, HashChainEngine, StepGate, expected};
use std::path::Path;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::{TcpListener, TcpStream};
use tokio::time::timeout;

const TEST_WAIT_MAX: Duration = Duration::from_secs(60);

fn files() -> ModelFiles {
    let folder = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../testdata/llama3");
    ModelFiles::read(&folder).unwrap()
}

fn prompt(salt: u32, count: u32) -> Vec<TokenId> {
    (0..count).map(|i| (i * 7 + salt * 131) % 997).collect()
}

fn request(prompt: &[TokenId], max_tokens: u32) -> Request {
    build::request(prompt.iter().copied(), max_tokens)
}

async fn collect(mut stream: FlightStream) -> (Vec<TokenId>, Ending, TokenUsage) {
    let all = async {
        let mut tokens = Vec::new();
        loop {
            match stream.next().await.expect("a stream ends with its ending") {
                FlightEvent::Token(emission) => {
                    assert_eq!(emission.index as usize, tokens.len());
                    tokens.push(emission.sampled.token);
                }
                FlightEvent::Ended { ending, usage, .. } => {
                    assert!(stream.next().await.is_none());
                    return (tokens, ending, usage);
                }
            }
        }
    };
    timeout(TEST_WAIT_MAX, all)
        .await
        .expect("an ending in time")
}

const DONE: Ending = Ending::Done {
    reason: FinishReason::Length,
};

async fn check(frontend: &Arc<dyn Frontend>, prompt: &[TokenId], count: u32) {
    let stream = frontend.submit(request(prompt, count));
    let (tokens, ending, usage) = collect(stream).await;
    assert_eq!(ending, DONE);
    assert_eq!(tokens, expected(prompt, count as usize));
    assert_eq!(usage.prompt_tokens as usize, prompt.len());
    assert_eq!(usage.output_tokens, count);
}

async fn serve(roles: &[Role]) -> RunningFleet {
    let gates: Vec<StepGate> = roles.iter().map(|_| StepGate::new()).collect();
    serve_gated(roles, &gates).await
}

async fn serve_gated(roles: &[Role], gates: &[StepGate]) -> RunningFleet {
    let worker = |(i, role): (usize, &Role)| {
        let engine: Box<dyn cleave_engine::Engine> = Box::new(HashChainEngine::new(&gates[i]));
        (WorkerOptions::new(format!("{role}-{i}"), *role), engine)
    };
    let serve = FleetNode {
        listen: "127.0.0.1:0".into(),
        router: RouterOptions::default(),
        models: vec![FleetModel {
            workers: roles.iter().enumerate().map(worker).collect(),
            files: files(),
        }],
    };
    let running = serve.start().await.unwrap();
    timeout(TEST_WAIT_MAX, running.ready()).await.unwrap();
    running
}

async fn router_at(listen: &str, options: RouterOptions) -> RunningRouter {
    let node = RouterNode {
        listen: listen.into(),
        options,
        picker: None,
    };
    node.start().await.unwrap()
}

async fn router_with(options: RouterOptions) -> RunningRouter {
    router_at("127.0.0.1:0", options).await
}

/// A router at a free port, and its address.
async fn router() -> (RunningRouter, String) {
    let router = router_with(RouterOptions::default()).await;
    let address = router.address().to_string();
    (router, address)
}

/// Drains the workers one after the other, and then the router.
async fn end(router: RunningRouter, workers: [RunningWorker; 2]) {
    for worker in workers {
        worker.drain(TEST_WAIT_MAX).await;
    }
    router.drain(TEST_WAIT_MAX).await;
}

async fn worker(name: &str, role: Role, router: &str) -> (RunningWorker, StepGate) {
    let gate = StepGate::new();
    let node = worker_node(name, role, router, &gate);
    let running = node.start().await.unwrap();
    timeout(TEST_WAIT_MAX, running.ready()).await.unwrap();
    (running, gate)
}

fn worker_node(name: &str, role: Role, router: &str, gate: &StepGate) -> WorkerNode {
    WorkerNode {
        options: WorkerOptions::new(name, role),
        engine: Box::new(HashChainEngine::new(gate)),
        files: files(),
        routers: vec![router.to_owned()],
        data_listen: "127.0.0.1:0".into(),
        data_address: None,
        metrics_listen: Some("127.0.0.1:0".into()),
        traces: TraceOptions::default(),
    }
}

/// Lets everything else run until this holds.
async fn until(holds: impl Fn() -> bool) {
    let wait = async {
        while !holds() {
            tokio::task::yield_now().await;
        }
    };
    timeout(TEST_WAIT_MAX, wait)
        .await
        .expect("it holds in time");
}

/// The value of a series, summed over its labels.
fn metric(text: &str, name: &str, label: &str) -> f64 {
    let lines = text.lines().filter(|line| !line.starts_with('#'));
    let matching = lines.filter(|line| {
        line.strip_prefix(name)
            .is_some_and(|rest| rest.starts_with(['{', ' ']) && rest.contains(label))
    });
    matching
        .filter_map(|line| line.rsplit(' ').next()?.parse::<f64>().ok())
        .sum()
}

#[tokio::test]
async fn one_process_serves_through_both_legs() {
    let running = serve(&[Role::Prefill, Role::Decode]).await;
    let frontend = running.frontend();
    for salt in 0..4 {
        check(&frontend, &prompt(salt, 23), 9).await;
    }
    let text = frontend.metrics();
    let landed = metric(&text, "cleave_worker_handoffs_total", "landed");
    assert_eq!(landed, 4.0, "hand-offs are used, not recomputed\n{text}");
    assert!(
        metric(&text, "cleave_worker_handoff_bytes_total", "received") >= 4.0 * BLOCK_BYTES as f64
    );
    running.drain(TEST_WAIT_MAX).await;
}

#[tokio::test]
async fn clients_and_workers_share_one_router_address() {
    let (router, address) = router().await;
    let before = http(&address, "/ready").await;
    assert!(before.starts_with("HTTP/1.1 503"), "{before}");
    let (prefill, _) = worker("p0", Role::Prefill, &address).await;
    let (decode, _) = worker("d0", Role::Decode, &address).await;
    timeout(TEST_WAIT_MAX, router.ready()).await.unwrap();
    let after = http(&address, "/ready").await;
    assert!(after.starts_with("HTTP/1.1 200"), "{after}");
    check(&router.frontend(), &prompt(1, 20), 4).await;
    let text = http(&address, "/metrics").await;
    assert_eq!(metric(&text, "cleave_workers", "prefill"), 1.0, "{text}");
    assert_eq!(metric(&text, "cleave_flights_ended_total", "done"), 1.0);
    assert!(text.contains("# TYPE cleave_http_requests_total counter"));
    let metrics = decode.metrics_address().unwrap().to_string();
    let text = http(&metrics, "/metrics").await;
    assert_eq!(metric(&text, "vllm:num_requests_running", "d0"), 0.0);
    assert!(text.contains("vllm:kv_cache_usage_perc"), "{text}");
    assert!(http(&metrics, "/ready").await.starts_with("HTTP/1.1 200"));
    end(router, [prefill, decode]).await;
}

#[tokio::test]
async fn both_legs_on_one_worker_give_the_same_tokens() {
    let running = serve(&[Role::Both]).await;
    let frontend = running.frontend();
    check(&frontend, &prompt(1, 23), 9).await;
    let text = frontend.metrics();
    assert_eq!(metric(&text, "cleave_worker_handoff_bytes_total", ""), 0.0);
    running.drain(TEST_WAIT_MAX).await;
}

#[tokio::test]
async fn concurrent_flights_do_not_mix() {
    let running = serve(&[Role::Prefill, Role::Prefill, Role::Decode, Role::Decode]).await;
    let frontend = running.frontend();
    let flights = (0..24).map(|salt| {
        let frontend = Arc::clone(&frontend);
        async move { check(&frontend, &prompt(salt, 5 + salt), 7).await }
    });
    futures::future::join_all(flights).await;
    running.drain(TEST_WAIT_MAX).await;
}

/// Relays to `target`, counting bytes both ways.
async fn counting_proxy(target: String) -> (String, Arc<AtomicU64>) {
    let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
    let address = listener.local_addr().unwrap().to_string();
    let count = Arc::new(AtomicU64::new(0));
    let counted = Arc::clone(&count);
    tokio::spawn(async move {
        while let Ok((near, _)) = listener.accept().await {
            let far = TcpStream::connect(&target).await.unwrap();
            let (near_read, near_write) = near.into_split();
            let (far_read, far_write) = far.into_split();
            tokio::spawn(relay(near_read, far_write, Arc::clone(&counted)));
            tokio::spawn(relay(far_read, near_write, Arc::clone(&counted)));
        }
    });
    (address, count)
}

async fn relay(
    mut from: tokio::net::tcp::OwnedReadHalf,
    mut to: tokio::net::tcp::OwnedWriteHalf,
    count: Arc<AtomicU64>,
) {
    let mut buffer = vec![0; 1 << 16];
    while let Ok(read @ 1..) = from.read(&mut buffer).await {
        count.fetch_add(read as u64, Ordering::Relaxed);
        if to.write_all(&buffer[..read]).await.is_err() {
            return;
        }
    }
}

#[tokio::test]
async fn kv_never_passes_the_router() {
    let (router, address) = router().await;
    let (address, passed) = counting_proxy(address).await;
    let mut workers = Vec::new();
    for (name, role) in [
        ("p0", Role::Prefill),
        ("p1", Role::Prefill),
        ("d0", Role::Decode),
        ("d1", Role::Decode),
    ] {
        workers.push(worker(name, role, &address).await.0);
    }
    timeout(TEST_WAIT_MAX, router.ready()).await.unwrap();
    let joined = passed.load(Ordering::Relaxed);
    let frontend = router.frontend();
    let flights = (0..16).map(|salt| {
        let frontend = Arc::clone(&frontend);
        async move { check(&frontend, &prompt(salt, 40), 6).await }
    });
    futures::future::join_all(flights).await;

    let metrics: Vec<String> = workers.iter().map(RunningWorker::metrics).collect();
    let sum = |name, label| {
        metrics
            .iter()
            .map(|text| metric(text, name, label))
            .sum::<f64>()
    };
    assert_eq!(sum("cleave_worker_handoffs_total", "landed"), 16.0);
    let moved = sum("cleave_worker_handoff_bytes_total", "sent");
    assert_eq!(moved, sum("cleave_worker_handoff_bytes_total", "received"));
    assert!(moved >= (16 * 10 * BLOCK_BYTES) as f64, "{moved}");
    let passed = (passed.load(Ordering::Relaxed) - joined) as f64;
    assert!(
        passed < moved / 8.0,
        "{passed} bytes passed the router, {moved} moved"
    );
    assert!(sum("cleave_link_bytes_per_second", "") > 0.0, "unmeasured");
    // Passes are kept no longer than the hand-offs that they permit.
    let passes = |text: String| metric(&text, "cleave_worker_write_grants", "");
    until(|| workers.iter().map(|one| passes(one.metrics())).sum::<f64>() == 0.0).await;
    until(|| metric(&frontend.metrics(), "cleave_router_write_grants", "") == 0.0).await;

    for worker in workers {
        worker.drain(TEST_WAIT_MAX).await;
    }
    router.drain(TEST_WAIT_MAX).await;
}

// Lesson: 9.
#[tokio::test]
async fn a_prefill_worker_lost_before_a_token_is_replaced() {
    let (router, address) = router().await;
    let (first, first_gate) = worker("p0", Role::Prefill, &address).await;
    let (second, second_gate) = worker("p1", Role::Prefill, &address).await;
    let (decode, _) = worker("d0", Role::Decode, &address).await;
    timeout(TEST_WAIT_MAX, router.ready()).await.unwrap();
    first_gate.shut();
    second_gate.shut();
    let prompt = prompt(3, 40);
    let stream = router.frontend().submit(request(&prompt, 5));
    let on_first = tokio::select! {
        () = first_gate.reached() => true,
        () = second_gate.reached() => false,
    };
    let rest = if on_first {
        first.stop().await;
        second_gate.open();
        second
    } else {
        second.stop().await;
        first_gate.open();
        first
    };
    let (tokens, ending, _) = collect(stream).await;
    assert_eq!(ending, DONE);
    assert_eq!(tokens, expected(&prompt, 5));
    let text = router.frontend().metrics();
    assert_eq!(
        metric(&text, "cleave_retries_total", "worker_lost"),
        1.0,
        "{text}"
    );
    first_gate.open();
    second_gate.open();
    end(router, [rest, decode]).await;
}

/// The damage that a bad network does, once armed, to the next piece of KV that passes it.
#[derive(Clone, Copy, Debug)]
enum NetworkFault {
    FlipAByte,
    Cut,
}

/// Longer than every message but a frame.
const LONG: usize = 2048;

/// A decode worker behind a bad network, and a flight that has to survive it.
async fn survives_network_fault(network_fault: NetworkFault) -> String {
    let (router, address) = router().await;
    let bad = TcpListener::bind("127.0.0.1:0").await.unwrap();
    let mut node = worker_node("d0", Role::Decode, &address, &StepGate::new());
    node.data_address = Some(bad.local_addr().unwrap().to_string());
    let decode = node.start().await.unwrap();
    let behind = decode.data_address();
    let pending = Arc::new(Mutex::new(None));
    let next = Arc::clone(&pending);
    tokio::spawn(async move {
        while let Ok((near, _)) = bad.accept().await {
            let far = TcpStream::connect(behind).await.unwrap();
            let (near_read, near_write) = near.into_split();
            let (far_read, far_write) = far.into_split();
            let idle = Arc::new(AtomicU64::new(0));
            tokio::spawn(relay(far_read, near_write, idle));
            tokio::spawn(relay_harmed(near_read, far_write, Arc::clone(&next)));
        }
    });
    // One stream, so that what passes it is known.
    let gate = StepGate::new();
    let mut node = worker_node("p0", Role::Prefill, &address, &gate);
    node.options.streams_count = 1;
    let prefill = node.start().await.unwrap();
    timeout(TEST_WAIT_MAX, router.ready()).await.unwrap();
    // One block, so that the link stands and is not harmed yet.
    check(&router.frontend(), &prompt(3, 3), 2).await;
    *pending.lock().unwrap() = Some(network_fault);
    // The first chunk's blocks leave while the second is held: the harm comes before any token.
    gate.shut_after(1);
    let stream = router.frontend().submit(request(&prompt(1, 40), 6));
    until(|| metric(&decode.metrics(), "cleave_worker_handoffs_total", "failed") >= 1.0).await;
    gate.open();
    let (tokens, ending, _) = collect(stream).await;
    assert_eq!((tokens, ending), (expected(&prompt(1, 40), 6), DONE));
    check(&router.frontend(), &prompt(2, 40), 6).await;
    let landed = metric(&decode.metrics(), "cleave_worker_handoffs_total", "landed");
    assert_eq!(landed, 3.0);
    let text = router.frontend().metrics();
    end(router, [prefill, decode]).await;
    text
}

async fn relay_harmed(
    mut from: tokio::net::tcp::OwnedReadHalf,
    mut to: tokio::net::tcp::OwnedWriteHalf,
    pending: Arc<Mutex<Option<NetworkFault>>>,
) {
    let mut buffer = vec![0; 1 << 12];
    while let Ok(read @ 1..) = from.read(&mut buffer).await {
        let network_fault = if read > LONG {
            pending.lock().unwrap().take()
        } else {
            None
        };
        match network_fault {
            Some(NetworkFault::Cut) => return,
            Some(NetworkFault::FlipAByte) => buffer[LONG / 2] ^= 1,
            None => {}
        }
        if to.write_all(&buffer[..read]).await.is_err() {
            return;
        }
    }
}

// Lesson: 2, 16.
#[tokio::test]
async fn kv_damaged_in_transit_changes_no_token() {
    let text = survives_network_fault(NetworkFault::FlipAByte).await;
    assert_eq!(
        metric(&text, "cleave_retries_total", "corrupt"),
        1.0,
        "{text}"
    );
}

// Lesson: 8.
#[tokio::test]
async fn a_link_cut_during_a_hand_off_hangs_nothing() {
    let text = survives_network_fault(NetworkFault::Cut).await;
    assert!(metric(&text, "cleave_retries_total", "") >= 1.0, "{text}");
}

// Lesson: 1, 13.
#[tokio::test]
async fn a_client_that_leaves_frees_both_pools() {
    let gates = [StepGate::new(), StepGate::new()];
    let running = serve_gated(&[Role::Prefill, Role::Decode], &gates).await;
    let frontend = running.frontend();
    let cancelled = || {
        metric(
            &frontend.metrics(),
            "cleave_flights_ended_total",
            "cancelled",
        )
    };
    // Nearly the whole of each pool: the next one fits only if the one before is gone.
    let tokens = (BLOCKS - 4) * 4;
    for (salt, gate) in (0..).zip(&gates) {
        // The first leaves in mid-prefill, the other before the second token.
        gate.shut();
        let prompt = prompt(salt, tokens - 40);
        let mut stream = frontend.submit(request(&prompt, 40));
        if salt > 0 {
            let first = timeout(TEST_WAIT_MAX, stream.next()).await.unwrap();
            assert!(matches!(first, Some(FlightEvent::Token(_))), "{first:?}");
        }
        gate.reached().await;
        drop(stream);
        until(|| cancelled() == f64::from(salt) + 1.0).await;
        gate.open();
    }
    check(&frontend, &prompt(9, tokens - 40), 40).await;
    let text = frontend.metrics();
    assert_eq!(
        metric(&text, "cleave_flights_ended_total", "cancelled"),
        2.0,
        "{text}"
    );
    running.drain(TEST_WAIT_MAX).await;
}

// Lesson: 6.
#[tokio::test]
async fn workers_reconnect_to_a_restarted_router() {
    let (first, address) = router().await;
    let (prefill, _) = worker("p0", Role::Prefill, &address).await;
    let (decode, _) = worker("d0", Role::Decode, &address).await;
    timeout(TEST_WAIT_MAX, first.ready()).await.unwrap();
    check(&first.frontend(), &prompt(1, 20), 4).await;
    first.drain(TEST_WAIT_MAX).await;

    let second = router_at(&address, RouterOptions::default()).await;
    timeout(TEST_WAIT_MAX, second.ready()).await.unwrap();
    check(&second.frontend(), &prompt(2, 20), 4).await;
    end(second, [prefill, decode]).await;
}

#[tokio::test]
async fn the_older_of_two_workers_with_one_name_is_cut_off() {
    let (router, address) = router().await;
    let (proxy, passed) = counting_proxy(address.clone()).await;
    let (prefill, _) = worker("p0", Role::Prefill, &address).await;
    let (elder, _) = worker("d0", Role::Decode, &proxy).await;
    timeout(TEST_WAIT_MAX, router.ready()).await.unwrap();
    check(&router.frontend(), &prompt(1, 20), 4).await;
    let (younger, _) = worker("d0", Role::Decode, &address).await;
    let ready = async |worker: &RunningWorker| {
        let metrics = worker.metrics_address().unwrap().to_string();
        http(&metrics, "/ready").await.starts_with("HTTP/1.1 200")
    };
    let cut_off = async {
        while ready(&elder).await {
            tokio::task::yield_now().await;
        }
    };
    timeout(TEST_WAIT_MAX, cut_off)
        .await
        .expect("it is cut off");
    let before = passed.load(Ordering::Relaxed);
    let since = Instant::now();
    while since.elapsed() < Duration::from_secs(1) {
        check(&router.frontend(), &prompt(2, 20), 4).await;
    }
    // It would say hello, with its tokenizer, ten times a second.
    let after = passed.load(Ordering::Relaxed);
    assert!(after - before < 1000, "{} bytes were said", after - before);
    assert!(ready(&younger).await);
    let text = router.frontend().metrics();
    assert_eq!(metric(&text, "cleave_workers", "decode"), 1.0, "{text}");
    assert_eq!(metric(&text, "cleave_retries_total", ""), 0.0, "{text}");
    elder.stop().await;
    end(router, [younger, prefill]).await;
}

#[tokio::test]
async fn link_series_end_with_the_peers_incarnation() {
    let (router, address) = router().await;
    let (prefill, _) = worker("p0", Role::Prefill, &address).await;
    let (first, _) = worker("d0", Role::Decode, &address).await;
    timeout(TEST_WAIT_MAX, router.ready()).await.unwrap();
    check(&router.frontend(), &prompt(1, 20), 4).await;
    let links = || {
        let text = prefill.metrics();
        let links = text.lines().filter(|line| line.contains("peer="));
        links.map(str::to_owned).collect::<Vec<String>>()
    };
    assert_ne!(links(), [""; 0]);
    first.stop().await;
    until(|| links().is_empty()).await;
    let (second, _) = worker("d0", Role::Decode, &address).await;
    timeout(TEST_WAIT_MAX, router.ready()).await.unwrap();
    check(&router.frontend(), &prompt(2, 20), 4).await;
    end(router, [second, prefill]).await;
}

#[tokio::test]
async fn garbage_at_any_port_changes_nothing() {
    let (router, address) = router().await;
    let (prefill, _) = worker("p0", Role::Prefill, &address).await;
    let (decode, _) = worker("d0", Role::Decode, &address).await;
    timeout(TEST_WAIT_MAX, router.ready()).await.unwrap();
    let ports = [
        address,
        prefill.data_address().to_string(),
        decode.data_address().to_string(),
        decode.metrics_address().unwrap().to_string(),
    ];
    let mut strangers = Vec::new();
    for port in &ports {
        for garbage in [
            &b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n\xff\xff\xff\xff"[..],
            b"POST /cleave.fleet.v1.Fleet/Join HTTP/1.1\r\ncontent-length: 5\r\n\r\nhello",
            &[0; 64],
            &[0xff; 4096],
        ] {
            let mut stream = TcpStream::connect(port).await.unwrap();
            stream.write_all(garbage).await.unwrap();
            strangers.push(stream);
        }
    }
    check(&router.frontend(), &prompt(1, 20), 4).await;
    drop(strangers);
    check(&router.frontend(), &prompt(2, 20), 4).await;
    end(router, [prefill, decode]).await;
}

// Lesson: 12.
#[tokio::test]
async fn a_panicked_engine_is_unhealthy_and_gets_no_work() {
    let (router, address) = router().await;
    let (prefill, _) = worker("p0", Role::Prefill, &address).await;
    let (broken, gate) = worker("d0", Role::Decode, &address).await;
    timeout(TEST_WAIT_MAX, router.ready()).await.unwrap();
    assert!(health_of(&broken).await.starts_with("HTTP/1.1 200"));
    gate.panic_at_next_step();
    let stream = router.frontend().submit(request(&prompt(1, 20), 6));
    until(|| router.frontend().readiness("") != ServingReadiness::Ready).await;
    let (sound, _) = worker("d1", Role::Decode, &address).await;
    let (tokens, ending, _) = collect(stream).await;
    // Its first token is out; whether the rest is drawn elsewhere is the router's choice, and
    // either way it says so.
    match ending {
        DONE => assert_eq!(tokens, expected(&prompt(1, 20), 6)),
        Ending::Failed(_) => {}
        other => panic!("{other:?}"),
    }
    let health = health_of(&broken).await;
    assert!(health.starts_with("HTTP/1.1 503"), "{health}");
    assert!(health.contains("a bead fell off"), "{health}");
    timeout(TEST_WAIT_MAX, router.ready()).await.unwrap();
    check(&router.frontend(), &prompt(2, 20), 6).await;
    broken.stop().await;
    end(router, [prefill, sound]).await;
}

async fn health_of(worker: &RunningWorker) -> String {
    let address = worker.metrics_address().unwrap().to_string();
    http(&address, "/health").await
}

async fn http(address: &str, path: &str) -> String {
    let request = format!("GET {path} HTTP/1.1\r\nhost: localhost\r\nconnection: close\r\n\r\n");
    exchange(address, request).await
}

async fn exchange(address: &str, request: String) -> String {
    let mut stream = TcpStream::connect(address).await.unwrap();
    stream.write_all(request.as_bytes()).await.unwrap();
    let mut answer = String::new();
    timeout(TEST_WAIT_MAX, stream.read_to_string(&mut answer))
        .await
        .unwrap()
        .unwrap();
    answer
}

/// Feeds a tape to a fresh brain of its kind, and demands the same outputs.
macro_rules! replay {
    ($path:expr, $sort:ident, $brain:ty, $limits:ty, $input:ty, $output:ty) => {{
        type ReplayedLine = TapeRecord<$limits, $input, $output>;
        let text = std::fs::read_to_string($path).unwrap();
        let (mut brain, mut received) = (None::<$brain>, 0);
        for line in text.lines() {
            let line: serde_json::Value = serde_json::from_str(line).unwrap();
            match serde_json::from_value::<ReplayedLine>(line[stringify!($sort)].clone()).unwrap() {
                TapeRecord::Started { limits } => brain = Some(<$brain>::new(limits)),
                TapeRecord::Received { at, input } => {
                    let brain = brain.as_mut().unwrap();
                    assert_eq!(brain.poll(), None, "all was said to the input before");
                    brain.handle(at, input);
                    brain.check();
                    received += 1;
                }
                TapeRecord::Emitted { output } => {
                    assert_eq!(brain.as_mut().unwrap().poll(), Some(output))
                }
            }
        }
        received
    }};
}

// Invariant: I14.
#[tokio::test]
async fn tapes_of_a_serving_fleet_replay_equal() {
    let folder = std::env::temp_dir().join(format!("cleave-tapes-{}", std::process::id()));
    std::fs::create_dir_all(&folder).unwrap();
    let path = |name: &str| folder.join(name);
    let mut serve = FleetNode {
        listen: "127.0.0.1:0".into(),
        router: RouterOptions::default(),
        models: vec![FleetModel {
            workers: Vec::new(),
            files: files(),
        }],
    };
    serve.router.tape = Some(path("router"));
    for (name, role) in [("prefill", Role::Prefill), ("decode", Role::Decode)] {
        let mut options = WorkerOptions::new(name, role);
        options.tape = Some(path(name));
        serve.models[0]
            .workers
            .push((options, Box::new(HashChainEngine::new(&StepGate::new()))));
    }
    let running = serve.start().await.unwrap();
    timeout(TEST_WAIT_MAX, running.ready()).await.unwrap();
    let frontend = running.frontend();
    let flights = (0..6).map(|salt| {
        let frontend = Arc::clone(&frontend);
        async move { check(&frontend, &prompt(salt, 30), 5).await }
    });
    futures::future::join_all(flights).await;
    drop(frontend.submit(request(&prompt(7, 30), 50)));
    running.drain(TEST_WAIT_MAX).await;

    assert!(
        replay!(
            path("router"),
            Router,
            RouterPools,
            RouterLimits,
            PoolInput,
            PoolOutput
        ) > 6 * 5
    );
    assert!(
        replay!(
            path("prefill"),
            Worker,
            WorkerBrain,
            WorkerLimits,
            WorkerInput,
            WorkerOutput
        ) > 6 * 3
    );
    let prefill = std::fs::read_to_string(path("prefill")).unwrap();
    let has_measured = prefill.contains("LinkMeasured");
    assert!(has_measured, "its brain hears what its links cost");
    assert!(
        replay!(
            path("decode"),
            Worker,
            WorkerBrain,
            WorkerLimits,
            WorkerInput,
            WorkerOutput
        ) > 6 * 3
    );
    std::fs::remove_dir_all(&folder).unwrap();
}

// Lesson: 27.
#[tokio::test]
async fn drain_finishes_flights_and_refuses_new_ones() {
    let gates = [StepGate::new(), StepGate::new()];
    let running = serve_gated(&[Role::Prefill, Role::Decode], &gates).await;
    let frontend = running.frontend();
    let prompt = prompt(1, 30);
    gates[1].shut();
    let mut stream = frontend.submit(request(&prompt, 30));
    let first = timeout(TEST_WAIT_MAX, stream.next()).await.unwrap();
    assert!(matches!(first, Some(FlightEvent::Token(_))));
    let draining = tokio::spawn(running.drain(TEST_WAIT_MAX));
    until(|| frontend.readiness("") != ServingReadiness::Ready).await;
    let (tokens, ending, _) = collect(frontend.submit(request(&prompt, 3))).await;
    assert!(tokens.is_empty());
    assert_eq!(ending, Ending::Refused(Refusal::Draining));
    gates[1].open();
    let rest: Vec<FlightEvent> = timeout(TEST_WAIT_MAX, stream.collect()).await.unwrap();
    assert!(matches!(rest.last(), Some(FlightEvent::Ended { ending, .. }) if *ending == DONE));
    assert_eq!(rest.len(), 30, "29 tokens and the ending");
    timeout(TEST_WAIT_MAX, draining).await.unwrap().unwrap();
}

// Lesson: 16.
#[tokio::test]
async fn a_flight_cut_at_the_drain_deadline_fails() {
    let gates = [StepGate::new(), StepGate::new()];
    let running = serve_gated(&[Role::Prefill, Role::Decode], &gates).await;
    let frontend = running.frontend();
    gates[1].shut();
    let mut stream = frontend.submit(request(&prompt(1, 30), 30));
    let first = timeout(TEST_WAIT_MAX, stream.next()).await.unwrap();
    assert!(matches!(first, Some(FlightEvent::Token(_))));
    timeout(TEST_WAIT_MAX, running.drain(Duration::ZERO))
        .await
        .unwrap();
    let last = timeout(TEST_WAIT_MAX, stream.next()).await.unwrap();
    let Some(FlightEvent::Ended { ending, .. }) = last else {
        panic!("{last:?}");
    };
    assert_eq!(ending, Ending::Failed(Failure::Draining));
    gates[1].open();
}

/// The log of a request that a drain cuts off has the tokens that its client was given.
#[tokio::test]
async fn a_request_cut_by_a_drain_logs_its_tokens() {
    let logged = secure::CapturedLog::default();
    let _guard = tracing::subscriber::set_default(logged.clone());
    let gates = [StepGate::new(), StepGate::new()];
    let running = serve_gated(&[Role::Prefill, Role::Decode], &gates).await;
    let address = running.address().to_string();
    // The first token is the prefill worker's.
    gates[1].shut_after(2);
    let body = format!(
        r#"{{"prompt": {:?}, "max_tokens": 30, "ignore_eos": true}}"#,
        prompt(1, 30)
    );
    let at = address.clone();
    let answered = tokio::spawn(async move { failover::post(&at, "/v1/completions", &body).await });
    let three_tokens = async {
        loop {
            let page = http(&address, "/metrics").await;
            if metric(&page, "cleave_http_inter_token_latency_seconds_count", "") == 2.0 {
                return;
            }
        }
    };
    timeout(TEST_WAIT_MAX, three_tokens).await.unwrap();
    timeout(TEST_WAIT_MAX, running.drain(Duration::ZERO))
        .await
        .unwrap();
    gates[1].open();
    let answer = timeout(TEST_WAIT_MAX, answered).await.unwrap().unwrap();
    assert!(answer.starts_with("HTTP/1.1 503"), "{answer}");
    let over = ["request over", "ending=\"failed\"", "output_tokens=3 "];
    assert!(logged.has(&over), "{logged:?}");
}
