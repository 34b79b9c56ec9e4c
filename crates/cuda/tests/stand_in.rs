//! Tests that only the stand-in driver allows: which calls a step makes, and that every failure
//! returns a described error, loses nothing silently and leaves no caller waiting.
#![allow(clippy::unwrap_used, reason = "a test's helper fails by panicking")]

#[allow(dead_code, reason = "a part of it is used here")]
mod harness;

use cleave_checkpoint::Checkpoint;
use cleave_checkpoint::synth::synth;
use cleave_cuda::{CudaDevice, CudaOps, CudaOptions, CudaWeightLoader};
use cleave_domain::{
    BlockIndex, KvPlane, LogitsWanted, OpenSlot, PlaneLayout, SamplingParams, Segment,
    SegmentState, SlotIndex, StepPlan, StepResult,
};
use cleave_emulator::StandInLibrary;
use cleave_engine::ops::{
    Batch, BatchSegment, DrawRule, HeadShape, KvPoolShape, KvType, Ops, PassMode, PassPurpose,
    Precision,
};
use cleave_engine::{BlockSpan, Engine, EngineError, EngineLimits, ModelEngine, Weights};
use parking_lot::{Mutex, MutexGuard};
use std::path::Path;
use std::sync::Arc;

const SLOTS: u32 = 3;
/// The number of a sequence's blocks, of 16 tokens each.
const TABLE: u32 = 4;
const PROMPT: u32 = 5;
/// State slots, where an engine has them.
const STATES: u32 = SLOTS + 4;

const LIMITS: EngineLimits = EngineLimits {
    block_tokens: 16,
    blocks_count: SLOTS * TABLE,
    states_count: STATES,
    slots_count: SLOTS,
    step_tokens_max: 64,
    windows_count: 0,
};

/// A lock for one test at a time, because the stand-in counts and fails for the whole process.
struct ExclusiveStandIn {
    stand_in: StandInLibrary,
    _guard: MutexGuard<'static, ()>,
}

impl Drop for ExclusiveStandIn {
    fn drop(&mut self) {
        self.stand_in.plan_faults("");
    }
}

fn exclusive_stand_in() -> Option<ExclusiveStandIn> {
    static ONE: Mutex<()> = Mutex::new(());
    let guard = ONE.lock();
    let Some(stand_in) = harness::stand_in() else {
        eprintln!("skipped: needs the stand-in driver, so g++ on x86-64 Linux");
        return None;
    };
    stand_in.plan_faults("");
    Some(ExclusiveStandIn {
        stand_in,
        _guard: guard,
    })
}

/// Returns the folder of a checkpoint whose products and attention use tensor cores; it is written
/// once.
fn folder() -> &'static Path {
    static WRITTEN: std::sync::OnceLock<tempfile::TempDir> = std::sync::OnceLock::new();
    let written = WRITTEN.get_or_init(|| {
        let folder = tempfile::tempdir().unwrap();
        synth("tiny-llama-64", folder.path(), 3, &mut |_| {}).unwrap();
        folder
    });
    written.path()
}

/// Opens the GPU, loads weights, and builds an engine.
fn build() -> Result<ModelEngine<CudaOps>, String> {
    build_with_state(None)
}

/// Builds an engine whose sequences have a state of this layout, which no layer uses.
fn build_with_state(state: Option<PlaneLayout>) -> Result<ModelEngine<CudaOps>, String> {
    let to_text = |error: &dyn std::fmt::Display| error.to_string();
    let device = CudaDevice::open(0).map_err(|error| to_text(&error))?;
    let checkpoint = Checkpoint::open(folder()).map_err(|error| to_text(&error))?;
    let pack = CudaWeightLoader::new(&device, Precision::Bf16).map_err(|error| to_text(&error))?;
    let weights = Weights::load(&pack, &checkpoint, None, &mut |_| {});
    let weights = weights.map_err(|error| to_text(&error))?;
    let options = CudaOptions::new(Precision::Bf16);
    let ops = CudaOps::new(&device, &options).map_err(|error| to_text(&error))?;
    let mut layout = weights.kv_spec(LIMITS.block_tokens, ops.kv_type());
    layout.state = state;
    let engine = ModelEngine::with_layout(ops, Arc::new(weights), &layout, LIMITS);
    engine.map_err(|error| to_text(&error))
}

#[test]
fn a_kv_format_without_kernels_is_refused() {
    let Some(_alone) = exclusive_stand_in() else {
        return;
    };
    let device = CudaDevice::open(0).unwrap();
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

/// Returns the plan of all sequences after so many draws: their prompts at first, then one token
/// each.
fn plan(drawn_count: u32) -> StepPlan {
    let open = |slot: u32| OpenSlot {
        slot: SlotIndex(slot),
        sampling: Arc::new(SamplingParams {
            temperature: 0.9,
            seed: u64::from(slot),
            ..SamplingParams::greedy()
        }),
        prompt: (0..PROMPT).map(|at| at * 7 + slot).collect(),
        output: Vec::new(),
        stop_tokens: Arc::from([]),
        min_tokens: 0,
        adapter: None,
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
        state: None,
        window: None,
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

/// Runs the first steps one at a time.
fn steps(engine: &mut dyn Engine, count: u32) -> Result<Vec<StepResult>, EngineError> {
    (0..count).map(|drawn| engine.step(&plan(drawn))).collect()
}

/// Runs the same steps, each begun before the previous one has ended.
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

/// Returns the counts of the calls that allocate or free memory, which no step may make once it is
/// warm.
fn memory_calls(stand_in: &StandInLibrary) -> [u64; 3] {
    ["alloc", "host_alloc", "free"].map(|call| stand_in.calls_count(call))
}

#[test]
fn overlapping_steps_allocate_nothing_and_await_results() {
    let Some(ExclusiveStandIn { stand_in, .. }) = &exclusive_stand_in() else {
        return;
    };
    let mut engine = build().unwrap();
    // Some steps allocate, one is recorded, one is replayed.
    steps_ahead(&mut engine, 6).unwrap();
    let (memory, replays) = (memory_calls(stand_in), stand_in.calls_count("graph_launch"));
    let ahead = engine.overlap().unwrap();
    ahead.begin(&plan(6)).unwrap();
    for drawn in 7..12 {
        let waits = stand_in.calls_count("wait");
        ahead.begin(&plan(drawn)).unwrap();
        // The only wait is for the event of the step before the last one, which has ended.
        assert_eq!(
            stand_in.calls_count("wait"),
            waits + 1,
            "step {drawn} begins"
        );
        ahead.collect().unwrap();
        assert_eq!(
            stand_in.calls_count("wait"),
            waits + 2,
            "step {drawn} collects"
        );
    }
    ahead.collect().unwrap();
    assert_eq!(memory_calls(stand_in), memory);
    assert_eq!(stand_in.calls_count("graph_launch"), replays + 6);
}

/// Copies during a recording were recorded instead of run, and a wait during it made the recording
/// fail.
#[test]
fn copies_work_after_a_pass_fails_while_recorded() {
    let Some(_alone) = exclusive_stand_in() else {
        return;
    };
    let device = CudaDevice::open(0).unwrap();
    let mut ops = CudaOps::new(&device, &CudaOptions::new(Precision::Bf16)).unwrap();
    let heads = HeadShape {
        query_heads: 1,
        kv_heads: 1,
        head_dim: 64,
    };
    let shape = KvPoolShape::uniform(heads, 1, 16, 2, KvType::Bf16);
    let mut pool = ops.pool(shape.clone()).unwrap();
    let batch = Batch {
        tokens: vec![1],
        positions: vec![0],
        segments: vec![BatchSegment {
            rows: 0..1,
            position: 0,
            blocks: 0..1,
            state: None,
        }],
        blocks: vec![BlockIndex(0)],
        ..Batch::default()
    };
    let rule = Some(DrawRule::greedy());
    // One step allocates, one is recorded.
    for _ in 0..2 {
        let purpose = PassPurpose::DrawEveryRow(std::slice::from_ref(&rule));
        assert_eq!(ops.begin(&batch, purpose, &[]).unwrap(), PassMode::Execute);
    }
    ops.abandon_pass();
    let wrote = vec![7; shape.block_bytes()];
    let plane = KvPlane::Blocks;
    let whole = |block| shape.whole(plane, BlockIndex(block));
    ops.write_block(&mut pool, whole(0), &wrote).unwrap();
    ops.copy_block(&mut pool, plane, BlockIndex(0), BlockIndex(1))
        .unwrap();
    let mut read = vec![0; wrote.len()];
    ops.read_block(&pool, whole(1), &mut read).unwrap();
    assert_eq!(read, wrote);
}

/// Decode steps are recorded and replayed: copies that became part of a recording would be repeated
/// with the slots of the step that was recorded.
#[test]
fn recorded_steps_copy_the_states_of_their_own_plan() {
    let Some(ExclusiveStandIn { stand_in, .. }) = &exclusive_stand_in() else {
        return;
    };
    let layout = PlaneLayout::packed([(100, 24), (101, 40)]);
    let mut engine = build_with_state(Some(layout)).unwrap();
    let whole = |slot| BlockSpan {
        plane: KvPlane::State,
        block: BlockIndex(slot),
        offset: 0,
        len: 64,
    };
    let content = |engine: &ModelEngine<CudaOps>, slot| {
        let mut bytes = [0; 64];
        engine.read_block(whole(slot), &mut bytes).unwrap();
        assert!(bytes.iter().all(|byte| *byte == bytes[0]), "slot {slot}");
        bytes[0]
    };
    for slot in 0..STATES {
        let bytes = [slot as u8 + 1; 64];
        engine.write_block(whole(slot), &bytes).unwrap();
    }
    let replays = stand_in.calls_count("graph_launch");
    for drawn in 0..6 {
        let mut plan = plan(drawn);
        for (sequence, segment) in (0..).zip(&mut plan.segments) {
            segment.state = Some(SegmentState {
                slot: BlockIndex(sequence),
                restore: None,
                snapshot: None,
            });
        }
        let states = |plan: &mut StepPlan, restore: u32, snapshot: u32| {
            let state = plan.segments[0].state.as_mut().unwrap();
            state.restore = Some(BlockIndex(restore));
            state.snapshot = Some(BlockIndex(snapshot));
        };
        match drawn {
            // The last slots are never written by a segment.
            4 => states(&mut plan, STATES - 1, SLOTS),
            5 => states(&mut plan, STATES - 2, SLOTS + 1),
            _ => {}
        }
        let ahead = engine.overlap().unwrap();
        ahead.begin(&plan).unwrap();
        ahead.collect().unwrap();
        let expected = match drawn {
            0..4 => [0, 0, 0, 4, 5],
            4 => [STATES, 0, 0, STATES, 5],
            _ => [STATES - 1, 0, 0, STATES, STATES - 1],
        };
        let found: Vec<u32> = (0..5).map(|slot| content(&engine, slot).into()).collect();
        assert_eq!(found, expected, "after step {drawn}");
    }
    assert!(stand_in.calls_count("graph_launch") > replays + 2);
}

#[test]
fn a_failed_start_reports_the_cause_and_frees_its_memory() {
    let Some(ExclusiveStandIn { stand_in, .. }) = &exclusive_stand_in() else {
        return;
    };
    let cases = [
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
    for (kind, problem, advice) in cases {
        // The stand-in counts the failed call as an allocation.
        let failed_calls = u64::from(kind != "module");
        let allocated_and_freed = || {
            let [device, host, freed] =
                ["alloc", "host_alloc", "free"].map(|call| stand_in.calls_count(call));
            (device + host, freed)
        };
        let mut failures = 0;
        let built = (1..200).find_map(|number| {
            // Cached code that the driver refuses is compiled again, so the driver must refuse the
            // compiled code too.
            let fault = match kind {
                "module" => format!("{kind}@{number},{kind}@{}", number + 1),
                _ => format!("{kind}@{number}"),
            };
            stand_in.plan_faults(&fault);
            let before = allocated_and_freed();
            match build() {
                Ok(engine) => Some(engine),
                Err(error) => {
                    assert!(error.contains(problem), "{kind}@{number}: {error}");
                    assert!(error.contains(advice), "{kind}@{number}: {error}");
                    failures += 1;
                    let (allocated, freed) = allocated_and_freed();
                    let (allocated, freed) =
                        (allocated - before.0 - failed_calls, freed - before.1);
                    assert_eq!(allocated, freed, "{kind}@{number}");
                    None
                }
            }
        });
        stand_in.plan_faults("");
        let mut engine = built.expect("an engine, once nothing fails");
        assert!(failures > 0, "{kind} was never asked for");
        steps(&mut engine, 2).unwrap();
    }
}

/// A kernel or a copy may fail anywhere in overlapping steps: the waiting call returns the error,
/// and so do all later ones.
#[test]
fn a_device_failure_is_reported_by_every_later_step() {
    let Some(ExclusiveStandIn { stand_in, .. }) = &exclusive_stand_in() else {
        return;
    };
    let expected = steps(&mut build().unwrap(), 6).unwrap();
    let cases = [
        ("launch", "CUDA_ERROR_LAUNCH_FAILED"),
        ("copy", "CUDA_ERROR_ILLEGAL_ADDRESS"),
        // The result is one of a driver newer than Cleave's list of results.
        ("unlisted", "result 4711"),
    ];
    for (kind, name) in cases {
        let (mut strike, mut strikes) = (1, 0);
        loop {
            let mut engine = build().unwrap();
            stand_in.plan_faults(&format!("{kind}@{strike}"));
            let outcome = steps_ahead(&mut engine, 6);
            stand_in.plan_faults("");
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
            // The test strikes ever fewer of the later calls, because the same kernels run in every
            // step.
            strike += strike / 3 + 1;
        }
        assert!(strikes > 5, "{kind} struck {strikes} times");
    }
}

/// A step without memory returns an error; the step in flight is unaffected, and the next one runs.
#[test]
fn a_step_refused_for_memory_leaves_the_engine_usable() {
    let Some(ExclusiveStandIn { stand_in, .. }) = &exclusive_stand_in() else {
        return;
    };
    let expected = steps(&mut build().unwrap(), 2).unwrap();
    let mut failures = 0;
    for number in 1.. {
        let mut engine = build().unwrap();
        let ahead = engine.overlap().unwrap();
        stand_in.plan_faults(&format!("alloc@{number}"));
        let begun = ahead.begin(&plan(0));
        stand_in.plan_faults("");
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
fn a_late_event_changes_no_result() {
    let Some(ExclusiveStandIn { stand_in, .. }) = &exclusive_stand_in() else {
        return;
    };
    let expected = steps(&mut build().unwrap(), 2).unwrap();
    let mut engine = build().unwrap();
    let ahead = engine.overlap().unwrap();
    ahead.begin(&plan(0)).unwrap();
    stand_in.plan_faults("event_late@3");
    // Each query lets the stand-in do one piece of work.
    let queries_count = (0..100_000).find(|_| ahead.is_done());
    assert!(
        queries_count.is_some_and(|queries_count| queries_count > 3),
        "{queries_count:?}"
    );
    ahead.begin(&plan(1)).unwrap();
    assert_eq!(ahead.collect().unwrap(), expected[0]);
    assert_eq!(ahead.collect().unwrap(), expected[1]);
}
