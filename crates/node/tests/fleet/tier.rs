//! Blocks evicted from a pool are kept in a tier, and return unchanged.

use super::hash_chain::{
    BLOCK_BYTES, BLOCK_TOKENS, HashChainEngine, StepGate, expected, expected_with_state,
};
use super::{DONE, TEST_WAIT_MAX, collect, files, metric, prompt, request, until};
use cleave_api::Frontend;
use cleave_domain::{Role, TokenId};
use cleave_node::{FleetModel, FleetNode, RouterOptions, RunningFleet};
use cleave_worker::{DiskOptions, TierOptions, WorkerOptions};
use std::path::{Path, PathBuf};
use std::sync::Arc;
use tokio::time::timeout;

/// A folder that is gone with the test.
struct TierFolder(PathBuf);

impl TierFolder {
    fn new(name: &str) -> Self {
        let name = format!("cleave-tier-{name}-{}", std::process::id());
        let path = std::env::temp_dir().join(name);
        let _ = std::fs::remove_dir_all(&path);
        Self(path)
    }
}

impl Drop for TierFolder {
    fn drop(&mut self) {
        let _ = std::fs::remove_dir_all(&self.0);
    }
}

fn options(host_blocks: usize, disk: Option<(&Path, usize)>) -> TierOptions {
    TierOptions {
        host_bytes: (host_blocks * BLOCK_BYTES) as u64,
        disk: disk.map(|(folder, blocks)| DiskOptions {
            folder: folder.to_owned(),
            bytes: (blocks * (BLOCK_BYTES + 64) + 4096) as u64,
        }),
    }
}

async fn serve(tier: TierOptions) -> RunningFleet {
    serve_with(tier, HashChainEngine::new(&StepGate::new())).await
}

async fn serve_with(tier: TierOptions, engine: HashChainEngine) -> RunningFleet {
    let worker = WorkerOptions {
        tier,
        ..WorkerOptions::new("both-0", Role::Both)
    };
    start(RouterOptions::default(), worker, engine).await
}

async fn start(
    router: RouterOptions,
    worker: WorkerOptions,
    engine: HashChainEngine,
) -> RunningFleet {
    let engine: Box<dyn cleave_engine::Engine> = Box::new(engine);
    let serve = FleetNode {
        listen: "127.0.0.1:0".into(),
        router,
        models: vec![FleetModel {
            workers: vec![(worker, engine)],
            files: files(),
        }],
    };
    let running = serve.start().await.unwrap();
    timeout(TEST_WAIT_MAX, running.ready()).await.unwrap();
    running
}

/// The right tokens, whatever was cached; gives how many prompt tokens were.
async fn cached(frontend: &Arc<dyn Frontend>, prompt: &[TokenId], tenant: u64) -> u32 {
    let mut request = request(prompt, 3);
    request.cache_salt = tenant;
    let (tokens, ending, usage) = collect(frontend.submit(request)).await;
    assert_eq!(ending, DONE);
    assert_eq!(tokens, expected(prompt, 3));
    usage.cached_tokens
}

/// The same for an engine with states, as one tenant.
async fn cached_with_state(frontend: &Arc<dyn Frontend>, prompt: &[TokenId]) -> u32 {
    let (tokens, ending, usage) = collect(frontend.submit(request(prompt, 3))).await;
    assert_eq!(ending, DONE);
    assert_eq!(tokens, expected_with_state(prompt, 3));
    usage.cached_tokens
}

/// Waits until so many blocks are in a place.
async fn wait_for_copies(frontend: &Arc<dyn Frontend>, place: &str, blocks: usize) {
    let place = format!("kind=\"{place}\"");
    let copied = || {
        metric(
            &frontend.metrics(),
            "cleave_kv_tier_kept_blocks_total",
            &place,
        )
    };
    until(|| copied() >= blocks as f64).await;
}

fn fetched(frontend: &Arc<dyn Frontend>) -> f64 {
    metric(
        &frontend.metrics(),
        "cleave_kv_tier_fetched_blocks_total",
        "",
    )
}

fn failures(frontend: &Arc<dyn Frontend>, kind: &str) -> f64 {
    let kind = format!("kind=\"{kind}\"");
    metric(&frontend.metrics(), "cleave_kv_tier_failures_total", &kind)
}

/// Twenty of the pool's 32 blocks.
const TOKENS: u32 = 20 * BLOCK_TOKENS as u32;

/// Has the pool taken by others, each of which is kept too.
async fn evict(frontend: &Arc<dyn Frontend>, before: usize) -> usize {
    for other in 0..2_usize {
        let salt = u32::try_from(50 + other).unwrap();
        cached(frontend, &prompt(salt, TOKENS), 0).await;
        wait_for_copies(frontend, "host", before + 20 * (other + 1)).await;
    }
    before + 40
}

#[tokio::test]
async fn an_evicted_prefix_returns_from_memory_unchanged() {
    let running = serve(options(200, None)).await;
    let frontend = running.frontend();
    let prompt = prompt(1, TOKENS + 2);
    assert_eq!(cached(&frontend, &prompt, 7).await, 0);
    wait_for_copies(&frontend, "host", 20).await;
    evict(&frontend, 20).await;
    assert_eq!(cached(&frontend, &prompt, 7).await, TOKENS);
    let fetched_count = fetched(&frontend);
    assert!(
        fetched_count >= 8.0,
        "{fetched_count} came, and the pool has no room for more than 12 others"
    );
    // Another tenant's equal prompt finds nothing of it, wherever that is.
    evict(&frontend, 0).await;
    assert_eq!(cached(&frontend, &prompt, 8).await, 0);
    for kind in ["held", "leaked"] {
        let kind = format!("kind=\"{kind}\"");
        until(|| metric(&frontend.metrics(), "cleave_pool_blocks", &kind) == 0.0).await;
    }
    running.drain(TEST_WAIT_MAX).await;
}

#[tokio::test]
async fn a_preempted_stream_reloads_its_blocks_unchanged() {
    let mut router = RouterOptions::default();
    // So little is set aside that more is admitted than the pool can hold.
    router.limits.expected_output_tokens = 1;
    let worker = WorkerOptions {
        tier: options(200, None),
        swap_bytes: Some(0),
        ..WorkerOptions::new("both-0", Role::Both)
    };
    let gate = StepGate::new();
    gate.shut();
    let running = start(router, worker, HashChainEngine::new(&gate)).await;
    let frontend = running.frontend();
    let (long, short) = (prompt(1, 40), prompt(2, 40));
    let first = frontend.submit(request(&long, 80));
    let second = frontend.submit(request(&short, 40));
    // Both are there before the first step ends.
    gate.reached().await;
    until(|| metric(&frontend.metrics(), "cleave_flights", "") == 2.0).await;
    gate.open();
    let (first, second) = tokio::join!(collect(first), collect(second));
    assert_eq!(first.0, expected(&long, 80));
    assert_eq!(second.0, expected(&short, 40));
    let text = frontend.metrics();
    let preempted = metric(&text, "cleave_preemptions_total", "");
    assert!(preempted > 0.0, "the pool was never short\n{text}");
    assert!(fetched(&frontend) > 0.0, "all was computed again\n{text}");
    for kind in ["held", "leaked"] {
        let kind = format!("kind=\"{kind}\"");
        until(|| metric(&frontend.metrics(), "cleave_pool_blocks", &kind) == 0.0).await;
    }
    running.drain(TEST_WAIT_MAX).await;
}

#[tokio::test]
async fn a_restarted_worker_finds_its_blocks_on_disk() {
    let folder = TierFolder::new("again");
    let prompt = prompt(1, TOKENS + 2);
    let running = serve(options(100, Some((&folder.0, 300)))).await;
    let frontend = running.frontend();
    cached(&frontend, &prompt, 0).await;
    wait_for_copies(&frontend, "disk", 20).await;
    running.drain(TEST_WAIT_MAX).await;
    drop(frontend);
    unlocked(&folder).await;

    let running = serve(options(100, Some((&folder.0, 300)))).await;
    let frontend = running.frontend();
    assert_eq!(cached(&frontend, &prompt, 0).await, TOKENS);
    assert_eq!(fetched(&frontend), 20.0);
    // Another tenant's is not.
    assert_eq!(cached(&frontend, &prompt, 3).await, 0);
    running.drain(TEST_WAIT_MAX).await;
    drop(frontend);
    unlocked(&folder).await;

    // Nor is another model's.
    let another = HashChainEngine::new(&StepGate::new()).with_other_weights();
    let running = serve_with(options(100, Some((&folder.0, 300))), another).await;
    let frontend = running.frontend();
    assert_eq!(cached(&frontend, &prompt, 0).await, 0);
    running.drain(TEST_WAIT_MAX).await;
}

/// A state is kept in pieces of a block: two whole ones and a half.
#[tokio::test]
async fn an_evicted_prefix_returns_with_its_state() {
    let folder = TierFolder::new("states");
    let tier = || options(200, Some((&folder.0, 300)));
    // A slot for the running sequence and one for a snapshot.
    let engine = || HashChainEngine::new(&StepGate::new()).with_states(2);
    let prompt = prompt(1, TOKENS + 2);
    let running = serve_with(tier(), engine()).await;
    let frontend = running.frontend();
    assert_eq!(cached_with_state(&frontend, &prompt).await, 0);
    wait_for_copies(&frontend, "host", 21).await;
    for other in 0..2_usize {
        let salt = u32::try_from(50 + other).unwrap();
        cached_with_state(&frontend, &super::prompt(salt, TOKENS)).await;
        // The last block of such a prompt is full, and its snapshot lies before that.
        wait_for_copies(&frontend, "host", 42 + 21 * other).await;
    }
    assert_eq!(cached_with_state(&frontend, &prompt).await, TOKENS);
    let fetched_count = fetched(&frontend);
    assert!(
        fetched_count >= 11.0,
        "{fetched_count} came: eight blocks at least, and three pieces of a state"
    );
    wait_for_copies(&frontend, "disk", 63 + 6).await;
    running.drain(TEST_WAIT_MAX).await;
    drop(frontend);
    unlocked(&folder).await;

    let running = serve_with(tier(), engine()).await;
    let frontend = running.frontend();
    assert_eq!(cached_with_state(&frontend, &prompt).await, TOKENS);
    assert_eq!(fetched(&frontend), 23.0);
    running.drain(TEST_WAIT_MAX).await;
}

/// A worker of the same model in another process would find the file locked; here threads let go of
/// it when they end.
async fn unlocked(folder: &TierFolder) {
    let file = folder.0.join("kv-0.cleave");
    let locked = || std::fs::File::open(&file).unwrap().try_lock().is_err();
    until(|| !locked()).await;
}

// Invariant: I49.
// Lesson: 7.
#[tokio::test]
async fn blocks_changed_on_disk_are_recomputed() {
    let folder = TierFolder::new("changed");
    let prompt = prompt(1, TOKENS + 2);
    // So little host memory that what is on disk is there only.
    let running = serve(options(8, Some((&folder.0, 300)))).await;
    let frontend = running.frontend();
    cached(&frontend, &prompt, 0).await;
    wait_for_copies(&frontend, "disk", 20).await;
    for other in 0..2_u32 {
        cached(&frontend, &super::prompt(50 + other, TOKENS), 0).await;
        wait_for_copies(&frontend, "disk", 40 + 20 * other as usize).await;
    }
    let file = folder.0.join("kv-0.cleave");
    let mut bytes = std::fs::read(&file).unwrap();
    for slot in bytes[4096..].chunks_mut(64 + BLOCK_BYTES) {
        slot[64 + BLOCK_BYTES / 2] ^= 1;
    }
    std::fs::write(&file, bytes).unwrap();
    let cached = cached(&frontend, &prompt, 0).await;
    assert!(cached < TOKENS, "{cached} were taken from what had changed");
    assert!(failures(&frontend, "corrupt") >= 1.0);
    running.drain(TEST_WAIT_MAX).await;
}

#[tokio::test]
async fn a_full_tier_stays_within_its_limit() {
    let running = serve(options(24, None)).await;
    let frontend = running.frontend();
    for salt in 0..12 {
        cached(&frontend, &prompt(salt, TOKENS), 0).await;
        let text = frontend.metrics();
        let blocks = metric(&text, "cleave_kv_tier_blocks", "kind=\"host\"");
        assert!(blocks <= 24.0, "{blocks}\n{text}");
    }
    running.drain(TEST_WAIT_MAX).await;
}
