//! Engines whose sequences have a state: it crosses every transport, is reused from snapshots, and
//! is swapped with its blocks.

use crate::fleet::hash_chain::{
    BLOCK_BYTES, HashChainEngine, STATE_BYTES, StepGate, expected_with_state,
};
use crate::fleet::{
    DONE, TEST_WAIT_MAX, collect, end, files, metric, prompt, request, router, until, worker_node,
};
use cleave_api::Frontend;
use cleave_domain::{Role, TokenId};
use cleave_engine::Engine;
use cleave_node::{FleetModel, FleetNode, RouterOptions, RunningFleet, RunningWorker};
use cleave_transfer::Transport;
use cleave_worker::WorkerOptions;
use std::sync::Arc;
use tokio::time::timeout;

/// State slots of each worker: more than it runs, so that snapshots stay.
const STATES: u32 = 16;

fn engine() -> HashChainEngine {
    HashChainEngine::new(&StepGate::new()).with_states(STATES)
}

async fn serve(roles: &[Role], engine: impl Fn() -> HashChainEngine) -> RunningFleet {
    let worker = |(index, role): (usize, &Role)| {
        let options = WorkerOptions::new(format!("{role}-{index}"), *role);
        (options, Box::new(engine()) as Box<dyn Engine>)
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

async fn check(frontend: &Arc<dyn Frontend>, prompt: &[TokenId], count: u32) {
    let (tokens, ending, _) = collect(frontend.submit(request(prompt, count))).await;
    assert_eq!(ending, DONE);
    assert_eq!(tokens, expected_with_state(prompt, count as usize));
}

/// No slot is in use, or lost, once nothing runs.
async fn until_slots_are_free(metrics: impl Fn() -> String, count: u32) {
    let slots = |kind: &str| {
        let kind = format!("kind=\"{kind}\"");
        metric(&metrics(), "cleave_state_slots", &kind)
    };
    until(|| slots("held") == 0.0).await;
    assert_eq!(slots("free"), f64::from(count));
    assert_eq!(slots("leaked"), 0.0);
}

const PROMPTS: [u32; 4] = [1, 23, 40, 4];

/// Sends prompts over one link, and checks tokens and bytes.
async fn check_link(
    frontend: &Arc<dyn Frontend>,
    label: &str,
    transport: &str,
    metrics: impl Fn() -> String,
) {
    for (salt, tokens) in (0..).zip(PROMPTS) {
        let prompt = prompt(salt, tokens);
        let (generated, ending, _) = collect(frontend.submit(request(&prompt, 9))).await;
        assert_eq!(ending, DONE, "{label}, {tokens} tokens");
        assert_eq!(generated, expected_with_state(&prompt, 9), "{label}");
    }
    let text = metrics();
    let used = metric(&text, "cleave_link_transport", transport);
    assert!(used >= 1.0, "{label}: {text}");
    let landed = metric(&text, "cleave_worker_handoffs_total", "landed");
    assert_eq!(landed, PROMPTS.len() as f64, "{label}");
    let blocks: u32 = PROMPTS.iter().map(|tokens| tokens.div_ceil(4)).sum();
    let bytes = blocks as usize * BLOCK_BYTES + PROMPTS.len() * STATE_BYTES;
    for direction in ["sent", "received"] {
        let moved = metric(&text, "cleave_worker_handoff_bytes_total", direction);
        assert_eq!(moved, bytes as f64, "{label}: {direction}");
    }
}

#[tokio::test]
async fn a_state_crosses_links_within_a_process() {
    for beside in [false, true] {
        let running = serve(&[Role::Prefill, Role::Decode], || {
            let engine = engine();
            if beside {
                engine.with_copies_beside()
            } else {
                engine
            }
        })
        .await;
        let frontend = running.frontend();
        let label = format!("copies beside the engine: {beside}");
        check_link(&frontend, &label, "\"local\"", || frontend.metrics()).await;
        until_slots_are_free(|| frontend.metrics(), 2 * STATES).await;
        running.drain(TEST_WAIT_MAX).await;
    }
}

#[tokio::test]
async fn a_state_crosses_links_between_processes() {
    for (transport, name, beside) in [
        (Transport::Tcp, "\"tcp\"", false),
        (Transport::Tcp, "\"tcp\"", true),
        (Transport::SharedMemory, "\"shm\"", false),
        (Transport::SharedMemory, "\"shm\"", true),
        (Transport::CudaIpc, "\"cuda-ipc\"", true),
    ] {
        let (router, address) = router().await;
        let start = async |name: &str, role| {
            let gate = StepGate::new();
            let mut node = worker_node(name, role, &address, &gate);
            let engine = HashChainEngine::new(&gate).with_states(STATES);
            node.engine = if beside {
                Box::new(engine.with_copies_beside())
            } else {
                Box::new(engine)
            };
            // A link over shared memory becomes one from pool to pool.
            node.options.transports = match transport {
                Transport::CudaIpc => [Transport::SharedMemory, transport].into(),
                _ => [transport].into(),
            };
            node.options.writes_to_pools = transport == Transport::CudaIpc;
            // Several frames for each piece, of which the last is shorter.
            node.options.frame_bytes_max = 3000;
            let worker = node.start().await.unwrap();
            timeout(TEST_WAIT_MAX, worker.ready()).await.unwrap();
            worker
        };
        let workers = [
            start("p0", Role::Prefill).await,
            start("d0", Role::Decode).await,
        ];
        timeout(TEST_WAIT_MAX, router.ready()).await.unwrap();
        let metrics = || {
            workers
                .iter()
                .map(RunningWorker::metrics)
                .collect::<String>()
        };
        let label = format!("{name}, copies beside the engine: {beside}");
        check_link(&router.frontend(), &label, name, metrics).await;
        until_slots_are_free(metrics, 2 * STATES).await;
        end(router, workers).await;
    }
}

#[tokio::test]
async fn a_prompt_continues_from_a_snapshot() {
    let running = serve(&[Role::Both], engine).await;
    let frontend = running.frontend();
    let cached = || metric(&frontend.metrics(), "cleave_prefix_cached_tokens_total", "");
    let first = prompt(1, 41);
    check(&frontend, &first, 5).await;
    assert_eq!(cached(), 0.0);
    // The snapshot lies at the last block boundary before the prompt's last token.
    check(&frontend, &first, 5).await;
    assert_eq!(cached(), 40.0);
    // Blocks of another prompt's middle are of no use until there is a snapshot behind them.
    let mut branch = first[..24].to_vec();
    branch.extend(prompt(2, 9));
    check(&frontend, &branch, 5).await;
    assert_eq!(cached(), 40.0);
    let mut other = first[..24].to_vec();
    other.extend(prompt(3, 9));
    check(&frontend, &other, 5).await;
    assert_eq!(cached(), 64.0);
    let router_expected = metric(
        &frontend.metrics(),
        "cleave_placement_cached_tokens_total",
        "",
    );
    assert_eq!(router_expected, 64.0, "the router expects the same");
    until_slots_are_free(|| frontend.metrics(), STATES).await;
    running.drain(TEST_WAIT_MAX).await;
}

#[tokio::test]
async fn few_state_slots_lose_no_request() {
    let few = || HashChainEngine::new(&StepGate::new()).with_states(3);
    let running = serve(&[Role::Prefill, Role::Decode], few).await;
    let frontend = running.frontend();
    let flights = (0..12).map(|salt| {
        let frontend = Arc::clone(&frontend);
        async move { check(&frontend, &prompt(salt, 5 + salt), 7).await }
    });
    futures::future::join_all(flights).await;
    until_slots_are_free(|| frontend.metrics(), 6).await;
    running.drain(TEST_WAIT_MAX).await;
}

#[tokio::test]
async fn a_swapped_sequence_keeps_its_state() {
    let mut options = RouterOptions::default();
    // So little is set aside that more is admitted than the pool can hold.
    options.limits.expected_output_tokens = 1;
    let worker = WorkerOptions::new("w", Role::Both);
    let serve = FleetNode {
        listen: "127.0.0.1:0".into(),
        router: options,
        models: vec![FleetModel {
            workers: vec![(worker, Box::new(engine()))],
            files: files(),
        }],
    };
    let running = serve.start().await.unwrap();
    timeout(TEST_WAIT_MAX, running.ready()).await.unwrap();
    let frontend = running.frontend();
    let flights = (0..6).map(|salt| {
        let frontend = Arc::clone(&frontend);
        async move { check(&frontend, &prompt(20 + salt, 10), 60).await }
    });
    futures::future::join_all(flights).await;
    let text = frontend.metrics();
    let out = metric(&text, "cleave_swap_blocks_total", "kind=\"out\"");
    assert!(out > 0.0, "nothing was swapped\n{text}");
    assert_eq!(
        out,
        metric(&text, "cleave_swap_blocks_total", "kind=\"in\"")
    );
    until_slots_are_free(|| frontend.metrics(), STATES).await;
    running.drain(TEST_WAIT_MAX).await;
}
