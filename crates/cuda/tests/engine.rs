//! Tests of the whole engine on a GPU: reference goldens, path independence, and tokens drawn on
//! the device against those that the host draws from the same logits.

use crate::harness;
use cleave_checkpoint::Checkpoint;
use cleave_checkpoint::synth::{QuantizeOptions, QuantizedLayout, quantize, synth};
use cleave_cpu::{CpuOps, CpuOptions, CpuWeightLoader};
use cleave_cuda::{CudaOps, CudaOptions, CudaWeightLoader};
use cleave_domain::{
    BlockIndex, LogitsWanted, OpenSlot, SamplingParams, Segment, SlotIndex, StepId, StepPlan,
};
use cleave_engine::conformance::poisoned;
use cleave_engine::ops::{KvType, Precision, Quantize};
use cleave_engine::{BlockSpan, Engine, EngineLimits, ModelEngine, Weights, conformance};
use serde_json::json;
use std::path::{Path, PathBuf};
use std::sync::Arc;

/// Returns the test data's folder by cargo's variable at run time, so that this program finds it on
/// a machine that it was not built on.
pub(crate) fn testdata() -> PathBuf {
    let folder = std::env::var("CARGO_MANIFEST_DIR");
    let folder = folder.as_deref().unwrap_or(env!("CARGO_MANIFEST_DIR"));
    Path::new(folder).join("../../testdata")
}

fn has_experts(dir: &Path) -> bool {
    let checkpoint = Checkpoint::open(dir).unwrap();
    let mut layers = checkpoint.spec().layers.iter();
    layers.any(|layer| layer.experts().is_some())
}

/// The checkpoints with goldens of which `is_meant` is true.
fn folders(is_meant: impl Fn(&Path) -> bool) -> Vec<PathBuf> {
    let mut folders: Vec<PathBuf> = std::fs::read_dir(testdata())
        .unwrap()
        .map(|entry| entry.unwrap().path())
        .filter(|path| path.join("goldens.json").exists() && is_meant(path))
        .collect();
    folders.sort();
    assert!(!folders.is_empty(), "testdata has goldens");
    folders
}

/// A copy of a checkpoint whose goldens are every `step`-th alone.
pub(crate) fn with_fewer_prompts(folder: &Path, step: usize) -> tempfile::TempDir {
    let copy = tempfile::tempdir().unwrap();
    for entry in std::fs::read_dir(folder).unwrap() {
        let path = entry.unwrap().path();
        std::fs::copy(&path, copy.path().join(path.file_name().unwrap())).unwrap();
    }
    let goldens = std::fs::read(folder.join("goldens.json")).unwrap();
    let mut goldens: serde_json::Value = serde_json::from_slice(&goldens).unwrap();
    let prompts = goldens["prompts"].as_array().unwrap().iter();
    goldens["prompts"] = prompts.step_by(step).cloned().collect();
    let text = goldens.to_string();
    std::fs::write(copy.path().join("goldens.json"), text).unwrap();
    copy
}

fn build(
    dir: &Path,
    limits: EngineLimits,
    options: CudaOptions,
) -> Result<Box<dyn Engine>, String> {
    build_rounded(dir, limits, options, None)
}

fn build_rounded(
    dir: &Path,
    limits: EngineLimits,
    options: CudaOptions,
    quantize: Option<Quantize>,
) -> Result<Box<dyn Engine>, String> {
    let to_text = |error: &dyn std::fmt::Display| error.to_string();
    let device = harness::device().expect("asked for only where there is one");
    let checkpoint = Checkpoint::open(dir).map_err(|error| to_text(&error))?;
    let pack = CudaWeightLoader::new(&device, options.precision)
        .map_err(|error| to_text(&error))?
        .with_quantize(quantize);
    let weights =
        Weights::load(&pack, &checkpoint, None, &mut |_| {}).map_err(|error| to_text(&error))?;
    let ops = CudaOps::new(&device, &options).map_err(|error| to_text(&error))?;
    let engine =
        ModelEngine::new(ops, Arc::new(weights), limits).map_err(|error| to_text(&error))?;
    Ok(Box::new(engine))
}

/// The same limits with a window plane.
fn windowed(limits: EngineLimits) -> EngineLimits {
    EngineLimits {
        windows_count: 64.max(limits.blocks_count),
        ..limits
    }
}

#[test]
fn cuda_f32_matches_the_reference_goldens() {
    let test = "engine::cuda_f32_matches_the_reference_goldens";
    if harness::device_of_its_own(test).is_none() {
        return;
    }
    for folder in folders(|dir| !has_experts(dir)) {
        let copy = with_fewer_prompts(&folder, harness::prompts_step(4));
        let options = CudaOptions::new(Precision::F32);
        conformance::goldens(copy.path(), &|dir, limits| build(dir, limits, options)).unwrap();
    }
}

/// The same with a window plane, whose given-up blocks are overwritten before each step.
// Invariant: I58.
#[test]
fn given_up_windows_change_no_token_on_a_gpu() {
    let test = "engine::given_up_windows_change_no_token_on_a_gpu";
    if harness::device_of_its_own(test).is_none() {
        return;
    }
    let options = CudaOptions::new(Precision::F32);
    for name in ["exaone4", "gemma3", "gpt-oss", "mistral", "phi3"] {
        let copy = with_fewer_prompts(&testdata().join(name), harness::prompts_step(7));
        let build = |dir: &Path, limits| build(dir, windowed(limits), options).map(poisoned);
        conformance::goldens(copy.path(), &build).unwrap_or_else(|error| panic!("{name}: {error}"));
    }
}

#[test]
fn cuda_f32_experts_match_the_reference_goldens() {
    let test = "engine::cuda_f32_experts_match_the_reference_goldens";
    if harness::device_of_its_own(test).is_none() {
        return;
    }
    for folder in folders(has_experts) {
        let copy = with_fewer_prompts(&folder, harness::prompts_step(7));
        let options = CudaOptions::new(Precision::F32);
        conformance::goldens(copy.path(), &|dir, limits| build(dir, limits, options)).unwrap();
    }
}

/// Vectors of an f32 engine have the reference's logits. Those of a bf16 engine, whose rows have 16
/// bits, do not depend on the path.
#[test]
fn cuda_vectors_match_the_reference_on_every_path() {
    let test = "engine::cuda_vectors_match_the_reference_on_every_path";
    if harness::device_of_its_own(test).is_none() {
        return;
    }
    let folder = testdata().join("qwen3");
    let few = with_fewer_prompts(&folder, harness::prompts_step(7));
    let f32 = |dir: &Path, limits| build(dir, limits, CudaOptions::new(Precision::F32));
    conformance::pooling(few.path(), &f32).unwrap();
    // The emulator takes half a minute for long texts.
    conformance::vectors(&folder, 40, &f32).unwrap();
    let bf16 = |dir: &Path, limits| build(dir, limits, CudaOptions::new(Precision::Bf16));
    conformance::pooled_paths(few.path(), &bf16).unwrap();
}

/// The test covers windows and chunks in bf16; the emulator would take an hour for every path of
/// every architecture.
#[test]
fn cuda_bf16_answers_are_path_independent() {
    let test = "engine::cuda_bf16_answers_are_path_independent";
    if harness::device_of_its_own(test).is_none() {
        return;
    }
    let options = CudaOptions::new(Precision::Bf16);
    let in_one = |dir: &Path, limits| build(dir, limits, options);
    conformance::path_independence(&testdata().join("mistral"), &in_one).unwrap();
    if harness::is_real() {
        let in_two = |dir: &Path, limits| build(dir, windowed(limits), options);
        conformance::path_independence(&testdata().join("gemma3"), &in_two).unwrap();
    }
}

/// The prompt's step draws nothing, so the host fetches no token and never waits for the step.
#[test]
fn a_block_is_copied_only_after_its_step_has_computed_it() {
    let Some(stand_in) = harness::device().and_then(|_| harness::stand_in()) else {
        return;
    };
    let limits = EngineLimits {
        block_tokens: 16,
        blocks_count: 8,
        states_count: 0,
        slots_count: 1,
        step_tokens_max: 32,
        windows_count: 0,
    };
    let folder = testdata().join("llama3");
    for seed in 1..=4 {
        // The seed decides which of the two streams is slower.
        stand_in.set_seed(seed);
        let mut engine = build(&folder, limits, CudaOptions::new(Precision::Bf16)).unwrap();
        let blocks = engine.blocks().unwrap();
        let len = engine.describe().capacity.block_bytes as usize;
        let prompt: Vec<u32> = (3..100).collect();
        for chunk in 0..3u32 {
            let opens = (chunk == 0).then(|| OpenSlot {
                slot: SlotIndex(0),
                sampling: Arc::new(SamplingParams::greedy()),
                prompt: Arc::from(&prompt[..]),
                output: Vec::new(),
                stop_tokens: Arc::from([]),
                min_tokens: 0,
                adapter: None,
            });
            let segment = Segment {
                slot: SlotIndex(0),
                position: 32 * chunk,
                len: 32,
                blocks: (0..8).map(BlockIndex).collect(),
                logits: LogitsWanted::No,
                drafts: Vec::new(),
                state: None,
                window: None,
            };
            let plan = StepPlan {
                step: StepId(u64::from(chunk)),
                opens: opens.into_iter().collect(),
                segments: vec![segment],
                poolings: Vec::new(),
            };
            engine.step(&plan).unwrap();
            for block in [2 * chunk, 2 * chunk + 1].map(BlockIndex) {
                let span = BlockSpan::of_block(block, 0, len);
                let (mut beside, mut after) = (vec![0; len], vec![0; len]);
                blocks.read(&mut [(span, &mut beside)]).unwrap();
                engine.read_block(span, &mut after).unwrap();
                assert!(after.iter().any(|byte| *byte != 0));
                assert!(beside == after, "{block} with seed {seed}");
            }
        }
    }
    stand_in.set_seed(1);
}

// Invariant: I11.
/// The answers are the same in every order that the device may choose, with two steps in flight and
/// blocks copied beside them.
#[test]
fn overlapping_cuda_steps_draw_the_same_tokens_as_alone() {
    let test = "engine::overlapping_cuda_steps_draw_the_same_tokens_as_alone";
    if harness::device_of_its_own(test).is_none() {
        return;
    }
    let build = |dir: &Path, limits| build(dir, limits, CudaOptions::new(Precision::Bf16));
    for seed in 0..3 {
        if let Some(stand_in) = harness::stand_in() {
            stand_in.set_seed(seed);
        }
        conformance::overlap(&testdata().join("llama2"), &build, seed, 50).unwrap();
    }
}

/// Compares answers of tensor-core kernels with the CPU backend's, as far as an emulator can in a
/// minute: attention, products, recorded steps; chunks, batches and hand-off; steps ahead.
fn answers_of_tensor_cores(test: &str, shape: &str) {
    if harness::device_of_its_own(test).is_none() {
        return;
    }
    let folder = tempfile::tempdir().unwrap();
    synth(shape, folder.path(), 7, &mut |_| {}).unwrap();
    write_prompts(folder.path());
    let build_cuda = |dir: &Path, limits| build(dir, limits, CudaOptions::new(Precision::Bf16));
    conformance::agreement(folder.path(), [&build_cuda, &processor], 0.03).unwrap();
    conformance::path_independence(folder.path(), &build_cuda).unwrap();
    conformance::overlap(folder.path(), &build_cuda, 1, 30).unwrap();
}

/// Writes a file of goldens that contains prompts alone.
fn write_prompts(folder: &Path) {
    let prompts = [3usize, 16, 17, 37].map(|len| {
        let ids: Vec<usize> = (0..len).map(|at| (at * 37 + len) % 500).collect();
        json!({"prompt_tokens": ids, "tokens": [], "first_top_logits": [], "last_top_logits": []})
    });
    let goldens = json!({"prompts": prompts}).to_string();
    std::fs::write(folder.join("goldens.json"), goldens).unwrap();
}

/// The model has four-bit weights and eight-bit keys and values, on tensor cores.
#[test]
fn quantised_weights_with_fp8_kv_are_path_independent() {
    let test = "engine::quantised_weights_with_fp8_kv_are_path_independent";
    if harness::device_of_its_own(test).is_none() {
        return;
    }
    let (dense, quantized) = (tempfile::tempdir().unwrap(), tempfile::tempdir().unwrap());
    synth("tiny-llama-64", dense.path(), 7, &mut |_| {}).unwrap();
    let quantizing = QuantizeOptions {
        layout: QuantizedLayout::Awq,
        group: 128,
    };
    quantize(dense.path(), quantized.path(), quantizing, &mut |_| {}).unwrap();
    write_prompts(quantized.path());
    let options = CudaOptions {
        kv: KvType::Fp8E4m3,
        ..CudaOptions::new(Precision::Bf16)
    };
    let build = |dir: &Path, limits| build(dir, limits, options);
    conformance::path_independence(quantized.path(), &build).unwrap();
    conformance::overlap(quantized.path(), &build, 1, 30).unwrap();
}

/// A checkpoint that is rounded when it is loaded, and one that was rounded when it was written.
#[test]
fn rounding_at_load_gives_the_answers_of_a_rounded_checkpoint() {
    let test = "engine::rounding_at_load_gives_the_answers_of_a_rounded_checkpoint";
    if harness::device_of_its_own(test).is_none() {
        return;
    }
    let dense = tempfile::tempdir().unwrap();
    synth("tiny-llama-64", dense.path(), 7, &mut |_| {}).unwrap();
    write_prompts(dense.path());
    for (rounding, layout) in [
        (Quantize::Int8, QuantizedLayout::Int8),
        (Quantize::Fp8, QuantizedLayout::Fp8),
        (Quantize::Mxfp4, QuantizedLayout::Mxfp4),
        (Quantize::Nvfp4, QuantizedLayout::ModelOptNvfp4),
    ] {
        let written = tempfile::tempdir().unwrap();
        let quantizing = QuantizeOptions { layout, group: 1 };
        quantize(dense.path(), written.path(), quantizing, &mut |_| {}).unwrap();
        let options = CudaOptions::new(Precision::Bf16);
        let at_load = |dir: &Path, limits| build_rounded(dir, limits, options, Some(rounding));
        let before = |_: &Path, limits| build(written.path(), limits, options);
        conformance::agreement(dense.path(), [&at_load, &before], 0.0).unwrap();
    }
}

fn processor(dir: &Path, limits: EngineLimits) -> Result<Box<dyn Engine>, String> {
    let options = CpuOptions {
        threads: 1,
        ..CpuOptions::new(Precision::Bf16)
    };
    let checkpoint = Checkpoint::open(dir).map_err(|error| error.to_string())?;
    let pack = CpuWeightLoader::new(&options);
    let weights = Weights::load(&pack, &checkpoint, None, &mut |_| {});
    let weights = weights.map_err(|error| error.to_string())?;
    let ops = CpuOps::new(&options).map_err(|error| error.to_string())?;
    let engine = ModelEngine::new(ops, Arc::new(weights), limits);
    Ok(Box::new(engine.map_err(|error| error.to_string())?))
}

#[test]
fn tensor_core_heads_of_64_match_the_cpu_on_every_path() {
    let test = "engine::tensor_core_heads_of_64_match_the_cpu_on_every_path";
    answers_of_tensor_cores(test, "tiny-llama-64");
}

/// Experts and sinks in bf16, in chunks, batches and recorded steps. The CPU's answers are not
/// compared: a router whose logits are nearly equal chooses other experts after another rounding.
#[test]
fn answers_of_experts_do_not_depend_on_the_path() {
    let test = "engine::answers_of_experts_do_not_depend_on_the_path";
    if harness::device_of_its_own(test).is_none() {
        return;
    }
    for shape in ["tiny-qwen3-moe", "tiny-gpt-oss"] {
        let folder = tempfile::tempdir().unwrap();
        synth(shape, folder.path(), 7, &mut |_| {}).unwrap();
        write_prompts(folder.path());
        let build = |dir: &Path, limits| build(dir, limits, CudaOptions::new(Precision::Bf16));
        conformance::path_independence(folder.path(), &build).unwrap();
        conformance::overlap(folder.path(), &build, 1, 30).unwrap();
    }
}

#[test]
fn tensor_core_heads_of_128_match_the_cpu_on_every_path() {
    let test = "engine::tensor_core_heads_of_128_match_the_cpu_on_every_path";
    answers_of_tensor_cores(test, "tiny-qwen3-128");
}
