//! A warm step allocates memory only for its result.
//!
//! The test has its own file, and so its own process, because it counts allocations of all threads.
#![allow(clippy::unwrap_used)] // Tests, and what they share.
#![allow(unsafe_code)] // An allocator that counts.

use cleave_checkpoint::Checkpoint;
use cleave_cpu::{CpuOps, CpuOptions, CpuWeightLoader, Quantize};
use cleave_domain::{
    BlockIndex, LogitsWanted, OpenSlot, SamplingParams, Segment, SlotIndex, StepId, StepPlan,
};
use cleave_engine::ops::{KvType, Precision};
use cleave_engine::{Engine, EngineLimits, ModelEngine, Weights};
use std::alloc::{GlobalAlloc, Layout, System};
use std::path::Path;
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};

struct StepAllocationCounter;

static TAKEN: AtomicUsize = AtomicUsize::new(0);

/// Number of page mappings, except the system allocator's, which do not go through this function,
/// and thread stacks.
static MAPPED: AtomicUsize = AtomicUsize::new(0);

/// Replaces the C library's function for this program and its dependencies: the linker prefers this
/// one.
#[cfg(all(target_os = "linux", target_env = "gnu", target_pointer_width = "64"))]
#[unsafe(no_mangle)]
extern "C" fn mmap64(
    at: *mut libc::c_void,
    bytes: libc::size_t,
    protection: libc::c_int,
    flags: libc::c_int,
    file: libc::c_int,
    offset: libc::off64_t,
) -> *mut libc::c_void {
    if flags & libc::MAP_STACK == 0 {
        MAPPED.fetch_add(1, Ordering::Relaxed);
    }
    // SAFETY: as the caller promises; the C library's own function does the same.
    let mapped =
        unsafe { libc::syscall(libc::SYS_mmap, at, bytes, protection, flags, file, offset) };
    mapped as *mut libc::c_void
}

// SAFETY: the system's allocator does all the work; this one counts.
unsafe impl GlobalAlloc for StepAllocationCounter {
    unsafe fn alloc(&self, layout: Layout) -> *mut u8 {
        TAKEN.fetch_add(1, Ordering::Relaxed);
        // SAFETY: as the caller promises.
        unsafe { System.alloc(layout) }
    }

    unsafe fn dealloc(&self, memory: *mut u8, layout: Layout) {
        // SAFETY: as the caller promises.
        unsafe { System.dealloc(memory, layout) }
    }

    unsafe fn realloc(&self, memory: *mut u8, layout: Layout, size: usize) -> *mut u8 {
        TAKEN.fetch_add(1, Ordering::Relaxed);
        // SAFETY: as the caller promises.
        unsafe { System.realloc(memory, layout, size) }
    }
}

#[global_allocator]
static COUNTING: StepAllocationCounter = StepAllocationCounter;

const STREAMS: u32 = 3;
const BLOCK_TOKENS: u32 = 16;
const BLOCKS_EACH: u32 = 32;
/// Warm-up steps, in which scratch and lists get their sizes, and a new block of keys begins.
const FIRST: u32 = 40;
const COUNTED: u32 = 20;

/// Options that decide a step's memory.
#[derive(Clone, Copy, Debug)]
struct AllocationCase {
    quantize: Option<Quantize>,
    kv: KvType,
    /// Tokens of each stream per step; several tokens are of a prompt.
    each: u32,
}

fn cases() -> impl Iterator<Item = AllocationCase> {
    let forms = [
        (None, KvType::Bf16),
        (None, KvType::Int8PerTokenHead),
        (Some(Quantize::Int8), KvType::Bf16),
        (Some(Quantize::Int4), KvType::Int8PerTokenHead),
    ];
    forms
        .into_iter()
        .flat_map(|(quantize, kv)| [1, 8].map(|each| AllocationCase { quantize, kv, each }))
}

fn engine(dir: &Path, case: AllocationCase) -> ModelEngine<CpuOps> {
    let options = CpuOptions {
        threads: 2,
        quantize: case.quantize,
        kv: case.kv,
        ..CpuOptions::new(Precision::Bf16)
    };
    let checkpoint = Checkpoint::open(dir).unwrap();
    let weights = Weights::load(
        &CpuWeightLoader::new(&options),
        &checkpoint,
        None,
        &mut |_| {},
    );
    let limits = EngineLimits {
        block_tokens: BLOCK_TOKENS,
        blocks_count: STREAMS * BLOCKS_EACH,
        states_count: 0,
        slots_count: STREAMS,
        step_tokens_max: 64,
        windows_count: 0,
    };
    let ops = CpuOps::new(&options).unwrap();
    ModelEngine::new(ops, Arc::new(weights.unwrap()), limits).unwrap()
}

/// The step that computes the next `each` tokens of every stream: of a prompt, or the last drawn
/// token.
fn plan(step: u32, each: u32, sampling: &Arc<SamplingParams>) -> StepPlan {
    let is_prompt = each > 1;
    let prompt_len = if is_prompt { FIRST + COUNTED } else { 1 } * each;
    let opens = (0..STREAMS).filter(|_| step == 0).map(|slot| OpenSlot {
        slot: SlotIndex(slot),
        sampling: Arc::clone(sampling),
        prompt: vec![5 + slot; prompt_len as usize].into(),
        output: Vec::with_capacity(1000),
        stop_tokens: Arc::from([]),
        min_tokens: 0,
        adapter: None,
    });
    let segments = (0..STREAMS).map(|slot| Segment {
        slot: SlotIndex(slot),
        position: step * each,
        len: each,
        blocks: (slot * BLOCKS_EACH..(slot + 1) * BLOCKS_EACH)
            .map(BlockIndex)
            .collect(),
        logits: if is_prompt {
            LogitsWanted::No
        } else {
            LogitsWanted::Sample
        },
        drafts: Vec::new(),
        state: None,
        window: None,
    });
    StepPlan {
        step: StepId(u64::from(step)),
        opens: opens.collect(),
        segments: segments.collect(),
        poolings: Vec::new(),
    }
}

/// Waits until the compute threads have started: starting them allocates memory, which must not
/// count for a step.
#[cfg(target_os = "linux")]
fn wait_for_threads() {
    let has_begun = || {
        let tasks = std::fs::read_dir("/proc/self/task").unwrap();
        // A thread of an earlier engine may end meanwhile.
        let names = tasks.filter_map(|task| std::fs::read(task.ok()?.path().join("comm")).ok());
        names.into_iter().any(|name| name.starts_with(b"cpu-"))
    };
    while !has_begun() {
        std::thread::yield_now();
    }
}

#[cfg(not(target_os = "linux"))]
fn wait_for_threads() {}

#[test]
fn a_warm_step_allocates_only_its_result() {
    let testdata = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../testdata");
    for (name, case) in ["llama3", "qwen2-moe"]
        .into_iter()
        .flat_map(|name| cases().map(move |case| (name, case)))
    {
        let folder = testdata.join(name);
        // The token counts of penalties allocate for each new token.
        for (sampling, each_max) in [
            (SamplingParams::greedy(), 1),
            (full_vocabulary_sampling(), 2),
        ] {
            let sampling = Arc::new(sampling);
            let mut engine = engine(&folder, case);
            wait_for_threads();
            let mut allocations_count = 0;
            let mut mapped_before = 0;
            for step in 0..FIRST + COUNTED {
                if step == FIRST {
                    mapped_before = MAPPED.load(Ordering::Relaxed);
                }
                let plan = plan(step, case.each, &sampling);
                let before = TAKEN.load(Ordering::Relaxed);
                let result = engine.step(&plan).unwrap();
                let of_step = TAKEN.load(Ordering::Relaxed) - before;
                let drawn = if case.each == 1 { STREAMS } else { 0 };
                assert_eq!(result.sampled.len(), drawn as usize);
                if step >= FIRST {
                    allocations_count += of_step;
                }
            }
            let mapped = MAPPED.load(Ordering::Relaxed);
            assert_eq!(mapped, mapped_before, "pages in steps of {name}, {case:?}");
            #[cfg(all(target_os = "linux", target_env = "gnu", target_pointer_width = "64"))]
            assert!(
                mapped > 0,
                "weights and KV cache are pages, which were not counted"
            );
            assert!(
                allocations_count <= (each_max * COUNTED) as usize,
                "{allocations_count} times in {COUNTED} steps of {name}, {case:?}, with {sampling:?}"
            );
        }
    }
}

/// Every sampling rule that reads the whole vocabulary.
fn full_vocabulary_sampling() -> SamplingParams {
    SamplingParams {
        temperature: 0.8,
        top_k: 40,
        top_p: 0.9,
        min_p: 0.01,
        top_n_sigma: 3.0,
        frequency_penalty: 0.5,
        ..SamplingParams::greedy()
    }
}
