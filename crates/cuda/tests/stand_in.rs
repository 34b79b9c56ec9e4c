//! What only the stand-in driver can show: which calls a step makes, and that whatever fails is told in words, loses
//! nothing silently and hangs nobody.
#![allow(clippy::unwrap_used)] // Tests, and what they share.

mod harness;

use cleave_cuda::{CudaOps, CudaOptions, CudaPack, Device};
use cleave_domain::{
    BlockIndex, LogitsWanted, OpenSlot, Sampling, Segment, SlotIndex, StepPlan, StepResult,
};
use cleave_emulator::StandIn;
use cleave_engine::checkpoint::Checkpoint;
use cleave_engine::ops::{
    Batch, BatchSegment, DrawRule, HeadShape, KvType, Ops, Pass, PoolShape, Precision, Wanted,
};
use cleave_engine::synth::synth;
use cleave_engine::{Engine, EngineError, EngineLimits, ModelEngine, Weights};
use std::path::Path;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

const SLOTS: u32 = 3;
/// Blocks of a sequence, of 16 tokens.
const TABLE: u32 = 4;
const PROMPT: u32 = 5;

const LIMITS: EngineLimits = EngineLimits {
    block_tokens: 16,
    blocks_count: SLOTS * TABLE,
    slots_count: SLOTS,
    step_tokens_max: 64,
};

/// The stand-in counts and fails for the whole process: one test at a time.
struct Alone {
    stand_in: StandIn,
    _guard: MutexGuard<'static, ()>,
}

impl Drop for Alone {
    fn drop(&mut self) {
        self.stand_in.faults("");
    }
}

fn alone() -> Option<Alone> {
    static ONE: Mutex<()> = Mutex::new(());
    let guard = ONE.lock().unwrap_or_else(PoisonError::into_inner);
    let Some(stand_in) = harness::stand_in() else {
        eprintln!("skipped: needs the stand-in driver, so g++ on x86-64 Linux");
        return None;
    };
    stand_in.faults("");
    Some(Alone {
        stand_in,
        _guard: guard,
    })
}

/// A checkpoint whose products and attention go to tensor cores, written once.
fn folder() -> &'static Path {
    static WRITTEN: std::sync::OnceLock<tempfile::TempDir> = std::sync::OnceLock::new();
    let written = WRITTEN.get_or_init(|| {
        let folder = tempfile::tempdir().unwrap();
        synth("tiny-llama-64", folder.path(), 3, &mut |_| {}).unwrap();
        folder
    });
    written.path()
}

/// From nothing: the GPU, weights, an engine.
fn build() -> Result<ModelEngine<CudaOps>, String> {
    let told = |error: &dyn std::fmt::Display| error.to_string();
    let device = Device::open(0).map_err(|error| told(&error))?;
    let checkpoint = Checkpoint::open(folder()).map_err(|error| told(&error))?;
    let pack = CudaPack::new(&device, Precision::Bf16).map_err(|error| told(&error))?;
    let weights = Weights::load(&pack, &checkpoint, None, &mut |_| {});
    let weights = weights.map_err(|error| told(&error))?;
    let options = CudaOptions::new(Precision::Bf16);
    let ops = CudaOps::new(&device, &options).map_err(|error| told(&error))?;
    let engine = ModelEngine::new(ops, Arc::new(weights), LIMITS);
    engine.map_err(|error| told(&error))
}

#[test]
fn a_kv_cache_that_no_kernel_reads_is_refused() {
    let Some(_alone) = alone() else {
        return;
    };
    let device = Device::open(0).unwrap();
    for (precision, kv) in [
        (Precision::Bf16, KvType::Int8PerTokenHead),
        (Precision::F32, KvType::Int8PerTokenHead),
        (Precision::F32, KvType::Fp8E4m3),
    ] {
        let options = CudaOptions {
            kv,
            ..CudaOptions::new(precision)
        };
        let error = CudaOps::new(&device, &options).err().unwrap().to_string();
        assert!(error.contains(kv.name()), "{error}");
        assert!(error.contains("not supported on a GPU"), "{error}");
    }
}

/// All sequences after so many draws: their prompts at first, then a token each.
fn plan(drawn_count: u32) -> StepPlan {
    let open = |slot: u32| OpenSlot {
        slot: SlotIndex(slot),
        sampling: Arc::new(Sampling {
            temperature: 0.9,
            seed: u64::from(slot),
            ..Sampling::greedy()
        }),
        prompt: (0..PROMPT).map(|at| at * 7 + slot).collect(),
        output: Vec::new(),
        stop_tokens: Arc::from([]),
        min_tokens: 0,
    };
    let (position, len) = match drawn_count {
        0 => (0, PROMPT),
        drawn => (PROMPT + drawn - 1, 1),
    };
    let segment = |slot: u32| Segment {
        slot: SlotIndex(slot),
        position,
        len,
        blocks: (slot * TABLE..(slot + 1) * TABLE).map(BlockIndex).collect(),
        logits: LogitsWanted::Sample,
        drafts: Vec::new(),
    };
    StepPlan {
        opens: match drawn_count {
            0 => (0..SLOTS).map(open).collect(),
            _ => Vec::new(),
        },
        segments: (0..SLOTS).map(segment).collect(),
        ..StepPlan::default()
    }
}

/// The first steps, one at a time.
fn steps(engine: &mut dyn Engine, count: u32) -> Result<Vec<StepResult>, EngineError> {
    (0..count).map(|drawn| engine.step(&plan(drawn))).collect()
}

/// The same, each begun before the last one is over.
fn steps_ahead(engine: &mut dyn Engine, count: u32) -> Result<Vec<StepResult>, EngineError> {
    let ahead = engine.overlap().unwrap();
    let mut results = Vec::new();
    for drawn in 0..count {
        ahead.begin(&plan(drawn))?;
        if drawn > 0 {
            results.push(ahead.collect()?);
        }
    }
    results.push(ahead.collect()?);
    Ok(results)
}

/// What a call may not do while steps go on: give or take memory.
fn memory_calls(stand_in: &StandIn) -> [u64; 3] {
    ["alloc", "host_alloc", "free"].map(|what| stand_in.count(what))
}

#[test]
fn steps_ahead_take_no_memory_and_wait_for_nothing_but_results() {
    let Some(Alone { stand_in, .. }) = &alone() else {
        return;
    };
    let mut engine = build().unwrap();
    // Some to take what they need, one to be recorded, one replayed.
    steps_ahead(&mut engine, 6).unwrap();
    let (memory, replays) = (memory_calls(stand_in), stand_in.count("graph_launch"));
    let ahead = engine.overlap().unwrap();
    ahead.begin(&plan(6)).unwrap();
    for drawn in 7..12 {
        let waits = stand_in.count("wait");
        ahead.begin(&plan(drawn)).unwrap();
        // One event, of what is two steps old and over.
        assert_eq!(stand_in.count("wait"), waits + 1, "step {drawn} begins");
        ahead.collect().unwrap();
        assert_eq!(stand_in.count("wait"), waits + 2, "step {drawn} collects");
    }
    ahead.collect().unwrap();
    assert_eq!(memory_calls(stand_in), memory);
    assert_eq!(stand_in.count("graph_launch"), replays + 6);
}

/// Copies were recorded with the pass, and did not happen; and its recording broke whatever waited.
#[test]
fn a_pass_that_failed_while_it_was_recorded_stood_in_the_way_of_copies() {
    let Some(_alone) = alone() else {
        return;
    };
    let device = Device::open(0).unwrap();
    let mut ops = CudaOps::new(&device, &CudaOptions::new(Precision::Bf16)).unwrap();
    let heads = HeadShape {
        query_heads: 1,
        kv_heads: 1,
        head_dim: 64,
    };
    let shape = PoolShape {
        blocks_count: 2,
        layers_count: 1,
        heads,
        block_tokens: 16,
        kv: KvType::Bf16,
    };
    let mut pool = ops.pool(shape).unwrap();
    let batch = Batch {
        tokens: vec![1],
        positions: vec![0],
        segments: vec![BatchSegment {
            rows: 0..1,
            position: 0,
            blocks: 0..1,
        }],
        blocks: vec![BlockIndex(0)],
        ..Batch::default()
    };
    let rule = DrawRule {
        bits: 0,
        heat: 0.0,
        top_k: 0,
        top_p: 1 << 53,
        min_p: 0.0,
        edits: Vec::new(),
    };
    // One to take what it needs, one to be recorded.
    for _ in 0..2 {
        let wanted = Wanted::Tokens(std::slice::from_ref(&rule));
        assert_eq!(ops.begin(&batch, wanted).unwrap(), Pass::Run);
    }
    ops.abandon();
    let wrote = vec![7; shape.block_bytes()];
    ops.write_block(&mut pool, BlockIndex(0), 0, &wrote)
        .unwrap();
    ops.copy_block(&mut pool, BlockIndex(0), BlockIndex(1))
        .unwrap();
    let mut read = vec![0; wrote.len()];
    ops.read_block(&pool, BlockIndex(1), 0, &mut read).unwrap();
    assert_eq!(read, wrote);
}

#[test]
fn memory_that_is_not_there_at_the_start_is_told_with_what_is_free() {
    let Some(Alone { stand_in, .. }) = &alone() else {
        return;
    };
    let told = [
        (
            "alloc",
            "out of GPU memory: ",
            "bytes are free; ask for less",
        ),
        (
            "host_alloc",
            "memory that the GPU can copy from",
            "ulimit -l",
        ),
        (
            "module",
            "CUDA_ERROR_NO_BINARY_FOR_GPU",
            "build it with an nvcc",
        ),
    ];
    for (kind, problem, advice) in told {
        // What was asked for in vain counts as taken.
        let vain = u64::from(kind != "module");
        let taken_and_back = || {
            let [device, host, back] =
                ["alloc", "host_alloc", "free"].map(|what| stand_in.count(what));
            (device + host, back)
        };
        let mut failures = 0;
        let built = (1..200).find_map(|number| {
            // Code from the cache that the driver does not take is compiled again, and then that must be refused too.
            let fault = match kind {
                "module" => format!("{kind}@{number},{kind}@{}", number + 1),
                _ => format!("{kind}@{number}"),
            };
            stand_in.faults(&fault);
            let before = taken_and_back();
            match build() {
                Ok(engine) => Some(engine),
                Err(error) => {
                    assert!(error.contains(problem), "{kind}@{number}: {error}");
                    assert!(error.contains(advice), "{kind}@{number}: {error}");
                    failures += 1;
                    let (taken, back) = taken_and_back();
                    let (taken, back) = (taken - before.0 - vain, back - before.1);
                    assert_eq!(taken, back, "{kind}@{number}");
                    None
                }
            }
        });
        stand_in.faults("");
        let mut engine = built.expect("an engine, once nothing fails");
        assert!(failures > 0, "{kind} was never asked for");
        steps(&mut engine, 2).unwrap();
    }
}

/// Wherever a kernel or a copy fails in steps that overlap: whoever waits is told, and then everybody.
#[test]
fn what_fails_on_the_device_ends_every_step_in_words() {
    let Some(Alone { stand_in, .. }) = &alone() else {
        return;
    };
    let expected = steps(&mut build().unwrap(), 6).unwrap();
    let told = [
        ("launch", "CUDA_ERROR_LAUNCH_FAILED"),
        ("copy", "CUDA_ERROR_ILLEGAL_ADDRESS"),
        // Of a driver newer than the list of results that Cleave was built with.
        ("unlisted", "result 4711"),
    ];
    for (kind, name) in told {
        let (mut strike, mut strikes) = (1, 0);
        loop {
            let mut engine = build().unwrap();
            stand_in.faults(&format!("{kind}@{strike}"));
            let outcome = steps_ahead(&mut engine, 6);
            stand_in.faults("");
            match outcome {
                Ok(results) => {
                    assert_eq!(results, expected, "{kind}@{strike} struck nothing");
                    break;
                }
                Err(EngineError::Lost(problem)) => {
                    assert!(problem.contains(name), "{kind}@{strike}: {problem}");
                    assert!(problem.contains("failed"), "which call: {problem}");
                    assert!(
                        problem.contains("start it again"),
                        "{kind}@{strike}: {problem}"
                    );
                }
                Err(other) => panic!("{kind}@{strike}: {other}"),
            }
            strikes += 1;
            let ahead = engine.overlap().unwrap();
            assert!(ahead.is_done(), "nobody waits for what has failed");
            let after = engine.step(&plan(0));
            assert!(after.is_err(), "{kind}@{strike}: {after:?}");
            // Few of the early ones, fewer of the late ones: the same kernels run in every step.
            strike += strike / 3 + 1;
        }
        assert!(strikes > 5, "{kind} struck {strikes} times");
    }
}

/// A step that finds no memory is refused; the one under way is not touched, and the next one runs.
#[test]
fn a_step_without_memory_leaves_the_others_alone() {
    let Some(Alone { stand_in, .. }) = &alone() else {
        return;
    };
    let expected = steps(&mut build().unwrap(), 2).unwrap();
    let mut failures = 0;
    for number in 1.. {
        let mut engine = build().unwrap();
        let ahead = engine.overlap().unwrap();
        stand_in.faults(&format!("alloc@{number}"));
        let begun = ahead.begin(&plan(0));
        stand_in.faults("");
        match begun {
            Ok(()) => break,
            Err(EngineError::Device(problem)) => {
                assert!(problem.contains("out of GPU memory"), "{problem}");
            }
            Err(other) => panic!("{other}"),
        }
        failures += 1;
        assert_eq!(steps(&mut engine, 2).unwrap(), expected, "alloc@{number}");
    }
    assert!(failures > 0, "a first step takes memory");
}

#[test]
fn an_event_that_is_late_changes_nothing() {
    let Some(Alone { stand_in, .. }) = &alone() else {
        return;
    };
    let expected = steps(&mut build().unwrap(), 2).unwrap();
    let mut engine = build().unwrap();
    let ahead = engine.overlap().unwrap();
    ahead.begin(&plan(0)).unwrap();
    stand_in.faults("event_late@3");
    // Each question lets the stand-in do one piece of work.
    let asked = (0..100_000).find(|_| ahead.is_done());
    assert!(asked.is_some_and(|asked| asked > 3), "{asked:?}");
    ahead.begin(&plan(1)).unwrap();
    assert_eq!(ahead.collect().unwrap(), expected[0]);
    assert_eq!(ahead.collect().unwrap(), expected[1]);
}
