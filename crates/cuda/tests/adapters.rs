//! Adapters on a GPU, compared with the reference's goldens and with each sequence alone; and their
//! slots in memory.

use crate::engine::{testdata, with_fewer_prompts};
use crate::harness;
use cleave_checkpoint::{AdapterTarget, Checkpoint};
use cleave_cuda::{CudaAdapterLoader, CudaOps, CudaOptions, CudaWeightLoader, adapter_bytes_max};
use cleave_domain::{
    AdapterId, BlockIndex, LogitsWanted, OpenSlot, SamplingParams, Segment, SlotIndex, StepPlan,
    TokenId,
};
use cleave_engine::conformance::{adapter_goldens, mixed_adapters};
use cleave_engine::ops::{Precision, Quantize};
use cleave_engine::{AdapterTable, Engine, EngineLimits, ModelEngine, Weights};
use std::path::{Path, PathBuf};
use std::sync::Arc;

const RANK_MAX: usize = 64;
/// Adapters of experts, which a GPU refuses, each with its checkpoint.
const OF_EXPERTS: [(&str, &str); 4] = [
    ("gpt-oss-params", "gpt-oss"),
    ("mixtral-params", "mixtral"),
    ("qwen3-moe-each", "qwen3-moe"),
    ("qwen3-moe-params", "qwen3-moe"),
];

fn adapter(name: &str) -> PathBuf {
    testdata().join("adapters").join(name)
}

/// An engine with room for `loras_max` adapters.
fn build(
    dir: &Path,
    limits: EngineLimits,
    precision: Precision,
    quantize: Option<Quantize>,
    loras_max: usize,
) -> Result<Box<dyn Engine>, String> {
    let to_text = |error: &dyn std::fmt::Display| error.to_string();
    let device = harness::device().expect("asked for only where there is one");
    let checkpoint = Checkpoint::open(dir).map_err(|error| to_text(&error))?;
    let pack = CudaWeightLoader::new(&device, precision).map_err(|error| to_text(&error))?;
    let pack = pack.with_quantize(quantize);
    let weights = Weights::load(&pack, &checkpoint, None, &mut |_| {});
    let weights = Arc::new(weights.map_err(|error| to_text(&error))?);
    let spec = weights.spec().clone();
    let loader = CudaAdapterLoader::new(&device, &spec, loras_max, RANK_MAX);
    let loader = loader.map_err(|error| to_text(&error))?;
    let target = AdapterTarget::of(&checkpoint);
    let table = Arc::new(AdapterTable::new(loader, spec, target, RANK_MAX));
    let options = CudaOptions::new(precision);
    let ops = CudaOps::new(&device, &options).map_err(|error| to_text(&error))?;
    let engine = ModelEngine::new(ops, weights, limits).map_err(|error| to_text(&error))?;
    Ok(Box::new(engine.with_adapters(table)))
}

/// The emulator takes a second for each prompt.
#[test]
fn cuda_f32_adapters_match_the_reference_goldens() {
    let test = "adapters::cuda_f32_adapters_match_the_reference_goldens";
    if harness::device_of_its_own(test).is_none() {
        return;
    }
    let folders = std::fs::read_dir(testdata().join("adapters")).unwrap();
    let mut folders: Vec<PathBuf> = folders.map(|entry| entry.unwrap().path()).collect();
    folders.sort();
    assert!(folders.len() >= 10, "testdata has adapters");
    for folder in folders {
        let name = folder.file_name().unwrap().to_str().unwrap();
        let of_experts = OF_EXPERTS.iter().find(|(adapter, _)| *adapter == name);
        let plain = name.split_once('-').map_or(name, |(base, _)| base);
        let plain = if name == "qwen3-moe" { name } else { plain };
        let base = of_experts.map_or(plain, |(_, base)| base);
        let copy = with_fewer_prompts(&folder, harness::prompts_step(4));
        let build = |dir: &Path, limits| build(dir, limits, Precision::F32, None, 1);
        let compared = adapter_goldens(&testdata().join(base), copy.path(), &build);
        match of_experts {
            None => compared.unwrap(),
            Some(_) => {
                let error = compared.unwrap_err();
                assert!(error.contains("run on the processor only"), "{error}");
            }
        }
    }
}

/// Several adapters of one model in one step, beside sequences of the model alone; in decode steps
/// one recording serves them all.
// Invariant: I11.
#[test]
fn cuda_sequences_of_several_adapters_are_path_independent() {
    let test = "adapters::cuda_sequences_of_several_adapters_are_path_independent";
    if harness::device_of_its_own(test).is_none() {
        return;
    }
    let names = ["llama3-all", "llama3-qv", "llama3-third"].map(adapter);
    let names: Vec<&Path> = names.iter().map(PathBuf::as_path).collect();
    for (precision, quantize) in [
        (Precision::F32, None),
        (Precision::Bf16, None),
        (Precision::Bf16, Some(Quantize::Int4)),
    ] {
        let build = |dir: &Path, limits| build(dir, limits, precision, quantize, 3);
        mixed_adapters(&testdata().join("llama3"), &names, &build)
            .unwrap_or_else(|error| panic!("{precision:?} {quantize:?}: {error}"));
    }
}

const LIMITS: EngineLimits = EngineLimits {
    block_tokens: 16,
    blocks_count: 4,
    states_count: 0,
    windows_count: 0,
    slots_count: 2,
    step_tokens_max: 32,
};

/// The plan of the sequences in `slots` after so many draws.
fn plan(drawn_count: u32, slots: &[(u32, Option<AdapterId>)]) -> StepPlan {
    const PROMPT: u32 = 5;
    let (position, len) = match drawn_count {
        0 => (0, PROMPT),
        drawn => (PROMPT + drawn - 1, 1),
    };
    let open = |(slot, adapter): &(u32, Option<AdapterId>)| OpenSlot {
        slot: SlotIndex(*slot),
        sampling: Arc::new(SamplingParams::greedy()),
        prompt: (0..PROMPT).map(|at| at * 7 + 3).collect(),
        output: Vec::new(),
        stop_tokens: Arc::from([]),
        min_tokens: 0,
        adapter: *adapter,
    };
    let segment = |(slot, _): &(u32, Option<AdapterId>)| Segment {
        slot: SlotIndex(*slot),
        position,
        len,
        blocks: (slot * 2..(slot + 1) * 2).map(BlockIndex).collect(),
        logits: LogitsWanted::Sample,
        drafts: Vec::new(),
        window: None,
        state: None,
    };
    StepPlan {
        opens: match drawn_count {
            0 => slots.iter().map(open).collect(),
            _ => Vec::new(),
        },
        segments: slots.iter().map(segment).collect(),
        ..StepPlan::default()
    }
}

/// The tokens of one sequence, each step begun before the previous one has ended; `between` runs
/// while two steps are queued.
fn tokens(
    engine: &mut dyn Engine,
    adapter: Option<AdapterId>,
    between: impl Fn(u32),
) -> Vec<TokenId> {
    let ahead = engine.overlap().unwrap();
    let mut tokens = Vec::new();
    let mut take = |result: cleave_domain::StepResult| tokens.push(result.sampled[0].1.token);
    for drawn in 0..8 {
        ahead.begin(&plan(drawn, &[(0, adapter)])).unwrap();
        between(drawn);
        if drawn > 0 {
            take(ahead.collect().unwrap());
        }
    }
    take(ahead.collect().unwrap());
    tokens
}

/// Two places for four adapters: one is loaded into the place of another while steps are queued.
#[test]
fn a_load_changes_no_step_and_allocates_nothing() {
    let test = "adapters::a_load_changes_no_step_and_allocates_nothing";
    if harness::device_of_its_own(test).is_none() {
        return;
    }
    let names = ["llama3-all", "llama3-qv", "llama3-third"];
    let base = testdata().join("llama3");
    let mut engine = build(&base, LIMITS, Precision::Bf16, None, 2).unwrap();
    let memory = engine.adapters().unwrap();
    let open = |name| memory.open(&adapter(name)).unwrap().adapter;
    let ids = names.map(open);
    // Tokens of each adapter alone, in an engine of its own.
    let alone = names.map(|name| {
        let mut engine = build(&base, LIMITS, Precision::Bf16, None, 1).unwrap();
        let memory = engine.adapters().unwrap();
        let id = memory.open(&adapter(name)).unwrap().adapter;
        memory.load(id).unwrap();
        tokens(engine.as_mut(), Some(id), |_| {})
    });
    let base_alone = tokens(engine.as_mut(), None, |_| {});
    let [first, second, third] = ids;
    // The first use of a larger rank, or of a kind of projection that no adapter changed before, is
    // recorded anew.
    memory.load(third).unwrap();
    assert_eq!(tokens(engine.as_mut(), Some(third), |_| {}), alone[2]);
    memory.unload(third);
    memory.load(first).unwrap();
    memory.load(second).unwrap();
    assert_eq!(tokens(engine.as_mut(), Some(first), |_| {}), alone[0]);
    assert_eq!(tokens(engine.as_mut(), None, |_| {}), base_alone);
    let calls = || {
        let stand_in = harness::stand_in();
        let counts = ["alloc", "host_alloc", "free", "graph_made"];
        stand_in.map(|stand_in| counts.map(|call| stand_in.calls_count(call)))
    };
    let before = calls();
    // Steps of the first one are queued while the second one's place becomes the third one's.
    let swapped = tokens(engine.as_mut(), Some(first), |drawn| match drawn {
        2 => {
            memory.unload(second);
            memory.load(third).unwrap();
        }
        5 => {
            memory.unload(third);
            memory.load(second).unwrap();
        }
        _ => {}
    });
    assert_eq!(swapped, alone[0]);
    // The step that is queued last of a sequence may outlive its adapter on the host.
    let ahead = engine.overlap().unwrap();
    ahead.begin(&plan(0, &[(0, Some(second))])).unwrap();
    memory.unload(second);
    memory.load(third).unwrap();
    assert_eq!(ahead.collect().unwrap().sampled[0].1.token, alone[1][0]);
    assert_eq!(tokens(engine.as_mut(), Some(third), |_| {}), alone[2]);
    assert_eq!(tokens(engine.as_mut(), None, |_| {}), base_alone);
    assert_eq!(calls(), before, "memory and recordings");
    let distinct: std::collections::BTreeSet<_> = alone.iter().chain([&base_alone]).collect();
    assert_eq!(distinct.len(), 4, "the adapters differ");
    // A third place does not exist.
    memory.load(first).unwrap();
    let error = memory.load(second).unwrap_err().to_string();
    assert!(error.contains("raise --max-loras"), "{error}");
}

#[test]
fn a_slot_holds_every_adapter_of_its_rank() {
    let mut largest = 0.0_f64;
    for name in ["llama3-all", "phi3", "cohere", "gemma2", "qwen3-moe"] {
        let base = name.strip_suffix("-all").unwrap_or(name);
        let checkpoint = Checkpoint::open(&testdata().join(base)).unwrap();
        let target = AdapterTarget::of(&checkpoint);
        let open = cleave_checkpoint::Adapter::open(&adapter(name), &target, 64).unwrap();
        let file = adapter(name).join("adapter_model.safetensors");
        let stored = std::fs::metadata(file).unwrap().len() as usize;
        let most = adapter_bytes_max(checkpoint.spec(), open.rank_max());
        assert!(most >= stored * 9 / 10, "{name}: {most} bytes for {stored}");
        largest = largest.max(stored as f64 / most as f64);
    }
    assert!(
        largest > 0.2,
        "slots are not much larger than adapters: {largest}"
    );
}
